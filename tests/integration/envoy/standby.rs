//! Tests two agents in one directory, like two containers of a pod: one serves, the other waits and takes over.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::Method;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::Signal;

use super::doctor::diagnosed;
use super::hot_restart::UntilClosed;
use super::last_known_good::{assert_one_moment, change, of_version, wait_until_stored};
use crate::support::control_plane::ControlPlane;
use crate::support::http::{Attempt, Backend, Fresh, Load, get, try_ask};
use crate::support::names::name_table;
use crate::support::namespace;
use crate::support::pod::{Pod, Settings, ask, ready};
use crate::support::process::{Process, children_of, is_alive};
use crate::support::programs::envoy_binary;
use crate::support::resources::{cluster, endpoints, listener, routes};
use crate::support::{eventually, free_port, until};

const FIRST: &str = "istio-proxy";
const SECOND: &str = "istio-standby";

/// The time after which a former Envoy exits.
const PARENT_SHUTDOWN_TIME: &str = "3s";

/// A readiness probe like those of the kubelet.
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
    control_plane: ControlPlane,
    backend: Backend,
}

impl Stage {
    /// Starts a pod whose first container serves.
    async fn serving(envoy: &Path) -> Self {
        Self::serving_with(envoy, |_| Vec::new()).await
    }

    /// Starts such a pod with the variables that `more` returns for this control plane.
    async fn serving_with(
        envoy: &Path,
        more: impl Fn(&ControlPlane) -> Vec<(&'static str, String)>,
    ) -> Self {
        let (backend, port) = (Backend::start().await, free_port());
        let control_plane = ControlPlane::of(&Self::resources(&backend, &[port])).await;
        let more = more(&control_plane);
        let mut environment = vec![
            ("ISTIO_AGENT_STANDBY", FIRST),
            ("ISTIO_AGENT_PARENT_SHUTDOWN_TIME", PARENT_SHUTDOWN_TIME),
            ("PROXY_CONFIG", r#"{"drainDuration": "1s", "concurrency": 2}"#),
        ];
        environment.extend(more.iter().map(|(name, value)| (*name, value.as_str())));
        let settings = Settings { envoy: Some(envoy), environment: &environment };
        let stage = Self {
            pod: Pod::serving(settings, &control_plane).await,
            port,
            control_plane,
            backend,
        };
        stage.serves(FIRST).await;
        stage
    }

    /// Returns a listener at each of these ports, and what it needs.
    fn resources(backend: &Backend, ports: &[u16]) -> Vec<serde_json::Value> {
        let mut resources = vec![
            cluster("books"),
            endpoints("books", &[backend.port]),
            routes("all", "books", "0"),
        ];
        let listeners = ports.iter().map(|port| listener(&format!("plain-{port}"), *port, "all"));
        resources.extend(listeners);
        resources
    }

    /// Starts the second container with hardly any environment, and waits until it is the standby.
    async fn standby(&self) -> Process {
        let standby = self.start_standby(None);
        standby.logs("waits until no agent serves").await;
        standby
    }

    /// Runs the second container until it has recorded its build.
    async fn recorded_standby(&self) {
        let mut standby = self.standby().await;
        let record = self.pod.path("etc/istio/proxy/istio-agent-standby/build-istio-standby");
        until("the build is recorded", || record.exists()).await;
        standby.terminate();
        standby.end().await;
    }

    /// Starts the second container with this Envoy, or without PROXY_CONFIG.
    fn start_standby(&self, envoy: Option<&Path>) -> Process {
        let mut command = self.pod.command();
        command.arg("standby").env("ISTIO_AGENT_STANDBY", SECOND);
        match envoy {
            Some(envoy) => _ = command.env("PROXY_CONFIG", self.proxy_config_with(envoy)),
            None => _ = command.env_remove("PROXY_CONFIG"),
        }
        Process::start(&mut command, &self.pod.path("standby.log"))
    }

    /// Returns the pod's ProxyConfig with another Envoy.
    fn proxy_config_with(&self, envoy: &Path) -> String {
        let config = self.pod.proxy_config();
        let mut config: serde_json::Value = serde_json::from_str(config).unwrap();
        config["binaryPath"] = envoy.to_str().into();
        config.to_string()
    }

    /// Writes a program that runs `before`, then Envoy, and that prints another version than Envoy. Returns its path.
    fn wrapped(&self, envoy: &Path, before: &str) -> PathBuf {
        let path = self.pod.path("other-envoy");
        let script = format!(
            "#!/bin/sh\ncase \"$*\" in --version) echo other; exit;; esac\n{before}\nexec {} \"$@\"\n",
            envoy.display()
        );
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn load(&self) -> Load {
        Load::default()
            .with(Fresh(self.port))
            .with(UntilClosed(self.port, None))
            .with(Probe(self.pod.status_port))
    }

    /// Waits until Envoy forwards requests and the well-known sockets lead to those of this container.
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
async fn a_standby_serves_after_a_kill_and_the_returning_agent_waits() {
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
    // It serves again when the second container is killed.
    standby.signal(Signal::KILL);
    stage.serves(FIRST).await;
}

/// Runs the test in namespaces in which `/dev/shm` has 16 pages. Returns false outside of them.
fn has_small_shared_memory(test: &str) -> bool {
    let inside = namespace::is_inside(&format!("standby::{test}"));
    if inside {
        let mount = ["-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"];
        namespace::run("mount", &mount);
    }
    inside
}

/// Writes to `/dev/shm` until it is full.
fn fill_shared_memory() {
    fs::write("/dev/shm/application", [0; 128 << 10]).unwrap_err();
}

#[tokio::test]
async fn a_standby_serves_while_dev_shm_is_full() {
    let Some(envoy) = envoy_binary() else { return };
    if !has_small_shared_memory("a_standby_serves_while_dev_shm_is_full") {
        return;
    }
    let mut stage = Stage::serving(&envoy).await;
    let _standby = stage.standby().await;
    fill_shared_memory();
    stage.pod.agent.signal(Signal::KILL);
    stage.pod.agent.end().await;
    stage.serves(SECOND).await;
}

#[tokio::test]
async fn a_container_without_dev_shm_serves_and_the_doctor_explains() {
    const TEST: &str = "a_container_without_dev_shm_serves_and_the_doctor_explains";
    let Some(envoy) = envoy_binary() else { return };
    if !has_small_shared_memory(TEST) {
        return;
    }
    fill_shared_memory();
    let stage = Stage::serving(&envoy).await;
    let log = stage.pod.agent.log();
    assert!(log.contains("[HOT_RESTART_UNAVAILABLE]"), "{log}");
    let report = stage.pod.status(Method::GET, "/debug/doctor").await.unwrap();
    assert!(report.contains("no handover is possible"), "{report}");
}

#[tokio::test]
async fn a_standby_serves_despite_a_pipe_as_stored_configuration() {
    let Some(envoy) = envoy_binary() else { return };
    let store = tempfile::tempdir().unwrap();
    let directory = store.path().to_str().unwrap().to_owned();
    let mut stage =
        Stage::serving_with(&envoy, |_| vec![("ISTIO_AGENT_KEEP_CONFIG", directory.clone())]).await;
    let stored = store.path().join("istio-agent-istio-proxy/istio-agent-config");
    until("configuration is stored", || stored.join("configuration").exists()).await;
    let standby = stage.standby().await;
    let pipe = stored.join("configuration");
    fs::remove_file(&pipe).unwrap();
    mknodat(CWD, pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
    stage.pod.agent.signal(Signal::KILL);
    stage.pod.agent.end().await;
    standby.logs("stored configuration is not used").await;
    stage.serves(SECOND).await;
}

#[tokio::test]
async fn a_standby_serves_after_a_stopped_agent_has_drained() {
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
    assert!(stage.pod.status(Method::POST, "/quitquitquit").await.is_some());
    assert_eq!(stage.pod.agent.end().await.code(), Some(0));
    assert_eq!(standby.end().await.code(), Some(0), "{}", standby.log());
    // A container that starts later serves.
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
async fn a_standby_that_is_told_to_stop_while_it_takes_over_stops() {
    let Some(envoy) = envoy_binary() else { return };
    for delay in [0, 10, 20, 40, 80] {
        let mut stage = Stage::serving(&envoy).await;
        let mut standby = stage.standby().await;
        stage.pod.agent.signal(Signal::KILL);
        stage.pod.agent.end().await;
        tokio::time::sleep(Duration::from_millis(delay)).await;
        standby.terminate();
        standby.end().await;
    }
}

#[tokio::test]
async fn a_handover_there_and_back_fails_no_request_and_no_probe() {
    let Some(envoy) = envoy_binary() else { return };
    let stage = Stage::serving(&envoy).await;
    let standby = stage.standby().await;
    let load = stage.load();
    load.wait_for_attempts(100).await;
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
    load.wait_for_attempts(load.tally().attempts() + 100).await;
    let tally = load.assert_flawless();
    eprintln!("{} attempts", tally.attempts());
}

#[tokio::test]
async fn the_doctor_has_no_finding_before_and_after_a_standby_takes_over() {
    let Some(envoy) = envoy_binary() else { return };
    let stage = Stage::serving(&envoy).await;
    let no_finding = async |state: &str| {
        eventually(state, async || {
            let report = stage.pod.status(Method::GET, "/debug/doctor").await?;
            let report: serde_json::Value = serde_json::from_str(&report).unwrap();
            let is_reached = report["groups"].to_string().contains(state);
            assert!(!is_reached || report["level"] == "ok", "{state}: {report:#}");
            is_reached.then_some(())
        })
        .await;
    };
    no_finding("the other container is not connected yet").await;
    let standby = stage.standby().await;
    no_finding("is able to take over").await;
    stage.pod.status(Method::POST, "/handover").await.unwrap();
    standby.logs("container istio-standby serves").await;
    no_finding("container istio-standby serves").await;
    stage.pod.agent.logs("waits until no agent serves").await;
    no_finding("container istio-proxy (").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handover_during_changes_serves_the_state_of_one_moment() {
    let Some(envoy) = envoy_binary() else { return };
    let (store, mut version) = (tempfile::tempdir().unwrap(), 0);
    let directory = store.path().to_str().unwrap().to_owned();
    let mut stage =
        Stage::serving_with(&envoy, |_| vec![("ISTIO_AGENT_KEEP_CONFIG", directory.clone())]).await;
    let ports = [free_port(), free_port()];
    stage.control_plane.set(&of_version(version, 300, ports)).await;
    let mut standby = stage.standby().await;
    let handover = async {
        wait_until_stored(&stage.pod, &["Listener", "Cluster"]).await;
        eventually("the standby is connected", async || {
            stage.pod.status(Method::POST, "/handover").await
        })
        .await;
        standby.logs(&format!("container {SECOND} serves")).await;
        tokio::time::sleep(Duration::from_millis(fastrand::u64(..8000))).await;
    };
    tokio::select! {
        () = change(&stage.control_plane, &mut version, ports) => {}
        () = handover => {}
    }
    let running = children_of(standby.pid());
    stage.pod.kill().await;
    standby.signal(Signal::KILL);
    standby.end().await;
    until("Envoy has ended", || running.iter().all(|envoy| !is_alive(*envoy))).await;
    stage.control_plane.kill().await;
    stage.pod.restart(&[]);
    eventually("an answer", async || get(ports[0]).await.ok()).await;
    assert_one_moment(&stage.pod, version).await;
}

/// Returns a line for [`Stage::wrapped`] that runs this before an Envoy that is started for a handover.
fn before_successor(what: &str) -> String {
    format!("case \"$*\" in *--restart-epoch*) {what};; esac")
}

#[tokio::test]
async fn a_container_with_another_build_takes_over_once() {
    let Some(envoy) = envoy_binary() else { return };
    let stage = Stage::serving(&envoy).await;
    stage.recorded_standby().await;
    let load = stage.load();
    load.wait_for_attempts(50).await;
    let other = stage.wrapped(&envoy, "");
    let standby = stage.start_standby(Some(&other));
    standby.logs("container istio-standby serves").await;
    let former = &stage.pod.agent;
    former.logs("container istio-proxy waits").await;
    stage.serves(SECOND).await;
    load.wait_for_attempts(load.tally().attempts() + 50).await;
    load.assert_flawless();
    assert!(!former.log().contains("has a new build"), "it takes nothing back");
}

#[tokio::test]
async fn a_successor_has_its_parents_workers_and_survives_its_death() {
    let Some(envoy) = envoy_binary() else { return };
    let stage = Stage::serving(&envoy).await;
    stage.recorded_standby().await;
    let load = stage.load();
    load.wait_for_attempts(50).await;
    // The next Envoy is configured to have one worker, and its parent has two.
    let other = stage.wrapped(&envoy, "");
    let config = stage.proxy_config_with(&other);
    let config = config.replace("\"concurrency\":2", "\"concurrency\":1");
    let mut command = stage.pod.command();
    command.arg("standby").env("ISTIO_AGENT_STANDBY", SECOND).env("PROXY_CONFIG", config);
    let standby = Process::start(&mut command, &stage.pod.path("standby.log"));
    standby.logs("container istio-standby serves").await;
    standby.logs("has the 2 workers of its parent").await;
    let info = ask(&stage.pod.envoy, "/server_info").await.unwrap();
    assert!(info.contains("\"concurrency\": 2"), "{info}");
    stage.pod.agent.signal(Signal::KILL);
    standby.logs("the former Envoy has exited early").await;
    // For a new listener, Envoy asks its parent for a socket, and waits for the answer.
    let port = free_port();
    stage.control_plane.set(&Stage::resources(&stage.backend, &[stage.port, port])).await;
    eventually("the new listener serves", async || get(port).await.ok()).await;
    standby.logs("has sent a message to its former parent").await;
    // It is able to be replaced again.
    standby.signal(Signal::HUP);
    standby.logs("bootstrap unchanged").await;
    let log = standby.log();
    assert!(!log.contains("full restart"), "{log}");
    load.wait_for_attempts(load.tally().attempts() + 50).await;
    // Requests on connections of the Envoy that was killed may fail.
    stage.serves(SECOND).await;
}

#[tokio::test]
async fn the_former_agent_serves_its_envoy_with_each_optional_module() {
    let Some(envoy) = envoy_binary() else { return };
    let (store, output) = (tempfile::tempdir_in("/dev/shm").unwrap(), tempfile::tempdir().unwrap());
    let text = |place: &tempfile::TempDir| place.path().to_str().unwrap().to_owned();
    let (store, output) = (text(&store), text(&output));
    let stage = Stage::serving_with(&envoy, |istiod| {
        istiod.add(name_table("shop", &[("books", &["10.1.2.3"])]));
        vec![
            ("CA_ADDR", format!("127.0.0.1:{}", istiod.istiod.address.port())),
            ("OUTPUT_CERTS", output.clone()),
            ("ISTIO_META_DNS_CAPTURE", "true".to_owned()),
            ("DNS_PROXY_ADDR", format!("127.0.0.1:{}", free_port())),
            ("ISTIO_AGENT_KEEP_CONFIG", store.clone()),
            ("ISTIO_AGENT_KEEP_CERTS", store.clone()),
        ]
    })
    .await;
    let standby = stage.standby().await;
    let load = stage.load();
    load.wait_for_attempts(50).await;
    let agent = &stage.pod.agent;
    eventually("the standby is connected", async || {
        stage.pod.status(Method::POST, "/handover").await
    })
    .await;
    standby.logs("container istio-standby serves").await;
    agent.logs("container istio-proxy waits").await;
    let log = agent.log();
    assert!(log.contains("the former Envoy has exited: exit status 0"), "{log}");
    assert!(!log.contains("[TASK_EXITED]"), "{log}");
    stage.serves(SECOND).await;
    load.assert_flawless();
}

#[tokio::test]
async fn further_connections_to_the_handover_socket_do_not_hide_the_standby() {
    let Some(envoy) = envoy_binary() else { return };
    let stage = Stage::serving(&envoy).await;
    let standby = stage.standby().await;
    let waits = async || {
        let page = stage.pod.status(Method::GET, "/debug/standby").await?;
        let page: serde_json::Value = serde_json::from_str(&page).unwrap();
        page["waits"]["name"].as_str().map(str::to_owned)
    };
    eventually("the standby is connected", &waits).await;
    let socket = stage.pod.path("etc/istio/proxy/istio-agent-standby/handover");
    for name in ["a", "b", "c"] {
        let mut stream = UnixStream::connect(&socket).unwrap();
        let hello = format!(r#"{{"hello": {{"version": 2, "name": "{name}", "build": ""}}}}"#);
        writeln!(stream, "{hello}").unwrap();
        // The agent has answered the greeting when it has read this one, and then ends the connection.
        writeln!(stream, "\"done\"").unwrap();
        stream.read_to_string(&mut String::new()).unwrap();
        assert_eq!(waits().await.as_deref(), Some(SECOND));
    }
    assert!(stage.pod.status(Method::POST, "/handover").await.is_some());
    standby.logs("container istio-standby serves").await;
}

#[tokio::test]
async fn a_standby_without_roots_or_token_says_that_it_cannot_take_over() {
    let Some(envoy) = envoy_binary() else { return };
    let stage = Stage::serving(&envoy).await;
    let token = stage.pod.path("var/run/secrets/tokens/istio-token");
    let content = fs::read(&token).unwrap();
    for (name, roots, has_token, expected) in [
        ("neither is missing", None, true, None),
        ("roots", Some("missing.pem"), true, Some("missing.pem")),
        ("token", None, false, Some("istio-token")),
    ] {
        if !has_token {
            fs::remove_file(&token).unwrap();
        }
        let mut command = stage.pod.command();
        command.arg("standby").env("ISTIO_AGENT_STANDBY", SECOND).env_remove("PROXY_CONFIG");
        command.envs(roots.map(|path| ("XDS_ROOT_CA", path)));
        let mut standby = Process::start(&mut command, &stage.pod.path("standby.log"));
        let waits = eventually("the standby is connected", async || {
            let page = stage.pod.status(Method::GET, "/debug/standby").await?;
            let page: serde_json::Value = serde_json::from_str(&page).unwrap();
            page["waits"].is_object().then(|| page["waits"]["hindrance"].clone())
        });
        let hindrance = waits.await;
        let is_found = |expected| hindrance.as_str().is_some_and(|it| it.contains(expected));
        assert!(expected.map_or(hindrance.is_null(), is_found), "{name}: {hindrance}");
        fs::write(&token, &content).unwrap();
        standby.terminate();
        standby.end().await;
        eventually("the standby has gone", async || {
            let page = stage.pod.status(Method::GET, "/debug/standby").await?;
            page.contains("\"waits\":null").then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_container_that_asks_while_envoy_starts_takes_over_once_envoy_serves() {
    let Some(envoy) = envoy_binary() else { return };
    let mut stage = Stage::serving(&envoy).await;
    stage.recorded_standby().await;
    stage.pod.agent.signal(Signal::KILL);
    stage.pod.agent.end().await;
    // The first Envoy of the next agent starts when this file exists.
    let start = stage.pod.path("start");
    let waits = format!(
        "case \"$*\" in *--restart-epoch*) ;; *--base-id*) until [ -e {} ]; do sleep 0.1; done;; esac",
        start.display()
    );
    let other = stage.wrapped(&envoy, &waits);
    let config = stage.proxy_config_with(&other);
    stage.pod.restart(&[("PROXY_CONFIG", &config)]);
    stage.pod.agent.logs("Envoy command").await;
    let standby = stage.start_standby(Some(&other));
    stage.pod.agent.logs("handing over to container").await;
    fs::write(start, "").unwrap();
    standby.logs("container istio-standby serves").await;
    stage.serves(SECOND).await;
}

#[tokio::test]
async fn a_failed_handover_leaves_the_agent_serving_and_is_not_repeated() {
    let Some(envoy) = envoy_binary() else { return };
    for (what, reason) in
        [("exit 1", "exited before it served"), ("kill -9 $PPID", "it has exited")]
    {
        let stage = Stage::serving(&envoy).await;
        stage.recorded_standby().await;
        let load = stage.load();
        load.wait_for_attempts(50).await;
        let other = stage.wrapped(&envoy, &before_successor(what));
        let mut standby = stage.start_standby(Some(&other));
        let agent = &stage.pod.agent;
        agent.logs("[HANDOVER_FAILED]").await;
        let log = agent.log();
        let line = log.lines().find(|line| line.contains("HANDOVER_FAILED"));
        assert!(line.unwrap().contains(reason), "{log}");
        if !standby.is_running() {
            standby = stage.start_standby(Some(&other));
        }
        standby.logs("container istio-standby waits").await;
        load.wait_for_attempts(load.tally().attempts() + 50).await;
        load.assert_flawless();
        let log = agent.log();
        assert_eq!(log.matches("handing over").count(), 1, "{log}");
        stage.serves(FIRST).await;
    }
}

#[tokio::test]
async fn a_handover_fails_without_configuration_and_a_later_one_succeeds() {
    let Some(envoy) = envoy_binary() else { return };
    let stage = Stage::serving(&envoy).await;
    stage.recorded_standby().await;
    let load = stage.load();
    load.wait_for_attempts(50).await;
    // The next Envoy gets no configuration, because its bootstrap has the wrong socket of the agent. It is killed when
    // it has taken the admin port of the serving Envoy.
    let bootstrap = "etc/istio/proxy/istio-standby/envoy-rev0.json";
    let log = stage.pod.path("agent.log");
    let waits = format!(
        "sed -i s/XDS-istio-standby/missing/ {bootstrap}
         (until grep -q 'shutting down admin' {}; do sleep 0.1; done; kill -9 $$) &",
        log.display()
    );
    let other = stage.wrapped(&envoy, &before_successor(&waits));
    let mut standby = stage.start_standby(Some(&other));
    stage.pod.agent.logs("[HANDOVER_FAILED]").await;
    until("the standby waits again", || {
        standby.log().matches("container istio-standby waits").count() > 1
    })
    .await;
    // The next Envoy has closed the admin port of the one that serves.
    let (report, exit) = diagnosed(&stage.pod).await;
    let verdict = report["verdict"].as_str().unwrap();
    assert!(verdict.starts_with("ready, with 1 warning: "), "{report:#}");
    assert!(verdict.contains("[HANDOVER_FAILED]") && exit == Some(1), "{report:#}");
    standby.terminate();
    standby.end().await;
    stage.serves(FIRST).await;
    load.wait_for_attempts(load.tally().attempts() + 50).await;
    let standby = stage.start_standby(Some(&envoy));
    standby.logs("container istio-standby serves").await;
    stage.serves(SECOND).await;
    load.wait_for_attempts(load.tally().attempts() + 50).await;
    load.assert_flawless();
}

#[tokio::test]
async fn a_hook_of_the_waiting_container_does_not_drain_the_other() {
    let Some(envoy) = envoy_binary() else { return };
    let stage = Stage::serving(&envoy).await;
    let port = format!("--debug-port={}", stage.pod.status_port);
    for (container, is_drained) in [(SECOND, false), (FIRST, true)] {
        let mut hook = stage.pod.command();
        hook.args(["request", &port, "POST", "drain"]).env("ISTIO_AGENT_STANDBY", container);
        let hook = Process::start(&mut hook, &stage.pod.path("hook.log"));
        let (code, log) = hook.ends().await;
        assert_eq!(code, 0, "{log}");
        let drain = stage.pod.status(Method::GET, "/drain").await.unwrap();
        let drain: serde_json::Value = serde_json::from_str(&drain).unwrap();
        assert_eq!(drain["envoy"]["is_drained"], is_drained, "{drain}");
    }
}

#[tokio::test]
async fn a_missing_or_broken_envoy_is_found_before_the_handover_begins() {
    let Some(envoy) = envoy_binary() else { return };
    let stage = Stage::serving(&envoy).await;
    stage.recorded_standby().await;
    let load = stage.load();
    load.wait_for_attempts(50).await;
    for program in [stage.wrapped(&envoy, "exit 3"), stage.pod.path("missing")] {
        let standby = stage.start_standby(Some(&program));
        standby.logs("[HANDOVER_FAILED]").await;
        standby.logs("container istio-standby waits").await;
        standby.terminate();
    }
    load.wait_for_attempts(load.tally().attempts() + 50).await;
    load.assert_flawless();
    assert!(!stage.pod.agent.log().contains("handing over"));
}

#[tokio::test]
async fn the_former_agent_serves_again_if_its_successor_is_killed() {
    let Some(envoy) = envoy_binary() else { return };
    let stage = Stage::serving(&envoy).await;
    stage.recorded_standby().await;
    let other = stage.wrapped(&envoy, "");
    let standby = stage.start_standby(Some(&other));
    standby.logs("container istio-standby serves").await;
    standby.signal(Signal::KILL);
    let agent = &stage.pod.agent;
    agent.logs("no agent of this pod serves; taking over").await;
    stage.serves(FIRST).await;
}

#[tokio::test]
async fn the_admin_socket_is_that_of_the_container_that_serves() {
    let Some(envoy) = envoy_binary() else { return };
    let with_socket = |_: &_| vec![("ISTIO_AGENT_ADMIN_SOCKET", "true".to_owned())];
    let stage = Stage::serving_with(&envoy, with_socket).await;
    stage.recorded_standby().await;
    let other = stage.wrapped(&envoy, "");
    let standby = stage.start_standby(Some(&other));
    standby.logs("container istio-standby serves").await;
    ready(&stage.pod.envoy).await;
    standby.signal(Signal::KILL);
    stage.pod.agent.logs("no agent of this pod serves; taking over").await;
    stage.serves(FIRST).await;
    ready(&stage.pod.envoy).await;
}

#[tokio::test]
async fn a_stopped_container_exits_at_once_while_it_takes_over() {
    let Some(envoy) = envoy_binary() else { return };
    let stage = Stage::serving(&envoy).await;
    stage.recorded_standby().await;
    let load = stage.load();
    let other = stage.wrapped(&envoy, &before_successor("exec sleep 1000"));
    let mut standby = stage.start_standby(Some(&other));
    stage.pod.agent.logs("handing over").await;
    standby.logs("Starting proxy agent").await;
    standby.terminate();
    assert_eq!(standby.end().await.code(), Some(0), "{}", standby.log());
    stage.pod.agent.logs("[HANDOVER_FAILED]").await;
    load.wait_for_attempts(load.tally().attempts() + 20).await;
    load.assert_flawless();
}
