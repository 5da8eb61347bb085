//! Tests the DNS server with real sockets.

use std::task::{Context, Waker};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{Instant, timeout};

use super::answer::tests::{Message, OWN_OPT, decode, query};
use super::name_table::tests::{domains, encode, external};
use super::*;
use crate::logging::logged;
use crate::runtime::lifecycle::Tasks;

/// A resolver. It answers names that begin with `slow` late, answers names that begin with `never` never, and
/// fails for names that begin with `fails`.
struct Resolver;

impl Forward for Resolver {
    async fn forward(&self, query: Bytes, transport: Transport) -> Option<Bytes> {
        let mut reply = query.to_vec();
        reply[2] |= 0x80;
        match query[13..].iter().take(5).collect::<Vec<_>>()[..] {
            [b's', b'l', b'o', b'w', ..] => tokio::time::sleep(Duration::from_millis(500)).await,
            [b'n', b'e', b'v', b'e', b'r'] => std::future::pending().await,
            [b'f', b'a', b'i', b'l', b's'] => return None,
            _ => {}
        }
        let last = if transport == Transport::Tcp { 2 } else { 1 };
        reply[6..8].copy_from_slice(&u16::to_be_bytes(1));
        reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 4, 4, 4, last]);
        Some(reply.into())
    }
}

struct Server {
    dns: Dns,
    tasks: Tasks,
    stop_accepting: StopAccepting,
    shutdown: CancellationToken,
    registry: Registry,
    /// Duplicates of the server's sockets, for an agent that takes over.
    duplicates: Vec<Bound>,
}

#[test]
fn debug_lines_say_which_names_are_known_and_which_are_forwarded() {
    let (server, _) = unserved();
    let shared = server::Shared {
        dns: server.dns.clone(),
        forwarder: Resolver,
        policy: Policy { ttl: 30, forward_before_first_table: false },
    };
    let hosts = encode([("known.test", external(&["1.2.3.4"]))]);
    let table = NameTable::build(&hosts, domains()).expect("a table");
    let log = logged(|| {
        let mut out = Vec::new();
        let [known, other] = ["known.test", "other.test"].map(|name| query(name, 1, None));
        shared.answer(&other, Transport::Udp, None, &mut out);
        shared.answer(&other, Transport::Udp, Some(&table), &mut out);
        shared.answer(&known, Transport::Udp, Some(&table), &mut out);
    });
    for line in [
        "dns: dns request for host \"other.test\" before lookup table is loaded",
        "dns: response for hostname \"other.test\" not found in dns proxy, querying upstream",
        "dns: response for hostname \"known.test\" (found=true)",
    ] {
        assert!(log.contains(line), "{log}");
    }
}

fn server() -> Server {
    let (mut server, serving) = unserved();
    server.tasks.spawn("dns", serving);
    server
}

/// Returns a server, and the future that serves.
fn unserved() -> (Server, impl Future<Output = Result<(), BoxError>> + Send) {
    let config = || Config {
        addresses: vec!["127.0.0.1:0".into(), "[::1]:0".into()],
        search_domains: domains(),
        policy: Policy { ttl: 30, forward_before_first_table: false },
    };
    let (registry, shutdown) = (Registry::default(), CancellationToken::new());
    // Tried again, because the port that the kernel chooses for UDP may be in use for TCP.
    let bound = std::iter::repeat_with(|| bind(&config()).ok());
    let bound = bound.take(9).flatten().next().expect("bound");
    let addresses = bound.iter().map(|(udp, _)| udp.local_addr());
    let addresses: Result<_, _> = addresses.collect();
    let stop_accepting = StopAccepting::default();
    let duplicates = bound.iter().map(|(udp, tcp)| Ok((udp.try_clone()?, tcp.try_clone()?)));
    let duplicates = duplicates.collect::<io::Result<_>>().expect("duplicates");
    let (dns, serving) = serving(config(), bound, &registry, &stop_accepting, &shutdown);
    // Set here, because tests use the addresses before the future has set them.
    dns.addresses.set(addresses.expect("addresses")).expect("unset");
    let server =
        Server { dns, tasks: Tasks::default(), stop_accepting, shutdown, registry, duplicates };
    (server, serving)
}

/// Returns a server on these sockets: its handle, and the future that serves.
fn serving(
    config: Config,
    bound: Vec<Bound>,
    registry: &Registry,
    stop_accepting: &StopAccepting,
    shutdown: &CancellationToken,
) -> (Dns, impl Future<Output = Result<(), BoxError>> + Send + use<>) {
    let sockets = std::future::ready(Ok(bound));
    let (stop_accepting, shutdown) = (stop_accepting.clone(), shutdown.clone());
    new(config, sockets, Resolver, registry, stop_accepting, shutdown)
}

async fn with_table() -> Server {
    let server = server();
    let table = encode([("mesh.local", external(&["1.2.3.4", "::1"]))]);
    server.dns.update(table.into()).await.expect("a table");
    server
}

impl Server {
    async fn udp(&self) -> UdpSocket {
        client(self.dns.addresses()[0]).await
    }

