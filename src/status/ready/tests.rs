//! Tests readiness with a scripted admin port in place of Envoy's.

use std::future::pending;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::*;
use crate::dns::{self, Dns};
use crate::envoy::admin::Admin;
use crate::metrics::Registry;
use crate::problem::{Code, Problem};
use crate::runtime::lifecycle::{CancellationToken, Stop, StopAccepting};
use crate::status::startup::Milestones;
use tokio::sync::watch;

const CONFIGURED: &str =
    "cluster_manager.cds.update_success: 1\nlistener_manager.lds.update_success: 1\n";
const QUERY_LIMIT: Duration = Duration::from_secs(3);
const LIVE: &str = "server.state: 0\nlistener_manager.workers_started: 1\n";

/// A pod whose Envoy has a scripted admin port.
struct Pod {
    stop: Stop,
    metrics: Registry,
    milestones: Milestones,
    rejections: crate::sds::Rejections,
    report: watch::Sender<Report>,
    /// The status and body with which the admin port responds. If it is None, the port accepts connections and does not
    /// respond.
    says: watch::Sender<Option<(u16, String)>>,
    asked: watch::Receiver<usize>,
    ready: Arc<Readiness>,
    _admin: JoinSet<()>,
    _orders: mpsc::Receiver<crate::envoy::handle::Order>,
}

impl Pod {
    async fn new() -> Self {
        Self::with(None, None).await
    }

    async fn with(istiod: Option<crate::istiod::Istiod>, dns: Option<Dns>) -> Self {
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
        let scrape = crate::status::tests::own_metrics(metrics.clone());
        let sources = crate::status::tests::sources(stop.clone(), scrape, metrics.clone());
        let sources = Sources {
            envoy: Some(Envoy::new(admin, reports, sender)),
            istiod: istiod.unwrap_or(sources.istiod),
            dns,
            ..sources
        };
        Self {
            milestones: sources.milestones.clone(),
            rejections: sources.rejections.clone(),
            ready: Arc::new(Readiness::new(None, QUERY_LIMIT, Arc::new(sources))),
            stop,
            metrics,
            report,
            says,
            asked,
            _admin: tasks,
            _orders: orders,
        }
    }

    fn set_response(&self, body: &str) {
        self.says.send_replace(Some((200, body.to_owned())));
    }

    async fn unreadiness(&self) -> String {
        let missing = self.ready.check().await;
        missing.expect_err("not ready").to_string()
    }

    fn query_count(&self) -> usize {
        *self.asked.borrow()
    }
}

/// Returns the handle of a DNS server that has no name table.
fn dns() -> Dns {
    let config = dns::Config {
        addresses: Vec::new(),
        search_domains: dns::SearchDomains::new("shop", "shop.svc.cluster.local", &[]),
        policy: dns::Policy { ttl: 30, forward_before_first_table: false },
    };
    let registry = Registry::default();
    let forwarder = dns::forward::Forwarder::new(Default::default(), &registry);
    let (stop_accepting, stop) = (StopAccepting::default(), CancellationToken::new());
    dns::new(config, pending(), forwarder, &registry, stop_accepting, stop).0
}

