//! Tests DNS as applications see it: names of the mesh, other names, sizes of answers, and malformed queries.
//!
//! `DNS_ADDR` is the address and port of another agent to query instead. That agent needs the names of [`TABLE`],
//! the namespace `ns1` with its search domains, and the names of [`resolver`] upstream.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use local_istiod::{LocalIstiod, Options, Resource, Snapshot};
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::support::envoy::Envoy;
use crate::support::namespace::has;
use crate::support::place::Place;
use crate::support::process::Process;
use crate::support::python::package;
use crate::support::{LISTENER, PATIENCE, free_port as free_tcp_port, options, request};

const NAME_TABLE: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";

/// A host, its addresses, and for a Kubernetes service its short name, its namespace and an alternative host.
type Row = (&'static str, &'static [&'static str], Option<[&'static str; 3]>);

const TABLE: &[Row] = &[
    ("www.google.com", &["1.1.1.1"], None),
    ("productpage.ns1.svc.cluster.local", &["9.9.9.9"], Some(["productpage", "ns1", ""])),
    ("example.ns2.svc.cluster.local", &["10.10.10.10"], Some(["example", "ns2", ""])),
    (
        "details.ns2.svc.cluster.remote",
        &["11.11.11.11", "12.12.12.12", "13.13.13.13", "14.14.14.14"],
        Some(["details", "ns2", ""]),
    ),
    (
        "svc-with-alt.ns1.svc.cluster.local",
        &["15.15.15.15"],
        Some(["svc-with-alt", "ns1", "svc-with-alt.ns1.svc.clusterset.local"]),
    ),
    ("ipv6.localhost", &["2001:db8:0:0:0:ff00:42:8329"], None),
    ("dual.localhost", &["2.2.2.2", "2001:db8:0:0:0:ff00:42:8329"], None),
    ("ipv4.localhost", &["2.2.2.2"], None),
    ("*.b.wildcard", &["11.11.11.11"], None),
    ("*.wildcard", &["10.10.10.10"], None),
    ("*.svc.mesh.company.net", &["10.1.2.3"], None),
    ("example.localhost.", &["3.3.3.3"], None),
];

