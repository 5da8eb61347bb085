//! Readiness against a scripted admin port.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::*;
use crate::envoy::admin::Admin;
use crate::lifecycle::Stop;
use crate::metrics::Registry;

const CONFIGURED: &str =
    "cluster_manager.cds.update_success: 1\nlistener_manager.lds.update_success: 1\n";
const LIVE: &str = "server.state: 0\nlistener_manager.workers_started: 1\n";

/// An Envoy whose admin port says what the test wants.
struct Scene {
    stop: Stop,
    metrics: Registry,
    timeline: Timeline,
    report: watch::Sender<Report>,
    /// What the admin port says; nothing is a hung one.
    says: watch::Sender<Option<(u16, String)>>,
    asked: watch::Receiver<usize>,
    ready: Arc<Readiness>,
    _admin: JoinSet<()>,
    _orders: mpsc::Receiver<crate::envoy::handle::Order>,
}

impl Scene {
    async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let admin = Admin::new(address.ip(), address.port(), Duration::from_secs(2));
        let (says, heard) = watch::channel(Some((200, format!("{CONFIGURED}{LIVE}"))));
        let (count, asked) = watch::channel(0);
        let mut tasks = JoinSet::new();
        tasks.spawn(answer(listener, heard, count));
        let (report, reports) = watch::channel(started(0, 1));
        let (sender, orders) = mpsc::channel(1);
        let (stop, metrics) = (Stop::new(), Registry::default());
        let timeline = Timeline::start();
        let sources = Sources {
            timeline: timeline.clone(),
            stop: stop.clone(),
            envoy: Some(Envoy::new(admin, reports, sender)),
            dns_ready: None,
            metrics: metrics.clone(),
            scrape: crate::status::tests::own_metrics(metrics.clone()),
            debug: Vec::new(),
            glance: Arc::new(crate::status::tests::OfReadiness),
        };
        Self {
            ready: Arc::new(Readiness::new(None, &sources)),
            stop,
            metrics,
            timeline,
            report,
            says,
            asked,
            _admin: tasks,
            _orders: orders,
        }
    }

    fn says(&self, body: &str) {
        self.says.send_replace(Some((200, body.to_owned())));
    }

    async fn missing(&self) -> String {
        let missing = self.ready.check().await;
        missing.expect_err("not ready").to_string()
    }

    fn times_asked(&self) -> usize {
        *self.asked.borrow()
    }
}

fn started(epoch: u32, pid: i32) -> Report {
    Report {
        state: State::Starting,
        pid: Some(pid),
        epoch,
        started: None,
        ..Report::default()
    }
}

async fn answer(
    listener: TcpListener,
    says: watch::Receiver<Option<(u16, String)>>,
    count: watch::Sender<usize>,
) {
    let mut hung = Vec::new();
    loop {
        let (mut stream, _) = listener.accept().await.expect("a connection");
        count.send_modify(|count| *count += 1);
        let said = says.borrow().clone();
        let Some((status, body)) = said else {
            hung.push(stream);
            continue;
        };
        let mut request = [0; 4096];
        let _ = stream.read(&mut request).await;
        let length = body.len();
        let answer = format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n{body}");
        let _ = stream.write_all(answer.as_bytes()).await;
    }
}

#[tokio::test]
async fn an_envoy_that_has_proven_itself_is_not_asked_again() {
    let scene = Scene::new().await;
    assert_eq!(scene.ready.check().await, Ok(()));
    assert_eq!(scene.times_asked(), 2);
    scene.says("");
    assert_eq!(scene.ready.check().await, Ok(()));
    assert_eq!(scene.times_asked(), 2);
}

