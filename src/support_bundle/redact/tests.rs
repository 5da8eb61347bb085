//! What passes the redactor and what does not, in any chunks.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const SECRET: &str = "h4sh-Hush+s3cret/9=";
const KEY: &str =
    "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIBl4c\nNotPublic+/4Q==\n-----END EC PRIVATE KEY-----";
const CERTIFICATE: &str =
    "-----BEGIN CERTIFICATE-----\nMIIBkTCCATegAwIB\n-----END CERTIFICATE-----";

fn none() -> Secrets {
    Secrets::new([])
}

/// What passes in chunks of this size.
fn passed(secrets: &Secrets, form: Form, text: &[u8], chunk: usize) -> (Vec<u8>, bool) {
    let mut redactor = Redactor::new(secrets, form);
    let pushed = text.chunks(chunk).try_for_each(|part| redactor.push(part));
    let finished = pushed.and_then(|()| redactor.finish());
    (std::mem::take(&mut redactor.out), finished.is_ok())
}

fn text(form: Form, text: &str) -> String {
    let (out, is_good) = passed(&none(), form, text.as_bytes(), usize::MAX);
    assert!(is_good, "{text}");
    String::from_utf8(out).expect("text")
}

/// Members of Envoy's dump and of bootstraps with `secret` in them.
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