    async fn tcp(&self) -> TcpStream {
        let stream = TcpStream::connect(self.dns.addresses()[0]).await;
        stream.expect("a connection")
    }
}

async fn client(address: SocketAddr) -> UdpSocket {
    let own = if address.is_ipv4() { "127.0.0.1:0" } else { "[::1]:0" };
    let client = UdpSocket::bind(own).await.expect("a socket");
    client.connect(address).await.expect("connected");
    client
}

async fn ask(client: &UdpSocket, query: &[u8]) -> Message {
    client.send(query).await.expect("sent");
    decode(&next(client).await)
}

async fn next(client: &UdpSocket) -> Vec<u8> {
    let mut reply = vec![0; 65_535];
    let length = client.recv(&mut reply).await.expect("an answer");
    reply.truncate(length);
    reply
}

async fn send(stream: &mut TcpStream, query: &[u8]) {
    let framed = [&(query.len() as u16).to_be_bytes(), query].concat();
    stream.write_all(&framed).await.expect("sent");
}

async fn receive(stream: &mut TcpStream) -> Message {
    let mut reply = vec![0; usize::from(stream.read_u16().await.expect("an answer"))];
    stream.read_exact(&mut reply).await.expect("all of it");
    decode(&reply)
}

#[tokio::test]
async fn answers_both_families_over_both_protocols() {
    let server = with_table().await;
    for address in server.dns.addresses() {
        let udp = client(*address).await;
        let message = ask(&udp, &query("mesh.local", 1, None)).await;
        assert_eq!(message.answers[0].3, "1.2.3.4");
        let message = ask(&udp, &query("other.com", 1, None)).await;
        assert_eq!(message.answers[0].3, "4.4.4.1");
        let mut tcp = TcpStream::connect(address).await.expect("a connection");
        send(&mut tcp, &query("mesh.local", 28, None)).await;
        assert_eq!(receive(&mut tcp).await.answers[0].3, "::1");
        send(&mut tcp, &query("other.com", 1, None)).await;
        assert_eq!(receive(&mut tcp).await.answers[0].3, "4.4.4.2");
    }
    let page = server.registry.render();
    for line in [
        "istio_agent_dns_requests_total 8\n",
        "istio_agent_dns_responses_total{rcode=\"NOERROR\",source=\"upstream\"} 4\n",
        "istio_agent_dns_name_table_hosts 1\n",
    ] {
        assert!(page.contains(line), "{line} is not in\n{page}");
    }
}

#[tokio::test]
async fn refused_messages_are_counted_as_neither_request_nor_response() {
    let server = with_table().await;
    let udp = server.udp().await;
    let mut status = query("mesh.local", 1, Some(1232));
    status[2] = 2 << 3;
    let mut tcp = server.tcp().await;
    send(&mut tcp, &status).await;
    receive(&mut tcp).await;
    // The second message is longer than the server accepts.
    for refused in [status, vec![1; 5000]] {
        udp.send(&refused).await.expect("sent");
        next(&udp).await;
    }
    let page = server.registry.render();
    for other in ["istio_agent_dns_requests", "istio_agent_dns_responses"] {
        assert!(!page.contains(other), "{page}");
    }
}

#[tokio::test]
async fn dns_is_ready_after_the_first_table_even_an_empty_one() {
    let server = server();
    let udp = server.udp().await;
    assert_eq!(ask(&udp, &query("mesh.local", 1, None)).await.flags[1] & 0xf, 2);
    assert!(!server.dns.is_ready() && server.dns.to_json().is_none());
    server.dns.update(Bytes::from_static(&[0xff])).await.expect_err("no table");
    assert!(!server.dns.is_ready());
    server.dns.update(Bytes::new()).await.expect("a table");
    assert!(server.dns.is_ready() && server.dns.to_json().is_some());
    assert_eq!(ask(&udp, &query("mesh.local", 1, None)).await.answers[0].3, "4.4.4.1");
}

#[test]
fn the_index_of_a_dropped_update_is_built_before_the_next() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().max_blocking_threads(1).build();
    runtime.unwrap().block_on(async {
        let (server, _serving) = unserved();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        // Occupies the only thread for blocking work until `end` is dropped.
        let busy = tokio::task::spawn_blocking(move || ended.recv());
        let mut update = Box::pin(server.dns.update(Bytes::new()));
        let mut context = Context::from_waker(Waker::noop());
        assert!(update.as_mut().poll(&mut context).is_pending());
        drop(update);
        assert!(server.dns.building.try_lock().is_err());
        drop(end);
        assert!(busy.await.unwrap().is_err());
        drop(server.dns.building.lock().await);
    });
}

#[tokio::test(start_paused = true)]
async fn a_slow_resolver_delays_only_the_clients_that_asked_it() {
    let server = with_table().await;
    let udp = server.udp().await;
    let mut tcp = server.tcp().await;
    for _ in 0..10 {
        udp.send(&query("slow", 1, None)).await.expect("sent");
        send(&mut tcp, &query("slow", 1, None)).await;
    }
    assert_eq!(ask(&udp, &query("mesh.local", 1, None)).await.answers[0].3, "1.2.3.4");
    let mut other = server.tcp().await;
    send(&mut other, &query("mesh.local", 1, None)).await;
    assert_eq!(receive(&mut other).await.answers[0].3, "1.2.3.4");
    for _ in 0..10 {
        assert_eq!(decode(&next(&udp).await).answers[0].3, "4.4.4.1");
        assert_eq!(receive(&mut tcp).await.answers[0].3, "4.4.4.2");
    }
}

