//! Measures the CPU time and latency of DNS lookups, compared with a bare UDP echo of the same build,
//! and the cost of large name tables. `benches/README.md` explains the tables.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::arithmetic_side_effects,
    clippy::disallowed_methods,
    clippy::disallowed_types
)]

mod support;

use std::future::poll_fn;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::process::{ChildStdin, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, ready};
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use istio_agent::dns::SearchDomains;
use istio_agent::dns::name_table::NameTable;
use istio_agent::xds::Protocol;
use local_istiod::{LocalIstiod, Options, Resource, Snapshot};
use prost::Message;
use rustix::process::setpriority_process;
use rustix::thread::gettid;
use support::dnsperf;
use support::names::{NAME_TABLE, host, ip, name_table, query, wait_for};
use support::peer::{Client, framed};
use support::table::Table;
use support::{Process, block_on, connect, median, pin, write};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";

/// The number of queries per second.
const RATE: u64 = 20_000;
/// The duration of a round.
const ROUND: Duration = Duration::from_secs(1);
/// The number of rounds of each kind. The kinds take turns, and the rounds are short and many, so that
/// other load of the machine affects all kinds alike. Figures are medians; a ratio is the median of the
/// ratios of all turns.
const ROUNDS: usize = 15;
/// The pause after a round with a push, in which a push that takes longer than the round ends.
const SETTLE: Duration = Duration::from_millis(500);
const HOSTS: usize = 10_000;
const MANY_HOSTS: usize = 100_000;
/// The versions of the control plane's snapshot: one with few names, and two with many names and with
/// clusters.
const SMALL: u8 = 0;
const LARGE: u8 = 1;
const OTHER_LARGE: u8 = 2;
/// The size of the clusters in a push, in bytes.
const PUSH: usize = 100 * 1024 * 1024;
/// The number of bytes that the Envoy has received.
static PASSED: AtomicU64 = AtomicU64::new(0);

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, "echo", address] => return block_on(echo(address)),
        [_, "control-plane", directory] => return block_on(control_plane(directory.as_ref())),
        _ => {}
    }
    let all = arguments.iter().all(|argument| argument != "during_push");
    if all {
        index();
    }
    let mut mesh = Mesh::start();
    let agent = mesh.agent();
    let echo_address = free_port();
    let echo = Process::start(this_program().args(["echo", &echo_address.to_string()]));
    wait_for(echo_address);
    wait_for(mesh.dns);
    if all {
        pin_apart(&[&agent, &echo]);
        lookups(&agent, mesh.dns, &echo, echo_address);
        compare_with_other_servers(&mesh, &agent, &echo, echo_address);
        unpin(&[&agent, &echo]);
    }
    during_push(&mut mesh, &agent, &echo, echo_address);
}

/// Pins the client to one processor and the servers to another, because changes of the kernel's
/// placement would cost more than a lookup.
fn pin_apart(servers: &[&Process]) {
    pin(gettid(), Some(0));
    servers.iter().for_each(|server| server.pin(Some(1)));
}

fn unpin(servers: &[&Process]) {
    pin(gettid(), None);
    servers.iter().for_each(|server| server.pin(None));
}

/// Runs a server that sends back what it receives, with the runtime, the task and the system calls that
/// the agent uses.
async fn echo(address: &str) {
    let socket = UdpSocket::bind(address).expect("bound");
    socket.set_nonblocking(true).expect("set");
    rustix::net::sockopt::set_socket_recv_buffer_size(&socket, 1 << 20).expect("set");
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(serve_echo(socket));
    while let Some(ended) = tasks.join_next().await {
        ended.expect("no panic");
    }
}

async fn serve_echo(socket: UdpSocket) {
    #[expect(
        deprecated,
        reason = "unsound only for types that give up their descriptor; a socket keeps it"
    )]
    let socket = AsyncFd::with_interest(socket, Interest::READABLE).expect("watched");
    let mut buffer = vec![0; 4097];
    loop {
        poll_fn(|context| {
            loop {
                let mut readable = ready!(socket.poll_read_ready(context)).expect("readable");
                if !drain_echo(socket.get_ref(), &mut buffer) {
                    return Poll::Ready(());
                }
                readable.clear_ready();
            }
        })
        .await;
        tokio::task::yield_now().await;
    }
}

