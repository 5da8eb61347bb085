//! Prepares TLS to istiod: roots, expected name, optional client certificate.
//!
//! All files are read at each dial, so a rotated one is in force for the next connection. TLS 1.2 and
//! 1.3 with a post-quantum key exchange first, unless a compliance policy says otherwise.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, InconsistentKeys};
use zeroize::Zeroizing;

use super::file;
pub use super::roots::RootsError;
use super::roots::{self, LARGEST, not_after, seconds};
use crate::compliance::Policy;

/// Files and name of the TLS connection.
#[derive(Clone, Debug)]
pub struct Config {
    /// Sent as SNI and checked against the certificate.
    pub server_name: String,
    pub roots: Roots,
    pub client: Option<ClientCertificate>,
    pub policy: Policy,
}

/// Where the trust anchors come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Roots {
    /// PEM, one or more certificates.
    File(PathBuf),
    /// The first bundle of the operating system that exists.
    System,
}

/// PEM files of a client certificate (`PROV_CERT`). Used while the leaf is valid, left out otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCertificate {
    pub chain: PathBuf,
    pub key: PathBuf,
}

/// Why no handshake can be tried.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{found:?} is no server name, expected a DNS name or an IP address")]
    ServerName { found: String },
    #[error(transparent)]
    Roots(#[from] RootsError),
    #[error("cannot read the client key {path}: {source}", path = .path.display())]
    KeyUnreadable { path: PathBuf, source: io::Error },
    #[error("client key {path} is no PEM private key: {source}", path = .path.display())]
    KeyInvalid { path: PathBuf, source: pem::Error },
    #[error("client certificate {path} cannot be used with its key: {source}", path = .path.display())]
    Pair {
        path: PathBuf,
        source: rustls::Error,
    },
    #[error("cannot set up TLS: {0}")]
    Setup(#[source] rustls::Error),
}

/// Why a client certificate is left out.
#[derive(Debug, thiserror::Error)]
enum LeftOut {
    #[error("cannot parse the cert chain, using token instead: {path}: {why}", path = .path.display())]
    Unusable { path: PathBuf, why: String },
    #[error("cert expired, using token instead")]
    Expired,
}

/// What one dial needs for its handshake.
pub(super) struct Prepared {
    pub(super) config: Arc<ClientConfig>,
    /// The same without the client certificate, where there is one: istiod may refuse it.
    pub(super) without_client: Option<Arc<ClientConfig>>,
    pub(super) name: ServerName<'static>,
}

pub(super) async fn prepare(config: &Config) -> Result<Prepared, TlsError> {
    let name = ServerName::try_from(config.server_name.clone()).map_err(|_| {
        let found = config.server_name.clone();
        TlsError::ServerName { found }
    })?;
    let roots = roots::load(&config.roots).await?;
    let builder = config.policy.builder().map_err(TlsError::Setup)?;
    let builder = builder.with_root_certificates(roots);
    let anonymous = for_http2(builder.clone().with_no_client_auth());
    let Some((path, chain, key)) = client_pair(config.client.as_ref()).await? else {
        return Ok(Prepared {
            config: anonymous,
            without_client: None,
            name,
        });
    };
    let pair = certified(chain, &key).map_err(|source| TlsError::Pair { path, source })?;
    let pair = Arc::new(SingleCertAndKey::from(pair));
    Ok(Prepared {
        config: for_http2(builder.with_client_cert_resolver(pair)),
        without_client: Some(anonymous),
        name,
    })
}

/// Like rustls' own pairing, which would leave a copy of the key in memory.
fn certified(
    chain: Vec<CertificateDer<'static>>,
    key: &PrivateKeyDer<'_>,
) -> Result<CertifiedKey, rustls::Error> {
    let pair = CertifiedKey::new(chain, any_supported_type(key)?);
    match pair.keys_match() {
        Ok(()) | Err(rustls::Error::InconsistentKeys(InconsistentKeys::Unknown)) => Ok(pair),
        Err(error) => Err(error),
    }
}

fn for_http2(mut tls: ClientConfig) -> Arc<ClientConfig> {
    tls.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(tls)
}

type Pair = (
    PathBuf,
    Vec<CertificateDer<'static>>,
    Zeroizing<PrivateKeyDer<'static>>,
);

/// The pair, if one is configured and its certificate is still valid.
async fn client_pair(client: Option<&ClientCertificate>) -> Result<Option<Pair>, TlsError> {
    let Some(client) = client else {
        return Ok(None);
    };
    let chain = match chain(&client.chain).await {
        Ok(chain) => chain,
        Err(reason) => {
            tracing::warn!("{reason}");
            return Ok(None);
        }
    };
    let key = key(&client.key).await?;
    Ok(Some((client.chain.clone(), chain, key)))
}

async fn chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, LeftOut> {
    let unusable = |why| LeftOut::Unusable {
        path: path.to_owned(),
        why,
    };
    let pem = file::read_aside(path.to_owned(), LARGEST)
        .await
        .map_err(|error| unusable(error.to_string()))?;
    let chain = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| unusable(error.to_string()))?;
    let leaf = chain
        .first()
        .ok_or_else(|| unusable(format!("no certificate in {} bytes", pem.len())))?;
    match not_after(leaf) {
        None => Err(unusable("its first certificate is no X.509".to_owned())),
        Some(end) if end < seconds(SystemTime::now()) => Err(LeftOut::Expired),
        Some(_) => Ok(chain),
    }
}

async fn key(path: &Path) -> Result<Zeroizing<PrivateKeyDer<'static>>, TlsError> {
    let pem = file::read_aside(path.to_owned(), LARGEST).await;
    let pem = pem.map_err(|source| TlsError::KeyUnreadable {
        path: path.to_owned(),
        source,
    })?;
    let key = PrivateKeyDer::from_pem_slice(&pem).map_err(|source| TlsError::KeyInvalid {
        path: path.to_owned(),
        source,
    })?;
    Ok(Zeroizing::new(key))
}
