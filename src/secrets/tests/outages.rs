//! Tests that the certificate requests of a fleet are spread after an outage, after a change of the mesh's roots, and
//! after a restart of its agents.

use std::ops::Range;
use std::sync::Mutex as SyncMutex;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::time::{sleep, sleep_until, timeout};

use super::*;
use crate::ca::{Reached, SignError, csr};
use crate::secrets::cache::CertificateCache;
use crate::secrets::renewal::Renewal;

const MINUTE: Duration = Duration::from_secs(60);
/// The time after which a call without an answer, or a dial, fails.
const LIMIT: Duration = Duration::from_secs(10);
/// The time after which keepalive has found that a connection is lost.
const KEEPALIVE: Duration = Duration::from_secs(40);
/// The shortest remaining life of a certificate whose request waits.
const URGENT: Duration = Duration::from_secs(30);

/// What agents see of an outage.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Outage {
    /// Connections end, and dials are refused.
    Refused,
    /// All packets are lost.
    Silent,
    /// The authority answers each request with this code.
    Answers(Code),
}

/// The moments at which certificates fall due.
#[derive(Clone, Copy, Debug)]
enum Due {
    Throughout,
    /// All at the beginning of the outage.
    AtOnce,
    /// All a moment before its end.
    AtTheEnd,
}

/// The authority, as one agent sees it. Its answer to the first request after the outage never arrives.
struct Agent {
    outage: Outage,
    begin: Instant,
    end: Instant,
    is_connected: AtomicBool,
    /// True if a discovery stream connects to istiod as soon as the outage is over.
    has_stream: bool,
    /// The time of the request after the outage.
    request: Arc<SyncMutex<Option<Instant>>>,
}

fn failure(code: Code) -> SignError {
    let message = "fails".to_owned();
    SignError {
        code,
        problem: Problem::new(problem::Code::IstiodError, "istiod", "fails"),
        message,
    }
}

impl Ca for Agent {
    async fn reach(&self) -> Result<Reached, SignError> {
        let now = Instant::now();
        let is_lost = match self.outage {
            Outage::Refused => now < self.end,
            Outage::Silent => now < self.end && now >= self.begin + KEEPALIVE,
            Outage::Answers(_) => false,
        };
        if is_lost {
            self.is_connected.store(false, Ordering::Relaxed);
        }
        if self.is_connected.load(Ordering::Relaxed) || now >= self.end && self.has_stream {
            return Ok(Reached::Before);
        }
        let limit = if self.outage == Outage::Silent { LIMIT } else { Duration::ZERO };
        match timeout(limit, sleep_until(self.end)).await {
            Err(_) if now < self.end => Err(failure(Code::Unavailable)),
            _ => {
                self.is_connected.store(true, Ordering::Relaxed);
                Ok(Reached::Now)
            }
        }
    }

    async fn sign(&self, _: &str, _: Duration) -> Result<Vec<String>, SignError> {
        // What is sent while packets are lost arrives once they are not, within the limit.
        let limit = if self.outage == Outage::Silent { LIMIT } else { Duration::ZERO };
        if Instant::now() >= self.end || timeout(limit, sleep_until(self.end)).await.is_ok() {
            self.request.lock().unwrap().get_or_insert(Instant::now());
            std::future::pending::<()>().await;
        }
        Err(failure(match self.outage {
            Outage::Answers(code) => code,
            Outage::Refused => Code::Unavailable,
            Outage::Silent => {
                self.is_connected.store(false, Ordering::Relaxed);
                Code::DeadlineExceeded
            }
        }))
    }
}

