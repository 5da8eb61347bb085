//! A certificate or trust bundle as Envoy's Secret message.
//!
//! A [`Shelf`] is where a stream looks secrets up. A [`Version`] tells two states of a secret apart
//! by their public part, so that a stream can remember what it has sent without holding the key.
//!
//! Does not decide when to send.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::{DataSource, data_source::Specifier};
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::{
    CertificateValidationContext, Secret, TlsCertificate, secret,
};
use envoy_types::pb::google::protobuf::Any;
use prost::Message;

use super::provider::Provider;
use crate::secrets::State;
use crate::secrets::files::source::{Content, FileError};
use crate::secrets::files::{Found, Subscription};
use crate::secrets::name::Name;

/// The type of every resource served.
pub(super) const TYPE_URL: &str =
    "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

/// What secrets carry beside their content.
#[derive(Clone, Debug, Default)]
pub struct Style {
    /// Who works with private keys in Envoy's place.
    pub provider: Option<Provider>,
    /// The revocation list of the workload's own roots, where it exists. Envoy reads it.
    pub revocations: Option<PathBuf>,
}

/// What a secret held when it was sent: its chain or its roots.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Version {
    pem: Bytes,
    has_revocations: bool,
}

/// What there is under a name.
#[derive(Clone, Debug)]
pub(super) enum Shown {
    /// Nothing, until the authority answers.
    NotYet,
    /// To be known in a moment.
    Pending,
    /// Files that are not good.
    Missing(Arc<FileError>),
    There(Version),
}

/// Where secrets are looked up.
pub(super) trait Shelf {
    fn shown(&self, name: &Name) -> Shown;
    fn content(&self, name: &Name) -> Option<secret::Type>;
}

/// All there is at one moment, from files and from the authority.
pub(super) struct View<'a> {
    state: State,
    files: &'a Subscription,
    style: &'a Style,
    has_revocations: bool,
}

impl Version {
    pub(super) fn of(pem: &Bytes) -> Self {
        Self {
            pem: pem.clone(),
            has_revocations: false,
        }
    }

    /// The version in a form that fits into a message.
    pub(super) fn text(&self) -> String {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    }
}

impl<'a> View<'a> {
    pub(super) fn new(state: State, files: &'a Subscription, style: &'a Style) -> Self {
        let revocations = style.revocations.as_deref();
        Self {
            state,
            files,
            style,
            // Envoy would refuse the secret that names a file which does not exist.
            has_revocations: revocations.is_some_and(std::path::Path::exists),
        }
    }

    /// A list speaks of one authority: other roots are good without.
    fn has_revocations(&self, name: &Name) -> bool {
        self.has_revocations && self.files.are_own_roots(name)
    }

    fn dressed(&self, name: &Name, content: secret::Type) -> secret::Type {
        match content {
            secret::Type::TlsCertificate(pair) => {
                let provider = self.style.provider.as_ref();
                secret::Type::TlsCertificate(match provider {
                    Some(provider) => provider.take_key(pair),
                    None => pair,
                })
            }
            secret::Type::ValidationContext(mut context) if self.has_revocations(name) => {
                let path = self.style.revocations.as_deref();
                context.crl = path.map(|path| DataSource {
                    specifier: Some(Specifier::Filename(path.to_string_lossy().into())),
                    ..Default::default()
                });
                secret::Type::ValidationContext(context)
            }
            other => other,
        }
    }
}

impl Shelf for View<'_> {
    fn shown(&self, name: &Name) -> Shown {
        let shown = match self.files.found(name) {
            Found::There(secret) => match &secret.content {
                Content::Pair { chain, .. } => Shown::There(Version::of(chain)),
                Content::Roots { pem, .. } => Shown::There(Version::of(pem)),
            },
            Found::Pending => Shown::Pending,
            Found::Missing(error) => Shown::Missing(error),
            Found::NoFile => self.state.shown(name),
        };
        match shown {
            Shown::There(version) => Shown::There(Version {
                has_revocations: self.has_revocations(name),
                ..version
            }),
            other => other,
        }
    }

    fn content(&self, name: &Name) -> Option<secret::Type> {
        let content = match self.files.found(name) {
            Found::There(secret) => match &secret.content {
                Content::Pair { chain, key, .. } => key_pair(chain, key),
                Content::Roots { pem, .. } => trust_anchors(pem),
            },
            _ => self.state.content(name)?,
        };
        Some(self.dressed(name, content))
    }
}

impl Shelf for State {
    fn shown(&self, name: &Name) -> Shown {
        let workload = self.workload.as_ref();
        let pem = match name {
            Name::Default => workload.map(|workload| workload.certificate.chain_pem()),
            Name::RootCa => self.roots.as_ref().map(|roots| roots.pem()),
            _ => None,
        };
        pem.map_or(Shown::NotYet, |pem| Shown::There(Version::of(pem)))
    }

    fn content(&self, name: &Name) -> Option<secret::Type> {
        match name {
            Name::Default => {
                let certificate = &self.workload.as_ref()?.certificate;
                let key = certificate.key_pem().as_bytes();
                Some(key_pair(certificate.chain_pem(), key))
            }
            Name::RootCa => Some(trust_anchors(self.roots.as_ref()?.pem())),
            _ => None,
        }
    }
}

/// `name` as a resource, if it is to be had now.
pub(super) fn resource(name: &Name, shelf: &impl Shelf) -> Option<Any> {
    let secret = Secret {
        name: name.to_string(),
        r#type: Some(shelf.content(name)?),
    };
    Some(Any {
        type_url: TYPE_URL.to_owned(),
        value: secret.encode_to_vec(),
    })
}

fn key_pair(chain: &[u8], key: &[u8]) -> secret::Type {
    secret::Type::TlsCertificate(TlsCertificate {
        certificate_chain: Some(inline(chain)),
        private_key: Some(inline(key)),
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
