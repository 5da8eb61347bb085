//! Tests which texts the redactor removes and which it leaves, in chunks of any size.

use std::sync::OnceLock;

use base64::Engine as _;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const SECRET: &str = "h4sh-Hush+s3cret/9=";
const KEY: &str =
    "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIBl4c\nNotPublic+/4Q==\n-----END EC PRIVATE KEY-----";
const CERTIFICATE: &str =
    "-----BEGIN CERTIFICATE-----\nMIIBkTCCATegAwIB\n-----END CERTIFICATE-----";

fn known(text: &str) -> Secrets {
    Secrets::new([text.to_owned()]).expect("patterns")
}

fn none() -> &'static Secrets {
    static NONE: OnceLock<Secrets> = OnceLock::new();
    NONE.get_or_init(|| known(""))
}

/// A reader of a text that returns at most this number of bytes at once.
struct InChunks<'a>(&'a [u8], usize);

impl Read for InChunks<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.1.min(buffer.len());
        self.0.read(&mut buffer[..length])
    }
}

/// Redacts a text in chunks of this size. Returns the output, and true if the text was copied without an error.
fn redacted(secrets: &Secrets, form: Form, text: &[u8], chunk: usize) -> (Vec<u8>, bool) {
    let mut out = Vec::new();
    let copied = copy(secrets, form, &mut InChunks(text, chunk), &mut out);
    (out, copied.is_ok())
}

fn text(form: Form, text: &str) -> String {
    let (out, is_good) = redacted(none(), form, text.as_bytes(), usize::MAX);
    assert!(is_good, "{text}");
    String::from_utf8(out).expect("text")
}

fn json(form: Form, document: &Value) -> Value {
    serde_json::from_str(&text(form, &document.to_string())).expect("JSON")
}

/// Returns members of Envoy's config dump and of bootstraps that contain `secret`.
fn documents(secret: &str) -> Vec<Value> {
    let header = |name: &str| json!({ "key": name, "value": secret });
    vec![
        json!({ "request_headers_to_add": [{ "header": header("x-anything"), "append_action": "A" }] }),
        json!({ "request_headers_to_add": [{ "header": { "value": secret, "key": "x-any" } }] }),
        json!({ "grpc_service": { "initial_metadata": [header("x-anything")] } }),
        json!({ "httpGet": { "httpHeaders": [{ "name": "X-Any", "value": secret }] } }),
        json!({ "header": { "name": "x-api-key", "string_match": { "exact": secret } } }),
        json!({ "env": [{ "name": "DB_PASSWORD", "value": secret }] }),
        json!({ "private_key": { "inline_string": secret } }),
        json!({ "session_ticket_keys": { "keys": [{ "inline_bytes": secret }] } }),
        json!({ "generic_secret": { "secret": { "inline_string": secret } } }),
        json!({ "generic_secret": { "secrets": { "any": { "inline_string": secret } } } }),
        json!({ "common_tls_context": { "tls_certificates": [{ "password": { "inline_string": secret } }] } }),
        json!({ "configuration": { "value": { "api_token": { "production": secret } } } }),
        json!({ "clientSecret": secret, "accessTokens": ["", secret] }),
        json!({ "key_values": { "ISTIO_META_WASM_IMAGE_PULL_SECRET": json!({ "auth": secret }).to_string() } }),
        json!({ "reason": format!(
            "refused: {{\n  key: \"PULL_SECRET\"\n  value: {}\n}}",
            Value::from(json!({ "auth": secret }).to_string())
        ) }),
        json!({ "PROXY_CONFIG": { "proxyMetadata": { "XDS_HEADER_X_NAME": secret } } }),
        json!({ "inline_string": json!({ "password": secret }).to_string() }),
        json!({ "local_jwks": { "inline_string": json!({ "keys": [{ "kty": "oct", "k": secret }] }).to_string() } }),
        json!({ "jwks": json!({ "keys": [{ "kty": "oct", "k": secret }] }).to_string() }),
        json!({ "inline_string": json!({ "inner": json!({ "password": secret }).to_string() }).to_string() }),
    ]
}

/// Returns lines that contain `secret`. It must not contain blanks.
fn lines(secret: &str) -> Vec<String> {
    vec![
        format!("info\tca\tsent authorization: Bearer {secret} to istiod"),
        format!("Proxy-Authorization: Basic {secret}"),
        format!("cookie: a=b; session={secret}"),
        format!("cookie=a=b; sid={secret}"),
        format!("authorization=Token {secret}"),
        format!("password : {secret}"),
        format!("fetching https://{}@host/path", secret.replace('/', ":")),
        format!("export DB_PASSWORD={secret}"),
        format!("request failed\tpassword={secret} id=7"),
        format!("{{\"level\":\"info\",\"access_token\":\"{secret}\"}}"),
        format!("X-Api-Key: {secret}"),
        format!("refused: {{\\n  key: \"x-any\"\\n  value: \"{secret}\"\\n}}"),
        format!("refused: {{ name: \"x-api-key\" string_match {{ exact: \"{secret}\" }} }}"),
        format!("refused: {{ password {{ inline_string: \"{secret}\" }} }}"),
    ]
}