/// The queries, as name and type, with the expected code and the expected answers, sorted as text.
const ANSWERS: &[(&str, u16, u8, &[&str])] = &[
    ("www.google.com.", 1, 0, &["www.google.com. 1.1.1.1"]),
    (
        "www.google.com.ns1.svc.cluster.local.",
        1,
        0,
        &["www.google.com. 1.1.1.1", "www.google.com.ns1.svc.cluster.local. www.google.com."],
    ),
    ("www.bing.com.", 1, 0, &["www.bing.com. 1.1.1.1"]),
    ("productpage.ns1.svc.cluster.local.", 1, 0, &["productpage.ns1.svc.cluster.local. 9.9.9.9"]),
    ("productpage.ns1.", 1, 0, &["productpage.ns1. 9.9.9.9"]),
    ("productpage.", 1, 0, &["productpage. 9.9.9.9"]),
    ("productpage.ns1.svc.cluster.local.ns1.svc.cluster.local.", 1, 3, &[]),
    (
        "productpage.ns1.ns1.svc.cluster.local.",
        1,
        0,
        &["productpage.ns1. 9.9.9.9", "productpage.ns1.ns1.svc.cluster.local. productpage.ns1."],
    ),
    ("productpage.ns1.ns1.svc.cluster.local.", 28, 0, &[]),
    ("example.ns2.", 1, 0, &["example.ns2. 10.10.10.10"]),
    ("example.ns2.svc.cluster.local.", 1, 0, &["example.ns2.svc.cluster.local. 10.10.10.10"]),
    ("example.ns2.svc.", 1, 0, &["example.ns2.svc. 10.10.10.10"]),
    ("example.", 1, 3, &[]),
    ("svc-with-alt.", 1, 0, &["svc-with-alt. 15.15.15.15"]),
    ("svc-with-alt.ns1.", 1, 0, &["svc-with-alt.ns1. 15.15.15.15"]),
    ("svc-with-alt.ns1.svc.", 1, 0, &["svc-with-alt.ns1.svc. 15.15.15.15"]),
    (
        "svc-with-alt.ns1.svc.cluster.local.",
        1,
        0,
        &["svc-with-alt.ns1.svc.cluster.local. 15.15.15.15"],
    ),
    (
        "svc-with-alt.ns1.svc.clusterset.local.",
        1,
        0,
        &["svc-with-alt.ns1.svc.clusterset.local. 15.15.15.15"],
    ),
    (
        "details.ns2.svc.cluster.remote.",
        1,
        0,
        &[
            "details.ns2.svc.cluster.remote. 11.11.11.11",
            "details.ns2.svc.cluster.remote. 12.12.12.12",
            "details.ns2.svc.cluster.remote. 13.13.13.13",
            "details.ns2.svc.cluster.remote. 14.14.14.14",
        ],
    ),
    ("details.ns2.", 1, 3, &[]),
    ("dual.localhost.", 1, 0, &["dual.localhost. 2.2.2.2"]),
    ("dual.localhost.", 28, 0, &["dual.localhost. 2001:db8::ff00:42:8329"]),
    ("ipv6.localhost.", 1, 0, &[]),
    ("ipv4.localhost.", 28, 0, &[]),
    ("foo.wildcard.", 1, 0, &["foo.wildcard. 10.10.10.10"]),
    ("a.b.wildcard.", 1, 0, &["a.b.wildcard. 11.11.11.11"]),
    (
        "foo.wildcard.ns1.svc.cluster.local.",
        1,
        0,
        &["foo.wildcard.ns1.svc.cluster.local. 10.10.10.10"],
    ),
    ("foo.svc.mesh.company.net.", 1, 0, &["foo.svc.mesh.company.net. 10.1.2.3"]),
    ("foo.foons.svc.mesh.company.net.", 1, 0, &["foo.foons.svc.mesh.company.net. 10.1.2.3"]),
    (
        "foo.svc.mesh.company.net.ns1.svc.cluster.local.",
        1,
        0,
        &["foo.svc.mesh.company.net.ns1.svc.cluster.local. 10.1.2.3"],
    ),
    ("example.localhost.", 1, 0, &["example.localhost. 3.3.3.3"]),
    // Queries of other types go to the upstream resolver, also for names of the mesh.
    ("www.google.com.", 16, 3, &[]),
];

#[tokio::test]
async fn every_name_is_answered_over_udp_and_tcp() {
    for parallel in ["false", "true"] {
        let mesh = Mesh::start(parallel).await;
        for (name, kind, code, answers) in ANSWERS {
            for edns in [None, Some(1232)] {
                let query = query(name, *kind, edns);
                for reply in [mesh.udp(&query).await, mesh.tcp(&query).await] {
                    let reply = decode(&reply);
                    assert_eq!(reply.code, *code, "{name} {kind}");
                    assert_eq!(reply.answers, *answers, "{name} {kind}");
                }
            }
        }
    }
}

/// The agent's OPT record: 4096 bytes, version 0, no options.
const OWN_OPT: [u8; 11] = [0, 0, 41, 0x10, 0, 0, 0, 0, 0, 0, 0];

#[tokio::test]
async fn every_answer_has_the_agents_opt_record_if_the_question_has_one() {
    let mesh = Mesh::start("false").await;
    for (name, kind, code) in [
        ("www.google.com.", 1, 0),
        ("foo.wildcard.ns1.svc.cluster.local.", 1, 0),
        ("ipv6.localhost.", 1, 0),
        ("www.bing.com.", 1, 0),
        ("cookie.example.", 1, 0),
        ("example.", 1, 3),
        ("giant.", 1, 0),
        ("giant-tc.", 1, 0),
    ] {
        let plain = query(name, kind, None);
        let with_opt = query(name, kind, Some(512));
        let with_cookie = with_cookie(&with_opt);
        for (query, opt) in [
            (plain, None),
            (with_opt, Some(OWN_OPT.to_vec())),
            (with_cookie, Some(OWN_OPT.to_vec())),
        ] {
            for reply in [mesh.udp(&query).await, mesh.tcp(&query).await] {
                let reply = decode(&reply);
                assert_eq!((reply.code, reply.opt), (code, opt.clone()), "{name}");
            }
        }
    }
    // EDNS version 1 does not exist: the agent answers with the extended code BADVERS.
    let mut later = query("www.google.com.", 1, Some(1232));
    let version = later.len() - 5;
    later[version] = 1;
    let reply = decode(&mesh.udp(&later).await);
    let mut bad_version = OWN_OPT;
    bad_version[5] = 1;
    assert_eq!((reply.code, reply.opt), (0, Some(bad_version.to_vec())));
    assert_eq!(reply.answers, [""; 0]);
}

