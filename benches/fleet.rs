//! Measures a fleet of agents with one control plane: memory, dials and certificate requests (CSRs) per
//! second, when the fleet starts, when the control plane restarts, when all certificates become due, and
//! during a partition. `benches/README.md` explains the table.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::arithmetic_side_effects,
    clippy::disallowed_methods,
    clippy::disallowed_types
)]

#[path = "fleet/agents.rs"]
mod agents;
#[path = "fleet/envoy.rs"]
mod envoy;
#[path = "fleet/front.rs"]
mod front;
mod support;

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use agents::Agents;
use front::Front;
use local_istiod::{Event, Events, LocalIstiod, Options, Resource, Snapshot};
use rustix::process::{Resource as Limit, Rlimit, getrlimit, setrlimit};
use support::dnsperf::is_installed;
use support::table::Table;
use support::{Process, number};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};

const SIZES: [usize; 2] = [200, 1000];
/// The memory for an agent and its scripted Envoy in KiB, with a reserve.
const MEMORY: u64 = 16 << 10;
/// The time that the control plane is stopped during the restart.
const RESTART: Duration = Duration::from_secs(20);
/// The duration of the partition. It is longer than the keepalive's 40 s, so that every agent notices
/// it.
const PARTITION: Duration = Duration::from_secs(60);
/// The lifetime of the first certificates. A certificate is renewed at 0.5 of its lifetime, plus or
/// minus [`JITTER`].
const LIFE: Duration = Duration::from_secs(200);
const JITTER: f64 = 0.1;
/// The lifetime of later certificates, most of which become due during the partition.
const SECOND_LIFE: Duration = Duration::from_secs(150);
/// The time for further dials and requests of a situation after all streams are open again.
const SETTLE: Duration = Duration::from_secs(5);
/// The longest wait for the end of a situation.
const PATIENCE: Duration = Duration::from_secs(180);

/// The events of one kind in their order: the time, and the number of the agent.
type Seen = Vec<(Instant, usize)>;

/// The environment variable that makes this program run as the Envoy of an agent. Its value is the
/// agent's name.
const ENVOY: &str = "FLEET_ENVOY";

fn main() {
    if let Ok(name) = std::env::var(ENVOY) {
        return support::block_on(envoy::run(&name, agents::admin_port(&name)));
    }
    let numbers: Vec<usize> = std::env::args().filter_map(|it| it.parse().ok()).collect();
    let sizes = if numbers.is_empty() { SIZES.to_vec() } else { numbers };
    // Each agent needs four sockets.
    let most = getrlimit(Limit::Nofile).maximum;
    let limit = Rlimit { current: most, maximum: most };
    setrlimit(Limit::Nofile, limit).expect("the hard limit is allowed");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    for size in sizes {
        let fits = number(Path::new("/proc/meminfo"), "MemAvailable:") / MEMORY;
        runtime.block_on(measure(size.min(fits as usize)));
    }
}

async fn measure(size: usize) {
    let (istiod, mut events) = control_plane().await;
    let front = Front::start(istiod.address).await;
    let seen = front.seen.clone();
    tokio::task::spawn(async move {
        // The service account and the node both have the agent's name, which is a letter and a number.
        let number = |name: &str| name[1..].parse().expect("a number");
        while let Some(event) = events.recv().await {
            let now = Instant::now();
            match event {
                Event::Issued { identity, .. } => {
                    let agent = number(&identity.service_account);
                    seen.requests.lock().push((now, agent));
                }
                Event::Opened { node, .. } => {
                    let agent = number(node.trim_end_matches(".default"));
                    seen.opened.lock().push((now, agent));
                }
                _ => {}
            }
        }
    });
    let mut fleet = Fleet::new(size, front);

    let start = fleet.begin().await;
    fleet.agents = Agents::start(size, &fleet.front, &istiod).await;
    fleet.wait_for_all_streams(start).await;
    fleet.row("start of all", start, None).await;

    let restart = fleet.begin().await;
    fleet.front.is_up.send_replace(false);
    let options = istiod.kill().await;
    sleep(RESTART).await;
    let options = Options { max_cert_ttl: SECOND_LIFE, ..options };
    let istiod = LocalIstiod::start(options).await.expect("its port is free");
    fleet.front.is_up.send_replace(true);
    let returned = Instant::now();
    fleet.wait_for_all_streams(returned).await;
    fleet.row("restart, away for 20 s", restart, Some(returned)).await;
    let connections = fleet.front.connections();
    println!("\n{size} agents, {connections} connections");
    fleet.agents.print_memory();

    let due = fleet.begin().await;
    fleet.until_renewed().await;
    fleet.row("all certificates due", due, None).await;
    let renewals = fleet.renewals();

    if let Some(partition) = Partition::start(fleet.front.port) {
        let begin = fleet.begin().await;
        sleep(PARTITION).await;
        let healed = Instant::now();
        drop(partition);
        fleet.wait_for_all_streams(healed).await;
        fleet.row("partition of 60 s", begin, Some(healed)).await;
    }
    println!("\n{size} agents");
    fleet.table.print();
    println!("\n{renewals}");
    istiod.kill().await;
}

