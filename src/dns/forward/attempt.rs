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

use super::in_flight::SharedQuery;
use super::query::Query;
use super::reply::{Received, Unusable};
use super::upstream_query::Upstream;
use crate::dns::Transport;

/// Sockets open at one time for all queries, unless the process may have fewer.
const MAX_SOCKETS: usize = 2048;

/// How a query is sent to a server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sending {
    pub(super) server: SocketAddr,
    pub(super) transport: Transport,
    /// Whether our OPT record is in it.
    pub(super) with_opt: bool,
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
    #[error(transparent)]
    Unusable(#[from] Unusable),
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
            Self::Unusable(_) => true,
            Self::NoId | Self::TooManySockets => false,
        }
    }
}

/// How many sockets may be open. The rest of the agent needs some, too.
pub(super) fn max_sockets() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    let quarter = limit.and_then(|limit| usize::try_from(limit / 4).ok());
    quarter.unwrap_or(MAX_SOCKETS).min(MAX_SOCKETS)
}

impl Upstream {
    /// Sends the query and waits for the reply.
    pub(super) async fn send(
        &self,
        query: &Query,
        shared: &SharedQuery,
        sending: Sending,
    ) -> Result<Received, Failed> {
        let permit = self.sockets.try_acquire();
        let _permit = permit.map_err(|_| Failed::TooManySockets)?;
        let mut id = [0; 2];
        aws_lc_rs::rand::fill(&mut id).map_err(|_| Failed::NoId)?;
        let id = u16::from_be_bytes(id);
        let server = sending.server;
        let message = query.message(id, sending.with_opt);
        match sending.transport {
            Transport::Udp => {
                let socket = UdpSocket::bind(any_port(server)).await?;
                socket.connect(server).await?;
                shared.sent_as(id, message.len());
                socket.send(&message).await?;
                self.receive(&socket, id, query, sending).await
            }
            Transport::Tcp => {
                let mut stream = TcpStream::connect(server).await?;
                shared.sent_as(id, message.len());
                let length = u16::try_from(message.len()).map_err(io::Error::other)?;
                let framed = [&length.to_be_bytes(), message.as_slice()].concat();
                stream.write_all(&framed).await?;
                let reply = read_message(&mut stream).await?;
                let received = Received::read(&reply, id, query, false);
                if let Err(Unusable::NotOurs) = received {
                    self.metrics.ignored.inc();
                }
                Ok(received?)
            }
        }
    }

    async fn receive(
        &self,
        socket: &UdpSocket,
        id: u16,
        query: &Query,
        sending: Sending,
    ) -> Result<Received, Failed> {
        // Some servers send more than they were asked to. One byte more tells what was cut.
        let mut buffer = vec![0; query.size(sending.with_opt).max(4096) + 1];
        loop {
            let (length, from) = socket.recv_from(&mut buffer).await?;
            let is_cut = length == buffer.len();
            // Until it was connected, the socket took from any address.
            let server = sending.server;
            let is_from_server = from.ip() == server.ip() && from.port() == server.port();
            match Received::read(&buffer[..length], id, query, is_cut) {
                Ok(received) if is_from_server => return Ok(received),
                Err(Unusable::Broken) if is_from_server => return Err(Unusable::Broken.into()),
                _ => self.metrics.ignored.inc(),
            }
        }
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
