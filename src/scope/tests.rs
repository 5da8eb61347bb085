//! Use and advice, from pages as Envoy writes them.

use std::fmt::Write;
use std::net::SocketAddr;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::advice::{self, Keep, merge};
use super::*;

const KEEP_ASKED: Keep = Keep {
    hosts: Vec::new(),
    asked: true,
};

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

/// One that was sent three services in `shop` and two in `bank`.
fn usage(services: &[Service]) -> Usage {
    let sent = |services| Sent {
        services,
        clusters: 2 * services,
    };
    Usage {
        namespace: "shop".to_owned(),
        workload: "cart".to_owned(),
        labels: [("app".to_owned(), "cart".to_owned())].into(),
        pods: vec![Pod {
            name: "cart-1".to_owned(),
            observed_seconds: 7200,
            names: Names::Known,
            ..Pod::default()
        }],
        sent: [("shop".to_owned(), sent(3)), ("bank".to_owned(), sent(2))].into(),
        services: services.to_vec(),
        bytes_per_cluster: 1_000_000,
    }
}

fn advice(usage: &Usage) -> String {
    advice::sidecar(usage, &KEEP_ASKED).expect("a resource")
}

fn hosts(advice: &str) -> Vec<&str> {
    let lines = advice
        .lines()
        .filter_map(|line| line.strip_prefix("    - "));
    lines.collect()
}

#[test]
fn generated_labels_do_not_select() {
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
    let expected = [
        "app",
        "app.kubernetes.io/name",
        "notistio.io/name",
        "version",
    ];
    assert_eq!(found, expected);
}

#[test]
fn each_thing_that_is_not_known_is_said() {
    let plain = advice(&usage(&[service("bank", "a.bank", 1, false)]));
    let with = |change: fn(&mut Pod)| {
        let mut usage = usage(&[service("bank", "a.bank", 1, false)]);
        change(&mut usage.pods[0]);
        advice(&usage)
    };
    for (said, advice) in [
        ("less than an hour", with(|pod| pod.observed_seconds = 3599)),
        (
            "7 connections or requests went to PassthroughCluster",
            with(|pod| pod.passthrough = 7),
        ),
        (
            "8 connections or requests went to BlackHoleCluster",
            with(|pod| pod.black_hole = 8),
        ),
        ("REGISTRY_ONLY", with(|pod| pod.is_registry_only = true)),
        (
            "ISTIO_META_DNS_CAPTURE",
            with(|pod| pod.names = Names::Unknown),
        ),
        (
            "more names were asked for",
            with(|pod| pod.names = Names::Incomplete),
        ),
    ] {
        assert!(advice.contains(said), "{said}: {advice}");
        assert!(!plain.contains(said), "{said}: {plain}");
    }
    for said in [
        "observed for 2 h.",
        "without routes, policies and mutual TLS",
    ] {
        assert!(plain.contains(said), "{said}: {plain}");
    }
    let wild = advice(&usage(&[service("bank", "*.bank", 1, false)]));
    assert!(wild.contains("\"*.bank\" stays whole"), "{wild}");
}

#[test]
fn what_is_kept_counts_and_whole_namespaces_stand_for_their_services() {
    let used = [
        service("bank", "a.bank", 1, false),
        service("shop", "b.shop", 0, true),
    ];
    let of = |keep: &[&str], asked| {
        let hosts = keep.iter().map(|host| (*host).to_owned()).collect();
        advice::sidecar(&usage(&used), &Keep { hosts, asked }).expect("a resource")
    };
    for (keep, asked, expected, left) in [
        (
            &[][..],
            true,
            &["\"bank/a.bank\"", "\"shop/b.shop\""][..],
            "3 services, 6 clusters, about 6.0 MB",
        ),
        (&[], false, &["\"bank/a.bank\""], "4 services, 8 clusters"),
        (
            &["./*"],
            true,
            &["\"./*\"", "\"bank/a.bank\""],
            "1 services, 2 clusters",
        ),
        (&["bank/*"], false, &["\"bank/*\""], "3 services"),
        (&["*/*"], true, &["\"*/*\""], "0 services, 0 clusters"),
    ] {
        let advice = of(keep, asked);
        assert_eq!(hosts(&advice), expected, "{advice}");
        assert!(
            advice.contains(&format!("Left out: {left}")),
            "{left}: {advice}"
        );
    }
    let none = advice::sidecar(&usage(&[]), &KEEP_ASKED).expect("a resource");
    assert_eq!(hosts(&none), ["\"~/*\""]);
    let keep = Keep {
        hosts: vec!["istio-system".to_owned()],
        asked: true,
    };
    let error = advice::sidecar(&usage(&[]), &keep).expect_err("no host");
    assert!(error.to_string().contains("<namespace>/<host>"), "{error}");
}

