//! Makes a private key and the request to certify it.
//!
//! The request has the form that istiod's strict mode expects: the subject is one empty organization, the
//! only extension a critical subject alternative name with the SPIFFE identity. Each request has a new key.
//! Making an RSA key takes up to seconds; callers run that on a blocking thread.

use rcgen::{CertificateParams, CustomExtension, DistinguishedName, DnType, DnValue};
use yasna::Tag;
use zeroize::Zeroizing;

use super::key::{self, Encoding, KeyType};
use crate::runtime::lifecycle::BoxError;
use crate::trust::identity::SpiffeId;

const SUBJECT_ALT_NAME: [u64; 4] = [2, 5, 29, 17];
/// The tag of a URI in GeneralName (RFC 5280, section 4.2.1.6).
const URI_NAME: Tag = Tag { tag_class: yasna::TagClass::ContextSpecific, tag_number: 6 };

#[derive(Clone)]
pub struct Request {
    pub csr_pem: String,
    pub key_pem: Zeroizing<String>,
}

/// Makes a key and a request for `identity`.
pub fn generate(
    key_type: KeyType,
    encoding: Encoding,
    identity: &SpiffeId,
) -> Result<Request, BoxError> {
    let key = key::generate(key_type)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = empty_organization()?;
    params.custom_extensions = vec![alternative_name(&identity.to_string())];
    Ok(Request {
        csr_pem: params.serialize_request(&*key)?.pem()?,
        key_pem: key::to_pem(&key, key_type, encoding)?,
    })
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").field("csr_pem", &self.csr_pem).finish_non_exhaustive()
    }
}

fn empty_organization() -> Result<DistinguishedName, rcgen::Error> {
    let mut name = DistinguishedName::new();
    name.push(DnType::OrganizationName, DnValue::PrintableString("".try_into()?));
    Ok(name)
}

/// Builds the extension by hand, because rcgen would mark it as not critical.
fn alternative_name(uri: &str) -> CustomExtension {
    let names = yasna::construct_der(|writer| {
        writer.write_sequence(|writer| {
            writer
                .next()
                .write_tagged_implicit(URI_NAME, |writer| writer.write_bytes(uri.as_bytes()));
        });
    });
    let mut extension = CustomExtension::from_oid_content(&SUBJECT_ALT_NAME, names);
    extension.set_criticality(true);
    extension
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::KeyPair;
    use x509_parser::prelude::*;

    fn identity() -> SpiffeId {
        SpiffeId::new("cluster.local", "shop", "cart")
    }

    /// Checks that a critical SAN is the only extension. Returns the DER of the subject and of the extension's value.
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
            // One attribute: the organization name (2.5.4.10), an empty PrintableString.
            let organization = [0x30, 0x0b, 0x31, 0x09, 0x30, 0x07, 6, 3, 0x55, 4, 10, 0x13, 0];
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
            let public = &csr.certification_request_info.subject_pki.subject_public_key;
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
        // The encoding of a DER length changes at 128, 256 and 65,536 bytes.
        for size in [1, 90, 120, 125, 126, 127, 128, 129, 250, 256, 300, 70_000] {
            let id = SpiffeId::new("td", "n".repeat(size), "sa");
            let (_, names) = shape(&generate(KeyType::P256, Encoding::Pkcs8, &id).unwrap());
            let (_, parsed) = SubjectAlternativeName::from_der(&names).unwrap();
            let uri = id.to_string();
            assert_eq!(parsed.general_names, [GeneralName::URI(&uri)]);
        }
    }
}
