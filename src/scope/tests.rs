//! Tests the usage of services that is read from pages in Envoy's form, and the advice.

use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::net::TcpListener;

use serde_json::json;

use super::advice::{self, Keep, merge};
use super::*;
use crate::envoy::admin::Address;
use crate::runtime::lifecycle::with_causes;

const KEEP_LOOKED_UP: Keep = Keep { hosts: Vec::new(), looked_up: true };

fn service(namespace: &str, host: &str, requests: u64, is_asked: bool) -> Service {
    Service {
        namespace: namespace.to_owned(),
        host: host.to_owned(),
        clusters: 2,
        requests,
        is_asked,
        ..Service::default()
    }
}

/// Returns the usage of a pod whose Envoy was sent three services in `shop` and two in `bank`: the
/// given ones and unused ones.
fn usage(services: &[Service]) -> Usage {
    let mut services = services.to_vec();
    for (namespace, count) in [("shop", 3), ("bank", 2)] {
        let found = services.iter().filter(|it| it.namespace == namespace);
        let missing = found.count()..count;
        services.extend(missing.map(|at| service(namespace, &format!("unused-{at}"), 0, false)));
    }
    Usage {
        namespace: "shop".to_owned(),
        workload: "cart".to_owned(),
        labels: [("app".to_owned(), "cart".to_owned())].into(),
        pods: vec![Pod {
            name: "cart-1".to_owned(),
            observed_seconds: 7200,
            has_dns: true,
            ..Pod::default()
        }],
        services,
        bytes_per_cluster: 1_000_000,
        envoy_bytes: 20_000_000,
    }
}

fn advice(usage: &Usage) -> String {
    advice::sidecar(usage, &KEEP_LOOKED_UP).expect("a resource")
}

fn hosts(advice: &str) -> Vec<&str> {
    let lines = advice.lines().filter_map(|line| line.strip_prefix("    - "));
    lines.collect()
}

#[test]
fn generated_labels_are_not_used_in_the_workload_selector() {
    let found = labels(Some(&json!({
        "app": "cart",
        "version": "v1",
        "app.kubernetes.io/name": "cart",
        "pod-template-hash": "5d8",
        "controller-revision-hash": "5d8",
        "statefulset.kubernetes.io/pod-name": "cart-1",
        "batch.kubernetes.io/job-name": "cart",
        "istio.io/rev": "default",
        "service.istio.io/canonical-name": "cart",
        "notistio.io/name": "cart",
    })));
    let found: Vec<_> = found.keys().map(String::as_str).collect();
    let expected = ["app", "app.kubernetes.io/name", "notistio.io/name", "version"];
    assert_eq!(found, expected);
}

#[test]
fn the_advice_names_each_unknown() {
    let plain = advice(&usage(&[service("bank", "a.bank", 1, false)]));
    let with = |change: fn(&mut Pod)| {
        let mut usage = usage(&[service("bank", "a.bank", 1, false)]);
        change(&mut usage.pods[0]);
        advice(&usage)
    };
    for (said, advice) in [
        ("less than an hour", with(|pod| pod.observed_seconds = 3599)),
        ("7 connections or requests went to PassthroughCluster", with(|pod| pod.passthrough = 7)),
        ("8 connections or requests went to BlackHoleCluster", with(|pod| pod.black_hole = 8)),
        ("REGISTRY_ONLY", with(|pod| pod.is_registry_only = true)),
        ("ISTIO_META_DNS_CAPTURE", with(|pod| pod.has_dns = false)),
    ] {
        assert!(advice.contains(said), "{said}: {advice}");
        assert!(!plain.contains(said), "{said}: {plain}");
    }
    for said in ["observed for 2 h.", "without routes, policies and mutual TLS"] {
        assert!(plain.contains(said), "{said}: {plain}");
    }
    let wild = advice(&usage(&[service("bank", "*.bank", 1, false)]));
    assert!(wild.contains("\"*.bank\" is not narrowed down"), "{wild}");
}