#[test]
fn pods_are_merged_by_what_any_of_them_used_and_the_labels_of_all() {
    let mut first = usage(&[service("bank", "a.bank", 1, false)]);
    first.labels.insert("version".to_owned(), "v1".to_owned());
    let mut second = usage(&[
        service("bank", "a.bank", 2, true),
        service("shop", "b.shop", 3, false),
    ]);
    second.labels.insert("version".to_owned(), "v2".to_owned());
    second.pods[0].name = "cart-2".to_owned();
    let merged = merge([first.clone(), second]).expect("one workload");
    assert_eq!(merged.pods.len(), 2);
    assert_eq!(merged.labels.len(), 1);
    let expected = [
        service("bank", "a.bank", 3, true),
        service("shop", "b.shop", 3, false),
    ];
    assert_eq!(merged.services, expected);
    assert_eq!(merged.sent, first.sent);

    let mut other = usage(&[]);
    other.namespace = "bank".to_owned();
    assert!(matches!(
        merge([first.clone(), other]),
        Err(advice::Error::Namespaces(..))
    ));
    let mut unlike = usage(&[]);
    unlike.labels = [("app".to_owned(), "web".to_owned())].into();
    let merged = merge([first, unlike]).expect("one namespace");
    let refused = advice::sidecar(&merged, &KEEP_ASKED);
    assert!(matches!(refused, Err(advice::Error::NoLabels(pods)) if pods.len() == 2));
    assert!(matches!(merge([]), Err(advice::Error::Nothing)));
}

#[test]
fn a_pod_of_a_headless_service_is_asked_for_by_a_name_below_it() {
    let mut services = Services::default();
    services.add("outbound|80||db.shop.svc", "shop", "db.shop.svc");
    services.ask("db-0.db.shop.svc");
    services.ask("other.shop.svc");
    let used = services.into_used();
    assert_eq!(used.len(), 1);
    assert!(used[0].is_asked);
}

/// Serves pages in turn as Envoy's admin port.
async fn admin(pages: Vec<String>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        for page in pages {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let _ = stream.read(&mut [0; 1024]).await;
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", page.len());
            let _ = stream.write_all((head + &page).as_bytes()).await; // It may have read enough.
        }
    });
    address
}

#[tokio::test]
async fn counters_are_summed_by_cluster_and_clusters_without_any_are_left_out() {
    let stats =
        |value: &str| json!([{ "name": "cx_total", "value": value }, { "name": "rq_total" }]);
    let hosts = |values: &[&str]| {
        let hosts = values.iter().map(|value| json!({ "stats": stats(value) }));
        hosts.collect::<Vec<_>>()
    };
    let page = json!({ "cluster_statuses": [
        { "name": "two", "added_via_api": true, "host_statuses": hosts(&["2", "3"]) },
        { "name": "idle", "host_statuses": [{ "stats": [{ "name": "cx_total" }] }, {}] },
        { "name": "empty" },
    ]});
    let pages = vec![
        page.to_string(),
        r#"{"cluster_statuses":[{"name":1}]}"#.into(),
        "{}".into(),
    ];
    let (admin, until) = (admin(pages).await, clock::after(LIMIT));
    let found = envoy::connections(admin, until).await.expect("counters");
    let two = Counters {
        connections: 5,
        requests: 0,
    };
    assert_eq!(found, HashMap::from([("two".to_owned(), two)]));
    let wrong = envoy::connections(admin, until).await;
    assert!(matches!(wrong, Err(envoy::Error::Json { .. })));
    let none = envoy::connections(admin, until).await.expect("no clusters");
    assert!(none.is_empty());
}

/// Istio's filters are not in every Envoy; the labels are those of Istio's standard metrics.
#[tokio::test]
async fn istios_metrics_tell_what_went_to_no_service() {
    let mut page = String::from("# TYPE istio_requests_total counter\n");
    for (family, cluster, count) in [
        ("istio_requests_total", "PassthroughCluster", 3),
        (
            "istio_tcp_connections_opened_total",
            "PassthroughCluster",
            4,
        ),
        ("istio_tcp_connections_opened_total", "BlackHoleCluster", 5),
        ("istio_tcp_sent_bytes_total", "BlackHoleCluster", 6),
    ] {
        let labels = format!(r#"reporter="source",destination_service_name="{cluster}",x="a b""#);
        writeln!(page, "{family}{{{labels}}} {count}").expect("text");
    }
    let admin = admin(vec![page]).await;
    let found = envoy::to_no_service(admin, clock::after(LIMIT))
        .await
        .expect("counts");
    let expected = [(PASSTHROUGH.to_owned(), 7), (BLACK_HOLE.to_owned(), 5)];
    assert_eq!(found, HashMap::from(expected));
}

#[tokio::test]
async fn an_envoy_that_does_not_answer_is_named_in_time() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let admin = listener.local_addr().expect("an address");
    let until = clock::after(Duration::from_millis(50));
    let error = envoy::services(admin, until).await.expect_err("no answer");
    assert!(
        error.to_string().contains("in time: /config_dump"),
        "{error}"
    );
}
