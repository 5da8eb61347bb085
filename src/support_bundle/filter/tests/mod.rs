//! Plants secrets in pages, logs and rules, and tests that none of them passes, and that names, addresses and numbers do.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::config::environment;

mod planted;

const SECRETS: [&str; 4] = [
    "h4sh-Hush+s3cret/9=",
    "Zx81kQ7vR2mN4pL9",
    "0f4c9a17d2e84b6c93af",
    "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl_-",
];

/// A reader of a text that returns at most this number of bytes at once.
struct InChunks<'a>(&'a [u8], usize);

impl Read for InChunks<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.1.min(buffer.len());
        self.0.read(&mut buffer[..length])
    }
}

/// Copies a text in chunks of this size. Returns the kept part, the number of parts left out, and true if all was read.
fn copied(form: Form, text: &[u8], chunk: usize) -> (String, u64, bool) {
    let (mut out, mut left_out) = (Vec::new(), 0);
    let is_good = form.copy(InChunks(text, chunk), &mut out, &mut left_out).is_ok();
    (String::from_utf8(out).expect("text"), left_out, is_good)
}

fn json(message: &'static str, document: &Value) -> (Value, u64) {
    let (text, left_out, is_good) =
        copied(Form::Json(message), document.to_string().as_bytes(), usize::MAX);
    assert!(is_good, "{document}");
    (serde_json::from_str(&text).expect("JSON"), left_out)
}

fn typed(kind: &str, members: Value) -> Value {
    let mut object = json!({ "@type": format!("type.googleapis.com/{kind}") });
    object.as_object_mut().expect("one").extend(members.as_object().expect("one").clone());
    object
}

/// Returns a configuration dump that has `other` in each object that is not a list of names.
fn dump(other: &Value) -> Value {
    let with = |members: Value| {
        let mut object = other.as_object().cloned().unwrap_or_default();
        object.insert("any".to_owned(), other.clone());
        object.extend(members.as_object().expect("an object").clone());
        Value::from(object)
    };
    let typed = |kind: &str, members: Value| typed(kind, with(members));
    let wasm = "envoy.extensions.filters.http.wasm.v3.Wasm";
    let filters = [
        json!({ "name": "router", "typed_config": typed("envoy.extensions.filters.http.router.v3.Router", other_object(other)) }),
        json!({ "name": "lua", "typed_config": typed("envoy.extensions.filters.http.lua.v3.Lua", json!({ "default_source_code": { "inline_string": other } })) }),
        json!({ "name": "wasm", "typed_config": typed(wasm, json!({ "config": { "name": other, "configuration": { "value": other } } })) }),
        json!({ "name": "struct", "typed_config": typed("udpa.type.v1.TypedStruct", json!({ "type_url": "a", "value": { "name": other } })) }),
        json!({ "name": "late", "typed_config": { "name": other, "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster", "type": other } }),
    ];
    let route = with(json!({
        "name": "default", "match": { "prefix": other, "headers": [{ "name": "x", "exact_match": other }] },
        "route": with(json!({ "cluster": "outbound|80||cart", "timeout": "0s", "prefix_rewrite": other })),
        "request_headers_to_add": [{ "header": { "key": "x-a", "value": other } }],
        "typed_per_filter_config": { "a": typed(wasm, json!({ "value": other })) },
        "metadata": { "filter_metadata": { "a": { "name": other }, "istio": { "config": "/apis/a", "b": other } } },
    }));
    let manager = typed(
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        json!({
            "stat_prefix": "inbound_0.0.0.0_80", "http_filters": filters,
            "tracing": { "custom_tags": [{ "tag": "a", "literal": { "value": other } }] },
            "access_log": [{ "name": "file", "typed_config": typed("envoy.extensions.access_loggers.file.v3.FileAccessLog", json!({
                "path": "/dev/stdout", "log_format": { "text_format_source": { "inline_string": other } },
            })) }],
            "route_config": with(json!({ "name": "80", "virtual_hosts": [
                with(json!({ "name": "cart:80", "domains": ["cart", "*.shop"], "routes": [route] })),
            ] })),
        }),
    );
    let tls = typed(
        "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        json!({
            "common_tls_context": with(json!({
                "tls_certificates": [{ "private_key": { "inline_string": other } }],
                "tls_certificate_sds_secret_configs": [{ "name": "default" }],
            })),
            "session_ticket_keys": { "keys": [{ "inline_bytes": other }] },
        }),
    );
    let listener = typed(
        "envoy.config.listener.v3.Listener",
        json!({
            "name": "virtualInbound", "address": { "socket_address": { "address": "::", "port_value": 15006 } },
            "filter_chains": [with(json!({
                "filters": [{ "name": "hcm", "typed_config": manager }],
                "transport_socket": { "name": "tls", "typed_config": tls },
            }))],
        }),
    );
    let cluster = typed(
        "envoy.config.cluster.v3.Cluster",
        json!({
            "name": "outbound|80||cart", "type": "EDS", "connect_timeout": "10s",
            "transport_socket": { "typed_config": typed(wasm, json!({ "name": other })) }, "typed_extension_protocol_options": { "a": typed(wasm, json!({ "name": other })) },
        }),
    );
    let refused = json!({ "name": "refused", "error_state": with(json!({
        "failed_configuration": listener, "last_update_attempt": "2026-11-30T10:00:00Z", "details": other,
    })) });
    json!({ "configs": [
        typed("envoy.admin.v3.ListenersConfigDump", json!({ "dynamic_listeners": [
            with(json!({ "name": "virtualInbound", "active_state": with(json!({ "listener": listener })) })), refused,
        ] })),
        typed("envoy.admin.v3.ClustersConfigDump", json!({ "dynamic_active_clusters": [with(json!({ "cluster": cluster }))] })),
        typed("envoy.admin.v3.SecretsConfigDump", json!({ "static_secrets": [with(json!({
            "name": "a", "secret": typed("envoy.extensions.transport_sockets.tls.v3.Secret", json!({
                "name": other, "generic_secret": { "secret": { "inline_string": other } },
            })),
        }))] })),
        typed("envoy.admin.v3.BootstrapConfigDump", json!({ "bootstrap": bootstrap(other) })),
    ] })
}

