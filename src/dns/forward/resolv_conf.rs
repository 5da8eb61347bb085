//! Reads `resolv.conf`: the DNS servers, and the search domains of short names.
//!
//! Follows the C library, but is more lenient: an invalid line is reported and skipped. The last of
//! several `search` and `domain` lines counts. A server may have a port, written `[address]:port`.
//! Sources: resolv.conf(5), resolv.conf(5) of OpenBSD.

use std::net::{Ipv6Addr, SocketAddr, SocketAddrV6};
use std::path::Path;

use crate::files::regular_file;
use crate::problem::{Code, Problem};

/// Real files are much smaller.
const MAX_BYTES: u64 = 64 * 1024;

const PORT: u16 = 53;

/// More servers are hardly intended, and each may cost a socket.
const MAX_SERVERS: usize = 16;

/// The content of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvConf {
    pub nameservers: Vec<SocketAddr>,
    pub search: Vec<String>,
    /// Lines with an invalid server, or with one more than allowed.
    pub unusable: Vec<String>,
}

impl ResolvConf {
    /// Reads and parses the file. Fails only if it cannot be read.
    pub fn read(path: &Path) -> Result<Self, Problem> {
        let code = Code::DnsResolvConfUnreadable;
        let bytes = regular_file::read(path, MAX_BYTES)
            .map_err(|error| Problem::new(code, path.display(), error))?;
        Ok(Self::parse(&String::from_utf8_lossy(&bytes)))
    }

    /// Removes the agent's `own` addresses from the servers. Returns the problems of the file at `path`,
    /// the worst one last.
    pub fn remove_own(&mut self, own: &[SocketAddr], path: &Path) -> Vec<Problem> {
        let code = Code::DnsResolverInvalid;
        let mut problems = Vec::new();
        for line in &self.unusable {
            problems.push(Problem::new(code, path.display(), format!("{line:?}")));
        }
        for server in self.nameservers.extract_if(.., |server| is_own(own, *server)) {
            let found = format!("resolver {server} is this agent");
            problems.push(Problem::new(code, path.display(), found));
        }
        if self.nameservers.is_empty() {
            let code = Code::DnsResolverMissing;
            let found = "names no resolver other than this agent";
            problems.push(Problem::new(code, path.display(), found));
        }
        problems
    }

    /// Parses a file. Unusable lines are listed and otherwise ignored.
    pub fn parse(text: &str) -> Self {
        let mut found = Self::default();
        for line in text.lines() {
            let line = line.split(['#', ';']).next().unwrap_or_default();
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") => match words.next().and_then(parse_server) {
                    Some(server) if found.nameservers.contains(&server) => {}
                    Some(server) if found.nameservers.len() < MAX_SERVERS => {
                        found.nameservers.push(server);
                    }
                    _ => found.unusable.push(line.trim().to_owned()),
                },
                Some("search") => found.search = words.map(str::to_owned).collect(),
                Some("domain") => found.search = words.take(1).map(str::to_owned).collect(),
                // Options are for the clients.
                _ => {}
            }
        }
        found
    }
}

/// Returns whether a server is this agent, which listens on its `own` addresses. An unspecified address
/// means this machine as a server, and all addresses as a listener.
fn is_own(own: &[SocketAddr], server: SocketAddr) -> bool {
    let address = server.ip();
    let is_local = address.is_loopback() || address.is_unspecified();
    own.iter().any(|own| {
        let is_same = own.ip() == address
            || own.ip().is_unspecified() && is_local
            || own.ip().is_loopback() && address.is_unspecified();
        own.port() == server.port() && is_same
    })
}

/// Parses an address, perhaps with a port; one of IPv6 perhaps with the interface that leads to it.
fn parse_server(word: &str) -> Option<SocketAddr> {
    let (address, port) = match word.strip_prefix('[').and_then(|w| w.split_once("]:")) {
        Some((address, port)) => (address, port.parse().ok().filter(|port| *port != 0)?),
        None => (word, PORT),
    };
    let Some((address, interface)) = address.split_once('%') else {
        return Some(SocketAddr::new(address.parse().ok()?, port));
    };
    let address: Ipv6Addr = address.parse().ok()?;
    let scope = match interface.parse() {
        Ok(index) => index,
        Err(_) => {
            if_addrs::get_if_addrs().ok()?.into_iter().find(|it| it.name == interface)?.index?
        }
    };
    Some(SocketAddrV6::new(address, port, 0, scope).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(text: &str) -> Vec<String> {
        let found = ResolvConf::parse(text).nameservers;
        found.iter().map(SocketAddr::to_string).collect()
    }

    #[test]
    fn nameservers_are_read() {
        let cases: &[(&str, &[&str])] = &[
            ("nameserver 10.96.0.10\n", &["10.96.0.10:53"]),
            ("nameserver\t1.1.1.1  2.2.2.2", &["1.1.1.1:53"]),
            ("  nameserver ::1 # here\r\n", &["[::1]:53"]),
            ("nameserver fe80::1%7", &["[fe80::1%7]:53"]),
            ("nameserver [::1]:5353\nnameserver [127.0.0.1]:54", &["[::1]:5353", "127.0.0.1:54"]),
            ("nameserver 1.1.1.1\nnameserver 1.1.1.1", &["1.1.1.1:53"]),
            ("#nameserver 1.1.1.1\n;nameserver 1.1.1.1\nnameservers 1.1.1.1", &[]),
            ("", &[]),
        ];
        for (text, expected) in cases {
            assert_eq!(servers(text), *expected, "{text:?}");
        }
    }

    #[test]
    fn lines_without_a_valid_server_are_named() {
        let lines = [
            "nameserver",
            "nameserver dns.example",
            "nameserver 1.2.3",
            "nameserver [::1]:0",
            "nameserver [::1]:65536",
            "nameserver [::1]",
            "nameserver fe80::1%no-such-interface",
        ];
        let found = ResolvConf::parse(&lines.join("\n"));
        assert_eq!(found.unusable, lines);
        assert!(found.nameservers.is_empty());
    }

    #[test]
    fn the_last_search_or_domain_counts() {
        let cases: &[(&str, &[&str])] = &[
            ("search a.b c.d # e", &["a.b", "c.d"]),
            ("search a\nsearch b", &["b"]),
            ("search a b\ndomain c d", &["c"]),
            ("domain a\nsearch", &[]),
        ];
        for (text, expected) in cases {
            assert_eq!(ResolvConf::parse(text).search, *expected, "{text:?}");
        }
    }

    #[test]
    fn reads_files_of_sensible_size_only() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), b"nameserver 1.1.1.1\n\xff\xfe").expect("written");
        let found = ResolvConf::read(file.path()).expect("it is read");
        assert_eq!(found.nameservers.len(), 1);
        std::fs::write(file.path(), vec![b'#'; 70_000]).expect("written");
        let error = ResolvConf::read(file.path()).expect_err("too large");
        assert_eq!(error.found, "more than 65536 bytes");
        let error = ResolvConf::read(Path::new("/")).expect_err("a directory");
        assert_eq!(error.found, "not a regular file");
    }
}
