//! A load balancer between the agents and the control planes, which records the dials and the events.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use local_istiod::Event;
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
    /// The certificate requests that were granted.
    pub(super) requests: Mutex<Seen>,
    /// The certificate requests that were refused.
    pub(super) refused: Mutex<Vec<Instant>>,
    /// The discovery streams that were opened.
    pub(super) opened: Mutex<Seen>,
    /// The discovery streams that ended.
    pub(super) closed: Mutex<Seen>,
    /// The discovery streams that an overloaded control plane refused.
    pub(super) attempts: Mutex<Vec<Instant>>,
    /// The control plane of each agent's last stream.
    last: Mutex<BTreeMap<usize, usize>>,
}

impl Record {
    /// Records an event of a control plane. The service account and the node both have the agent's name, which is
    /// a letter and a number.
    pub(super) fn add(&self, istiod: usize, event: &Event) {
        let number = |name: &str| name[1..].parse().expect("a number");
        let agent_of = |node: &str| number(node.trim_end_matches(".default"));
        let now = Instant::now();
        match event {
            Event::Issued { identity, .. } => {
                self.requests.lock().push((now, number(&identity.service_account)));
            }
            Event::Refused { .. } => self.refused.lock().push(now),
            Event::Opened { node, .. } => {
                self.opened.lock().push((now, agent_of(node)));
                self.last.lock().insert(agent_of(node), istiod);
            }
            Event::Closed { node, .. } => self.closed.lock().push((now, agent_of(node))),
            Event::ConnectionFailed { reason, .. } if reason.starts_with("stream not accepted") => {
                self.attempts.lock().push(now);
            }
            _ => {}
        }
    }
}

pub(super) struct Front {
    pub(super) port: u16,
    pub(super) seen: Arc<Record>,
    /// True while the control plane is up. While it is false, open connections are closed, and new
    /// connections are closed as soon as they are accepted.
    pub(super) is_up: watch::Sender<bool>,
    /// The control planes, which get connections in turns.
    pub(super) istiods: watch::Sender<Vec<SocketAddr>>,
    _relaying: JoinSet<()>,
}

impl Front {
    pub(super) async fn start() -> Self {
        // Each agent dials its own address of 127.0.0.0/8.
        let listener = tokio::net::TcpListener::bind("0.0.0.0:0").await;
        let listener = listener.and_then(tokio::net::TcpListener::into_std);
        let listener = listener.expect("a port");
        listener.set_nonblocking(false).expect("a socket");
        let port = listener.local_addr().expect("an address").port();
        let seen = Arc::new(Record::default());
        let (is_up, istiods) = (watch::Sender::new(true), watch::Sender::default());
        let (sender, accepted) = unbounded_channel();
        let record = seen.clone();
        std::thread::spawn(move || accept(&listener, &record, &sender));
        let _relaying =
            JoinSet::from_iter([relay(accepted, istiods.subscribe(), is_up.subscribe())]);
        Self { port, seen, is_up, istiods, _relaying }
    }

    /// Returns the address that an agent dials. Each agent has its own, which identifies the agent.
    pub(super) fn address(&self, agent: usize) -> SocketAddr {
        let [_, _, high, low] = u32::try_from(agent).expect("a small number").to_be_bytes();
        (Ipv4Addr::new(127, 1, high, low), self.port).into()
    }

    /// Returns the agents whose last stream went to this control plane.
    pub(super) fn agents_at(&self, istiod: usize) -> Vec<usize> {
        let last = self.seen.last.lock();
        last.iter().filter(|(_, at)| **at == istiod).map(|(agent, _)| *agent).collect()
    }

    /// Returns the number of open connections.
    pub(super) fn connections(&self) -> usize {
        // Each connection holds a receiver, and the task that relays holds one more.
        self.is_up.receiver_count() - 1
    }
}

/// Accepts connections on a thread of its own, so that a busy runtime does not falsify their times.
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
    istiods: watch::Receiver<Vec<SocketAddr>>,
    is_up: watch::Receiver<bool>,
) {
    let (mut connections, mut turn) = (JoinSet::new(), 0);
    loop {
        let agent = tokio::select! {
            Some(agent) = accepted.recv() => agent,
            Some(_) = connections.join_next() => continue,
        };
        turn += 1;
        let istiod = {
            let istiods = istiods.borrow();
            istiods[turn % istiods.len()]
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
