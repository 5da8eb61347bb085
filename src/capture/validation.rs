//! Opens connections to check that traffic is captured.
//!
//! Connections of the proxy's user over `lo` to an address other than 127.0.0.1 are redirected to the port
//! of inbound traffic. So a connection to 127.0.0.6 must reach a listener of this process, with the port
//! that it was opened to as its original destination.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpSocket};
use tokio::time::{interval, timeout};

use super::config::Config;
use super::rules::Family;
use crate::problem::{Code, Problem};
use crate::runtime::duration::rounded;

/// Time between connections, and time limit of each.
const PERIOD: Duration = Duration::from_secs(1);
/// Pause before another connection is accepted after an error.
const PAUSE: Duration = Duration::from_millis(100);

/// Connects to this port until a connection arrives at one of Envoy's ports, or the limit is reached.
pub async fn run(
    config: &Config,
    family: Family,
    port: u16,
    limit: Duration,
) -> Result<(), Problem> {
    let (loopback, other): (IpAddr, IpAddr) = match family {
        Family::V4 => (Ipv4Addr::LOCALHOST.into(), [127, 0, 0, 6].into()),
        Family::V6 => (Ipv6Addr::LOCALHOST.into(), Ipv6Addr::from(6).into()),
    };
    let destination = SocketAddr::new(other, port);
    let addresses = [config.outbound_port, config.inbound_port];
    let addresses = addresses.map(|port| SocketAddr::new(loopback, port));
    let names = format!("{} or {}", addresses[0], addresses[1]);
    let outbound = listen(addresses[0])?;
    let inbound = listen(addresses[1])?;
    let captured = async {
        tokio::select! {
            () = accept(&outbound, destination) => {}
            () = accept(&inbound, destination) => {}
            never = connect(SocketAddr::new(loopback, 0), destination) => match never {},
        }
    };
    timeout(limit, captured).await.map_err(|_| {
        let user = rustix::process::geteuid().as_raw();
        let limit = rounded(limit);
        failed(format!(
            "no connection of user {user} to {destination} was redirected to {names} within {limit}"
        ))
    })
}

/// Returns once a connection to the port of the destination arrives. Closes other connections.
async fn accept(listener: &TcpListener, destination: SocketAddr) {
    loop {
        let accepted = async {
            let (stream, _) = listener.accept().await?;
            io::Result::Ok(match destination {
                SocketAddr::V4(_) => sockopt::ip_original_dst(stream)?.port(),
                SocketAddr::V6(_) => sockopt::ipv6_original_dst(stream)?.port(),
            })
        };
        match accepted.await {
            Ok(port) if port == destination.port() => return,
            Ok(port) => tracing::debug!("captured a connection to port {port}"),
            Err(error) => {
                tracing::debug!("cannot accept a captured connection: {error}");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

fn failed(found: String) -> Problem {
    Problem::new(Code::CaptureValidationFailed, "iptables validation failed", found)
}

fn listen(address: SocketAddr) -> Result<TcpListener, Problem> {
    let listener = socket(address).and_then(|socket| {
        socket.set_reuseaddr(true)?;
        // Envoy may be running.
        socket.set_reuseport(true)?;
        socket.bind(address)?;
        socket.listen(16)
    });
    listener.map_err(|error| failed(format!("cannot listen on {address}: {error}")))
}

fn socket(address: SocketAddr) -> io::Result<TcpSocket> {
    match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }
}

/// Opens connections, one each period.
async fn connect(source: SocketAddr, destination: SocketAddr) -> Infallible {
    let mut ticks = interval(PERIOD);
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
