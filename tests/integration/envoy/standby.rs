//! Two agents in one directory, as two containers of a pod: one serves, the other waits and takes over.

use std::fs;
use std::path::Path;

use http::Method;
use rustix::process::Signal;

use super::hot_restart::Polite;
use crate::support::control_plane::ControlPlane;
use crate::support::http::{Attempt, Backend, Fresh, Load, get, try_ask};
use crate::support::pod::{Pod, Settings};
use crate::support::process::Process;
use crate::support::programs::envoy_binary;
use crate::support::resources::{cluster, endpoints, listener, routes};
use crate::support::{eventually, free_port};

const FIRST: &str = "istio-proxy";
const SECOND: &str = "istio-standby";

/// Seconds of a former Envoy.
const STAY: &str = "3s";

/// A probe of readiness, as the kubelet makes it.
struct Probe(u16);

impl Attempt for Probe {
    async fn attempt(&mut self) -> Result<String, String> {
        let answer = try_ask(self.0, "GET /healthz/ready", "").await;
        match answer {
            Some(answer) if answer.status == 200 => Ok("ready".to_owned()),
            other => Err(format!("{other:?}")),
        }
    }
}

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
            environment: &[
                ("ISTIO_AGENT_STANDBY", FIRST),
                ("ISTIO_AGENT_PARENT_SHUTDOWN_TIME", STAY),
                ("PROXY_CONFIG", r#"{"drainDuration": "1s"}"#),
            ],
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

#[tokio::test]
async fn a_handover_there_and_back_fails_no_request_and_no_probe() {
    let Some(envoy) = envoy_binary() else { return };
    let stage = Stage::serving(&envoy).await;
    let standby = stage.standby().await;
    let load = Load::default()
        .with(Fresh(stage.port))
        .with(Polite(stage.port, None))
        .with(Probe(stage.pod.status_port));
    load.makes(100).await;
    let (first, second) = ((FIRST, &stage.pod.agent), (SECOND, &standby));
    for ((name, serves), (_, waits)) in [(second, first), (first, second)] {
        let before = serves.log().len();
        let waited = waits.log().matches("waits until no agent serves").count();
        eventually("the standby is connected", async || {
            stage.pod.status(Method::POST, "/handover").await
        })
        .await;
        eventually("the other container serves", async || {
            let line = format!("container {name} serves");
            serves.log()[before..].contains(&line).then_some(())
        })
        .await;
        eventually("the former agent waits", async || {
            let again = waits.log().matches("waits until no agent serves").count();
            (again > waited).then_some(())
        })
        .await;
    }
    stage.serves(FIRST).await;
    load.makes(load.tally().attempts() + 100).await;
    let tally = load.assert_flawless();
    eprintln!("{} attempts", tally.attempts());
}
