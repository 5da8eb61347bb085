//! One query sent to one server, once.
//!
//! Each attempt has a socket, a port and an id of its own, and takes only a reply with that id and our
//! question from the server it asked; anything else is counted and ignored. The caller drops an attempt
//! that takes too long.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::in_flight::SharedQuery;
use super::metrics::Metrics;
use super::query::Query;
use super::reply::Received;
use crate::dns::Transport;

/// Sockets open at one time for all queries, unless the process may have fewer.
const MAX_SOCKETS: usize = 2048;

/// Sends queries within a bound of open sockets.
#[derive(Debug)]
pub(super) struct Sender {
    sockets: Semaphore,
    max_sockets: usize,
    metrics: Metrics,
}

/// Why an attempt brought no reply.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failed {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("no random numbers for an id")]
    NoId,
    #[error("too many sockets are open")]
    TooManySockets,
    #[error("the reply's records do not fit its length")]
    Broken,
    #[error("the reply over TCP is to another query")]
    NotOurs,
}

impl Failed {
    /// Whether it is the fault of the server, or of the network on the way.
    pub(super) fn is_of_server(&self) -> bool {
        let ours = [
            Errno::MFILE,
            Errno::NFILE,
            Errno::NOBUFS,
            Errno::NOMEM,
            // A query too long to be sent.
            Errno::MSGSIZE,
        ];
        match self {
            Self::Io(error) => {
                Errno::from_io_error(error).is_none_or(|error| !ours.contains(&error))
            }
            Self::Broken | Self::NotOurs => true,
            Self::NoId | Self::TooManySockets => false,
        }
    }
}

impl Sender {
    pub(super) fn new(metrics: Metrics) -> Self {
        // The rest of the agent needs some, too.
        let limit = getrlimit(Resource::Nofile).current;
        let quarter = limit.and_then(|limit| usize::try_from(limit / 4).ok());
        let max_sockets = quarter.unwrap_or(MAX_SOCKETS).min(MAX_SOCKETS);
        Self {
            sockets: Semaphore::new(max_sockets),
            max_sockets,
            metrics,
        }
    }

    /// Whether there are sockets for further tries: under load, first tries come first.
    pub(super) fn has_sockets_for_retries(&self) -> bool {
        self.sockets.available_permits() >= self.max_sockets / 2
    }

    /// Sends the query and waits for the reply.
    pub(super) async fn send(
        &self,
        query: Query,
        shared: &SharedQuery,
        server: SocketAddr,
        transport: Transport,
    ) -> Result<Received, Failed> {
        let _permit = self.permit()?;
        let mut id = [0; 2];
        aws_lc_rs::rand::fill(&mut id).map_err(|_| Failed::NoId)?;
        let id = u16::from_be_bytes(id);
        let message = query.with_id(id);
        match transport {
            Transport::Udp => {
                let socket = UdpSocket::bind(any_port(server)).await?;
                socket.connect(server).await?;
                shared.sent_as(id, message.len());
                socket.send(&message).await?;
                self.receive(&socket, id, &query, server).await
            }
            Transport::Tcp => {
                let mut stream = TcpStream::connect(server).await?;
                shared.sent_as(id, message.len());
                let length = u16::try_from(message.len()).map_err(io::Error::other)?;
                let framed = [&length.to_be_bytes(), message.as_slice()].concat();
                stream.write_all(&framed).await?;
                let reply = read_message(&mut stream).await?;
                self.judge_tcp(Received::read(&reply, id, &query))
            }
        }
    }

    async fn receive(
        &self,
        socket: &UdpSocket,
        id: u16,
        query: &Query,
        server: SocketAddr,
    ) -> Result<Received, Failed> {
        // Some servers send more than they were asked to. One byte more tells what was cut.
        let mut buffer = vec![0; query.size().max(4096) + 1];
        loop {
            let (length, from) = socket.recv_from(&mut buffer).await?;
            let bytes = &buffer[..length];
            let received = match Received::read(bytes, id, query) {
                received if length == buffer.len() => received.cut(bytes, query),
                received => received,
            };
            // Until it was connected, the socket took from any address.
            let is_from_server = from.ip() == server.ip() && from.port() == server.port();
            match received {
                Received::Broken if is_from_server => return Err(Failed::Broken),
                Received::NotOurs | Received::Broken => self.metrics.ignored.inc(),
                _ if !is_from_server => self.metrics.ignored.inc(),
                received => return Ok(received),
            }
        }
    }

    fn judge_tcp(&self, received: Received) -> Result<Received, Failed> {
        match received {
            Received::NotOurs => {
                self.metrics.ignored.inc();
                Err(Failed::NotOurs)
            }
            Received::Broken => Err(Failed::Broken),
            received => Ok(received),
        }
    }

    fn permit(&self) -> Result<SemaphorePermit<'_>, Failed> {
        self.sockets
            .try_acquire()
            .map_err(|_| Failed::TooManySockets)
    }
}

/// Reads a message behind its length. Memory grows with what comes, not with what is promised.
async fn read_message(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut message = Vec::new();
    let read = stream.take(length.into()).read_to_end(&mut message).await?;
    if read < usize::from(length) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(message)
}

fn any_port(server: SocketAddr) -> SocketAddr {
    match server {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}
