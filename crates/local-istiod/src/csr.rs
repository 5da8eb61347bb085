//! Parses certificate requests, verifies their signatures, and refuses requests that do not have the
//! form that agents send.
//!
//! istiod's Kubernetes signer requires the same form: no subject (or one empty organisation), and
//! subjectAltName as the only extension, with at most one URI.
//!
//! `authority` compares this URI with the caller's identity.

use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P384_SHA384_ASN1, RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey,
    VerificationAlgorithm,
};
use rcgen::{PublicKeyData, SignatureAlgorithm};
use x509_parser::certification_request::{X509CertificationRequest, X509CertificationRequestInfo};
use x509_parser::cri_attributes::ParsedCriAttribute;
use x509_parser::extensions::{GeneralName, ParsedExtension, X509Extension};
use x509_parser::prelude::FromDer;

const ORGANISATION: &str = "2.5.4.10";

/// A request in the expected form.
#[derive(Debug)]
pub(super) struct Csr {
    pub(super) key: RequestedKey,
    pub(super) uri: Option<String>,
}

/// The public key of a request, for the certificate.
#[derive(Debug)]
pub(super) struct RequestedKey {
    algorithm: &'static SignatureAlgorithm,
    bytes: Vec<u8>,
}

/// The reason why a request is not signed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum CsrError {
    #[error("certificate request is not a PEM block CERTIFICATE REQUEST")]
    NotPem,
    #[error("certificate request is not PKCS #10")]
    NotPkcs10,
    #[error(
        "certificate request is signed with {found}, expected ECDSA (P-256 or P-384) or RSA with SHA-2"
    )]
    Algorithm { found: String },
    #[error("signature of the certificate request does not match its key")]
    Signature,
    #[error("certificate request has the subject {found:?}, expected none")]
    Subject { found: String },
    #[error("certificate request has the extension {found}, expected subjectAltName only")]
    Extension { found: String },
    #[error("certificate request names {found}, expected at most one URI")]
    Names { found: String },
}

pub(super) fn parse(pem: &str) -> Result<Csr, CsrError> {
    let (_, pem) =
        x509_parser::pem::parse_x509_pem(pem.as_bytes()).map_err(|_| CsrError::NotPem)?;
    if pem.label != "CERTIFICATE REQUEST" {
        return Err(CsrError::NotPem);
    }
    let (rest, request) =
        X509CertificationRequest::from_der(&pem.contents).map_err(|_| CsrError::NotPkcs10)?;
    if !rest.is_empty() {
        return Err(CsrError::NotPkcs10);
    }
    let key = verified_key(&request)?;
    check_subject(&request.certification_request_info)?;
    let uri = requested_uri(&request.certification_request_info)?;
    Ok(Csr { key, uri })
}

fn verified_key(request: &X509CertificationRequest<'_>) -> Result<RequestedKey, CsrError> {
    let bytes = request.certification_request_info.subject_pki.subject_public_key.data.to_vec();
    let oid = request.signature_algorithm.algorithm.to_id_string();
    let (verification, algorithm): (&dyn VerificationAlgorithm, _) = match oid.as_str() {
        "1.2.840.10045.4.3.2" => (&ECDSA_P256_SHA256_ASN1, &rcgen::PKCS_ECDSA_P256_SHA256),
        "1.2.840.10045.4.3.3" => (&ECDSA_P384_SHA384_ASN1, &rcgen::PKCS_ECDSA_P384_SHA384),
        "1.2.840.113549.1.1.11" => (&RSA_PKCS1_2048_8192_SHA256, &rcgen::PKCS_RSA_SHA256),
        _ => return Err(CsrError::Algorithm { found: oid }),
    };
    UnparsedPublicKey::new(verification, &bytes)
        .verify(request.certification_request_info.raw, &request.signature_value.data)
        .map_err(|_| CsrError::Signature)?;
    Ok(RequestedKey { algorithm, bytes })
}

fn check_subject(info: &X509CertificationRequestInfo<'_>) -> Result<(), CsrError> {
    let attributes: Vec<_> = info.subject.iter_attributes().collect();
    match attributes.as_slice() {
        [] => Ok(()),
        [only] if only.attr_type().to_id_string() == ORGANISATION && only.as_slice().is_empty() => {
            Ok(())
        }
        _ => Err(CsrError::Subject { found: info.subject.to_string() }),
    }
}

