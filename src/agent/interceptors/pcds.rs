//! Intercepts PCDS: hands the mesh's trust bundle to the secrets instead of to Envoy.
//!
//! The bundle is one field of a ProxyConfig. A bundle without a certificate is rejected, and the last
//! one stays.

use bytes::Bytes;
use prost::Message;

use super::resource;
use crate::problem::Problem;
use crate::runtime::lifecycle::BoxError;
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
        let outcome = match bundle(protocol, &message) {
            Ok(bundle) => match self.trust(&bundle) {
                Ok(()) => Outcome::Accepted,
                Err(problem) => Outcome::Rejected(problem.to_string()),
            },
            Err(why) => Outcome::Rejected(format!("failed to unmarshal proxy config: {why}")),
        };
        Box::pin(std::future::ready(outcome))
    }
}

/// Reads the bundle of a response.
fn bundle(protocol: Protocol, message: &Bytes) -> Result<String, BoxError> {
    let config = ProxyConfig::decode(resource::first(protocol, message, TYPE_URL)?)?;
    Ok(config.ca_certificates_pem.join("\n"))
}
