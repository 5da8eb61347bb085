//! The agents of the fleet, each a process with a directory of its own.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use local_istiod::LocalIstiod;
use prost_types::Timestamp;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::front::Front;
use super::support::table::Table;
use super::support::{self, Process, median, write};
use super::{ENVOY, JITTER};

/// The status port of the first agent; the ports of the other agents follow. The ports are below the
/// ephemeral ports of the kernel.
const STATUS_PORT: usize = 20_000;
/// The admin port of the first agent's Envoy; the ports of the other Envoys follow.
const ADMIN_PORT: usize = 25_000;

/// The running agents, which are killed when dropped.
#[derive(Default)]
pub(super) struct Agents {
    processes: Vec<Process>,
    _directory: Option<tempfile::TempDir>,
}

impl Agents {
    /// Starts the agents as fast as the machine can.
    pub(super) async fn start(size: usize, front: &Front, istiod: &LocalIstiod) -> Self {
        let place = tempfile::tempdir().expect("a directory");
        let mut processes = Vec::new();
        for number in 0..size {
            let directory = place.path().join(number.to_string());
            let token = istiod.mint_token("default", &name(number), Duration::from_secs(3600));
            let token = token.expect("a token");
            write(&directory, "var/run/secrets/tokens/istio-token", &token);
            processes.push(start(&directory, number, front, &istiod.root_pem()));
            tokio::task::yield_now().await;
        }
        Self { processes, _directory: Some(place) }
    }

    /// Returns the sum of the dials that the agents have counted. An agent that does not serve its page
    /// counts as zero.
    pub(super) async fn dials(&self) -> u64 {
        let mut sum = 0;
        for number in 0..self.processes.len() {
            sum += dials(number).await.unwrap_or(0);
        }
        sum
    }

    /// Returns the certificates of the agents that report one. Their times count from the call.
    pub(super) async fn certificates(&self) -> BTreeMap<usize, Certificate> {
        let (mut certificates, now) = (BTreeMap::new(), SystemTime::now());
        for number in 0..self.processes.len() {
            let shown = page(number, "/debug/certs").await;
            if let Some(certificate) = shown.and_then(|page| certificate(&page, now)) {
                certificates.insert(number, certificate);
            }
        }
        certificates
    }

    pub(super) fn print_memory(&self) {
        let mut table = Table::new(&["memory of an agent", "median MB", "most"]);
        for (what, key) in [
            ("resident", "Rss:"),
            ("with its part of shared pages", "Pss:"),
            ("anonymous", "Anonymous:"),
        ] {
            let of = |agent: &Process| agent.memory_map(key) as f64 / 1024.0;
            let all: Vec<_> = self.processes.iter().map(of).collect();
            let most = all.iter().copied().fold(0.0, f64::max);
            let figures = [median(all), most].map(|figure| format!("{figure:.1}"));
            table.row([what.to_owned()].into_iter().chain(figures));
        }
        table.print();
    }
}

/// Returns the name of an agent's pod and service account.
fn name(number: usize) -> String {
    format!("a{number}")
}

fn start(directory: &Path, number: usize, front: &Front, root_pem: &str) -> Process {
    let mut command = support::agent(directory, root_pem);
    let (address, status, admin) =
        (front.address(number), STATUS_PORT + number, ADMIN_PORT + number);
    let envoy = std::env::current_exe().expect("this program");
    let envoy = envoy.display();
    command
        .envs(["POD_NAME", "SERVICE_ACCOUNT", ENVOY].map(|variable| (variable, name(number))))
        .env("ISTIOD_SAN", "localhost")
        .env("SECRET_GRACE_PERIOD_RATIO_JITTER", JITTER.to_string())
        .env(
            "PROXY_CONFIG",
            format!(
                "{{discoveryAddress: '{address}', statusPort: {status}, proxyAdminPort: {admin}, \
                 binaryPath: '{envoy}'}}"
            ),
        )
        .stderr(Stdio::null());
    Process::start(&mut command)
}

/// Returns the admin port of the Envoy whose agent has this name.
pub(super) fn admin_port(name: &str) -> u16 {
    let number = name[1..].parse::<usize>().expect("a number");
    u16::try_from(ADMIN_PORT + number).expect("a port")
}

/// A certificate of an agent: the times to its renewal and to its end.
#[derive(Clone, Copy)]
pub(super) struct Certificate {
    pub(super) due: Duration,
    pub(super) end: Duration,
}

fn certificate(page: &Value, now: SystemTime) -> Option<Certificate> {
    let shown = &page["secrets"][0];
    let due: Timestamp = shown["next_renewal"].as_str()?.parse().ok()?;
    let due = SystemTime::try_from(due).ok()?;
    let end = shown["certificates"][0]["remaining_seconds"].as_f64()?;
    Some(Certificate {
        due: due.duration_since(now).unwrap_or_default(),
        end: Duration::try_from_secs_f64(end).ok()? + now.elapsed().unwrap_or_default(),
    })
}

/// Returns the number of dials that the agent has counted; None if the agent does not report it.
async fn dials(number: usize) -> Option<u64> {
    page(number, "/debug/istiod").await?["dials"].as_u64()
}

/// Returns a page of an agent; None if the agent does not serve it.
async fn page(number: usize, path: &str) -> Option<Value> {
    let port = u16::try_from(STATUS_PORT + number).ok()?;
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
}
