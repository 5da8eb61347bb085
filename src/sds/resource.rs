//! Secrets as Envoy's Secret resources.

use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::{DataSource, data_source::Specifier};
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3 as tls;
use envoy_types::pb::google::protobuf::Any;
use prost::Message;
use rustls::pki_types::CertificateRevocationListDer;
use tls::{CertificateValidationContext, TlsCertificate, secret};
use x509_parser::prelude::{CertificateRevocationList, FromDer};

use super::key_provider::KeyProvider;
use crate::pem;
use crate::problem::{Code, codes};
use crate::regular_file;
use crate::secrets::Secret;
use crate::secrets::name::Name;
use crate::trust_anchors::MAX_PEM;

/// The type of every resource served.
pub(super) const TYPE_URL: &str =
    "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

/// What resources carry beside keys, certificates and roots.
#[derive(Clone, Debug, Default)]
pub struct SecretOptions {
    /// The extension of Envoy that works with private keys.
    pub key_provider: Option<KeyProvider>,
    /// The file of the certificate revocation list (CRL) of the workload's own roots.
    pub crl: Option<PathBuf>,
}

/// A secret with its options.
#[derive(Clone, Debug)]
pub(super) struct Resource<'a> {
    pub(super) secret: Secret,
    pub(super) options: &'a SecretOptions,
    /// The CRL, if it belongs to these roots.
    pub(super) crl: Option<DataSource>,
}

/// A CRL, and the problem of a file without one.
pub(super) type Crl = (Option<DataSource>, Option<&'static Code>);

/// Reads a CRL file. Envoy reads PEM in it itself, and is given PEM where it cannot read the file.
pub(super) async fn read_crl(path: &Path) -> Crl {
    let file = DataSource {
        specifier: Some(Specifier::Filename(path.to_string_lossy().into())),
        ..Default::default()
    };
    let (list, code) = match regular_file::read_blocking(path.to_owned(), MAX_PEM).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return (None, None),
        Ok(content) if matches!(content.trim_ascii(), b"" | b"null") => {
            return (None, Some(codes::REVOCATION_LIST_EMPTY));
        }
        Ok(der) if matches!(CertificateRevocationList::from_der(&der), Ok(([], _))) => {
            (inline(pem::encode("X509 CRL", &der).as_bytes()), None)
        }
        Ok(pem) if pem::first::<CertificateRevocationListDer>(&pem).is_err() => {
            (file, Some(codes::REVOCATION_LIST_UNUSABLE))
        }
        Ok(pem) if pem::plain_blocks(&pem).is_none() => {
            let lists = pem::readable::<CertificateRevocationListDer>(pem);
            (inline(&lists), None)
        }
        _ => (file, None),
    };
    (Some(list), code)
}

impl Resource<'_> {
    /// Tells two states of a secret apart by their public part.
    pub(super) fn version(&self) -> (Bytes, Option<DataSource>) {
        let pem = match &self.secret {
            Secret::Certificate(certificate) => certificate.chain_pem(),
            Secret::Roots(roots) => roots.pem(),
        };
        (pem.clone(), self.crl.clone())
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
            Secret::Roots(roots) => secret::Type::ValidationContext(CertificateValidationContext {
                trusted_ca: Some(inline(roots.pem())),
                crl: self.crl.clone(),
                ..Default::default()
            }),
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

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, CertificateRevocationListParams, IsCa, Issuer,
        KeyIdMethod, KeyPair, SerialNumber, date_time_ymd,
    };

    use super::*;

    #[tokio::test]
    async fn a_file_without_a_list_counts_as_empty_and_a_list_in_der_becomes_pem() {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2026, 1, 1),
            next_update: date_time_ymd(2126, 1, 1),
            crl_number: SerialNumber::from(1_u64),
            issuing_distribution_point: None,
            revoked_certs: Vec::new(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&Issuer::new(params, KeyPair::generate().unwrap()));
        let (pem, der) = list
            .map(|list| (list.pem().unwrap(), list.der().to_vec()))
            .unwrap();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("crl.pem");
        assert_eq!(read_crl(&path).await, (None, None));
        let named = DataSource {
            specifier: Some(Specifier::Filename(path.display().to_string())),
            ..Default::default()
        };
        let named = (Some(named), None);
        let empty = (None, Some(codes::REVOCATION_LIST_EMPTY));
        let none = (named.0.clone(), Some(codes::REVOCATION_LIST_UNUSABLE));
        let given = (Some(inline(pem.as_bytes())), None);
        for (content, expected) in [
            (&b""[..], empty.clone()),
            (b" \r\n", empty.clone()),
            (b"null\n", empty.clone()),
            (pem.as_bytes(), named),
            (&der, given.clone()),
            (pem.replace('\n', "\r").as_bytes(), given.clone()),
            (format!("\u{feff}{pem}").as_bytes(), given),
            (&[&der[..], b"x"].concat(), none.clone()),
            (b"nullnull", none.clone()),
            (b"0", none),
        ] {
            std::fs::write(&path, content).unwrap();
            assert_eq!(read_crl(&path).await, expected);
        }
    }
}
