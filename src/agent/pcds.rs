//! Intercepts PCDS: hands the mesh's trust bundle to the secrets instead of to Envoy.
//!
//! The bundle is one field of a ProxyConfig. A bundle without a certificate is rejected, and the last
//! one stays.

use bytes::Bytes;
use prost::Message;

use super::resource;
use crate::problem::Problem;
use crate::secrets::Secrets;
use crate::secrets::files::Files;
use crate::xds::Protocol;
use crate::xds::intercept::{Intercepting, Interceptor, Outcome};

const TYPE_URL: &str = "type.googleapis.com/istio.mesh.v1alpha1.ProxyConfig";

/// The interceptor of PCDS responses.
#[derive(Debug)]
pub(super) struct Pcds {
    pub(super) secrets: Option<Secrets>,
    pub(super) files: Files,
}

/// `istio.mesh.v1alpha1.ProxyConfig`, the one field.
#[derive(Clone, PartialEq, Message)]
struct ProxyConfig {
    #[prost(string, repeated, tag = "34")]
    ca_certificates_pem: Vec<String>,
}

impl Pcds {
    fn take(&self, protocol: Protocol, message: &Bytes) -> Result<(), String> {
        const WHAT: &str = "failed to unmarshal proxy config";
        let value = resource::first(protocol, message, TYPE_URL);
        let value = value.map_err(|why| format!("{WHAT}: {why}"))?;
        let config = ProxyConfig::decode(value).map_err(|error| format!("{WHAT}: {error}"))?;
        let bundle = config.ca_certificates_pem.join("\n");
        self.trust(&bundle).map_err(|error| error.to_string())
    }

    fn trust(&self, bundle: &str) -> Result<(), Problem> {
        let what = match self.files.set_mesh_bundle(bundle)? {
            true => "update new",
            false => "skip for same",
        };
        tracing::debug!(target: "cache", "{what} trust bundle");
        match &self.secrets {
            Some(secrets) => secrets.set_mesh_bundle(bundle),
            None => Ok(()),
        }
    }
}

impl Interceptor for Pcds {
    fn type_url(&self) -> &str {
        TYPE_URL
    }

    fn intercept(&self, protocol: Protocol, message: Bytes) -> Intercepting {
        let outcome = match self.take(protocol, &message) {
            Ok(()) => Outcome::Accepted,
            Err(error) => Outcome::Rejected(error),
        };
        Box::pin(std::future::ready(outcome))
    }
}
