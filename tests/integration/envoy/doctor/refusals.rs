//! Tests that the doctor names resources and secrets that Envoy refuses or waits for, and calls that Envoy refuses.

use std::time::Duration;

use local_istiod::Resource;
use serde_json::{Value, json};
use tonic::Status;

use super::{diagnosed, envoy_says, is_ready, nack, pod, ready};
use crate::envoy::wasm::{extension, server};
use crate::support::control_plane::ControlPlane;
use crate::support::faults::{Fault, Faults, Says};
use crate::support::http::try_ask;
use crate::support::pod::{Pod, Settings};
use crate::support::programs::envoy_binary;
use crate::support::resources::{
    ads, answering, cluster, endpoints, extended, listener, routes, secret, secured,
    secured_listener,
};
use crate::support::{eventually, free_port, refusing};

/// The name of a secret whose files do not exist.
const MISSING: &str = "file-cert:/nonexistent/cert.pem~/nonexistent/key.pem";
/// The name of a secret whose files contain something else.
const OTHER: &str = concat!("file-cert:", env!("CARGO_MANIFEST_DIR"), "/Cargo.toml~/etc/passwd");

/// Sets this certificate in the TLS context of a filter chain or a cluster.
fn with_certificate(mut tls: Value, secret: Value) -> Value {
    tls["transport_socket"]["typed_config"]["common_tls_context"] =
        json!({ "tls_certificate_sds_secret_configs": [secret] });
    tls
}

/// Returns a listener for TLS with this certificate.
fn tls_listener(secret: Value) -> Value {
    let mut listener = secured_listener("tls", free_port());
    let chain = listener["filter_chains"][0].take();
    listener["filter_chains"][0] = with_certificate(chain, secret);
    listener
}

