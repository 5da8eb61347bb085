//! One Envoy stream and what it waits for: requests before pushes, one response at a time, the
//! newest secret whenever Envoy is ready for one.
//!
//! A stream whose secret is not there yet stays open until it is. Names asked for in one go are
//! answered in one go, unless the files of some take long.
//!
//! Does not know the rules of the protocol: a [`Protocol`] does.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use prost::Message;
use tokio::time::Instant;
use tokio_util::sync::ReusableBoxFuture;
use tonic::{Code, Status, Streaming};

use super::desk::{Desk, Waits};
use super::secret::{Shelf, Style, View};
use crate::clock::{Clock, rfc3339};
use crate::secrets::files::Subscription;
use crate::secrets::name::Name;
use crate::secrets::{Secrets, State};

/// How long names asked for together wait for each other's files.
const PATIENCE: Duration = Duration::from_secs(2);

/// What makes one response different from the others.
#[derive(Debug)]
pub(super) struct Stamp {
    pub(super) version: String,
    pub(super) nonce: String,
}

/// One form of the protocol: what requests ask for, and which response is due.
pub(super) trait Protocol: Send + 'static {
    type Request: Message + Default + Send + 'static;
    type Response: Send + 'static;

    fn new(desk: Desk) -> Self;
    fn desk(&self) -> &Desk;
    /// Takes in a request of Envoy. An error is the status to end the stream with.
    fn apply(&mut self, request: &Self::Request) -> Result<(), Status>;
    /// The names watched now.
    fn names(&self) -> BTreeSet<Name>;
    /// Whether there is something to say. Patient is who waits for files that are being read.
    fn is_due(&self, shelf: &impl Shelf, is_patient: bool) -> bool;
    /// What the names that were not answered wait for.
    fn waits(&self, shelf: &impl Shelf) -> Waits;
    /// The response that is due, which counts as sent from now on.
    fn answer(&mut self, shelf: &impl Shelf, is_patient: bool, stamp: Stamp) -> Self::Response;
}

/// The protocol's state of one stream, with the secrets it speaks of.
pub(super) struct Talk<P> {
    pub(super) protocol: P,
    pub(super) secrets: Option<Secrets>,
    pub(super) files: Subscription,
    pub(super) style: Arc<Style>,
    /// Counts the responses of all streams; part of each version.
    pub(super) responses: Arc<AtomicU64>,
    /// Until when files that are being read are waited for.
    patient_until: Option<Instant>,
}

impl<P: Protocol> Talk<P> {
    pub(super) fn new(
        protocol: P,
        secrets: Option<Secrets>,
        files: Subscription,
        style: Arc<Style>,
        responses: Arc<AtomicU64>,
    ) -> Self {
        Self {
            protocol,
            secrets,
            files,
            style,
            responses,
            patient_until: None,
        }
    }

    pub(super) fn apply(&mut self, request: &P::Request) -> Result<(), Status> {
        self.protocol.desk().metrics.received(request);
        self.protocol.apply(request)?;
        self.files.want(self.protocol.names());
        let (waits, state) = (self.waits(), self.state());
        if waits.reading {
            self.patient_until = Some(Instant::now() + PATIENCE);
        }
        if let (true, Some(problem)) = (waits.authority, &state.problem) {
            tracing::info!(
                target: "sds",
                "stream {} is held open until there is a certificate, next attempt at {}: {}",
                self.protocol.desk().id, rfc3339(problem.next_attempt), problem.cause()
            );
        }
        Ok(())
    }

    pub(super) fn waits(&self) -> Waits {
        self.protocol.waits(&self.view())
    }

    /// Whether waiting brings more than there is now.
    pub(super) fn is_kept_waiting(&self) -> bool {
        let waits = self.waits();
        waits.reading || waits.authority
    }

