//! Tests lookups in a name table, and compares them with a model that has a map of all names.

mod limits;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use proptest::prelude::*;
use prost::Message;

use super::*;

#[derive(Clone, PartialEq, Message)]
struct Encoded {
    #[prost(btree_map = "string, message", tag = "1")]
    table: BTreeMap<String, NameInfo>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct NameInfo {
    #[prost(string, repeated, tag = "1")]
    pub(crate) ips: Vec<String>,
    #[prost(string, tag = "2")]
    pub(crate) registry: String,
    #[prost(string, tag = "3")]
    pub(crate) shortname: String,
    #[prost(string, tag = "4")]
    pub(crate) namespace: String,
    #[prost(string, repeated, tag = "5")]
    pub(crate) alt_hosts: Vec<String>,
}

pub(crate) fn external(ips: &[&str]) -> NameInfo {
    NameInfo {
        ips: ips.iter().map(ToString::to_string).collect(),
        registry: "External".into(),
        ..NameInfo::default()
    }
}

pub(crate) fn kubernetes(shortname: &str, namespace: &str, ips: &[&str]) -> NameInfo {
    NameInfo {
        registry: "Kubernetes".into(),
        shortname: shortname.into(),
        namespace: namespace.into(),
        ..external(ips)
    }
}

/// Encodes the hosts in this order; a host may occur more than once. Concatenated Protobuf messages are one
/// message.
pub(crate) fn encode<'a>(hosts: impl IntoIterator<Item = (&'a str, NameInfo)>) -> Vec<u8> {
    let mut encoded = Vec::new();
    for (host, info) in hosts {
        let table = [(host.to_owned(), info)].into();
        encoded.extend(Encoded { table }.encode_to_vec());
    }
    encoded
}

pub(crate) fn domains() -> SearchDomains {
    let search = ["ns1.svc.cluster.local", "svc.cluster.local", "cluster.local"];
    SearchDomains::new("ns1", "ns1.svc.cluster.local", &search.map(str::to_owned))
}

/// Returns a table with a host of each kind.
pub(crate) fn sample() -> NameTable {
    let v6 = "2001:db8:0:0:0:ff00:42:8329";
    let mut alt = kubernetes("svc-with-alt", "ns1", &["15.15.15.15"]);
    alt.alt_hosts = vec!["svc-with-alt.ns1.svc.clusterset.local".into()];
    let four = ["11.11.11.11", "12.12.12.12", "13.13.13.13", "14.14.14.14"];
    let encoded = encode([
        ("www.google.com", external(&["1.1.1.1"])),
        ("productpage.ns1.svc.cluster.local", kubernetes("productpage", "ns1", &["9.9.9.9"])),
        ("example.ns2.svc.cluster.local", kubernetes("example", "ns2", &["10.10.10.10"])),
        ("details.ns2.svc.cluster.remote", kubernetes("details", "ns2", &four)),
        ("svc-with-alt.ns1.svc.cluster.local", alt),
        ("ipv6.localhost", external(&[v6])),
        ("dual.localhost", external(&["2.2.2.2", v6])),
        ("ipv4.localhost", external(&["2.2.2.2"])),
        ("*.b.wildcard", external(&["11.11.11.11"])),
        ("*.wildcard", external(&["10.10.10.10"])),
        ("*.svc.mesh.company.net", external(&["10.1.2.3"])),
        ("example.localhost.", external(&["3.3.3.3"])),
    ]);
    NameTable::build(&encoded, domains()).expect("a table")
}

/// The model of a table: the names with their addresses, and the names with the target of their CNAME.
#[derive(Debug, Default)]
struct Model {
    names: BTreeMap<String, Vec<(u8, String, Vec<IpAddr>)>>,
    targets: BTreeMap<String, String>,
}

impl Model {
    fn of(hosts: &[(String, NameInfo)], domains: &SearchDomains) -> Self {
        let mut model = Self::default();
        let last: BTreeMap<_, _> = hosts.iter().cloned().collect();
        for (host, info) in &last {
            model.add(host, info, domains);
        }
        for of_name in model.names.values_mut() {
            of_name.sort();
        }
        model
    }