#[tokio::test(flavor = "multi_thread")]
async fn each_resource_that_envoy_refuses_or_awaits_has_its_cure() {
    if envoy_binary().is_none() {
        return;
    }
    let mut faults = Faults::default();
    let mut same_chains = answering("shop-listener", free_port());
    let chain = same_chains["filter_chains"][0].clone();
    same_chains["filter_chains"] = json!([chain, chain]);
    let mut wrong_policy = cluster("shop-cluster");
    wrong_policy["lb_policy"] = json!("CLUSTER_PROVIDED");
    let mut same_domains = routes("shop-routes", "none", "x");
    same_domains["virtual_hosts"][0]["domains"] = json!(["a", "a"]);
    for (name, object, resources) in [
        ("a refused listener", "shop-listener", vec![same_chains]),
        ("a refused cluster", "shop-cluster", vec![wrong_policy]),
        (
            "a refused route",
            "shop-routes",
            vec![listener("plain", free_port(), "shop-routes"), same_domains],
        ),
    ] {
        faults.add(name, async move {
            let (pod, control_plane) = ready(&[]).await;
            control_plane.set(&resources).await;
            nack(&pod).await;
            Fault::new(
                pod,
                ("RESOURCE_REFUSED", &["NACK of", object], &["istioctl analyze", "EnvoyFilter"]),
            )
            .with(control_plane)
        });
    }
    faults.add("no listener", async {
        let captured = [("ISTIO_META_INTERCEPTION_MODE", "REDIRECT")];
        let (pod, control_plane) = pod(&[cluster("shop-cluster")], &captured).await;
        // The stream has been open for some seconds once the report has the finding.
        eventually("the finding", async || {
            let (report, _) = diagnosed(&pod).await;
            report.to_string().contains("LISTENERS_MISSING").then_some(())
        })
        .await;
        let says: Says = (
            "LISTENERS_MISSING",
            &[
                "clusters: asked for, last response with 1 resources",
                "listeners: asked for, last response with 0",
            ],
            &["istioctl proxy-status", "discoverySelectors"],
        );
        Fault::new(pod, says).with(control_plane)
    });
    faults.add("a missing route", async {
        let (pod, control_plane) = pod(&[listener("plain", free_port(), "all")], &[]).await;
        envoy_says(&pod, "/init_dump", "all").await;
        let says: Says =
            ("LISTENER_WARMING", &["plain waits for", "RDS init all"], &["istioctl proxy-status"]);
        Fault::new(pod, says).with(control_plane)
    });
    faults.add("a listener without the files of its secret", async {
        let (pod, control_plane) = pod(&[tls_listener(secret(MISSING))], &[]).await;
        envoy_says(&pod, "/init_dump", MISSING).await;
        let says: Says = (
            "SECRET_FILE_MISSING",
            &["/nonexistent/cert.pem", "No such file"],
            &["sidecar.istio.io/userVolumeMount"],
        );
        Fault::new(pod, says).with(control_plane)
    });
    faults.add("a listener with other files for its secret", async {
        let (pod, control_plane) = pod(&[tls_listener(secret(OTHER))], &[]).await;
        envoy_says(&pod, "/init_dump", OTHER).await;
        let says: Says = ("SECRET_FILE_UNUSABLE", &["Cargo.toml"], &["write certificates in PEM"]);
        Fault::new(pod, says).with(control_plane)
    });
    faults.add("a secret that istiod does not have", async {
        // local-istiod reports that the secret does not exist, so the listener does not wait for it.
        const NAME: &str = "kubernetes://shop-tls";
        let secret = json!({ "name": NAME, "sds_config": ads() });
        let (pod, control_plane) = pod(&[tls_listener(secret)], &[]).await;
        pod.serves().await;
        let says: Says =
            ("SECRET_AWAITED", &["waits for secrets", NAME], &["may the proxy's account read it"]);
        Fault::new(pod, says).with(control_plane)
    });
    faults.add("a cluster without the files of its secret", async {
        let (pod, control_plane) = ready(&[]).await;
        let books = with_certificate(secured(cluster("books")), secret(MISSING));
        let plain = answering("plain", free_port());
        control_plane.set(&[plain, books, endpoints("books", &[1])]).await;
        let page = "/config_dump?resource=dynamic_warming_clusters";
        envoy_says(&pod, page, "books").await;
        let says: Says = ("SECRET_FILE_MISSING", &["/nonexistent/cert.pem"], &["DestinationRule"]);
        Fault::new(pod, says).with(control_plane)
    });
    faults.add("an istiod without delta discovery", async {
        let binary = envoy_binary().unwrap();
        let control_plane = ControlPlane::scripted(Duration::from_secs(3600)).await;
        let settings =
            Settings { envoy: Some(&binary), environment: &[("ISTIO_DELTA_XDS", "true")] };
        let pod = Pod::start(settings, &control_plane);
        let refusing = refusing(control_plane.istiod, Status::unimplemented("unknown method"));
        pod.agent.logs("ISTIOD_WITHOUT_DELTA").await;
        let says: Says = (
            "ISTIOD_WITHOUT_DELTA",
            &["discoveryAddress", "Unimplemented"],
            &["ISTIO_DELTA_XDS=false"],
        );
        Fault::new(pod, says).with(refusing)
    });
    faults.add("a missing Wasm module", async {
        let (url, serving) = server(Vec::new(), Default::default()).await;
        let port = free_port();
        let (pod, control_plane) =
            pod(&[extended(answering("all", port), "http", "shop.plugin")], &[]).await;
        let module: Resource = extension("http", "shop.plugin", &url, "", &[]);
        control_plane.add(module);
        is_ready(&pod).await;
        let denied =
            async || try_ask(port, "GET /", "").await.filter(|answer| answer.status == 403);
        eventually("a denied request", denied).await;
        Fault::new(
            pod,
            ("WASM_DOWNLOAD_FAILED", &["shop.plugin", &url, "404"], &["`url` of the WasmPlugin"]),
        )
        .with((control_plane, serving))
    });
    faults.assert_all_reported().await;
}

