//! Tests that a new Envoy gets the stored versions of the resources that it refuses.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use http::Method;
use local_istiod::{Event, Resource};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::control_plane::ControlPlane;
use crate::support::http::{Backend, Fresh, Load, get, header};
use crate::support::pod::{Pod, Settings, ask};
use crate::support::programs::envoy_binary;
use crate::support::resources::{answering, cluster, endpoints, listener, routes};
use crate::support::{CLUSTER, LISTENER, eventually, free_port};

const ENDPOINTS: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";
const ROUTES: &str = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration";

/// The code of the problem in the log.
const CODE: &str = "[RESOURCE_REFUSED_STORED_SERVED]";

const METRIC: &str = "istio_agent_xds_kept_after_nack";

/// Returns a resource with a version, which Envoy's configuration dump shows.
fn with_version(version: &str, mut resource: Value) -> Value {
    resource["metadata"] = json!({ "filter_metadata": { "version": { "is": version } } });
    resource
}

/// Returns a resource of the same name that Envoy can decode, but not create.
fn refused(mut resource: Value) -> Value {
    let doubled = match resource["@type"].as_str() {
        Some(LISTENER) => "filter_chains",
        Some(ROUTES) => "virtual_hosts",
        _ => {
            resource["type"] = json!("ORIGINAL_DST");
            resource["eds_cluster_config"] = Value::Null;
            return resource;
        }
    };
    let items = resource[doubled].as_array_mut().unwrap();
    items.push(items[0].clone());
    resource
}

/// Returns a cluster of the same name for which Envoy refuses the entire response.
fn invalid(mut cluster: Value) -> Value {
    cluster["connect_timeout"] = json!("-1s");
    cluster
}

/// Returns a listener that routes to a cluster. Envoy refuses the listener if the cluster is missing.
fn routing(name: &str, port: u16, to: &str) -> Value {
    let mut listener = answering(name, port);
    let manager = &mut listener["filter_chains"][0]["filters"][0]["typed_config"];
    let route = &mut manager["route_config"]["virtual_hosts"][0]["routes"][0];
    route["direct_response"] = Value::Null;
    route["route"] = json!({ "cluster": to });
    listener
}

/// Returns the type, name and version of a resource; None if the resource has no version.
fn identified(resource: &Value) -> Option<[String; 3]> {
    let version = resource.pointer("/metadata/filter_metadata/version/is")?;
    let fields = [&resource["@type"], &resource["name"], version];
    Some(fields.map(|it| it.as_str().unwrap().to_owned()))
}

/// A pod whose first agent has stored Envoy's configuration. The next Envoy gets other configuration from istiod.
struct Stage {
    pod: Pod,
    istiod: ControlPlane,
    /// The number of Envoys that the newest agent has started.
    envoys: usize,
    _store: TempDir,
}

impl Stage {
    /// Starts a stage on which istiod sends the `stored` resources before the restart and the `pushed` ones after it.
    /// Returns None if Envoy is not installed.
    async fn restarted(stored: &[Value], pushed: &[Value]) -> Option<Self> {
        Self::restarted_with(&[], &[], stored, pushed, &[]).await
    }

    /// Starts the same with the variables `environment` for both agents, and `second` for the second one. After the
    /// restart istiod neither sends nor removes the `withheld` resources.
    async fn restarted_with(
        environment: &[(&str, &str)],
        second: &[(&str, &str)],
        stored: &[Value],
        pushed: &[Value],
        withheld: &[(&str, &str)],
    ) -> Option<Self> {
        let envoy = envoy_binary()?;
        let istiod = ControlPlane::of(stored).await;
        let (mut pod, store) = serving(&envoy, environment, &istiod).await;
        wait_until_envoy_has(&pod, stored).await;
        eventually("ACKs", async || {
            let types = xdsz(&pod).await?["types"].clone();
            let is_acked =
                |it: &Value| types[it["@type"].as_str()?]["last_response"]["answered"].as_bool();
            stored.iter().all(|it| is_acked(it) == Some(true)).then_some(())
        })
        .await;
        // The agent writes the entire configuration when the stream ends.
        let dead = istiod.kill().await;
        eventually("stored configuration", async || {
            let found = xdsz(&pod).await?;
            let is_stored = |it: &Value| {
                let of_type = it["@type"].as_str().unwrap();
                let last = &found["types"][of_type]["last_response"]["version"];
                found["kept"][of_type]["version"] == *last
            };
            stored.iter().all(is_stored).then_some(())
        })
        .await;
        pod.kill().await;
        dead.set(pushed).await;
        for (type_url, name) in withheld {
            dead.add(Resource::withheld(*name, *type_url));
        }
        let istiod = dead.revive().await;
        pod.restart(second);
        Some(Self { pod, istiod, envoys: 1, _store: store })
    }