fn other_object(other: &Value) -> Value {
    other.as_object().map_or_else(|| json!({}), |it| Value::from(it.clone()))
}

/// Returns a bootstrap that has `other` in several places.
fn bootstrap(other: &Value) -> Value {
    json!({
        "node": { "id": "sidecar~10.0.0.1~cart", "metadata": {
            "NAMESPACE": "shop", "ANNOTATIONS": { "a": other }, "LABELS": { "app": other },
            "PROXY_CONFIG": { "proxyMetadata": { "NAME": other } }, "MY_TOKEN": other, "NAME": { "NAME": other },
        } },
        "static_resources": { "secrets": [{ "name": other }] },
        "layered_runtime": { "layers": [{ "name": "a", "static_layer": { "a": other } }] },
        "tracing": { "http": { "typed_config": { "collector_endpoint": other } } },
        "any": other,
    })
}

/// Returns pages with `other` in places that are not listed: the message, and the page.
fn pages(other: &Value) -> Vec<(&'static str, Value)> {
    let unlisted = json!({ "any": other, "metadata": { "name": other }, "reason": other });
    let mut server = unlisted.clone();
    server["command_line_options"] = json!({ "config_yaml": other, "restart_epoch": 0 });
    server["node"] = bootstrap(other)["node"].clone();
    let rules = json!({ "nftables": [
        { "rule": { "family": "inet", "chain": "a", "comment": other, "expr": [
            { "match": { "op": "==", "left": { "meta": { "key": "skuid" } }, "right": 1337 } },
            { "log": { "prefix": other } }, { "redirect": { "port": 15001 } },
        ] } },
        { "table": { "name": "a", "comment": other } }, { "set": { "elem": [other] } },
    ] });
    let configuration = json!({
        "proxyConfig": {
            "proxyMetadata": { "value": { "ISTIO_META_A": other } }, "statusPort": { "value": 15020, "origin": "default" },
            "tracing": { "value": { "lightstep": { "accessToken": other } } },
        },
        "variables": {
            "HTTPS_PROXY": { "value": other, "origin": "variable" }, "DB_PASSWORD": { "value": other, "origin": "variable" },
            "ISTIO_PROMETHEUS_ANNOTATIONS": { "value": other, "origin": "variable" },
        },
        "problems": [other], "warnings": [other],
    });
    let overview = json!({
        "missing": other, "doctor": unlisted,
        "envoy": { "pid": 7, "last_crash": { "stderr": [other], "signal": 11 }, "last_restart": { "problem": other } },
        "istiod": { "last_error": { "code": "ISTIOD_ERROR", "error": other } },
        "discovery": { "types": { "type.googleapis.com/envoy.config.cluster.v3.Cluster": { "nacks": 1, "last_nack": { "reason": other } } } },
        "wasm": { "resources": [{ "name": "plugin", "url": other, "error": other }], "fetching": [other] },
        "health": { "problem": other }, "warnings": [{ "code": "FILE_MISSING", "message": other }],
    });
    vec![
        ("ConfigDump", dump(other)),
        ("Bootstrap", bootstrap(other)),
        ("ServerInfo", server),
        ("Ruleset", rules),
        ("Configuration", configuration),
        ("Overview", overview),
        ("Listeners", json!({ "listener_statuses": [unlisted] })),
        (
            "Clusters",
            json!({ "cluster_statuses": [{ "host_statuses": [unlisted], "metadata": other }] }),
        ),
        ("Certificates", json!({ "certificates": [{ "cert_chain": [unlisted] }], "any": other })),
        ("Memory", unlisted.clone()),
        ("NameTable", json!({ "table": { "cart": unlisted }, "any": other })),
    ]
}

