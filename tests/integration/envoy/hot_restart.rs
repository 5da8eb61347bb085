//! Tests that no request fails when Envoy is replaced by a hot restart, and that the previous Envoy continues
//! to serve after a failure.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpStream;

use super::doctor::{checks, diagnosed};
use crate::support::control_plane::ControlPlane;
use crate::support::http::{Attempt, Backend, Fresh, Load, connect, exchange, get, header};
use crate::support::pod::{Pod, Settings, ask};
use crate::support::process::{children_of, is_alive};
use crate::support::programs::{envoy_binary, variable};
use crate::support::resources::{cluster, endpoints, listener, routes};
use crate::support::{eventually, free_port, until};

const OVERRIDE: &str = "in/override.json";
const ANNOTATIONS: &str = "etc/istio/pod/annotations";
/// The directory of Envoy's hot restart sockets.
const SOCKETS: &str = "istio-agent-envoy";
/// The parent shutdown time, after which a successor ends the previous Envoy.
const PARENT_SHUTDOWN_TIME: &str = "3s";

struct Stage {
    pod: Pod,
    port: u16,
    control_plane: ControlPlane,
    _backend: Backend,
    /// The directory that contains the link to Envoy's program.
    programs: TempDir,
}

impl Stage {
    async fn serving(envoy: &Path) -> Self {
        Self::serving_with(envoy, "0").await
    }

