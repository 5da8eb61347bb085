//! Measures the cost of relaying discovery: throughput, CPU time, memory and latency, each compared with
//! a baseline of the same run. `benches/README.md` explains the table.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::arithmetic_side_effects,
    clippy::disallowed_methods,
    clippy::disallowed_types
)]

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use istio_agent::xds::Protocol;
use support::block_on;
use support::peer::{Change, Client, ControlPlane, Shape, request, response};
use support::table::Table;
use support::{Process, connect, median};

/// The number of rounds of the throughput measurement. In each round all relays run one after the other,
/// as new processes. Figures are medians; a ratio of CPU times is the median of the ratios of all
/// rounds.
const ROUNDS: usize = 7;
/// The size of one resource in bytes, typical of a cluster.
const RESOURCE: usize = 2_000;
/// The sizes of a response in bytes.
const SIZES: [usize; 3] = [1_000_000, 10_000_000, 100_000_000];
/// The number of turns of the latency measurement.
const TURNS: usize = 15;
/// The number of rounds of changes.
const CHANGE_ROUNDS: usize = 3;
/// The number of round trips in each turn.
const TRIPS: usize = 500;
/// The number of bytes that a relay passes in a round.
const VOLUME: usize = 600 * 1_000_000;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, role, socket, address, root_pem] = arguments.as_slice() {
        let socket = Path::new(socket);
        return match role.as_str() {
            "pump" => block_on(support::baseline::pump(socket, address, root_pem)),
            "typed" => block_on(support::baseline::typed(socket, address, root_pem)),
            "kept" => block_on(support::last_known_good::relay(socket, address, root_pem)),
            other => panic!("{other}: no such baseline"),
        };
    }
    let control_plane = ControlPlane::start();
    block_on(async {
        changes(&control_plane).await;
        throughput(&control_plane).await;
        let relays = Relays::start(&control_plane);
        // The agent, and the relay that stores the configuration.
        for relay in [0, 3] {
            memory(&relays.all[relay]).await;
        }
        latency(&control_plane, &relays).await;
    });
}

/// The relays, each with its name and its socket.
struct Relays {
    _directory: tempfile::TempDir,
    all: Vec<(&'static str, Process, PathBuf)>,
}

impl Relays {
    fn start(control_plane: &ControlPlane) -> Self {
        // The directory is in memory, like the volume in which a pod stores its configuration.
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let (address, root) = (&control_plane.address, &control_plane.root_pem);
        let agent = Process::relay(directory.path(), address, root);
        let mut all = vec![("agent", agent, directory.path().join("etc/istio/proxy/XDS"))];
        for role in ["pump", "typed", "kept"] {
            let socket = directory.path().join(role);
            let program = std::env::current_exe().expect("this program");
            let mut command = Command::new(program);
            command.arg(role).arg(&socket).arg(address).arg(root);
            all.push((role, Process::start(&mut command), socket));
        }
        Self { _directory: directory, all }
    }
}

/// Measures 30 changes of 1,000 of 3,000 clusters, by the agent and by the relay that stores the configuration.
async fn changes(control_plane: &ControlPlane) {
    const PAUSE: Duration = Duration::from_millis(500);
    let mut table = Table::new(&[
        "30 changes of 1,000 of 3,000",
        "CPU ms",
        "of agent",
        "private MB before",
        "with 3,000",
        "peak",
        "after",
        "written MB",
    ]);
    let mut rows = vec![Vec::<[f64; 7]>::new(); 2];
    // `wchar` of the agent is what both send to their client.
    for _ in 0..CHANGE_ROUNDS {
        let relays = Relays::start(control_plane);
        let (mut agents_cpu, mut agents_bytes) = (0.0, 0.0);
        for (row, relay) in rows.iter_mut().zip([0, 3]) {
            let (_, process, socket) = &relays.all[relay];
            let private = || process.memory("RssAnon") as f64 / 1024.0;
            let before = private();
            let all = Change { revision: 0, first: 0, count: 3000 };
            let mut client =
                Client::open(connect(socket).await, Protocol::Delta, all.request()).await;
            client.read(all.response().len(), None).await;
            client.acknowledge().await;
            client.take_no_listeners().await;
            tokio::time::sleep(12 * PAUSE).await;
            let (with_all, cpu, written) = (private(), process.cpu(), process.written());
            let mut peak = with_all;
            for revision in 1..=30 {
                let change = Change { revision, first: revision % 3 * 1000, count: 1000 };
                client.send(change.request()).await;
                client.read(change.response().len(), None).await;
                client.acknowledge().await;
                peak = peak.max(private());
                tokio::time::sleep(PAUSE).await;
            }
            tokio::time::sleep(12 * PAUSE).await;
            let cpu = (process.cpu() - cpu).as_secs_f64() * 1e3;
            let written = (process.written() - written) as f64 / 1e6;
            if relay == 0 {
                (agents_cpu, agents_bytes) = (cpu, written);
            }
            let stored = written - agents_bytes;
            row.push([cpu, cpu / agents_cpu, before, with_all, peak, private(), stored]);
        }
    }
    for (name, rounds) in ["agent", "kept"].into_iter().zip(rows) {
        let figure = |index: usize| median(rounds.iter().map(|round| round[index]).collect());
        let cells = (0..7).map(|index| format!("{:.2}", figure(index)));
        table.row([name.to_owned()].into_iter().chain(cells));
    }
    table.print();
}

async fn throughput(control_plane: &ControlPlane) {
    let mut table = Table::new(&[
        "relay",
        "protocol",
        "message",
        "MB/s",
        "of direct",
        "CPU s/GB",
        "of pump",
        "of typed",
        "of agent",
    ]);
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        for shape in SIZES.map(|size| Shape::new(size, RESOURCE)) {
            let mut names = Vec::new();
            // One entry for each relay, and the last rate for the direct connection.
            let mut rates = vec![Vec::new(); 5];
            let mut costs = vec![Vec::new(); 4];
            for _ in 0..ROUNDS {
                let relays = Relays::start(control_plane);
                names = relays.all.iter().map(|(name, ..)| *name).collect();
                for (index, (_, process, socket)) in relays.all.iter().enumerate() {
                    let mut pull = Pull::begin(connect(socket).await, protocol, shape).await;
                    let before = process.cpu();
                    rates[index].push(pull.all().await);
                    costs[index].push((process.cpu() - before).as_secs_f64() / VOLUME as f64 * 1e9);
                }
                let io = ControlPlane::dial(&control_plane.address, &control_plane.root_pem);
                let io = io.await.expect("a connection");
                rates[4].push(Pull::begin(io, protocol, shape).await.all().await);
            }
            let direct = median(rates[4].clone());
            for (index, name) in names.into_iter().enumerate() {
                let rate = median(rates[index].clone());
                let of = |other: usize| {
                    let pairs = costs[index].iter().zip(&costs[other]);
                    median(pairs.map(|(cost, other)| cost / other).collect())
                };
                table.row([
                    name.to_owned(),
                    format!("{protocol:?}"),
                    format!("{} MB", shape.bytes / 1_000_000),
                    format!("{rate:.0}"),
                    format!("{:.2}", rate / direct),
                    format!("{:.2}", median(costs[index].clone())),
                    format!("{:.2}", of(1)),
                    format!("{:.2}", of(2)),
                    format!("{:.2}", of(0)),
                ]);
            }
        }
    }
    table.print();
}