#[test]
fn secrets_in_json_are_redacted_and_the_rest_is_not() {
    let document = json!({
        "name": "outbound|80||token-service.shop", "type": "EDS",
        "dynamic_active_secrets": [{
            "name": "default", "version_info": "1", "last_updated": "2026",
            "secret": {
                "@type": "type.googleapis.com/Secret", "name": "default",
                "tls_certificate": {
                    "certificate_chain": { "inline_bytes": "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0t" },
                    "private_key": { "inline_bytes": "W3JlZGFjdGVkXQ==" },
                },
                "validation_context": { "match_typed_subject_alt_names": [
                    { "san_type": "URI", "matcher": { "exact": "spiffe://cluster.local/ns/a/sa/b" } },
                ] },
            },
        }],
        "tls_certificate_sds_secret_configs": [{ "name": "default", "sds_config": {
            "resource_api_version": "V3", "initial_fetch_timeout": "0s",
        } }],
        "routes": [{ "match": { "headers": [{ "name": ":authority", "string_match": { "exact": "cart" } }] } }],
        "token_bucket": { "max_tokens": 10, "tokens_per_fill": 5, "fill_interval": "1s" },
        "private_key": { "filename": "/etc/certs/key.pem" },
        "remote_jwks": { "http_uri": { "uri": "https://issuer/keys", "cluster": "issuer" } },
        "empty": { "password": "" },
        "certificates": CERTIFICATE,
        "numbers": [1, -2.5e3, true, null],
    });
    let expected = document.to_string().replace("W3JlZGFjdGVkXQ==", "[redacted]");
    assert_eq!(json(Form::Json, &document).to_string(), expected);
    for document in documents(SECRET) {
        for spelled in [document.to_string(), format!("{document:#}")] {
            let out = text(Form::Json, &spelled);
            assert!(!out.contains(SECRET), "{out}");
            assert!(out.contains("[redacted]"), "{out}");
            serde_json::from_str::<Value>(&out).expect("JSON");
        }
    }
}

#[test]
fn secrets_of_lines_do_not_pass_and_the_rest_does() {
    for line in lines(SECRET) {
        let out = text(Form::Lines, &line);
        assert!(out.contains("[redacted]") && !out.contains(SECRET), "{out}");
    }
    for digits in ["pin_token=84219377", "?token=84219377&a=1", "\\\"pin_token\\\":84219377"] {
        let out = text(Form::Lines, digits);
        assert!(!out.contains("84219377"), "{out}");
    }
    for line in [
        "cluster.token-service.upstream_cx_total: 5",
        "sds.default.secret_update: 7",
        "outbound|80||secret-service::10.0.0.1:80::cx_active::0",
        "error\tca\tcannot read the token: No such file",
        "info\tConnected to spiffe://cluster.local/ns/a over https://host:15012/path?a=b@c",
        "-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN",
        "istio_agent_token_expiry_seconds{a=\"b\"} 5",
        "oci://registry/plugin@sha256:0123",
        "Basic words, eyJust.",
    ] {
        assert_eq!(text(Form::Lines, line), line);
    }
}

/// Returns texts that contain `secret`, as they occur in JSON strings, logs, source code and command lines.
fn texts(secret: &str) -> Vec<String> {
    let within = |value: Value| Value::from(value.to_string()).to_string();
    vec![
        // Names.
        format!("pass={secret}"),
        format!("export SMTP_PASS={secret}"),
        format!("pwd: {secret}"),
        format!("Server=db;Uid=cart;Pwd={secret};"),
        format!("AccountName=a;AccountKey={secret};EndpointSuffix=b"),
        format!("STRIPE_KEY={secret}"),
        format!("master-key: {secret}"),
        format!("sessionKey = '{secret}'"),
        format!("aws_secret_access_key = {secret}"),
        format!("AWS_SESSION_TOKEN={secret}"),
        // JSON within texts, at any depth, also if it is not a complete document.
        json!({ "pass": secret }).to_string(),
        json!([{ "user": "a", "pwd": secret }]).to_string(),
        json!([["--token", secret]]).to_string(),
        json!({ "tokens": ["a", secret] }).to_string(),
        json!({ "a": [json!([{ "api_key": secret }]).to_string()] }).to_string(),
        format!("error in {}", json!({ "tokens": ["a", secret] })),
        format!("error in {}", within(json!({ "tokens": ["a", secret] }))),
        format!("error in {}", within(json!([{ "pwd": secret }]))),
        format!("error in {}", within(json!({ "a": within(json!({ "pass": secret })) }))),
        json!({ "auths": { "registry": { "auth": secret } } }).to_string(),
        json!({ "type": "service_account", "private_key_id": secret }).to_string(),
        // Source code in Lua.
        format!("handle:headers():add(\"authorization\", \"Bearer {secret}\")"),
        format!("handle:headers():replace('x-tenant', '{secret}')"),
        format!("handle:headers():add(\"x-tenant\", prefix .. \"{secret}\")"),
        format!("refused: handle:headers():add(\\\"x-tenant\\\", \\\"{secret}\\\")\\n"),
        format!("local api_key = \"{secret}\""),
        format!("local headers = {{ [\"x-api-key\"] = \"{secret}\" }}"),
        // URLs.
        format!("https://host/path?sig={secret}"),
        format!("https://host/path?a=b&signature={secret}&c=d"),
        format!("https://host/path?key={secret}#top"),
        format!("GET /path?subscription-key={secret} HTTP/1.1"),
        format!("GET /path?Ocp-Apim-Subscription-Key={secret} HTTP/1.1"),
        format!("https://bucket/a?X-Amz-Date=2026&X-Amz-Signature={secret}"),
        format!("https://bucket/a?X-Amz-Security-Token={secret}"),
        format!("https://bucket/a?X-Goog-Signature={secret}"),
        format!("https://host/callback?access_token={secret}"),
        format!("redis://:{secret}@cache:6379/0"),
        format!("cart:{secret}@proxy:3128"),
        format!("dsn cart:{secret}@tcp(db:3306)/shop"),
        // Commands.
        format!("curl -u cart:{secret} host"),
        format!("curl --user cart:{secret} host"),
        format!("curl -H 'X-Api-Key: {secret}' host"),
        format!("vault login --token {secret}"),
        format!("vault login --token={secret}"),
        format!("[\"login\", \"--password\", \"{secret}\", 7:]"),
        // Messages of Envoy.
        format!("headers {{ name: \"x-tenant\" string_match {{ exact: \"{secret}\" }} }}"),
        format!("headers {{\\n name: \\\"x-tenant\\\"\\n prefix_match: \\\"{secret}\\\"\\n}}"),
        format!("header {{ key: \"x-tenant\" value: \"{secret}\" }}"),
        format!(
            "headers {{ name: \"x-tenant\" invert_match: true string_match {{ exact: \"{secret}\" }} }}"
        ),
        format!("name: \"x-api-key\" safe_regex {{ google_re2 {{ }} regex: \"{secret}\" }}"),
        format!("sent Bearer {secret}"),
        format!("Negotiate {secret}"),
    ]
}

