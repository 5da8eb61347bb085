//! Implements a fake admin port, which responds in a selected way and records the paths of its
//! requests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Behaviour {
    Answering,
    /// Success for every request except `/quitquitquit`, which is refused.
    QuitRefused,
    /// Connections are accepted, and no request gets a response.
    Silent,
}

pub(super) struct FakeAdmin {
    pub(super) port: u16,
    asked: watch::Receiver<Vec<String>>,
    connections: Arc<AtomicU64>,
    _serving: JoinSet<()>,
}

impl FakeAdmin {
    pub(super) async fn start(behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let (note, asked) = watch::channel(Vec::new());
        let connections = Arc::new(AtomicU64::new(0));
        let mut serving = JoinSet::new();
        let active = Arc::clone(&connections);
        serving.spawn(async move {
            let open = Mutex::new(Vec::new());
            while let Ok((stream, _)) = listener.accept().await {
                let answered =
                    answer(stream, behaviour, &note, active.load(Ordering::Relaxed)).await;
                // Connections stay open, with or without a response.
                open.lock().expect("no panic").push(answered);
            }
        });
        Self { port, asked, connections, _serving: serving }
    }

    /// Returns the paths of the requests so far. Consecutive requests for `/ready` count as one.
    pub(super) fn asked(&self) -> Vec<String> {
        let mut asked = self.asked.borrow().clone();
        asked.dedup_by(|next, last| next == "/ready" && next == last);
        asked
    }

    pub(super) async fn wait_for_request(&self, path: &str) {
        let mut asked = self.asked.clone();
        let found = asked.wait_for(|asked| asked.iter().any(|found| found == path));
        found.await.expect("a listener");
    }

    pub(super) fn set_connections(&self, count: u64) {
        self.connections.store(count, Ordering::Relaxed);
    }
}

async fn answer(
    mut stream: TcpStream,
    behaviour: Behaviour,
    note: &watch::Sender<Vec<String>>,
    connections: u64,
) -> TcpStream {
    let mut request = [0; 1024];
    let length = stream.read(&mut request).await.unwrap_or_default();
    let request = String::from_utf8_lossy(&request[..length]);
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    let status = match behaviour {
        Behaviour::QuitRefused if path == "/quitquitquit" => "405 Method Not Allowed",
        _ => "200 OK",
    };
    let body = format!("listener.0.0.0.0_80.downstream_cx_active: {connections}\n");
    let length = body.len();
    let text = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}");
    if behaviour != Behaviour::Silent {
        // The client may have closed its connection.
        let _ = stream.write_all(text.as_bytes()).await;
    }
    note.send_modify(|asked| asked.push(path));
    stream
}