    /// Waits for the NACK of a type, and checks that it is the last one that istiod got. Returns Envoy's reason.
    async fn wait_for_nack(&mut self, type_url: &str) -> String {
        let is_nack =
            |event: &Event| matches!(event, Event::Nacked { type_url: of, .. } if of == type_url);
        // istiod reports a NACK only if its nonce is that of the last response.
        let Event::Nacked { error, .. } = self.istiod.event("a NACK", is_nack).await else {
            panic!("another event");
        };
        let nacks = self.istiod.requests().iter().filter(|it| it.type_url == type_url);
        let status = nacks.filter_map(|it| it.error_detail.as_ref()).next_back().unwrap();
        assert_eq!(status.message, error);
        error
    }

    /// Waits until the agent reports exactly these resources as served in stored versions, and checks its log.
    async fn reports(&self, refused: Names<'_>) {
        for type_url in [CLUSTER, ENDPOINTS, LISTENER, ROUTES] {
            let names = refused.iter().find(|(of, _)| *of == type_url);
            let names: BTreeSet<_> =
                names.into_iter().flat_map(|it| it.1.iter().copied()).collect();
            eventually(&format!("{names:?} of {type_url}"), async || {
                let found = xdsz(&self.pod).await?;
                let list = found["after_nack"][type_url].as_array();
                let found: BTreeSet<_> =
                    list.into_iter().flatten().map(|it| it["name"].as_str().unwrap()).collect();
                (found == names).then_some(())
            })
            .await;
            eventually(&format!("{METRIC} of {type_url}"), async || {
                let page = self.pod.status(Method::GET, "/stats/prometheus").await?;
                let series = format!("{METRIC}{{type=\"{type_url}\"}} ");
                let value = page.lines().find_map(|it| it.strip_prefix(&*series));
                (value.map_or(0, |it| it.parse().unwrap()) == names.len()).then_some(())
            })
            .await;
        }
        let log = self.pod.agent.log();
        let errors: Vec<_> = log.lines().filter(|it| it.contains(CODE)).collect();
        for (type_url, names) in refused {
            let kind = type_url.rsplit('.').next().unwrap();
            let begin = format!("\terror\txdsproxy\t{kind} ");
            let is_of_type = |it: &&&str| it.contains(&begin);
            let of_type: Vec<_> = errors.iter().filter(is_of_type).collect();
            assert_eq!(of_type.len(), self.envoys, "{kind}: {errors:#?}");
            let named = names.iter().filter(|it| of_type[0].contains(**it)).count();
            assert!(named >= names.len().min(5), "{errors:#?}");
        }
    }

    /// Waits until Envoy has refused resources of these types, uses exactly the `held` resources and responds on the
    /// ports, and the agent reports the `refused` resources. Returns Envoy's reasons.
    async fn serves_stored(
        &mut self,
        held: &[Value],
        refused: Names<'_>,
        ports: &[u16],
    ) -> Vec<String> {
        let mut reasons = Vec::new();
        for (type_url, _) in refused {
            reasons.push(self.wait_for_nack(type_url).await);
        }
        wait_until_envoy_has(&self.pod, held).await;
        for port in ports {
            answers(*port).await;
        }
        is_ready(&self.pod).await;
        self.reports(refused).await;
        reasons
    }

    /// Checks that the agent has sent no stored version, and sends none when istiod pushes these resources.
    async fn assert_agent_sends_nothing(&mut self, pushed: &[Value]) {
        self.istiod.set(pushed).await;
        wait_until_envoy_has(&self.pod, pushed).await;
        eventually("as many answers to istiod as of Envoy", async || {
            let stats = ask(&self.pod.envoy, "/stats?filter=listener_manager.lds.update_").await?;
            let number = |name: &str| {
                let name = format!("listener_manager.lds.update_{name}: ");
                let mut values = stats.lines().filter_map(|it| it.strip_prefix(&*name));
                values.next()?.parse::<usize>().ok()
            };
            let requests = self.istiod.requests().iter();
            let is_answer = |it: &&DeltaDiscoveryRequest| {
                it.type_url == LISTENER && !it.response_nonce.is_empty()
            };
            let answers = requests.filter(is_answer).count();
            (number("success")? + number("rejected")? == answers).then_some(())
        })
        .await;
        self.reports(&[]).await;
        let log = self.pod.agent.log();
        assert!(!log.contains(CODE), "{log}");
    }