/// Returns members of Envoy's config dump that contain `secret`, in addition to [`documents`].
fn members(secret: &str) -> Vec<Value> {
    let matched = |how: &str| {
        let name = json!({ "name": "x-tenant", "string_match": { (how): secret } });
        json!({ "route": { "match": { "prefix": "/", "headers": [name] } } })
    };
    let header = json!({ "header": { "key": "x-tenant", "value": secret } });
    let mut members: Vec<_> = ["exact", "prefix", "suffix", "contains"].map(matched).into();
    members.extend([
        json!({ "headers": [{ "name": "x-a", "string_match": { "safe_regex": { "regex": secret } } }] }),
        json!({ "headers": [{ "name": "x-tenant", "exact_match": secret }] }),
        json!({ "headers": [{ "string_match": { "exact": secret }, "name": "x-tenant" }] }),
        json!({ "permissions": [{ "and_rules": { "rules": [{ "header": {
            "name": "x-tenant", "string_match": { "exact": secret },
        }}]}}]}),
        json!({ "query_parameters": [{ "name": "api_key", "string_match": { "exact": secret } }] }),
        json!({ "http_service": { "authorization_request": { "headers_to_add": [{ "key": "x-any", "value": secret }] } } }),
        json!({ "request_headers_to_add": [header], "response_headers_to_add": [header] }),
        json!({ "users": { "inline_string": format!("cart:{secret}") } }),
        json!({ "credentials": { "client_id": "a", "client_secret": { "inline_string": secret } } }),
        json!({ "credential_provider": { "inline_credential": { "secret_access_key": secret } } }),
        json!({ "args": ["proxy", "--token", secret] }),
        json!({ "pass": secret }),
        json!({ "tls.key": secret }),
        json!({ "sharedKey": { "inline_bytes": secret } }),
        json!({ ".dockerconfigjson": { "auths": { "registry": { "username": "a", "auth": secret } } } }),
        json!({ "redis": { "auth_password": { "inline_string": secret } } }),
    ]);
    members
}

#[test]
fn planted_secrets_do_not_pass() {
    let mut left = Vec::new();
    let mut check = |form: Form, text: &str| {
        let out = self::text(form, text);
        let is_hidden = out.contains("[redacted]") && !out.contains(SECRET);
        left.extend((!is_hidden).then_some(out));
    };
    for text in texts(SECRET) {
        check(Form::Lines, &text);
        check(Form::Json, &json!({ "inline_code": text }).to_string());
        check(Form::OwnJson, &json!([text]).to_string());
        let within = json!({ "any": text }).to_string();
        check(Form::Json, &json!({ "inline_string": within }).to_string());
    }
    for member in members(SECRET).into_iter().chain(documents(SECRET)) {
        check(Form::Json, &member.to_string());
        check(Form::Json, &json!({ "value": member.to_string() }).to_string());
        check(Form::Lines, &member.to_string());
        check(Form::Lines, &json!({ "line": member.to_string() }).to_string());
    }
    assert!(left.is_empty(), "{}: {left:#?}", left.len());
}

