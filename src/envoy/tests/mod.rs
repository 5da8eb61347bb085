//! Tests the supervisor with a script in place of Envoy, and with a fake admin port.

mod ends;
mod fake_admin;

use std::net::Ipv4Addr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;

use super::*;
use crate::runtime::lifecycle::Urgency;
use fake_admin::{Behaviour, FakeAdmin};
use launch::Prepared;
use shutdown::{Drain, Step};

struct Stage {
    directory: TempDir,
    config: Config,
    ready: pipe::Receiver,
}

/// Prepares a fake Envoy of the given mode. The limits of the shutdown are so long that a test that
/// waits for one of them does not finish.
fn stage(mode: &str) -> Stage {
    let directory = tempfile::tempdir().expect("a directory");
    let binary = directory.path().join(format!("fake-envoy.{mode}"));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/integration/support/fake-envoy");
    symlink(script, &binary).expect("a link");
    let pipe = directory.path().join("ready");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).expect("a pipe");
    // The pipe is also opened for writing, so that the reader does not reach its end when a writer
    // closes it.
    let mut options = pipe::OpenOptions::new();
    let ready = options.read_write(true).open_receiver(&pipe).expect("the pipe opens");
    let config = config(binary, directory.path());
    Stage { directory, config, ready }
}

pub(super) fn config(binary: PathBuf, directory: &Path) -> Config {
    let long = Duration::from_secs(3600);
    Config {
        directory: directory.to_owned(),
        shared_directory: directory.to_owned(),
        command: Command {
            binary,
            bootstrap: directory.join("envoy-rev.json"),
            drain_time: Duration::from_secs(45),
            is_ipv6: false,
            file_flush_interval: Duration::from_secs(1),
            log: command::LogLevels::default(),
            skip_deprecated_logs: true,
            file_flush_min_size_kb: 0,
            core_dump: false,
            override_json: None,
            concurrency: None,
            user: None,
            fips_ciphers: false,
        },
        // Port 1 is closed: the drain call fails, and the drain time follows anyway.
        admin: Admin::new(Ipv4Addr::LOCALHOST.into(), 1, Duration::from_secs(2)),
        early: Duration::from_secs(1),
        drain_inbound_only: true,
        limits: Limits {
            drain_call: long,
            drain: Drain::For(long),
            delay: Duration::ZERO,
            long_requests: Duration::ZERO,
            quit: long,
            terminate: long,
            kill: long,
        },
        internal_ports: Vec::new(),
        hot_restart: None,
        restarts: None,
    }
}

fn started(config: Config, stop: &Stop, metrics: &Registry) -> (Envoy, Life) {
    let command = config.command.clone();
    let prepare = Arc::new(move |_| Ok(Prepared::new(command.clone(), &[], "", None)));
    let (envoy, life) = new(config, prepare, stop, metrics);
    (envoy, Box::pin(life))
}

impl Stage {
    /// Adds a fake admin port.
    async fn with_admin(mut self, behaviour: Behaviour) -> (Self, FakeAdmin) {
        let admin = FakeAdmin::start(behaviour).await;
        self.config.admin.address = admin::Address::Port((Ipv4Addr::LOCALHOST, admin.port).into());
        (self, admin)
    }

    async fn wait_until_ready(&mut self) {
        let mut byte = [0];
        self.ready.read_exact(&mut byte).await.expect("a byte");
    }

    fn recorded(&self, name: &str) -> String {
        std::fs::read_to_string(self.directory.path().join(name)).unwrap_or_default()
    }

    fn start(&self, stop: &Stop) -> (Envoy, Life) {
        started(self.config.clone(), stop, &Registry::default())
    }

    /// Runs Envoy until its exit. Once Envoy is running, makes the stop request one step more urgent,
    /// `times` times.
    async fn run(&mut self, times: u8) -> Result<Exit, BoxError> {
        let stop = Stop::new();
        let (_envoy, life) = self.start(&stop);
        let ask = async {
            self.wait_until_ready().await;
            for _ in 0..times {
                stop.escalate("a test");
            }
        };
        run_with(life, ask).await
    }
}

type Life = Pin<Box<dyn Future<Output = Result<Exit, BoxError>> + Send>>;

/// Runs Envoy until its exit, and `steps` at the same time. If Envoy exits before the end of `steps`,
/// the rest of `steps` does not run.
async fn run_with(life: Life, steps: impl Future<Output = ()>) -> Result<Exit, BoxError> {
    let steps = async {
        steps.await;
        std::future::pending().await
    };
    let both = async {
        tokio::select! {
            exit = life => exit,
            never = steps => never,
        }
    };
    let patience = tokio::time::timeout(Duration::from_secs(20), both);
    patience.await.expect("an end")
}

async fn wait_for(envoy: &Envoy, holds: impl FnMut(&Report) -> bool) -> Report {
    let mut report = envoy.report();
    report.wait_for(holds).await.expect("an Envoy").clone()
}

#[tokio::test]
async fn an_envoy_that_ignores_sigterm_is_killed() {
    let mut stage = stage("ignores-sigterm");
    stage.config.limits.terminate = Duration::from_millis(200);
    assert_eq!(stage.run(2).await.expect("an end"), Exit::Requested);
}

