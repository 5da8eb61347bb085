//! What stands between the agents and the control plane, as a load balancer does: it records the dials.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::copy_bidirectional;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
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
    _relaying: JoinSet<()>,
}

impl Front {
    pub(super) async fn start(istiod: SocketAddr) -> Self {
        // All of 127.0.0.0/8.
        let listener = tokio::net::TcpListener::bind("0.0.0.0:0").await;
        let listener = listener.and_then(tokio::net::TcpListener::into_std);
        let listener = listener.expect("a port");
        listener.set_nonblocking(false).expect("a socket");
        let port = listener.local_addr().expect("an address").port();
        let seen = Arc::new(Record::default());
        let is_up = watch::Sender::new(true);
        let (sender, accepted) = unbounded_channel();
        let record = seen.clone();
        std::thread::spawn(move || accept(&listener, &record, &sender));
        let _relaying = JoinSet::from_iter([relay(accepted, istiod, is_up.subscribe())]);
        Self {
            port,
            seen,
            is_up,
            _relaying,
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

/// Takes connections on a thread of its own, so that a busy runtime does not falsify their times.
fn accept(listener: &TcpListener, seen: &Record, accepted: &UnboundedSender<TcpStream>) {
    loop {
        let (agent, _) = listener.accept().expect("a connection");
        let now = Instant::now();
        if let SocketAddr::V4(dialed) = agent.local_addr().expect("an address") {
            let [_, _, high, low] = dialed.ip().octets();
            let number = usize::from(high) << 8 | usize::from(low);
            seen.dials.lock().push((now, number));
        }
        if accepted.send(agent).is_err() {
            return;
        }
    }
}

async fn relay(
    mut accepted: UnboundedReceiver<TcpStream>,
    istiod: SocketAddr,
    is_up: watch::Receiver<bool>,
) {
    let mut connections = JoinSet::new();
    loop {
        let agent = tokio::select! {
            Some(agent) = accepted.recv() => agent,
            Some(_) = connections.join_next() => continue,
        };
        let mut is_up = is_up.clone();
        connections.spawn(async move {
            if !*is_up.borrow() {
                return;
            }
            let Ok(mut istiod) = tokio::net::TcpStream::connect(istiod).await else {
                return;
            };
            agent.set_nonblocking(true).expect("a TCP socket");
            let mut agent = tokio::net::TcpStream::from_std(agent).expect("a TCP socket");
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