/// Returns further texts that contain `secret`, as files, commands and libraries write them.
fn further_texts(secret: &str) -> Vec<String> {
    let base64 = |text: String| base64::prelude::BASE64_STANDARD.encode(text);
    vec![
        // Sentences and lines of logs.
        format!("2026-11-26T10:00:00Z\tinfo\tgot token: {secret}"),
        format!("got token: {secret}, expires in 5m"),
        format!("the token is {secret}"),
        format!("wrong password: {secret}"),
        format!("secret: {secret}"),
        format!("credentials: {secret}"),
        format!("access token: {secret}"),
        format!("level=info msg=login api_key={secret} took=3ms"),
        format!("level=debug authorization=\"Bearer {secret}\" path=/a"),
        format!("I1126 10:00:00.1 1 auth.go:7] bearer: {secret}"),
        // YAML, also within a string of JSON in a log.
        format!("name: PASSWORD\n value: {secret}"),
        format!("- name: DB_PASSWORD\n  value: {secret}\n- name: PORT\n  value: 80"),
        format!("- name: DB_PASSWORD\\n  value: {secret}\\n"),
        format!("- name: \"DB_PASSWORD\"\n  value: '{secret}'"),
        format!("{{name: DB_PASSWORD, value: {secret}}}"),
        format!("password: |\n  {secret}\n"),
        format!("- name: DB_PASSWORD\n  value: >-\n    {secret}\n"),
        format!("key: client_secret\nvalue: {secret}"),
        format!("password: {secret}\nuser: cart"),
        format!("users:\n- name: a\n  user:\n    token: {secret}\n"),
        format!("    client-key-data: {secret}"),
        format!("stringData:\n  password: {secret}"),
        format!("data:\n  tls.key: {}", base64(format!("-----BEGIN PRIVATE KEY-----\n{secret}"))),
        format!("  .dockerconfigjson: {}", base64(format!("{{\"auths\":{{\"r.io\":{{\"auth\":\"{secret}\"}}}}}}"))),
        format!("  id_rsa: {secret}"),
        format!("ssh-privatekey: {secret}"),
        format!("[{{Name:DB_PASSWORD Value:{secret} ValueFrom:nil}}]"),
        format!("{{'name': 'DB_PASSWORD', 'value': '{secret}'}}"),
        format!("clientSecret: \"{secret}\""),
        format!("refresh-token: {secret}"),
        format!("id-token: {secret}"),
        format!("pre-shared-key: {secret}"),
        format!("psk={secret}"),
        // Authorization and other headers.
        format!("Authorization: Digest username=\"cart\", realm=\"a\", nonce=\"b\", uri=\"/\", response=\"{secret}\""),
        format!("authorization: Digest username=\\\"cart\\\", response=\\\"{secret}\\\", qop=auth"),
        format!("sent Digest username=\"cart\", realm=\"a\", response=\"{secret}\""),
        format!("Authorization: AWS4-HMAC-SHA256 Credential=AKID/20261126/eu/s3/aws4_request, SignedHeaders=host, Signature={secret}"),
        format!("sent AWS4-HMAC-SHA256 Credential=AKID/20261126, SignedHeaders=host;x-amz-date, Signature={secret}"),
        format!("Authorization: AWS AKID:{secret}"),
        format!("Authorization: Token {secret}"),
        format!("Authorization: ApiKey {secret}"),
        format!("Authorization: Hawk id=\"a\", ts=\"1\", mac=\"{secret}\""),
        format!("Authorization: OAuth oauth_token=\"a\", oauth_signature=\"{secret}\""),
        format!("Authorization: Signature keyId=\"a\",algorithm=\"rsa\",signature=\"{secret}\""),
        format!("Authorization: NTLM {secret}"),
        format!("sent NTLM {secret}"),
        format!("Proxy-Authorization: Digest response=\"{secret}\""),
        format!("Authorization: {secret}"),
        format!("X-Vault-Token: {secret}"),
        format!("X-Consul-Token: {secret}"),
        format!("X-Auth-Key: {secret}"),
        format!("X-Api-Token={secret}"),
        format!("x-amz-security-token: {secret}"),
        format!("Ocp-Apim-Subscription-Key: {secret}"),
        format!("PRIVATE-TOKEN: {secret}"),
        format!("x-functions-key: {secret}"),
        format!("X-Registry-Auth: {secret}"),
        format!("Cookie: sid={secret}; lang=en"),
        format!("Cookie: sid=\"{secret}\"; lang=en"),
        format!("Set-Cookie: JSESSIONID={secret}; Path=/; HttpOnly"),
        format!("map[Authorization:[Bearer {secret}] Accept:[*/*]]"),
        format!("map[Cookie:[sid={secret}]]"),
        format!("'authorization', 'Basic {secret}'"),
        format!("'x-api-key', '{secret}'"),
        format!("('x-api-key', '{secret}')"),
        format!("headers={{\"x-api-key\": \"{secret}\"}}"),
        format!("> authorization: Bearer {secret}"),
        format!("curl -H \"Authorization: Bearer {secret}\" https://host"),
        format!("curl -H 'Cookie: a={secret}' https://host"),
        json!({ "Authorization": [secret], "Set-Cookie": [format!("a={secret}")] }).to_string(),
        format!("{{&quot;password&quot;:&quot;{secret}&quot;}}"),
        format!("{{\\u0022password\\u0022:\\u0022{secret}\\u0022}}"),
        format!("%7B%22password%22%3A%22{secret}%22%7D"),
        format!("a=b%26password%3D{secret}"),
        // XML.
        format!("<password>{secret}</password>"),
        format!("<ns:Password type=\"text\">{secret}</ns:Password>"),
        format!("<server><id>a</id><privateKey>{secret}</privateKey></server>"),
        format!("<passphrase><![CDATA[{secret}]]></passphrase>"),
        format!("<add key=\"Password\" value=\"{secret}\"/>"),
        format!("<entry name='client_secret' value='{secret}'/>"),
        format!("&lt;password&gt;{secret}&lt;/password&gt;"),
        format!("\\u003cpassword\\u003e{secret}\\u003c/password\\u003e"),
        format!("<wsse:Password Type=\"a\">{secret}</wsse:Password>"),
        // Environment variables and configuration files.
        format!("GITHUB_PAT={secret}"),
        format!("export GITLAB_PAT={secret}"),
        format!("AZURE_DEVOPS_EXT_PAT={secret}"),
        format!("PGPASSWORD={secret} psql -h db"),
        format!("MYSQL_PWD={secret}"),
        format!("MYSQL_ROOT_PASSWORD='{secret}'"),
        format!("REDISCLI_AUTH={secret}"),
        format!("DOCKER_AUTH={secret}"),
        format!("SENDGRID_API_KEY={secret}"),
        format!("AWS_SECRET_ACCESS_KEY: {secret}"),
        format!("AZURE_CLIENT_SECRET=\"{secret}\""),
        format!("AZURE_STORAGE_KEY={secret}"),
        format!("ARM_ACCESS_KEY={secret}"),
        format!("GOOGLE_API_KEY={secret}"),
        format!("VAULT_TOKEN={secret}"),
        format!("NPM_TOKEN={secret}"),
        format!("SECRET_KEY_BASE={secret}"),
        format!("DJANGO_SECRET_KEY={secret}"),
        format!("LDAP_BIND_PW={secret}"),
        format!("KEYSTORE_PASSPHRASE={secret}"),
        format!("ENV API_TOKEN {secret}"),
        format!("setenv DB_PASSWORD {secret}"),
        format!("set -x DB_PASSWORD {secret}"),
        format!("$env:DB_PASSWORD = \"{secret}\""),
        format!("\"Env\":[\"PATH=/bin\",\"DB_PASSWORD={secret}\"]"),
        format!("//registry.npmjs.org/:_authToken={secret}"),
        format!("_auth={secret}"),
        format!("[client]\npassword={secret}"),
        format!("password = {secret}"),
        format!("spring.datasource.password={secret}"),
        format!("signing.keyPassword={secret}"),
        format!("sasl.jaas.config=a required username=\"u\" password=\"{secret}\";"),
        format!("api_token = \"{secret}\""),
        format!("[db]\nsecret = '{secret}'"),
        format!("machine host login cart password {secret}"),
        format!("machine host\n  login cart\n  password {secret}\n"),
        format!("db:5432:shop:cart:{secret}"),
        format!("requirepass {secret}"),
        format!("bindpw {secret}"),
        format!("PrivateKey = {secret}"),
        format!("PresharedKey = {secret}"),
        format!("ansible_become_pass: {secret}"),
        format!("encryption_key: {secret}"),
        format!("webhook_secret: {secret}"),
        format!("mnemonic: {secret}"),
        // Connection strings.
        format!("DefaultEndpointsProtocol=https;AccountName=a;AccountKey={secret};EndpointSuffix=b"),
        format!("Endpoint=sb://a/;SharedAccessKeyName=b;SharedAccessKey={secret}"),
        format!("BlobEndpoint=https://a/;SharedAccessSignature=sv=2026&sig={secret}&se=b"),
        format!("SharedAccessSignature sr=a&sig={secret}&se=1&skn=b"),
        format!("HostName=a;DeviceId=b;SharedAccessKey={secret}"),
        format!("Server=db;User Id=cart;Password={secret};Encrypt=true"),
        format!("Driver={{x}};UID=cart;PWD={secret}"),
        format!("host=db user=cart password={secret} sslmode=require"),
        format!("jdbc:mysql://db/shop?user=cart&password={secret}"),
        format!("InstrumentationKey={secret};IngestionEndpoint=https://a"),
        // URLs.
        format!("postgres://cart:{}@db/shop", secret.replace('/', "%2F")),
        format!("mongodb+srv://cart:{}@db/shop", secret.replace('/', "%2F")),
        format!("amqp://cart:{}@mq:5672/", secret.replace('/', "%2F")),
        format!("https://x-access-token:{}@github.com/a/b", secret.replace('/', "%2F")),
        format!("https://{}@github.com/a/b", secret.replace('/', "%2F")),
        format!("https://a.blob/b?sv=2026&sp=r&sig={secret}"),
        format!("https://bucket/a?X-Amz-Algorithm=b&X-Amz-Signature={secret}"),
        format!("https://storage/a?GoogleAccessId=b&Expires=1&Signature={secret}"),
        format!("https://host/a?apikey={secret}&b=c"),
        format!("https://host/a?client_secret={secret}&grant_type=b"),
        format!("https://host/cb?code={secret}&state=a"),
        format!("https://host/#access_token={secret}&token_type=b"),
        format!("otpauth://totp/a?secret={secret}&issuer=b"),
        format!("https://hooks.slack.com/services/T000/B000/{secret}"),
        format!("https://discord.com/api/webhooks/1/{secret}"),
        format!("grant_type=password&username=cart&password={secret}"),
        format!("X-Amz-Signature={secret}"),
        // Commands.
        format!("vault login --token {secret}"),
        format!("app --password {secret} --port 80"),
        format!("app --password={secret}"),
        format!("app --api-key '{secret}'"),
        format!("app -password {secret}"),
        format!("[\"--client-secret\",\"{secret}\"]"),
        format!("[\"--client-secret={secret}\"]"),
        format!("mysql -u cart -p{secret} shop"),
        format!("mysqldump -h db -u cart -p{secret}"),
        format!("sshpass -p {secret} ssh host"),
        format!("docker login -u cart -p {secret} registry"),
        format!("az login --service-principal -u a -p {secret}"),
        format!("curl --proxy-user cart:{secret} host"),
        format!("curl -U cart:{secret} host"),
        format!("kubectl create secret generic a --from-literal=password={secret}"),
        format!("java -Djavax.net.ssl.keyStorePassword={secret} -jar a"),
        format!("openssl pkcs12 -passin pass:{secret}"),
        format!("htpasswd=cart:{secret}@"),
        // JSON.
        json!({ "auths": { "r.io": { "username": "a", "password": secret } } }).to_string(),
        json!({ "users": [{ "user": { "client-key-data": secret } }] }).to_string(),
        json!({ "user": { "token": secret } }).to_string(),
        json!({ "SecretAccessKey": secret, "SessionToken": secret }).to_string(),
        json!({ "access_token": secret, "token_type": "Bearer", "expires_in": 3600 }).to_string(),
        json!({ "type": "authorized_user", "refresh_token": secret }).to_string(),
        json!({ "private_key": format!("-----BEGIN PRIVATE KEY-----\n{secret}\n-----END PRIVATE KEY-----\n") }).to_string(),
        json!({ "id_rsa": secret }).to_string(),
        json!({ "GITHUB_PAT": secret }).to_string(),
        json!({ "env": [{ "name": "GITHUB_PAT", "value": secret }] }).to_string(),
        json!({ "key": "DB_PASSWORD", "val": secret }).to_string(),
        json!({ "header": "authorization", "value": secret }).to_string(),
        json!({ "config": format!("name: PASSWORD\nvalue: {secret}\n") }).to_string(),
        json!({ "text": format!("<password>{secret}</password>") }).to_string(),
        json!({ "headers": { "Authorization": format!("Digest response=\"{secret}\"") } }).to_string(),
        json!({ "headers": [["authorization", format!("Basic {secret}")]] }).to_string(),
        // Keys.
        format!("-----BEGIN RSA PRIVATE KEY-----\\n{secret}\\n-----END RSA PRIVATE KEY-----\\n"),
        format!("-----BEGIN OPENSSH PRIVATE KEY-----\\\\n{secret}\\\\n-----END OPENSSH PRIVATE KEY-----"),
        format!("-----BEGIN ENCRYPTED PRIVATE KEY----- {secret} -----END ENCRYPTED PRIVATE KEY-----"),
        format!("-----BEGIN PGP PRIVATE KEY BLOCK-----\\n\\n{secret}\\n-----END PGP PRIVATE KEY BLOCK-----"),
        format!("-----BEGIN+PRIVATE+KEY-----%0A{secret}%0A-----END+PRIVATE+KEY-----"),
        format!("-----BEGIN%20EC%20PRIVATE%20KEY-----%0A{secret}%0A-----END%20EC%20PRIVATE%20KEY-----"),
        format!("---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\\n{secret}\\n---- END SSH2 ENCRYPTED PRIVATE KEY ----"),
        base64(format!("-----BEGIN PRIVATE KEY-----\n{secret}")),
    ]
}