    /// Checks that istiod got no request that an Envoy without an agent would not send.
    fn assert_only_envoys_requests(mut self) {
        self.istiod.requests();
    }
}

async fn serving(
    envoy: &Path,
    environment: &[(&str, &str)],
    istiod: &ControlPlane,
) -> (Pod, TempDir) {
    let store = tempfile::tempdir().unwrap();
    // On a slow machine istiod's first response takes long. The agent must not take that for an outage.
    let store_environment = [
        ("ISTIO_AGENT_KEEP_CONFIG", store.path().to_str().unwrap()),
        ("ISTIO_AGENT_KEEP_CONFIG_AFTER", "60s"),
    ];
    let settings =
        Settings { envoy: Some(envoy), environment: &[&store_environment, environment].concat() };
    (Pod::serving(settings, istiod).await, store)
}

async fn xdsz(pod: &Pod) -> Option<Value> {
    serde_json::from_str(&pod.status(Method::GET, "/debug/xdsz").await?).ok()
}

/// Waits until Envoy uses exactly these resources. Resources without a version are ignored.
async fn wait_until_envoy_has(pod: &Pod, expected: &[Value]) {
    let expected: BTreeSet<_> = expected.iter().filter_map(identified).collect();
    let (mut last, what) = (BTreeSet::new(), format!("{expected:#?}"));
    eventually(&what, async || {
        let dump: Value = serde_json::from_str(&ask(&pod.envoy, "/config_dump").await?).ok()?;
        let mut found = BTreeSet::new();
        for section in dump["configs"].as_array()? {
            for (list, place) in [
                ("dynamic_active_clusters", "/cluster"),
                ("dynamic_listeners", "/active_state/listener"),
                ("dynamic_route_configs", "/route_config"),
            ] {
                let items = section[list].as_array().into_iter().flatten();
                found.extend(items.filter_map(|it| identified(it.pointer(place)?)));
            }
        }
        if found != last {
            eprintln!("Envoy has {found:#?}");
        }
        last.clone_from(&found);
        (found == expected).then_some(())
    })
    .await;
}

async fn answers(port: u16) -> String {
    eventually("an answer", async || get(port).await.ok()).await
}

async fn is_ready(pod: &Pod) {
    let path = "/healthz/ready";
    eventually("readiness", async || pod.status(Method::GET, path).await).await;
}

