//! Reads the usage and the limits of memory, tasks, open files and local ports. Both versions of control groups are
//! supported.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use crate::files::regular_file;

/// The states of a TCP socket in proc_net(5) that take no local port of the range: LISTEN, and CLOSE.
const PORTLESS: [u8; 2] = [LISTEN, 0x07];
pub(crate) const LISTEN: u8 = 0x0A;
/// Limits of version 1 of control groups from which there is none.
const UNLIMITED: u64 = 1 << 60;

/// How much of something limited is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub used: u64,
    pub limit: u64,
}

impl Usage {
    /// Returns true if at least 95 % are in use.
    pub(crate) fn is_nearly_all(self) -> bool {
        self.used >= self.limit - self.limit / 20
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.used, self.limit)
    }
}

/// Returns what `read` finds in the directory of this process's control group: of version 2, or else of the controller
/// of version 1. The second argument of `read` is the version. `root` is `/` outside of tests.
pub(crate) fn in_control_group<T>(
    root: &Path,
    controller: &str,
    read: impl Fn(&Path, u8) -> Option<T>,
) -> Option<T> {
    let groups = regular_file::read_kernel(root.join("proc/self/cgroup")).ok()?;
    // The list of controllers is empty in version 2. A machine may have both versions.
    [("", "", 2), (controller, controller, 1)].into_iter().find_map(
        |(controllers, mount, version)| {
            let path = groups.lines().find_map(|line| {
                let (found, path) = line.split_once(':')?.1.split_once(':')?;
                if found == controllers { Some(path.trim_start_matches('/')) } else { None }
            })?;
            // The path may be that on the machine, while the container's own group is mounted at the top.
            let top = root.join("sys/fs/cgroup").join(mount);
            [top.join(path), top].into_iter().find_map(|directory| read(&directory, version))
        },
    )
}

/// Returns the memory of the control group in bytes, without pages that the kernel can drop. Returns None without a limit.
pub(crate) fn memory(root: &Path) -> Option<Usage> {
    in_control_group(root, "memory", |directory, version| {
        let (used, limit, dropped) = match version {
            2 => ("memory.current", "memory.max", "inactive_file "),
            _ => ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file "),
        };
        let dropped: u64 = regular_file::read_kernel(directory.join("memory.stat"))
            .ok()?
            .lines()
            .find_map(|line| line.strip_prefix(dropped)?.parse().ok())?;
        Some(Usage {
            used: number(&directory.join(used))?.saturating_sub(dropped),
            limit: number(&directory.join(limit)).filter(|limit| *limit < UNLIMITED)?,
        })
    })
}

/// Returns the number of processes and threads of the control group. Returns None without a limit.
pub(crate) fn tasks(root: &Path) -> Option<Usage> {
    in_control_group(root, "pids", |directory, _| {
        Some(Usage {
            used: number(&directory.join("pids.current"))?,
            limit: number(&directory.join("pids.max"))?,
        })
    })
}

/// Returns the number of open files of a process. Returns None if this process may not list them.
#[expect(clippy::disallowed_methods, reason = "procfs")]
pub(crate) fn open_files(root: &Path, pid: i32) -> Option<Usage> {
    let process = root.join(format!("proc/{pid}"));
    let used = fs::read_dir(process.join("fd")).ok()?.count() as u64;
    let limits = regular_file::read_kernel(process.join("limits")).ok()?;
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    Some(Usage { used, limit: limit.split_whitespace().next()?.parse().ok()? })
}

/// Returns the number of local TCP ports in use, of the range for outgoing connections.
pub(crate) fn local_ports(root: &Path) -> Option<Usage> {
    let range = root.join("proc/sys/net/ipv4/ip_local_port_range");
    let range = regular_file::read_kernel(range).ok()?;
    let mut ends = range.split_whitespace().map(str::parse::<u16>);
    let first = ends.next()?.ok()?;
    let last = ends.next()?.ok()?;
    let ports: HashSet<_> = sockets(root)
        .into_iter()
        .filter(|socket| !PORTLESS.contains(&socket.state))
        .map(|socket| socket.local.port())
        .filter(|port| (first..=last).contains(port))
        .collect();
    Some(Usage { used: ports.len() as u64, limit: u64::from(last.checked_sub(first)?) + 1 })
}

/// A TCP socket of the network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Socket {
    pub local: SocketAddr,
    pub remote: SocketAddr,
    /// The state's number in proc_net(5).
    pub state: u8,
    pub user: u32,
}

/// Lists the TCP sockets of the network namespace. IPv4 addresses of IPv6 sockets are IPv4.
pub(crate) fn sockets(root: &Path) -> Vec<Socket> {
    let lists = ["tcp", "tcp6"].map(|list| {
        regular_file::read_kernel(root.join("proc/self/net").join(list)).unwrap_or_default()
    });
    lists.iter().flat_map(|list| list.lines().filter_map(socket)).collect()
}

