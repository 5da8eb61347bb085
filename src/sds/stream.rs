//! Runs one SDS stream: requests before pushes, one response at a time, the newest secret whenever Envoy is
//! ready for one.
//!
//! A stream stays open while its secret does not exist yet. The rules of the protocol are in
//! [`StateOfTheWorld`].

use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::DataSource;
use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use tonic::{Status, Streaming};

use super::Service;
use super::resource::{self, Resource};
use super::sotw::{ResponseId, StateOfTheWorld};
use crate::clock::{Clock, rfc3339};
use crate::secrets::name::Name;
use crate::secrets::{Secret, SecretState, Subscription};

/// The state of one stream.
pub(super) struct Stream {
    protocol: StateOfTheWorld,
    service: Service,
    secrets: Subscription,
    crl: Option<DataSource>,
    /// Time and length of the CRL file when it was read, and true if it was compared with a chain.
    crl_stamp: (Option<(SystemTime, u64)>, bool),
}

/// The interval at which a CRL file is checked for a change.
const CRL_POLL: Duration = Duration::from_secs(5);

impl Stream {
    pub(super) fn new(service: &Service) -> Self {
        let id = service.streams.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::info!(target: "ads", "ADS: new connection for node:{id}");
        let (sources, metrics) = (&service.sources, service.metrics.clone());
        Self {
            protocol: StateOfTheWorld::new(id, metrics, sources.serves_workload),
            service: service.clone(),
            secrets: Subscription::new(sources.secrets.clone(), &sources.files),
            crl: None,
            crl_stamp: (None, false),
        }
    }

    fn apply(&mut self, request: &DiscoveryRequest) -> Result<(), Status> {
        self.protocol.metrics.record_size(request);
        self.protocol.apply(request)?;
        self.secrets.want(self.protocol.names().cloned().collect());
        let mut names = self.protocol.unsent();
        if names.any(|name| matches!(self.secrets.get(name), SecretState::Unsigned))
            && let Some(failure) = self.secrets.failure()
        {
            tracing::info!(
                target: "sds",
                "stream {} is held open until there is a certificate, next attempt at {}: {}",
                self.protocol.id, rfc3339(failure.next_attempt), failure.problem
            );
        }
        Ok(())
    }

    /// Returns the response that is due, if any.
    fn due_response(&mut self) -> Option<DiscoveryResponse> {
        let (sources, crl) = (&self.service.sources, &self.crl);
        let lookup = |name: &Name| {
            Some(Resource {
                secret: self.secrets.get(name).available()?,
                options: &sources.options,
                // The CRL belongs to the workload's own roots. Other roots are used without one.
                crl: crl.clone().filter(|_| sources.files.are_own_roots(name)),
            })
        };
        let id = || ResponseId {
            version: format!(
                "{}/{}",
                rfc3339(Clock::system().now()),
                self.service.responses.fetch_add(1, Ordering::Relaxed) + 1
            ),
            nonce: random_uuid(),
        };
        self.protocol.next_response(&lookup, id)
    }

    /// Waits for the next response that is due.
    async fn next_response(&mut self) -> DiscoveryResponse {
        loop {
            let pause = self.read_crl().await;
            if let Some(response) = self.due_response() {
                return response;
            }
            let _ = tokio::time::timeout(pause, self.secrets.changed()).await;
        }
    }

    /// Reads the CRL if it belongs to a name and its file has changed. Returns the wait before the next check.
    async fn read_crl(&mut self) -> Duration {
        let (mut names, sources) = (self.protocol.names(), &self.service.sources);
        let has_own_roots = names.any(|name| sources.files.are_own_roots(name));
        let path = sources.options.crl.clone();
        let Some(path) = path.filter(|_| has_own_roots) else {
            return Duration::MAX;
        };
        let metadata = tokio::fs::metadata(&path).await;
        let file = metadata.and_then(|file| Ok((file.modified()?, file.len())));
        let chain = match self.secrets.get(&Name::Default) {
            SecretState::Available(Secret::Certificate(own)) => own.chain_pem().clone(),
            _ => Bytes::new(),
        };
        let stamp = (file.ok(), !chain.is_empty());
        if stamp == self.crl_stamp {
            return CRL_POLL;
        }
        let crl = resource::read_crl(&path).await;
        let check = move || resource::revocation_problem(&path, &chain);
        if let Ok(Some(problem)) = tokio::task::spawn_blocking(check).await {
            tracing::error!(target: "sds", "{problem}");
        }
        (self.crl, self.crl_stamp) = (crl, stamp);
        CRL_POLL
    }

    /// Returns the responses to requests. Each is made when Envoy takes the one before it, so an unread stream
    /// holds one response at most.
    pub(super) fn responses(
        self,
        requests: Streaming<DiscoveryRequest>,
    ) -> impl tokio_stream::Stream<Item = Result<DiscoveryResponse, Status>> + Send {
        futures_util::stream::unfold(Some((self, requests)), |open| async {
            let (mut stream, mut requests) = open?;
            match stream.next_result(&mut requests).await? {
                Ok(response) => Some((Ok(response), Some((stream, requests)))),
                Err(status) => Some((Err(status), None)),
            }
        })
    }

    /// Returns the next response, or the status the stream ends with; None when Envoy has closed it.
    async fn next_result(
        &mut self,
        requests: &mut Streaming<DiscoveryRequest>,
    ) -> Option<Result<DiscoveryResponse, Status>> {
        loop {
            let request = tokio::select! {
                biased;
                request = requests.message() => request,
                response = self.next_response() => return Some(Ok(response)),
            };
            let applied = match request {
                Ok(Some(request)) => self.apply(&request),
                Ok(None) => {
                    let id = self.protocol.id;
                    tracing::info!(target: "ads", "ADS: \"\" {id} terminated");
                    return None;
                }
                Err(status) => Err(status),
            };
            if let Err(status) = applied {
                self.protocol.report_end(&status);
                return Some(Err(status));
            }
        }
    }
}

/// Makes a UUID of version 4. It distinguishes responses and does not need to be secret.
pub(super) fn random_uuid() -> String {
    let bits = fastrand::u128(..) & !(0xf << 76) & !(0b11 << 62) | (0x4 << 76) | (0b10 << 62);
    let hex = format!("{bits:032x}");
    [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ]
    .join("-")
}
