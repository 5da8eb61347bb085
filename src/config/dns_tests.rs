//! Tests the configuration of DNS.

use std::time::Duration;

use super::tests::machine;

#[test]
fn dns_is_answered_where_it_is_captured_or_enabled() {
    let capture = ("ISTIO_META_DNS_CAPTURE", "true");
    let server = ("ISTIO_META_ENABLE_DNS_SERVER", "true");
    for (variables, kind, expected) in [
        (&[][..], "sidecar", false),
        (&[capture], "sidecar", true),
        (&[capture], "router", false),
        (&[server], "router", true),
    ] {
        let config = machine(variables).load(kind).expect("a good configuration");
        assert_eq!(config.dns.is_some(), expected, "{variables:?} {kind}");
    }
}

#[test]
fn dns_follows_the_pods_resolvers_and_runs_without_them() {
    let settings = [
        ("ISTIO_META_DNS_CAPTURE", "true"),
        ("ISTIO_AGENT_RESOLV_CONF", "resolv.conf"),
        ("DNS_FORWARD_TIMEOUT", "2s"),
    ];
    let machine = machine(&settings);
    let dns = machine.config();
    assert_eq!(dns.warnings.len(), 1, "{:?}", dns.warnings);
    let dns = dns.dns.expect("DNS");
    assert_eq!(dns.server.addresses, ["localhost:15053"]);
    machine.file("resolv.conf", "nameserver fd00::1\nsearch shop.svc.cluster.local\n");
    let dns = machine.config().dns.expect("DNS");
    assert_eq!(dns.server.addresses, ["[::1]:15053"]);
    assert_eq!(dns.forwarder.listen_addresses, ["[::1]:15053".parse().unwrap()]);
    assert_eq!(dns.forwarder.timeout, Duration::from_secs(2));
    let search = ["shop.svc.cluster.local".to_owned()];
    let search_domains = crate::dns::SearchDomains::new("shop", "shop.svc.cluster.local", &search);
    assert_eq!(dns.server.search_domains, search_domains);
    assert_eq!(dns.server.policy.ttl, 30);
}

#[test]
fn istiod_is_not_asked_for_changes_of_the_name_table() {
    for setting in [
        ("ISTIO_META_DELTA_NDS", "true"),
        ("ISTIO_METAJSON_X", r#"{"DELTA_NDS": true}"#),
        ("PROXY_CONFIG", "{proxyMetadata: {ISTIO_META_DELTA_NDS: 'true'}}"),
    ] {
        let settings = [setting, ("ISTIO_META_OTHER", "true")];
        let node = machine(&settings).config().bootstrap.node;
        assert_eq!(node.metadata.get("OTHER"), Some(&"true".into()));
        assert_eq!(node.metadata.get("DELTA_NDS"), None, "{setting:?}");
    }
}

#[test]
fn answers_of_resolvers_are_cached_only_on_request() {
    let capture = ("ISTIO_META_DNS_CAPTURE", "true");
    let cache = |more: &[_]| {
        let settings = [&[capture], more].concat();
        machine(&settings).config().dns.expect("DNS").forwarder.cache
    };
    let off = cache(&[]);
    let times = [off.max_ttl, off.max_negative_ttl, off.max_stale];
    assert_eq!(times, [Duration::ZERO; 3]);
    let on = cache(&[
        ("ISTIO_AGENT_DNS_CACHE_MAX_TTL", "10s"),
        ("ISTIO_AGENT_DNS_CACHE_MAX_NEGATIVE_TTL", "5s"),
        ("ISTIO_AGENT_DNS_CACHE_MAX_STALE", "5m"),
        ("ISTIO_AGENT_DNS_CACHE_MAX_ENTRIES", "7"),
        ("ISTIO_AGENT_DNS_CACHE_MAX_BYTES", "4096"),
    ]);
    let expected = crate::dns::forward::cache::Config {
        max_entries: 7,
        max_bytes: 4096,
        max_ttl: Duration::from_secs(10),
        max_negative_ttl: Duration::from_secs(5),
        max_stale: Duration::from_secs(300),
    };
    assert_eq!(on, expected);
}

#[test]
fn envoy_runs_as_the_exempt_user_where_the_agent_replaces_the_resolver() {
    let settings = [
        ("ISTIO_META_DNS_CAPTURE", "true"),
        ("DNS_PROXY_ADDR", "127.0.0.1:53"),
        ("ISTIO_AGENT_RESOLV_CONF", "resolv.conf"),
    ];
    let config = machine(&settings).config();
    let dns = config.dns.expect("DNS").server;
    let user = config.envoy.expect("Envoy").command.user;
    // Only root may use port 53. For other users, the default address applies.
    let expected = if rustix::process::getuid().is_root() {
        ("127.0.0.1:53", true, Some(1337))
    } else {
        ("localhost:15053", false, None)
    };
    let forwards_before_first_table = dns.policy.forward_before_first_table;
    assert_eq!((&*dns.addresses[0], forwards_before_first_table, user), expected);
    let config = machine(&[]).config();
    assert_eq!(config.envoy.expect("Envoy").command.user, None);
}
