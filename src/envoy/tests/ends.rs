//! Tests an Envoy that exits by itself: the error, the crash record and the state.

use super::*;

#[tokio::test]
async fn an_envoy_that_cannot_start_is_an_error_that_names_its_status() {
    let error = stage("exits-at-once").run(0).await.expect_err("no start");
    let refused = "[ENVOY_BOOTSTRAP_REFUSED]";
    let said = error.to_string();
    assert!(said.contains("exit status 7") && said.ends_with(refused), "{said}");
    let error = stage("crashes").run(0).await.expect_err("no start");
    let said = error.to_string();
    for words in ["Envoy exited with error: signal 11", ": last words", "[ENVOY_CRASHED]"] {
        assert!(said.contains(words), "{said}");
    }
}

#[tokio::test]
async fn status_and_record_of_a_crash_persist_until_a_clean_exit() {
    let mut crashing = stage("crashes");
    crashing.config.early = Duration::ZERO;
    let crash = Exit::ByItself(Ended::Signal(11));
    let (envoy, life) = crashing.start(&Stop::new());
    assert_eq!(life.await.expect("no error"), crash);
    let record = envoy.report().borrow().last_crash.clone().expect("a record");
    assert_eq!((record.signal, record.code), (Some(11), None));
    assert_eq!(record.stderr, ["last words"]);
    assert_eq!(record.out_of_memory, None);

    let mut next = stage("obeys");
    next.config.directory = crashing.config.directory.clone();
    let stop = Stop::new();
    let (envoy, life) = next.start(&stop);
    let steps = async {
        next.wait_until_ready().await;
        assert_eq!(envoy.report().borrow().last_crash, Some(record));
        stop.request(Urgency::Terminate, "a test");
    };
    let exit = run_with(life, steps).await.expect("an end");
    assert_eq!(exit, Exit::Requested);
    let kept = crash::Crash::read(&next.config.directory);
    assert_eq!(kept.expect("no error"), None);
}

#[tokio::test]
async fn an_envoy_without_shared_memory_starts_again_without_hot_restart() {
    let mut stage = stage("needs-memory");
    assert!(stage.run(0).await.is_err(), "it exits without hot restart");
    assert!(stage.recorded("arguments").contains("--disable-hot-restart"));
    stage.config.hot_restart = Some(hot_restart::Limits::default());
    let (envoy, life) = stage.start(&Stop::new());
    let end = Exit::ByItself(Ended::Code(3));
    assert_eq!(life.await.expect("an end"), end);
    let report = envoy.report().borrow().clone();
    let problem = report.hot_restart_problem.expect("a reason");
    assert!(problem.contains("SIGBUS"), "{problem}");
    assert_eq!((report.epoch, report.running.len()), (1, 0));
    assert!(stage.recorded("arguments").contains("--disable-hot-restart"));
}

#[test]
fn an_exit_by_signal_has_the_exit_code_of_a_shell() {
    assert_eq!(Ended::Signal(11).code(), 139);
    assert_eq!(Ended::Code(3).code(), 3);
}

#[tokio::test]
async fn an_envoy_that_exits_with_0_is_no_error_and_not_restarted() {
    let mut stage = stage("exits-cleanly");
    stage.config.restarts = Some(budget(1));
    let exit = stage.run(0).await.expect("an end");
    assert_eq!(exit, Exit::ByItself(Ended::Code(0)));
}

fn budget(restarts: usize) -> Budget {
    Budget { restarts, within: Duration::from_secs(3600) }
}

#[tokio::test]
async fn the_state_is_a_metric() {
    let mut stage = stage("exits-cleanly");
    stage.config.early = Duration::ZERO;
    let metrics = Registry::default();
    let (_envoy, life) = started(stage.config.clone(), &Stop::new(), &metrics);
    let line = |state, value| format!("istio_agent_envoy_state{{state=\"{state}\"}} {value}\n");
    assert!(metrics.render().contains(&line("initial", 1)));
    life.await.expect("an end");
    let page = metrics.render();
    assert!(page.contains(&line("initial", 0)) && page.contains(&line("exited", 1)), "{page}");
}
