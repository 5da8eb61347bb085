//! What a DNS lookup costs and how long it takes, beside a bare UDP echo of the same build, and what
//! large name tables cost. `benches/README.md` says how to read the tables.
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

/// Queries a second, and how long they are sent.
const RATE: u64 = 20_000;
const ROUND: Duration = Duration::from_secs(1);
/// Rounds of each kind, taking turns; the median counts, of ratios that of each turn's. Many short
/// ones, so that what else the machine does falls on all alike.
const ROUNDS: usize = 15;
/// What is left of a push that takes longer than a round is over after this.
const SETTLE: Duration = Duration::from_millis(500);
const HOSTS: usize = 10_000;
const MANY_HOSTS: usize = 100_000;
/// Versions of what the control plane serves: few names, and many with clusters.
const SMALL: u8 = 0;
const LARGE: u8 = 1;
const OTHER_LARGE: u8 = 2;
/// Bytes of a push.
const PUSH: usize = 100 * 1024 * 1024;
/// Bytes of pushes that Envoy has got.
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
    let echo = Process::start(own().args(["echo", &echo_address.to_string()]));
    wait_for(echo_address);
    wait_for(mesh.dns);
    if all {
        apart(&[&agent, &echo]);
        lookups(&agent, mesh.dns, &echo, echo_address);
        beside_others(&mesh, &agent, &echo, echo_address);
        together(&[&agent, &echo]);
    }
    during_push(&mut mesh, &agent, &echo, echo_address);
}

/// Gives the client one processor and the servers the other: where the kernel would place them from
/// moment to moment costs more than a lookup.
fn apart(servers: &[&Process]) {
    pin(gettid(), Some(0));
    servers.iter().for_each(|server| server.pin(Some(1)));
}

fn together(servers: &[&Process]) {
    pin(gettid(), None);
    servers.iter().for_each(|server| server.pin(None));
}

/// A server that sends back what it gets, with the runtime, the task and the calls the agent uses.
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

/// Whether all that had come is sent back.
fn drain_echo(socket: &UdpSocket, buffer: &mut [u8]) -> bool {
    for _ in 0..64 {
        match socket.recv_from(buffer) {
            Ok((length, client)) => {
                buffer[2] |= 0x80;
                // A client that is gone misses nothing.
                let _ = socket.send_to(&buffer[..length], client);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
            Err(error) => panic!("nothing can be received: {error}"),
        }
    }
    false
}

/// Time and memory of an index over many hosts.
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
    page.row([
        "message, MB".to_owned(),
        format!("{:.1}", encoded.len() as f64 / 1e6),
    ]);
    page.row([
        "index and message, MB".to_owned(),
        format!("{:.1}", memory as f64 / 1e6),
    ]);
    page.row(["build, ms".to_owned(), format!("{:.0}", median(times))]);
    page.print();
}

fn lookups(agent: &Process, dns: SocketAddr, echo: &Process, echo_address: SocketAddr) {
    let mut page = Table::new(&[
        "20,000 queries/s",
        "CPU µs/query",
        "p50 µs",
        "p99 µs",
        "lost",
    ]);
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
        median(
            pairs
                .map(|(agent, echo)| figure(agent) / figure(echo))
                .collect(),
        )
    };
    let ratios = [of(|r| r.cpu), of(|r| r.p50), of(|r| r.p99)];
    let [cpu, p50, p99] = ratios.map(|ratio| format!("{ratio:.2}"));
    page.row(["of echo".to_owned(), cpu, p50, p99, String::new()]);
    page.print();
}

/// Asked by dnsperf, in turns, where it is installed; other servers with the same names as well.
fn beside_others(mesh: &Mesh, agent: &Process, echo: &Process, echo_address: SocketAddr) {
    if !dnsperf::has("dnsperf") {
        println!("\nThere is no dnsperf: other servers are left out.");
        return;
    }
    let place = mesh.directory.path();
    let names: Vec<_> = (0..HOSTS)
        .map(|number| (host(number), ip(number, 0)))
        .collect();
    let lines: Vec<_> = names
        .iter()
        .map(|(name, _)| format!("{name} A\n"))
        .collect();
    write(place, "names", &lines.concat());
    let others = [
        ("unbound", dnsperf::unbound as fn(&_, _, &_) -> Process),
        ("dnsmasq", dnsperf::dnsmasq),
    ];
    let mut started = Vec::new();
    for (name, start) in others {
        if dnsperf::has(name) {
            let address = free_port();
            let server = start(place, address, &names);
            wait_for(address);
            server.pin(Some(1));
            started.push((name, server, address));
        }
    }
    let ours = [
        ("bare echo", echo, echo_address),
        ("agent", agent, mesh.dns),
    ];
    let others = started
        .iter()
        .map(|(name, server, address)| (*name, server, *address));
    let servers: Vec<_> = ours.into_iter().chain(others).collect();
    let mut asked: Vec<Vec<_>> = servers.iter().map(|_| Vec::new()).collect();
    for _ in 0..ROUNDS {
        for ((_, server, address), asked) in servers.iter().zip(&mut asked) {
            asked.push(dnsperf::ask(
                server,
                *address,
                &place.join("names"),
                RATE,
                1,
            ));
        }
    }
    let mut page = Table::new(&[
        "dnsperf, 20,000 queries/s",
        "CPU µs/query",
        "of echo",
        "lost",
    ]);
    let cpu = |asked: &[dnsperf::Asked]| asked.iter().map(|a| a.cpu_per_query).collect::<Vec<_>>();
    let of_echo = cpu(&asked[0]);
    for ((name, ..), asked) in servers.iter().zip(&asked) {
        let cpu = cpu(asked);
        let lost: u64 = asked.iter().map(|asked| asked.lost).sum();
        let ratio = median(
            cpu.iter()
                .zip(&of_echo)
                .map(|(cpu, echo)| cpu / echo)
                .collect(),
        );
        let [cpu, ratio] = [median(cpu), ratio].map(|figure| format!("{figure:.2}"));
        page.row([(*name).to_owned(), cpu, ratio, lost.to_string()]);
    }
    page.print();
}