#[tokio::test]
async fn dig_reads_every_answer_as_that_of_a_server_with_edns() {
    if !has("dig") {
        return;
    }
    let mesh = Mesh::start("false").await;
    let server = format!("@{}", mesh.address.ip());
    let port = mesh.address.port().to_string();
    for (words, expected) in [
        ("www.google.com", "status: NOERROR"),
        ("cookie.example", "status: NOERROR"),
        ("+subnet=10.1.2.0/24 cookie.example", "status: NOERROR"),
        ("+dnssec cookie.example", "flags: do; udp: 4096"),
        ("+dnssec www.google.com", "flags: do; udp: 4096"),
        ("+bufsize=512 giant", "flags: qr tc"),
        ("+edns=1 +noednsneg www.google.com", "status: BADVERS"),
        ("+opcode=status www.google.com", "status: NOTIMP"),
    ] {
        let mut dig = tokio::process::Command::new("dig");
        let dig = dig.args([&server, "-p", &port, "+ignore", "+tries=1"]);
        let output = dig.args(words.split(' ')).output().await.unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains(expected), "{words}: {said}");
        assert!(said.contains("EDNS: version: 0"), "{words}: {said}");
        let options = ["COOKIE", "CLIENT-SUBNET", "WARNING"];
        assert!(!options.iter().any(|option| said.contains(option)), "{words}: {said}");
    }
}

/// Returns the query with a client cookie in its OPT record.
fn with_cookie(query: &[u8]) -> Vec<u8> {
    let mut query = query.to_vec();
    *query.last_mut().unwrap() = 12;
    query.extend([0, 10, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8]);
    query
}

/// A Python program that queries one server for names, one after the other, and prints their addresses.
const C_ARES: &str = r#"
import select, sys, pycares
channel = pycares.Channel(servers=["127.0.0.1"], udp_port=int(sys.argv[1]), timeout=5, tries=1)
for name in sys.argv[2:]:
    done = []
    channel.query(name, pycares.QUERY_TYPE_A, callback=lambda *found: done.append(found))
    channel.wait()
    answer, error = done[0]
    print(error or answer.answer[0].data.addr)
"#;

#[tokio::test]
async fn a_c_ares_client_gets_mesh_names_after_a_resolvers_cookie() {
    let requirements = "tests/integration/conformance/dns-requirements.txt";
    let Some(package) = package(requirements, "GRPC_TESTS") else {
        return;
    };
    let mesh = Mesh::start("false").await;
    let port = mesh.address.port().to_string();
    let mut python = tokio::process::Command::new("python3");
    let names = ["cookie.example", "www.google.com", "cookie.example"];
    let python = python.args(["-c", C_ARES, &port]).args(names);
    let output = python.env("PYTHONPATH", package).output().await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said, "7.7.7.7\n1.1.1.1\n7.7.7.7\n", "{errors}");
}

#[tokio::test]
async fn a_large_answer_of_a_resolver_arrives() {
    let mesh = Mesh::start("false").await;
    let plain = decode(&mesh.udp(&query("giant.", 1, None)).await);
    assert!(plain.truncated && plain.code == 0);
    for whole in [
        mesh.udp(&query("giant.", 1, Some(65_535))).await,
        mesh.tcp(&query("giant.", 1, None)).await,
    ] {
        let whole = decode(&whole);
        assert!(whole.answers.len() == 64 && !whole.truncated);
    }
}