#[test]
fn no_secret_passes_in_any_member_of_any_page() {
    for secret in SECRETS {
        let texts = planted::texts(secret).into_iter().chain(planted::further_texts(secret));
        let texts = texts.chain(planted::lines(secret)).chain([secret.to_owned()]);
        let documents = planted::documents(secret).into_iter().chain(planted::members(secret));
        for other in documents.chain([texts.collect()]) {
            for (message, page) in pages(&other) {
                let (kept, left_out) = json(message, &page);
                assert!(!kept.to_string().contains(secret), "{message}, {other}: {kept:#}");
                assert!(left_out > 0, "{message}");
            }
        }
    }
}

#[test]
fn names_addresses_and_numbers_of_a_dump_stay() {
    let (kept, _) = json("ConfigDump", &dump(&json!("hush")));
    let listener = &kept["configs"][0]["dynamic_listeners"][0]["active_state"]["listener"];
    let manager = &listener["filter_chains"][0]["filters"][0]["typed_config"];
    let refused = &kept["configs"][0]["dynamic_listeners"][1];
    for (found, expected) in [
        (&listener["name"], json!("virtualInbound")),
        (&listener["address"]["socket_address"]["address"], json!("::")),
        (&listener["address"]["socket_address"]["port_value"], json!(15006)),
        (&manager["http_filters"][2]["name"], json!("wasm")),
        (
            &manager["http_filters"][2]["typed_config"],
            json!({ "@type": "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm" }),
        ),
        (&manager["http_filters"][4]["typed_config"], json!({})),
        (&manager["route_config"]["virtual_hosts"][0]["domains"], json!(["cart", "*.shop"])),
        (
            &manager["route_config"]["virtual_hosts"][0]["routes"][0],
            json!({
                "name": "default", "route": { "cluster": "outbound|80||cart", "timeout": "0s" },
                "metadata": { "filter_metadata": { "istio": { "config": "/apis/a" } } },
            }),
        ),
        (
            &listener["filter_chains"][0]["transport_socket"]["typed_config"]["common_tls_context"],
            json!({ "tls_certificate_sds_secret_configs": [{ "name": "default" }] }),
        ),
        (&refused["name"], json!("refused")),
        (&refused["error_state"]["failed_configuration"]["name"], json!("virtualInbound")),
        (&kept["configs"][1]["dynamic_active_clusters"][0]["cluster"]["type"], json!("EDS")),
        (&kept["configs"][2]["static_secrets"][0], json!({ "name": "a" })),
        (
            &json("Bootstrap", &bootstrap(&json!("hush"))).0["node"]["metadata"],
            json!({ "NAMESPACE": "shop" }),
        ),
    ] {
        assert_eq!(*found, expected);
    }
    let (rules, left_out) = json("Ruleset", &pages(&json!("hush"))[3].1);
    let expr = json!([
        { "match": { "op": "==", "left": { "meta": { "key": "skuid" } }, "right": 1337 } },
        {}, { "redirect": { "port": 15001 } },
    ]);
    assert_eq!(rules["nftables"][0]["rule"]["expr"], expr);
    assert_eq!(left_out, 4);
}

