//! One SDS stream: requests before pushes, one response at a time, the newest secret whenever Envoy is
//! ready for one.
//!
//! A stream whose secret is not there yet stays open until it is. Names asked for together are answered
//! together, unless the files of some take long. The rules of the protocol are in a [`Protocol`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use prost::Message;
use tokio::time::Instant;
use tonic::{Status, Streaming};

use super::Service;
use super::consumers::MAX_NAMES;
use super::context::StreamContext;
use super::names::Names;
use super::resource::{Lookup, Resource, SecretOptions};
use crate::clock::{Clock, after, rfc3339};
use crate::secrets::files::source::FileError;
use crate::secrets::name::Name;
use crate::secrets::{SecretState, Subscription};

/// How long names asked for together wait for each other's files.
const BATCH_LIMIT: Duration = Duration::from_secs(2);

/// What makes one response different from the others.
#[derive(Debug)]
pub(super) struct ResponseId {
    pub(super) version: String,
    pub(super) nonce: String,
}

/// A variant of the protocol: what requests ask for, and which response is due.
pub(super) trait Protocol: Default + Send + 'static {
    type Request: Message + Default + Send + 'static;
    type Response: Send + 'static;

    /// Applies a request of Envoy. An error is the status to end the stream with.
    fn apply(&mut self, context: &mut StreamContext, request: &Self::Request)
    -> Result<(), Status>;

    /// The response that is due, if any; it counts as sent. While batching, names just asked for wait
    /// for files that are being read.
    fn answer(
        &mut self,
        names: &mut Names,
        lookup: &Lookup<'_>,
        is_batching: bool,
        id: impl FnOnce() -> ResponseId,
    ) -> Option<Self::Response>;
}

/// What the names that were not answered yet wait for.
#[derive(Clone, Debug, Default)]
pub(super) struct Waits {
    pub(super) authority: bool,
    pub(super) reading: bool,
    /// Why the first of the unusable files is unusable.
    pub(super) error: Option<Arc<FileError>>,
}

/// The state of one stream.
pub(super) struct Stream<P> {
    context: StreamContext,
    protocol: P,
    service: Service,
    secrets: Subscription,
    /// Until when names asked for together wait for files that are being read.
    batch_until: Option<Instant>,
}

impl<P: Protocol> Stream<P> {
    pub(super) fn new(service: &Service) -> Self {
        let id = service.streams.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::info!(target: "ads", "ADS: new connection for node:{id}");
        let sources = &service.sources;
        Self {
            context: StreamContext::new(
                service.consumers.add(id),
                service.metrics.clone(),
                sources.serves_workload,
            ),
            protocol: P::default(),
            service: service.clone(),
            secrets: Subscription::new(sources.secrets.clone(), &sources.files),
            batch_until: None,
        }
    }

    pub(super) fn apply(&mut self, request: &P::Request) -> Result<(), Status> {
        self.context.metrics.received(request);
        self.protocol.apply(&mut self.context, request)?;
        self.secrets
            .want(self.context.names.iter().cloned().collect());
        let waits = self.waits();
        if waits.reading {
            self.batch_until = Some(after(BATCH_LIMIT));
        }
        if let (true, Some(problem)) = (waits.authority, self.secrets.problem()) {
            tracing::info!(
                target: "sds",
                "stream {} is held open until there is a certificate, next attempt at {}: {}",
                self.context.id, rfc3339(problem.next_attempt), problem.cause()
            );
        }
        Ok(())
    }

    pub(super) fn waits(&self) -> Waits {
        let mut waits = Waits::default();
        for name in self.context.names.unanswered() {
            match self.secrets.get(name) {
                SecretState::Unsigned => waits.authority = true,
                SecretState::Reading => waits.reading = true,
                SecretState::Unusable(error) => {
                    waits.error.get_or_insert(error);
                }
                SecretState::Available(_) => {}
            }
        }
        waits
    }

