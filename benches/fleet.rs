//! Measures a fleet of agents with two control planes: memory, dials and certificate requests (CSRs) per
//! second, when the fleet starts, when one or all control planes restart, when all certificates become due,
//! during a partition, and when the control plane is overloaded. Prints for each promise whether it held.
//! `benches/README.md` explains the table.
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
#[path = "fleet/istiods.rs"]
mod istiods;
mod support;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use agents::{Agents, Certificate};
use front::Front;
use istiods::Istiods;
use rustix::process::{Resource as Limit, Rlimit, getrlimit, setrlimit};
use support::dnsperf::is_installed;
use support::table::Table;
use support::{Process, number};
use tokio::time::{Instant, sleep, sleep_until};

const SIZES: [usize; 2] = [200, 2000];
/// The memory that an agent and its scripted Envoy need, in KiB, with some room. A pair needed 3.6 MB, an unoptimized one 5 to 10.
const MEMORY: u64 = 5 << 10;
/// The time that the control planes are stopped during the restart.
const RESTART: Duration = Duration::from_secs(20);
/// The duration of the partition. It is longer than the keepalive's 40 s, so that every agent notices
/// it.
const PARTITION: Duration = Duration::from_secs(60);
/// The time for which the remaining control plane refuses certificate requests.
const OVERLOAD: Duration = Duration::from_secs(60);
/// A certificate is renewed at 0.5 of its lifetime, plus or minus this.
const JITTER: f64 = 0.03;
/// The lifetime of later certificates, many of which become due during the partition. When it ends, a quarter
/// of their remaining life is about a minute.
const SECOND_LIFE: Duration = Duration::from_secs(600);
/// The lifetime of the certificates after the partition, many of which become due during the overload.
const THIRD_LIFE: Duration = Duration::from_secs(200);
/// The remaining life below which a certificate request does not wait.
const URGENT: Duration = Duration::from_secs(30);
/// The promised limit for the time until all agents are connected to a control plane that is not overloaded.
const BACK: Duration = Duration::from_secs(5);
/// The most streams that an agent opens on average at a control plane that refuses them, as Envoy's backoff
/// alone would.
const MAX_ATTEMPTS: f64 = 10.0;
/// The time for further dials and requests of a situation after all streams are open again.
const SETTLE: Duration = Duration::from_secs(5);
/// The longest wait for the end of a situation.
const PATIENCE: Duration = Duration::from_secs(240);

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
        let fits = available_memory() / MEMORY;
        runtime.block_on(measure(size.min(fits as usize)));
    }
}

/// Returns the memory that new processes can use, in KiB.
fn available_memory() -> u64 {
    number(Path::new("/proc/meminfo"), "MemAvailable:")
}

async fn measure(size: usize) {
    // The fleet needs a while to start, and the first certificates are not due before.
    let life = Duration::from_secs_f64(250.0 + size as f64 / 4.0);
    let front = Front::start().await;
    let mut istiods = Istiods::start(life, &front).await;
    let mut fleet = Fleet::new(size, front);
    let free = available_memory();

    let start = fleet.begin().await;
    fleet.agents = Agents::start(size, &fleet.front, istiods.first()).await;
    fleet.wait_for_all_streams(start).await;
    fleet.row("start of all", start, None).await;
    let needed = free.saturating_sub(available_memory()) as f64 / 1024.0 / size as f64;
    println!("\n{size} agents, {} connections", fleet.front.connections());
    println!("each needs {needed:.1} MB of the machine's memory, with its scripted Envoy");
    fleet.agents.print_memory();

    let killed = fleet.begin().await;
    let (returned, moving) = (Instant::now(), fleet.front.agents_at(1));
    let second = istiods.kill_second(&fleet.front).await;
    fleet.wait_for_all_streams_of(&moving, returned).await;
    fleet.row("one of two killed", killed, Some(returned)).await;
    fleet.promise_return("after one of two was killed", returned, &moving);
    istiods.add(second, &fleet.front).await;

    let restart = fleet.begin().await;
    let returned = istiods.restart(RESTART, SECOND_LIFE, &fleet.front).await;
    fleet.wait_for_all_streams(returned).await;
    fleet.row("restart, away for 20 s", restart, Some(returned)).await;
    fleet.promise_return("after the restart", returned, &Vec::from_iter(0..size));

    let due = fleet.begin().await;
    fleet.until_renewed(life).await;
    fleet.row("all certificates due", due, None).await;
    fleet.promise_renewals(life);

    measure_partition(&mut fleet, &mut istiods).await;
    measure_overload(&mut fleet, &mut istiods).await;
    println!("\n{size} agents");
    fleet.table.print();
}