#[test]
fn secrets_of_further_shapes_do_not_pass() {
    for secret in [SECRET, "Zx81kQ7vR2mN4pL9", "0f4c9a17d2e84b6c93af"] {
        let mut left = Vec::new();
        for text in further_texts(secret) {
            for (form, document) in [
                // In the log, a line feed is escaped.
                (Form::Lines, text.replace('\n', "\\n")),
                (Form::Json, json!({ "any": text }).to_string()),
                (Form::OwnJson, json!([text]).to_string()),
                (Form::Json, json!({ "any": json!({ "any": text }).to_string() }).to_string()),
            ] {
                let out = self::text(form, &document);
                let is_hidden = out.contains("[redacted]") && !out.contains(secret);
                left.extend((!is_hidden).then_some(out));
            }
        }
        assert!(left.is_empty(), "{}: {left:#?}", left.len());
    }
}

#[test]
fn tokens_and_hashes_do_not_pass_wherever_they_are() {
    for secret in [
        "AKIAIOSFODNN7EXAMPLE",
        "AIzaSyA-0123456789abcdefghijklmnopqrstu",
        "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "glpat-0123456789abcdefghij",
        "xoxb-0123456789-abcdefghij",
        "sk_live_0123456789abcdef",
        "hvs.CAESIJ0123456789abcdefghij",
        "{SHA}W6ph5Mm5Pz8GgiULbPgzG37mj9g=",
        "$apr1$abcdefgh$0123456789abcdefghijkl",
        "$2y$10$0123456789abcdefghijklmnopqrstuvwxyz",
        "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl_-",
    ] {
        let out = text(Form::Lines, &format!("found cart:{secret} there"));
        assert_eq!(out, "found cart:[redacted] there");
        let out = json(Form::Json, &json!({ "any": [secret] }));
        assert_eq!(out, json!({ "any": ["[redacted]"] }));
    }
}

