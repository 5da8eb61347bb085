//! A control plane whose resources the test sets, which can die and come back.

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

/// The account every agent of these tests runs as.
pub const NAMESPACE: &str = "shop";
pub const ACCOUNT: &str = "cart";

/// The member that names the pod of [`only`].
const ONLY: &str = "only";

/// As long as nothing in a test may expire.
const LONG: Duration = Duration::from_secs(3600);

pub struct ControlPlane {
    pub istiod: LocalIstiod,
    pub keys: Keys,
    events: mpsc::UnboundedReceiver<Event>,
    requests: Requests,
    snapshots: watch::Sender<Arc<Snapshot>>,
}

/// Requests on streams that are served: what is not read yet, and those of the newest stream.
struct Requests(mpsc::UnboundedReceiver<Bytes>, Vec<DeltaDiscoveryRequest>);

/// A control plane that is dead for the moment.
pub struct Dead {
    options: Options,
    keys: Keys,
    events: mpsc::UnboundedReceiver<Event>,
    requests: Requests,
    snapshots: watch::Sender<Arc<Snapshot>>,
}

impl ControlPlane {
    /// Serves `resources`, and certificates that live for `life`.
    pub async fn start(resources: &[Value], life: Duration) -> Self {
        let snapshots = watch::Sender::new(snapshot(resources).await);
        let served = Some(snapshots.subscribe());
        Self::with(snapshots, served, life).await
    }

    /// Leaves streams to the test; certificates live for `life`.
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
            // Below the ports of outgoing connections, so that it is still free at a restart.
            listen: local(free_port()),
            max_cert_ttl: life,
            keys: Some(keys.clone()),
            snapshots: served,
            events: Events::to(sender),
            requests: Some(copies),
            ..Options::default()
        };
        let dead = Dead {
            options,
            keys,
            events,
            requests: Requests(requests, Vec::new()),
            snapshots,
        };
        dead.revive().await
    }

    /// One whose certificates do not expire.
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

    /// Adds a resource, also one that is withheld.
    pub fn add(&self, resource: Resource) {
        add(&self.snapshots, resource);
    }

    /// The next event of a kind; those before it are skipped.
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

    /// An event of a kind that has been told by now.
    pub fn told(&mut self, wanted: impl Fn(&Event) -> bool) -> Option<Event> {
        while let Ok(event) = self.events.try_recv() {
            if wanted(&event) {
                return Some(event);
            }
        }
        None
    }

    /// The requests on the newest stream, which is a delta stream. Fails if one before has what does not come from
    /// Envoy's answer to a response of this control plane.
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

    /// The same again, at the same address.
    pub async fn revive(self) -> ControlPlane {
        ControlPlane {
            istiod: LocalIstiod::start(self.options).await.unwrap(),
            keys: self.keys,
            events: self.events,
            requests: self.requests,
            snapshots: self.snapshots,
        }
    }

    /// One at the same address that takes streams and answers nothing.
    pub async fn revive_silent(mut self) -> ControlPlane {
        self.options.snapshots = None;
        self.revive().await
    }

    /// Another one at the same address, which has only `keys` of its own.
    pub async fn replace(mut self, keys: Keys) -> ControlPlane {
        self.options.keys = Some(keys.clone());
        self.keys = keys;
        self.revive().await
    }
}

/// The resource for the Envoy of one pod.
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
        let text = json!({ "resources": resources }).to_string();
        std::fs::write(folder.join("resources.json"), text).unwrap();
    }
    let (snapshots, _) = follow(folder.path().to_owned(), Events::default())
        .await
        .unwrap();
    let snapshot = snapshots.borrow();
    Arc::clone(&snapshot)
}