/// Sends back up to 64 queries. Returns true if no received query is left.
fn drain_echo(socket: &UdpSocket, buffer: &mut [u8]) -> bool {
    for _ in 0..64 {
        match socket.recv_from(buffer) {
            Ok((length, client)) => {
                // The bit that marks a DNS response.
                buffer[2] |= 0x80;
                // The client may have closed its socket; it needs no response then.
                let _ = socket.send_to(&buffer[..length], client);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
            Err(error) => panic!("nothing can be received: {error}"),
        }
    }
    false
}

/// Measures the time and memory of building an index of many hosts.
fn index() {
    let encoded = name_table(MANY_HOSTS, 0);
    let search = ["ns1.svc.cluster.local".to_owned()];
    let domains = SearchDomains::new("ns1", "ns1.svc.cluster.local", &search);
    let before = resident();
    let table = NameTable::build(&encoded, domains.clone()).expect("a table");
    let memory = resident() - before;
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        drop(NameTable::build(&encoded, domains.clone()).expect("a table"));
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let mut page = Table::new(&["name table", ""]);
    page.row(["hosts".to_owned(), table.host_count().to_string()]);
    page.row(["message, MB".to_owned(), format!("{:.1}", encoded.len() as f64 / 1e6)]);
    page.row(["index and message, MB".to_owned(), format!("{:.1}", memory as f64 / 1e6)]);
    page.row(["build, ms".to_owned(), format!("{:.0}", median(times))]);
    page.print();
}

fn lookups(agent: &Process, dns: SocketAddr, echo: &Process, echo_address: SocketAddr) {
    let mut page = Table::new(&["20,000 queries/s", "CPU µs/query", "p50 µs", "p99 µs", "lost"]);
    let (mut of_echo, mut of_agent) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        of_echo.push(round(echo, echo_address, ROUND));
        of_agent.push(round(agent, dns, ROUND));
    }
    for (name, rounds) in [("bare echo", &of_echo), ("agent", &of_agent)] {
        let of = |figure: fn(&Round) -> f64| median(rounds.iter().map(figure).collect());
        let figures = [of(|r| r.cpu), of(|r| r.p50), of(|r| r.p99)];
        let lost: u64 = rounds.iter().map(|round| round.lost).sum();
        let [cpu, p50, p99] = figures.map(|figure| format!("{figure:.2}"));
        page.row([name.to_owned(), cpu, p50, p99, lost.to_string()]);
    }
    let of = |figure: fn(&Round) -> f64| {
        let pairs = of_agent.iter().zip(&of_echo);
        median(pairs.map(|(agent, echo)| figure(agent) / figure(echo)).collect())
    };
    let ratios = [of(|r| r.cpu), of(|r| r.p50), of(|r| r.p99)];
    let [cpu, p50, p99] = ratios.map(|ratio| format!("{ratio:.2}"));
    page.row(["of echo".to_owned(), cpu, p50, p99, String::new()]);
    page.print();
}

