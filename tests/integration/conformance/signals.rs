//! Tests that the agent ends after signals, stop requests and exits of Envoy, in any order and at any time.
//!
//! Each story consists of random steps between the start and the end of an agent. Its Envoy has one of [`MODES`].
//! `STORY` repeats the story whose number is in the message of a failure. `STORIES` is the number of stories.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fastrand::Rng;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::Instant;

use crate::support::http::{Server, ask, try_ask};
use crate::support::place::Place;
use crate::support::process::Process;
use crate::support::{free_port, local_istiod, soon, until};

const STORIES: u64 = 24;
/// The number of agents that run at the same time.
const CONCURRENT_AGENTS: usize = 4;
/// The time within which an agent has to end after the first signal of [`end`], on a busy machine.
const END_LIMIT: Duration = Duration::from_secs(4);
const MODES: [&str; 5] = ["obeys", "ignores-sigterm", "stopped", "crashes-once", "exits-cleanly"];

#[derive(Clone, Copy, Debug)]
enum Step {
    Signal(Signal),
    Quit,
    Drain,
    /// A signal to Envoy that the agent does not expect.
    Envoy(Signal),
    Pause(Duration),
}

#[tokio::test]
async fn the_agent_ends_and_leaves_no_process_after_any_order_of_events() {
    let number = |name: &str| Some(std::env::var(name).ok()?.parse::<u64>().unwrap());
    let told = number("STORY").map(|story| vec![story]);
    let many = number("STORIES").unwrap_or(STORIES);
    let mut stories = told.unwrap_or_else(|| (0..many).map(|_| fastrand::u64(..)).collect());
    let (local, mut running) = (LocalSet::new(), JoinSet::new());
    loop {
        while running.len() < CONCURRENT_AGENTS
            && let Some(story) = stories.pop()
        {
            running.spawn_local_on(run_story(story), &local);
        }
        match local.run_until(running.join_next()).await {
            Some(ended) => ended.unwrap(),
            None => break,
        }
    }
}

#[tokio::test]
async fn an_agent_stopped_before_envoy_starts_builds_nothing_more() {
    let istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod);
    // The agent asks the process behind this socket, which is silent, before it serves.
    let socket = place.path("var/run/secrets/credential-uds/socket");
    std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
    let silent = tokio::net::UnixListener::bind(socket).unwrap();
    let mut agent = place.start_only();
    let _asked = soon(silent.accept()).await.unwrap();
    agent.terminate();
    assert_eq!(agent.end().await.code(), Some(0));
    let log = agent.log();
    assert!(!log.contains("Initializing with upstream address"), "{log}");
}

#[tokio::test]
async fn signals_that_pilot_agent_ignores_are_ignored_but_not_by_envoy() {
    let istiod = local_istiod().await;
    // The process that starts an agent may have ignored these signals, and the agent inherits this.
    let place = Place::with_envoy(&istiod).started_by(&["env", "--ignore-signal=USR1,ALRM"]);
    let agent = place.start().await;
    let numbers = [10, 12, 14].into_iter().chain(24..=30).chain(35..=64);
    for number in numbers.clone() {
        // The shell's `kill` also sends the signals that have no name.
        let kill = format!("kill -{number} {}", agent.pid().as_raw_nonzero());
        let sent = Command::new("sh").args(["-c", &kill]).status().unwrap();
        assert!(sent.success(), "{kill}");
        let answer = ask(place.status_port(), "GET /metrics").await;
        assert_eq!(answer.status, 200, "after signal {number}");
    }
    let envoy = || {
        let mut running = running_in(&place.path("")).into_iter();
        running.find(|(_, name)| name.starts_with("fake-envoy"))
    };
    until("the start of Envoy", || envoy().is_some()).await;
    let (envoy, _) = envoy().unwrap();
    let status = format!("/proc/{}/status", envoy.as_raw_nonzero());
    let status = std::fs::read_to_string(status).unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = u64::from_str_radix(ignored.unwrap().trim(), 16).unwrap();
    for number in numbers {
        assert_eq!((ignored >> (number - 1)) & 1, 0, "{number}: {ignored:x}");
    }
    agent.terminate();
    let (code, log) = agent.ends().await;
    assert_eq!(code, 0, "{log}");
}

#[tokio::test]
async fn an_envoy_without_admin_port_is_terminated_after_its_drain_time() {
    let place = Place::with_envoy(&local_istiod().await)
        .proxy("proxyAdminPort", json!(free_port()))
        .proxy("terminationDrainDuration", json!("100ms"));
    let agent = place.start().await;
    agent.logs("Envoy command").await;
    agent.terminate();
    let (code, log) = agent.ends().await;
    assert_eq!(code, 0, "{log}");
    let mut rest = log.as_str();
    for line in [
        "Agent draining Proxy for termination",
        "Graceful termination period is 100ms",
        "closing Envoy's listeners",
        "cannot count Envoy's active requests",
        "Asking Envoy to quit",
        "Terminating Envoy",
        "Envoy exited normally",
    ] {
        let found = rest.split_once(line);
        rest = found.unwrap_or_else(|| panic!("no {line:?} in {rest}")).1;
        assert!(!rest.contains(line), "{line:?} twice in {log}");
    }
}