#[tokio::test]
async fn a_truncated_answer_of_a_resolver_arrives_as_far_as_it_goes() {
    let mesh = Mesh::start("false").await;
    let cut = decode(&mesh.udp(&query("giant-tc.", 1, None)).await);
    assert!(cut.truncated && cut.code == 0);
    assert_eq!(cut.answers.len(), 29);
    let owner = |answer: &String| answer.starts_with("aaaaaaaaaaaa.aaaaaa. 240.0.0.");
    assert!(cut.answers.iter().all(owner), "{:?}", cut.answers);
}

#[tokio::test]
async fn a_query_no_resolver_answers_fails_after_the_timeout() {
    if std::env::var_os("DNS_ADDR").is_some() {
        return; // The timeout of another agent is not known.
    }
    for parallel in ["false", "true"] {
        for timeout in [1, 2] {
            let mesh = Mesh::start_with(parallel, &format!("{timeout}s")).await;
            let asked = Instant::now();
            let reply = decode(&mesh.udp(&query("silent.", 1, None)).await);
            let (taken, timeout) = (asked.elapsed(), Duration::from_secs(timeout));
            assert_eq!((reply.code, reply.answers.len()), (2, 0));
            assert!(taken > timeout * 9 / 10 && taken < timeout * 2, "{taken:?}");
        }
    }
}

#[tokio::test]
async fn messages_that_are_not_a_question_do_not_stop_the_dns_server() {
    let mesh = Mesh::start("false").await;
    let good = query("www.google.com.", 1, None);
    let client = mesh.client().await;
    for bad in [
        &[][..],
        &[0; 3],
        &good[..11],
        &good[..12],
        &good[..20],
        &[&good[..12], &[0xc0, 12, 0, 1, 0, 1]].concat(),
        &[&good[..4], &[255; 100]].concat(),
        &vec![7; 9000],
    ] {
        client.send(bad).await.unwrap();
    }
    let mut tcp = TcpStream::connect(mesh.address).await.unwrap();
    tcp.write_all(&[255; 40]).await.unwrap();
    let reply = decode(&mesh.udp(&good).await);
    assert_eq!(reply.answers, ["www.google.com. 1.1.1.1"]);
}

#[tokio::test]
async fn the_last_name_table_is_used_while_istiod_is_unreachable() {
    if std::env::var_os("DNS_ADDR").is_some() {
        return; // The test cannot control the istiod of another agent.
    }
    let mut mesh = Mesh::start("false").await;
    let query = query("www.google.com.", 1, None);
    let agent = mesh.agent.take().unwrap();
    agent.istiod.kill().await;
    drop(agent.envoy);
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(decode(&mesh.udp(&query).await).answers, ["www.google.com. 1.1.1.1"]);
    }
}

#[tokio::test]
async fn an_incremental_name_table_is_refused_and_the_last_one_is_used() {
    if std::env::var_os("DNS_ADDR").is_some() {
        return; // The test cannot control the istiod of another agent.
    }
    let mesh = Mesh::start("false").await;
    let (child, _) = mesh._child.as_ref().unwrap();
    let change = [2 << 3 | 2, 3, 10, 1, b'a'];
    let snapshots = &mesh.agent.as_ref().unwrap().snapshots;
    let mut snapshot = Snapshot::default();
    snapshot.insert("common", Resource::new("", NAME_TABLE, change.to_vec()));
    snapshots.send_replace(Arc::new(snapshot));
    child.logs("name_info (field 2) is set").await;
    let query = query("www.google.com.", 1, None);
    let reply = decode(&mesh.udp(&query).await);
    assert_eq!(reply.answers, ["www.google.com. 1.1.1.1"]);
}

