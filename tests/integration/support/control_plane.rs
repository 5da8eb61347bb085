//! A control plane whose resources the test sets, which can die and come back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use local_istiod::{Claims, Event, Events, Keys, LocalIstiod, Options, Resource, Snapshot, follow};
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
    snapshots: watch::Sender<Arc<Snapshot>>,
}

/// A control plane that is dead for the moment.
pub struct Dead {
    options: Options,
    keys: Keys,
    events: mpsc::UnboundedReceiver<Event>,
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
        let keys = Keys::generate("cluster.local").unwrap();
        let options = Options {
            // Below the ports of outgoing connections, so that it is still free at a restart.
            listen: local(free_port()),
            max_cert_ttl: life,
            keys: Some(keys.clone()),
            snapshots: served,
            events: Events::to(sender),
            ..Options::default()
        };
        let dead = Dead {
            options,
            keys,
            events,
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

    pub fn add(&self, resource: Resource) {
        self.snapshots
            .send_modify(|snapshot| drop(Arc::make_mut(snapshot).insert("common", resource)));
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

    pub async fn kill(self) -> Dead {
        Dead {
            options: self.istiod.kill().await,
            keys: self.keys,
            events: self.events,
            snapshots: self.snapshots,
        }
    }
}

impl Dead {
    pub async fn set(&self, resources: &[Value]) {
        self.snapshots.send_replace(snapshot(resources).await);
    }

    /// The same again, at the same address.
    pub async fn revive(self) -> ControlPlane {
        ControlPlane {
            istiod: LocalIstiod::start(self.options).await.unwrap(),
            keys: self.keys,
            events: self.events,
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
