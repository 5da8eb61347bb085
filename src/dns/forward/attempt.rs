//! One server, asked once.
//!
//! Each attempt has a socket, a port and an id of its own, and takes nothing but a reply with that
//! id and our question from the server it asked; anything else is counted and waited past. A reply
//! cut short is fetched whole over TCP, and passed on as it is where that fails or takes long: whoever
//! asked knows by it that there is more. A server that cannot bear our OPT record is asked without.
//!
//! Does not watch the time otherwise: its owner drops it.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use super::exchange::says_it_cannot;
use super::in_flight::Flight;
use super::metrics::Metrics;
use super::query::Query;
use super::random::Ids;
use super::reply::{Arrival, Reply};
use crate::dns::Transport;
use crate::dns::wire;

/// How long the whole of a reply cut short may take. Where TCP is not let through, nothing comes.
const WHOLE: Duration = Duration::from_secs(1);

/// What attempts share.
#[derive(Debug)]
pub(super) struct Means {
    pub(super) ids: Ids,
    pub(super) sockets: Semaphore,
    pub(super) metrics: Metrics,
}

/// One question's part in its attempts.
#[derive(Debug)]
pub(super) struct Asked<'a> {
    pub(super) query: &'a Query,
    pub(super) flight: &'a Flight,
    /// A reply cut short and whose it is, for when the whole one does not come.
    pub(super) cut_short: Mutex<Option<(SocketAddr, Reply)>>,
}

/// Why an attempt gave nothing.
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
    /// Whether it is the server's fault, or that of the network on the way.
    pub(super) fn is_of_server(&self) -> bool {
        let ours = [
            Errno::MFILE,
            Errno::NFILE,
            Errno::NOBUFS,
            Errno::NOMEM,
            // A query too long to be sent.
            Errno::MSGSIZE,
        ];
        let is_ours = |error: &io::Error| {
            Errno::from_io_error(error).is_some_and(|error| ours.contains(&error))
        };
        match self {
            Self::Io(error) => !is_ours(error),
            Self::Broken | Self::NotOurs => true,
            Self::NoId | Self::TooManySockets => false,
        }
    }
}

impl Means {
    pub(super) async fn ask(
        &self,
        asked: &Asked<'_>,
        server: SocketAddr,
        transport: Transport,
        is_plain: bool,
    ) -> Result<Arrival, Failed> {
        let plain = asked.query.plain();
        if let (true, Some(plain)) = (is_plain, &plain) {
            return self.ask_once(asked, plain, server, transport).await;
        }
        let arrival = self.ask_once(asked, asked.query, server, transport).await?;
        match plain {
            Some(plain) if cannot_bear_opt(&arrival) => {
                self.ask_once(asked, &plain, server, transport).await
            }
            _ => Ok(arrival),
        }
    }

    async fn ask_once(
        &self,
        asked: &Asked<'_>,
        query: &Query,
        server: SocketAddr,
        transport: Transport,
    ) -> Result<Arrival, Failed> {
        if transport == Transport::Udp {
            let arrival = self.over_udp(asked, query, server).await?;
            let Arrival::Truncated(cut_short) = arrival else {
                return Ok(arrival);
            };
            if !says_it_cannot(cut_short.rcode()) {
                asked.keep(server, cut_short.clone());
            }
            let why = match timeout(WHOLE, self.over_tcp(asked, query, server)).await {
                Ok(Ok(whole)) => return Ok(whole),
                Ok(Err(error)) => error.to_string(),
                Err(late) => late.to_string(),
            };
            tracing::debug!(target: "dns", "upstream failure: {server}: TCP: {why}");
            return Ok(Arrival::Truncated(cut_short));
        }
        self.over_tcp(asked, query, server).await
    }

    async fn over_udp(
        &self,
        asked: &Asked<'_>,
        query: &Query,
        server: SocketAddr,
    ) -> Result<Arrival, Failed> {
        let _permit = self.permit()?;
        let socket = UdpSocket::bind(any_port(server)).await?;
        socket.connect(server).await?;
        let (id, message) = self.message(asked, query)?;
        socket.send(&message).await?;
        // Some servers send more than they were asked to. One byte more tells what was cut.
        let mut buffer = vec![0; query.size().max(4096) + 1];
        loop {
            let (length, from) = socket.recv_from(&mut buffer).await?;
            let bytes = &buffer[..length];
            let arrival = match Arrival::read(bytes, id, query) {
                arrival if length == buffer.len() => arrival.cut(bytes, query),
                arrival => arrival,
            };
            // Until it was connected, the socket took from anybody.
            let is_from_server = from.ip() == server.ip() && from.port() == server.port();
            match arrival {
                Arrival::Broken if is_from_server => return Err(Failed::Broken),
                Arrival::NotOurs | Arrival::Broken => self.metrics.ignored.inc(),
                _ if !is_from_server => self.metrics.ignored.inc(),
                arrival => return Ok(arrival),
            }
        }
    }

    async fn over_tcp(
        &self,
        asked: &Asked<'_>,
        query: &Query,
        server: SocketAddr,
    ) -> Result<Arrival, Failed> {
        let _permit = self.permit()?;
        let mut stream = TcpStream::connect(server).await?;
        let (id, message) = self.message(asked, query)?;
        let length = u16::try_from(message.len()).map_err(io::Error::other)?;
        let framed = [&length.to_be_bytes(), message.as_slice()].concat();
        stream.write_all(&framed).await?;
        let length = stream.read_u16().await?;
        // Memory grows with what comes, not with what is promised.
        let mut bytes = Vec::new();
        let read = stream.take(length.into()).read_to_end(&mut bytes).await?;
        if read < usize::from(length) {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        match Arrival::read(&bytes, id, query) {
            Arrival::NotOurs => {
                self.metrics.ignored.inc();
                Err(Failed::NotOurs)
            }
            Arrival::Broken => Err(Failed::Broken),
            arrival => Ok(arrival),
        }
    }

    fn permit(&self) -> Result<SemaphorePermit<'_>, Failed> {
        self.sockets
            .try_acquire()
            .map_err(|_| Failed::TooManySockets)
    }

    fn message(&self, asked: &Asked<'_>, query: &Query) -> Result<(u16, Vec<u8>), Failed> {
        let id = self.ids.next().map_err(|_| Failed::NoId)?;
        let message = query.with_id(id);
        asked.flight.sent_as(id, message.len());
        Ok((id, message))
    }
}

impl Asked<'_> {
    pub(super) fn take_cut_short(&self) -> Option<Reply> {
        self.kept().take().map(|(_, reply)| reply)
    }

    /// Who has sent a reply cut short, if anybody has.
    pub(super) fn cut_by(&self) -> Option<SocketAddr> {
        self.kept().as_ref().map(|(server, _)| *server)
    }

    fn keep(&self, server: SocketAddr, cut_short: Reply) {
        self.kept().get_or_insert((server, cut_short));
    }

    fn kept(&self) -> MutexGuard<'_, Option<(SocketAddr, Reply)>> {
        self.cut_short.lock()
    }
}

fn any_port(server: SocketAddr) -> SocketAddr {
    match server {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}

/// Source: RFC 6891, section 7.
fn cannot_bear_opt(arrival: &Arrival) -> bool {
    let rcode = match arrival {
        Arrival::Bare(rcode) => *rcode,
        Arrival::Reply(reply) if !reply.has_opt() => reply.rcode(),
        _ => return false,
    };
    [wire::FORMERR, wire::NOTIMP].contains(&rcode)
}
