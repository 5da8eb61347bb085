//! What the connection to istiod is and what became of the dials, for people to read.
//!
//! The worker notes each dial in a [`Record`], which handles read.
//!
//! Does not tell the token, nor what is said on the connection.

use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;

use super::connection::{About, Negotiated};
use crate::clock::{Clock, rfc3339};
use crate::metrics::{Counter, Registry};

/// How much of an error is kept, in characters: it may quote a certificate's names.
const LONGEST_ERROR: usize = 1024;

/// The connection and the dials since the agent's start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// As configured.
    pub address: String,
    /// The connection in use, if there is one.
    pub connected: Option<Connected>,
    pub dials: u64,
    /// Of the last dial that failed.
    pub last_error: Option<Failure>,
    /// Of the token read last, if it says so.
    pub token_expires: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Connected {
    /// The address dialed, as resolved.
    pub peer: String,
    pub since: String,
    /// Nothing on a plaintext connection.
    pub tls: Option<Tls>,
}

/// Names as rustls has them; none before the handshake's end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tls {
    pub version: Option<String>,
    pub key_exchange: Option<String>,
    pub cipher: Option<String>,
    /// Whether we showed a client certificate.
    pub client_certificate: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    pub at: String,
    pub error: String,
}

/// What the worker notes. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Record {
    dials: Arc<Mutex<Dials>>,
    failures: Counter,
}

#[derive(Debug, Default)]
struct Dials {
    count: u64,
    last_error: Option<(SystemTime, String)>,
}

impl Record {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            dials: Arc::default(),
            failures: registry.counter(
                "istio_agent_istiod_connection_failures",
                "The total number of connection failures to Istiod",
            ),
        }
    }

    pub(super) fn dials(&self) {
        self.lock().count += 1;
    }

    pub(super) fn failed(&self, error: &str) {
        self.failures.inc();
        let error = error.chars().take(LONGEST_ERROR).collect();
        self.lock().last_error = Some((Clock::system().now(), error));
    }

    pub(super) fn status(
        &self,
        address: &str,
        connected: Option<&About>,
        token_expires: Option<SystemTime>,
    ) -> Status {
        let dials = self.lock();
        Status {
            address: address.to_owned(),
            connected: connected.map(Connected::from),
            dials: dials.count,
            last_error: dials.last_error.as_ref().map(|(at, error)| Failure {
                at: rfc3339(*at),
                error: error.clone(),
            }),
            token_expires: token_expires.map(rfc3339),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Dials> {
        self.dials.lock()
    }
}

impl From<&About> for Connected {
    fn from(about: &About) -> Self {
        Self {
            peer: about.address.to_string(),
            since: rfc3339(about.since),
            tls: about.tls.as_ref().map(Tls::from),
        }
    }
}

impl From<&Negotiated> for Tls {
    fn from(negotiated: &Negotiated) -> Self {
        Self {
            version: named(negotiated.version),
            key_exchange: named(negotiated.key_exchange),
            cipher: named(negotiated.cipher),
            client_certificate: negotiated.client_certificate,
        }
    }
}

fn named(value: Option<impl std::fmt::Debug>) -> Option<String> {
    value.map(|value| format!("{value:?}"))
}
