//! A private key and the request to certify it.
//!
//! The request is exactly what istiod's strict mode compares with: the subject is one empty
//! organisation, the only extension a critical subject alternative name with the identity.
//!
//! Does not reuse a key: each request has its own. RSA takes up to 200 ms of computing; the caller
//! keeps that off the runtime's thread.

use rcgen::string::PrintableString;
use rcgen::{CertificateParams, CustomExtension, DistinguishedName, DnType, DnValue};
use zeroize::Zeroizing;

use super::key::{self, Encoding};
use crate::identity::SpiffeId;

const SUBJECT_ALT_NAME: [u64; 4] = [2, 5, 29, 17];
const SEQUENCE: u8 = 0x30;
/// GeneralName, choice 6: a URI (RFC 5280, section 4.2.1.6).
const URI_NAME: u8 = 0x86;

/// What kind of key to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyType {
    P256,
    P384,
    /// The size in bits: 2048, 3072 or 4096.
    Rsa(u32),
}

/// A certificate request and its key.
#[derive(Clone)]
pub struct Request {
    pub csr_pem: String,
    pub key_pem: Zeroizing<String>,
}

/// Why there is no request.
#[derive(Debug, thiserror::Error)]
pub enum CsrError {
    #[error(
        "requested key size does not meet the minimum required size of 2048 (requested: {bits})"
    )]
    RsaTooSmall { bits: u32 },
    #[error("requested RSA key size {bits} is not supported, expected 2048, 3072 or 4096")]
    RsaSize { bits: u32 },
    #[error("the library wrote the new key in a form it does not document")]
    Form,
    #[error("cannot make a key and certificate request: {0}")]
    Crypto(#[from] rcgen::Error),
}

/// Makes a key and a request for `identity`.
pub fn generate(
    key_type: KeyType,
    encoding: Encoding,
    identity: &SpiffeId,
) -> Result<Request, CsrError> {
    let key = key::generate(key_type)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = empty_organization()?;
    params.custom_extensions = vec![alternative_name(&identity.to_string())];
    let csr_pem = params.serialize_request(&*key)?.pem()?;
    let key_pem = key::encoded(&key, key_type, encoding)?;
    Ok(Request { csr_pem, key_pem })
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request")
            .field("csr_pem", &self.csr_pem)
            .finish_non_exhaustive()
    }
}

fn empty_organization() -> Result<DistinguishedName, rcgen::Error> {
    let mut name = DistinguishedName::new();
    let empty = PrintableString::try_from("")?;
    name.push(DnType::OrganizationName, DnValue::PrintableString(empty));
    Ok(name)
}

/// The library would mark the extension as not critical, so it is built by hand.
fn alternative_name(uri: &str) -> CustomExtension {
    let names = der(SEQUENCE, der(URI_NAME, uri.as_bytes().to_vec()));
    let mut extension = CustomExtension::from_oid_content(&SUBJECT_ALT_NAME, names);
    extension.set_criticality(true);
    extension
}

