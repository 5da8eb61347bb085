//! Holds the listening sockets of the status port and of DNS, which a handover passes to the other agent.

use std::collections::HashMap;
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
pub(crate) struct Ports(Arc<SetOnce<Vec<OwnedFd>>>);

impl Ports {
    pub(crate) fn bind(&self, config: &Config) -> Result<(), Problem> {
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
    pub(crate) fn set(&self, sockets: Vec<OwnedFd>) {
        // An agent gets its sockets once.
        let _ = self.0.set(sockets);
    }

    /// Waits until this agent has the sockets.
    pub(crate) async fn wait(&self) {
        self.0.wait().await;
    }

    /// Duplicates all sockets once this agent has them.
    pub(crate) async fn duplicate(&self) -> io::Result<Vec<OwnedFd>> {
        self.0.wait().await.iter().map(OwnedFd::try_clone).collect()
    }

    /// Duplicates the status port.
    pub(crate) async fn status(self, port: u16) -> io::Result<TcpListener> {
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
    pub(crate) async fn dns(self) -> io::Result<Vec<dns::Bound>> {
        let mut sockets = Vec::new();
        let mut listeners = HashMap::new();
        for socket in self.duplicate().await? {
            if sockopt::socket_type(&socket)? == SocketType::DGRAM {
                sockets.push(UdpSocket::from(socket));
            } else {
                let listener = TcpListener::from(socket);
                listeners.insert(listener.local_addr()?, listener);
            }
        }
        let mut bound = Vec::new();
        for udp in sockets {
            if let Some(tcp) = listeners.remove(&udp.local_addr()?) {
                bound.push((udp, tcp));
            }
        }
        Ok(bound)
    }
}
