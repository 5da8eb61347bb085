//! Reads the pod's addresses, labels and annotations.
//!
//! Labels and annotations come from files of the downward API, one `key="value"` per line. A line that
//! cannot be read is ignored with a warning.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use clap::ValueEnum;
use indexmap::IndexSet;

use super::Problem;
use crate::files::regular_file;
use crate::problem::Code;

/// Labels or annotations.
pub type Pairs = BTreeMap<String, String>;

/// The type of node; the first part of the node id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NodeType {
    Sidecar,
    Router,
    Waypoint,
}

impl fmt::Display for NodeType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

/// An address of an interface. An interface with several addresses is listed several times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    pub address: IpAddr,
    /// True if other machines cannot reach its addresses.
    pub is_loopback: bool,
}

/// The index of the loopback interface in every network namespace.
const LOOPBACK: u32 = 1;

/// Lists the network interfaces of this machine that are up, by index, with their reachable addresses.
pub(super) fn interfaces() -> io::Result<Vec<Interface>> {
    let mut found = if_addrs::get_if_addrs()?;
    found.sort_by_key(|interface| interface.index);
    found.retain(if_addrs::Interface::is_oper_up);
    let interfaces = found.into_iter().map(|interface| Interface {
        address: interface.ip().to_canonical(),
        is_loopback: interface.index == Some(LOOPBACK),
        name: interface.name,
    });
    Ok(interfaces.filter(|it| is_reachable(it.address)).collect())
}

fn is_reachable(address: IpAddr) -> bool {
    let is_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !is_local && !address.is_loopback() && !address.is_unspecified() && !address.is_multicast()
}

/// Returns the addresses of the node: `INSTANCE_IP`, then the addresses of the interfaces, except loopback and
/// `excluded`. There is at least one address, and each occurs once.
pub(super) fn addresses(
    instance_ip: Option<IpAddr>,
    interfaces: &[Interface],
    excluded: &[&str],
    warnings: &mut Vec<Problem>,
) -> Vec<IpAddr> {
    for name in excluded {
        if !interfaces.iter().any(|interface| interface.name == *name) {
            let code = Code::InterfaceUnknown;
            let expected = "the name of an interface";
            warnings.push(Problem::value(code, EXCLUDED_INTERFACES, name, expected));
        }
    }
    let reachable = interfaces.iter().filter(|it| !it.is_loopback);
    let mut found: Vec<_> = reachable.map(|it| it.address).collect();
    if found.is_empty() {
        found = vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    }
    found.retain(|address| {
        !interfaces.iter().any(|it| it.address == *address && excluded.contains(&&*it.name))
    });
    let mut addresses: IndexSet<_> = instance_ip.into_iter().chain(found).collect();
    if addresses.is_empty() {
        addresses.insert(Ipv4Addr::LOCALHOST.into());
    }
    addresses.into_iter().collect()
}

/// The annotation with the interfaces whose addresses are not the node's.
pub(super) const EXCLUDED_INTERFACES: &str = "traffic.sidecar.istio.io/excludeInterfaces";

/// Kubernetes limits the annotations of a pod to 256 KiB; escaped they are up to four times as long, and
/// each has punctuation.
const MAX_PAIRS: u64 = 2 << 20;

/// Reads labels or annotations from the downward API; None if their file is missing or cannot be used.
pub(super) fn pairs(root: &Path, name: &str, warnings: &mut Vec<Problem>) -> Option<Pairs> {
    let path = root.join("./etc/istio/pod").join(name);
    match regular_file::read_text(&path, MAX_PAIRS) {
        Ok(text) => Some(parse_pairs(&text, &path, warnings)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            warnings.push(Problem::new(Code::FileUnreadable, path.display(), error));
            None
        }
    }
}

fn parse_pairs(text: &str, path: &Path, warnings: &mut Vec<Problem>) -> Pairs {
    let mut pairs = Pairs::new();
    for (index, line) in text.lines().enumerate() {
        let Some((key, quoted)) = line.split_once('=') else {
            continue;
        };
        if let Some(value) = unquote(quoted) {
            pairs.insert(key.to_owned(), value);
        } else {
            let subject = format!("{} line {}", path.display(), index + 1);
            warnings.push(Problem::value(Code::FileLine, subject, line, "key=\"value\""));
        }
    }
    pairs
}