/// Runs a fleet whose certificates fall due during an outage. Their remaining lives at its end are drawn from `lives`,
/// in seconds. Returns these, each with the delay of the request.
async fn delays_after(
    agents: usize,
    lives: Range<u64>,
    length: Duration,
    outage: Outage,
    due: Due,
) -> Vec<(Duration, Duration)> {
    let clock = clock();
    let (begin, end) = (Instant::now(), Instant::now() + length);
    let (authority, registry) = (FakeAuthority::new(&clock), Registry::default());
    let metrics = Metrics::new(&registry);
    let (mut certificates, mut requests, mut fleet) = (Vec::new(), Vec::new(), JoinSet::new());
    for part in 0..20 {
        let life = Duration::from_secs(lives.start + (lives.end - lives.start) * part / 20);
        let csr = csr::generate(KeyType::P256, Encoding::default(), &config().identity).unwrap();
        let answer = authority.sign(&csr.csr_pem, length + life).await.unwrap();
        certificates.push((life, Arc::new(Workload::new(&answer, csr.key_pem).unwrap())));
    }
    for agent in 0..agents {
        let (life, workload) = &certificates[fastrand::usize(..certificates.len())];
        let request = Arc::default();
        requests.push((*life, Arc::clone(&request)));
        let state = State {
            workload: Some(workload.clone()),
            roots: Some(workload.roots.clone()),
            ..State::default()
        };
        let renewal = Renewal {
            config: config(),
            key_type: Mutex::new(KeyType::P256),
            ca: Agent {
                outage,
                begin,
                end,
                is_connected: AtomicBool::new(true),
                has_stream: agent % 2 == 0,
                request,
            },
            clock: clock.clone(),
            state: watch::Sender::new(state),
            metrics: metrics.clone(),
            authority_roots: Mutex::default(),
            mesh: MeshBundle::default(),
            cache: None,
        };
        let wait = match due {
            Due::Throughout => length.mul_f64(fastrand::f64()),
            Due::AtOnce => Duration::ZERO,
            Due::AtTheEnd => length - Duration::from_millis(1),
        };
        fleet.spawn(async move {
            sleep_until(begin + wait).await;
            renewal.run().await;
        });
    }
    sleep_until(end + 3 * MINUTE).await;
    let delay = |(life, request): &(_, Arc<SyncMutex<Option<Instant>>>)| {
        (*life, request.lock().unwrap().expect("the agent has made a request") - end)
    };
    requests.iter().map(delay).collect()
}

/// Returns the largest number of times in any second.
fn most_in_a_second(times: impl Iterator<Item = Duration>) -> usize {
    let mut times = Vec::from_iter(times);
    times.sort();
    let end = |from: usize| times.partition_point(|at| *at < times[from] + Duration::from_secs(1));
    (0..times.len()).map(|from| end(from) - from).max().unwrap_or(0)
}

#[tokio::test(start_paused = true)]
async fn no_second_after_an_outage_has_more_than_2n_in_w_requests() {
    use Due::{AtOnce, AtTheEnd, Throughout};
    use Outage::{Answers, Refused, Silent};
    let refuses = Answers(Code::PermissionDenied);
    let overloaded = Answers(Code::ResourceExhausted);
    fastrand::seed(68);
    for (agents, lives, seconds, outage, due) in [
        (1500, 43_000..43_200, 60, Silent, Throughout),
        (1500, 43_000..43_200, 60, Silent, AtTheEnd),
        (3000, 43_000..43_200, 60, Refused, AtOnce),
        (1500, 43_000..43_200, 900, Refused, Throughout),
        (1500, 43_000..43_200, 200, overloaded, Throughout),
        (1500, 43_000..43_200, 60, overloaded, AtOnce),
        (500, 100..200, 60, Silent, Throughout),
        (500, 100..200, 100, refuses, Throughout),
        (500, 60..300, 300, Refused, AtOnce),
        // A third of the certificates end within 30 s.
        (500, 6..80, 60, Silent, Throughout),
        (500, 6..80, 60, overloaded, Throughout),
    ] {
        let case = format!("{agents} {lives:?} {seconds} s {outage:?} {due:?}");
        let length = Duration::from_secs(seconds);
        let found = delays_after(agents, lives, length, outage, due).await;
        let (urgent, others): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|(life, _)| *life <= URGENT);
        for (life, delay) in &urgent {
            assert!(*delay <= Duration::from_secs(5).min(*life), "{case}: {life:?}, {delay:?}");
        }
        for (life, delay) in &others {
            assert!(*delay <= life.mul_f64(0.6), "{case}: {life:?}, {delay:?}");
        }
        let shortest = others.iter().map(|(life, _)| *life).min().unwrap();
        let w = (shortest / 4).min(MINUTE).as_secs_f64();
        let most = most_in_a_second(others.iter().map(|(_, delay)| *delay));
        assert!(most as f64 * w <= 2.0 * others.len() as f64, "{case}: {most} in a second");
    }
}