    /// Starts a pod with this budget of restarts after crashes, and waits until its route is in force.
    async fn serving_with(envoy: &Path, restarts: &str) -> Self {
        let (backend, port) = (Backend::start().await, free_port());
        let control_plane = ControlPlane::of(&[
            cluster("books"),
            endpoints("books", &[backend.port]),
            listener("plain", port, "all"),
            routes("all", "books", "0"),
        ])
        .await;
        let programs = tempfile::tempdir().unwrap();
        let program = programs.path().join("envoy");
        std::os::unix::fs::symlink(envoy, &program).unwrap();
        let environment = [
            ("ISTIO_AGENT_HOT_RESTART", "true"),
            ("ISTIO_AGENT_ENVOY_RESTARTS", restarts),
            ("ISTIO_AGENT_PARENT_SHUTDOWN_TIME", PARENT_SHUTDOWN_TIME),
            ("ISTIO_BOOTSTRAP_OVERRIDE", OVERRIDE),
            ("PROXY_CONFIG", r#"{"drainDuration": "1s"}"#),
        ];
        let settings = Settings { envoy: Some(&program), environment: &environment };
        let pod = Pod::serving(settings, &control_plane).await;
        let stage = Self { pod, port, control_plane, _backend: backend, programs };
        stage.serves().await;
        stage
    }

    async fn serves(&self) {
        eventually("a route in force", async || get(self.port).await.ok()).await;
    }

    /// Changes the bootstrap override, and sends SIGHUP to the agent.
    fn change(&self, mark: &str) {
        fs::create_dir_all(self.pod.path("in")).unwrap();
        let text = json!({ "node": { "metadata": { "MARK": mark } } }).to_string();
        self.pod.replace(OVERRIDE, &text);
        self.pod.agent.signal(Signal::HUP);
    }

    async fn info(&self) -> Option<Value> {
        serde_json::from_str(&ask(&self.pod.envoy, "/server_info").await?).ok()
    }

    /// Waits until an Envoy with this mark in its bootstrap is live. Returns its restart epoch.
    async fn wait_for_epoch_with_mark(&self, mark: &str) -> u64 {
        eventually("an Envoy of this mark", async || {
            let info = self.info().await?;
            let is_it = info["state"] == "LIVE" && info["node"]["metadata"]["MARK"] == mark;
            is_it.then(|| info["command_line_options"]["restart_epoch"].as_u64())?
        })
        .await
    }

    fn envoys(&self) -> Vec<Pid> {
        children_of(self.pod.agent.pid())
    }

    async fn only_envoy(&self) -> Pid {
        eventually("one Envoy is left", async || match self.envoys()[..] {
            [only] => Some(only),
            _ => None,
        })
        .await
    }

    /// Waits for an Envoy next to the known one. Returns its pid.
    async fn wait_for_other_envoy(&self, known: Pid) -> Pid {
        eventually("another Envoy", async || self.envoys().into_iter().find(|pid| *pid != known))
            .await
    }

    async fn logs(&self, line: &str) {
        eventually(line, async || self.pod.agent.log().contains(line).then_some(())).await;
    }

    fn program(&self, to: &Path) {
        let new = self.programs.path().join("new");
        std::os::unix::fs::symlink(to, &new).unwrap();
        fs::rename(new, self.programs.path().join("envoy")).unwrap();
    }

    async fn ends_well(mut self) {
        let envoys = self.envoys();
        self.pod.agent.signal(Signal::TERM);
        let status = self.pod.agent.end().await;
        assert_eq!(status.code(), Some(0), "{status}");
        assert!(envoys.into_iter().all(|pid| !is_alive(pid)));
        let left = names(&self.pod.path("etc/istio/proxy"));
        assert_eq!(left, ["grpc-bootstrap.json", SOCKETS], "which are for others");
        assert_eq!(names(&self.sockets()), [""; 0]);
    }

    /// Returns the directory of Envoy's hot restart sockets.
    fn sockets(&self) -> PathBuf {
        self.pod.path("etc/istio/proxy").join(SOCKETS)
    }

    async fn option(&self, name: &str) -> Value {
        self.info().await.unwrap()["command_line_options"][name].clone()
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// A client that sends requests on one connection until Envoy announces that it closes the connection.
pub(super) struct UntilClosed(pub(super) u16, pub(super) Option<TcpStream>);

impl Attempt for UntilClosed {
    async fn attempt(&mut self) -> Result<String, String> {
        let mut stream = match self.1.take() {
            Some(stream) => stream,
            None => connect(self.0).await?,
        };
        let head = exchange(&mut stream).await?;
        if header(&head, "connection") == Some("close") {
            return Ok("last".to_owned());
        }
        self.1 = Some(stream);
        Ok("more".to_owned())
    }
}

fn resident(pid: Pid) -> u64 {
    let status = fs::read_to_string(proc(pid, "status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS"));
    line.unwrap().split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn open_files(pid: Pid) -> usize {
    fs::read_dir(proc(pid, "fd")).unwrap().count()
}

fn proc(pid: Pid, file: &str) -> PathBuf {
    format!("/proc/{}/{file}", pid.as_raw_nonzero()).into()
}

fn shared_memory(base_id: u64) -> PathBuf {
    format!("/dev/shm/envoy_shared_memory_{}", base_id * 10).into()
}

#[tokio::test]
async fn hot_restarts_in_a_row_fail_no_request_and_leave_one_envoy() {
    let Some(binary) = envoy_binary() else { return };
    let rounds = variable("STRESS").map_or(4, |_| 20);
    let stage = Stage::serving(&binary).await;
    let load = Load::default()
        .with(Fresh(stage.port))
        .with(Fresh(stage.port))
        .with(UntilClosed(stage.port, None))
        .with(UntilClosed(stage.port, None));
    load.wait_for_attempts(500).await;
    let first = stage.only_envoy().await;
    let agent = stage.pod.agent.pid();
    let before = (resident(first), open_files(first), open_files(agent));
    for round in 1..=rounds {
        let mark = round.to_string();
        stage.change(&mark);
        assert_eq!(stage.wait_for_epoch_with_mark(&mark).await, round);
        stage.only_envoy().await;
    }
    let last = stage.only_envoy().await;
    let after = (resident(last), open_files(last), open_files(agent));
    let tally = load.assert_flawless();
    let (succeeded, attempts) = (&tally.successes, tally.attempts());
    eprintln!("{rounds} restarts, {attempts} requests {succeeded:?}, {before:?} then {after:?}");
    assert!(succeeded.get("last").is_some_and(|count| *count as u64 >= rounds));
    assert!(after.0 < before.0 * 5 / 4, "{after:?} after {before:?}");
    assert!(after.1 <= before.1 + 12, "{after:?} after {before:?}");
    assert!(after.2 <= before.2 + 6, "{after:?} after {before:?}");
    drop(load);
    // The streams of two Envoys that run at the same time do not replace each other.
    assert!(!stage.pod.agent.log().contains("overlapping stream"));
    let info = stage.info().await.unwrap();
    let base_id = info["command_line_options"]["base_id"].as_str().unwrap();
    let memory = shared_memory(base_id.parse().unwrap());
    assert!(memory.exists(), "{}", memory.display());
    stage.ends_well().await;
    assert!(!memory.exists(), "{}", memory.display());
}

#[tokio::test]
async fn no_other_user_can_open_envoys_hot_restart_sockets() {
    let Some(binary) = envoy_binary() else { return };
    let mut stage = Stage::serving(&binary).await;
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&stage.sockets()), 0o700);
    let before = names(&stage.sockets());
    assert_eq!(before.len(), 4, "{before:?}");
    for name in &before {
        assert_eq!(mode(&stage.sockets().join(name)), 0o600, "{name}");
    }
    let bound = fs::read_to_string("/proc/net/unix").unwrap();
    assert!(!bound.contains("@envoy"), "an abstract socket: {bound}");
    let base_id = stage.option("base_id").await;
    let memory = shared_memory(base_id.as_str().unwrap().parse().unwrap());
    assert!(memory.exists());
    stage.pod.kill_and_restart(|| ()).await;
    stage.serves().await;
    let after = names(&stage.sockets());
    assert!(after.len() == 4 && after != before, "{after:?}");
    assert!(!memory.exists());
    stage.ends_well().await;
}

#[tokio::test]
async fn an_envoy_with_an_open_socket_directory_starts_without_hot_restart() {
    let Some(binary) = envoy_binary() else { return };
    let mut stage = Stage::serving(&binary).await;
    let open = fs::Permissions::from_mode(0o755);
    let sockets = stage.sockets();
    let opened = || fs::set_permissions(sockets, open).unwrap();
    stage.pod.kill_and_restart(opened).await;
    stage.serves().await;
    assert_eq!(stage.option("disable_hot_restart").await, true);
    let log = stage.pod.agent.log();
    assert!(log.contains("[HOT_RESTART_UNAVAILABLE]"), "{log}");
    // Without hot restart a change is a full restart.
    stage.change("a");
    assert_eq!(stage.wait_for_epoch_with_mark("a").await, 0);
    stage.logs("full restart of Envoy").await;
}

#[tokio::test]
async fn a_successor_keeps_the_workers_of_its_parent_until_a_full_restart() {
    let Some(binary) = envoy_binary() else { return };
    let stage = Stage::serving(&binary).await;
    assert_eq!(stage.option("concurrency").await, 1);
    fs::create_dir_all(stage.pod.path("etc/istio/pod")).unwrap();
    for (configured, expected) in [(2, 2), (1, 2)] {
        let annotation = format!("proxy.istio.io/config=\"concurrency: {configured}\"\n");
        stage.pod.replace(ANNOTATIONS, &annotation);
        let mark = configured.to_string();
        stage.change(&mark);
        stage.wait_for_epoch_with_mark(&mark).await;
        assert_eq!(stage.option("concurrency").await, expected);
        stage.only_envoy().await;
    }
    stage.logs("has the 2 workers of its parent").await;
    stage.ends_well().await;
}

/// Runs only if `OTHER_ENVOY_BIN` names an Envoy of another release.
#[tokio::test]
async fn an_envoy_of_another_release_takes_over_without_a_failed_request() {
    let Some(binary) = envoy_binary() else { return };
    let Some(other) = variable("OTHER_ENVOY_BIN").map(PathBuf::from) else {
        eprintln!("OTHER_ENVOY_BIN is not set. This test is not run.");
        return;
    };
    let stage = Stage::serving(&binary).await;
    let load = Load::default().with(Fresh(stage.port)).with(UntilClosed(stage.port, None));
    for (epoch, program) in [(1, &other), (2, &binary)] {
        let before = stage.info().await.unwrap()["version"].clone();
        stage.program(program);
        stage.pod.agent.signal(Signal::HUP);
        let info = eventually("an Envoy of another version", async || {
            let info = stage.info().await?;
            (info["state"] == "LIVE" && info["version"] != before).then_some(info)
        })
        .await;
        assert_eq!(info["command_line_options"]["restart_epoch"], epoch);
        stage.only_envoy().await;
    }
    load.assert_flawless();
    drop(load);
    stage.ends_well().await;
}

#[tokio::test]
async fn a_changed_file_is_noticed_and_an_unchanged_one_ignored() {
    let Some(binary) = envoy_binary() else { return };
    let stage = Stage::serving(&binary).await;
    stage.pod.agent.signal(Signal::HUP);
    stage.logs("bootstrap unchanged").await;
    stage.program(&binary.canonicalize().unwrap());
    stage.logs("validating new Envoy inputs (a file has changed)").await;
    eventually("a second verdict", async || {
        let log = stage.pod.agent.log();
        let verdicts = log.matches("bootstrap unchanged").count();
        (verdicts == 2).then_some(())
    })
    .await;
    assert_eq!(stage.envoys().len(), 1);
    stage.ends_well().await;
}

#[tokio::test]
async fn an_annotation_that_a_network_plugin_adds_waits_for_the_next_envoy() {
    let Some(binary) = envoy_binary() else { return };
    let stage = Stage::serving_with(&binary, "1/1h").await;
    let first = stage.only_envoy().await;
    fs::create_dir_all(stage.pod.path("etc/istio/pod")).unwrap();
    for (nth, address) in [(1, "10.3.3.3/32"), (2, "10.3.3.4/32")] {
        let annotation = format!("cni.projectcalico.org/podIP=\"{address}\"\n");
        stage.pod.replace(ANNOTATIONS, &annotation);
        stage.pod.agent.signal(Signal::HUP);
        until("the change is found", || {
            let log = stage.pod.agent.log();
            log.matches("and the next Envoy has them").count() == nth
        })
        .await;
    }
    assert_eq!(stage.only_envoy().await, first);
    kill_process(first, Signal::SEGV).unwrap();
    stage.logs("starting Envoy again").await;
    stage.serves().await;
    let metadata = stage.info().await.unwrap()["node"]["metadata"].clone();
    let annotations = &metadata["ANNOTATIONS"];
    assert_eq!(annotations["cni.projectcalico.org/podIP"], "10.3.3.4/32");
    stage.ends_well().await;
}

#[tokio::test]
async fn bad_inputs_leave_envoy_serving_and_a_good_one_follows() {
    let Some(binary) = envoy_binary() else { return };
    let stage = Stage::serving(&binary).await;
    let load = Load::default().with(Fresh(stage.port));
    let first = stage.only_envoy().await;
    fs::create_dir_all(stage.pod.path("in")).unwrap();
    for (bad, expected) in [
        // An override that cannot be parsed is ignored, so the bootstrap is the same as without the file.
        ("{", "bootstrap unchanged"),
        (r#"{"admin": {"address": 1}}"#, "Envoy rejected the bootstrap (exit status 1): ["),
    ] {
        stage.pod.replace(OVERRIDE, bad);
        stage.pod.agent.signal(Signal::HUP);
        stage.logs(expected).await;
    }
    let program = stage.programs.path().join("bad");
    fs::write(&program, "#!/bin/sh\nexit 7\n").unwrap();
    for (mode, expected) in [(0o644, "[ENVOY_NOT_EXECUTABLE]"), (0o755, "exit status 7")] {
        fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
        stage.program(&program);
        stage.pod.replace(OVERRIDE, "{}");
        stage.pod.agent.signal(Signal::HUP);
        stage.logs(expected).await;
    }
    assert_eq!(stage.only_envoy().await, first);
    stage.program(&binary);
    stage.change("good");
    // On a busy machine, the agent starts the good program for the event of an earlier file.
    assert_ne!(stage.wait_for_epoch_with_mark("good").await, 0);
    load.assert_flawless();
    stage.only_envoy().await;
    stage.ends_well().await;
}

#[tokio::test]
async fn a_full_restart_follows_a_successor_killed_before_it_served() {
    let Some(binary) = envoy_binary() else { return };
    let mut stage = Stage::serving(&binary).await;
    let first = stage.only_envoy().await;
    let load = Load::default().with(Fresh(stage.port));
    let dead = stage.control_plane.kill().await;
    // Without a control plane, the successor takes over the admin port and waits. No SIGHUP is sent: the
    // signal and the changed file would be two restarts, and the second one could begin after the failure.
    fs::create_dir_all(stage.pod.path("in")).unwrap();
    stage.pod.replace(OVERRIDE, r#"{"node": {"metadata": {"MARK": "a"}}}"#);
    eventually("a next Envoy that waits", async || {
        let info = ask(&stage.pod.envoy, "/server_info").await?;
        info.contains("PRE_INITIALIZING").then_some(())
    })
    .await;
    let next = eventually("the next Envoy", async || {
        let mut envoys = children_of(stage.pod.agent.pid()).into_iter();
        envoys.find(|pid| *pid != first)
    })
    .await;
    kill_process(next, Signal::KILL).unwrap();
    eventually("the failure in the log", async || {
        let log = stage.pod.agent.log();
        log.contains("[HOT_RESTART_FAILED]").then_some(())
    })
    .await;
    // The next Envoy has closed the admin port of the one that serves.
    let (report, _) = diagnosed(&stage.pod).await;
    let has = |code| checks(&report).iter().any(|(_, check)| check["code"] == code);
    assert!(has("HOT_RESTART_FAILED") && !has("ENVOY_HANGS"), "{report:#}");
    load.assert_flawless();
    stage.control_plane = dead.revive().await;
    stage.change("b");
    assert_eq!(stage.wait_for_epoch_with_mark("b").await, 0, "the first with another base id");
    stage.logs("full restart of Envoy").await;
    let last = stage.only_envoy().await;
    assert!(last != first && last != next);
    stage.serves().await;
    // The base id of this Envoy allows another hot restart.
    stage.change("c");
    assert_eq!(stage.wait_for_epoch_with_mark("c").await, 1);
    stage.only_envoy().await;
    stage.ends_well().await;
}

#[tokio::test]
async fn a_successor_killed_while_its_parent_exits_ends_the_agent() {
    let Some(binary) = envoy_binary() else { return };
    let mut stage = Stage::serving(&binary).await;
    let first = stage.only_envoy().await;
    stage.change("a");
    stage.logs("Envoy epoch 1 is live").await;
    let second = stage.wait_for_other_envoy(first).await;
    kill_process(second, Signal::KILL).unwrap();
    let status = stage.pod.agent.end().await;
    assert_eq!(status.code(), Some(137), "{status}");
    assert!(!is_alive(first));
}

#[tokio::test]
async fn a_successor_that_crashes_while_its_parent_exits_is_restarted() {
    let Some(binary) = envoy_binary() else { return };
    let stage = Stage::serving_with(&binary, "1/1h").await;
    let first = stage.only_envoy().await;
    stage.change("a");
    stage.logs("Envoy epoch 1 is live").await;
    let second = stage.wait_for_other_envoy(first).await;
    kill_process(second, Signal::SEGV).unwrap();
    stage.logs("starting Envoy again").await;
    stage.serves().await;
    let third = stage.only_envoy().await;
    assert!(third != first && third != second);
    assert_eq!(stage.wait_for_epoch_with_mark("a").await, 0);
    stage.ends_well().await;
}

#[tokio::test]
async fn a_successor_of_a_dead_envoy_serves_and_can_be_replaced() {
    let Some(binary) = envoy_binary() else { return };
    for signal in [Signal::KILL, Signal::TERM] {
        let stage = Stage::serving(&binary).await;
        let first = stage.only_envoy().await;
        stage.change("a");
        stage.logs("Envoy epoch 1 is live").await;
        let second = stage.wait_for_other_envoy(first).await;
        let load = Load::default().with(Fresh(stage.port));
        kill_process(first, signal).unwrap();
        stage.logs("the former Envoy has exited early").await;
        if signal == Signal::KILL {
            // Without an answer to this message the successor would abort 10 s later.
            stage.logs("has sent a message to its former parent").await;
        }
        stage.change("b");
        assert_eq!(stage.wait_for_epoch_with_mark("b").await, 2);
        load.assert_flawless();
        assert_ne!(stage.only_envoy().await, second);
        let log = stage.pod.agent.log();
        assert!(!log.contains("full restart"), "{log}");
        drop(load);
        stage.ends_well().await;
    }
}

#[tokio::test]
async fn a_stop_request_abandons_an_unready_successor_without_failure() {
    let Some(binary) = envoy_binary() else { return };
    let mut stage = Stage::serving(&binary).await;
    let _dead = stage.control_plane.kill().await;
    fs::create_dir_all(stage.pod.path("in")).unwrap();
    stage.pod.replace(OVERRIDE, r#"{"node": {"metadata": {"MARK": "a"}}}"#);
    stage.pod.agent.signal(Signal::HUP);
    eventually("a next Envoy that waits", async || {
        let info = ask(&stage.pod.envoy, "/server_info").await?;
        info.contains("PRE_INITIALIZING").then_some(())
    })
    .await;
    stage.pod.agent.signal(Signal::TERM);
    let status = stage.pod.agent.end().await;
    assert_eq!(status.code(), Some(0), "{status}");
    let log = stage.pod.agent.log();
    assert!(log.contains("hot restart abandoned: Envoy stops"), "{log}");
    assert!(!log.contains("[HOT_RESTART_FAILED]"), "{log}");
}

#[tokio::test]
async fn a_request_to_stop_ends_both_of_two_envoys() {
    let Some(binary) = envoy_binary() else { return };
    let stage = Stage::serving(&binary).await;
    stage.change("a");
    stage.logs("Envoy epoch 1 is live").await;
    assert_eq!(stage.envoys().len(), 2);
    stage.ends_well().await;
}