/// Decodes a Go string literal, which the kubelet writes. YAML has the same escape sequences. In Go, `\x` above
/// `\x7f` is a byte instead of a character, but the kubelet writes it only for text that is not UTF-8, which
/// Kubernetes does not store.
fn unquote(literal: &str) -> Option<String> {
    if !literal.starts_with('"') || !literal.ends_with('"') {
        return None;
    }
    serde_saphyr::from_str(literal).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_go_string_literals() {
        for (literal, text) in [
            (r#""plain""#, "plain"),
            (r#""a\nb\t\"c\"\\""#, "a\nb\t\"c\"\\"),
            (r#""\u00e9\x41\U0001f600😀""#, "éA😀😀"),
            (r#""\a\b\f\r\v\x00\x7f""#, "\u{7}\u{8}\u{c}\r\u{b}\0\u{7f}"),
            (r#""null""#, "null"),
            (r##""a: b # {c}, *d &e ${f}""##, "a: b # {c}, *d &e ${f}"),
            (r#""""#, ""),
        ] {
            assert_eq!(unquote(literal).as_deref(), Some(text), "{literal}");
        }
        for literal in ["plain", "\"", "\"a", r#""\q""#, r#""\u12""#, "\"a\"b\""] {
            assert_eq!(unquote(literal), None, "{literal}");
        }
    }

    #[test]
    fn one_bad_line_does_not_discard_the_file() {
        let mut warnings = Vec::new();
        let text = "app=\"shop\"\nbroken=shop\nno equals sign\nversion=\"v1=2\"\n";
        let pairs = parse_pairs(text, Path::new("labels"), &mut warnings);
        assert_eq!(pairs.len(), 2);
        assert_eq!(pairs["version"], "v1=2");
        assert_eq!(warnings.len(), 1);
        assert_eq!(warnings[0].subject, "labels line 2");
    }

    #[test]
    fn a_file_too_large_or_irregular_is_named_and_counts_as_absent() {
        let directory = tempfile::tempdir().expect("a directory");
        let pod = directory.path().join("etc/istio/pod");
        std::fs::create_dir_all(&pod).expect("made");
        let path = |name: &str| pod.join(name);
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, path("fifo"), fifo, 0o600.into(), 0).expect("a FIFO");
        let large = format!("a=\"{}\"\n", "x".repeat(MAX_PAIRS as usize));
        std::fs::write(path("large"), large).expect("written");
        for (name, found) in [("fifo", "not a regular file"), ("large", "more than 2097152 bytes")]
        {
            let mut warnings = Vec::new();
            assert_eq!(pairs(directory.path(), name, &mut warnings), None);
            assert_eq!(warnings.len(), 1);
            assert!(warnings[0].subject.ends_with(name), "{warnings:?}");
            assert_eq!(warnings[0].found, found);
        }
        // The largest annotation that Kubernetes stores: 256 KiB, of which each byte is escaped.
        let text = format!("a=\"{}\"\n", r"\x01".repeat(256 << 10));
        std::fs::write(path("full"), text).expect("written");
        let mut warnings = Vec::new();
        let pairs = pairs(directory.path(), "full", &mut warnings).expect("pairs");
        assert_eq!(pairs["a"].len(), 256 << 10);
        assert!(warnings.is_empty(), "{warnings:?}");
    }

    #[test]
    fn only_reachable_addresses_count() {
        for (address, reachable) in [
            ("10.0.0.1", true),
            ("fd00::1", true),
            ("127.0.0.1", false),
            ("169.254.1.1", false),
            ("fe80::1", false),
            ("::1", false),
            ("0.0.0.0", false),
        ] {
            let address = address.parse().expect("an address");
            assert_eq!(is_reachable(address), reachable, "{address}");
        }
    }

    #[test]
    fn interfaces_of_this_machine_are_listed() {
        let found = interfaces().expect("interfaces");
        assert!(found.iter().all(|interface| !interface.name.is_empty()));
    }

    #[test]
    fn the_instance_ip_comes_before_the_interfaces() {
        let (eth0, eth1) = (interface("eth0", "10.0.0.2"), interface("eth1", "fd00::2"));
        let both = [eth0, eth1];
        let virtual_v6 = [interface("lo", "fd00::9"), both[0].clone()];
        for (instance_ip, interfaces, excluded, expected, warned) in [
            ("FD00::2", &both[..], &[][..], "fd00::2,10.0.0.2", 0),
            ("", &both, &[], "10.0.0.2,fd00::2", 0),
            ("", &both, &["eth0"], "fd00::2", 0),
            ("10.0.0.2", &both, &["eth0", "net1"], "10.0.0.2,fd00::2", 1),
            ("", &both, &["eth0", "eth1"], "127.0.0.1", 0),
            ("", &virtual_v6, &[], "10.0.0.2", 0),
            ("fd00::9", &virtual_v6, &[], "fd00::9,10.0.0.2", 0),
            ("", &virtual_v6[..1], &[], "127.0.0.1,::1", 0),
            ("", &[], &[], "127.0.0.1,::1", 0),
            ("10.9.9.9", &[], &[], "10.9.9.9,127.0.0.1,::1", 0),
        ] {
            let mut warnings = Vec::new();
            let ip = instance_ip.parse().ok();
            let found = addresses(ip, interfaces, excluded, &mut warnings);
            let found: Vec<_> = found.iter().map(ToString::to_string).collect();
            assert_eq!(found.join(","), expected, "{instance_ip} without {excluded:?}");
            assert_eq!(warnings.len(), warned, "{instance_ip} without {excluded:?}");
        }
    }

    fn interface(name: &str, address: &str) -> Interface {
        Interface {
            name: name.to_owned(),
            address: address.parse().expect("an address"),
            is_loopback: name == "lo",
        }
    }
}