    /// The response that is due, if any.
    pub(super) fn answer(&mut self) -> Option<P::Response> {
        let options = &self.service.sources.options;
        let crl_exists = options.crl.as_ref().is_some_and(|path| path.exists());
        let lookup = |name: &Name| lookup(&self.secrets, name, options, crl_exists);
        let id = || ResponseId {
            version: format!(
                "{}/{}",
                rfc3339(Clock::system().now()),
                self.service.responses.fetch_add(1, Ordering::Relaxed) + 1
            ),
            nonce: random_uuid(),
        };
        let is_batching = self.batch_until.is_some();
        let names = &mut self.context.names;
        let answer = self.protocol.answer(names, &lookup, is_batching, id);
        self.record(answer.is_some());
        answer
    }

    /// Records what the client has and waits for.
    fn record(&self, is_answered: bool) {
        let (mut served, mut waits) = (Vec::new(), Vec::new());
        for name in self.context.names.iter().take(MAX_NAMES) {
            let waits_for = match self.secrets.get(name) {
                SecretState::Available(_) => {
                    served.push(name.to_string());
                    continue;
                }
                SecretState::Unsigned => "the workload certificate".to_owned(),
                SecretState::Reading => "its files, which are being read".to_owned(),
                SecretState::Unusable(error) => error.to_string(),
            };
            waits.push((name.to_string(), waits_for));
        }
        self.context.entry.change(|consumer| {
            (consumer.served, consumer.waits) = (served, waits);
            if is_answered {
                consumer.refused = None;
            }
        });
    }

    /// Waits until another response may be due.
    pub(super) async fn changed(&mut self) {
        let batch_until = self.batch_until;
        let batch_end = async {
            match batch_until {
                Some(end) => tokio::time::sleep_until(end).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.secrets.changed() => {}
            () = batch_end => self.batch_until = None,
        }
    }

    /// Waits for the next response that is due.
    async fn next(&mut self) -> P::Response {
        loop {
            if let Some(response) = self.answer() {
                return response;
            }
            self.changed().await;
        }
    }

    /// Answers requests. Work is done as Envoy takes responses, so that an unread stream holds no more
    /// than one.
    pub(super) fn responses(
        self,
        requests: Streaming<P::Request>,
    ) -> impl tokio_stream::Stream<Item = Result<P::Response, Status>> + Send {
        futures_util::stream::unfold(Some((self, requests)), |open| async {
            let (mut stream, mut requests) = open?;
            match stream.respond(&mut requests).await? {
                Ok(response) => Some((Ok(response), Some((stream, requests)))),
                Err(status) => Some((Err(status), None)),
            }
        })
    }

    /// The next response, or the status the stream ends with; None when Envoy has closed it.
    async fn respond(
        &mut self,
        requests: &mut Streaming<P::Request>,
    ) -> Option<Result<P::Response, Status>> {
        loop {
            let request = tokio::select! {
                biased;
                request = requests.message() => request,
                response = self.next() => return Some(Ok(response)),
            };
            let applied = match request {
                Ok(Some(request)) => self.apply(&request),
                Ok(None) => {
                    let id = self.context.id;
                    tracing::info!(target: "ads", "ADS: \"\" {id} terminated");
                    return None;
                }
                Err(status) => Err(status),
            };
            if let Err(status) = applied {
                self.context.report_end(&status);
                return Some(Err(status));
            }
        }
    }
}

fn lookup<'a>(
    secrets: &Subscription,
    name: &Name,
    options: &'a SecretOptions,
    crl_exists: bool,
) -> SecretState<Resource<'a>> {
    match secrets.get(name) {
        SecretState::Unsigned => SecretState::Unsigned,
        SecretState::Reading => SecretState::Reading,
        SecretState::Unusable(error) => SecretState::Unusable(error),
        SecretState::Available(secret) => SecretState::Available(Resource {
            secret,
            options,
            // A CRL is of one authority: other roots are used without.
            has_crl: crl_exists && secrets.are_own_roots(name),
        }),
    }
}

/// A UUID of version 4. It tells responses apart and is no secret.
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