fn started(epoch: u32, pid: i32) -> Report {
    Report { state: State::Starting, pid: Some(pid), epoch, started: None, ..Report::default() }
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
async fn istiods_error_is_the_reason_for_unreadiness_until_istiod_answers() {
    let pod = Pod::new().await;
    pod.set_response("");
    let missing = pod.unreadiness().await;
    let fake = crate::istiod::fake::Fake::start(None).await;
    let (istiod, _tasks) = crate::istiod::fake::run(crate::istiod::fake::plaintext(fake.address));
    let pod = Pod::with(Some(istiod.clone()), None).await;
    pod.set_response("");
    let connection = istiod.connection().await.expect("a connection");
    let problem = Problem::new(Code::IstiodError, "istiod", "authentication failure");
    istiod.record_failure(&connection, false, &problem);
    let explained = async || pod.ready.check_and_explain().await.expect("not ready");
    let doctor = "; see `pilot-agent doctor`";
    let cause = &problem.to_string();
    assert_eq!(explained().await, format!("{missing}; {cause}{doctor}"));
    // istiod's error is not reported if Envoy has exited or the agent stops, because it is not the cause then.
    pod.report.send_modify(|report| report.state = State::Exited);
    assert!(!explained().await.contains(cause));
    pod.report.send_replace(started(0, 1));
    istiod.record_success(&connection);
    assert_eq!(explained().await, format!("{missing}{doctor}"));
    istiod.record_failure(&connection, false, &problem);
    pod.stop.request(Urgency::Drain, "a test");
    pod.set_response(CONFIGURED);
    assert_eq!(explained().await, "server is terminated: a test");
}

#[tokio::test]
async fn a_missing_connection_explains_a_missing_name_table() {
    let fake = crate::istiod::fake::Fake::start(None).await;
    let (istiod, _tasks) = crate::istiod::fake::run(crate::istiod::fake::plaintext(fake.address));
    let pod = Pod::with(Some(istiod.clone()), Some(dns())).await;
    let connection = istiod.connection().await.expect("a connection");
    let code = Code::IstiodPermissionDenied;
    let problem = Problem::new(code, "certificate request", "the authority refuses");
    istiod.record_failure(&connection, false, &problem);
    let explained = async || pod.ready.check_and_explain().await.expect("not ready");
    let missing = "istio DNS capture is turned ON and DNS lookup table is not ready yet";
    let doctor = "; see `pilot-agent doctor`";
    assert_eq!(explained().await, format!("{missing}{doctor}"));
    // After a timeout, the connection is not used any more.
    istiod.record_failure(&connection, true, &problem);
    assert_eq!(explained().await, format!("{missing}; {problem}{doctor}"));
}

#[tokio::test]
async fn a_new_envoy_process_is_checked_again() {
    let pod = Pod::new().await;
    assert_eq!(pod.ready.check().await, Ok(()));
    pod.report.send_replace(Report::default());
    assert!(pod.unreadiness().await.contains("[ENVOY_NOT_STARTED]"));
    pod.report.send_modify(|report| report.state = State::Exited);
    assert!(pod.unreadiness().await.contains("[ENVOY_EXITED]"));
    for (epoch, pid) in [(1, 1), (1, 2)] {
        pod.report.send_replace(started(epoch, pid));
        pod.set_response("");
        assert!(pod.unreadiness().await.starts_with("config not received"));
        pod.set_response(CONFIGURED);
        assert!(pod.unreadiness().await.starts_with("server.state is not yet"));
        // The response without the update counters suffices: Envoy has been configured once.
        pod.set_response(LIVE);
        assert_eq!(pod.ready.check().await, Ok(()));
    }
}

#[tokio::test]
async fn a_pod_is_not_ready_without_a_secret_that_envoy_refused() {
    let pod = Pod::new().await;
    let problem = Problem::new(Code::SecretRefused, "secret default", "Envoy refuses it: no");
    pod.rejections.lock().insert(7, problem.clone());
    let kept = Problem::new(Code::SecretUpdateRefused, "secret ROOTCA", "Envoy refuses it");
    pod.rejections.lock().insert(3, kept.clone());
    assert_eq!(pod.unreadiness().await, problem.to_string());
    pod.rejections.lock().remove(&7);
    assert_eq!(pod.ready.check().await, Ok(()));
}

#[tokio::test]
async fn an_error_of_the_admin_port_is_the_reason() {
    let pod = Pod::new().await;
    pod.says.send_replace(Some((500, String::new())));
    assert!(pod.unreadiness().await.ends_with("unexpected status 500"));
}

#[tokio::test]
async fn concurrent_probes_share_one_request_to_a_hung_admin_port() {
    let pod = Pod::new().await;
    pod.says.send_replace(None);
    let before = Instant::now();
    let mut crowd = JoinSet::new();
    for _ in 0..50 {
        let ready = pod.ready.clone();
        crowd.spawn(async move { ready.check_and_explain().await });
    }
    for answer in crowd.join_all().await {
        let missing = answer.expect("not ready");
        assert!(missing.contains("no answer from Envoy's admin port"), "{missing}");
    }
    assert_eq!(pod.query_count(), 1);
    // The kubelet's limit.
    assert!(before.elapsed() < Duration::from_secs(3));
}

#[tokio::test]
async fn the_watch_marks_readiness_without_a_probe_and_then_stops() {
    let pod = Pod::new().await;
    pod.set_response("");
    let ready = pod.ready.clone();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { ready.poll_until_ready().await });
    let mut asked = pod.asked.clone();
    asked.wait_for(|count| *count > 1).await.expect("asked");
    assert_eq!(pod.metrics.render(), "");
    pod.set_response(&format!("{CONFIGURED}{LIVE}"));
    let marked = async {
        while pod.metrics.render().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    let marked = tokio::time::timeout(Duration::from_secs(30), marked).await;
    marked.expect("marked");
    let page = pod.metrics.render();
    assert!(page.contains("\nistio_agent_startup_duration_seconds "), "{page}");
    let all_marked = async {
        while pod.milestones.reached().len() < 3 {
            tokio::task::yield_now().await;
        }
    };
    let all_marked = tokio::time::timeout(Duration::from_secs(30), all_marked).await;
    all_marked.expect("marked as ready, too");
    let reached = pod.milestones.reached();
    let names: Vec<_> = reached.iter().map(|reached| reached.milestone).collect();
    assert_eq!(names, ["configuration received", "Envoy live", "ready"]);
    // Polling has ended with the first readiness, so a new Envoy process is not polled.
    let before = pod.query_count();
    pod.report.send_replace(started(1, 2));
    tokio::time::pause();
    tokio::time::sleep(2 * EARLY_PHASE).await;
    assert_eq!(pod.query_count(), before);
}

#[tokio::test(start_paused = true)]
async fn a_slow_envoy_is_asked_less_often_until_another_one_starts() {
    let pod = Pod::new().await;
    pod.set_response("");
    let ready = pod.ready.clone();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { ready.poll_until_ready().await });
    let mut asked = Vec::new();
    for round in 0..6 {
        if round == 4 {
            pod.report.send_replace(started(0, 2));
        }
        let before = pod.query_count();
        for _ in 0..EARLY_PHASE.as_secs() / 5 {
            pod.report.send_modify(|_| ());
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        asked.push(pod.query_count() - before);
    }
    let often: Vec<_> = asked.iter().map(|count| *count > 100).collect();
    assert_eq!(often, [true, false, false, false, true, false], "{asked:?}");
}