#[test]
fn a_variable_is_shown_if_its_type_or_its_name_is_harmless() {
    let set = |value: &str| json!({ "value": value, "origin": "variable" });
    let rows = environment::rows().map(|row| (row.name.to_owned(), set("hush")));
    let (kept, _) = json("Configuration", &json!({ "variables": rows.collect::<Value>() }));
    for (name, is_shown) in [
        ("TRUST_DOMAIN", true),
        ("SECRET_TTL", true),
        ("ISTIO_DELTA_XDS", true),
        ("HTTPS_PROXY", false),
        ("ISTIO_KUBE_APP_PROBERS", false),
        ("XDS_HEADER_<NAME>", false),
        ("ISTIO_META_<KEY>", false),
    ] {
        let shown = &kept["variables"][name];
        assert_eq!(*shown != Value::Null && shown["value"] == "hush", is_shown, "{name}: {shown}");
    }
    for value in ["user:password@host:1", "Bearer a=", "{\"a\":\"b\"}", "%5B", "a\nb"] {
        let (kept, _) = json("Configuration", &json!({ "variables": { "CA_ADDR": set(value) } }));
        assert_eq!(kept["variables"]["CA_ADDR"], json!({ "origin": "variable" }), "{value}");
    }
}

#[test]
fn no_secret_of_a_line_passes() {
    const TIME: &str = "2026-11-30T10:00:00.000000Z";
    for secret in SECRETS {
        let texts = planted::texts(secret).into_iter().chain(planted::further_texts(secret));
        for text in texts.chain(planted::lines(secret)).chain([secret.to_owned()]) {
            let quoted = text.replace('\\', "\\\\").replace('"', "\\\"");
            for (form, line) in [
                (Form::Lines(lines::log), text.clone()),
                (Form::Lines(lines::log), format!("{TIME}\twarn\t{text}")),
                (
                    Form::Lines(lines::log),
                    format!("{TIME}\twarn\tsds\t{text} [FILE_MISSING]\ta={text}"),
                ),
                (Form::Lines(lines::log), format!("{TIME}\t{text}\tsds\ta")),
                (
                    Form::Lines(lines::log),
                    format!("{TIME}\tinfo\tenvoy main a.cc:7\t{text}\tthread=1"),
                ),
                (Form::Lines(lines::log), format!("{TIME}\tinfo\tenvoy {text} a.cc:7\ta")),
                (
                    Form::Lines(lines::log),
                    json!({ "time": TIME, "level": "info", "scope": text, "msg": text })
                        .to_string(),
                ),
                (Form::Lines(lines::statistic), format!("server.version: \"{text}\"")),
                (
                    Form::Lines(lines::statistic),
                    format!("istiocustom.istio_requests_total.{text}: 7"),
                ),
                (Form::Lines(lines::statistic), text.clone()),
                (Form::Lines(lines::metric), format!("other{{a=\"{text}\"}} 7")),
                (Form::Lines(lines::metric), format!("# HELP istio_agent_a {text}")),
                (Form::Lines(lines::metric), text.clone()),
            ] {
                let (kept, _, _) = copied(form, line.as_bytes(), usize::MAX);
                assert!(!kept.contains(secret), "{line}: {kept}");
            }
            let mut left_out = 0;
            let saved = format!(
                "# {quoted}\n*nat\n:ISTIO_OUTPUT - [0:0]\n-A ISTIO_OUTPUT -m comment --comment \"{quoted}\" -j RETURN\n\
                 -A ISTIO_OUTPUT -j LOG --log-prefix \"{quoted}\"\nCOMMIT\n"
            );
            let kept = lines::rules("iptables-save", saved.as_bytes(), &mut left_out);
            let expected = "*nat\n:ISTIO_OUTPUT - [0:0]\n-A ISTIO_OUTPUT -m comment -j RETURN\n\
                            -A ISTIO_OUTPUT -j LOG\nCOMMIT\n";
            assert_eq!(kept, expected);
        }
    }
}