fn requested_uri(info: &X509CertificationRequestInfo<'_>) -> Result<Option<String>, CsrError> {
    let mut extensions: Vec<&X509Extension<'_>> = Vec::new();
    for attribute in info.iter_attributes() {
        if let ParsedCriAttribute::ExtensionRequest(requested) = attribute.parsed_attribute() {
            extensions.extend(&requested.extensions);
        }
    }
    let mut names = Vec::new();
    for extension in extensions {
        match extension.parsed_extension() {
            ParsedExtension::SubjectAlternativeName(san) => names.extend(&san.general_names),
            _ => {
                return Err(CsrError::Extension { found: extension.oid.to_id_string() });
            }
        }
    }
    match names.as_slice() {
        [] => Ok(None),
        [GeneralName::URI(uri)] => Ok(Some((*uri).to_owned())),
        names => Err(CsrError::Names { found: format!("{names:?}") }),
    }
}

impl PublicKeyData for RequestedKey {
    fn der_bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        self.algorithm
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{
        CertificateParams, DistinguishedName, DnType, DnValue, ExtendedKeyUsagePurpose, KeyPair,
        SanType,
    };

    use super::*;

    const URI: &str = "spiffe://cluster.local/ns/shop/sa/cart";

    fn params() -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = vec![SanType::URI(URI.try_into().unwrap())];
        params
    }

    fn request(change: impl FnOnce(&mut CertificateParams)) -> String {
        let key = KeyPair::generate().unwrap();
        let mut params = params();
        change(&mut params);
        params.serialize_request(&key).unwrap().pem().unwrap()
    }

    #[test]
    fn accepts_what_agents_send() {
        let plain = parse(&request(|_| {})).unwrap();
        assert_eq!(plain.uri.as_deref(), Some(URI));
        let empty_organisation = parse(&request(|params| {
            let empty = DnValue::PrintableString("".try_into().unwrap());
            params.distinguished_name.push(DnType::OrganizationName, empty);
        }));
        assert_eq!(empty_organisation.unwrap().uri.as_deref(), Some(URI));
        let unnamed = parse(&request(|params| params.subject_alt_names.clear())).unwrap();
        assert_eq!(unnamed.uri, None);
    }

    #[test]
    fn refuses_every_other_subject_extension_and_name() {
        type Change = fn(&mut CertificateParams);
        let table: [(&str, Change); 5] = [
            ("subject", |params| {
                params.distinguished_name.push(DnType::CommonName, "cart");
            }),
            ("subject", |params| {
                params.distinguished_name.push(DnType::OrganizationName, "shop");
            }),
            ("extension", |params| {
                params.insert_extended_key_usage(ExtendedKeyUsagePurpose::ServerAuth);
            }),
            ("names", |params| {
                let dns = SanType::DnsName("cart.shop".try_into().unwrap());
                params.subject_alt_names.push(dns);
            }),
            ("names", |params| {
                params.subject_alt_names.push(SanType::URI("spiffe://a".try_into().unwrap()));
            }),
        ];
        for (reason, change) in table {
            let error = parse(&request(change)).unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
        }
    }

    #[test]
    fn refuses_malformed_and_altered_csrs() {
        let key = KeyPair::generate().unwrap();
        assert_eq!(parse("").unwrap_err(), CsrError::NotPem);
        assert_eq!(parse(&key.serialize_pem()).unwrap_err(), CsrError::NotPem);
        let garbage =
            "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n";
        assert_eq!(parse(garbage).unwrap_err(), CsrError::NotPkcs10);
        let mut der = params().serialize_request(&key).unwrap().der().to_vec();
        let name = der.windows(4).position(|at| at == b"cart").unwrap();
        der[name] = b'h';
        let pem = pem_of(&der);
        assert_eq!(parse(&pem).unwrap_err(), CsrError::Signature);
    }

    fn pem_of(der: &[u8]) -> String {
        use base64::Engine;
        let text = base64::engine::general_purpose::STANDARD.encode(der);
        format!("-----BEGIN CERTIFICATE REQUEST-----\n{text}\n-----END CERTIFICATE REQUEST-----\n")
    }
}
