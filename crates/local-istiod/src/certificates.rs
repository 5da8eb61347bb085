//! The certificate service that agents send their requests to.
//!
//! Refusals have istiod's codes and texts. The reason of a failed authentication is only reported as an
//! event, because istiod only logs it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::authority::{Authority, AuthorityError};
use super::caller::{Authenticator, CallerError, Peer};
use super::event::{Event, Events};
use crate::identity::SpiffeId;
use crate::proto::istio_certificate_service_server::IstioCertificateService;
use crate::proto::{IstioCertificateRequest, IstioCertificateResponse};

/// The response to every request: a chain or an error status. If None, requests are signed.
pub(super) type Script = Option<Result<Vec<String>, Status>>;

#[derive(Debug)]
pub(super) struct Certificates {
    pub(super) authority: Arc<Authority>,
    /// The authenticator of callers; None without TLS, because istiod cannot identify callers then.
    pub(super) authenticator: Option<Authenticator>,
    /// The response to every request in place of a certificate, if set.
    pub(super) script: watch::Receiver<Script>,
    pub(super) events: Events,
}

#[tonic::async_trait]
impl IstioCertificateService for Certificates {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        let (metadata, extensions, request) = request.into_parts();
        let peer = extensions
            .get::<Peer>()
            .ok_or_else(|| Status::internal("the connection has no peer"))?;
        let script = self.script.borrow().clone();
        match script {
            Some(Ok(cert_chain)) => Ok(Response::new(IstioCertificateResponse { cert_chain })),
            Some(Err(status)) => Err(self.refused(peer.address, status.message(), status.clone())),
            None => self.create(peer, &metadata.into_headers(), &request),
        }
    }
}

impl Certificates {
    fn create(
        &self,
        peer: &Peer,
        headers: &http::HeaderMap,
        request: &IstioCertificateRequest,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        let caller = self.caller(peer, headers).map_err(|error| {
            let status = Status::unauthenticated("request authenticate failure");
            self.refused(peer.address, &error.to_string(), status)
        })?;
        let seconds = u64::try_from(request.validity_duration).unwrap_or(0); // Negative is "unset".
        let issued = self
            .authority
            .sign(&request.csr, &caller, Duration::from_secs(seconds))
            .map_err(|error| self.refused(peer.address, &error.to_string(), status_of(&error)))?;
        self.events.report(Event::Issued { identity: caller, lifetime: issued.lifetime });
        Ok(Response::new(IstioCertificateResponse { cert_chain: issued.chain }))
    }

    fn caller(&self, peer: &Peer, headers: &http::HeaderMap) -> Result<SpiffeId, CallerError> {
        match &self.authenticator {
            Some(authenticator) => authenticator.caller(peer, headers),
            None => Err(CallerError::Plaintext),
        }
    }

    fn refused(&self, peer: SocketAddr, reason: &str, status: Status) -> Status {
        self.events.report(Event::Refused { peer, reason: reason.to_owned() });
        status
    }
}

fn status_of(error: &AuthorityError) -> Status {
    let message = format!("CSR signing error ({error})");
    match error {
        AuthorityError::Ttl { .. } | AuthorityError::Csr(_) | AuthorityError::Identity { .. } => {
            Status::invalid_argument(message)
        }
        AuthorityError::Root | AuthorityError::Certificate(_) => Status::internal(message),
    }
}