/// Tag, length and value (X.690, section 8.1).
fn der(tag: u8, content: Vec<u8>) -> Vec<u8> {
    let length = content.len().to_be_bytes();
    let first = length.iter().position(|byte| *byte != 0).unwrap_or(7);
    let length = &length[first..];
    let mut encoded = vec![tag];
    match *length {
        [short @ ..0x80] => encoded.push(short),
        // At most eight bytes of length, so the count fits.
        _ => encoded.push(0x80 | length.len() as u8),
    }
    if !matches!(*length, [..0x80]) {
        encoded.extend_from_slice(length);
    }
    encoded.extend(content);
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::KeyPair;
    use x509_parser::prelude::*;

    fn identity() -> SpiffeId {
        SpiffeId::new("cluster.local", "shop", "cart")
    }

    /// The DER of the subject and of the one extension.
    fn shape(request: &Request) -> (Vec<u8>, Vec<u8>) {
        let (_, pem) = parse_x509_pem(request.csr_pem.as_bytes()).unwrap();
        assert_eq!(pem.label, "CERTIFICATE REQUEST");
        let (_, csr) = X509CertificationRequest::from_der(&pem.contents).unwrap();
        let info = csr.certification_request_info;
        let [attribute] = info.attributes() else {
            panic!("{:?}", info.attributes());
        };
        let ParsedCriAttribute::ExtensionRequest(requested) = attribute.parsed_attribute() else {
            panic!("{attribute:?}");
        };
        let [extension] = requested.extensions.as_slice() else {
            panic!("{requested:?}");
        };
        assert!(extension.critical);
        assert_eq!(extension.oid, oid_registry::OID_X509_EXT_SUBJECT_ALT_NAME);
        (info.subject.as_raw().to_vec(), extension.value.to_vec())
    }

    #[test]
    fn asks_for_an_empty_organization_and_one_critical_uri() {
        let uri = identity().to_string();
        let table = [
            (KeyType::P256, "1.2.840.10045.4.3.2"),
            (KeyType::P384, "1.2.840.10045.4.3.3"),
            (KeyType::Rsa(2048), "1.2.840.113549.1.1.11"),
        ];
        for (key_type, signature) in table {
            let request = generate(key_type, Encoding::Pkcs8, &identity()).unwrap();
            let (subject, names) = shape(&request);
            let organization = [
                0x30, 0x0b, 0x31, 0x09, 0x30, 0x07, 6, 3, 0x55, 4, 10, 0x13, 0,
            ];
            assert_eq!(subject, organization, "{key_type:?}");
            let length = u8::try_from(uri.len()).unwrap();
            let expected = [&[0x30, length + 2, 0x86, length], uri.as_bytes()].concat();
            assert_eq!(names, expected);
            let (_, pem) = parse_x509_pem(request.csr_pem.as_bytes()).unwrap();
            let (_, csr) = X509CertificationRequest::from_der(&pem.contents).unwrap();
            assert_eq!(csr.signature_algorithm.algorithm.to_id_string(), signature);
        }
    }

    #[test]
    fn the_key_belongs_to_the_request_and_stays_out_of_debug_output() {
        for key_type in [KeyType::P256, KeyType::P384, KeyType::Rsa(2048)] {
            let request = generate(key_type, Encoding::Pkcs8, &identity()).unwrap();
            let begin = "-----BEGIN PRIVATE KEY-----";
            assert!(request.key_pem.starts_with(begin), "{key_type:?}");
            let key = KeyPair::from_pem(&request.key_pem).unwrap();
            let (_, pem) = parse_x509_pem(request.csr_pem.as_bytes()).unwrap();
            let (_, csr) = X509CertificationRequest::from_der(&pem.contents).unwrap();
            let public = &csr
                .certification_request_info
                .subject_pki
                .subject_public_key;
            assert_eq!(public.as_ref(), key.public_key_raw(), "{key_type:?}");
            assert!(!format!("{request:?}").contains("PRIVATE"));
        }
    }

    #[test]
    fn each_request_has_its_own_key() {
        let [one, other] =
            [(); 2].map(|()| generate(KeyType::P256, Encoding::Pkcs8, &identity()).unwrap());
        assert_ne!(one.key_pem, other.key_pem);
    }

    #[test]
    fn long_identities_keep_their_length() {
        for size in [1, 90, 120, 125, 126, 127, 128, 129, 250, 256, 300, 70_000] {
            let id = SpiffeId::new("td", "n".repeat(size), "sa");
            let (_, names) = shape(&generate(KeyType::P256, Encoding::Pkcs8, &id).unwrap());
            let (_, parsed) = SubjectAlternativeName::from_der(&names).unwrap();
            let uri = id.to_string();
            assert_eq!(parsed.general_names, [GeneralName::URI(&uri)]);
        }
    }

    #[test]
    fn refuses_rsa_sizes_it_cannot_make() {
        let text = |bits| {
            let refused = generate(KeyType::Rsa(bits), Encoding::Pkcs8, &identity());
            refused.unwrap_err().to_string()
        };
        assert!(text(1024).contains("minimum required size of 2048 (requested: 1024)"));
        assert!(text(2049).contains("2049 is not supported"));
    }
}