    fn add(&mut self, host: &str, info: &NameInfo, domains: &SearchDomains) {
        let ips: Vec<IpAddr> = info.ips.iter().filter_map(|ip| ip.parse().ok()).collect();
        let variants = variants(host, info, domains);
        let names: BTreeSet<_> = variants.iter().map(|(_, name)| name.clone()).collect();
        if ips.is_empty() {
            return;
        }
        for (rank, name) in variants {
            let of_name = self.names.entry(name.clone()).or_default();
            of_name.push((rank, host.to_owned(), ips.clone()));
            let expanded = format!("{name}.{}", domains.search);
            if !name.ends_with(&domains.search) && !names.contains(&expanded) {
                self.targets.insert(expanded, name);
            }
        }
    }

    fn exact(&self, name: &str) -> Option<(Option<String>, Vec<IpAddr>)> {
        let target = self.targets.get(name);
        let of_name = self.names.get(target.map_or(name, String::as_str))?;
        let family = |wanted: fn(&IpAddr) -> bool| {
            let ips = of_name.iter().map(|(.., ips)| {
                let ips: Vec<_> = ips.iter().copied().filter(wanted).collect();
                ips
            });
            ips.into_iter().find(|ips| !ips.is_empty()).unwrap_or_default()
        };
        let ips = [family(IpAddr::is_ipv4), family(IpAddr::is_ipv6)].concat();
        let target = target.filter(|target| !target.contains('*'));
        Some((target.cloned(), ips))
    }

    fn find(&self, name: &str) -> Option<(Option<String>, Vec<IpAddr>)> {
        let labels: Vec<_> = name.split('.').collect();
        let wildcards = (1..labels.len()).map(|at| format!("*.{}", labels[at..].join(".")));
        std::iter::once(name.to_owned()).chain(wildcards).find_map(|name| self.exact(&name))
    }
}

fn variants(host: &str, info: &NameInfo, domains: &SearchDomains) -> Vec<(u8, String)> {
    let is_kubernetes = info.registry == "Kubernetes";
    if is_kubernetes && host.ends_with('.') {
        return Vec::new();
    }
    let mut variants = vec![(0, host.strip_suffix('.').unwrap_or(host).to_owned())];
    if is_kubernetes && !domains.domain.is_empty() && host.ends_with(&domains.domain) {
        let short_namespace = format!("{}.{}", info.shortname, info.namespace);
        variants.push((1, format!("{short_namespace}{}", domains.svc_label)));
        variants.push((2, short_namespace));
        if info.namespace == domains.namespace {
            variants.push((3, info.shortname.clone()));
        }
        variants.extend(info.alt_hosts.iter().map(|host| (4, host.clone())));
    }
    let lower = variants.into_iter();
    lower.map(|(rank, name)| (rank, name.to_ascii_lowercase())).collect()
}

fn found(table: &NameTable, name: &str) -> Option<(Option<String>, Vec<IpAddr>)> {
    let found = table.find(name.as_bytes())?;
    let v4 = found.v4.iter().map(|ip| IpAddr::V4(*ip));
    let ips = v4.chain(found.v6.iter().map(|ip| IpAddr::V6(*ip))).collect();
    let target = found.target_end.map(|end| name[..end].to_owned());
    Some((target, ips))
}

fn label() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["a", "b", "B", "ns1", "svc", "*", "d"]).prop_map(str::to_owned)
}

fn host() -> impl Strategy<Value = String> {
    let ending = ["", ".svc.d", ".ns1.svc.d", ".ns1.d", "xsvc.d", "."];
    (prop::collection::vec(label(), 1..4), prop::sample::select(ending.to_vec()))
        .prop_map(|(labels, ending)| format!("{}{ending}", labels.join(".")))
        .prop_filter("a bare star is no host", |host| host != "*" && host != "*.")
}

fn info() -> impl Strategy<Value = NameInfo> {
    let ip =
        prop::sample::select(vec!["1.1.1.1", "2.2.2.2", "::1", "::ffff:1.2.3.4", "x", "1.1.1.1"]);
    let registry = prop::sample::select(vec!["Kubernetes", "External"]);
    let parts = (registry, label(), label(), prop::collection::vec(host(), 0..2));
    (prop::collection::vec(ip, 0..3), parts).prop_map(
        |(ips, (registry, short, namespace, alts))| NameInfo {
            ips: ips.into_iter().map(str::to_owned).collect(),
            registry: registry.into(),
            shortname: short.replace('*', "s"),
            namespace: namespace.replace('*', "n"),
            alt_hosts: alts.iter().map(|alt| alt.trim_end_matches('.').to_owned()).collect(),
        },
    )
}