/// Lookups while a large push passes and a large table is swapped, and while nothing does, in turns.
///
/// The echo has nothing to do with either; what it shows is the machine.
fn during_push(mesh: &mut Mesh, agent: &Process, echo: &Process, echo_address: SocketAddr) {
    let both = [
        ("bare echo", echo, echo_address),
        ("agent", agent, mesh.dns),
    ];
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
        let pairs = busy
            .iter()
            .zip(quiet)
            .map(|(busy, quiet)| busy.p99 / quiet.p99);
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

/// What one round of queries showed.
struct Round {
    cpu: f64,
    p50: f64,
    p99: f64,
    lost: u64,
    /// Whether the answers changed, as they do with another name table.
    renewed: bool,
    /// What Envoy got in that time, in bytes.
    passed: u64,
}

/// Sends queries at a fixed rate and waits for no answer before the next.
fn round(server: &Process, address: SocketAddr, time: Duration) -> Round {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.connect(address).expect("connected");
    // What this program is too slow for is not the server's loss. Only root may have as much.
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, 16 << 20);
    let sent: Arc<[AtomicU64]> = (0..=u16::MAX).map(|_| AtomicU64::new(0)).collect();
    // The client does not wait for a processor itself; threads inherit that.
    urgency(-20);
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
        // To spin until then would take a processor from what is measured. What is late catches up,
        // and each query's time begins when it leaves.
        if let Some(early) = due.checked_sub(start.elapsed()) {
            std::thread::sleep(early);
        }
        let id = (number % (1 << 16)) as u16;
        let query = query(id, &host(number as usize * 7919 % HOSTS));
        sent[usize::from(id)].store(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        socket.send(&query).expect("sent");
    }
    let passed = PASSED.load(Ordering::Relaxed) - before;
    let (mut latencies, renewed) = receiving.join().expect("answers");
    urgency(0);
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

/// This program, in a process of its own.
fn own() -> Command {
    Command::new(std::env::current_exe().expect("this program"))
}

/// Sets the thread's nice value. Only root may have it low.
fn urgency(nice: i32) {
    let _ = setpriority_process(Some(gettid()), nice);
}

/// Has the thread, and those it starts, run while nothing else wants to.
fn behind_everything() {
    urgency(19);
    let thread = gettid().as_raw_pid().to_string();
    // Where there is no chrt, it stands aside for most of the time only.
    let _ = Command::new("chrt")
        .args(["--idle", "--pid", "0", &thread])
        .status();
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
        // Where an address ends, which says which table it is from; an echo ends as its question.
        let last = reply[length - 1];
        renewed |= version.replace(last).is_some_and(|before| before != last);
    }
    (latencies, renewed)
}

/// Serves one of three snapshots, the small one until told otherwise: a byte on standard input is
/// the version of the next. What the agent needs to know of it is in the directory.
async fn control_plane(directory: &Path) {
    // In truth it is on another machine.
    behind_everything();
    let made = [
        snapshot(HOSTS, SMALL, 0),
        snapshot(MANY_HOSTS, LARGE, PUSH),
        snapshot(MANY_HOSTS, OTHER_LARGE, PUSH),
    ];
    let snapshots = watch::Sender::new(made[0].clone());
    let options = Options {
        snapshots: Some(snapshots.subscribe()),
        ..Options::default()
    };
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
        // The bench has ended.
        std::process::exit(0);
    });
    std::future::pending::<()>().await;
}

/// A control plane in a process of its own, and where its agent answers DNS.
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
        let mut command = own();
        command.arg("control-plane").arg(directory.path());
        // It keeps the memory of a push for the next: the kernel gives and takes 100 MB in stretches
        // of milliseconds that nothing can interrupt (mallopt(3)).
        let keep = [
            ("MALLOC_MMAP_MAX_", "0"),
            ("MALLOC_TRIM_THRESHOLD_", "4294967296"),
        ];
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

    /// An agent with an Envoy that reads what it is sent, on a thread that ends with the program.
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

/// Subscribes as Envoy does, and only counts what comes: what Envoy makes of it is not the agent's.
async fn read_everything(socket: &Path) {
    let request = |type_url: &str| {
        let node = Node {
            id: "sidecar~127.0.0.1~bench.default~default.svc.cluster.local".into(),
            ..Default::default()
        };
        let request = DiscoveryRequest {
            node: Some(node),
            type_url: type_url.into(),
            ..Default::default()
        };
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

/// Resident memory of this process, in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.and_then(|kib| kib.parse::<usize>().ok())
        .expect("a number")
        * 1024
}
