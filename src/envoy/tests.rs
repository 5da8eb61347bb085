//! The ladder against a script that stands in for Envoy.

use std::net::Ipv4Addr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;

use super::*;
use crate::lifecycle::Stop;

struct Stage {
    directory: TempDir,
    config: Config,
    ready: pipe::Receiver,
}

/// A fake Envoy of the given mode. Every limit is so long that a test that meets it hangs.
fn stage(mode: &str) -> Stage {
    let directory = tempfile::tempdir().expect("a directory");
    let binary = directory.path().join(format!("fake-envoy.{mode}"));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/agent/fake-envoy");
    symlink(script, &binary).expect("a link");
    let pipe = directory.path().join("ready");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).expect("a pipe");
    // Opened for writing too, so that it does not end between writers.
    let mut options = pipe::OpenOptions::new();
    let ready = options
        .read_write(true)
        .open_receiver(&pipe)
        .expect("the pipe opens");
    let config = config(binary, directory.path().join("envoy-rev.json"));
    Stage {
        directory,
        config,
        ready,
    }
}

fn config(binary: PathBuf, bootstrap: PathBuf) -> Config {
    let long = Duration::from_secs(3600);
    Config {
        command: Command {
            binary,
            bootstrap,
            drain_time: Duration::from_secs(45),
            ip_version: command::IpVersion::V4,
            file_flush_interval: Duration::from_secs(1),
            log: command::LogLevels::default(),
            skip_deprecated_logs: true,
            file_flush_min_size_kb: 0,
            core_dump: false,
            override_json: None,
            concurrency: None,
            fips_ciphers: false,
        },
        admin_host: Ipv4Addr::LOCALHOST.into(),
        // Nobody listens there; the wait follows all the same.
        admin_port: 1,
        drain_inbound_only: true,
        drain_call: Duration::from_secs(2),
        limits: Limits {
            drain: long,
            terminate: long,
            kill: long,
        },
    }
}

impl Stage {
    async fn wait_until_ready(&mut self) {
        let mut byte = [0];
        self.ready.read_exact(&mut byte).await.expect("a byte");
    }

    fn recorded(&self, name: &str) -> String {
        std::fs::read_to_string(self.directory.path().join(name)).unwrap_or_default()
    }

    /// Asks to stop `times` times once Envoy is up.
    async fn run(&mut self, times: u8) -> Result<Exit, Error> {
        let stop = Stop::new();
        let envoy = run(self.config.clone(), stop.asked());
        let ask = async {
            self.wait_until_ready().await;
            for _ in 0..times {
                stop.escalate("a test");
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            exit = envoy => exit,
            () = ask => Err(Error::Unkillable(Duration::ZERO)),
        }
    }
}

#[tokio::test]
async fn terminates_envoy_when_the_drain_time_is_over() {
    let mut stage = stage("obeys");
    stage.config.limits.drain = Duration::from_millis(10);
    assert_eq!(stage.run(1).await.expect("an end"), Exit::Requested);
    assert_eq!(stage.recorded("signals"), "term\n");
    let arguments = stage.config.command.arguments().join(" ");
    assert_eq!(stage.recorded("arguments").trim(), arguments);
}

#[tokio::test]
async fn a_second_request_cuts_the_drain_short() {
    let mut stage = stage("obeys");
    assert_eq!(stage.run(2).await.expect("an end"), Exit::Requested);
    assert_eq!(stage.recorded("signals"), "term\n");
}

#[tokio::test]
async fn kills_an_envoy_that_ignores_its_termination() {
    let mut stage = stage("ignores-sigterm");
    stage.config.limits.terminate = Duration::from_millis(200);
    assert_eq!(stage.run(2).await.expect("an end"), Exit::Requested);
}

#[tokio::test]
async fn a_third_request_kills_without_waiting() {
    let mut stage = stage("ignores-sigterm");
    assert_eq!(stage.run(3).await.expect("an end"), Exit::Requested);
}

#[tokio::test]
async fn an_envoy_that_cannot_start_is_an_error_that_names_its_status() {
    let error = stage("exits-at-once").run(0).await.expect_err("no start");
    assert!(error.to_string().contains("exit status 7"), "{error}");
    let error = stage("crashes").run(0).await.expect_err("no start");
    assert!(error.to_string().contains("signal 11"), "{error}");
}

#[test]
fn a_later_crash_is_passed_on_with_its_code() {
    let later = EARLY * 2;
    let crash = Exit::ByItself(Ended::Signal(11));
    assert_eq!(report(crash, later).expect("no error"), crash);
    assert_eq!(Ended::Signal(11).code(), 139);
    assert_eq!(Ended::Code(3).code(), 3);
}

#[tokio::test]
async fn an_envoy_that_ends_by_itself_without_a_fault_is_no_error() {
    let exit = stage("exits-cleanly").run(0).await.expect("an end");
    assert_eq!(exit, Exit::ByItself(Ended::Code(0)));
}

#[tokio::test]
async fn a_missing_or_unusable_binary_is_named() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    std::fs::write(path("data"), "no program").expect("written");
    for (name, expected) in [("missing", "no Envoy binary"), ("data", "not executable")] {
        let stop = Stop::new();
        let config = config(path(name), path("envoy-rev.json"));
        let error = run(config, stop.asked())
            .await
            .expect_err("no start")
            .to_string();
        assert!(error.contains(expected) && error.contains(name), "{error}");
    }
}