/// Lines with `secret` in them, which has no blanks.
fn lines(secret: &str) -> Vec<String> {
    vec![
        format!("info\tca\tsent authorization: Bearer {secret} to istiod"),
        format!("Proxy-Authorization: Basic {secret}"),
        format!("cookie: a=b; session={secret}"),
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
fn secrets_of_json_do_not_pass_and_what_is_beside_them_does() {
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
    let expected = document
        .to_string()
        .replace("W3JlZGFjdGVkXQ==", "[redacted]");
    assert_eq!(text(Form::Json, &document.to_string()), expected);
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
    for digits in [
        "pin_token=84219377",
        "?token=84219377&a=1",
        "\\\"pin_token\\\":84219377",
    ] {
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
    use base64::Engine;
    let encoded = base64::prelude::BASE64_STANDARD.encode(format!("{CERTIFICATE}\n{KEY}"));
    let document = json!({ "any": [file, encoded, token, CERTIFICATE] });
    let out: Value =
        serde_json::from_str(&text(Form::OwnJson, &document.to_string())).expect("JSON");
    let kept = format!("{CERTIFICATE}\n[redacted]\nrest [redacted] end\n");
    assert_eq!(
        out["any"],
        json!([kept, "[redacted]", "[redacted]", CERTIFICATE])
    );
    // A key without an end.
    let cut = text(Form::Lines, "a\n-----BEGIN PRIVATE KEY-----\nMHcC\nAQEE");
    assert_eq!(cut, "a\n[redacted]\n\n");
}

#[test]
fn what_is_longer_than_the_bound_is_left_out_whole() {
    let long = "x".repeat(LONGEST) + SECRET;
    let document = json!({ "a": long, "b": 1 }).to_string();
    let bytes = long.len();
    assert_eq!(
        text(Form::Json, &document),
        format!("{{\"a\":\"[{bytes} bytes left out]\",\"b\":1}}")
    );
    assert_eq!(
        text(Form::Lines, &format!("{long}\nb\n")),
        format!("[{bytes} bytes left out]\nb\n")
    );
}

#[test]
fn a_hostile_text_takes_no_longer_than_another() {
    let start = std::time::SystemTime::now();
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
        "\\\"",
        "\"token\":\\\"",
        "= ",
    ] {
        text(Form::Lines, &part.repeat(LONGEST / part.len()));
    }
    // What looks at the rest of the line at each place takes minutes.
    let taken = start.elapsed().expect("a clock");
    assert!(taken.as_secs() < 20, "{taken:?}");
}

#[test]
fn what_is_no_json_does_not_pass_for_it() {
    let deep = "[".repeat(DEEPEST + 1);
    for wrong in [
        "<html>",
        "no healthy upstream",
        "{\"a\": hush}",
        "'a'",
        &deep,
    ] {
        let (out, is_good) = passed(&none(), Form::Json, wrong.as_bytes(), usize::MAX);
        assert!(!is_good, "{wrong}");
        assert!(!String::from_utf8_lossy(&out).contains("hush"));
    }
}

fn json_value() -> impl Strategy<Value = Value> {
    let text = prop_oneof!["[a-z\"\\\\{}\\[\\], :=]{0,12}", any::<String>()];
    let scalar = prop_oneof![
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        Just(Value::Null),
        text.prop_map(Value::from),
    ];
    scalar.prop_recursive(4, 32, 4, |inner| {
        let names = prop_oneof![
            "[a-z]{1,4}",
            Just("header".to_owned()),
            Just("key".to_owned())
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((names, inner), 0..4).prop_map(|members| members
                .into_iter()
                .collect::<serde_json::Map<_, _>>()
                .into()),
        ]
    })
}

/// A secret of any kind, its place in a text of any kind, and what comes with it.
fn planted() -> impl Strategy<Value = (String, Vec<u8>, Form)> {
    let secret = "[A-Za-z0-9+/]{7,30}[G-Zg-z]";
    let any_text = prop_oneof!["[a-z\"\\\\{}:=, \n]{0,40}", any::<String>()];
    (
        secret,
        any::<prop::sample::Index>(),
        json_value(),
        any::<bool>(),
        any_text,
    )
        .prop_map(|(secret, index, beside, is_pretty, text)| {
            let lines = lines(&secret);
            let documents = documents(&secret);
            let choice = index.index(lines.len() + documents.len());
            if let Some(line) = lines.get(choice) {
                let text = text.replace('\n', " ");
                return (
                    secret,
                    format!("{text}\n{line}\n{text}").into(),
                    Form::Lines,
                );
            }
            let document = json!([beside, documents[choice - lines.len()], beside]);
            let text = match is_pretty {
                true => format!("{document:#}"),
                false => document.to_string(),
            };
            (secret, text.into(), Form::Json)
        })
}

fn has(text: &[u8], part: &str) -> bool {
    memchr::memmem::find(text, part.as_bytes()).is_some()
}

proptest! {
    #[test]
    fn a_secret_never_passes_in_any_chunks((secret, text, form) in planted(), chunk in 1..200_usize) {
        let (whole, is_good) = passed(&none(), form, &text, usize::MAX);
        prop_assert!(is_good);
        prop_assert!(!has(&whole, &secret), "{}", String::from_utf8_lossy(&whole));
        prop_assert_eq!(&passed(&none(), form, &text, chunk).0, &whole);
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
        let (secrets, secret) = (Secrets::new([secret.clone()]), &*secret);
        let text = format!("{before}{secret}{after}");
        let (out, _) = passed(&secrets, Form::Lines, text.as_bytes(), chunk);
        prop_assert!(!has(&out, secret), "{}", String::from_utf8_lossy(&out));
        for form in [Form::Json, Form::OwnJson] {
            let document = json!({ (&text): [&text], "a": { "b": text } }).to_string();
            let (out, is_good) = passed(&secrets, form, document.as_bytes(), chunk);
            prop_assert!(is_good);
            let read: Value = serde_json::from_slice(&out).expect("JSON");
            prop_assert!(!read["a"]["b"].as_str().expect("text").contains(secret), "{read}");
            prop_assert!(!has(&out, secret));
        }
    }

    #[test]
    fn json_without_secrets_passes_as_it_is(document in json_value(), chunk in 1..50_usize) {
        let text = document.to_string();
        let (out, is_good) = passed(&none(), Form::OwnJson, text.as_bytes(), chunk);
        prop_assert!(is_good);
        prop_assert_eq!(String::from_utf8_lossy(&out), text);
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
        let secrets = Secrets::new(["a known secret".to_owned()]);
        for form in [Form::Lines, Form::Json, Form::OwnJson] {
            let whole = passed(&secrets, form, &text, usize::MAX);
            prop_assert_eq!(passed(&secrets, form, &text, chunk), whole);
        }
    }
}