#[test]
fn the_known_fields_of_lines_stay() {
    let time = "2026-11-30T10:00:00.000000Z";
    for (keep, line, expected) in [
        (
            lines::log as fn(&str) -> _,
            "2026-11-30T10:00:00.000000Z\tinfo\tca\tsent",
            Some("info\tca".to_owned()),
        ),
        (lines::log, "2026-11-30T10:00:00.000000Z\twarn\tno scope", Some("warn".to_owned())),
        (
            lines::log,
            "2026-11-30T10:00:00.000000Z\twarn\tsds\tfile a: b; c [FILE_MISSING]\tid=7",
            Some("warn\tsds\ta setting names a file that does not exist [FILE_MISSING]".to_owned()),
        ),
        (
            lines::log,
            "2026-11-30T10:00:00.000000Z\twarning\tenvoy config external/envoy/source/a.cc:69\tgRPC\tthread=15",
            Some("warning\tenvoy config external/envoy/source/a.cc:69".to_owned()),
        ),
        (
            lines::log,
            r#"{"level":"error","time":"2026-11-30T10:00:00.000000Z","scope":"ca","msg":"x"}"#,
            Some("error\tca".to_owned()),
        ),
        (lines::log, "    at frame 7", None),
    ] {
        let expected = expected.map(|rest| format!("{time}\t{rest}"));
        assert_eq!(keep(line), expected, "{line}");
    }
    for (keep, line) in [
        (
            lines::statistic as fn(&str) -> _,
            "cluster.outbound|80||token-service.shop;.upstream_rq_2xx: 5",
        ),
        (
            lines::statistic,
            "http.inbound_0.0.0.0_80;.downstream_rq_time: P0(nan,1) P99.9(nan,1.5e+06)",
        ),
        (
            lines::metric,
            "istio_agent_xds_acks_total{type=\"type.googleapis.com/envoy.config.cluster.v3.Cluster\"} 2",
        ),
        (lines::metric, "# TYPE istio_agent_build_info gauge"),
    ] {
        assert_eq!(keep(line).as_deref(), Some(line));
    }
    for rule in [
        "-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m tcp ! --dport 15008 -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT",
        "-A ISTIO_INBOUND -p tcp -j TPROXY --on-port 15006 --on-ip 0.0.0.0 --tproxy-mark 0x539/0xffffffff",
        "-A PREROUTING -m conntrack --ctstate RELATED,ESTABLISHED -j RETURN",
        "-A OUTPUT -s fd00::/8 -p udp -m udp --dport 53 -j REDIRECT --to-ports 15053",
    ] {
        let saved = format!("{rule}\n");
        assert_eq!(lines::rules("iptables-save", saved.as_bytes(), &mut 0), saved);
    }
    let long = format!("a: {}\nb: 7\n", "1".repeat(MAX_LINE as usize));
    let (kept, left_out, _) = copied(Form::Lines(lines::statistic), long.as_bytes(), usize::MAX);
    assert_eq!((&*kept, left_out), ("b: 7\n", 1));
}

/// Generates JSON with listed and other names.
fn json_value() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        Just(Value::Null),
        "[a-f=@\"\\\\{}\\[\\], ]{3,12}".prop_map(Value::from),
    ];
    scalar.prop_recursive(6, 48, 4, |inner| {
        let names = prop::sample::select(vec![
            "configs",
            "@type",
            "dynamic_listeners",
            "listener",
            "name",
            "filter_chains",
            "filters",
            "typed_config",
            "a",
        ]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((names.prop_map(str::to_owned), inner), 0..4)
                .prop_map(|members| members.into_iter().collect::<serde_json::Map<_, _>>().into()),
        ]
    })
}

proptest! {
    #[test]
    fn json_of_any_kind_is_reduced_to_valid_json_in_any_chunks(page in json_value(), chunk in 1..50_usize) {
        let page = json!({ "configs": page }).to_string();
        let whole = copied(Form::Json("ConfigDump"), page.as_bytes(), usize::MAX);
        prop_assert!(serde_json::from_str::<Value>(&whole.0).is_ok(), "{}", whole.0);
        prop_assert!(!whole.0.contains(['=', '\\']));
        prop_assert_eq!(copied(Form::Json("ConfigDump"), page.as_bytes(), chunk), whole);
    }

    #[test]
    fn bytes_of_any_kind_pass_or_are_refused_alike_in_any_chunks(
        text in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..200),
            "([-a-z\"\\\\{}\\[\\]:=,. \n\t]|2026-11-30|-A |\"configs\"|@){0,60}".prop_map(String::into_bytes),
        ],
        chunk in 1..50_usize,
    ) {
        for form in [Form::Json("ConfigDump"), Form::Lines(lines::log), Form::Lines(lines::statistic), Form::Lines(lines::metric)] {
            let whole = copied(form, &text, usize::MAX);
            prop_assert_eq!(copied(form, &text, chunk), whole);
        }
        lines::rules("iptables-save", &text, &mut 0);
    }
}
