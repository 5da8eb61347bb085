//! The kinds of requests.

use std::collections::BTreeSet;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::sleep;
use tokio_rustls::TlsConnector;

use super::resources::{
    Case, END, EXTENSIONS, LISTENER_REPLACED, ROUTES_REPLACED, hosts, http_filter, listener_filter,
    lua, merge, of_type, service, to_http2, to_tls,
};
use super::traffic::{
    PAUSE, SEEN, TLS, at_once, client, get, http2, last, open, parts, provider, talk, tcp,
};

/// Returns the kinds of requests. `backends` are the ports of the HTTP backend, of another one, of the TCP backend, of
/// the one that upgrades, and one on which nobody listens.
pub(super) fn cases([a, b, stream, upgrade, refused]: [u16; 5]) -> Vec<Case> {
    let none = || json!({});
    let big = vec![b'x'; 5_000_000];
    let posted = |headers: &str, body: &[u8]| [last("POST /", headers).as_bytes(), body].concat();
    let length = "content-length: 5000000\r\n";
    let chunked = "transfer-encoding: chunked\r\n";
    let in_chunks = [b"4c4b40\r\n", &big[..], b"\r\n0\r\n\r\n"].concat();
    let to_two = |path: &str| json!({ "match": { "prefix": path }, "name": "two", "route": { "cluster": "@2" } });
    let retry = |policy: Value| json!({ "route": { "retry_policy": policy } });
    let to = |ports: &[u16]| json!({ "endpoints": { "endpoints": hosts("127.0.0.1", ports) } });
    let with = |mut changes: Value, more: Value| {
        merge(&mut changes, &more);
        changes
    };
    let tcp_to = |ports: &[u16]| with(json!({ "tcp": {} }), to(ports));
    let filter = |kind: &str, config: Value| json!({ "filters": [http_filter(kind, config)] });
    let authz = || {
        let server = json!({ "uri": "http://authz", "cluster": "@2", "timeout": "2s" });
        filter("ext_authz.v3.ExtAuthz", json!({ "http_service": { "server_uri": server } }))
    };
    let with_body = || {
        let mut changes = authz();
        changes["filters"][0]["typed_config"]["with_request_body"] =
            json!({ "max_request_bytes": 8192, "allow_partial_message": true });
        changes
    };
    let weighted =
        json!({ "clusters": [{ "name": "@1", "weight": 50 }, { "name": "@2", "weight": 50 }] });
    let by_header = |text: &str| {
        with(
            json!({ "cluster": null }),
            json!({ "weighted_clusters": with(weighted.clone(), json!({ "header_name": text })) }),
        )
    };
    let limits =
        |limits: Value| json!({ "cluster": { "circuit_breakers": { "thresholds": [limits] } } });
    let always = json!({ "numerator": 100 });
    let upgrade_of =
        |kind: &str| json!({ "manager": { "upgrade_configs": [{ "upgrade_type": kind }] } });
    let websocket = "connection: upgrade\r\nupgrade: websocket\r\n";
    let labelled = |version: &str, port: u16| {
        let mut host = hosts("127.0.0.1", &[port])[0]["lb_endpoints"][0].take();
        host["metadata"] = json!({ "filter_metadata": { "envoy.lb": { "version": version } } });
        host
    };
    let ipv4 = || json!({ "dns_lookup_family": "V4_ONLY" });
    let localhost = || hosts("localhost", &[a]);
    let grpc =
        |frames: &[&'static str], alternates| http2("POST", "/shop.Cart/echo", frames, alternates);
    let (one, three) = (["\0\0\0\0\u{1}a"], ["\0\0\0\0\u{1}a", "\0\0\0\0\u{1}b", "\0\0\0\0\u{1}c"]);
    vec![
        ("get", "200 OK", none(), get("/", "")),
        ("head", "200 OK", none(), parts([last("HEAD /", "")])),
        ("big response", "200 OK", none(), get("/big", "")),
        ("slow response", "piece 4", none(), get("/drip", "")),
        (
            "cors",
            "access-control-allow-origin: http://shop",
            with(
                filter("cors.v3.Cors", none()),
                json!({ "host": { "typed_per_filter_config": { "cors.v3.Cors": {
            "@type": format!("{EXTENSIONS}.filters.http.cors.v3.CorsPolicy"),
            "allow_origin_string_match": [{ "exact": "http://shop" }],
            "allow_methods": "GET",
        } } } }),
            ),
            parts([last(
                "OPTIONS /",
                "origin: http://shop\r\naccess-control-request-method: GET\r\n",
            )]),
        ),
        ("post with length", "5000000 bytes", none(), parts([posted(length, &big)])),
        ("post chunked", "5000000 bytes", none(), parts([posted(chunked, &in_chunks)])),
        (
            "expect continue",
            "100 Continue",
            none(),
            parts([
                last("POST /", "content-length: 4\r\nexpect: 100-continue\r\n"),
                "body".to_owned(),
            ]),
        ),
        ("http2 get", "HTTP/1.1", none(), http2("GET", "/", &[], false)),
        ("http2 post", "3 bytes", none(), http2("POST", "/", &["a", "b", "c"], false)),
        ("http2 at once", "HTTP/1.1", none(), at_once(20, http2("GET", "/", &[], false))),
        ("get at once", "200 OK", none(), at_once(20, get("/", ""))),
        (
            "slow body",
            "6 bytes",
            none(),
            parts([last("POST /", "content-length: 6\r\n"), "abc".into(), "def".into()]),
        ),
        (
            "slow headers",
            "200 OK",
            none(),
            parts(["GET / HTTP/1.1\r\nho", "st: cart\r\nconnec", "tion: close\r\n\r\n"]),
        ),
        (
            "pipelining",
            "/second",
            none(),
            parts([open("GET /first", "") + &last("GET /second", "")]),
        ),
        (
            "keep-alive to another service",
            "/two",
            json!({ "first": [to_two("/two")] }),
            parts([open("GET /one", ""), last("GET /two", "")]),
        ),
        (
            "websocket",
            "ping",
            with(upgrade_of("websocket"), to(&[upgrade])),
            parts([open("GET /", websocket), "ping".into()]),
        ),
        ("websocket refused", "200 OK", upgrade_of("websocket"), parts([last("GET /", websocket)])),
        (
            "connect",
            "200 OK",
            with(
                upgrade_of("CONNECT"),
                json!({
                    "entry": { "match": { "prefix": null, "connect_matcher": {} } },
                    "route": { "upgrade_configs": [{ "upgrade_type": "CONNECT", "connect_config": {} }] },
                }),
            ),
            parts(["CONNECT cart:80 HTTP/1.1\r\nhost: cart:80\r\n\r\n".into(), last("GET /", "")]),
        ),
        ("grpc unary", "grpc-status", to_http2(), grpc(&one, false)),
        (
            "grpc server stream",
            "piece 4",
            to_http2(),
            http2("POST", "/shop.Cart/drip", &one, false),
        ),
        ("grpc client stream", "grpc-status", to_http2(), grpc(&three, false)),
        ("grpc both streams", "grpc-status", to_http2(), grpc(&three, true)),
        (
            "grpc missing",
            "\"grpc-status\": \"14\"",
            json!({ "route": { "cluster": "@3" } }),
            grpc(&one, false),
        ),
        ("http2 upstream", "HTTP/2.0", to_http2(), get("/", "")),
        (
            "weighted clusters",
            "/second",
            json!({ "route": by_header("x-pick") }),
            parts([open("GET /first", "x-pick: 10\r\n"), last("GET /second", "x-pick: 90\r\n")]),
        ),
        (
            "cluster header",
            "200 OK",
            json!({ "route": { "cluster": null, "cluster_header": "x-cluster" } }),
            get("/", &format!("x-cluster: {}\r\n", service("cluster header", "1"))),
        ),
        (
            "cluster header missing",
            "503",
            json!({ "route": { "cluster": null, "cluster_header": "x-cluster" } }),
            get("/", "x-cluster: outbound|80||no.shop.svc.cluster.local\r\n"),
        ),
        (
            "internal redirect",
            "/there",
            json!({ "first": [to_two("/there")], "route": { "internal_redirect_policy": {} } }),
            get("/redirect", ""),
        ),
        (
            "direct response",
            "418",
            json!({ "entry": { "route": null, "direct_response": { "status": 418, "body": { "inline_string": "tea" } } } }),
            get("/", ""),
        ),
        (
            "redirect",
            "301",
            json!({ "entry": { "route": null, "redirect": { "path_redirect": "/new" } } }),
            get("/", ""),
        ),
        (
            "fault abort",
            "418",
            filter(
                "fault.v3.HTTPFault",
                json!({ "abort": { "http_status": 418, "percentage": always } }),
            ),
            get("/", ""),
        ),
        (
            "fault delay",
            "200 OK",
            filter(
                "fault.v3.HTTPFault",
                json!({ "delay": { "fixed_delay": "0.3s", "percentage": always } }),
            ),
            get("/", ""),
        ),
        (
            "headers",
            "x-response: b",
            json!({ "entry": {
            "request_headers_to_add": [{ "header": { "key": "x-request", "value": "a" } }],
            "request_headers_to_remove": ["x-gone"],
            "response_headers_to_add": [{ "header": { "key": "x-response", "value": "b" } }],
        } }),
            get("/", "x-gone: 1\r\n"),
        ),
        ("retry 5xx", "200 OK", retry(json!({ "retry_on": "5xx" })), get("/fail-first", "")),
        (
            "retry with body",
            "200 OK",
            retry(json!({ "retry_on": "5xx" })),
            parts([last("POST /fail-first", "content-length: 4\r\n") + "body"]),
        ),
        ("retry reset", "200 OK", retry(json!({ "retry_on": "reset" })), get("/reset-first", "")),
        (
            "retry connect-failure",
            "503",
            with(retry(json!({ "retry_on": "connect-failure", "num_retries": 2 })), to(&[refused])),
            get("/", ""),
        ),
        (
            "retry previous hosts",
            "200 OK",
            with(
                to(&[a, b]),
                retry(json!({
                    "retry_on": "5xx",
                    "host_selection_retry_max_attempts": 9,
                    "retry_host_predicate": [{ "name": "previous", "typed_config": { "@type": format!("{EXTENSIONS}.retry.host.previous_hosts.v3.PreviousHostsPredicate") } }],
                })),
            ),
            get("/fail-first", ""),
        ),
        (
            "retry per try timeout",
            "504",
            retry(json!({ "retry_on": "5xx", "per_try_timeout": "0.3s" })),
            get("/hang", ""),
        ),
        (
            "hash policy",
            "/second",
            with(
                to(&[a, b]),
                json!({ "cluster": { "lb_policy": "RING_HASH" }, "route": { "hash_policy": [{ "header": { "header_name": "x-user" } }] } }),
            ),
            parts([open("GET /first", "x-user: 1\r\n"), last("GET /second", "x-user: 4\r\n")]),
        ),
        (
            "prefix rewrite",
            " /new/path",
            json!({ "entry": { "match": { "prefix": "/old" } }, "route": { "prefix_rewrite": "/new" } }),
            get("/old/path", ""),
        ),
        (
            "host rewrite",
            "\"other\"",
            json!({ "route": { "host_rewrite_literal": "other" } }),
            get("/", ""),
        ),
        ("timeout", "504", json!({ "route": { "timeout": "0.3s" } }), get("/hang", "")),
        ("tiny timeout", "504", json!({ "route": { "timeout": "0.001s" } }), get("/slow", "")),
        ("idle timeout", "504", json!({ "route": { "idle_timeout": "0.3s" } }), get("/hang", "")),
        (
            "max pending",
            "503",
            limits(json!({ "max_connections": 1, "max_pending_requests": 1 })),
            at_once(3, get("/slower", "")),
        ),
        (
            "max requests",
            "503",
            limits(json!({ "max_requests": 1 })),
            at_once(3, get("/slower", "")),
        ),
        (
            "max requests per connection",
            "/second",
            json!({ "cluster": { "typed_extension_protocol_options": { "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "common_http_protocol_options": { "max_requests_per_connection": 1 },
            "explicit_http_config": { "http_protocol_options": {} },
        } } } }),
            parts([open("GET /first", "") + &last("GET /second", "")]),
        ),
        (
            "mirror",
            "mirrored: true",
            json!({ "route": { "request_mirror_policies": [{ "cluster": "@2" }] } }),
            client(async |address| {
                let seen = || SEEN.lock().unwrap().get("mirrored-shadow").copied();
                let before = seen();
                let request = "GET / HTTP/1.1\r\nhost: mirrored\r\nconnection: close\r\n\r\n";
                let result =
                    talk(TcpStream::connect(address).await.unwrap(), &[request.into()], false)
                        .await;
                sleep(PAUSE).await;
                format!("{result}\nmirrored: {}", seen() > before)
            }),
        ),
        (
            "client leaves",
            "200 OK",
            none(),
            client(async |address| {
                let mut leaving = TcpStream::connect(address).await.unwrap();
                leaving.write_all(open("GET /slow", "").as_bytes()).await.unwrap();
                drop(leaving);
                sleep(PAUSE * 4).await;
                talk(TcpStream::connect(address).await.unwrap(), &[last("GET /", "").into()], false)
                    .await
            }),
        ),
        ("tcp server first", "hello", tcp_to(&[stream]), tcp([""])),
        ("tcp client first", "200 OK", json!({ "tcp": {} }), parts([last("GET /", "")])),
        ("tcp half-close", "bye", tcp_to(&[stream]), tcp(["one", "two"])),
        ("tcp 5 MB", " bytes, ", tcp_to(&[stream]), tcp([&big])),
        ("tcp at once", "bye", tcp_to(&[stream]), at_once(20, tcp(["one"]))),
        (
            "tcp weighted clusters",
            "2 services",
            json!({ "tcp": { "cluster": null, "weighted_clusters": weighted } }),
            client(async |address| {
                let mut results = BTreeSet::new();
                for _ in 0..40 {
                    results.insert(
                        talk(
                            TcpStream::connect(address).await.unwrap(),
                            &[last("GET /", "").into()],
                            false,
                        )
                        .await,
                    );
                }
                format!("{} services", results.len())
            }),
        ),
        ("tcp missing", "", json!({ "tcp": { "cluster": "@3" } }), tcp(["one"])),
        ("tcp without endpoints", "", tcp_to(&[]), tcp(["one"])),
        ("tcp refused", "", tcp_to(&[refused]), tcp(["one"])),
        (
            "tcp idle timeout",
            "hello",
            with(tcp_to(&[stream]), json!({ "tcp": { "idle_timeout": "0.3s" } })),
            parts([""]),
        ),
        ("strict_dns", "200 OK", of_type("STRICT_DNS", ipv4(), localhost()), get("/", "")),
        ("logical_dns", "200 OK", of_type("LOGICAL_DNS", ipv4(), localhost()), get("/", "")),
        ("static", "200 OK", of_type("STATIC", none(), hosts("127.0.0.1", &[a])), get("/", "")),
        (
            "original_dst",
            "200 OK",
            of_type(
                "ORIGINAL_DST",
                json!({ "lb_policy": "CLUSTER_PROVIDED", "original_dst_lb_config": { "use_http_header": true } }),
                Value::Null,
            ),
            get("/", &format!("x-envoy-original-dst-host: 127.0.0.1:{a}\r\n")),
        ),
        (
            "aggregate",
            "200 OK",
            of_type(
                Value::Null,
                json!({ "lb_policy": "CLUSTER_PROVIDED", "cluster_type": { "name": "envoy.clusters.aggregate", "typed_config": {
            "@type": format!("{EXTENSIONS}.clusters.aggregate.v3.ClusterConfig"), "clusters": ["@2"],
        } } }),
                Value::Null,
            ),
            get("/", ""),
        ),
        ("no endpoints", "no healthy upstream", to(&[]), get("/", "")),
        ("refused", "503", to(&[refused]), get("/", "")),
        (
            "failover",
            "200 OK",
            json!({ "endpoints": { "endpoints": [
            { "lb_endpoints": [] }, { "priority": 1, "lb_endpoints": hosts("127.0.0.1", &[b])[0]["lb_endpoints"] },
        ] } }),
            get("/", ""),
        ),
        ("missing cluster", "503", json!({ "route": { "cluster": "@3" } }), get("/", "")),
        (
            "missing cluster 404",
            "404",
            json!({ "route": { "cluster": "@3", "cluster_not_found_response_code": "NOT_FOUND" } }),
            get("/", ""),
        ),
        (
            "unknown route",
            "404",
            json!({ "entry": { "match": { "prefix": "/known" } } }),
            get("/", ""),
        ),
        (
            "subset",
            "200 OK",
            json!({
                "cluster": { "lb_subset_config": { "fallback_policy": "NO_FALLBACK", "subset_selectors": [{ "keys": ["version"] }] } },
                "endpoints": { "endpoints": [{ "lb_endpoints": [labelled("v1", a), labelled("v2", b)] }] },
                "route": { "metadata_match": { "filter_metadata": { "envoy.lb": { "version": "v2" } } } },
            }),
            get("/", ""),
        ),
        ("tls", "200 OK", to_tls("localhost"), get("/", "")),
        ("tls wrong name", "503", to_tls("other"), get("/", "")),
        ("ext_authz allow", "200 OK", authz(), get("/", "")),
        ("ext_authz deny", "403", authz(), get("/deny", "")),
        (
            "lua call",
            "(\"x-lua\", \"200\")",
            lua(
                "local headers = handle:httpCall('@2', {[':method']='GET', [':path']='/', [':authority']='lua'}, '', 2000)\nhandle:headers():add('x-lua', headers[':status'])",
            ),
            get("/", ""),
        ),
        (
            "lua route",
            "\"x-two\"",
            with(
                lua("handle:headers():add('x-two', '1')\nhandle:clearRouteCache()"),
                json!({ "first": [with(to_two("/"), json!({ "match": { "headers": [{ "name": "x-two", "present_match": true }] } }))] }),
            ),
            get("/", ""),
        ),
        (
            "local rate limit",
            "429",
            filter(
                "local_ratelimit.v3.LocalRateLimit",
                json!({
                    "stat_prefix": "limit",
                    "token_bucket": { "max_tokens": 1, "fill_interval": "3600s" },
                    "filter_enabled": { "default_value": always },
                    "filter_enforced": { "default_value": always },
                }),
            ),
            parts([open("GET /first", "") + &last("GET /second", "")]),
        ),
        (
            "rbac",
            "403",
            filter(
                "rbac.v3.RBAC",
                json!({ "rules": { "action": "DENY", "policies": { "all": { "permissions": [{ "any": true }], "principals": [{ "any": true }] } } } }),
            ),
            get("/", ""),
        ),
        (
            "compression",
            "content-encoding: gzip",
            filter(
                "compressor.v3.Compressor",
                json!({ "compressor_library": { "name": "gzip", "typed_config": { "@type": format!("{EXTENSIONS}.compression.gzip.compressor.v3.Gzip") } } }),
            ),
            get("/", "accept-encoding: gzip\r\n"),
        ),
        (
            "buffer",
            "(\"content-length\", \"4\")",
            filter("buffer.v3.Buffer", json!({ "max_request_bytes": 10 })),
            parts([last("POST /", chunked) + "4\r\nbody\r\n0\r\n\r\n"]),
        ),
        (
            "buffer overflow",
            "413",
            filter("buffer.v3.Buffer", json!({ "max_request_bytes": 3 })),
            parts([last("POST /", chunked) + "4\r\nbody\r\n0\r\n\r\n"]),
        ),
        (
            "buffer overflow with length",
            "413",
            filter("buffer.v3.Buffer", json!({ "max_request_bytes": 3 })),
            parts([last("POST /", "content-length: 100000\r\n") + &"x".repeat(100_000)]),
        ),
        (
            "buffer 5 MB",
            "5000000 bytes",
            filter("buffer.v3.Buffer", json!({ "max_request_bytes": 10_000_000 })),
            parts([posted(length, &big)]),
        ),
        ("ext_authz 5 MB", "5000000 bytes", authz(), parts([posted(length, &big)])),
        ("ext_authz with body", "5000000 bytes", with_body(), parts([posted(length, &big)])),
        ("lua body of 5 MB", "413", lua("handle:body()"), parts([posted(length, &big)])),
        (
            "lua body",
            "100000 bytes",
            lua("handle:body()"),
            parts([last("POST /", "content-length: 100000\r\n") + &"x".repeat(100_000)]),
        ),
        (
            "fault delay 5 MB",
            "",
            filter(
                "fault.v3.HTTPFault",
                json!({ "delay": { "fixed_delay": "0.3s", "percentage": always } }),
            ),
            parts([posted(length, &big)]),
        ),
        (
            "retry 5 MB",
            "",
            retry(json!({ "retry_on": "5xx" })),
            parts([[last("POST /fail-first", length).as_bytes(), &big].concat()]),
        ),
        (
            "health check",
            "200 OK",
            json!({ "cluster": { "health_checks": [{
            "timeout": "1s", "interval": "60s", "unhealthy_threshold": 1, "healthy_threshold": 1, "http_health_check": { "path": "/" },
        }] } }),
            get("/", ""),
        ),
        (
            "max stream duration",
            "504",
            json!({ "route": { "max_stream_duration": { "max_stream_duration": "0.3s" } } }),
            get("/hang", ""),
        ),
        (
            "tcp connect attempts",
            "",
            with(tcp_to(&[refused]), json!({ "tcp": { "max_connect_attempts": 3 } })),
            tcp([""]),
        ),
        (
            "json log",
            "200 OK",
            json!({ "manager": { "access_log": [{ "name": "json", "typed_config": {
            "@type": format!("{EXTENSIONS}.access_loggers.file.v3.FileAccessLog"),
            "path": "@log",
            "log_format": { "json_format": { "name": "json log: ", "code": "%RESPONSE_CODE%", "cluster": "%UPSTREAM_CLUSTER%", "flags": "%RESPONSE_FLAGS%" } },
        } }] } }),
            get("/", ""),
        ),
        (
            "sni passthrough",
            "200 OK",
            json!({ "tcp": {}, "chain": { "filter_chain_match": { "server_names": ["localhost"] } }, "listener": { "listener_filters": [listener_filter("tls_inspector.v3.TlsInspector")] } }),
            client(async |address| {
                let mut roots = rustls::RootCertStore::empty();
                roots.add(TLS.1.clone()).unwrap();
                let config = rustls::ClientConfig::builder_with_provider(provider())
                    .with_safe_default_protocol_versions()
                    .unwrap();
                let config = config.with_root_certificates(roots).with_no_client_auth();
                let stream = TcpStream::connect(address).await.unwrap();
                let name = ServerName::try_from("localhost").unwrap();
                match TlsConnector::from(Arc::new(config)).connect(name, stream).await {
                    Ok(stream) => talk(stream, &[last("GET /", "").into()], false).await,
                    Err(error) => error.to_string(),
                }
            }),
        ),
        (
            "http inspector",
            "200 OK",
            json!({ "chain": { "filter_chain_match": { "application_protocols": ["http/1.1"] } }, "listener": { "listener_filters": [listener_filter("http_inspector.v3.HttpInspector")] } }),
            get("/", ""),
        ),
        (END, "200 OK", none(), get("/", "")),
        // These are replaced while the first request waits.
        (LISTENER_REPLACED, "200 OK", none(), get("/", "")),
        (ROUTES_REPLACED, "200 OK", none(), get("/", "")),
    ]
}
