//! Publishes the kernel's statistics of this process, under the names Prometheus' clients use.
//!
//! The names have the agent's prefix, like pilot-agent's, because an application's page has the same names
//! without one. The statistics are read for each scrape; one the kernel does not report is left out.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use super::{Kind, Registry};

use crate::files::regular_file;

/// The ticks of a second in `/proc`: `USER_HZ`, a constant of the kernel's interface.
const TICKS: f64 = 100.0;

type Value = fn() -> Option<f64>;

/// Name, help and value. The name of a counter ends with `_total`.
const FAMILIES: [(&str, &str, Value); 9] = [
    (
        "istio_agent_process_cpu_seconds_total",
        "Total user and system CPU time spent in seconds.",
        cpu_seconds,
    ),
    ("istio_agent_process_open_fds", "Number of open file descriptors.", open_files),
    ("istio_agent_process_max_fds", "Maximum number of open file descriptors.", || {
        Some(limit(Resource::Nofile))
    }),
    ("istio_agent_process_virtual_memory_bytes", "Virtual memory size in bytes.", || {
        Some(parse_size(&read("self/status")?, "VmSize:")? as f64)
    }),
    (
        "istio_agent_process_virtual_memory_max_bytes",
        "Maximum amount of virtual memory available in bytes.",
        || Some(limit(Resource::As)),
    ),
    ("istio_agent_process_resident_memory_bytes", "Resident memory size in bytes.", || {
        Some(parse_size(&read("self/status")?, "VmRSS:")? as f64)
    }),
    (
        "istio_agent_process_start_time_seconds",
        "Start time of the process since unix epoch in seconds.",
        || start_time(&read("self/stat")?, &read("stat")?),
    ),
    (
        "istio_agent_process_network_receive_bytes_total",
        "Number of bytes received by the process over the network.",
        || network(&read("self/net/netstat")?, "InOctets"),
    ),
    (
        "istio_agent_process_network_transmit_bytes_total",
        "Number of bytes sent by the process over the network.",
        || network(&read("self/net/netstat")?, "OutOctets"),
    ),
];

pub(crate) fn publish(registry: &Registry) {
    for (name, help, value) in FAMILIES {
        let kind = if name.ends_with("_total") { Kind::Counter } else { Kind::Gauge };
        registry.computed(name, help, kind, &[], move |series| {
            if let Some(value) = value() {
                series(&[], value);
            }
        });
    }
}

fn read(name: &str) -> Option<String> {
    regular_file::read_kernel(Path::new("/proc").join(name)).ok()
}

fn cpu_seconds() -> Option<f64> {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    Some(spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9)
}

/// Counts open files, without the descriptor that lists them.
#[expect(clippy::disallowed_methods, reason = "procfs")]
fn open_files() -> Option<f64> {
    Some(fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1) as f64)
}

/// Returns a resource limit. Without one, it is the greatest number, as in Prometheus' clients.
fn limit(resource: Resource) -> f64 {
    getrlimit(resource).current.unwrap_or(u64::MAX) as f64
}

/// Reads a size in a `status` file of `/proc`, in bytes.
pub(crate) fn parse_size(status: &str, name: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Computes the start of a process from its `stat` file and the machine's, in seconds since 1970.
fn start_time(process: &str, machine: &str) -> Option<f64> {
    // The program's name is in parentheses and may contain any character.
    let (_, fields) = process.rsplit_once(')')?;
    let after_boot: u64 = fields.split_whitespace().nth(19)?.parse().ok()?;
    let boot = machine.lines().find_map(|line| line.strip_prefix("btime "))?;
    Some(boot.trim().parse::<u64>().ok()? as f64 + after_boot as f64 / TICKS)
}

/// Reads a value of the two `IpExt` lines, which have names and values.
fn network(netstat: &str, name: &str) -> Option<f64> {
    let mut lines = netstat.lines().filter(|line| line.starts_with("IpExt:"));
    let names = lines.next()?.split_whitespace();
    let values = lines.next()?.split_whitespace();
    let (_, value) = names.zip(values).find(|(found, _)| *found == name)?;
    Some(value.parse::<u64>().ok()? as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_proc_are_parsed() {
        let status = "Name:\tVmRSS: x\nVmSize:\t  8192 kB\nVmRSS:\t    12 kB\n";
        assert_eq!(parse_size(status, "VmSize:"), Some(8_388_608));
        assert_eq!(parse_size(status, "VmRSS:"), Some(12_288));
        let fields = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 250 20 21";
        let stat = format!("7 (a) (b)) {fields}");
        assert_eq!(start_time(&stat, "cpu 1\nbtime 1000\n"), Some(1002.5));
        let netstat = "TcpExt: A\nTcpExt: 1\nIpExt: X InOctets OutOctets\nIpExt: 1 20 30\n";
        assert_eq!(network(netstat, "InOctets"), Some(20.0));
        assert_eq!(network(netstat, "OutOctets"), Some(30.0));
    }

    #[test]
    fn values_missing_in_proc_are_omitted() {
        for text in ["", "VmRSS:", "VmRSS: many kB", "VmRSS: 1", "IpExt:", ")"] {
            assert_eq!(parse_size(text, "VmRSS:"), None, "{text:?}");
            assert_eq!(start_time(text, text), None, "{text:?}");
            assert_eq!(network(text, "InOctets"), None, "{text:?}");
        }
        assert_eq!(network("IpExt: InOctets\nIpExt: x\n", "InOctets"), None);
        assert_eq!(start_time("1 (x) S 1", "btime 1\n"), None);
    }

    #[test]
    fn every_figure_of_this_process_is_rendered() {
        let registry = Registry::default();
        publish(&registry);
        let page = registry.render();
        for (name, ..) in FAMILIES {
            let value = page.lines().find_map(|line| {
                let value = line.strip_prefix(name)?.strip_prefix(' ')?;
                value.parse::<f64>().ok()
            });
            assert!(value.is_some_and(|value| value >= 0.0), "{name} in\n{page}");
        }
    }
}