#[test]
fn configuration_an_operator_needs_is_not_redacted() {
    let document = json!({
        "name": "outbound|80|v1|cart.shop.svc.cluster.local", "alt_stat_name": "cart;",
        "version_info": "2026-11-23T18:21:27Z/7", "last_updated": "2026-11-23T18:21:27.123Z",
        "metadata": { "filter_metadata": { "istio": { "services": [{ "host": "cart", "name": "cart" }] } } },
        "match": { "prefix": "/pass", "headers": [
            { "name": ":method", "string_match": { "exact": "GET" } },
            { "name": "content-type", "string_match": { "prefix": "application/grpc" } },
            { "name": "x-envoy-attempt-count", "present_match": true },
        ]},
        "principals": [{ "authenticated": { "principal_name": {
            "exact": "spiffe://cluster.local/ns/shop/sa/cart",
        }}}],
        "tls": { "certificate_chain": { "inline_string": CERTIFICATE }, "tls_params": {} },
        "actions": [{ "generic_key": { "descriptor_key": "a", "descriptor_value": "b" } },
            { "request_headers": { "header_name": ":path", "descriptor_key": "path" } }],
        "runtime_key": "upstream.healthy", "metadata_key": { "key": "istio", "path": [{ "key": "a" }] },
        "hash_policy": [{ "header": { "header_name": "x-user" } }],
        "filter_state_key": "a", "object_key": "b", "host_env_keys": ["PATH"], "public_key": "c",
        "TLS_CLIENT_KEY": "/etc/certs/key.pem", "bypass": "none",
        "image": "registry:5000/proxyv2:1.32@sha256:0123456789abcdef",
        "address": { "socket_address": { "address": "10.0.0.1", "port_value": 80 } },
        "format": "%REQ(X-ENVOY-ORIGINAL-PATH?:PATH)% %PROTOCOL% \"%REQ(:AUTHORITY)%\"\n",
        "inline_code": "function envoy_on_request(handle)\n  handle:headers():add(\"x-envoy-a\", \"1\")\n\
                        \x20 handle:headers():replace(\"x-tenant\", tenant)\nend",
        "node": "sidecar~10.0.0.1~cart-7.shop~shop.svc.cluster.local",
        "args": ["proxy", "sidecar", "--domain", "shop.svc.cluster.local", "--token-file", "a"],
    });
    assert_eq!(json(Form::Json, &document), document);
    for line in [
        "Basic authentication failed: no Bearer credentials",
        "API key: none",
        "member serviceAccount:cart@shop.iam.gserviceaccount.com",
        "fetching http://registry:5000/plugin@v1 from http://registry/plugin:v1@sha256:0123",
        "mail mailto:a.b@example.com",
        "docker run -u 1337:1337 registry/proxyv2:1.32@sha256:0123",
        "2026-11-23T18:21:27.123456Z\tinfo\txdsproxy\tconnected to istiod.istio-system.svc:15012\tid=7",
        "-A ISTIO_OUTPUT -d 127.0.0.1/32 -p tcp -m tcp ! --dport 53 -m owner --uid-owner 1337 -j RETURN",
        "cluster.outbound|80||cart.shop.svc.cluster.local;.upstream_rq_2xx: 5",
        "listener.0.0.0.0_15006.ssl.session_reused: 7",
        "GET /search?q=keys&page=2 HTTP/1.1",
    ] {
        assert_eq!(text(Form::Lines, line), line);
    }
}

