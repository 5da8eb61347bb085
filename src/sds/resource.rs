//! Encodes secrets as Envoy's `Secret` resources, and reads certificate revocation lists (CRL).

use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::{DataSource, data_source::Specifier};
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3 as tls;
use envoy_types::pb::google::protobuf::Any;
use prost::Message;
use rustls::pki_types::CertificateRevocationListDer as CrlDer;
use tls::{CertificateValidationContext, TlsCertificate, secret};
use x509_parser::prelude::{
    ASN1Time, CertificateRevocationList as Crl, FromDer, X509Certificate, X509Name,
};

use super::key_provider::KeyProvider;
use crate::files::regular_file;
use crate::problem::{Code, Problem};
use crate::runtime::clock::rfc3339;
use crate::secrets::Secret;
use crate::secrets::name::Name;
use crate::trust::chain_verifier::{parse, verifies};
use crate::trust::pem;
use crate::trust::trust_anchors::MAX_PEM;

/// The type of every resource served.
pub(super) const TYPE_URL: &str =
    "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

/// Options of resources in addition to keys, certificates and roots.
#[derive(Clone, Debug, Default)]
pub struct SecretOptions {
    /// The extension of Envoy that signs with private keys.
    pub key_provider: Option<KeyProvider>,
    /// The file of the certificate revocation list (CRL) of the workload's own roots.
    pub crl: Option<PathBuf>,
}

#[derive(Clone, Debug)]
pub(super) struct Resource<'a> {
    pub(super) secret: Secret,
    pub(super) options: &'a SecretOptions,
    /// The CRL, if it belongs to these roots.
    pub(super) crl: Option<DataSource>,
}

/// The parts of a resource in which two versions differ. The key is not one of them.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Version {
    /// The certificate chain or the roots.
    pem: Bytes,
    crl: Option<DataSource>,
}

/// Reads a CRL file. Returns its name if Envoy can read the file itself, and its content as PEM otherwise. None if
/// there is no file, or no list in it.
pub(super) async fn read_crl(path: &Path) -> Option<DataSource> {
    let file = DataSource {
        specifier: Some(Specifier::Filename(path.to_string_lossy().into())),
        ..Default::default()
    };
    Some(match regular_file::read_blocking(path.to_owned(), MAX_PEM).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Ok(content) if matches!(content.trim_ascii(), b"" | b"null") => return None,
        Ok(der) if matches!(Crl::from_der(&der), Ok(([], _))) => {
            inline(pem::encode("X509 CRL", &der).as_bytes())
        }
        Ok(pem) if pem::plain_blocks(&pem).is_none() && pem::first::<CrlDer>(&pem).is_ok() => {
            inline(&pem::readable::<CrlDer>(pem))
        }
        _ => file,
    })
}

/// Reports a CRL file without a valid list of some issuer: Envoy needs one of every issuer in a peer's chain.
/// Peers have the issuers of the workload's own chain. Blocks.
pub(crate) fn revocation_problem(path: &Path, chain: &[u8]) -> Option<Problem> {
    let file = regular_file::read(path, MAX_PEM).ok()?;
    // The file from istiod is empty until an operator configures a list.
    if file.trim_ascii().is_empty() {
        return None;
    }
    let ders = match Crl::from_der(&file) {
        Ok(([], _)) => vec![CrlDer::from(&**file)],
        _ => pem::items(&file).flatten().collect(),
    };
    let chain = Vec::from_iter(pem::items(chain).flatten());
    let lists = Vec::from_iter(ders.iter().flat_map(|der| Crl::from_der(der)));
    let links = Vec::from_iter(chain.iter().filter_map(parse));
    let now = ASN1Time::now();
    let without_list = links
        .iter()
        .map(|link| link.issuer())
        .find(|issuer| !lists.iter().any(|(_, list)| is_valid(list, issuer, &links, now)));
    let mut found = match without_list {
        Some(issuer) => format!("no valid list of {issuer}"),
        None if lists.is_empty() => "no list".to_owned(),
        None => return None,
    };
    for (_, list) in &lists {
        let end = list.next_update().unwrap_or(now).to_datetime().into();
        found += &format!("; found one of {} until {}", list.issuer(), rfc3339(end));
    }
    let code = match file.trim_ascii() {
        b"null" => Code::RevocationListEmpty,
        _ => Code::RevocationListUnusable,
    };
    Some(Problem::new(code, path.display(), found))
}