#[test]
fn the_sidecar_resource_has_kept_hosts_and_whole_namespaces_cover_their_services() {
    let used = [service("bank", "a.bank", 1, false), service("shop", "b.shop", 0, true)];
    let resource = |keep: &[&str], looked_up| {
        let hosts = keep.iter().map(|host| (*host).to_owned()).collect();
        advice::sidecar(&usage(&used), &Keep { hosts, looked_up }).expect("a resource")
    };
    for (keep, looked_up, expected, left) in [
        (
            &[][..],
            true,
            &["\"bank/a.bank\"", "\"shop/b.shop\""][..],
            "3 services, 6 clusters, about 6.0 MB of configuration and 6 MB of Envoy's memory",
        ),
        (&[], false, &["\"bank/a.bank\""], "4 services, 8 clusters"),
        (&["./*"], true, &["\"./*\"", "\"bank/a.bank\""], "1 services, 2 clusters"),
        (&["bank/*"], false, &["\"bank/*\""], "3 services"),
        (&["shop/b.shop"], false, &["\"bank/a.bank\"", "\"shop/b.shop\""], "3 services"),
        (&["*/*"], true, &["\"*/*\""], "0 services, 0 clusters"),
    ] {
        let advice = resource(keep, looked_up);
        assert_eq!(hosts(&advice), expected, "{advice}");
        assert!(advice.contains(&format!("Left out: {left}")), "{left}: {advice}");
    }
    let none = advice::sidecar(&usage(&[]), &KEEP_LOOKED_UP).expect("a resource");
    assert_eq!(hosts(&none), ["\"~/*\""]);
    let keep = Keep { hosts: vec!["istio-system".to_owned()], looked_up: true };
    let error = advice::sidecar(&usage(&[]), &keep).expect_err("no host");
    assert!(error.to_string().contains("<namespace>/<host>"), "{error}");
}

#[test]
fn merged_pods_have_the_services_of_any_and_common_labels() {
    let mut first = usage(&[service("bank", "a.bank", 1, false)]);
    first.labels.insert("version".to_owned(), "v1".to_owned());
    let mut second =
        usage(&[service("bank", "a.bank", 2, true), service("shop", "b.shop", 3, false)]);
    second.labels.insert("version".to_owned(), "v2".to_owned());
    second.pods[0].name = "cart-2".to_owned();
    let merged = merge(first.clone(), second).expect("one workload");
    assert_eq!(merged.pods.len(), 2);
    assert_eq!(merged.labels.len(), 1);
    let used = merged.services.iter().filter(|it| it.is_used());
    let expected = [service("bank", "a.bank", 3, true), service("shop", "b.shop", 3, false)];
    assert_eq!(used.cloned().collect::<Vec<_>>(), expected);

    let mut other = usage(&[]);
    other.namespace = "bank".to_owned();
    let refused = merge(first.clone(), other);
    assert!(refused.is_err_and(|error| error.to_string().contains("pods of one workload")));
    let mut unlike = usage(&[]);
    unlike.labels = [("app".to_owned(), "web".to_owned())].into();
    let merged = merge(first, unlike).expect("one namespace");
    let refused = advice::sidecar(&merged, &KEEP_LOOKED_UP);
    assert!(
        refused.is_err_and(|error| error.to_string().contains("do not have a label in common"))
    );
}

#[test]
fn services_have_the_counters_and_names_of_all_their_clusters() {
    let cluster = |name: &str, host: &str| Outbound {
        cluster: name.to_owned(),
        services: vec![("shop".to_owned(), host.to_owned())],
    };
    let clusters = [
        cluster("outbound|80||db.shop.svc", "db.shop.svc"),
        cluster("outbound|80|v1|db.shop.svc", "db.shop.svc"),
        cluster("outbound|80||idle.shop.svc", "idle.shop.svc"),
    ];
    let counters = |cluster: &str| match cluster {
        "outbound|80||idle.shop.svc" => (0, 0),
        _ => (1, 2),
    };
    let asked = ["db-0.db.shop.svc".to_owned(), "other.shop.svc".to_owned()];
    let found = services(&clusters, counters, asked.iter());
    let db = Service { connections: 2, ..service("shop", "db.shop.svc", 4, true) };
    let idle = Service { clusters: 1, ..service("shop", "idle.shop.svc", 0, false) };
    assert_eq!(found, [db, idle]);
}

