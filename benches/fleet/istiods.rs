//! The two control planes behind the load balancer.

use std::sync::Arc;
use std::time::Duration;

use local_istiod::{Events, Keys, LocalIstiod, Options, Overload, Resource, Snapshot};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};
use tonic::Status;

use super::envoy;
use super::front::Front;

/// The running control planes, which have the same keys.
pub(super) struct Istiods(Vec<LocalIstiod>);

impl Istiods {
    /// Starts two control planes whose certificates live for `life`, and which serve one cluster and one listener.
    pub(super) async fn start(life: Duration, front: &Front) -> Self {
        let mut snapshot = Snapshot::default();
        for type_url in [envoy::CLUSTER, envoy::LISTENER] {
            snapshot.insert("common", Resource::new("one", type_url, b"\x0a\x03one".to_vec()));
        }
        let snapshots = watch::channel(Arc::new(snapshot)).1;
        let keys = Keys::generate("cluster.local").expect("keys");
        let mut istiods = Self(Vec::new());
        for number in 0..2 {
            let (sender, mut events) = mpsc::unbounded_channel();
            let seen = front.seen.clone();
            tokio::task::spawn(async move {
                while let Some(event) = events.recv().await {
                    seen.add(number, &event);
                }
            });
            let options = Options {
                max_cert_ttl: life,
                keys: Some(keys.clone()),
                snapshots: Some(snapshots.clone()),
                events: Events::to(sender),
                ..Options::default()
            };
            istiods.add(options, front).await;
        }
        istiods
    }

    pub(super) fn first(&self) -> &LocalIstiod {
        &self.0[0]
    }

    /// Starts a control plane, and sends it new connections.
    pub(super) async fn add(&mut self, options: Options, front: &Front) {
        self.0.push(LocalIstiod::start(options).await.expect("its port is free"));
        self.publish(front);
    }

    /// Kills the second control plane. Returns the options that start it again.
    pub(super) async fn kill_second(&mut self, front: &Front) -> Options {
        let second = self.0.pop().expect("two control planes");
        self.publish(front);
        second.kill().await
    }

    /// Kills both control planes, and starts them after `away` with another lifetime of certificates. Returns when
    /// they are back.
    pub(super) async fn restart(
        &mut self,
        away: Duration,
        life: Duration,
        front: &Front,
    ) -> Instant {
        let killed = Instant::now();
        front.is_up.send_replace(false);
        let mut stopped = Vec::new();
        for istiod in self.0.drain(..) {
            stopped.push(istiod.kill().await);
        }
        sleep(away.saturating_sub(killed.elapsed())).await;
        for options in stopped {
            self.add(Options { max_cert_ttl: life, ..options }, front).await;
        }
        front.is_up.send_replace(true);
        Instant::now()
    }

    /// Limits the streams of the first control plane, and makes it refuse certificate requests.
    pub(super) fn overload(&self, streams_per_second: f64, delay: Duration) {
        self.first().overload(Some(Overload { streams_per_second, delay }));
        self.first().refuse_certificates(Some(Status::resource_exhausted("overloaded")));
    }

    fn publish(&self, front: &Front) {
        front.istiods.send_replace(self.0.iter().map(|istiod| istiod.address).collect());
    }
}
