//! Verifies servers' certificates with webpki, and accepts a CA's certificate as a leaf as Go does.
//!
//! `openssl req -x509` and cert-manager's `isCA: true` make such leaves. Go, OpenSSL and BoringSSL accept
//! them, webpki does not. A leaf is accepted if it is a root or if a root has signed it; no path is built.

use std::io;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error, OtherError, SignatureScheme};
use webpki::RawPublicKeyEntity;
use x509_parser::oid_registry::OID_X509_EXT_NAME_CONSTRAINTS as NAME_CONSTRAINTS;
use x509_parser::prelude::{ExtendedKeyUsage, FromDer, GeneralName, X509Certificate, X509Version};

use crate::trust::trust_anchors::TrustAnchors;

/// The cure for a leaf that is a CA's.
const ISSUE_ANOTHER: &str = "is a CA's (CA:TRUE), and no root has signed it directly: issue it with \
    -addext basicConstraints=CA:FALSE (openssl) or isCA: false (cert-manager), or compare the roots";

impl TrustAnchors {
    /// Reviews webpki's verdict on a chain. An [`Error::Other`] names a limit that Envoy does not have.
    /// `allows` says whether a leaf with this extended key usage may be used.
    pub(crate) fn review(
        &self,
        verdict: Result<(), Error>,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        allows: fn(&ExtendedKeyUsage<'_>) -> bool,
    ) -> Result<(), Error> {
        let Err(Error::InvalidCertificate(CertificateError::Other(OtherError(cause)))) = &verdict
        else {
            return verdict;
        };
        let parsed = parse(leaf).ok_or(CertificateError::BadEncoding)?;
        let roots = &self.certificates;
        let mut issuers = intermediates.iter().chain(roots).filter_map(parse);
        let limit = match cause.downcast_ref() {
            // The dates are right: webpki checks them first.
            Some(webpki::Error::CaUsedAsEndEntity) => {
                let mut roots = roots.iter().filter_map(parse);
                if roots.any(|root| root.as_raw() == &leaf[..] || has_signed(&root, &parsed)) {
                    return match parsed.extended_key_usage() {
                        Ok(None) => Ok(()),
                        Ok(Some(usage)) if allows(usage.value) => Ok(()),
                        _ => Err(CertificateError::InvalidPurpose.into()),
                    };
                }
                ISSUE_ANOTHER.to_owned()
            }
            Some(webpki::Error::MaximumPathDepthExceeded) => "has more than 6 intermediates".into(),
            Some(webpki::Error::NameConstraintViolation) => match issuers.find(restricts_uris) {
                Some(ca) => {
                    let ca = ca.subject().to_string();
                    format!(
                        "is below {ca:.256}, whose name constraints for URIs cannot be verified"
                    )
                }
                None => return verdict,
            },
            _ => return verdict,
        };
        let [subject, issuer] = [parsed.subject(), parsed.issuer()].map(ToString::to_string);
        let limit = format!("the certificate {subject:.256}, issued by {issuer:.256}, {limit}");
        Err(Error::Other(OtherError(Arc::new(io::Error::other(limit)))))
    }

    /// Verifies the chain of a server, and not its names.
    fn verify_chain(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        let parsed = ParsedCertificate::try_from(leaf)?;
        let all = algorithms().all;
        // Go accepts a leaf that is itself a root, without a chain.
        let is_root = self.certificates.iter().any(|root| root == leaf);
        let roots = &self.store;
        let others = if is_root { &[] } else { intermediates };
        let mut verdict =
            verify_server_cert_signed_by_trust_anchor(&parsed, roots, others, now, all);
        if is_root && verdict.as_ref().is_err_and(lacks_issuer) {
            verdict = Ok(());
        }
        self.review(verdict, leaf, others, |usage| usage.server_auth || usage.any)
    }
}

impl ServerCertVerifier for TrustAnchors {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.verify_chain(leaf, intermediates, now)?;
        verify_server_name(&ParsedCertificate::try_from(leaf)?, name)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, leaf, signature, &algorithms())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, leaf, signature, &algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        algorithms().supported_schemes()
    }
}