/// Type URLs, each with names of its resources.
type Names<'a> = &'a [(&'a str, &'a [&'a str])];

/// Checks that an Envoy to which istiod sends the `pushed` resources uses the `held` ones, and that the agent reports
/// the `refused` ones. Returns the stage and Envoy's reasons; None if Envoy is not installed.
async fn stored_are_served(
    [stored, pushed, held]: [&[Value]; 3],
    refused: Names<'_>,
    ports: &[u16],
) -> Option<(Stage, Vec<String>)> {
    let mut stage = Stage::restarted(stored, pushed).await?;
    let mut reasons = stage.serves_stored(held, refused, ports).await;
    // A refusal removes nothing from the store: the next Envoy gets the same.
    stage.pod.kill_and_restart(|| ()).await;
    reasons.extend(stage.serves_stored(held, refused, ports).await);
    Some((stage, reasons))
}

#[tokio::test]
async fn a_refused_listener_is_served_stored_and_others_new() {
    let [a, b, c] = [free_port(), free_port(), free_port()];
    let old = answering("a", a);
    let resources = [
        with_version("1", old.clone()),
        with_version("1", answering("b", b)),
        with_version("2", refused(old)),
        with_version("2", answering("b", b)),
        with_version("2", answering("c", c)),
    ];
    let [a1, b1, _, b2, c2] = resources.clone();
    let held = [a1.clone(), b2, c2];
    let all: [&[_]; 3] = [&[a1, b1], &resources[2..], &held];
    let names: Names<'_> = &[(LISTENER, &["a"])];
    let Some((stage, reasons)) = stored_are_served(all, names, &[a, b, c]).await else {
        return;
    };
    let log = stage.pod.agent.log();
    assert!(log.contains(&reasons[0]), "{}: {log}", reasons[0]);
    let found = xdsz(&stage.pod).await.unwrap();
    let reported = &found["after_nack"][LISTENER][0];
    let reason = reported["reason"].as_str().unwrap();
    let is_envoys =
        reason.contains("a: error adding listener") && reasons[0].contains(reason.trim());
    assert!(is_envoys, "{reason:?} of {reasons:?}");
    for time in ["since", "current"] {
        assert!(reported[time].is_string(), "{reported}");
    }
    stage.assert_only_envoys_requests();
}

#[tokio::test]
async fn a_refused_cluster_is_served_in_its_stored_version_with_istiods_endpoints() {
    let (backend, port) = (Backend::start().await, free_port());
    let books = cluster("books");
    let rest = |version: &str| {
        [
            with_version(version, cluster("other")),
            with_version(version, listener("web", port, "all")),
            with_version(version, routes("all", "books", version)),
            endpoints("books", &[backend.port]),
            endpoints("other", &[]),
        ]
    };
    let of_version = |version: &str, books: Value| {
        [&[with_version(version, books)][..], &rest(version)].concat()
    };
    let all = [
        &*of_version("1", books.clone()),
        &of_version("2", refused(books.clone())),
        &[&[with_version("1", books)][..], &rest("2")].concat(),
    ];
    let names: Names<'_> = &[(CLUSTER, &["books"])];
    if let Some((stage, _)) = stored_are_served(all, names, &[port]).await {
        stage.assert_only_envoys_requests();
    }
}

#[tokio::test]
async fn a_refused_route_configuration_is_served_in_its_stored_version() {
    let (backend, port) = (Backend::start().await, free_port());
    let rest = |version: &str| {
        [
            with_version(version, cluster("books")),
            with_version(version, listener("web", port, "all")),
            endpoints("books", &[backend.port]),
        ]
    };
    let all = routes("all", "books", "stored");
    let with = |version: &str, all: Value| [&[all][..], &rest(version)].concat();
    let resources = [
        &*with("1", with_version("1", all.clone())),
        &with("2", with_version("2", refused(all.clone()))),
        &with("2", with_version("1", all)),
    ];
    let names: Names<'_> = &[(ROUTES, &["all"])];
    if let Some((stage, _)) = stored_are_served(resources, names, &[port]).await {
        assert_eq!(header(&answers(port).await, "x-mark"), Some("stored"));
        stage.assert_only_envoys_requests();
    }
}

#[tokio::test]
async fn refused_endpoints_are_served_in_their_stored_version() {
    let (backend, port) = (Backend::start().await, free_port());
    let rest = |version: &str| {
        [
            with_version(version, cluster("books")),
            with_version(version, listener("web", port, "all")),
            with_version(version, routes("all", "books", version)),
        ]
    };
    let books = endpoints("books", &[backend.port]);
    let mut invalid = books.clone();
    let address = "/endpoints/0/lb_endpoints/0/endpoint/address/socket_address";
    *invalid.pointer_mut(address).unwrap() = json!({ "address": "127.0.0.1", "port_value": 70000 });
    let resources =
        [&*[&rest("1")[..], &[books]].concat(), &[&rest("2")[..], &[invalid]].concat(), &rest("2")];
    let names: Names<'_> = &[(ENDPOINTS, &["books"])];
    if let Some((stage, _)) = stored_are_served(resources, names, &[port]).await {
        stage.assert_only_envoys_requests();
    }
}

#[tokio::test]
async fn routes_in_a_response_with_a_refused_one_are_served() {
    let (backend, port, other) = (Backend::start().await, free_port(), free_port());
    let with = |version: &str, all: Value| {
        [
            with_version(version, all),
            with_version("1", routes("more", "books", "more")),
            with_version(version, cluster("books")),
            with_version(version, listener("web", port, "all")),
            with_version(version, listener("more", other, "more")),
            endpoints("books", &[backend.port]),
        ]
    };
    let all = routes("all", "books", "stored");
    let mut held = with("2", all.clone());
    held[0] = with_version("1", all.clone());
    let resources = [with("1", all.clone()), with("2", refused(all))];
    let Some(mut stage) = Stage::restarted(&resources[0], &resources[1]).await else {
        return;
    };
    stage.wait_for_nack(ROUTES).await;
    wait_until_envoy_has(&stage.pod, &held).await;
    answers(port).await;
    answers(other).await;
    stage.assert_only_envoys_requests();
}

#[tokio::test]
async fn a_wholly_refused_response_is_served_from_the_store() {
    let (backend, port) = (Backend::start().await, free_port());
    let with = |version: &str, clusters: &[Value]| {
        let rest = [
            with_version(version, listener("web", port, "all")),
            with_version(version, routes("all", "books", version)),
            endpoints("books", &[backend.port]),
            endpoints("slow", &[backend.port]),
            endpoints("new", &[backend.port]),
        ];
        [clusters, &rest].concat()
    };
    let old = ["books", "slow"].map(|it| with_version("1", cluster(it)));
    let new = [
        with_version("2", cluster("books")),
        with_version("2", cluster("new")),
        with_version("2", invalid(cluster("slow"))),
    ];
    let resources = [&*with("1", &old), &with("2", &new), &with("2", &old)];
    let names: Names<'_> = &[(CLUSTER, &["books", "slow"])];
    let Some((stage, _)) = stored_are_served(resources, names, &[port]).await else {
        return;
    };
    // istiod sends only the cluster that it repairs, because it assumes that Envoy has the others.
    let clusters = |version| ["books", "new", "slow"].map(|it| with_version(version, cluster(it)));
    stage.istiod.set(&with("2", &clusters("2"))).await;
    stage.reports(&[(CLUSTER, &["books"])]).await;
    let current = with("3", &clusters("3"));
    stage.istiod.set(&current).await;
    wait_until_envoy_has(&stage.pod, &current).await;
    stage.reports(&[]).await;
    stage.assert_only_envoys_requests();
}

#[tokio::test]
async fn listeners_whose_names_the_reason_cuts_come_from_the_store() {
    let port = free_port();
    let names: Vec<_> = (10..60).map(|it| format!("{it}-{}", "long".repeat(30))).collect();
    let many = |version: &str| {
        let listeners = names.iter().zip(1..).map(|(name, port)| {
            let mut listener = answering(name, port);
            listener["bind_to_port"] = json!(false);
            with_version(version, listener)
        });
        listeners.collect::<Vec<_>>()
    };
    let old = many("1");
    let new: Vec<_> = many("2").into_iter().map(refused).collect();
    let [web1, web2] = ["1", "2"].map(|it| [with_version(it, answering("web", port))]);
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let refused: Names<'_> = &[(LISTENER, &names)];
    let resources =
        [&*[&old[..], &web1].concat(), &[&new[..], &web2].concat(), &[&old[..], &web2].concat()];
    let Some((stage, reasons)) = stored_are_served(resources, refused, &[port]).await else {
        return;
    };
    assert!(reasons[0].contains("(truncated)"), "{}", reasons[0]);
    stage.assert_only_envoys_requests();
}

#[tokio::test]
async fn stored_clusters_reach_envoy_before_the_stored_listeners_that_need_them() {
    let (backend, port) = (Backend::start().await, free_port());
    let books = cluster("books");
    let web = routing("web", port, "books");
    let endpoints = endpoints("books", &[backend.port]);
    let old = [with_version("1", books.clone()), with_version("1", web.clone()), endpoints.clone()];
    let new = [with_version("2", refused(books)), with_version("2", refused(web)), endpoints];
    let names: Names<'_> = &[(CLUSTER, &["books"]), (LISTENER, &["web"])];
    if let Some((stage, _)) = stored_are_served([&old, &new, &old], names, &[port]).await {
        stage.assert_only_envoys_requests();
    }
}

#[tokio::test]
async fn stored_clusters_reach_envoy_before_listeners_of_istiod_that_need_them() {
    let (backend, port) = (Backend::start().await, free_port());
    let (books, web) = (cluster("books"), routing("web", port, "books"));
    let endpoints = endpoints("books", &[backend.port]);
    let [books1, web1] = [&books, &web].map(|it| with_version("1", it.clone()));
    let [books2, web2] = [refused(books), web].map(|it| with_version("2", it));
    let old = [books1.clone(), web1, endpoints.clone()];
    let new = [books2, web2.clone(), endpoints];
    let names: Names<'_> = &[(CLUSTER, &["books"])];
    let held = [books1, web2];
    if let Some((stage, _)) = stored_are_served([&old, &new, &held], names, &[port]).await {
        stage.assert_only_envoys_requests();
    }
}

#[tokio::test]
async fn dependencies_that_istiod_does_not_send_come_from_the_store() {
    let (backend, port) = (Backend::start().await, free_port());
    let (books, web) = (cluster("books"), listener("web", port, "all"));
    let all = |version| with_version(version, routes("all", "books", version));
    let endpoints = endpoints("books", &[backend.port]);
    let old = [
        with_version("1", books.clone()),
        with_version("1", web.clone()),
        all("1"),
        endpoints.clone(),
    ];
    let new = [with_version("2", refused(books)), with_version("2", refused(web))];
    let withheld = [(ROUTES, "all"), (ENDPOINTS, "books")];
    let Some(mut stage) = Stage::restarted_with(&[], &[], &old, &new, &withheld).await else {
        return;
    };
    let refused: Names<'_> = &[(CLUSTER, &["books"]), (LISTENER, &["web"])];
    let needed: Names<'_> = &[(ENDPOINTS, &["books"]), (ROUTES, &["all"])];
    for (type_url, _) in refused {
        stage.wait_for_nack(type_url).await;
    }
    wait_until_envoy_has(&stage.pod, &old).await;
    answers(port).await;
    stage.reports(&[refused, needed].concat()).await;
    // From now on istiod sends the endpoints and the routes.
    let [books, web] = new;
    let sent = [books, web, all("2"), endpoints];
    stage.istiod.set(&sent).await;
    let held = [old[0].clone(), old[1].clone(), all("2")];
    wait_until_envoy_has(&stage.pod, &held).await;
    stage.reports(refused).await;
    stage.assert_only_envoys_requests();
}

#[tokio::test]
async fn names_in_answers_to_stored_responses_reach_istiod_without_nonce() {
    let (backend, port) = (Backend::start().await, free_port());
    // Envoy sends its first six requests at once; the last of them is the NACK of the routes. The next request waits
    // for four seconds. It is the ACK of the stored routes, and subscribes to the routes of the second listener.
    let limits = json!({ "max_tokens": 6, "fill_rate": 0.25 });
    let limits =
        json!({ "dynamic_resources": { "ads_config": { "rate_limit_settings": limits } } });
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), limits.to_string()).unwrap();
    let environment = [("ISTIO_BOOTSTRAP_OVERRIDE", file.path().to_str().unwrap())];
    let all = routes("all", "books", "stored");
    let endpoints = &endpoints("books", &[backend.port])["endpoints"];
    let mut books = with_version("1", cluster("books"));
    books["type"] = json!("STATIC");
    books["eds_cluster_config"] = Value::Null;
    books["load_assignment"] = json!({ "cluster_name": "books", "endpoints": endpoints });
    let web = with_version("1", listener("web", port, "all"));
    let mut resources = vec![with_version("1", all.clone()), books, web];
    let stored = resources.clone();
    resources[0] = with_version("2", refused(all));
    let Some(mut stage) = Stage::restarted_with(&environment, &[], &stored, &resources, &[]).await
    else {
        return;
    };
    stage.wait_for_nack(ROUTES).await;
    answers(port).await;
    // Envoy uses the stored routes, but its ACK waits. Until then the agent reports nothing.
    stage.reports(&[]).await;
    let second = free_port();
    let more = [
        with_version("2", listener("second", second, "more")),
        with_version("2", routes("more", "books", "new")),
    ];
    stage.istiod.set(&[&resources[..], &more].concat()).await;
    answers(second).await;
    wait_until_envoy_has(&stage.pod, &[&stored[..], &more].concat()).await;
    stage.reports(&[(ROUTES, &["all"])]).await;
    stage.assert_only_envoys_requests();
}

/// Starts a stage whose Envoy has a stored listener next to a listener of istiod. Returns the stage, the listeners and
/// their ports.
async fn with_a_stored_listener(
    environment: &[(&str, &str)],
) -> Option<(Stage, [Value; 2], [u16; 2])> {
    let ports = [free_port(), free_port()];
    let [a, b] = [answering("a", ports[0]), answering("b", ports[1])];
    let stored = [with_version("1", a.clone()), with_version("1", b.clone())];
    let pushed = [with_version("2", refused(a)), with_version("2", b)];
    let mut stage = Stage::restarted_with(environment, &[], &stored, &pushed, &[]).await?;
    let held = [stored[0].clone(), pushed[1].clone()];
    stage.serves_stored(&held, REFUSED, &ports).await;
    Some((stage, held, ports))
}

const REFUSED: Names<'_> = &[(LISTENER, &["a"])];

#[tokio::test]
async fn a_listener_that_istiod_repairs_is_current_again() {
    let Some((mut stage, held, [port, _])) = with_a_stored_listener(&[]).await else {
        return;
    };
    // If Envoy refuses the next version of the listener too, the agent does not log that again.
    let [a1, b2] = held.clone();
    stage.istiod.set(&[with_version("3", refused(answering("a", port))), b2.clone()]).await;
    stage.serves_stored(&held, REFUSED, &[port]).await;
    let repaired = [with_version("4", answering("a", port)), b2.clone()];
    stage.istiod.set(&repaired).await;
    wait_until_envoy_has(&stage.pod, &repaired).await;
    stage.reports(&[]).await;
    let line = "Envoy no longer has the stored version of Listener a: ";
    stage.pod.agent.logs(line).await;
    // An Envoy that has accepted istiod's version keeps it without the agent.
    stage.istiod.set(&[with_version("5", refused(a1)), b2]).await;
    stage.wait_for_nack(LISTENER).await;
    wait_until_envoy_has(&stage.pod, &repaired).await;
    stage.reports(&[]).await;
    let log = stage.pod.agent.log();
    assert_eq!(log.matches(CODE).count(), 1, "{log}");
    assert_eq!(log.matches(line).count(), 1, "{log}");
    stage.assert_only_envoys_requests();
}

#[tokio::test]
async fn a_listener_that_istiod_removes_is_closed() {
    let Some((stage, held, [port, _])) = with_a_stored_listener(&[]).await else {
        return;
    };
    stage.istiod.set(&held[1..]).await;
    wait_until_envoy_has(&stage.pod, &held[1..]).await;
    eventually("a closed port", async || get(port).await.err()).await;
    stage.reports(&[]).await;
    stage.pod.agent.logs("Envoy no longer has the stored version of Listener a: ").await;
    stage.assert_only_envoys_requests();
}

#[tokio::test]
async fn an_outage_of_istiod_changes_nothing_for_a_stored_listener() {
    let Some((mut stage, held, ports)) = with_a_stored_listener(&[]).await else {
        return;
    };
    let istiod = stage.istiod.kill().await;
    answers(ports[0]).await;
    stage.istiod = istiod.revive().await;
    stage.serves_stored(&held, REFUSED, &ports).await;
    let repaired = held.map(|it| with_version("3", it));
    stage.istiod.set(&repaired).await;
    wait_until_envoy_has(&stage.pod, &repaired).await;
    stage.reports(&[]).await;
    stage.assert_only_envoys_requests();
}

#[tokio::test]
async fn the_next_hot_restart_envoy_is_served_the_stored_listener() {
    let environment = [
        ("ISTIO_AGENT_HOT_RESTART", "true"),
        ("ISTIO_AGENT_PARENT_SHUTDOWN_TIME", "3s"),
        ("ISTIO_BOOTSTRAP_OVERRIDE", "override.json"),
        ("PROXY_CONFIG", r#"{"drainDuration": "1s"}"#),
    ];
    let Some((mut stage, held, ports)) = with_a_stored_listener(&environment).await else {
        return;
    };
    stage.pod.replace("override.json", r#"{"stats_flush_interval": "7s"}"#);
    stage.envoys = 2;
    let load = Load::default().with(Fresh(ports[1]));
    eventually("the next Envoy", async || {
        let info: Value =
            serde_json::from_str(&ask(&stage.pod.envoy, "/server_info").await?).ok()?;
        let is_next = info["command_line_options"]["restart_epoch"] == 1 && info["state"] == "LIVE";
        is_next.then_some(())
    })
    .await;
    stage.serves_stored(&held, REFUSED, &ports).await;
    load.assert_flawless();
    stage.assert_only_envoys_requests();
}

#[tokio::test]
async fn an_envoy_that_has_a_listener_keeps_it_without_the_agent() {
    let Some(envoy) = envoy_binary() else { return };
    let port = free_port();
    let a = answering("a", port);
    let first = [with_version("1", a.clone())];
    let istiod = ControlPlane::of(&first).await;
    let (pod, store) = serving(&envoy, &[], &istiod).await;
    wait_until_envoy_has(&pod, &first).await;
    let mut stage = Stage { pod, istiod, envoys: 1, _store: store };
    stage.istiod.set(&[with_version("2", refused(a.clone()))]).await;
    stage.wait_for_nack(LISTENER).await;
    wait_until_envoy_has(&stage.pod, &first).await;
    answers(port).await;
    stage.assert_agent_sends_nothing(&[with_version("3", a)]).await;
    stage.assert_only_envoys_requests();
}

#[tokio::test]
async fn nothing_is_sent_without_a_stored_version_that_may_be_used() {
    const OFF: &[(&str, &str)] = &[("ISTIO_AGENT_KEEP_CONFIG_ON_NACK", "false")];
    // This changes the name of the node, to which the stored configuration belongs.
    const OTHER: &[(&str, &str)] = &[("POD_NAME", "cart-2")];
    for (second, is_stored) in [(OFF, true), (OTHER, true), (&[], false)] {
        let [port, free] = [free_port(), free_port()];
        let [a, b] = [answering("a", free), answering("b", port)];
        let stored = [with_version("1", b.clone()), with_version("1", a.clone())];
        let stored = if is_stored { &stored } else { &stored[..1] };
        let pushed = [with_version("2", b.clone()), with_version("2", refused(a.clone()))];
        let stage = Stage::restarted_with(&[], second, stored, &pushed, &[]).await;
        let Some(mut stage) = stage else { return };
        stage.wait_for_nack(LISTENER).await;
        wait_until_envoy_has(&stage.pod, &pushed[..1]).await;
        answers(port).await;
        get(free).await.unwrap_err();
        stage.assert_agent_sends_nothing(&[with_version("3", b), with_version("3", a)]).await;
        stage.assert_only_envoys_requests();
    }
}

#[tokio::test]
async fn an_envoy_served_from_the_store_keeps_its_listener() {
    let Some((mut stage, held, ports)) = with_a_stored_listener(&[]).await else {
        return;
    };
    let istiod = stage.istiod.kill().await;
    eventually("stored configuration", async || {
        let found = xdsz(&stage.pod).await?;
        let last = &found["types"][LISTENER]["last_response"]["version"];
        (found["kept"][LISTENER]["version"] == *last).then_some(())
    })
    .await;
    stage.pod.kill().await;
    stage.pod.restart(&[("ISTIO_AGENT_KEEP_CONFIG_AFTER", "0s")]);
    wait_until_envoy_has(&stage.pod, &held).await;
    stage.istiod = istiod.revive().await;
    stage.wait_for_nack(LISTENER).await;
    wait_until_envoy_has(&stage.pod, &held).await;
    for port in ports {
        answers(port).await;
    }
    let repaired = held.map(|it| with_version("3", it));
    stage.istiod.set(&repaired).await;
    wait_until_envoy_has(&stage.pod, &repaired).await;
    stage.reports(&[]).await;
    // Envoy has accepted the stored version during the outage, so it keeps that version without the agent.
    let log = stage.pod.agent.log();
    assert!(!log.contains(CODE), "{log}");
    stage.assert_only_envoys_requests();
}

#[tokio::test]
async fn a_stored_version_is_no_longer_current_once_istiod_has_replaced_it() {
    let Some((mut stage, held, ports)) = with_a_stored_listener(&[]).await else {
        return;
    };
    let current =
        async |pod: &Pod| xdsz(pod).await.unwrap()["after_nack"][LISTENER][0]["current"].clone();
    let before = current(&stage.pod).await;
    let [a, b] = held;
    let (refused, accepted) = (with_version("3", refused(a.clone())), with_version("3", b));
    stage.istiod.set(&[refused, accepted.clone()]).await;
    stage.wait_for_nack(LISTENER).await;
    eventually("a later time in the store", async || {
        let found = xdsz(&stage.pod).await?;
        let later = found["kept"][LISTENER]["at"].as_str()? > before.as_str()?;
        later.then_some(())
    })
    .await;
    stage.pod.kill_and_restart(|| ()).await;
    stage.serves_stored(&[a, accepted], REFUSED, &ports).await;
    assert_eq!(current(&stage.pod).await, before);
    stage.assert_only_envoys_requests();
}