#[tokio::test]
async fn all_addresses_are_answered_at_each_of_them_over_both_protocols() {
    if std::env::var_os("DNS_ADDR").is_some() {
        return;
    }
    let port = free_port().await.port();
    let any = (Ipv4Addr::UNSPECIFIED, port).into();
    let mut mesh = Mesh::at(any, "false", "5s").await;
    let query = query("www.google.com.", 1, None);
    for address in [IpAddr::from([127, 0, 0, 1]), Ipv6Addr::LOCALHOST.into()] {
        mesh.address = (address, port).into();
        // The UDP client is connected, so it receives answers from this address only.
        for reply in [mesh.udp(&query).await, mesh.tcp(&query).await] {
            assert_eq!(decode(&reply).answers, ["www.google.com. 1.1.1.1"]);
        }
    }
}

#[tokio::test]
async fn an_address_in_use_ends_the_agent() {
    let taken = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let istiod = LocalIstiod::start(options()).await.unwrap();
    let place =
        Place::of(&istiod).set("ISTIO_META_DNS_CAPTURE", "true").set("DNS_PROXY_ADDR", &address);
    let (code, log) = place.ends().await;
    assert_eq!(code, 255, "{log}");
    assert!(log.contains("failed to start local DNS server: "), "{log}");
}

/// An agent with the name table and an upstream resolver, or the address of another agent.
struct Mesh {
    address: SocketAddr,
    agent: Option<Agent>,
    /// The agent and its directory. The agent comes first, so it ends before its directory is removed.
    _child: Option<(Process, Place)>,
}

struct Agent {
    istiod: LocalIstiod,
    envoy: Envoy,
    snapshots: watch::Sender<Arc<Snapshot>>,
}

impl Mesh {
    async fn start(parallel: &str) -> Self {
        Self::start_with(parallel, "5s").await
    }

    async fn start_with(parallel: &str, timeout: &str) -> Self {
        if let Ok(address) = std::env::var("DNS_ADDR") {
            return Self { address: address.parse().unwrap(), agent: None, _child: None };
        }
        Self::at(free_port().await, parallel, timeout).await
    }

    async fn at(address: SocketAddr, parallel: &str, timeout: &str) -> Self {
        let mut snapshot = Snapshot::default();
        snapshot.insert("common", Resource::new("", NAME_TABLE, table()));
        let snapshots = watch::Sender::new(Arc::new(snapshot));
        let istiod =
            LocalIstiod::start(Options { snapshots: Some(snapshots.subscribe()), ..options() });
        let istiod = istiod.await.unwrap();
        let resolver = resolver().await;
        let search = "ns1.svc.cluster.local svc.cluster.local cluster.local";
        let place = Place::of(&istiod)
            .set("POD_NAMESPACE", "ns1")
            .set("ISTIO_META_DNS_CAPTURE", "true")
            .set("DNS_PROXY_ADDR", &address.to_string())
            .set("DNS_FORWARD_PARALLEL", parallel)
            .set("DNS_FORWARD_TIMEOUT", timeout)
            .set("ISTIO_AGENT_RESOLV_CONF", "resolv.conf");
        let resolver = format!("[{}]:{}", resolver.ip(), resolver.port());
        place.write("resolv.conf", format!("search {search}\nnameserver {resolver}\n"));
        let child = place.start().await;
        let protocol = istio_agent::xds::Protocol::Sotw;
        let envoy = Envoy::open(&place.xds_socket(), protocol).await;
        envoy.send(&request(LISTENER, &[]));
        child.logs("name table of 12 hosts").await;
        Self {
            address,
            agent: Some(Agent { istiod, envoy, snapshots }),
            _child: Some((child, place)),
        }
    }

    async fn client(&self) -> UdpSocket {
        let any: IpAddr = if self.address.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let client = UdpSocket::bind((any, 0)).await.unwrap();
        client.connect(self.address).await.unwrap();
        client
    }

    async fn udp(&self, query: &[u8]) -> Vec<u8> {
        let client = self.client().await;
        client.send(query).await.unwrap();
        let mut reply = vec![0; 65_535];
        let length = timeout(PATIENCE, client.recv(&mut reply)).await;
        reply.truncate(length.expect("an answer").unwrap());
        reply
    }

