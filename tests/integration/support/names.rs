//! A name table of the mesh, and an upstream resolver that counts its queries.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use local_istiod::Resource;
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UdpSocket};
use tokio::task::JoinSet;

const NAME_TABLE: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";
const A: u8 = 1;

#[derive(Clone, PartialEq, Message)]
struct NameTable {
    #[prost(btree_map = "string, message", tag = "1")]
    table: BTreeMap<String, NameInfo>,
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
}

/// Returns a name table with services of one namespace and their addresses.
pub fn name_table(namespace: &str, services: &[(&str, &[&str])]) -> Resource {
    let row = |(name, ips): &(&str, &[&str])| {
        let info = NameInfo {
            ips: ips.iter().map(ToString::to_string).collect(),
            registry: "Kubernetes".to_owned(),
            shortname: (*name).to_owned(),
            namespace: namespace.to_owned(),
        };
        (format!("{name}.{namespace}.svc.cluster.local"), info)
    };
    let table = services.iter().map(row).collect();
    Resource::new("", NAME_TABLE, NameTable { table }.encode_to_vec())
}

/// An upstream resolver that knows `outside.example`, and `giant.example`, whose 64 addresses need TCP.
pub struct Resolver {
    asked: Arc<Mutex<Vec<String>>>,
    _serving: JoinSet<()>,
}

impl Resolver {
    pub fn start(address: SocketAddr) -> Self {
        Self::of(bound(address))
    }

    pub fn of((udp, tcp): (std::net::UdpSocket, std::net::TcpListener)) -> Self {
        let udp = UdpSocket::from_std(udp).unwrap();
        let tcp = TcpListener::from_std(tcp).unwrap();
        let asked = Arc::default();
        let mut serving = JoinSet::new();
        serving.spawn(serve_udp(udp, Arc::clone(&asked)));
        serving.spawn(serve_tcp(tcp, Arc::clone(&asked)));
        Self { asked, _serving: serving }
    }

    /// Returns the number of queries for a name, which ends with a dot.
    pub fn asked(&self, name: &str) -> usize {
        let asked = self.asked.lock().unwrap();
        asked.iter().filter(|asked| *asked == name).count()
    }

    /// Returns the number of all queries.
    pub fn total(&self) -> usize {
        self.asked.lock().unwrap().len()
    }
}

/// Binds the sockets of a resolver.
pub fn bound(address: SocketAddr) -> (std::net::UdpSocket, std::net::TcpListener) {
    let udp = std::net::UdpSocket::bind(address).unwrap();
    let tcp = std::net::TcpListener::bind(address).unwrap();
    udp.set_nonblocking(true).unwrap();
    tcp.set_nonblocking(true).unwrap();
    (udp, tcp)
}

async fn serve_udp(socket: UdpSocket, asked: Arc<Mutex<Vec<String>>>) {
    let mut query = [0; 4096];
    loop {
        let (length, client) = socket.recv_from(&mut query).await.unwrap();
        let (mut reply, end) = resolve(&query[..length], &asked);
        if reply.len() > 512 {
            // The answer is too long for UDP without EDNS: it has the flag TC and no records, so the client asks by
            // TCP.
            reply.truncate(end);
            reply[2] |= 2;
            reply[6..8].fill(0);
        }
        // The client may have closed its socket; it needs no answer then.
        let _ = socket.send_to(&reply, client).await;
    }
}

async fn serve_tcp(listener: TcpListener, asked: Arc<Mutex<Vec<String>>>) {
    let mut connections = JoinSet::new();
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let asked = Arc::clone(&asked);
        connections.spawn(async move {
            while let Ok(length) = stream.read_u16().await {
                let mut query = vec![0; usize::from(length)];
                stream.read_exact(&mut query).await.unwrap();
                let (reply, _) = resolve(&query, &asked);
                let length = u16::try_from(reply.len()).unwrap().to_be_bytes();
                let framed = [&length[..], &reply].concat();
                stream.write_all(&framed).await.unwrap();
            }
        });
    }
}

/// Returns the complete answer to a query, and the offset at which its question ends. The answer has no EDNS record,
/// which a resolver may omit.
fn resolve(query: &[u8], asked: &Mutex<Vec<String>>) -> (Vec<u8>, usize) {
    let (mut name, mut at) = (String::new(), 12);
    while query[at] != 0 {
        let end = at + 1 + usize::from(query[at]);
        name += &String::from_utf8_lossy(&query[at + 1..end]).to_lowercase();
        name.push('.');
        at = end;
    }
    let (kind, end) = (query[at + 2], at + 5);
    let known: Option<Vec<[u8; 4]>> = match name.as_str() {
        "outside.example." => Some(vec![[127, 0, 0, 1]]),
        "giant.example." => Some((0..64).map(|last| [240, 0, 0, last]).collect()),
        _ => None,
    };
    asked.lock().unwrap().push(name);
    let addresses = known.clone().filter(|_| kind == A).unwrap_or_default();
    let mut reply = query[..end].to_vec();
    reply[2] |= 0x80;
    // The flag RA, with NOERROR or NXDOMAIN.
    reply[3] = if known.is_some() { 0x80 } else { 0x83 };
    reply[6..12].fill(0);
    reply[7] = u8::try_from(addresses.len()).unwrap();
    for address in addresses {
        // The name of the question, type A, class IN, a TTL of 9 s, and 4 bytes of data.
        reply.extend([0xc0, 12, 0, A, 0, 1, 0, 0, 0, 9, 0, 4]);
        reply.extend(address);
    }
    (reply, end)
}

/// Returns the addresses in a text, sorted and without duplicates.
pub fn addresses(text: &str) -> Vec<IpAddr> {
    let words = text.split_whitespace();
    let mut found: Vec<IpAddr> = words.filter_map(|word| word.parse().ok()).collect();
    found.sort();
    found.dedup();
    found
}