/// Drops all packets for [`PARTITION`], at the time at which the most certificates become due.
async fn measure_partition(fleet: &mut Fleet, istiods: &mut Istiods) {
    let asked = Instant::now();
    let certificates = fleet.agents.certificates().await;
    fleet.begin().await;
    sleep_until(asked + busiest(&certificates, PARTITION)).await;
    let begin = Instant::now();
    let Some(partition) = Partition::start(fleet.front.port) else { return };
    // The new control planes issue certificates with another lifetime.
    istiods.restart(PARTITION, THIRD_LIFE, &fleet.front).await;
    let healed = Instant::now();
    drop(partition);
    let due = due_within(&certificates, begin - asked, healed - begin);
    fleet.wait_for_all_streams(healed).await;
    fleet.until_requested(&due, healed).await;
    fleet.row("partition of 60 s", begin, Some(healed)).await;
    fleet.promise_return("after the partition", healed, &Vec::from_iter(0..fleet.size));
    fleet.promise_no_storm("after the partition", healed, &due, healed - asked);
}

/// Kills one control plane, while the other accepts few streams, answers them late, and refuses certificate
/// requests for [`OVERLOAD`].
async fn measure_overload(fleet: &mut Fleet, istiods: &mut Istiods) {
    let asked = Instant::now();
    let certificates = fleet.agents.certificates().await;
    fleet.begin().await;
    sleep_until(asked + busiest(&certificates, OVERLOAD)).await;
    let begin = Instant::now();
    let (moving, staying) = (fleet.front.agents_at(1), fleet.front.agents_at(0));
    istiods.overload(fleet.size as f64 / 40.0, Duration::from_secs(30));
    istiods.kill_second(&fleet.front).await;
    sleep(OVERLOAD).await;
    istiods.first().refuse_certificates(None);
    let over = Instant::now();
    let due = due_within(&certificates, begin - asked, over - begin);
    let refused = fleet.front.seen.refused.lock().iter().filter(|at| **at >= begin).count();
    fleet.until_requested(&due, over).await;
    fleet.wait_for_all_streams_of(&moving, begin).await;
    fleet.row("overload of 60 s", begin, None).await;
    fleet.promise_no_storm("after the overload", over, &due, over - asked);
    let attempts = fleet.front.seen.attempts.lock().iter().filter(|at| **at >= begin).count();
    let attempts = attempts as f64 / moving.len().max(1) as f64;
    let text = format!(
        "overload: {attempts:.1} refused streams of an agent on average, at most {MAX_ATTEMPTS}"
    );
    fleet.promise(attempts <= MAX_ATTEMPTS, text);
    let per_agent = refused as f64 / due.len().max(1) as f64;
    let text = format!(
        "overload: {per_agent:.1} refused CSRs of an agent whose certificate was due, at most 5"
    );
    fleet.promise(per_agent <= 5.0, text);
    let is_lost = |(at, agent): &&(Instant, usize)| *at >= begin && staying.contains(agent);
    let closed = fleet.front.seen.closed.lock().iter().filter(is_lost).count();
    let text = format!("overload: {closed} of {} open streams ended", staying.len());
    fleet.promise(closed == 0, text);
}

/// Returns the time from now at which the most certificates become due within `length`.
fn busiest(certificates: &BTreeMap<usize, Certificate>, length: Duration) -> Duration {
    let begins = certificates.values().map(|it| it.due);
    let most = begins.max_by_key(|begin| due_within(certificates, *begin, length).len());
    most.unwrap_or_default()
}

