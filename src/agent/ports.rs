//! The listening sockets that pass to the next agent in a handover: the status port and those of DNS.

use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;

use rustix::net::{SocketType, sockopt};
use tokio::sync::oneshot;

use crate::config::Config;
use crate::problem::Problem;
use crate::{dns, status};

pub(super) struct Ports {
    status: Option<status::Listener>,
    dns: Vec<dns::Bound>,
}

/// Where the status port and the DNS server get their sockets.
pub(super) struct Given {
    pub(super) status: oneshot::Receiver<status::Listener>,
    pub(super) dns: oneshot::Receiver<Vec<dns::Bound>>,
    /// Duplicates of all.
    pub(super) to_pass_on: oneshot::Receiver<Vec<OwnedFd>>,
}

/// Gives them the sockets, once.
pub(super) struct Give {
    status: oneshot::Sender<status::Listener>,
    dns: oneshot::Sender<Vec<dns::Bound>>,
    to_pass_on: oneshot::Sender<Vec<OwnedFd>>,
}

pub(super) fn channel() -> (Give, Given) {
    let (status, status_given) = oneshot::channel();
    let (dns, dns_given) = oneshot::channel();
    let (to_pass_on, duplicates) = oneshot::channel();
    let given = Given {
        status: status_given,
        dns: dns_given,
        to_pass_on: duplicates,
    };
    let give = Give {
        status,
        dns,
        to_pass_on,
    };
    (give, given)
}

impl Give {
    pub(super) fn give(self, ports: Ports) -> io::Result<()> {
        // An error means that the agent has no such server.
        let _ = self.to_pass_on.send(ports.duplicate()?);
        if let Some(status) = ports.status {
            let _ = self.status.send(status);
        }
        let _ = self.dns.send(ports.dns);
        Ok(())
    }
}

impl Ports {
    /// Binds them.
    pub(super) fn bind(config: &Config) -> Result<Self, Problem> {
        let status = config.status.as_ref();
        let dns = config.dns.as_ref();
        Ok(Self {
            status: status.map(|it| status::bind(it.port)).transpose()?,
            dns: dns.map_or(Ok(Vec::new()), |dns| dns::bind(&dns.server))?,
        })
    }

    /// Recognizes the sockets that came from the former agent by type and port.
    pub(super) fn inherited(config: &Config, sockets: Vec<OwnedFd>) -> io::Result<Self> {
        let status_port = config.status.as_ref().map(|status| status.port);
        let (mut status, mut tcp, mut udp) = (None, Vec::new(), Vec::new());
        for socket in sockets {
            if sockopt::socket_type(&socket)? == SocketType::DGRAM {
                udp.push(UdpSocket::from(socket));
                continue;
            }
            let listener = TcpListener::from(socket);
            if Some(listener.local_addr()?.port()) == status_port {
                status = Some(status::Listener::inherited(listener)?);
            } else {
                tcp.push((listener.local_addr()?, listener));
            }
        }
        let mut tcp_of = |address: SocketAddr| {
            let at = tcp.iter().position(|(found, _)| *found == address)?;
            Some(tcp.swap_remove(at).1)
        };
        let mut dns = Vec::new();
        for udp in udp {
            if let Some(tcp) = tcp_of(udp.local_addr()?) {
                dns.push((udp, tcp));
            }
        }
        Ok(Self { status, dns })
    }

    fn duplicate(&self) -> io::Result<Vec<OwnedFd>> {
        let status = self.status.iter().map(status::Listener::duplicate);
        let udp = self.dns.iter().map(|(udp, _)| Ok(udp.try_clone()?.into()));
        let tcp = self.dns.iter().map(|(_, tcp)| Ok(tcp.try_clone()?.into()));
        status.chain(udp).chain(tcp).collect()
    }
}
