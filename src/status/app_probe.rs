//! Application probes, which the injector has the kubelet send to the status port.
//!
//! The path names the prober; the application's status and body are passed back.

use ::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use bytes::Bytes;

use super::probers::Probers;
use super::{Body, Config, reply};
use crate::lifecycle::with_causes;
use crate::probe::Client;

pub(super) struct AppProbes {
    client: Client,
    probers: Probers,
    /// The host of all probes.
    host: String,
    status_port: u16,
}

impl AppProbes {
    pub(super) fn new(config: Config) -> Result<Self, rustls::Error> {
        Ok(Self {
            client: Client::new(config.probes)?,
            probers: config.probers,
            host: config.application,
            status_port: config.port,
        })
    }

    pub(super) async fn answer(&self, path: &str, headers: &HeaderMap) -> Response<Body> {
        let Some(prober) = self.probers.get(path) else {
            tracing::error!(target: "probes", "Prober does not exists url {path}");
            let text = format!("app prober config does not exists for {path}\n");
            return reply::refusal(StatusCode::BAD_REQUEST, text);
        };
        let probe = prober.probe(path, &self.host);
        let headers = self.headers(headers, prober.port);
        match self.client.probe(&probe, &headers).await {
            Ok(outcome) => reply::bytes(outcome.status, outcome.body),
            Err(error) => {
                let why = with_causes(&error);
                tracing::error!(target: "probes", "Request to probe app failed: {why}, path = {path}");
                reply::bytes(StatusCode::INTERNAL_SERVER_ERROR, Bytes::new())
            }
        }
    }

    /// The kubelet's headers, in which `Host` gets the application's port for the status port.
    fn headers(&self, headers: &HeaderMap, port: u16) -> HeaderMap {
        const HOST: HeaderName = header::HOST;
        let mut headers = headers.clone();
        let host = headers.get(HOST).and_then(|host| host.to_str().ok());
        let ours = format!(":{}", self.status_port);
        if let Some(name) = host.and_then(|host| host.strip_suffix(&ours))
            && let Ok(host) = HeaderValue::from_str(&format!("{name}:{port}"))
        {
            headers.insert(HOST, host);
        }
        headers
    }
}
