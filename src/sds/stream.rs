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
use prost::Message as _;
use tonic::{Status, Streaming};

use super::Service;
use super::resource::{self, Resource};
use super::sotw::StateOfTheWorld;
use crate::runtime::clock::rfc3339;
use crate::secrets::name::Name;
use crate::secrets::{Secret, SecretState, Subscription};

pub(super) struct Stream {
    protocol: StateOfTheWorld,
    service: Service,
    secrets: Subscription,
    crl: Option<DataSource>,
    crl_stamp: CrlStamp,
}

/// The state in which a CRL file was read last.
#[derive(Default, PartialEq)]
struct CrlStamp {
    /// Time and length of the file, if there is one.
    file: Option<(SystemTime, u64)>,
    /// True if there was a certificate chain to compare the lists with.
    has_chain: bool,
}

/// The interval at which a CRL file is checked for a change.
const CRL_POLL: Duration = Duration::from_secs(5);

impl Stream {
    pub(super) fn new(service: &Service) -> Self {
        let id = service.streams.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::info!(target: "ads", "ADS: new connection for node:{id}");
        let sources = &service.sources;
        let metrics = service.metrics.clone();
        Self {
            protocol: StateOfTheWorld::new(id, metrics, sources.serves_workload),
            service: service.clone(),
            secrets: Subscription::new(sources.secrets.clone(), &sources.files),
            crl: None,
            crl_stamp: CrlStamp::default(),
        }
    }

    /// Applies a request: from now on, secrets of its names are wanted. An error is the status to end the stream with.
    fn apply(&mut self, request: &DiscoveryRequest) -> Result<(), Status> {
        self.protocol.metrics.largest_request.raise(request.encoded_len() as f64);
        self.protocol.apply(request)?;
        self.secrets.want(self.protocol.names().cloned().collect());
        let mut unsent = self.protocol.unsent();
        if unsent.any(|name| matches!(self.secrets.get(name), SecretState::Unsigned))
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

    fn due_response(&mut self) -> Option<DiscoveryResponse> {
        let sources = &self.service.sources;
        let lookup = |name: &Name| {
            Some(Resource {
                secret: self.secrets.get(name).available()?,
                options: &sources.options,
                // The CRL belongs to the workload's own roots. Other roots are used without one.
                crl: if sources.files.are_own_roots(name) { self.crl.clone() } else { None },
            })
        };
        let empty = || {
            let number = self.service.responses.fetch_add(1, Ordering::Relaxed) + 1;
            DiscoveryResponse {
                version_info: format!("{}/{number}", rfc3339(SystemTime::now())),
                nonce: random_uuid(),
                ..Default::default()
            }
        };
        self.protocol.next_response(&lookup, empty)
    }

    async fn next_response(&mut self) -> DiscoveryResponse {
        loop {
            let pause = self.read_crl().await;
            if let Some(response) = self.due_response() {
                return response;
            }
            let _ = tokio::time::timeout(pause, self.secrets.changed()).await;
        }
    }

    /// Reads the CRL if it belongs to a name and its file has changed, and logs what is wrong with it. Returns the wait
    /// before the next check.
    async fn read_crl(&mut self) -> Duration {
        let sources = &self.service.sources;
        let Some(path) = sources.options.crl.clone() else {
            return Duration::MAX;
        };
        if !self.protocol.names().any(|name| sources.files.are_own_roots(name)) {
            return Duration::MAX;
        }
        let metadata = tokio::fs::metadata(&path).await;
        let file = metadata.and_then(|file| Ok((file.modified()?, file.len())));
        let chain = match self.secrets.get(&Name::Default) {
            SecretState::Available(Secret::Certificate(own)) => own.chain_pem().clone(),
            _ => Bytes::new(),
        };
        let stamp = CrlStamp { file: file.ok(), has_chain: !chain.is_empty() };
        if stamp == self.crl_stamp {
            return CRL_POLL;
        }
        if stamp.file.is_none() {
            tracing::debug!(target: "sds", "CRL is not configured, {} cannot be read", path.display());
        }
        let crl = resource::read_crl(&path).await;
        let checking = move || resource::revocation_problem(&path, &chain);
        if let Ok(Some(problem)) = tokio::task::spawn_blocking(checking).await {
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
        futures_util::stream::try_unfold(
            (self, requests),
            |(mut stream, mut requests)| async move {
                let response = stream.answer(&mut requests).await?;
                Ok::<_, Status>(response.map(|it| (it, (stream, requests))))
            },
        )
    }

    /// Applies requests until a response is due. Returns None when Envoy has closed the stream, and fails with the
    /// status that ends it.
    async fn answer(
        &mut self,
        requests: &mut Streaming<DiscoveryRequest>,
    ) -> Result<Option<DiscoveryResponse>, Status> {
        loop {
            let request = tokio::select! {
                biased;
                request = requests.message() => request,
                response = self.next_response() => return Ok(Some(response)),
            };
            let applied = match request {
                Ok(Some(request)) => self.apply(&request),
                Ok(None) => {
                    tracing::info!(target: "ads", "ADS: \"\" {} terminated", self.protocol.id);
                    return Ok(None);
                }
                Err(status) => Err(status),
            };
            applied.inspect_err(|status| self.protocol.report_end(status))?;
        }
    }
}

/// Makes a UUID of version 4. It distinguishes responses and does not need to be secret.
pub(super) fn random_uuid() -> String {
    let bits = fastrand::u128(..) & !(0xf << 76) & !(0b11 << 62) | (0x4 << 76) | (0b10 << 62);
    let mut uuid = format!("{bits:032x}");
    for group_end in [20, 16, 12, 8] {
        uuid.insert(group_end, '-');
    }
    uuid
}
