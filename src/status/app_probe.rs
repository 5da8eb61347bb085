//! Application probes, which the injector has the kubelet send to the status port.
//!
//! The path names the prober; the application's status and body are passed back.

use std::time::Duration;

use ::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use bytes::Bytes;

use super::probers::{Prober, Probers};
use super::{Body, Config, reply};
use crate::lifecycle::with_causes;
use crate::probe::{Client, Probe};

/// The kubelet's default.
const PROBE_LIMIT: Duration = Duration::from_secs(1);
/// Hooks have no timeout. The kubelet ends one with the pod's grace period, which is not known here
/// and seldom more than minutes.
const HOOK_LIMIT: Duration = Duration::from_secs(3600);

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
        let probe = self.probe(path, prober);
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

    fn probe(&self, path: &str, prober: &Prober) -> Probe {
        let timeout = match prober.timeout {
            Some(timeout) => timeout,
            None if path.starts_with("/app-lifecycle/") => HOOK_LIMIT,
            None => PROBE_LIMIT,
        };
        Probe {
            host: self.host.clone(),
            port: prober.port,
            kind: prober.kind.clone(),
            timeout,
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
