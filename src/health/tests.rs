//! Tests how results change the verdict, and checks of real applications and programs.

use std::net::{IpAddr, Ipv4Addr};

use tokio::net::TcpListener;

use super::*;
use crate::runtime::lifecycle::Stop;

const SOURCE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn config(check: Check) -> Config {
    Config {
        initial_delay: Duration::ZERO,
        period: Duration::from_millis(10),
        successes: 2,
        failures: 3,
        check,
        probes: probe::Config { source: SOURCE, offers_http2: false, keeps_connections: false },
    }
}

fn tcp(port: u16) -> Check {
    let probe =
        Probe { host: SOURCE.to_string(), port, kind: Kind::Tcp, timeout: Duration::from_secs(5) };
    Check::Probe(probe, HeaderMap::new())
}

fn exec(script: &str, limit: Duration) -> Check {
    Check::Exec(["sh", "-c", script].map(str::to_owned).into(), limit)
}

fn checks(check: Check) -> (Checks, watch::Receiver<Verdict>) {
    let (verdict, receiver) = watch::channel(None);
    let registry = Registry::default();
    let config = config(check);
    let checks = Checks {
        client: Client::new(config.probes).expect("a client"),
        results: registry.counters("results", "", &["result"]),
        healthy: registry.gauge("healthy", ""),
        verdict,
        streak: (false, 0),
        config,
    };
    (checks, receiver)
}

#[test]
fn the_health_changes_after_as_many_equal_results_as_the_threshold() {
    let (mut checks, verdict) = checks(tcp(1));
    for (results, expected) in [
        ("+", None),
        ("-+", None),
        ("+", Some(true)),
        ("--+--", Some(true)),
        ("-", Some(false)),
        ("----", Some(false)),
        ("+-+", Some(false)),
        ("+", Some(true)),
    ] {
        for result in results.chars() {
            checks.count(match result {
                '+' => Ok(()),
                _ => Err(Unhealthy::NoEnvoy),
            });
        }
        let found = verdict.borrow().as_ref().map(Result::is_ok);
        assert_eq!(found, expected, "after {results}");
    }
}

#[tokio::test]
async fn health_follows_the_application_and_a_stopping_agent_is_unhealthy() {
    let listener = TcpListener::bind((SOURCE, 0)).await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let (stop, (_sender, envoy)) = (Stop::new(), watch::channel(Report::default()));
    let config = config(tcp(address.port()));
    let (health, checks) = new(config, None, stop.requested(), &Registry::default()).expect("TLS");
    drop(envoy);
    let mut verdict = health.verdict();
    let scene = async {
        verdict.wait_for(|v| *v == Some(Ok(()))).await.expect("healthy");
        drop(listener);
        verdict.wait_for(|v| matches!(v, Some(Err(_)))).await.expect("unhealthy");
        let _listener = TcpListener::bind(address).await.expect("the port again");
        verdict.wait_for(|v| *v == Some(Ok(()))).await.expect("healthy again");
        stop.escalate("test");
        let stopping = Some(Err("the agent is stopping".to_owned()));
        verdict.wait_for(|v| *v == stopping).await.expect("unhealthy at the end");
    };
    tokio::select! {
        () = scene => {}
        () = checks => panic!("the checks ended"),
    }
    let json = json!(health);
    assert_eq!(
        json,
        json!({"check": "tcpSocket", "healthy": false, "problem": "the agent is stopping"})
    );
}

#[tokio::test(start_paused = true)]
async fn checks_begin_when_envoy_serves_and_fail_while_it_does_not() {
    let (sender, envoy) = watch::channel(Report::default());
    let (stop, registry) = (Stop::new(), Registry::default());
    let mut config = config(exec("true", Duration::from_secs(60)));
    (config.successes, config.failures) = (1, 1);
    let (health, checks) = new(config, Some(envoy), stop.requested(), &registry).expect("TLS");
    let mut verdict = health.verdict();
    let state = |state| sender.send_modify(|report| report.state = state);
    let scene = async {
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(*verdict.borrow_and_update(), None);
        state(State::Running);
        // A paused clock would not wait for the program of the check.
        tokio::time::resume();
        verdict.wait_for(|v| *v == Some(Ok(()))).await.expect("healthy");
        state(State::Starting);
        let expected = Some(Err("Envoy does not serve".to_owned()));
        verdict.wait_for(|v| *v == expected).await.expect("unhealthy");
        state(State::Running);
        verdict.wait_for(|v| *v == Some(Ok(()))).await.expect("healthy again");
        sender.send_modify(|report| report.is_drained = true);
        let expected = Some(Err("Envoy is draining".to_owned()));
        verdict.wait_for(|v| *v == expected).await.expect("unhealthy in a drain");
    };
    tokio::select! {
        () = scene => {}
        () = checks => panic!("the checks ended"),
    }
}

#[tokio::test]
async fn a_program_is_judged_by_its_exit_code_within_its_time() {
    for (command, expected) in [
        (vec!["true"], Ok(())),
        (vec!["false"], Err("\"false\" ended with exit status: 1")),
        (vec!["/"], Err("\"/\" does not run: Permission denied (os error 13)")),
        (
            vec!["/nothing"],
            Err("\"/nothing\" does not run: No such file or directory (os error 2)"),
        ),
        (vec!["sh", "-c", "yes & yes >&2 & kill $!"], Ok(())),
        (vec!["sh", "-c", "kill -9 $$"], Err("\"sh\" ended with signal: 9 (SIGKILL)")),
        (vec![], Err("no command")),
    ] {
        let words: Vec<_> = command.iter().map(|&word| word.to_owned()).collect();
        let found = run(&words, Duration::from_secs(60)).await.map_err(|error| error.to_string());
        assert_eq!(found, expected.map_err(str::to_owned), "{command:?}");
    }
}

#[tokio::test]
async fn children_of_a_probe_program_are_killed_when_it_ends_or_hangs() {
    for (end, expected) in
        [("true", Ok(())), ("wait", Err("command timeout exceeded: \"sh\" ran for 500ms"))]
    {
        let directory = tempfile::tempdir().expect("a directory");
        let mark = directory.path().join("pid");
        let script = format!("sleep 1000 & echo $! > {}; {end}", mark.display());
        let command = ["sh", "-c", &script].map(str::to_owned);
        let found = run(&command, Duration::from_millis(500)).await;
        assert_eq!(found.map_err(|error| error.to_string()), expected.map_err(str::to_owned));
        let pid = std::fs::read_to_string(mark).expect("it ran");
        let state = format!("/proc/{}/stat", pid.trim());
        // The process has exited if it does not exist, or is a zombie that its new parent has not
        // reaped yet.
        let is_alive = || {
            let stat = std::fs::read_to_string(&state).unwrap_or_default();
            stat.contains(") S ") || stat.contains(") R ")
        };
        while is_alive() {
            tokio::task::yield_now().await;
        }
    }
}