#[tokio::test(start_paused = true)]
async fn a_changed_trust_bundle_renews_a_fleet_evenly_within_a_minute() {
    const AGENTS: usize = 300;
    fastrand::seed(68);
    let (clock, registry) = (clock(), Registry::default());
    let (authority, other) = (FakeAuthority::new(&clock), FakeAuthority::new(&clock));
    let (mut fleet, mut tasks) = (Vec::new(), JoinSet::new());
    for _ in 0..AGENTS {
        let (secrets, renewal) = new(config(), authority.clone(), clock.clone(), &registry);
        tasks.spawn(renewal);
        secrets.set_mesh_bundle(&authority.root_pem()).expect("is one");
        fleet.push(secrets);
    }
    sleep(MINUTE).await;
    assert_eq!(authority.requests(), AGENTS);
    let mut parts = Vec::new();
    for part in 0..6 {
        // A root that is added twice, in two pushes, does not bring requests forward.
        if part < 2 {
            let bundle = [authority.root_pem()].into_iter().chain(vec![other.root_pem(); part + 1]);
            let bundle = bundle.collect::<String>();
            fleet.iter().for_each(|secrets| secrets.set_mesh_bundle(&bundle).expect("are several"));
        }
        let before = authority.requests();
        sleep(MINUTE / 6).await;
        parts.push(authority.requests() - before);
    }
    // Those that had renewed before the second push renew again.
    let even = AGENTS / 6;
    assert!((even / 2..2 * even).contains(&parts[0]), "{parts:?}");
    assert!(parts.iter().all(|part| (even / 2..2 * even).contains(part)), "{parts:?}");
    assert_eq!(authority.most_in_flight(), 1);
}

#[tokio::test(start_paused = true)]
async fn restarted_agents_spread_requests_that_are_overdue_unless_the_certificate_ends_soon() {
    let (mut delays, day) = (Vec::new(), 24 * HOUR);
    fastrand::seed(68);
    // The remaining life of the stored certificate, of which half is over.
    for left in std::iter::repeat_n(12 * HOUR, 60).chain([URGENT]) {
        let Some(directory) = cache::directory() else { return };
        let clock = clock();
        let authority = FakeAuthority::new(&clock);
        let csr = csr::generate(KeyType::P256, Encoding::default(), &config().identity).unwrap();
        let answer = authority.sign(&csr.csr_pem, left).await.unwrap();
        let config = cache::caching(&directory);
        let store = CertificateCache::new(&config).expect("it is named");
        let issued = clock.now() - day;
        store.store(csr.key_pem.as_bytes(), answer, issued).expect("in memory");
        let before = authority.requests();
        let (secrets, renewal) = new(config, authority.clone(), clock, &Registry::default());
        let (mut tasks, start) = (JoinSet::new(), Instant::now());
        tasks.spawn(renewal);
        while authority.requests() == before {
            sleep(Duration::from_millis(10)).await;
        }
        assert!(secrets.latest().workload.is_some(), "the stored certificate is served meanwhile");
        delays.push(start.elapsed());
    }
    let urgent = delays.pop().unwrap();
    assert!(urgent <= Duration::from_secs(1), "{urgent:?}");
    assert!(delays.iter().all(|delay| *delay <= MINUTE + Duration::from_secs(1)), "{delays:?}");
    let late = delays.iter().filter(|delay| **delay > MINUTE / 2).count();
    assert!((15..45).contains(&late), "{delays:?}");
}

#[tokio::test(start_paused = true)]
async fn an_agent_connects_before_a_renewal_and_reports_why_it_cannot() {
    let mut fixture = start(config(), Answer::Signed);
    let first = fixture.first().await;
    fixture.authority.set(Answer::Unreachable);
    sleep(12 * HOUR + 10 * MINUTE).await;
    let failure = fixture.secrets.latest().failure.expect("the authority is unreachable");
    assert!(failure.failures > 5, "{failure:?}");
    assert_eq!(fixture.authority.requests(), 1);
    fixture.authority.set(Answer::Signed);
    let before = Instant::now();
    let shown = |fixture: &Fixture| fixture.secrets.latest().failure.map(|it| it.next_attempt);
    let next = shown(&fixture);
    while shown(&fixture) == next {
        sleep(Duration::from_secs(1)).await;
    }
    let announced = shown(&fixture).expect("a request is announced");
    assert!(fixture.is_serving(&first));
    fixture.renewed(&first).await;
    assert!(before.elapsed() <= 2 * MINUTE, "{:?}", before.elapsed());
    let off = fixture.clock.now().duration_since(announced).expect("not before");
    assert!(off < Duration::from_secs(2), "{off:?}");
    assert_eq!(fixture.authority.requests(), 2);
}