proptest! {
    #[test]
    fn lookups_in_the_name_table_equal_those_in_a_model(
        hosts in prop::collection::vec((host(), info()), 0..6),
        names in prop::collection::vec(host(), 20),
    ) {
        let domains = SearchDomains::new("ns1", "ns1.svc.d", &["ns1.svc.d".to_owned()]);
        let model = Model::of(&hosts, &domains);
        let pairs = hosts.iter().map(|(host, info)| (host.as_str(), info.clone()));
        let table = NameTable::build(&encode(pairs), domains).expect("a table");
        let known = model.names.keys().chain(model.targets.keys()).cloned();
        for name in known.chain(names) {
            let name = name.trim_end_matches('.').to_ascii_lowercase();
            prop_assert_eq!(found(&table, &name), model.find(&name), "{} in {:?}", name, hosts);
        }
    }

    #[test]
    fn arbitrary_bytes_are_a_name_table_or_an_error(bytes: Vec<u8>) {
        if let Ok(table) = NameTable::build(&bytes, domains()) {
            table.to_json();
        }
    }
}

#[test]
fn the_order_of_hosts_in_the_message_has_no_effect() {
    let hosts = [
        ("a.ns1.svc.cluster.local", kubernetes("x", "ns1", &["1.1.1.1"])),
        ("b.ns1.svc.cluster.local", kubernetes("x", "ns1", &["2.2.2.2", "::2"])),
        ("x.ns1", external(&["3.3.3.3"])),
        ("X.ns1.", external(&["4.4.4.4"])),
    ];
    let forwards = NameTable::build(&encode(hosts.clone()), domains()).expect("a table");
    let backwards = NameTable::build(&encode(hosts.into_iter().rev()), domains()).expect("a table");
    let ips = |ips: &[&str]| ips.iter().map(|ip| ip.parse().unwrap()).collect::<Vec<IpAddr>>();
    for (name, expected) in [
        ("x.ns1", ips(&["4.4.4.4", "::2"])),
        ("x.ns1.svc", ips(&["1.1.1.1", "::2"])),
        ("x", ips(&["1.1.1.1", "::2"])),
    ] {
        for table in [&forwards, &backwards] {
            assert_eq!(found(table, name), Some((None, expected.clone())), "{name}");
        }
    }
}

#[test]
fn the_last_entry_of_a_repeated_host_replaces_the_earlier_ones() {
    let times = 20;
    let mut hosts: Vec<_> = (0..times)
        .map(|_| ("a.ns1.svc.cluster.local", kubernetes("old", "ns1", &["1.1.1.1"])))
        .collect();
    hosts.push(("a.ns1.svc.cluster.local", kubernetes("new", "ns1", &["2.2.2.2"])));
    let table = NameTable::build(&encode(hosts), domains()).expect("a table");
    let expected = Some((None, vec!["2.2.2.2".parse().unwrap()]));
    assert_eq!(found(&table, "a.ns1.svc.cluster.local"), expected);
    assert_eq!(found(&table, "new"), expected);
    assert_eq!(found(&table, "old"), None);
}

#[test]
fn the_table_has_the_first_eight_hosts_that_share_a_name() {
    let hosts: Vec<_> =
        (0..20_000).map(|number| format!("h{number:05}.ns1.svc.cluster.local")).collect();
    let named = |host: &String| (host.clone(), kubernetes("x", "ns1", &["1.1.1.1"]));
    // In reverse order, so that the hosts that stay in the table come last.
    let hosts: Vec<_> = hosts.iter().rev().map(named).collect();
    let pairs = hosts.iter().map(|(host, info)| (host.as_str(), info.clone()));
    let table = NameTable::build(&encode(pairs), domains()).expect("a table");
    let mut entered: Vec<_> =
        table.entries_of(b"x.ns1").map(|(_, host)| host.name.to_owned()).collect();
    entered.sort();
    let first = (0..8).map(|number| format!("h{number:05}.ns1.svc.cluster.local"));
    assert_eq!(entered, first.collect::<Vec<_>>());
}
