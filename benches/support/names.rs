//! Name tables in the form that istiod sends, and queries for their names.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

pub const NAME_TABLE: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";

pub fn host(number: usize) -> String {
    format!("service-{number}.namespace-{}.svc.cluster.local", number % 50)
}

pub fn ip(number: usize, last: u8) -> IpAddr {
    [10, (number / 250 % 250) as u8, (number % 250) as u8, last].into()
}

/// Encodes a name table with services of a typical cluster. It is encoded by hand, because building
/// 100,000 messages is slow. The addresses end with `version`.
pub fn name_table(hosts: usize, version: u8) -> Vec<u8> {
    fn field(into: &mut Vec<u8>, number: u8, value: &[u8]) {
        into.push(number << 3 | 2);
        prost::encoding::encode_varint(value.len() as u64, into);
        into.extend_from_slice(value);
    }
    let mut table = Vec::new();
    for number in 0..hosts {
        let ip = ip(number, version).to_string();
        let mut info = Vec::new();
        field(&mut info, 1, ip.as_bytes());
        field(&mut info, 2, b"Kubernetes");
        field(&mut info, 3, format!("service-{number}").as_bytes());
        field(&mut info, 4, format!("namespace-{}", number % 50).as_bytes());
        let mut pair = Vec::new();
        field(&mut pair, 1, host(number).as_bytes());
        field(&mut pair, 2, &info);
        field(&mut table, 1, &pair);
    }
    table
}

pub fn query(id: u16, name: &str) -> Vec<u8> {
    let [high, low] = id.to_be_bytes();
    let mut query = vec![high, low, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        query.push(label.len() as u8);
        query.extend(label.as_bytes());
    }
    query.extend([0, 0, 1, 0, 1]);
    query
}

/// Sends queries until an answer without an error arrives.
pub fn wait_for(address: SocketAddr) {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.connect(address).expect("connected");
    let patience = Some(Duration::from_millis(100));
    socket.set_read_timeout(patience).expect("a timeout");
    for _ in 0..300 {
        let mut reply = [0; 512];
        // The server may not listen yet.
        let _ = socket.send(&query(1, &host(0)));
        match socket.recv(&mut reply) {
            Ok(_) if reply[3] & 0xf == 0 => return,
            _ => std::thread::sleep(Duration::from_millis(20)),
        }
    }
    panic!("there is no answer from {address}");
}