/// A stream on which the volume is requested in messages of one shape.
struct Pull {
    client: Client,
    shape: Shape,
    /// The length of a message in bytes.
    length: usize,
}

impl Pull {
    /// Opens the stream and reads a first message, which is not measured.
    async fn begin(
        io: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
        protocol: Protocol,
        shape: Shape,
    ) -> Self {
        let length = response(protocol, shape).len();
        let mut client = Client::open(io, protocol, request(protocol, shape)).await;
        client.read(length, None).await;
        Self { client, shape, length }
    }

    /// Requests the entire volume and returns the rate in MB/s.
    async fn all(&mut self) -> f64 {
        let start = Instant::now();
        for _ in 0..VOLUME / self.shape.bytes {
            self.client.ask(self.shape).await;
            self.client.read(self.length, None).await;
        }
        VOLUME as f64 / start.elapsed().as_secs_f64() / 1e6
    }
}

async fn memory((name, process, socket): &(&str, Process, PathBuf)) {
    let mut table =
        Table::new(&[&format!("memory of {name}"), "protocol", "before MB", "peak MB", "after MB"]);
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        for (what, rate) in [("100 MB read at once", None), ("40 MB at 20 MB/s", Some(20e6))] {
            let size = if rate.is_some() { 40_000_000 } else { 100_000_000 };
            let shape = Shape::new(size, RESOURCE);
            let length = response(protocol, shape).len();
            let before = process.memory("VmRSS");
            process.reset_peak();
            let mut client =
                Client::open(connect(socket).await, protocol, request(protocol, shape)).await;
            client.read(length, rate).await;
            let cells = [before, process.memory("VmHWM"), process.memory("VmRSS")];
            let cells = cells.map(|kib| format!("{:.1}", kib as f64 / 1024.0));
            table.row([what.to_owned(), format!("{protocol:?}")].into_iter().chain(cells));
        }
    }
    table.print();
}

/// Measures the relays in short turns, each on a new connection, because the kernel's placement of the
/// processes makes more of a difference than a relay.
async fn latency(control_plane: &ControlPlane, relays: &Relays) {
    let mut times = vec![Vec::new(); relays.all.len() + 1];
    for _ in 0..TURNS {
        let io = ControlPlane::dial(&control_plane.address, &control_plane.root_pem);
        times[0].push(round_trip(io.await.expect("a connection")).await);
        for (index, (_, _, socket)) in relays.all.iter().enumerate() {
            times[index + 1].push(round_trip(connect(socket).await).await);
        }
    }
    let mut table = Table::new(&["2 KB round trip", "µs", "over direct", "least", "most"]);
    let direct = median(times[0].clone());
    let names = ["direct"].into_iter().chain(relays.all.iter().map(|(name, ..)| *name));
    for (name, times) in names.zip(times) {
        let time = median(times.clone());
        let (least, most) = times
            .iter()
            .fold((f64::MAX, 0_f64), |(least, most), time| (least.min(*time), most.max(*time)));
        table.row([
            name.to_owned(),
            format!("{time:.0}"),
            format!("{:+.0}", time - direct),
            format!("{least:.0}"),
            format!("{most:.0}"),
        ]);
    }
    table.print();
}

/// Returns the median time from a request to the complete response, in microseconds.
async fn round_trip(
    io: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
) -> f64 {
    let protocol = Protocol::Delta;
    let shape = Shape::new(2_000, RESOURCE);
    let length = response(protocol, shape).len();
    let mut client = Client::open(io, protocol, request(protocol, shape)).await;
    client.read(length, None).await;
    let mut times = Vec::new();
    for _ in 0..TRIPS {
        let start = Instant::now();
        client.ask(shape).await;
        client.read(length, None).await;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    median(times)
}
