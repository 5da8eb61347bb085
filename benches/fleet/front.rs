//! What stands between the agents and the control plane, as a load balancer does: it records the dials.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::Seen;

#[derive(Default)]
pub(super) struct Record {
    pub(super) dials: Mutex<Seen>,
    /// Of certificates, answered.
    pub(super) requests: Mutex<Seen>,
    /// Discovery streams.
    pub(super) opened: Mutex<Seen>,
}

pub(super) struct Front {
    pub(super) port: u16,
    pub(super) seen: Arc<Record>,
    /// While it is not, connections are closed, and new ones as soon as they are accepted.
    pub(super) is_up: watch::Sender<bool>,
    _accepting: JoinSet<()>,
}

impl Front {
    pub(super) async fn start(istiod: SocketAddr) -> Self {
        // All of 127.0.0.0/8.
        let listener = TcpListener::bind("0.0.0.0:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let seen = Arc::new(Record::default());
        let is_up = watch::Sender::new(true);
        let relaying = relay(listener, istiod, is_up.subscribe(), seen.clone());
        let _accepting = JoinSet::from_iter([relaying]);
        Self {
            port,
            seen,
            is_up,
            _accepting,
        }
    }

    /// The address an agent dials. It tells the agents apart.
    pub(super) fn address(&self, agent: usize) -> SocketAddr {
        let [_, _, high, low] = u32::try_from(agent).expect("a small number").to_be_bytes();
        (Ipv4Addr::new(127, 1, high, low), self.port).into()
    }

    /// Open now.
    pub(super) fn connections(&self) -> usize {
        // Each holds a receiver, beside the one that accepts.
        self.is_up.receiver_count() - 1
    }
}

async fn relay(
    listener: TcpListener,
    istiod: SocketAddr,
    is_up: watch::Receiver<bool>,
    seen: Arc<Record>,
) {
    let mut connections = JoinSet::new();
    loop {
        let (mut agent, _) = tokio::select! {
            accepted = listener.accept() => accepted.expect("a connection"),
            Some(_) = connections.join_next() => continue,
        };
        let SocketAddr::V4(dialed) = agent.local_addr().expect("an address") else {
            continue;
        };
        let [_, _, high, low] = dialed.ip().octets();
        let number = usize::from(high) << 8 | usize::from(low);
        seen.dials.lock().push((Instant::now(), number));
        let mut is_up = is_up.clone();
        connections.spawn(async move {
            if !*is_up.borrow() {
                return;
            }
            let Ok(mut istiod) = TcpStream::connect(istiod).await else {
                return;
            };
            for stream in [&agent, &istiod] {
                stream.set_nodelay(true).expect("a TCP socket");
            }
            tokio::select! {
                _ = copy_bidirectional(&mut agent, &mut istiod) => {}
                _ = is_up.wait_for(|is_up| !is_up) => {}
            }
        });
    }
}
