//! A DNS server whose replies a test determines, over UDP and TCP at one address.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;

use super::Answer;
use super::messages::advertised;

/// A server that runs until it is dropped.
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<Vec<Vec<u8>>>>,
    _tasks: JoinSet<()>,
}

impl Upstream {
    /// Starts a server that replies to each query over UDP with `datagrams`, and over TCP with `bytes`.
    pub(crate) async fn new<U, T>(mut datagrams: U, mut bytes: T) -> Self
    where
        U: FnMut(&[u8]) -> Vec<Vec<u8>> + Send + 'static,
        T: FnMut(&[u8]) -> Vec<u8> + Send + 'static,
    {
        let (udp, tcp) = sockets().await;
        let address = udp.local_addr().expect("an address");
        let seen = Arc::<Mutex<Vec<Vec<u8>>>>::default();
        let mut tasks = JoinSet::new();
        let log = seen.clone();
        tasks.spawn(async move {
            let mut buffer = [0; 65536];
            loop {
                // An error of an earlier reply, for example to a closed socket, does not end the server.
                let Ok((length, from)) = udp.recv_from(&mut buffer).await else {
                    continue;
                };
                log.lock().expect("whole").push(buffer[..length].to_vec());
                for datagram in datagrams(&buffer[..length]) {
                    udp.send_to(&datagram, from).await.expect("it is sent");
                }
            }
        });
        let log = seen.clone();
        tasks.spawn(async move {
            let mut open = Vec::new();
            loop {
                let (mut stream, _) = tcp.accept().await.expect("a connection");
                if let Ok(query) = framed(&mut stream).await {
                    log.lock().expect("whole").push(query.clone());
                    // The client may close the connection before it has read everything.
                    let _ = stream.write_all(&bytes(&query)).await;
                    open.push(stream);
                }
            }
        });
        Self { address, seen, _tasks: tasks }
    }

    /// Starts a server with the same answer over UDP and TCP. Over UDP, an answer that exceeds the size that the
    /// query announces is replaced by an empty answer with TC.
    pub(crate) async fn answering(
        answer: impl Fn(&[u8]) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let answer = Arc::new(answer);
        let over_tcp = answer.clone();
        let over_udp = move |query: &[u8]| {
            let whole = answer(query).to(query);
            let limit = advertised(query).unwrap_or(512);
            if whole.len() <= limit.into() {
                return vec![whole];
            }
            let cut = Answer { is_cut: true, ..Answer::default() };
            vec![cut.to(query)]
        };
        Self::new(over_udp, move |query| frame(&over_tcp(query).to(query))).await
    }

    pub(crate) async fn silent() -> Self {
        Self::new(|_| Vec::new(), |_| Vec::new()).await
    }

    /// Returns all queries that the server received.
    pub(crate) fn seen(&self) -> Vec<Vec<u8>> {
        self.seen.lock().expect("whole").clone()
    }
}

pub(crate) fn frame(message: &[u8]) -> Vec<u8> {
    let length = u16::try_from(message.len()).expect("fits");
    [&length.to_be_bytes(), message].concat()
}

/// Returns an address without a server.
pub(crate) async fn unused_address() -> SocketAddr {
    let (udp, _tcp) = sockets().await;
    udp.local_addr().expect("an address")
}

async fn sockets() -> (UdpSocket, TcpListener) {
    loop {
        let udp = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
        let address = udp.local_addr().expect("an address");
        if let Ok(tcp) = TcpListener::bind(address).await {
            return (udp, tcp);
        }
    }
}

async fn framed(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut message = vec![0; length.into()];
    stream.read_exact(&mut message).await?;
    Ok(message)
}