/// Starts a control plane whose certificates have a short lifetime, and which serves one cluster and one
/// listener.
async fn control_plane() -> (LocalIstiod, mpsc::UnboundedReceiver<Event>) {
    let mut snapshot = Snapshot::default();
    for type_url in [envoy::CLUSTER, envoy::LISTENER] {
        snapshot.insert("common", Resource::new("one", type_url, b"\x0a\x03one".to_vec()));
    }
    let (sender, events) = mpsc::unbounded_channel();
    let options = Options {
        max_cert_ttl: LIFE,
        snapshots: Some(watch::channel(Arc::new(snapshot)).1),
        events: Events::to(sender),
        ..Options::default()
    };
    let istiod = LocalIstiod::start(options).await;
    (istiod.expect("a control plane"), events)
}

/// A partition, which drops all packets between the agents and the control plane until it is dropped
/// itself. The kernel removes the rules when the process that owns them ends.
struct Partition {
    _nft: Process,
    _stdin: std::process::ChildStdin,
}

impl Partition {
    fn start(port: u16) -> Option<Self> {
        if !is_installed("nft") || !rustix::process::geteuid().is_root() {
            println!("\nno partition: it needs nft and root");
            return None;
        }
        let (nft, mut stdin, _) = Process::with_pipes(Command::new("nft").arg("-i"));
        let rules = format!(
            "add table inet fleet {{ flags owner; }}\n\
             add chain inet fleet input {{ type filter hook input priority 0; }}\n\
             add rule inet fleet input tcp dport {port} drop\n\
             add rule inet fleet input tcp sport {port} drop\n"
        );
        stdin.write_all(rules.as_bytes()).expect("nft reads");
        Some(Self { _nft: nft, _stdin: stdin })
    }
}

struct Fleet {
    size: usize,
    front: Front,
    agents: Agents,
    table: Table,
    /// The number of dials that the agents counted before the situation.
    counted: u64,
}

impl Fleet {
    fn new(size: usize, front: Front) -> Self {
        Self {
            size,
            front,
            agents: Agents::default(),
            counted: 0,
            table: Table::new(&[
                "situation",
                "seconds",
                "dials",
                "by agents",
                "dials/s",
                "max",
                "after return",
                "least gap s",
                "CSRs",
                "max/s",
                "50 %",
                "99 %",
                "all back s",
            ]),
        }
    }

    async fn begin(&mut self) -> Instant {
        self.counted = self.agents.dials().await;
        Instant::now()
    }

    /// Waits until each agent has opened a stream after `since`, and then for [`SETTLE`].
    async fn wait_for_all_streams(&mut self, since: Instant) {
        while self.back(since).len() < self.size && since.elapsed() < PATIENCE {
            sleep(Duration::from_millis(100)).await;
        }
        sleep(SETTLE).await;
    }