/// Measures the echo, the agent, and the other installed servers with the same names, in turns, with
/// dnsperf if it is installed.
fn compare_with_other_servers(
    mesh: &Mesh,
    agent: &Process,
    echo: &Process,
    echo_address: SocketAddr,
) {
    if !dnsperf::is_installed("dnsperf") {
        println!("\nThere is no dnsperf: other servers are left out.");
        return;
    }
    let place = mesh.directory.path();
    let names: Vec<_> = (0..HOSTS).map(|number| (host(number), ip(number, 0))).collect();
    let lines: Vec<_> = names.iter().map(|(name, _)| format!("{name} A\n")).collect();
    write(place, "names", &lines.concat());
    let others =
        [("unbound", dnsperf::unbound as fn(&_, _, &_) -> Process), ("dnsmasq", dnsperf::dnsmasq)];
    let mut started = Vec::new();
    for (name, start) in others {
        if dnsperf::is_installed(name) {
            let address = free_port();
            let server = start(place, address, &names);
            wait_for(address);
            server.pin(Some(1));
            started.push((name, server, address));
        }
    }
    let ours = [("bare echo", echo, echo_address), ("agent", agent, mesh.dns)];
    let others = started.iter().map(|(name, server, address)| (*name, server, *address));
    let servers: Vec<_> = ours.into_iter().chain(others).collect();
    let mut asked: Vec<Vec<_>> = servers.iter().map(|_| Vec::new()).collect();
    for _ in 0..ROUNDS {
        for ((_, server, address), asked) in servers.iter().zip(&mut asked) {
            asked.push(dnsperf::ask(server, *address, &place.join("names"), RATE, 1));
        }
    }
    let mut page = Table::new(&["dnsperf, 20,000 queries/s", "CPU µs/query", "of echo", "lost"]);
    let cpu = |asked: &[dnsperf::DnsperfFigures]| {
        asked.iter().map(|a| a.cpu_per_query).collect::<Vec<_>>()
    };
    let of_echo = cpu(&asked[0]);
    for ((name, ..), asked) in servers.iter().zip(&asked) {
        let cpu = cpu(asked);
        let lost: u64 = asked.iter().map(|asked| asked.lost).sum();
        let ratio = median(cpu.iter().zip(&of_echo).map(|(cpu, echo)| cpu / echo).collect());
        let [cpu, ratio] = [median(cpu), ratio].map(|figure| format!("{figure:.2}"));
        page.row([(*name).to_owned(), cpu, ratio, lost.to_string()]);
    }
    page.print();
}

/// Measures lookups while a large push passes and a large table is swapped, and lookups while the agent
/// has nothing else to do, in turns.
///
/// The echo takes part in neither the push nor the swap: its figures show the influence of the machine.
fn during_push(mesh: &mut Mesh, agent: &Process, echo: &Process, echo_address: SocketAddr) {
    let both = [("bare echo", echo, echo_address), ("agent", agent, mesh.dns)];
    let mut rounds = both.map(|_| (Vec::new(), Vec::new()));
    let mut pushes = 0;
    for _ in 0..ROUNDS {
        for ((_, process, address), (quiet, busy)) in both.iter().zip(&mut rounds) {
            quiet.push(round(process, *address, ROUND));
            mesh.serve(if pushes % 2 == 0 { LARGE } else { OTHER_LARGE });
            pushes += 1;
            busy.push(round(process, *address, ROUND));
            std::thread::sleep(SETTLE);
        }
    }
    let mut page = Table::new(&[
        "while 100 MB of clusters and 100,000 hosts are pushed",
        "p50 µs",
        "idle",
        "p99 µs",
        "idle",
        "of idle",
        "lost",
    ]);
    for ((name, ..), (quiet, busy)) in both.iter().zip(&rounds) {
        let of = |rounds: &[Round], figure: fn(&Round) -> f64| {
            median(rounds.iter().map(figure).collect())
        };
        let pairs = busy.iter().zip(quiet).map(|(busy, quiet)| busy.p99 / quiet.p99);
        let lost: u64 = busy.iter().map(|round| round.lost).sum();
        page.row([
            (*name).to_owned(),
            format!("{:.1}", of(busy, |r| r.p50)),
            format!("{:.1}", of(quiet, |r| r.p50)),
            format!("{:.1}", of(busy, |r| r.p99)),
            format!("{:.1}", of(quiet, |r| r.p99)),
            format!("{:.2}", median(pairs.collect())),
            lost.to_string(),
        ]);
    }
    page.print();
    let [of_echo, of_agent] = rounds.map(|(_, busy)| busy);
    let renewed = of_agent.iter().filter(|round| round.renewed).count();
    let rounds = of_echo.iter().chain(&of_agent);
    let whole = rounds.filter(|round| round.passed >= PUSH as u64).count();
    println!("Within their second: {whole} of {pushes} pushes, {renewed} of {ROUNDS} new tables.");
}

/// The figures of one round of queries.
struct Round {
    cpu: f64,
    p50: f64,
    p99: f64,
    lost: u64,
    /// True if the answers changed, because another name table came into use.
    renewed: bool,
    /// The number of bytes that the Envoy received during the round.
    passed: u64,
}

