//! Secrets as Envoy's Secret resources.

use std::path::PathBuf;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::{DataSource, data_source::Specifier};
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3 as tls;
use envoy_types::pb::google::protobuf::Any;
use prost::Message;
use tls::{CertificateValidationContext, TlsCertificate, secret};

use super::key_provider::KeyProvider;
use crate::secrets::Secret;
use crate::secrets::name::Name;

/// The type of every resource served.
pub(super) const TYPE_URL: &str =
    "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

/// What resources carry beside keys, certificates and roots.
#[derive(Clone, Debug, Default)]
pub struct SecretOptions {
    /// The extension of Envoy that works with private keys.
    pub key_provider: Option<KeyProvider>,
    /// The certificate revocation list (CRL) of the workload's own roots; Envoy reads the file.
    pub crl: Option<PathBuf>,
}

/// A secret with its options.
#[derive(Clone, Debug)]
pub(super) struct Resource<'a> {
    pub(super) secret: Secret,
    pub(super) options: &'a SecretOptions,
    /// Whether the CRL belongs to these roots and exists: Envoy refuses a file that does not.
    pub(super) has_crl: bool,
}

impl Resource<'_> {
    /// Tells two states of a secret apart by their public part.
    pub(super) fn version(&self) -> (Bytes, bool) {
        let pem = match &self.secret {
            Secret::Certificate(certificate) => certificate.chain_pem(),
            Secret::Roots(roots) => roots.pem(),
        };
        (pem.clone(), self.has_crl)
    }

    pub(super) fn encode(&self, name: &Name) -> Any {
        let content = match &self.secret {
            Secret::Certificate(certificate) => {
                let pair = TlsCertificate {
                    certificate_chain: Some(inline(certificate.chain_pem())),
                    private_key: Some(inline(certificate.key_pem())),
                    ..Default::default()
                };
                secret::Type::TlsCertificate(match &self.options.key_provider {
                    Some(provider) => provider.wrap_key(pair),
                    None => pair,
                })
            }
            Secret::Roots(roots) => {
                let crl = self.options.crl.as_ref().filter(|_| self.has_crl);
                secret::Type::ValidationContext(CertificateValidationContext {
                    trusted_ca: Some(inline(roots.pem())),
                    crl: crl.map(|path| DataSource {
                        specifier: Some(Specifier::Filename(path.to_string_lossy().into())),
                        ..Default::default()
                    }),
                    ..Default::default()
                })
            }
        };
        let secret = tls::Secret {
            name: name.to_string(),
            r#type: Some(content),
        };
        Any {
            type_url: TYPE_URL.to_owned(),
            value: secret.encode_to_vec(),
        }
    }
}

fn inline(bytes: &[u8]) -> DataSource {
    DataSource {
        specifier: Some(Specifier::InlineBytes(bytes.to_vec())),
        ..Default::default()
    }
}
