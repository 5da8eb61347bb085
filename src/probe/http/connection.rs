//! One HTTP connection, and the place where idle ones are kept.
//!
//! What a connection needs to run are tasks that live as long as it does.
//!
//! Does not notice that a kept connection has grown stale before somebody wants it.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use ::http::{Request, Response};
use bytes::Bytes;
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::Error;
use crate::probe::tls;

/// How long a connection is kept that nobody uses. Probes come more often.
const IDLE: Duration = Duration::from_secs(90);

/// What connections differ in.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) is_https: bool,
    pub(super) host: String,
    pub(super) port: u16,
}

/// One idle connection for each application.
#[derive(Default)]
pub(in crate::probe) struct Pool(Mutex<HashMap<Key, (Instant, Open)>>);

pub(super) struct Open {
    sender: Sender,
    _driver: Driver,
}

enum Sender {
    Http1(http1::SendRequest<Empty<Bytes>>),
    Http2(http2::SendRequest<Empty<Bytes>>),
}

/// The tasks of one connection, which end with it.
#[derive(Debug, Default)]
pub(in crate::probe) struct Driver(Arc<Mutex<JoinSet<()>>>);

/// Starts tasks of a [`Driver`]. Weak, as the tasks themselves hold it.
#[derive(Clone, Debug)]
pub(in crate::probe) struct Executor(Weak<Mutex<JoinSet<()>>>);

impl Pool {
    /// A connection that was in order when it was last seen.
    pub(super) fn take(&self, key: &Key) -> Option<Open> {
        let mut idle = self.0.lock();
        idle.retain(|_, (since, _)| since.elapsed() < IDLE);
        let (_, open) = idle.remove(key)?;
        (!open.is_closed()).then_some(open)
    }

    pub(super) fn put(&self, key: Key, open: Open) {
        if !open.is_closed() {
            let mut idle = self.0.lock();
            idle.insert(key, (Instant::now(), open));
        }
    }
}

impl Open {
    pub(super) async fn new(
        stream: TcpStream,
        key: &Key,
        tls: &tls::Connector,
    ) -> Result<Self, Error> {
        if !key.is_https {
            return Self::http1(stream).await;
        }
        let name = ServerName::try_from(key.host.clone()).map_err(|_| Error::Address {
            found: key.host.clone(),
        })?;
        let stream = tls.connect(name, stream).await.map_err(Error::Tls)?;
        match stream.get_ref().1.alpn_protocol() {
            Some(b"h2") => Self::http2(stream).await,
            _ => Self::http1(stream).await,
        }
    }

    async fn http1(
        io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    ) -> Result<Self, Error> {
        let handshake = http1::handshake(TokioIo::new(io)).await;
        let (sender, connection) = handshake.map_err(Error::Exchange)?;
        let driver = Driver::default();
        driver.drive(connection);
        Ok(Self {
            sender: Sender::Http1(sender),
            _driver: driver,
        })
    }

    async fn http2(
        io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    ) -> Result<Self, Error> {
        let driver = Driver::default();
        let handshake = http2::handshake(driver.executor(), TokioIo::new(io)).await;
        let (sender, connection) = handshake.map_err(Error::Exchange)?;
        driver.drive(connection);
        Ok(Self {
            sender: Sender::Http2(sender),
            _driver: driver,
        })
    }

    pub(super) fn is_http2(&self) -> bool {
        matches!(self.sender, Sender::Http2(_))
    }

    fn is_closed(&self) -> bool {
        match &self.sender {
            Sender::Http1(sender) => sender.is_closed(),
            Sender::Http2(sender) => sender.is_closed(),
        }
    }

    pub(super) async fn send(
        &mut self,
        request: Request<Empty<Bytes>>,
    ) -> hyper::Result<Response<Incoming>> {
        match &mut self.sender {
            Sender::Http1(sender) => {
                sender.ready().await?;
                sender.send_request(request).await
            }
            Sender::Http2(sender) => {
                sender.ready().await?;
                sender.send_request(request).await
            }
        }
    }
}

impl Driver {
    pub(in crate::probe) fn executor(&self) -> Executor {
        Executor(Arc::downgrade(&self.0))
    }

    /// Runs a connection. Whoever sends requests on it hears of its end.
    pub(in crate::probe) fn drive<E>(
        &self,
        connection: impl Future<Output = Result<(), E>> + Send + 'static,
    ) where
        E: std::fmt::Display,
    {
        self.executor().start(async move {
            if let Err(error) = connection.await {
                tracing::debug!(target: "probes", "a probe's connection ended: {error}");
            }
        });
    }
}

impl Executor {
    fn start(&self, future: impl Future<Output = ()> + Send + 'static) {
        // Nothing is started for a connection that is gone.
        if let Some(tasks) = self.0.upgrade() {
            let mut tasks = tasks.lock();
            while tasks.try_join_next().is_some() {}
            tasks.spawn(future);
        }
    }
}

impl<F> hyper::rt::Executor<F> for Executor
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, future: F) {
        self.start(async move {
            future.await;
        });
    }
}