/// Parses a line of a list in the format of proc_net(5).
fn socket(line: &str) -> Option<Socket> {
    let mut words = line.split_whitespace().skip(1);
    let [local, remote] = [address(words.next()?)?, address(words.next()?)?];
    let state = u8::from_str_radix(words.next()?, 16).ok()?;
    Some(Socket { local, remote, state, user: words.nth(3)?.parse().ok()? })
}

/// Parses an address: the words of its bytes as numbers of this machine, and the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (words, port) = text.split_once(':')?;
    let words = words.as_bytes().chunks(8).map(|word| {
        let number = u32::from_str_radix(str::from_utf8(word).ok()?, 16).ok()?;
        Some(number.to_ne_bytes())
    });
    let bytes = words.collect::<Option<Vec<_>>>()?.concat();
    let ip = match bytes.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
        _ => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?).to_canonical(),
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

/// Reads a number. Returns None for `max`.
fn number(path: &Path) -> Option<u64> {
    regular_file::read_kernel(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a root directory with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            fs::write(path, text).expect("written");
        }
        root
    }

    #[test]
    fn memory_and_tasks_are_those_of_the_control_group_of_either_version() {
        const MIB: u64 = 1 << 20;
        for (files, memory_expected, tasks_expected) in [
            (
                &[
                    ("proc/self/cgroup", "0::/\n"),
                    ("sys/fs/cgroup/memory.current", "104857600\n"),
                    ("sys/fs/cgroup/memory.max", "104857600\n"),
                    ("sys/fs/cgroup/memory.stat", "anon 5\ninactive_file 1048576\n"),
                    ("sys/fs/cgroup/pids.current", "96\n"),
                    ("sys/fs/cgroup/pids.max", "100\n"),
                ][..],
                Some(Usage { used: 99 * MIB, limit: 100 * MIB }),
                Some(Usage { used: 96, limit: 100 }),
            ),
            (
                &[
                    ("proc/self/cgroup", "4:memory:/pod\n3:pids:/elsewhere\n0::/\n"),
                    ("sys/fs/cgroup/memory/pod/memory.usage_in_bytes", "1048576\n"),
                    ("sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "2097152\n"),
                    ("sys/fs/cgroup/memory/pod/memory.stat", "total_inactive_file 0\n"),
                    ("sys/fs/cgroup/pids/pids.current", "7\n"),
                    ("sys/fs/cgroup/pids/pids.max", "max\n"),
                ],
                Some(Usage { used: MIB, limit: 2 * MIB }),
                None,
            ),
            (
                &[
                    ("proc/self/cgroup", "4:memory:/\n"),
                    ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n"),
                    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
                    ("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 0\n"),
                ],
                None,
                None,
            ),
            (&[], None, None),
        ] {
            let root = root(files);
            assert_eq!(memory(root.path()), memory_expected);
            assert_eq!(tasks(root.path()), tasks_expected);
        }
    }

    #[test]
    fn ports_of_connections_are_counted_once_and_those_of_listeners_not() {
        let tcp = "  sl  local_address rem_address   st\n\
                   0: 0100007F:8001 0100007F:1F90 01 0 0 0 7 0\n\
                   1: 0100007F:8001 0100007F:1F91 06 0 0 0 0 0\n\
                   2: 00000000:8002 00000000:0000 0A 0 0 0 0 0\n\
                   3: 0100007F:0050 0100007F:8003 01 0 0 0 0 0\n";
        let loopback = "00000000000000000000000001000000";
        let mapped = "0000000000000000FFFF00000700000A";
        let tcp6 = format!(
            " 0: {loopback}:8004 {loopback}:1F90 01 0 0 0 0 0\n 1: {mapped}:50 {mapped}:51 08 0 0 0 9 0\n"
        );
        let root = root(&[
            ("proc/sys/net/ipv4/ip_local_port_range", "32768\t32771\n"),
            ("proc/self/net/tcp", tcp),
            ("proc/self/net/tcp6", &tcp6),
        ]);
        let sockets = sockets(root.path());
        let texts = sockets.iter().map(|it| {
            let Socket { local, remote, state, user } = it;
            format!("{local} {remote} {state} {user}")
        });
        let texts: Vec<_> = texts.collect();
        assert_eq!(texts[0], "127.0.0.1:32769 127.0.0.1:8080 1 7");
        assert_eq!(texts[4..], ["[::1]:32772 [::1]:8080 1 0", "10.0.0.7:80 10.0.0.7:81 8 9"]);
        assert_eq!(local_ports(root.path()), Some(Usage { used: 1, limit: 4 }));
    }

    #[test]
    fn open_files_are_those_of_the_process() {
        let own = i32::try_from(std::process::id()).expect("an id");
        let found = open_files(Path::new("/"), own).expect("own files");
        assert!((3..found.limit).contains(&found.used) && !found.is_nearly_all(), "{found}");
        assert_eq!(open_files(Path::new("/"), i32::MAX), None);
    }
}