#[tokio::test]
async fn a_query_fails_without_an_answer_or_with_too_many_waiting() {
    let server = with_table().await;
    let udp = server.udp().await;
    let fails = query("fails", 1, Some(1232));
    let message = ask(&udp, &fails).await;
    let expected = ([0x81, 0x82], Some(OWN_OPT.to_vec()));
    assert_eq!((message.flags, message.edns), expected);
    // The most queries that may wait for resolvers.
    for _ in 0..1024 {
        udp.send(&query("never", 1, None)).await.expect("sent");
        // Lets the server receive each query, because a full buffer would lose some.
        tokio::task::yield_now().await;
    }
    let message = ask(&udp, &query("other.com", 1, None)).await;
    assert_eq!(message.flags[1] & 0xf, 2);
    let failed = "istio_agent_dns_responses_total{rcode=\"SERVFAIL\",source=\"agent\"} 2\n";
    assert!(server.registry.render().contains(failed));
    assert_eq!(ask(&udp, &query("mesh.local", 1, None)).await.answers[0].3, "1.2.3.4");
}

#[tokio::test(start_paused = true)]
async fn a_silent_connection_is_closed() {
    let server = with_table().await;
    let mut silent = server.tcp().await;
    let start = Instant::now();
    assert_eq!(silent.read(&mut [0; 8]).await.ok(), Some(0));
    assert_eq!(start.elapsed().as_secs(), 2);
    let mut half = server.tcp().await;
    send(&mut half, &query("mesh.local", 1, None)).await;
    receive(&mut half).await;
    let start = Instant::now();
    // An incomplete query does not extend the time limit.
    half.write_all(&[0, 40, 1]).await.expect("sent");
    assert_eq!(half.read(&mut [0; 8]).await.ok(), Some(0));
    assert_eq!(start.elapsed().as_secs(), 8);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_closes_its_side_still_gets_its_answers() {
    let server = with_table().await;
    let mut tcp = server.tcp().await;
    send(&mut tcp, &query("slow", 1, None)).await;
    tcp.shutdown().await.expect("closed");
    assert_eq!(receive(&mut tcp).await.answers[0].3, "4.4.4.2");
    assert_eq!(tcp.read(&mut [0; 8]).await.ok(), Some(0));
}

#[tokio::test]
async fn the_dns_server_ends_on_shutdown() {
    let mut server = with_table().await;
    let _open = server.tcp().await;
    server.shutdown.cancel();
    let ended = timeout(Duration::from_secs(5), server.tasks.next_ended()).await;
    assert!(ended.expect("it ends").result.is_ok());
}

#[tokio::test]
async fn another_agent_takes_over_the_dns_sockets_without_losing_a_query() {
    let mut former = with_table().await;
    let udp = former.udp().await;
    udp.send(&query("slow.com", 1, None)).await.expect("sent");
    let mut tcp = former.tcp().await;
    send(&mut tcp, &query("other.com", 1, None)).await;
    receive(&mut tcp).await;
    former.stop_accepting.begin().await;
    // The former agent still answers its forwarded query and serves its connection. The new query stays in
    // the socket until the other agent serves.
    let later = former.udp().await;
    later.send(&query("other.com", 1, None)).await.expect("sent");
    assert_eq!(decode(&next(&udp).await).answers.len(), 1);
    send(&mut tcp, &query("other.com", 1, None)).await;
    receive(&mut tcp).await;
    let (stop_accepting, shutdown) = (StopAccepting::default(), CancellationToken::new());
    let config = Config {
        addresses: Vec::new(),
        search_domains: domains(),
        policy: Policy { ttl: 30, forward_before_first_table: true },
    };
    let bound = std::mem::take(&mut former.duplicates);
    let (_dns, serving) = serving(config, bound, &former.registry, &stop_accepting, &shutdown);
    former.tasks.spawn("the other agent", serving);
    assert_eq!(decode(&next(&later).await).answers.len(), 1);
    let mut new = former.tcp().await;
    send(&mut new, &query("other.com", 1, None)).await;
    receive(&mut new).await;
}

#[tokio::test]
async fn an_address_in_use_is_an_error_that_names_it() {
    let server = server();
    let address = server.dns.addresses()[0].to_string();
    let config = Config {
        addresses: vec![address.clone()],
        search_domains: domains(),
        policy: Policy { ttl: 30, forward_before_first_table: false },
    };
    let problem = bind(&config).expect_err("in use");
    assert_eq!(problem.code, Code::DnsPortTaken);
    let expected = format!("failed to start local DNS server: cannot listen on udp {address}: ");
    assert!(problem.to_string().starts_with(&expected), "{problem}");
}