/// Adds a filter that denies every request to the listener.
fn denying(mut listener: Value) -> Value {
    let any = json!({ "permissions": [{ "any": true }], "principals": [{ "any": true }] });
    let filters = &mut listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"];
    let filter = json!({
        "name": "envoy.filters.http.rbac",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC",
            "rules": { "action": "DENY", "policies": { "all": any } },
        },
    });
    filters.as_array_mut().unwrap().insert(0, filter);
    listener
}

/// Returns a listener whose filter chains accept only TLS.
fn strict(port: u16) -> Value {
    let mut strict = secured_listener("strict", port);
    strict["filter_chains"][0]["filter_chain_match"] = json!({ "transport_protocol": "tls" });
    strict["listener_filters"] = json!([{
        "name": "envoy.filters.listener.tls_inspector",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector",
        },
    }]);
    strict
}

#[tokio::test(flavor = "multi_thread")]
async fn each_refused_call_is_named_with_its_cure_where_envoy_counts_it() {
    if envoy_binary().is_none() {
        return;
    }
    let mut faults = Faults::default();
    const CART: &str = "outbound|80||cart.shop";
    for (name, resources, code, cause, cure) in [
        (
            "plain text under STRICT",
            (|port| vec![strict(port)]) as fn(u16) -> Vec<Value>,
            "INBOUND_NOT_MATCHED",
            ["no filter chain accepts", "no_filter_chain_match"],
            ["STRICT", "set PeerAuthentication to PERMISSIVE"],
        ),
        (
            "failed handshakes",
            |port| vec![secured_listener("tls", port)],
            "HANDSHAKES_FAILED",
            ["handshakes (TLS) with Envoy failed", "ssl.connection_error"],
            ["compare certificates", "trust domains"],
        ),
        (
            "a denied request",
            |port| vec![denying(answering(&port.to_string(), port))],
            "RBAC_DENIED",
            ["an AuthorizationPolicy denied requests", "rbac.denied"],
            ["istioctl experimental authz check", "access log"],
        ),
        (
            "a connection pool that is too small",
            |port| {
                let mut small = cluster(CART);
                small["circuit_breakers"] =
                    json!({ "thresholds": [{ "max_pending_requests": 0 }] });
                let endpoints = endpoints(CART, &[port]);
                vec![small, endpoints, listener("plain", port, "all"), routes("all", CART, "x")]
            },
            "CIRCUIT_BREAKER_OPEN",
            [CART, "rq_pending_overflow"],
            ["connectionPool", "DestinationRule"],
        ),
    ] {
        faults.add(name, async move {
            let port = free_port();
            let matcher = [
                r"listener\..*(no_filter_chain_match|ssl\..*)",
                r"http\..*rbac\..*denied",
                r"cluster\..*rq_pending_overflow",
            ];
            let matcher = json!({ "proxyStatsMatcher": { "inclusionRegexps": matcher } });
            let counting = [("PROXY_CONFIG", &*matcher.to_string())];
            let (pod, control_plane) = pod(&resources(port), &counting).await;
            is_ready(&pod).await;
            for _ in 0..10 {
                try_ask(port, "GET /", "").await;
            }
            let cause = [&cause[..], &["10 since"]].concat();
            Fault::new(pod, (code, &cause, &cure)).with(control_plane).warns()
        });
    }
    faults.assert_all_reported().await;
    // Without these statistics, the report says how to make Envoy count the refused calls.
    let port = free_port();
    let (pod, _control_plane) = pod(&[strict(port)], &[]).await;
    is_ready(&pod).await;
    try_ask(port, "GET /", "").await;
    let (report, exit) = diagnosed(&pod).await;
    assert!(report.to_string().contains("statsInclusionRegexps"), "{report:#}");
    assert_eq!(exit, Some(0), "{report:#}");
}
