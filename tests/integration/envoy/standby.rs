//! Two agents in one directory, as two containers of a pod: one serves, the other waits and takes over.

use std::fs;
use std::path::Path;

use http::Method;
use rustix::process::Signal;

use crate::support::control_plane::ControlPlane;
use crate::support::http::{Backend, get};
use crate::support::pod::{Pod, Settings};
use crate::support::process::Process;
use crate::support::programs::envoy_binary;
use crate::support::resources::{cluster, endpoints, listener, routes};
use crate::support::{eventually, free_port};

const FIRST: &str = "istio-proxy";
const SECOND: &str = "istio-standby";

struct Stage {
    pod: Pod,
    port: u16,
    _control_plane: ControlPlane,
    _backend: Backend,
}

impl Stage {
    /// A pod whose first container serves.
    async fn serving(envoy: &Path) -> Self {
        let (backend, port) = (Backend::start().await, free_port());
        let control_plane = ControlPlane::of(&[
            cluster("books"),
            endpoints("books", &[backend.port]),
            listener("plain", port, "all"),
            routes("all", "books", "0"),
        ])
        .await;
        let settings = Settings {
            envoy: Some(envoy),
            environment: &[("ISTIO_AGENT_STANDBY", FIRST)],
        };
        let stage = Self {
            pod: Pod::serving(settings, &control_plane).await,
            port,
            _control_plane: control_plane,
            _backend: backend,
        };
        stage.serves(FIRST).await;
        stage
    }

    /// Starts the second container, which has hardly any environment.
    async fn standby(&self) -> Process {
        let mut command = self.pod.command();
        command.arg("standby").env("ISTIO_AGENT_STANDBY", SECOND);
        let standby = Process::start(&mut command, &self.pod.path("standby.log"));
        standby.logs("waits until no agent serves").await;
        standby
    }

    /// Waits until Envoy forwards requests, and the well-known sockets are those of this container.
    async fn serves(&self, container: &str) {
        let sockets = [
            ("etc/istio/proxy/XDS", "XDS"),
            ("var/run/secrets/workload-spiffe-uds/socket", "socket"),
        ];
        let leads_there = |(link, name): (&str, &str)| {
            let target = fs::read_link(self.pod.path(link));
            target.is_ok_and(|target| target == Path::new(&format!("{name}-{container}")))
        };
        eventually("requests are forwarded", async || {
            get(self.port).await.ok()?;
            sockets.into_iter().all(leads_there).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_standby_serves_after_the_agent_was_killed_and_the_agent_that_comes_back_waits() {
    let Some(envoy) = envoy_binary() else { return };
    let mut stage = Stage::serving(&envoy).await;
    let standby = stage.standby().await;
    stage.pod.agent.signal(Signal::KILL);
    stage.pod.agent.end().await;
    stage.serves(SECOND).await;
    // The container that was killed is started again.
    stage.pod.restart(&[]);
    stage.pod.agent.logs("waits until no agent serves").await;
    stage.serves(SECOND).await;
    // It takes over in turn.
    standby.signal(Signal::KILL);
    stage.serves(FIRST).await;
}

#[tokio::test]
async fn a_standby_serves_after_an_agent_that_was_told_to_stop_has_drained() {
    let Some(envoy) = envoy_binary() else { return };
    let mut stage = Stage::serving(&envoy).await;
    let _standby = stage.standby().await;
    stage.pod.agent.terminate();
    assert!(stage.pod.agent.end().await.success());
    stage.serves(SECOND).await;
}

#[tokio::test]
async fn a_standby_exits_with_an_agent_that_exits_on_purpose() {
    let Some(envoy) = envoy_binary() else { return };
    let mut stage = Stage::serving(&envoy).await;
    let mut standby = stage.standby().await;
    assert!(
        stage
            .pod
            .status(Method::POST, "/quitquitquit")
            .await
            .is_some()
    );
    assert_eq!(stage.pod.agent.end().await.code(), Some(0));
    assert_eq!(standby.end().await.code(), Some(0), "{}", standby.log());
    // One that starts later serves.
    let _standby = stage.standby().await;
    stage.serves(SECOND).await;
}

#[tokio::test]
async fn a_standby_exits_at_once_when_it_is_told_to_stop() {
    let Some(envoy) = envoy_binary() else { return };
    let stage = Stage::serving(&envoy).await;
    let mut standby = stage.standby().await;
    standby.terminate();
    assert_eq!(standby.end().await.code(), Some(0));
    stage.serves(FIRST).await;
}