/// Starts a fake admin port that sends these pages in turn.
fn admin(pages: Vec<String>) -> Admin {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for page in pages {
            let (mut stream, _) = listener.accept().expect("a connection");
            let _ = stream.read(&mut [0; 1024]);
            let length = page.len();
            let _ = write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{page}");
        }
    });
    Admin { address: Address::Port(address), until: clock::after(LIMIT) }
}

#[tokio::test]
async fn counters_are_summed_by_cluster() {
    let stats =
        |value: &str| json!([{ "name": "cx_total", "value": value }, { "name": "rq_total" }]);
    let hosts = |values: &[&str]| {
        let hosts = values.iter().map(|value| json!({ "stats": stats(value) }));
        hosts.collect::<Vec<_>>()
    };
    let page = json!({ "cluster_statuses": [
        { "name": "two", "added_via_api": true, "host_statuses": hosts(&["2", "3"]) },
        { "name": "idle", "host_statuses": [
            { "stats": [{ "name": "cx_total" }, { "name": "rq_total", "value": null }] }, { "stats": null }, {},
        ] },
        { "name": "empty", "host_statuses": null },
    ]});
    let pages = vec![
        page.to_string(),
        r#"{"cluster_statuses":[{"name":1}]}"#.into(),
        "{}".into(),
        r#"{"cluster_statuses":null}"#.into(),
        r#"{"configs":null}"#.into(),
    ];
    let admin = admin(pages);
    let found = admin.counters().await.expect("counters").into_iter();
    let found: Vec<_> = found.map(|it| (it.cluster, it.connections, it.requests)).collect();
    let expected = [("two", 5, 0), ("idle", 0, 0), ("empty", 0, 0)];
    assert_eq!(found, expected.map(|it| (it.0.to_owned(), it.1, it.2)));
    let wrong = admin.counters().await.err().expect("other JSON");
    assert!(with_causes(&wrong).contains("invalid type"), "{wrong}");
    for _ in 0..2 {
        assert!(admin.counters().await.expect("no clusters").is_empty());
    }
    assert!(admin.outbound().await.expect("no clusters").is_empty());
}

/// Uses a made-up page, because not every Envoy has Istio's filters. Its labels are labels of Istio's
/// standard metrics.
#[tokio::test]
async fn traffic_to_no_known_service_is_counted_from_istios_metrics() {
    let mut page = String::from("# TYPE istio_requests_total counter\n");
    for (family, cluster, count) in [
        ("istio_requests_total", "PassthroughCluster", 3),
        ("istio_tcp_connections_opened_total", "PassthroughCluster", 4),
        ("istio_tcp_connections_opened_total", "BlackHoleCluster", 5),
        ("istio_tcp_sent_bytes_total", "BlackHoleCluster", 6),
    ] {
        let labels = format!(r#"reporter="source",destination_service_name="{cluster}",x="a b""#);
        writeln!(page, "{family}{{{labels}}} {count}").expect("text");
    }
    let found = admin(vec![page]).unknown_service_counts().await;
    assert_eq!(found.expect("counts"), [7, 5]);
}

#[tokio::test]
async fn an_envoy_that_does_not_answer_is_named_in_time() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let admin = Admin {
        address: Address::Port(listener.local_addr().expect("an address")),
        until: clock::after(Duration::from_millis(50)),
    };
    let error = admin.outbound().await.err().expect("no answer");
    assert!(with_causes(&error).contains("/config_dump"), "{error}");
    assert!(with_causes(&error).contains("elapsed"), "{error}");
}