/// Verifies like [`TrustAnchors`], but compares the names of the certificate with a list, not with the name of the server.
#[derive(Debug)]
pub(crate) struct OneOf {
    pub roots: TrustAnchors,
    /// The URIs and DNS names of which the certificate must have one. Empty if any will do.
    pub names: Vec<String>,
}

impl OneOf {
    fn accepts(&self, certificate: &X509Certificate<'_>) -> bool {
        alternative_names(certificate)
            .iter()
            .any(|it| self.names.iter().any(|name| it == name || covers(it, name)))
    }
}

/// Returns the DNS names and URIs of the subject alternative name; none if it cannot be parsed.
pub(crate) fn alternative_names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let extension = certificate.subject_alternative_name().ok().flatten();
    let names = extension.iter().flat_map(|extension| &extension.value.general_names);
    names
        .filter_map(|name| match name {
            GeneralName::DNSName(name) | GeneralName::URI(name) => Some((*name).to_owned()),
            _ => None,
        })
        .collect()
}

/// Returns true if a DNS name of a certificate is a wildcard for this host.
fn covers(name: &str, host: &str) -> bool {
    name.strip_prefix("*.")
        .is_some_and(|suffix| host.split_once('.').is_some_and(|(_, parent)| parent == suffix))
}

impl ServerCertVerifier for OneOf {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.roots.verify_chain(leaf, intermediates, now)?;
        if !self.names.is_empty() && !parse(leaf).is_some_and(|leaf| self.accepts(&leaf)) {
            return Err(CertificateError::NotValidForName.into());
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.roots.verify_tls12_signature(message, leaf, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.roots.verify_tls13_signature(message, leaf, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.roots.supported_verify_schemes()
    }
}

/// Returns true if no issuer of a certificate was found. Its dates and usage are right then: webpki checks them first.
fn lacks_issuer(error: &Error) -> bool {
    matches!(
        error,
        Error::InvalidCertificate(
            CertificateError::UnknownIssuer
                | CertificateError::BadSignature
                | CertificateError::UnsupportedSignatureAlgorithmContext { .. }
                | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. }
        )
    )
}

fn algorithms() -> WebPkiSupportedAlgorithms {
    default_provider().signature_verification_algorithms
}

pub(crate) fn parse<'a>(der: &'a CertificateDer<'_>) -> Option<X509Certificate<'a>> {
    Some(X509Certificate::from_der(der).ok()?.1)
}

/// Checks that a root has signed the certificate, and may sign any certificate by the rules of Go.
fn has_signed(root: &X509Certificate<'_>, certificate: &X509Certificate<'_>) -> bool {
    let message = &certificate.tbs_certificate;
    let signature = &certificate.signature_value;
    root.subject() == certificate.issuer()
        && (root.is_ca() || root.version() == X509Version::V1)
        && (root.key_usage()).is_ok_and(|it| it.is_none_or(|it| it.value.key_cert_sign()))
        && matches!(root.get_extension_unique(&NAME_CONSTRAINTS), Ok(None))
        && verifies(root, message.as_ref(), &signature.data)
}

pub(crate) fn verifies(signer: &X509Certificate<'_>, message: &[u8], signature: &[u8]) -> bool {
    let key = SubjectPublicKeyInfoDer::from(signer.public_key().raw);
    RawPublicKeyEntity::try_from(&key).is_ok_and(|key| {
        algorithms().all.iter().any(|it| key.verify_signature(*it, message, signature).is_ok())
    })
}

fn restricts_uris(issuer: &X509Certificate<'_>) -> bool {
    let constraints = issuer.name_constraints().ok().flatten().map(|it| it.value);
    let trees = constraints.iter().flat_map(|it| [&it.permitted_subtrees, &it.excluded_subtrees]);
    trees.flatten().flatten().any(|tree| matches!(tree.base, GeneralName::URI(_)))
}

#[cfg(test)]
mod tests;