#[test]
fn names_counters_and_paths_that_mention_secrets_pass() {
    let document = json!({
        "token_count": 3, "prompt_tokens": 12, "max_tokens": 10, "token_type": "Bearer", "secret_version": "7",
        "token_endpoint": "https://issuer/token", "tokenUrl": "https://issuer/token", "password_policy": "strong",
        "token_file": "/var/run/secrets/tokens/istio-token", "credentialName": "shop-tls-2", "key": "a",
        "secret_ttl_seconds": 5, "tokenExpiry": "2026-11-26T10:00:00Z", "session_limit": 4, "auth_enabled": true,
        "keys_total": 7, "id_rsa.pub": "ssh-ed25519 AAAA", "compat": "v1", "client-certificate-data": "LS0tLS1CRUdJTiBD",
        "author": "a", "pattern": "b", "secretName": "shop-tls",
    });
    assert_eq!(json(Form::Json, &document), document);
    for line in [
        "ok       token: ./var/run/secrets/tokens/istio-token expires in 11 h 3 min, at 2026-11-23T18:21:27Z",
        "cannot read the token: /var/run/secrets/tokens/istio-token: No such file",
        "token: 2026-11-26T10:00:00Z is over",
        "token: 10s left",
        "cannot get a token: PermissionDenied: no",
        "unexpected token: SHA256 or HTTP2",
        "token_count: 3",
        "tokens: 17",
        "token_count=3 token_type=Bearer",
        "secret: kubernetes://shop-tls-2",
        "secret: istio-ca-secret-2",
        "waiting for secret: default",
        "credentials: none",
        "credentialName: shop-tls-2",
        "name: PILOT_CERT_PROVIDER\\n value: istiod",
        "- name: CREDENTIAL_FETCHER_TYPE\\n  value: JWT\\n",
        "key: istio\\nvalue: mesh",
        "envoy_cluster_upstream_rq_total{cluster_name=\"outbound|80||token-service.shop\"} 7",
        "istio_agent_secrets_total{resource=\"default\"} 2",
        "sds.kubernetes://shop-credential.update_success: 1",
        "docker run -p 80:80 registry/app",
        "ssh -p 22 host",
        "-A PREROUTING -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 15006",
        "<key>istio</key><author>a</author>",
        "Signature Algorithm: sha256WithRSAEncryption",
        "digest sha256:0123456789abcdef of the image",
        "2001:db8:0:1:a:b:c:d",
        "10.0.0.1:15012:a",
        "10.0.0.7:443::health_flags::healthy",
        "basic auth is on",
        "if tokens > 5 then",
        "sk-learn, key-value, glas-house-with-a-long-name, npm_config_registry_of_a_long_name_in_here",
        "password is wrong",
        "the signature is good",
    ] {
        assert_eq!(text(Form::Lines, line), line);
    }
}

#[test]
fn private_keys_and_tokens_do_not_pass_and_certificates_do() {
    let token = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl_-";
    let file = format!("{CERTIFICATE}\n{KEY}\nrest {token} end\n");
    let out = text(Form::Lines, &file);
    assert!(out.starts_with(CERTIFICATE), "{out}");
    assert!(out.contains("rest [redacted] end\n"), "{out}");
    for line in KEY.lines() {
        assert!(!out.contains(line), "{line}: {out}");
    }
    let encoded = base64::prelude::BASE64_STANDARD.encode(format!("{CERTIFICATE}\n{KEY}"));
    let document = json!({ "any": [file, encoded, token, CERTIFICATE] });
    let out: Value =
        serde_json::from_str(&text(Form::OwnJson, &document.to_string())).expect("JSON");
    let kept = format!("{CERTIFICATE}\n[redacted]\nrest [redacted] end\n");
    assert_eq!(out["any"], json!([kept, "[redacted]", "[redacted]", CERTIFICATE]));
    // A private key without an END line.
    let cut = text(Form::Lines, "a\n-----BEGIN PRIVATE KEY-----\nMHcC\nAQEE");
    assert_eq!(cut, "a\n[redacted]");
}

#[test]
fn texts_above_the_size_limit_are_omitted_completely() {
    let long = "x".repeat(MAX_TEXT) + SECRET;
    let left_out = String::from_utf8_lossy(LEFT_OUT);
    assert_eq!(json(Form::Json, &json!({ "a": long, "b": 1 })), json!({ "a": left_out, "b": 1 }));
    assert_eq!(text(Form::Lines, &format!("{long}\nb\n")), format!("{left_out}\nb\n"));
}

#[test]
fn numbers_and_order_and_indentation_stay() {
    let document = r#"{
 "b": 18446744073709551615,
 "a": [
  -9223372036854775808,
  0.1,
  -2.5,
  1e+300,
  0,
  {},
  [],
  null,
  true,
  "ü\n\u001b"
 ]
}"#;
    assert_eq!(text(Form::Json, document), document);
}

/// Redacts long texts that repeat the beginning of a secret. If a search read the rest of the text at each of these
/// beginnings, the test would take hours.
#[test]
fn the_time_to_redact_a_text_is_linear_in_its_length() {
    for part in [
        "author:",
        "author=[",
        "authexact: ",
        "session: true: value: ",
        "token=token=",
        "eyJ-AKIA0123456789ABCDEF-",
        "\"author\":\\\"",
    ] {
        text(Form::Lines, &part.repeat((128 << 10) / part.len()));
    }
    let lines = "\n".repeat(MAX_TEXT - 100);
    text(Form::Lines, &format!("-----BEGIN PRIVATE KEY-----\n{lines}"));
    for part in [
        "eyJ",
        "eyJa.b",
        "token=",
        "token=\"",
        "authorization:",
        "-----BEGIN PRIVATE KEY-----",
        "://a@",
        "LS0tLS1CRUdJTi",
        "Basic ",
        "Bearer Bearer",
        "\\\"",
        "\"token\":\\\"",
        "= ",
        "author=>",
        "<author>",
        "token&quot;:&quot;",
        "set('host',",
        "headers name host exact: \"",
        "name: PASSWORD\\n value: |\\n",
        "&x-amz-a=",
        "a:b@c",
        "[\"[\\\"author:",
        "digest a=\"",
        "password '",
        "a/b/token ",
        "\\nlogin a",
    ] {
        text(Form::Lines, &part.repeat((64 << 10) / part.len()));
    }
}