    async fn tcp(&self, query: &[u8]) -> Vec<u8> {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let length = u16::try_from(query.len()).unwrap().to_be_bytes();
        stream.write_all(&[&length, query].concat()).await.unwrap();
        let length = timeout(PATIENCE, stream.read_u16()).await;
        let mut reply = vec![0; usize::from(length.expect("an answer").unwrap())];
        stream.read_exact(&mut reply).await.unwrap();
        reply
    }
}

/// Returns an address with a port that is free for UDP and TCP, and that the kernel does not give to clients.
async fn free_port() -> SocketAddr {
    loop {
        let address = (Ipv4Addr::LOCALHOST, free_tcp_port()).into();
        if UdpSocket::bind(address).await.is_ok() {
            return address;
        }
    }
}

#[derive(Clone, PartialEq, Message)]
struct NameTable {
    #[prost(btree_map = "string, message", tag = "1")]
    table: std::collections::BTreeMap<String, NameInfo>,
}

#[derive(Clone, PartialEq, Message)]
struct NameInfo {
    #[prost(string, repeated, tag = "1")]
    ips: Vec<String>,
    #[prost(string, tag = "2")]
    registry: String,
    #[prost(string, tag = "3")]
    shortname: String,
    #[prost(string, tag = "4")]
    namespace: String,
    #[prost(string, repeated, tag = "5")]
    alt_hosts: Vec<String>,
}

fn table() -> Vec<u8> {
    let info = |ips: &[&str], kubernetes: Option<[&str; 3]>| {
        let [shortname, namespace, alt] = kubernetes.unwrap_or_default().map(str::to_owned);
        let registry = if kubernetes.is_some() { "Kubernetes" } else { "External" };
        NameInfo {
            ips: ips.iter().map(ToString::to_string).collect(),
            registry: registry.to_owned(),
            shortname,
            namespace,
            alt_hosts: Some(alt).filter(|alt| !alt.is_empty()).into_iter().collect(),
        }
    };
    let rows = TABLE.iter();
    let table = rows.map(|(host, ips, of)| ((*host).to_owned(), info(ips, *of)));
    NameTable { table: table.collect() }.encode_to_vec()
}

/// Starts an upstream resolver on its own port. It knows `www.bing.com`, `cookie.example`, the 64 addresses of
/// `giant`, and `giant-tc`, whose answers it truncates. It does not answer queries for `silent`.
async fn resolver() -> SocketAddr {
    let address = free_port().await;
    let udp = UdpSocket::bind(address).await.unwrap();
    let tcp = tokio::net::TcpListener::bind(address).await.unwrap();
    tokio::task::spawn(async move {
        let mut query = vec![0; 65_535];
        loop {
            let (length, client) = udp.recv_from(&mut query).await.unwrap();
            let asked = &query[..length];
            if name(asked, 12).0 == "silent." {
                continue;
            }
            let mut reply = resolve(asked);
            if reply.len() > 1232 {
                reply.truncate(length);
                reply[2] |= 2;
                reply[6..8].fill(0);
            }
            udp.send_to(&reply, client).await.unwrap();
        }
    });
    tokio::task::spawn(async move {
        loop {
            let (mut stream, _) = tcp.accept().await.unwrap();
            tokio::task::spawn(async move {
                while let Ok(length) = stream.read_u16().await {
                    let mut query = vec![0; usize::from(length)];
                    stream.read_exact(&mut query).await.unwrap();
                    let reply = resolve(&query);
                    let length = u16::try_from(reply.len()).unwrap().to_be_bytes();
                    stream.write_all(&[&length[..], &reply].concat()).await.unwrap();
                }
            });
        }
    });
    address
}

