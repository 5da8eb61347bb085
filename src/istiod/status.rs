//! Records the state of the connection to istiod and of the dials, for the debug page.

use std::collections::VecDeque;
use std::fmt;

use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;
use serde::Serialize;

use crate::metrics::{Counter, Registry};
use crate::problem::{self, Problem};
use crate::runtime::clock::{Clock, rfc3339};

/// The stored length of an error, in characters: it may quote a certificate's names or istiod's message.
const MAX_ERROR: usize = 1024;
/// The most outages that are stored.
const MAX_OUTAGES: usize = 10;

/// The connection and the dials since the agent's start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    pub address: String,
    pub connected: Option<Connected>,
    pub dials: u64,
    /// The error of the last dial or call that failed, if no call has succeeded since.
    pub last_error: Option<Failure>,
    /// The last outages, the newest first. The debug page shows them.
    #[serde(skip)]
    pub outages: Vec<Outage>,
    /// The expiry of the token read last, if it contains one.
    pub token_expires: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Connected {
    /// The address dialed, as resolved.
    pub peer: String,
    pub since: String,
    /// None on a plaintext connection.
    pub tls: Option<Tls>,
}

/// The outcome of a TLS handshake, in rustls' names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tls {
    pub version: Option<String>,
    pub key_exchange: Option<String>,
    pub cipher: Option<String>,
    /// True if the agent has sent a client certificate.
    pub client_certificate: bool,
    /// The leaf of the peer's chain.
    #[serde(skip)]
    pub peer_certificate: Option<CertificateDer<'static>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    pub at: String,
    #[serde(flatten, serialize_with = "problem::error")]
    pub problem: Problem,
}

/// A time without a successful call, from the first failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Outage {
    pub since: String,
    /// None if it is not over.
    pub until: Option<String>,
    /// The code of the first failure.
    pub code: &'static str,
}

/// The dials so far, the last error, and the last outages.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) dials: Mutex<u64>,
    pub(super) last_error: Mutex<Option<Failure>>,
    pub(super) outages: Mutex<VecDeque<Outage>>,
    failures: Counter,
}

impl Record {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            dials: Mutex::default(),
            last_error: Mutex::default(),
            outages: Mutex::default(),
            failures: registry.counter(
                "istio_agent_istiod_connection_failures",
                "The total number of connection failures to Istiod",
            ),
        }
    }

    pub(super) fn count_dial(&self) {
        *self.dials.lock() += 1;
    }

    pub(super) fn record_failed_dial(&self, problem: &Problem) {
        self.failures.inc();
        self.record_error(problem);
    }

    pub(super) fn clear_error(&self) {
        if self.last_error.lock().take().is_some()
            && let Some(outage) = self.outages.lock().front_mut()
        {
            outage.until = Some(rfc3339(Clock::system().now()));
        }
    }

    pub(super) fn record_error(&self, problem: &Problem) {
        let mut problem = problem.clone();
        problem.found = problem.found.chars().take(MAX_ERROR).collect();
        let at = rfc3339(Clock::system().now());
        let outage = Outage { since: at.clone(), until: None, code: problem.code.name() };
        if self.last_error.lock().replace(Failure { at, problem }).is_none() {
            let mut outages = self.outages.lock();
            outages.truncate(MAX_OUTAGES - 1);
            outages.push_front(outage);
        }
    }
}

impl Tls {
    pub(super) fn new(session: &rustls::ClientConnection, client_certificate: bool) -> Self {
        let group = session.negotiated_key_exchange_group();
        let suite = session.negotiated_cipher_suite();
        let leaf = session.peer_certificates().and_then(|chain| chain.first());
        Self {
            version: session.protocol_version().map(debug_name),
            key_exchange: group.map(|group| debug_name(group.name())),
            cipher: suite.map(|suite| debug_name(suite.suite())),
            client_certificate,
            peer_certificate: leaf.map(|leaf| leaf.clone().into_owned()),
        }
    }
}

fn debug_name(value: impl fmt::Debug) -> String {
    format!("{value:?}")
}

impl fmt::Display for Connected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, ", self.peer)?;
        match &self.tls {
            None => f.write_str("plaintext"),
            Some(tls) => write!(f, "{:?}, {:?}", tls.version, tls.key_exchange),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Code;

    #[test]
    fn an_outage_lasts_from_the_first_error_to_a_success() {
        let record = Record::new(&Registry::default());
        let problem = |code| Problem::new(code, "istiod", "found");
        record.clear_error();
        assert_eq!(record.outages.lock().len(), 0);
        record.record_failed_dial(&problem(Code::IstiodTimeout));
        record.record_error(&problem(Code::IstiodError));
        let outages = record.outages.lock().clone();
        assert_eq!((outages.len(), &outages[0].until), (1, &None));
        assert_eq!(outages[0].code, "ISTIOD_TIMEOUT");
        record.clear_error();
        assert!(record.outages.lock()[0].until.is_some());
        for _ in 0..2 * MAX_OUTAGES {
            record.record_error(&problem(Code::IstiodError));
            record.clear_error();
        }
        record.record_error(&problem(Code::IstiodUnavailable));
        let outages = record.outages.lock();
        assert_eq!((outages.len(), outages[0].code), (MAX_OUTAGES, "ISTIOD_UNAVAILABLE"));
        assert_eq!(outages.iter().filter(|outage| outage.until.is_none()).count(), 1);
    }
}