#[test]
fn text_that_is_not_json_is_refused_as_json() {
    let deep = "[".repeat(1000);
    for wrong in ["<html>", "no healthy upstream", "{\"a\": hush}", "'a'", &deep] {
        let (out, is_good) = redacted(none(), Form::Json, wrong.as_bytes(), usize::MAX);
        assert!(!is_good, "{wrong}");
        assert!(!String::from_utf8_lossy(&out).contains("hush"));
    }
}

fn json_value() -> impl Strategy<Value = Value> {
    // A random text with an `@` may look like the credentials of a URL.
    let any_text = any::<String>().prop_map(|text| text.replace('@', ""));
    // No name of a credential consists of these letters. `pw=a` is redacted.
    let text = prop_oneof!["[a-f\"\\\\{}\\[\\], :=]{0,12}", any_text];
    let scalar = prop_oneof![
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        Just(Value::Null),
        text.prop_map(Value::from),
    ];
    scalar.prop_recursive(4, 32, 4, |inner| {
        let names = prop_oneof!["[a-f]{1,4}", Just("header".to_owned()), Just("key".to_owned())];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((names, inner), 0..4)
                .prop_map(|members| members.into_iter().collect::<serde_json::Map<_, _>>().into()),
        ]
    })
}

/// Generates a secret and a text of any kind that contains it. The text has a random part, too.
fn text_with_secret() -> impl Strategy<Value = (String, Vec<u8>, Form)> {
    let secret = "[A-Za-z0-9+/]{7,30}[G-Zg-z]";
    let any_text = prop_oneof!["[a-z\"\\\\{}:=, \n]{0,40}", any::<String>()];
    (secret, any::<prop::sample::Index>(), json_value(), any::<bool>(), any_text).prop_map(
        |(secret, index, beside, is_pretty, text)| {
            let lines = lines(&secret);
            let documents = documents(&secret);
            let choice = index.index(lines.len() + documents.len());
            if let Some(line) = lines.get(choice) {
                let text = text.replace('\n', " ");
                return (secret, format!("{text}\n{line}\n{text}").into(), Form::Lines);
            }
            let document = json!([beside, documents[choice - lines.len()], beside]);
            let text = if is_pretty { format!("{document:#}") } else { document.to_string() };
            (secret, text.into(), Form::Json)
        },
    )
}

fn has(text: &[u8], part: &str) -> bool {
    find(text, part.as_bytes()).is_some()
}

proptest! {
    #[test]
    fn a_secret_never_passes_in_any_chunks((secret, text, form) in text_with_secret(), chunk in 1..200_usize) {
        let (whole, is_good) = redacted(none(), form, &text, usize::MAX);
        prop_assert!(is_good);
        prop_assert!(!has(&whole, &secret), "{}", String::from_utf8_lossy(&whole));
        prop_assert_eq!(&redacted(none(), form, &text, chunk).0, &whole);
        if form == Form::Json {
            prop_assert!(serde_json::from_slice::<Value>(&whole).is_ok());
        }
    }

    #[test]
    fn a_known_secret_never_passes_in_any_chunks(
        secret in "[!-~][ -~]{5,20}[A-Za-z\"\\\\ü]",
        before in any::<String>(),
        after in any::<String>(),
        chunk in 1..100_usize,
    ) {
        let (secrets, secret) = (known(&secret), &*secret);
        let text = format!("{before}{secret}{after}");
        let (out, _) = redacted(&secrets, Form::Lines, text.as_bytes(), chunk);
        prop_assert!(!has(&out, secret), "{}", String::from_utf8_lossy(&out));
        for form in [Form::Json, Form::OwnJson] {
            let document = json!({ (&text): [&text], "a": { "b": text } }).to_string();
            let (out, is_good) = redacted(&secrets, form, document.as_bytes(), chunk);
            prop_assert!(is_good);
            let read: Value = serde_json::from_slice(&out).expect("JSON");
            prop_assert!(!read["a"]["b"].as_str().expect("text").contains(secret), "{read}");
            prop_assert!(!has(&out, secret));
        }
    }

    #[test]
    fn json_without_secrets_passes_unchanged(document in json_value(), chunk in 1..50_usize) {
        let text = document.to_string();
        let (out, is_good) = redacted(none(), Form::OwnJson, text.as_bytes(), chunk);
        prop_assert!(is_good);
        let read: Value = serde_json::from_slice(&out).expect("JSON");
        prop_assert_eq!(read.to_string(), text);
    }

    #[test]
    fn bytes_of_any_kind_pass_or_are_refused_alike_in_any_chunks(
        text in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..200),
            "([-a-z\"\\\\{}\\[\\]:=,. \n]|token|eyJ|-----BEGIN |PRIVATE KEY-----|-----END |://|@){0,60}"
                .prop_map(String::into_bytes),
        ],
        chunk in 1..50_usize,
    ) {
        static KNOWN: OnceLock<Secrets> = OnceLock::new();
        let secrets = KNOWN.get_or_init(|| known("a known secret"));
        for form in [Form::Lines, Form::Json, Form::OwnJson] {
            let whole = redacted(secrets, form, &text, usize::MAX);
            prop_assert_eq!(redacted(secrets, form, &text, chunk), whole);
        }
    }
}