/// Returns the certificates that become due within `length` after `begin_in`, by agent.
fn due_within(
    certificates: &BTreeMap<usize, Certificate>,
    begin_in: Duration,
    length: Duration,
) -> BTreeMap<usize, Certificate> {
    // A page shows whole seconds.
    let window = begin_in + Duration::from_secs(1)..begin_in + length;
    let due = certificates.iter().filter(|(_, it)| window.contains(&it.due));
    due.map(|(agent, it)| (*agent, *it)).collect()
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
        self.wait_for_all_streams_of(&Vec::from_iter(0..self.size), since).await;
    }

    async fn wait_for_all_streams_of(&mut self, agents: &[usize], since: Instant) {
        let is_back = |fleet: &Self| {
            let back = fleet.first_streams(since);
            agents.iter().all(|agent| back[*agent].is_some())
        };
        while !is_back(self) && since.elapsed() < PATIENCE {
            sleep(Duration::from_millis(100)).await;
        }
        sleep(SETTLE).await;
    }

    /// Waits until these agents have requested a certificate after `since`.
    async fn until_requested(&self, due: &BTreeMap<usize, Certificate>, since: Instant) {
        while self.requests_of(due, since).len() < due.len() && since.elapsed() < PATIENCE / 2 {
            sleep(Duration::from_millis(500)).await;
        }
    }

    /// Returns when these agents got their first certificate after `since`.
    fn requests_of(&self, due: &BTreeMap<usize, Certificate>, since: Instant) -> Vec<Instant> {
        let requests = self.front.seen.requests.lock();
        let mut first = BTreeMap::new();
        for (at, agent) in requests.iter().filter(|(at, it)| *at >= since && due.contains_key(it)) {
            first.entry(*agent).or_insert(*at);
        }
        let mut times = Vec::from_iter(first.into_values());
        times.sort();
        times
    }

    /// Prints a promise and whether it held.
    fn promise(&self, has_held: bool, text: String) {
        println!("{}  {text}", if has_held { "held    " } else { "NOT HELD" });
    }

    /// Promises that these agents have streams within [`BACK`] after `since`.
    fn promise_return(&self, when: &str, since: Instant, agents: &[usize]) {
        let back = self.first_streams(since);
        let times = agents.iter().filter_map(|agent| back[*agent]);
        let (count, last) = (times.clone().count(), times.max().unwrap_or_default());
        let text = format!(
            "{when}: {count} of {} agents are back, the last one after {last:.1?}, at most {BACK:?}",
            agents.len()
        );
        self.promise(count == agents.len() && last <= BACK, text);
    }

    /// Promises that no second after an outage has more than 2n/w certificate requests.
    fn promise_no_storm(
        &self,
        when: &str,
        since: Instant,
        due: &BTreeMap<usize, Certificate>,
        elapsed: Duration,
    ) {
        let left = |it: &Certificate| it.end.saturating_sub(elapsed);
        let mut due = due.clone();
        due.retain(|_, it| left(it) > URGENT);
        let shortest = due.values().map(left).min().unwrap_or(URGENT);
        let w = (shortest / 4).min(Duration::from_secs(60));
        let requests = self.requests_of(&due, since);
        let last = requests.last().map_or(Duration::ZERO, |last| *last - since);
        let (n, all, most) = (due.len(), requests.len(), most_in_a_second(requests));
        let limit = 2.0 * n as f64 / w.as_secs_f64();
        let text = format!(
            "{when}: {most} CSRs in a second, at most 2n/w = {limit:.0} (n = {n} certificates were due, \
             w = {w:.1?}); {all} were renewed, the last one after {last:.1?}"
        );
        self.promise(most as f64 <= limit && all == n, text);
    }

    /// Returns the times from `since` until the first stream of each agent was open.
    fn first_streams(&self, since: Instant) -> Vec<Option<Duration>> {
        let opened = self.front.seen.opened.lock();
        let mut first = vec![None; self.size];
        for (at, agent) in opened.iter().filter(|(at, _)| *at > since) {
            first[*agent].get_or_insert(*at - since);
        }
        first
    }

    /// Waits until all agents have renewed a certificate that lives for `life`.
    async fn until_renewed(&self, life: Duration) {
        let begin = Instant::now();
        while self.certificate_lifetimes().len() < self.size && begin.elapsed() < life {
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// Returns the time from the first to the second certificate of each agent.
    fn certificate_lifetimes(&self) -> Vec<Duration> {
        let requests = self.front.seen.requests.lock();
        let pairs = gaps(&requests, self.size);
        pairs.into_iter().filter_map(|gaps| gaps.first().copied()).collect()
    }

    /// Promises when certificates are renewed, and that the requests are spread evenly.
    fn promise_renewals(&self, life: Duration) {
        let mut lifetimes = self.certificate_lifetimes();
        lifetimes.sort();
        let [first, last] = [lifetimes.first(), lifetimes.last()]
            .map(|it| it.map_or(0.0, |it| it.as_secs_f64() / life.as_secs_f64()));
        let window = life.mul_f64(2.0 * JITTER);
        let even = self.size as f64 / window.as_secs_f64();
        let start = Instant::now();
        let most = most_in_a_second(lifetimes.iter().map(|life| start + *life).collect());
        let [earliest, latest] = [0.5 - JITTER, 0.5 + JITTER];
        let text = format!(
            "renewed after {first:.3} to {last:.3} of the life, promised {earliest:.3} to {latest:.3}; had all been \
             issued at once: {most} CSRs in a second at most, {even:.0} if spread evenly over {window:?}"
        );
        // A busy machine answers late.
        let is_in_time = first >= earliest && last <= latest + 1.0 / life.as_secs_f64();
        self.promise(is_in_time && most as f64 <= 2.0 * even, text);
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
        let mut back: Vec<_> = self.first_streams(since).into_iter().flatten().collect();
        back.sort();
        let part = |part: usize| match back.get((back.len() * part).div_ceil(100).max(1) - 1) {
            Some(time) => format!("{:.1}", time.as_secs_f64()),
            None => "-".to_owned(),
        };
        let most = most_in_a_second(moments(&dials));
        let text = format!("{name}: {most} dials in a second, below the number of agents");
        self.promise(most < self.size, text);
        let by_agents = self.agents.dials().await - self.counted;
        self.table.row([
            name.to_owned(),
            format!("{seconds:.0}"),
            dials.len().to_string(),
            by_agents.to_string(),
            format!("{:.1}", dials.len() as f64 / seconds),
            most.to_string(),
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