/// Sends queries at a fixed rate, without waiting for the answer to a query before the next query.
fn round(server: &Process, address: SocketAddr, time: Duration) -> Round {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.connect(address).expect("connected");
    // A large receive buffer, so that answers that this program is too slow to read do not count as lost
    // by the server. Only root may set this size.
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, 16 << 20);
    let sent: Arc<[AtomicU64]> = (0..=u16::MAX).map(|_| AtomicU64::new(0)).collect();
    // A high priority, so that the client does not wait for a processor. The receiving thread inherits
    // it.
    set_nice(-20);
    let start = Instant::now();
    let receiving = {
        let (socket, sent) = (socket.try_clone().expect("a clone"), sent.clone());
        std::thread::spawn(move || receive(&socket, &sent, start))
    };
    let cpu = server.cpu();
    let before = PASSED.load(Ordering::Relaxed);
    let count = RATE * time.as_secs();
    for number in 0..count {
        let due = Duration::from_nanos(number * 1_000_000_000 / RATE);
        // The client does not spin until the query is due, because that would take a processor from the
        // measured server. Late queries are sent without a pause, and the latency of each query is
        // counted from the time when it is sent.
        if let Some(early) = due.checked_sub(start.elapsed()) {
            std::thread::sleep(early);
        }
        let id = (number % (1 << 16)) as u16;
        // 7919 has no divisor in common with HOSTS: the queries visit all hosts, but not in their order.
        let query = query(id, &host(number as usize * 7919 % HOSTS));
        sent[usize::from(id)].store(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        socket.send(&query).expect("sent");
    }
    let passed = PASSED.load(Ordering::Relaxed) - before;
    let (mut latencies, renewed) = receiving.join().expect("answers");
    set_nice(0);
    let cpu = (server.cpu() - cpu).as_secs_f64() * 1e6;
    latencies.sort_by(f64::total_cmp);
    let at = |part: f64| latencies[((latencies.len() - 1) as f64 * part) as usize];
    Round {
        cpu: cpu / latencies.len() as f64,
        p50: at(0.5),
        p99: at(0.99),
        lost: count - latencies.len() as u64,
        renewed,
        passed,
    }
}

/// Returns the command that runs this program in another process.
fn this_program() -> Command {
    Command::new(std::env::current_exe().expect("this program"))
}

/// Sets the thread's nice value. Only root may lower it.
fn set_nice(nice: i32) {
    let _ = setpriority_process(Some(gettid()), nice);
}

/// Lets the thread, and the threads that it starts, run only while no other thread needs the processor.
fn run_at_idle_priority() {
    set_nice(19);
    let thread = gettid().as_raw_pid().to_string();
    // Without chrt, the nice value lets other threads run most of the time, but not always.
    let _ = Command::new("chrt").args(["--idle", "--pid", "0", &thread]).status();
}

fn receive(socket: &UdpSocket, sent: &[AtomicU64], start: Instant) -> (Vec<f64>, bool) {
    let patience = Some(Duration::from_secs(1));
    socket.set_read_timeout(patience).expect("a timeout");
    let mut latencies = Vec::new();
    let (mut version, mut renewed) = (None, false);
    let mut reply = [0; 512];
    while let Ok(length) = socket.recv(&mut reply) {
        assert!(length > 12 && reply[2] & 0x80 != 0, "no answer");
        assert_eq!(reply[3] & 0xf, 0, "a failure");
        let id = usize::from(u16::from_be_bytes([reply[0], reply[1]]));
        let at = sent[id].load(Ordering::Relaxed);
        latencies.push((start.elapsed().as_nanos() as u64 - at) as f64 / 1e3);
        // The last byte of the address in the answer differs between the name tables. An echo always
        // ends with the same byte, because it is the query.
        let last = reply[length - 1];
        renewed |= version.replace(last).is_some_and(|before| before != last);
    }
    (latencies, renewed)
}

