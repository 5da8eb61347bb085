//! A control plane whose resources the test sets, and which the test can stop and start again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use local_istiod::{Claims, Event, Events, Keys, LocalIstiod, Options, Resource, Snapshot, follow};
use prost::Message;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use super::{eventually, free_port, local};

/// The namespace and service account of every agent in these tests.
pub const NAMESPACE: &str = "shop";
pub const ACCOUNT: &str = "cart";

/// The member of a resource that names its pod; see [`only`].
const ONLY: &str = "only";

/// The lifetime of tokens and certificates that must not expire during a test.
const LONG: Duration = Duration::from_secs(3600);

pub struct ControlPlane {
    pub istiod: LocalIstiod,
    pub keys: Keys,
    events: mpsc::UnboundedReceiver<Event>,
    requests: Requests,
    snapshots: watch::Sender<Arc<Snapshot>>,
}

/// The requests that were read from streams: those that are not decoded yet, and those of the newest stream.
struct Requests(mpsc::UnboundedReceiver<Bytes>, Vec<DeltaDiscoveryRequest>);

/// A control plane that was stopped and can be started again.
pub struct Dead {
    options: Options,
    keys: Keys,
    events: mpsc::UnboundedReceiver<Event>,
    requests: Requests,
    snapshots: watch::Sender<Arc<Snapshot>>,
}

impl ControlPlane {
    /// Starts a control plane that serves `resources` and issues certificates that are valid for `life`.
    pub async fn start(resources: &[Value], life: Duration) -> Self {
        let snapshots = watch::Sender::new(snapshot(resources).await);
        let served = Some(snapshots.subscribe());
        Self::with(snapshots, served, life).await
    }

    /// Starts a control plane whose streams the test scripts. Its certificates are valid for `life`.
    pub async fn scripted(life: Duration) -> Self {
        Self::with(watch::Sender::default(), None, life).await
    }

    async fn with(
        snapshots: watch::Sender<Arc<Snapshot>>,
        served: Option<watch::Receiver<Arc<Snapshot>>>,
        life: Duration,
    ) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        let (copies, requests) = mpsc::unbounded_channel();
        let keys = Keys::generate("cluster.local").unwrap();
        let options = Options {
            // The port is below those of outgoing connections, so it is still free at a restart.
            listen: local(free_port()),
            max_cert_ttl: life,
            keys: Some(keys.clone()),
            snapshots: served,
            events: Events::to(sender),
            requests: Some(copies),
            ..Options::default()
        };
        let dead =
            Dead { options, keys, events, requests: Requests(requests, Vec::new()), snapshots };
        dead.revive().await
    }

    /// Starts a control plane whose certificates do not expire during a test.
    pub async fn of(resources: &[Value]) -> Self {
        Self::start(resources, LONG).await
    }

    pub fn address(&self) -> String {
        format!("localhost:{}", self.istiod.address.port())
    }

    pub fn token(&self) -> String {
        self.istiod.mint_token(NAMESPACE, ACCOUNT, LONG).unwrap()
    }

    pub fn token_for(&self, audience: &str) -> String {
        let claims = Claims {
            audiences: vec![audience.to_owned()],
            ..Claims::of(NAMESPACE, ACCOUNT, SystemTime::now(), LONG)
        };
        self.istiod.mint(&claims).unwrap()
    }

    pub async fn set(&self, resources: &[Value]) {
        self.snapshots.send_replace(snapshot(resources).await);
    }

    /// Adds a resource, which may be a withheld one.
    pub fn add(&self, resource: Resource) {
        add(&self.snapshots, resource);
    }

    /// Waits for the next event that is `wanted`, and skips the events before it.
    pub async fn event(&mut self, what: &str, wanted: impl Fn(&Event) -> bool) -> Event {
        eventually(what, async || {
            loop {
                let event = self.events.recv().await?;
                if wanted(&event) {
                    return Some(event);
                }
            }
        })
        .await
    }

    /// Returns the first `wanted` event that has already arrived, and skips the events before it.
    pub fn told(&mut self, wanted: impl Fn(&Event) -> bool) -> Option<Event> {
        while let Ok(event) = self.events.try_recv() {
            if wanted(&event) {
                return Some(event);
            }
        }
        None
    }

    /// Returns the requests on the newest stream, which must be a delta stream. Fails if istiod got a request that
    /// Envoy does not send to it: a second ACK or NACK of one response, a NACK without a nonce, or the ACK or NACK of a
    /// stored response, whose nonce begins with `kept`.
    pub fn requests(&mut self) -> &[DeltaDiscoveryRequest] {
        let Requests(copies, requests) = &mut self.requests;
        while let Ok(bytes) = copies.try_recv() {
            let request = DeltaDiscoveryRequest::decode(bytes).unwrap();
            if request.node.is_some() {
                requests.clear();
            }
            let (of, nonce) = (&request.type_url, &request.response_nonce);
            let is_same =
                |it: &DeltaDiscoveryRequest| it.type_url == *of && it.response_nonce == *nonce;
            let is_again = !nonce.is_empty() && requests.iter().any(is_same);
            assert!(!is_again, "two answers to one response: {request:?}");
            let is_refusal = request.error_detail.is_some();
            assert!(!is_refusal || !nonce.is_empty(), "{request:?}");
            assert!(!nonce.starts_with("kept"), "{request:?}");
            requests.push(request);
        }
        requests
    }

    pub async fn kill(self) -> Dead {
        Dead {
            options: self.istiod.kill().await,
            keys: self.keys,
            events: self.events,
            requests: self.requests,
            snapshots: self.snapshots,
        }
    }
}