#[tokio::test]
async fn a_stopped_envoy_whose_admin_port_never_answers_is_killed() {
    let short = Duration::from_millis(50);
    let (mut stage, admin) = stage("stopped").with_admin(Behaviour::Silent).await;
    stage.config.admin.limit = short;
    stage.config.limits = Limits {
        drain_call: short,
        drain: Drain::For(short),
        delay: Duration::ZERO,
        long_requests: Duration::ZERO,
        quit: short,
        terminate: short,
        kill: Duration::from_secs(3600),
    };
    assert_eq!(stage.run(1).await.expect("an end"), Exit::Requested);
    let asked = admin.asked();
    assert!(asked.contains(&"/quitquitquit".to_owned()), "{asked:?}");
    assert_eq!(stage.recorded("signals"), "", "it was asleep");
}

#[tokio::test]
async fn drains_then_asks_envoy_to_quit_and_reports_each_step() {
    let (mut stage, admin) = stage("obeys").with_admin(Behaviour::Answering).await;
    stage.config.limits.drain = Drain::For(Duration::from_secs(1));
    let stop = Stop::new();
    let (envoy, life) = stage.start(&stop);
    let steps = async {
        stage.wait_until_ready().await;
        let report = wait_for(&envoy, |report| report.state == State::Running).await;
        assert!(report.pid.is_some() && report.ending.is_none());
        stop.escalate("a test");
        let report = wait_for(&envoy, |report| report.state == State::Draining).await;
        let ending = report.ending.expect("a plan");
        assert_eq!(ending.cause, "a test");
        assert_eq!(ending.plan.0.len(), 6);
        let report = wait_for(&envoy, |report| report.state == State::Stopping).await;
        let waits_for = report.ending.expect("a plan").waits_for;
        assert_eq!(waits_for, Step::Quit);
        admin.wait_for_request("/quitquitquit").await;
        let envoy = report.pid.and_then(rustix::process::Pid::from_raw);
        // Envoy exits by itself after this request; the script exits on a signal.
        let term = rustix::process::Signal::TERM;
        rustix::process::kill_process(envoy.expect("a pid"), term).expect("signalled");
    };
    let exit = run_with(life, steps).await.expect("an end");
    assert_eq!(exit, Exit::Requested);
    let drain = "/drain_listeners?inboundonly&graceful";
    let close = "/drain_listeners?inboundonly";
    assert_eq!(admin.asked(), ["/ready", drain, close, "/quitquitquit"]);
    assert_eq!(envoy.report().borrow().state, State::Exited);
}

#[tokio::test]
async fn an_envoy_drained_by_order_is_asked_to_quit_at_once() {
    let (mut stage, admin) = stage("obeys").with_admin(Behaviour::QuitRefused).await;
    let stop = Stop::new();
    let (envoy, life) = stage.start(&stop);
    let steps = async {
        stage.wait_until_ready().await;
        wait_for(&envoy, |report| report.state == State::Running).await;
        envoy.drain().await;
        envoy.drain().await;
        let report = envoy.report().borrow().clone();
        assert!(report.is_drained && report.state == State::Draining);
        stop.escalate("a test");
    };
    let exit = run_with(life, steps).await.expect("an end");
    assert_eq!(exit, Exit::Requested);
    let told = "/drain_listeners?inboundonly&graceful&skip_exit";
    assert_eq!(admin.asked(), ["/ready", told, told, "/quitquitquit"]);
    // After the exit of Envoy, a drain order returns at once, because no Envoy can be drained.
    envoy.drain().await;
}

#[tokio::test]
async fn a_first_request_that_is_urgent_skips_the_drain() {
    let (mut stage, admin) = stage("obeys").with_admin(Behaviour::QuitRefused).await;
    let stop = Stop::new();
    let (_envoy, life) = stage.start(&stop);
    let steps = async {
        stage.wait_until_ready().await;
        admin.wait_for_request("/ready").await;
        stop.request(Urgency::Terminate, "/quitquitquit called");
    };
    let exit = run_with(life, steps).await.expect("an end");
    assert_eq!(exit, Exit::Requested);
    assert_eq!(admin.asked().last().expect("a call"), "/quitquitquit");
    assert!(!admin.asked().iter().any(|path| path.contains("drain")));
}

#[tokio::test]
async fn a_request_longer_than_a_timed_drain_delays_the_end() {
    for active in [0, 3] {
        let (mut stage, admin) = stage("obeys").with_admin(Behaviour::QuitRefused).await;
        stage.config.drain_inbound_only = false;
        stage.config.limits.drain = Drain::For(Duration::from_millis(10));
        stage.config.limits.long_requests = Duration::from_secs(3600);
        let stop = Stop::new();
        let (envoy, life) = stage.start(&stop);
        admin.set_connections(active);
        let steps = async {
            stage.wait_until_ready().await;
            stop.escalate("a test");
            if active > 0 {
                wait_for(&envoy, |report| {
                    let ending = report.ending.as_ref();
                    ending.is_some_and(|ending| {
                        ending.waits_for == Step::LongRequests && ending.connections == Some(active)
                    })
                })
                .await;
                admin.set_connections(0);
            }
        };
        let exit = run_with(life, steps).await.expect("an end");
        assert_eq!(exit, Exit::Requested);
    }
}

#[tokio::test]
async fn envoy_is_not_started_after_a_request_to_stop() {
    let mut stage = stage("obeys");
    stage.config.command.binary = "missing".into();
    let stop = Stop::new();
    stop.escalate("a test");
    let (_envoy, life) = stage.start(&stop);
    assert_eq!(life.await.expect("an end"), Exit::Requested);
}