    /// Returns the sorted times from `since` until each agent's first stream was open.
    fn back(&self, since: Instant) -> Vec<Duration> {
        let opened = self.front.seen.opened.lock();
        let mut first = vec![None; self.size];
        for (at, agent) in opened.iter().filter(|(at, _)| *at > since) {
            first[*agent].get_or_insert(*at - since);
        }
        let mut times: Vec<_> = first.into_iter().flatten().collect();
        times.sort();
        times
    }

    async fn until_renewed(&self) {
        let begin = Instant::now();
        while self.certificate_lifetimes().len() < self.size && begin.elapsed() < PATIENCE {
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// Returns the time from the first to the second certificate of each agent.
    fn certificate_lifetimes(&self) -> Vec<Duration> {
        let requests = self.front.seen.requests.lock();
        let pairs = gaps(&requests, self.size);
        pairs.into_iter().filter_map(|gaps| gaps.first().copied()).collect()
    }

    /// Describes the times of renewal, compared with the promised times.
    fn renewals(&self) -> String {
        let mut certificate_lifetimes = self.certificate_lifetimes();
        certificate_lifetimes.sort();
        let [first, last] = [certificate_lifetimes.first(), certificate_lifetimes.last()]
            .map(|life| life.map_or(0.0, |life| life.as_secs_f64() / LIFE.as_secs_f64()));
        let window = LIFE.mul_f64(2.0 * JITTER);
        let even = self.size as f64 / window.as_secs_f64();
        let start = Instant::now();
        let most =
            most_in_a_second(certificate_lifetimes.iter().map(|life| start + *life).collect());
        format!(
            "renewed after {first:.3} to {last:.3} of the life, promised {:.3} to {:.3}; had all been \
             issued at once: {most} CSRs in a second at most, {even:.0} if spread evenly over {window:?}",
            0.5 - JITTER,
            0.5 + JITTER
        )
    }

    async fn row(&mut self, name: &str, begin: Instant, returned: Option<Instant>) {
        let after =
            |seen: &Seen| -> Seen { seen.iter().filter(|(at, _)| *at >= begin).copied().collect() };
        let dials = after(&self.front.seen.dials.lock());
        let requests = after(&self.front.seen.requests.lock());
        let moments = |seen: &Seen| seen.iter().map(|(at, _)| *at).collect::<Vec<_>>();
        let since = returned.unwrap_or(begin);
        let first_second = since..since + Duration::from_secs(1);
        let at_return = dials.iter().filter(|(at, _)| first_second.contains(at)).count();
        let gap = gaps(&dials, self.size).into_iter().flatten().min();
        let seconds = begin.elapsed().as_secs_f64();
        let back = self.back(since);
        let part = |part: usize| match back.get((self.size * part).div_ceil(100).max(1) - 1) {
            Some(time) => format!("{:.1}", time.as_secs_f64()),
            None => "-".to_owned(),
        };
        self.table.row([
            name.to_owned(),
            format!("{seconds:.0}"),
            dials.len().to_string(),
            (self.agents.dials().await - self.counted).to_string(),
            format!("{:.1}", dials.len() as f64 / seconds),
            most_in_a_second(moments(&dials)).to_string(),
            returned.map_or("-".to_owned(), |_| at_return.to_string()),
            gap.map_or("-".to_owned(), |gap| format!("{:.3}", gap.as_secs_f64())),
            requests.len().to_string(),
            most_in_a_second(moments(&requests)).to_string(),
            part(50),
            part(99),
            part(100),
        ]);
    }
}

/// Returns, for each agent, the times between its successive events.
fn gaps(seen: &Seen, size: usize) -> Vec<Vec<Duration>> {
    let (mut last, mut gaps) = (vec![None; size], vec![Vec::new(); size]);
    for (at, agent) in seen {
        if let Some(before) = last[*agent].replace(*at) {
            gaps[*agent].push(*at - before);
        }
    }
    gaps
}

/// Returns the largest number of moments in any second. The moments must be sorted.
fn most_in_a_second(moments: Vec<Instant>) -> usize {
    let ends = |from: usize| {
        let end = moments[from] + Duration::from_secs(1);
        moments.partition_point(|at| *at < end) - from
    };
    (0..moments.len()).map(ends).max().unwrap_or(0)
}