impl Dead {
    pub async fn set(&self, resources: &[Value]) {
        self.snapshots.send_replace(snapshot(resources).await);
    }

    pub fn add(&self, resource: Resource) {
        add(&self.snapshots, resource);
    }

    /// Starts the same control plane again, at the same address.
    pub async fn revive(self) -> ControlPlane {
        ControlPlane {
            istiod: LocalIstiod::start(self.options).await.unwrap(),
            keys: self.keys,
            events: self.events,
            requests: self.requests,
            snapshots: self.snapshots,
        }
    }

    /// Starts a control plane at the same address that accepts streams and sends no responses.
    pub async fn revive_silent(mut self) -> ControlPlane {
        self.options.snapshots = None;
        self.revive().await
    }

    /// Starts a control plane at the same address with other keys: `keys`.
    pub async fn replace(mut self, keys: Keys) -> ControlPlane {
        self.options.keys = Some(keys.clone());
        self.keys = keys;
        self.revive().await
    }
}

/// Marks a resource, so that only the Envoy of this pod gets it.
pub fn only(pod: &str, mut resource: Value) -> Value {
    resource[ONLY] = json!(pod);
    resource
}

fn add(snapshots: &watch::Sender<Arc<Snapshot>>, resource: Resource) {
    snapshots.send_modify(|snapshot| drop(Arc::make_mut(snapshot).insert("common", resource)));
}

async fn snapshot(resources: &[Value]) -> Arc<Snapshot> {
    let folder = tempfile::tempdir().unwrap();
    let mut files = BTreeMap::<_, Vec<_>>::new();
    for mut resource in resources.iter().cloned() {
        let pod = resource.as_object_mut().unwrap().remove(ONLY);
        let pod = pod.map_or_else(|| "common".to_owned(), |it| it.as_str().unwrap().to_owned());
        files.entry(pod).or_default().push(resource);
    }
    for (pod, resources) in files {
        let folder = folder.path().join(pod);
        std::fs::create_dir(&folder).unwrap();
        // A file is parsed only up to some size.
        for (number, resources) in resources.chunks(1000).enumerate() {
            let text = json!({ "resources": resources }).to_string();
            std::fs::write(folder.join(format!("resources-{number}.json")), text).unwrap();
        }
    }
    let (snapshots, _) = follow(folder.path().to_owned(), Events::default()).await.unwrap();
    let snapshot = snapshots.borrow();
    Arc::clone(&snapshot)
}