/// Returns true if a list is in force and the issuer has signed it. `links` is the chain, which may lack its root.
fn is_valid(
    list: &Crl<'_>,
    issuer: &X509Name<'_>,
    links: &[X509Certificate<'_>],
    now: ASN1Time,
) -> bool {
    let text = list.tbs_cert_list.as_ref();
    let signature = &list.signature_value.data;
    let mut signers = links.iter().filter(|it| it.subject() == issuer).peekable();
    list.issuer() == issuer
        && (list.last_update() <= now && list.next_update().is_none_or(|end| end >= now))
        && (signers.peek().is_none() || signers.any(|it| verifies(it, text, signature)))
}

impl Resource<'_> {
    /// Returns the version, to compare it with others of the same name.
    pub(super) fn version(&self) -> Version {
        let pem = match &self.secret {
            Secret::Certificate(certificate) => certificate.chain_pem().clone(),
            Secret::Roots(roots) => roots.pem().clone(),
        };
        Version { pem, crl: self.crl.clone() }
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
        let secret = tls::Secret { name: name.to_string(), r#type: Some(content) };
        Any { type_url: TYPE_URL.to_owned(), value: secret.encode_to_vec() }
    }
}

fn inline(bytes: &[u8]) -> DataSource {
    DataSource { specifier: Some(Specifier::InlineBytes(bytes.to_vec())), ..Default::default() }
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer,
        DnType, IsCa, Issuer, KeyIdMethod, KeyPair, SerialNumber, SigningKey, date_time_ymd,
    };

    use super::*;

    fn list_of<K: SigningKey>(issuer: &Issuer<'_, K>, years: [i32; 2]) -> [Vec<u8>; 2] {
        let params = CertificateRevocationListParams {
            this_update: date_time_ymd(years[0], 1, 1),
            next_update: date_time_ymd(years[1], 1, 1),
            crl_number: SerialNumber::from(1_u64),
            issuing_distribution_point: None,
            revoked_certs: Vec::new(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = params.signed_by(issuer).unwrap();
        [list.pem().unwrap().into_bytes(), list.der().to_vec()]
    }

    fn authority(name: &str) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
    }

    #[tokio::test]
    async fn a_file_without_a_list_is_empty_and_der_becomes_pem() {
        let issuer = Issuer::new(authority("root"), KeyPair::generate().unwrap());
        let [pem, der] = list_of(&issuer, [2026, 2126]);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("crl.pem");
        assert_eq!(read_crl(&path).await, None);
        let named = Some(DataSource {
            specifier: Some(Specifier::Filename(path.display().to_string())),
            ..Default::default()
        });
        let given = Some(inline(&pem));
        let text = String::from_utf8(pem.clone()).unwrap();
        for (content, expected) in [
            (&b""[..], None),
            (b" \r\n", None),
            (b"null\n", None),
            (&pem, named.clone()),
            (&der, given.clone()),
            (text.replace('\n', "\r").as_bytes(), given.clone()),
            (format!("\u{feff}{text}").as_bytes(), given),
            (&[&der[..], b"x"].concat(), named.clone()),
            (b"nullnull", named.clone()),
            (b"0", named),
        ] {
            std::fs::write(&path, content).unwrap();
            assert_eq!(read_crl(&path).await, expected);
        }
    }

    #[test]
    fn each_issuer_needs_a_valid_crl_or_a_problem_names_it() {
        let ca = |name: &str| {
            CertifiedIssuer::self_signed(authority(name), KeyPair::generate().unwrap()).unwrap()
        };
        let (root, namesake, other) = (ca("root"), ca("root"), ca("other"));
        let key = KeyPair::generate().unwrap();
        let middle = CertifiedIssuer::signed_by(authority("middle"), key, &root).unwrap();
        let leaf = CertificateParams::default();
        let leaf = leaf.signed_by(&KeyPair::generate().unwrap(), &middle);
        let chain = format!("{}{}{}", leaf.unwrap().pem(), middle.pem(), root.pem());
        let [of_root, der] = list_of(&root, [2020, 2126]);
        let of_middle = list_of(&middle, [2020, 2126])[0].clone();
        let (expired, future) =
            (list_of(&middle, [2020, 2021])[0].clone(), list_of(&middle, [2120, 2126])[0].clone());
        let [foreign, same_name] =
            [&other, &namesake].map(|it| list_of(it, [2020, 2126])[0].clone());
        let join = |lists: &[&Vec<u8>]| lists.iter().copied().flatten().copied().collect();
        let (empty, unusable) = (Code::RevocationListEmpty, Code::RevocationListUnusable);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("crl.pem");
        let found = |file: &Vec<u8>| {
            std::fs::write(&path, file).unwrap();
            revocation_problem(&path, chain.as_bytes())
        };
        assert_eq!(revocation_problem(&path, chain.as_bytes()), None);
        for (file, code, words) in [
            (b"null".to_vec(), empty, "no valid list of CN=middle"),
            (b"x".to_vec(), unusable, "no valid list of CN=middle"),
            (
                join(&[&of_root, &expired]),
                unusable,
                "CN=middle; found one of CN=root until 2126-01-01T00:00:00Z; found one of CN=middle until 2021-01-01",
            ),
            (join(&[&of_root, &future]), unusable, "no valid list of CN=middle;"),
            (foreign, unusable, "found one of CN=other until"),
            (join(&[&of_middle, &same_name]), unusable, "no valid list of CN=root;"),
            (der, unusable, "no valid list of CN=middle;"),
            (of_middle.clone(), unusable, "no valid list of CN=root;"),
        ] {
            let problem = found(&file).expect(words);
            assert_eq!(problem.code, code, "{problem}");
            assert!(problem.found.contains(words), "{words}: {problem}");
            assert_eq!(problem.subject, path.display().to_string());
        }
        for file in
            [join(&[&of_root, &of_middle]), join(&[&expired, &of_middle, &of_root, &future])]
        {
            assert_eq!(found(&file), None);
        }
        // Without a certificate chain, the only problem is a file that contains no list.
        assert_eq!(revocation_problem(&path, b""), None);
        std::fs::write(&path, "x").unwrap();
        let problem = revocation_problem(&path, b"").expect("has no list");
        assert_eq!(problem.code, unusable);
    }
}
