//! Finds the process that listens on a TCP port, for errors of a port that is taken.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::files::regular_file;

/// The kernel's lists of TCP sockets in this network namespace.
const LISTS: [&str; 2] = ["/proc/self/net/tcp", "/proc/self/net/tcp6"];

/// Describes the process that listens on `port`, by pid and name if this process may read them. Returns None if no
/// process listens.
#[expect(clippy::disallowed_methods, reason = "procfs")]
pub(crate) fn holder(port: u16) -> Option<String> {
    let lists = LISTS.map(regular_file::read_kernel);
    let socket = lists.iter().flatten().find_map(|list| socket(list, port))?;
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let Some(pid) = pids.find(|pid| has_open(*pid, &socket)) else {
        return Some("another process listens on it".to_owned());
    };
    let name = regular_file::read_kernel(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some(format!("process {pid} ({}) listens on it", name.trim()))
}

/// Returns true if a process other than this one and `own` listens on a TCP port. If the files of an own process cannot
/// be listed, its sockets count as sockets of other processes.
pub(crate) fn others_listen(own: &[u32]) -> bool {
    let files: HashSet<_> =
        own.iter().chain([&std::process::id()]).flat_map(|pid| links(*pid)).collect();
    let lists = LISTS.map(regular_file::read_kernel);
    let mut sockets = lists.iter().flatten().flat_map(|list| listening(list));
    sockets.any(|(_, socket)| !files.contains(Path::new(&socket)))
}

/// Finds the socket that listens on `port` in a list in the format of proc_net(5).
fn socket(list: &str, port: u16) -> Option<String> {
    let end = format!(":{port:04X}");
    listening(list).find_map(|(address, socket)| address.ends_with(&end).then_some(socket))
}

/// Returns addresses and sockets in the state LISTEN, which is 0A.
fn listening(list: &str) -> impl Iterator<Item = (&str, String)> {
    list.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let address = words.nth(1)?;
        let is_listening = words.nth(1)? == "0A";
        let inode = words.nth(5)?;
        is_listening.then(|| (address, format!("socket:[{inode}]")))
    })
}

fn has_open(pid: u32, socket: &str) -> bool {
    links(pid).any(|link| link.as_os_str() == socket)
}

/// Returns what the open files of a process lead to.
#[expect(clippy::disallowed_methods, reason = "procfs")]
fn links(pid: u32) -> impl Iterator<Item = PathBuf> {
    let listed = fs::read_dir(format!("/proc/{pid}/fd"));
    listed.into_iter().flatten().flatten().flat_map(|file| fs::read_link(file.path()))
}

/// Adds the process that listens on the port to an error of Envoy.
pub(crate) fn explained(error: String) -> String {
    let holder = taken(&error).and_then(holder);
    holder.map_or(error.clone(), |holder| format!("{error}; {holder}"))
}

/// Returns the port of an error of Envoy such as `cannot bind '127.0.0.1:15000': Address already in use`.
pub(crate) fn taken(error: &str) -> Option<u16> {
    let (before, _) = error.split_once("': Address already in use")?;
    before.rsplit(':').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_that_listens_on_a_port_is_named() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = std::net::TcpListener::bind(address).unwrap();
            let port = listener.local_addr().unwrap().port();
            // A child process that another test has just forked also holds the socket, until it executes its program.
            // `holder` may therefore name another process than this one.
            let found = holder(port).unwrap();
            assert!(found.starts_with("process "), "{found}");
            drop(listener);
        }
        assert_eq!(holder(1), None);
    }

    #[test]
    fn envoys_error_of_a_taken_port_names_the_port() {
        for (error, port) in [
            ("cannot bind '127.0.0.1:15000': Address already in use", Some(15000)),
            ("plain: cannot bind '[::]:15006': Address already in use", Some(15006)),
            ("cannot bind '/run/x': Address already in use", None),
            ("cannot bind '127.0.0.1:80': Permission denied", None),
        ] {
            assert_eq!(taken(error), port, "{error}");
        }
    }
}