async fn run_story(story: u64) {
    let mut random = Rng::with_seed(story);
    let mode = random.choice(MODES).unwrap();
    let steps: Vec<_> = (0..random.usize(0..8)).map(|_| step(&mut random)).collect();
    let what = format!("STORY={story}, an Envoy that {mode}, {steps:?}");
    // The admin port is closed (0), responds (1) or hangs (2).
    let manner = random.u8(0..3);
    let admin = match manner {
        0 => None,
        manner => {
            let answers = manner == 1;
            let say = move |_: &str| answers.then(|| (200, String::new(), "OK".to_owned()));
            Some(Server::start(free_port(), say).await)
        }
    };
    let port = admin.as_ref().map_or_else(free_port, |admin| admin.port);
    let restarts = random.choice(["", "2/1h"]).unwrap();
    let place = Place::with_envoy(&local_istiod().await)
        .proxy("proxyAdminPort", json!(port))
        .proxy("terminationDrainDuration", json!("200ms"))
        .set("FAKE_ENVOY_MODE", mode)
        .set("ISTIO_AGENT_ENVOY_RESTARTS", restarts);
    let agent = place.start_only();
    for step in steps {
        perform_step(step, &place, &agent).await;
    }
    end(&place, agent, &what).await;
}

fn step(random: &mut Rng) -> Step {
    match random.u8(0..8) {
        0 => Step::Signal(Signal::TERM),
        1 => Step::Signal(Signal::INT),
        2 => Step::Quit,
        3 => Step::Drain,
        4 => Step::Envoy(random.choice([Signal::KILL, Signal::SEGV, Signal::TERM]).unwrap()),
        5 => Step::Envoy(random.choice([Signal::STOP, Signal::CONT]).unwrap()),
        _ => Step::Pause(Duration::from_millis(random.u64(0..300))),
    }
}

async fn perform_step(step: Step, place: &Place, agent: &Process) {
    let limit = Duration::from_secs(1);
    let ask = async |line| {
        // The agent may not listen, or may not respond in time.
        let _ = tokio::time::timeout(limit, try_ask(place.status_port(), line, "")).await;
    };
    match step {
        Step::Signal(signal) => agent.signal(signal),
        Step::Quit => ask("POST /quitquitquit").await,
        Step::Drain => ask("POST /drain").await,
        Step::Envoy(signal) => {
            for (pid, name) in running_in(&place.path("")) {
                if name.starts_with("fake-envoy") {
                    let _ = kill_process(pid, signal); // The process may just have ended.
                }
            }
        }
        Step::Pause(pause) => tokio::time::sleep(pause).await,
    }
}

/// Sends SIGTERM until the agent has to end, and checks its exit code, its log and the processes that are left. It
/// sends more signals than necessary because signals that arrive together are merged into one.
async fn end(place: &Place, agent: Process, what: &str) {
    let begin = Instant::now();
    for _ in 0..6 {
        agent.signal(Signal::TERM);
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    let (code, log) = agent.ends().await;
    let took = begin.elapsed();
    assert!(took < END_LIMIT, "{what} took {took:?}: {log}");
    // A signal that arrives before the agent handles signals ends it in the way that it ends every process.
    let by_signal = code == -1 && !log.contains("Envoy command");
    let crashed = [128 + 9, 128 + 11, 128 + 15, 255].contains(&code);
    assert!(code == 0 || crashed || by_signal, "{what} ended with {code}: {log}");
    assert!(!log.contains("panicked"), "{what}: {log}");
    let envoys = || {
        let running = running_in(&place.path(""));
        running.into_iter().any(|(_, name)| name.starts_with("fake-envoy"))
    };
    assert!(!envoys(), "{what}: an Envoy is left: {log}");
    // The fake Envoy's child `sleep 1` may run for another second.
    until("a place without processes", || running_in(&place.path("")).is_empty()).await;
}

/// Returns the processes whose working directory is `directory`, with their names.
fn running_in(directory: &Path) -> Vec<(Pid, String)> {
    let directory = directory.canonicalize().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let of_place = processes.filter_map(|process| {
        let pid = Pid::from_raw(process.file_name().to_str()?.parse().ok()?)?;
        let is_there = std::fs::read_link(process.path().join("cwd")).ok()? == directory;
        let name = std::fs::read_to_string(process.path().join("comm")).ok()?;
        is_there.then_some((pid, name))
    });
    of_place.collect()
}