#[tokio::test]
async fn another_process_must_prove_itself_again() {
    let scene = Scene::new().await;
    assert_eq!(scene.ready.check().await, Ok(()));
    scene.report.send_replace(Report::default());
    assert_eq!(scene.missing().await, "Envoy has not been started yet");
    scene
        .report
        .send_modify(|report| report.state = State::Exited);
    assert_eq!(scene.missing().await, "Envoy has ended");
    for (epoch, pid) in [(1, 1), (1, 2)] {
        scene.report.send_replace(started(epoch, pid));
        scene.says("");
        assert!(scene.missing().await.starts_with("config not received"));
        scene.says(CONFIGURED);
        assert!(scene.missing().await.starts_with("server.state is not yet"));
        // What it has once taken it may lose sight of.
        scene.says(LIVE);
        assert_eq!(scene.ready.check().await, Ok(()));
    }
}

#[tokio::test]
async fn an_agent_on_its_way_out_is_not_ready() {
    let scene = Scene::new().await;
    assert_eq!(scene.ready.check().await, Ok(()));
    scene
        .stop
        .request(Urgency::Drain, "received signal: terminated");
    let expected = "server is terminated: received signal: terminated";
    assert_eq!(scene.missing().await, expected);
}

#[tokio::test]
async fn an_answer_that_is_none_is_told() {
    let scene = Scene::new().await;
    scene.says.send_replace(Some((500, String::new())));
    assert!(scene.missing().await.ends_with("unexpected status 500"));
}

#[tokio::test]
async fn a_hung_admin_port_is_asked_once_for_a_whole_crowd() {
    let scene = Scene::new().await;
    scene.says.send_replace(None);
    let before = Instant::now();
    let mut crowd = JoinSet::new();
    for _ in 0..50 {
        let ready = scene.ready.clone();
        crowd.spawn(async move { ready.check().await });
    }
    for answer in crowd.join_all().await {
        let missing = answer.expect_err("not ready").to_string();
        assert!(
            missing.contains("no answer from Envoy's admin port"),
            "{missing}"
        );
    }
    assert_eq!(scene.times_asked(), 1);
    assert!(before.elapsed() < Duration::from_secs(2));
}

#[tokio::test]
async fn the_watch_marks_the_moment_when_nobody_asks_and_rests_then() {
    let scene = Scene::new().await;
    scene.says("");
    let ready = scene.ready.clone();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { match ready.watch().await {} });
    let mut asked = scene.asked.clone();
    asked.wait_for(|count| *count > 1).await.expect("asked");
    assert_eq!(scene.metrics.render(), "");
    scene.says(&format!("{CONFIGURED}{LIVE}"));
    let marked = async {
        while scene.metrics.render().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    let marked = tokio::time::timeout(Duration::from_secs(30), marked).await;
    marked.expect("marked");
    let page = scene.metrics.render();
    assert!(
        page.contains("\nistio_agent_startup_duration_seconds "),
        "{page}"
    );
    let all_marked = async {
        while scene.timeline.reached().len() < 3 {
            tokio::task::yield_now().await;
        }
    };
    let all_marked = tokio::time::timeout(Duration::from_secs(30), all_marked).await;
    all_marked.expect("marked as ready, too");
    let reached = scene.timeline.reached();
    let names: Vec<_> = reached.iter().map(|reached| reached.milestone).collect();
    assert_eq!(names, ["configuration received", "Envoy live", "ready"]);
    // What another Envoy is like nobody wants to know.
    let before = scene.times_asked();
    scene.report.send_replace(started(1, 2));
    tokio::time::pause();
    tokio::time::sleep(2 * START).await;
    assert_eq!(scene.times_asked(), before);
}

#[tokio::test(start_paused = true)]
async fn an_envoy_that_takes_long_is_asked_seldom_whatever_changes_but_itself() {
    let scene = Scene::new().await;
    scene.says("");
    let ready = scene.ready.clone();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { match ready.watch().await {} });
    let mut asked = Vec::new();
    for round in 0..6 {
        if round == 4 {
            scene.report.send_replace(started(0, 2));
        }
        let before = scene.times_asked();
        for _ in 0..START.as_secs() / 5 {
            scene.report.send_modify(|_| ());
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        asked.push(scene.times_asked() - before);
    }
    let often: Vec<_> = asked.iter().map(|count| *count > 100).collect();
    assert_eq!(often, [true, false, false, false, true, false], "{asked:?}");
}
