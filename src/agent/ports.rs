//! Holds the listening sockets of the status port and of DNS, which a handover passes to the other agent.

use std::io;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::net::{SocketType, sockopt};
use tokio::sync::SetOnce;

use crate::config::Config;
use crate::problem::Problem;
use crate::{dns, status};

/// The sockets, once this agent has them. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Ports(Arc<SetOnce<Vec<OwnedFd>>>);

impl Ports {
    pub(super) fn bind(&self, config: &Config) -> Result<(), Problem> {
        let mut sockets = Vec::new();
        if let Some(status) = &config.status {
            sockets.push(status::bind(status.port)?.into());
        }
        if let Some(dns) = &config.dns {
            for (udp, tcp) in dns::bind(&dns.server)? {
                sockets.extend([udp.into(), tcp.into()]);
            }
        }
        self.set(sockets);
        Ok(())
    }

    /// Uses the sockets of the former agent.
    pub(super) fn set(&self, sockets: Vec<OwnedFd>) {
        // It is called once.
        let _ = self.0.set(sockets);
    }

    /// Waits until this agent has them.
    pub(super) async fn given(&self) {
        self.0.wait().await;
    }

    /// Duplicates all of them once there are some.
    pub(super) async fn duplicate(&self) -> io::Result<Vec<OwnedFd>> {
        let sockets = self.0.wait().await;
        sockets.iter().map(OwnedFd::try_clone).collect()
    }

    /// Duplicates the status port.
    pub(super) async fn status(self, port: u16) -> io::Result<TcpListener> {
        for socket in self.duplicate().await? {
            if sockopt::socket_type(&socket)? == SocketType::STREAM {
                let listener = TcpListener::from(socket);
                if listener.local_addr()?.port() == port {
                    return Ok(listener);
                }
            }
        }
        Err(io::Error::other("the former agent did not pass it on"))
    }

    /// Duplicates the DNS sockets. Each UDP socket comes with the TCP socket of the same address.
    pub(super) async fn dns(self) -> io::Result<Vec<dns::Bound>> {
        let (mut udp, mut tcp) = (Vec::new(), Vec::new());
        for socket in self.duplicate().await? {
            if sockopt::socket_type(&socket)? == SocketType::DGRAM {
                udp.push(UdpSocket::from(socket));
            } else {
                let listener = TcpListener::from(socket);
                tcp.push((listener.local_addr()?, listener));
            }
        }
        let mut bound = Vec::new();
        for udp in udp {
            let address = udp.local_addr()?;
            if let Some(of_udp) = tcp.iter().position(|(found, _)| *found == address) {
                bound.push((udp, tcp.swap_remove(of_udp).1));
            }
        }
        Ok(bound)
    }
}
