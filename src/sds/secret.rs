//! A certificate or trust bundle as Envoy's Secret message.
//!
//! A [`Version`] tells two states of a secret apart by their public part, so that a stream can
//! remember what it has sent without holding the key.
//!
//! Does not decide when to send.

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::{DataSource, data_source::Specifier};
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::{
    CertificateValidationContext, Secret, TlsCertificate, secret,
};
use envoy_types::pb::google::protobuf::Any;
use prost::Message;

use crate::secrets::State;
use crate::secrets::certificate::Certificate;
use crate::secrets::name::Name;

/// The type of every resource served.
pub(super) const TYPE_URL: &str =
    "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

/// What a secret held when it was sent: its chain or its roots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Version(Bytes);

/// The version of `name` that is to be had now, if any.
pub(super) fn version(name: Name, state: &State) -> Option<Version> {
    let pem = match name {
        Name::Default => state.workload.as_ref()?.certificate.chain_pem(),
        Name::RootCa => state.roots.as_ref()?.pem(),
    };
    Some(Version(pem.clone()))
}

/// `name` as a resource, if it is to be had now.
pub(super) fn resource(name: Name, state: &State) -> Option<Any> {
    let content = match name {
        Name::Default => key_pair(&state.workload.as_ref()?.certificate),
        Name::RootCa => trust_anchors(state.roots.as_ref()?.pem()),
    };
    let secret = Secret {
        name: name.to_string(),
        r#type: Some(content),
    };
    Some(Any {
        type_url: TYPE_URL.to_owned(),
        value: secret.encode_to_vec(),
    })
}

fn key_pair(certificate: &Certificate) -> secret::Type {
    secret::Type::TlsCertificate(TlsCertificate {
        certificate_chain: Some(inline(certificate.chain_pem())),
        private_key: Some(inline(certificate.key_pem().as_bytes())),
        ..Default::default()
    })
}

fn trust_anchors(pem: &[u8]) -> secret::Type {
    secret::Type::ValidationContext(CertificateValidationContext {
        trusted_ca: Some(inline(pem)),
        ..Default::default()
    })
}

fn inline(bytes: &[u8]) -> DataSource {
    DataSource {
        specifier: Some(Specifier::InlineBytes(bytes.to_vec())),
        ..Default::default()
    }
}
