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
use crate::xds::interceptor::{Intercepting, Interceptor, Outcome};

const TYPE_URL: &str = "type.googleapis.com/istio.mesh.v1alpha1.ProxyConfig";

/// The interceptor of PCDS responses.
#[derive(Debug)]
pub(crate) struct Pcds {
    pub(crate) secrets: Option<Secrets>,
    pub(crate) files: Files,
}

/// The field of `istio.mesh.v1alpha1.ProxyConfig` that is read.
#[derive(Clone, PartialEq, Message)]
struct ProxyConfig {
    #[prost(string, repeated, tag = "34")]
    ca_certificates_pem: Vec<String>,
}

impl Pcds {
    /// Reads the bundle of a response, and has it trusted. Fails with the reason for a rejection.
    fn accept(&self, protocol: Protocol, message: &Bytes) -> Result<(), String> {
        let config = resource::first(protocol, message, TYPE_URL)
            .and_then(|value| ProxyConfig::decode(value).map_err(|error| error.to_string()))
            .map_err(|error| format!("failed to unmarshal proxy config: {error}"))?;
        let bundle = config.ca_certificates_pem.join("\n");
        self.trust(&bundle).map_err(|error| error.to_string())
    }

    /// Gives the bundle to the secrets from files and to the secret cache.
    fn trust(&self, bundle: &str) -> Result<(), Problem> {
        let action =
            if self.files.set_mesh_bundle(bundle)? { "update new" } else { "skip for same" };
        tracing::debug!(target: "cache", "{action} trust bundle");
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
        let accepted = self.accept(protocol, &message);
        let outcome = accepted.map_or_else(Outcome::Rejected, |()| Outcome::Accepted);
        Box::pin(std::future::ready(outcome))
    }
}