/// Runs a control plane that serves one of three snapshots, at first the small one. Each byte on
/// standard input selects the version of the next snapshot. The token and the root certificate for the
/// agent are written to the directory.
async fn control_plane(directory: &Path) {
    // A real control plane runs on another machine and takes no CPU time from the agent.
    run_at_idle_priority();
    let made = [
        snapshot(HOSTS, SMALL, 0),
        snapshot(MANY_HOSTS, LARGE, PUSH),
        snapshot(MANY_HOSTS, OTHER_LARGE, PUSH),
    ];
    let snapshots = watch::Sender::new(made[0].clone());
    let options = Options { snapshots: Some(snapshots.subscribe()), ..Options::default() };
    let istiod = LocalIstiod::start(options).await.expect("a control plane");
    let token = istiod.mint_token("default", "bench", Duration::from_secs(3600));
    let token = token.expect("a token");
    write(directory, "var/run/secrets/tokens/istio-token", &token);
    write(directory, "root.pem", &istiod.root_pem());
    println!("localhost:{}", istiod.address.port());
    std::thread::spawn(move || {
        let mut version = [0];
        while std::io::stdin().read_exact(&mut version).is_ok() {
            snapshots.send_replace(made[usize::from(version[0])].clone());
        }
        // Standard input was closed, because the benchmark has ended.
        std::process::exit(0);
    });
    std::future::pending::<()>().await;
}

/// A control plane in a process of its own, and the address at which its agent answers DNS queries.
struct Mesh {
    _control_plane: Process,
    versions: ChildStdin,
    address: String,
    dns: SocketAddr,
    directory: tempfile::TempDir,
}

impl Mesh {
    fn start() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let search = "search ns1.svc.cluster.local\n";
        write(directory.path(), "resolv.conf", search);
        let mut command = this_program();
        command.arg("control-plane").arg(directory.path());
        // The process keeps the memory of a push for the next push (mallopt(3)). Otherwise the kernel
        // would map and unmap 100 MB in steps of milliseconds that nothing can interrupt.
        let keep = [("MALLOC_MMAP_MAX_", "0"), ("MALLOC_TRIM_THRESHOLD_", "4294967296")];
        command.envs(keep);
        let (control_plane, versions, output) = Process::with_pipes(&mut command);
        let mut address = String::new();
        let read = BufReader::new(output).read_line(&mut address);
        read.expect("a control plane");
        assert!(!address.is_empty(), "the control plane has ended");
        Self {
            _control_plane: control_plane,
            versions,
            address: address.trim().to_owned(),
            dns: free_port(),
            directory,
        }
    }

    fn serve(&mut self, version: u8) {
        self.versions.write_all(&[version]).expect("it runs");
    }

    /// Starts an agent, and an Envoy that only reads, on a thread that ends with the program.
    fn agent(&self) -> Process {
        let settings = [
            ("ISTIO_META_DNS_CAPTURE", "true".to_owned()),
            ("DNS_PROXY_ADDR", self.dns.to_string()),
            ("ISTIO_AGENT_RESOLV_CONF", "resolv.conf".to_owned()),
        ];
        let path = self.directory.path();
        let root = std::fs::read_to_string(path.join("root.pem")).expect("a root");
        let agent = Process::relay_with(path, &self.address, &root, &settings);
        let socket = path.join("etc/istio/proxy/XDS");
        std::thread::spawn(move || block_on(read_everything(&socket)));
        agent
    }
}

/// Subscribes in the way that Envoy does, and only counts the received bytes, because Envoy's work on
/// them is not part of the agent's cost.
async fn read_everything(socket: &Path) {
    let request = |type_url: &str| {
        let node = Node {
            id: "sidecar~127.0.0.1~bench.default~default.svc.cluster.local".into(),
            ..Default::default()
        };
        let request =
            DiscoveryRequest { node: Some(node), type_url: type_url.into(), ..Default::default() };
        framed(&request.encode_to_vec())
    };
    let io = connect(socket).await;
    let mut client = Client::open(io, Protocol::Sotw, request(CLUSTER)).await;
    client.send(request(LISTENER)).await;
    client.read_to_end(&PASSED).await;
}

fn snapshot(hosts: usize, version: u8, clusters: usize) -> Arc<Snapshot> {
    let mut snapshot = Snapshot::default();
    let table = Resource::new("", NAME_TABLE, name_table(hosts, version));
    snapshot.insert("common", table);
    for number in 0..clusters / 2000 {
        let cluster = Resource::new(format!("c{number}"), CLUSTER, vec![version; 2000]);
        snapshot.insert("common", cluster);
    }
    Arc::new(snapshot)
}

fn free_port() -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.local_addr().expect("an address")
}

/// Returns the resident memory of this process in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.and_then(|kib| kib.parse::<usize>().ok()).expect("a number") * 1024
}