/// Returns the answer to a query, without EDNS, which a resolver may leave out. The answer for `cookie.example` has
/// a cookie if the query has one.
fn resolve(query: &[u8]) -> Vec<u8> {
    let (name, end) = name(query, 12);
    let addresses: Vec<[u8; 4]> = match (name.as_str(), query[end + 1]) {
        ("www.bing.com.", 1) => vec![[1, 1, 1, 1]],
        ("cookie.example.", 1) => vec![[7, 7, 7, 7]],
        // The answer is truncated to 512 bytes over UDP and over TCP.
        ("giant-tc.", 1) => return cut(query, end),
        ("giant.", 1) => (0..64).map(|last| [240, 0, 0, last]).collect(),
        _ => Vec::new(),
    };
    let mut reply = query[..end + 4].to_vec();
    reply[2] |= 0x80;
    reply[3] = if addresses.is_empty() { 0x83 } else { 0x80 };
    reply[6..12].fill(0);
    reply[7] = u8::try_from(addresses.len()).unwrap();
    for address in addresses {
        reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4]);
        reply.extend(address);
    }
    let cookie = query.windows(4).position(|option| option == [0, 10, 0, 8]);
    if let Some(at) = cookie
        && name == "cookie.example."
    {
        reply[11] = 1;
        reply.extend([0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 20, 0, 10, 0, 16]);
        reply.extend(&query[at + 4..at + 12]);
        reply.extend([9; 8]);
    }
    reply
}

/// Returns a truncated answer with addresses of another name: with one more address, it would exceed 512 bytes.
fn cut(query: &[u8], end: usize) -> Vec<u8> {
    let mut reply = query[..end + 4].to_vec();
    reply[2] |= 0x82;
    reply[3] = 0x80;
    reply[6..12].fill(0);
    reply[7] = 29;
    let owner = u8::try_from(reply.len()).unwrap();
    reply.extend(b"\x0caaaaaaaaaaaa\x06aaaaaa\0");
    for last in 0..29 {
        if last > 0 {
            reply.extend([0xc0, owner]);
        }
        reply.extend([0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 240, 0, 0, last]);
    }
    reply
}

fn query(name: &str, kind: u16, edns: Option<u16>) -> Vec<u8> {
    let mut query = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, u8::from(edns.is_some())];
    for label in name.split('.').filter(|label| !label.is_empty()) {
        query.push(u8::try_from(label.len()).unwrap());
        query.extend(label.as_bytes());
    }
    query.push(0);
    query.extend([kind.to_be_bytes(), [0, 1]].concat());
    if let Some(size) = edns {
        query.extend([0, 0, 41]);
        query.extend(size.to_be_bytes());
        query.extend([0; 6]);
    }
    query
}

#[derive(Debug)]
struct Reply {
    code: u8,
    truncated: bool,
    /// The records as owner and data, sorted as text.
    answers: Vec<String>,
    opt: Option<Vec<u8>>,
}

fn decode(message: &[u8]) -> Reply {
    let word = |at: usize| u16::from_be_bytes([message[at], message[at + 1]]);
    assert_eq!(word(0), 0x1234);
    let mut at = 12;
    for _ in 0..word(4) {
        at = name(message, at).1 + 4;
    }
    let (mut answers, mut opt) = (Vec::new(), None);
    for _ in 0..word(6) + word(8) + word(10) {
        let start = at;
        let (owner, fixed) = name(message, at);
        let length = usize::from(word(fixed + 8));
        let data = &message[fixed + 10..fixed + 10 + length];
        at = fixed + 10 + length;
        let data = match word(fixed) {
            41 => {
                assert!(opt.is_none(), "two OPT records");
                opt = Some(message[start..at].to_vec());
                continue;
            }
            5 => name(message, fixed + 10).0,
            28 => IpAddr::from(<[u8; 16]>::try_from(data).unwrap()).to_string(),
            _ => IpAddr::from(<[u8; 4]>::try_from(data).unwrap()).to_string(),
        };
        answers.push(format!("{owner} {data}"));
    }
    answers.sort();
    Reply { code: message[3] & 0xf, truncated: message[2] & 2 != 0, answers, opt }
}

fn name(message: &[u8], mut at: usize) -> (String, usize) {
    let (mut text, mut end) = (String::new(), None);
    loop {
        let length = usize::from(message[at]);
        if length >= 192 {
            end = end.or(Some(at + 2));
            at = (length & 63) << 8 | usize::from(message[at + 1]);
        } else if length == 0 {
            return (text, end.unwrap_or(at + 1));
        } else {
            text += std::str::from_utf8(&message[at + 1..at + 1 + length]).unwrap();
            text += ".";
            at += 1 + length;
        }
    }
}
