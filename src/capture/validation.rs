//! Checks with a connection that traffic is captured.
//!
//! What the proxy's user sends over `lo` to an address other than 127.0.0.1 is redirected to the port of
//! inbound traffic. So a connection to 127.0.0.6 must reach a listener of this process, and name the
//! port it was opened to as its original destination.

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::rules::Family;

/// Time between connections, and the limit of each.
const PERIOD: Duration = Duration::from_secs(1);
/// Wait before another connection is accepted after an error.
const PAUSE: Duration = Duration::from_millis(100);

/// The connection to open.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    pub family: Family,
    /// Envoy's ports of outbound and inbound traffic, where the connection may arrive.
    pub ports: [u16; 2],
    /// The port it is opened to.
    pub destination: u16,
    pub limit: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot listen on any of {0}")]
    Listen(String),
    #[error(
        "no connection of user {user} to {destination} was redirected to {listeners} within {limit:?}"
    )]
    NotCaptured {
        user: u32,
        destination: SocketAddr,
        listeners: String,
        limit: Duration,
    },
}

impl Probe {
    /// Connects until a connection is captured, or the limit is reached.
    pub async fn run(&self) -> Result<(), Error> {
        let (here, destination) = match self.family {
            Family::V4 => (
                Ipv4Addr::LOCALHOST.into(),
                Ipv4Addr::new(127, 0, 0, 6).into(),
            ),
            Family::V6 => (Ipv6Addr::LOCALHOST.into(), Ipv6Addr::from(6).into()),
        };
        let addresses = self.ports.map(|port| SocketAddr::new(here, port));
        let listeners = format!("{} or {}", addresses[0], addresses[1]);
        let [outbound, inbound] = addresses.map(listen);
        if outbound.is_none() && inbound.is_none() {
            return Err(Error::Listen(listeners));
        }
        let destination = SocketAddr::new(destination, self.destination);
        let source = SocketAddr::new(here, 0);
        let captured = async {
            tokio::select! {
                () = self.accept(outbound.as_ref()) => {}
                () = self.accept(inbound.as_ref()) => {}
                never = connect(source, destination) => match never {},
            }
        };
        timeout(self.limit, captured)
            .await
            .map_err(|_| Error::NotCaptured {
                user: rustix::process::geteuid().as_raw(),
                destination,
                listeners,
                limit: self.limit,
            })
    }

    /// Returns once the connection arrives. Others are closed.
    async fn accept(&self, listener: Option<&TcpListener>) {
        let Some(listener) = listener else {
            return std::future::pending().await;
        };
        loop {
            let accepted = async {
                let (stream, _) = listener.accept().await?;
                original_destination(self.family, &stream)
            };
            match accepted.await {
                Ok(found) if found == self.destination => return,
                Ok(found) => tracing::debug!("captured a connection to port {found}"),
                Err(error) => {
                    tracing::debug!("accepted no captured connection: {error}");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
}

/// A listener, unless the address is taken.
fn listen(address: SocketAddr) -> Option<TcpListener> {
    let bind = || {
        let socket = socket(address)?;
        socket.set_reuseaddr(true)?;
        // Envoy may be running.
        socket.set_reuseport(true)?;
        socket.bind(address)?;
        socket.listen(16)
    };
    bind()
        .inspect_err(|error| tracing::warn!("cannot listen on {address}: {error}"))
        .ok()
}

fn socket(address: SocketAddr) -> io::Result<TcpSocket> {
    match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }
}

/// Opens one connection after the other.
async fn connect(source: SocketAddr, destination: SocketAddr) -> Infallible {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let opened = async {
            let socket = socket(source)?;
            socket.bind(source)?;
            socket.connect(destination).await
        };
        if let Ok(Err(error)) = timeout(PERIOD, opened).await {
            tracing::debug!("cannot connect to {destination}: {error}");
        }
    }
}

/// The port a captured connection was opened to.
fn original_destination(family: Family, stream: &TcpStream) -> io::Result<u16> {
    Ok(match family {
        Family::V4 => sockopt::ip_original_dst(stream)?.port(),
        Family::V6 => sockopt::ipv6_original_dst(stream)?.port(),
    })
}