    /// The response that is due, if any.
    pub(super) fn answer(&mut self) -> Option<P::Response> {
        let is_patient = self.patient_until.is_some();
        let view = View::new(self.state(), &self.files, &self.style);
        if !self.protocol.is_due(&view, is_patient) {
            return None;
        }
        let count = self.responses.fetch_add(1, Ordering::Relaxed) + 1;
        let stamp = Stamp {
            version: format!("{}/{count}", rfc3339(Clock::system().now())),
            nonce: random_uuid(),
        };
        Some(self.protocol.answer(&view, is_patient, stamp))
    }

    /// The next response, when it is due.
    async fn next(&mut self) -> P::Response {
        loop {
            if let Some(response) = self.answer() {
                return response;
            }
            self.changed().await;
        }
    }

    /// Waits until there may be something else to say.
    pub(super) async fn changed(&mut self) {
        tokio::select! {
            () = secrets_changed(&mut self.secrets) => {}
            () = self.files.changed() => {}
            () = wait_until(self.patient_until) => self.patient_until = None,
        }
    }

    fn view(&self) -> View<'_> {
        View::new(self.state(), &self.files, &self.style)
    }

    fn state(&self) -> State {
        self.secrets
            .as_ref()
            .map(Secrets::latest)
            .unwrap_or_default()
    }
}

async fn secrets_changed(secrets: &mut Option<Secrets>) {
    match secrets {
        Some(secrets) => secrets.changed().await,
        None => std::future::pending().await,
    }
}

async fn wait_until(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

/// What Envoy reads of one stream. The work is done as Envoy asks for the next response, so a
/// stream that is not read holds no more than one.
pub(super) struct Responses<P: Protocol>(Option<Next<P>>);

type Next<P> = ReusableBoxFuture<'static, Option<(Item<P>, Session<P>)>>;

type Item<P> = Result<<P as Protocol>::Response, Status>;

impl<P: Protocol> Responses<P> {
    pub(super) fn new(requests: Streaming<P::Request>, talk: Talk<P>) -> Self {
        let session = Session { requests, talk };
        Self(Some(ReusableBoxFuture::new(session.next())))
    }
}

impl<P: Protocol> tokio_stream::Stream for Responses<P> {
    type Item = Item<P>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Item<P>>> {
        let Some(next) = &mut self.0 else {
            return Poll::Ready(None);
        };
        match std::task::ready!(next.poll(context)) {
            Some((Ok(response), session)) => {
                next.set(session.next());
                Poll::Ready(Some(Ok(response)))
            }
            Some((Err(status), _)) => {
                self.0 = None;
                Poll::Ready(Some(Err(status)))
            }
            None => {
                self.0 = None;
                Poll::Ready(None)
            }
        }
    }
}

/// A stream's requests beside its state.
struct Session<P: Protocol> {
    requests: Streaming<P::Request>,
    talk: Talk<P>,
}

impl<P: Protocol> Session<P> {
    /// The next response or the status the stream ends with; None when Envoy has closed it.
    async fn next(mut self) -> Option<(Item<P>, Self)> {
        loop {
            tokio::select! {
                biased;
                request = self.requests.message() => {
                    let applied = match request {
                        Ok(Some(request)) => self.talk.apply(&request),
                        Ok(None) => {
                            let id = self.talk.protocol.desk().id;
                            tracing::info!(target: "ads", "ADS: \"\" {id} terminated");
                            return None;
                        }
                        Err(status) => Err(status),
                    };
                    if let Err(status) = applied {
                        log_end(self.talk.protocol.desk(), &status);
                        return Some((Err(status), self));
                    }
                }
                response = self.talk.next() => return Some((Ok(response), self)),
            }
        }
    }
}

fn log_end(desk: &Desk, status: &Status) {
    let (id, code, message) = (desk.id, status.code(), status.message());
    match code {
        // How it looks when Envoy goes away.
        Code::Cancelled | Code::Unavailable | Code::DeadlineExceeded => {
            tracing::info!(target: "ads", "ADS: \"\" {id} terminated {code:?}: {message}");
        }
        _ => {
            desk.metrics.internal_errors.inc();
            tracing::error!(
                target: "ads",
                "ADS: \"\" {id} terminated with error: {code:?}: {message}"
            );
        }
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
