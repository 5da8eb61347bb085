//! Prepares TLS to istiod: roots, expected name, optional client certificate.
//!
//! All files are read at each dial, so the next connection uses a rotated one. TLS 1.2 and 1.3 are offered,
//! with a post-quantum key exchange first, unless a compliance policy sets others.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use zeroize::Zeroizing;

use crate::files::regular_file;
use crate::problem::{Code, Problem};
use crate::runtime::lifecycle::BoxError;
use crate::trust::compliance::Policy;
use crate::trust::key_pair::certified;
use crate::trust::pem;
pub use crate::trust::trust_anchors::Roots;
use crate::trust::trust_anchors::{self, MAX_PEM, not_after};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The name that is sent as SNI and that the certificate must contain.
    pub server_name: String,
    pub roots: Roots,
    pub client: Option<ClientCertificate>,
    pub policy: Policy,
}

/// The PEM files of a client certificate (`PROV_CERT`). It is sent while the leaf is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCertificate {
    pub chain: PathBuf,
    pub key: PathBuf,
}

/// The TLS configuration of one dial.
pub(super) struct Prepared {
    pub(super) config: Arc<ClientConfig>,
    /// The same configuration without the client certificate, if there is one, because istiod may reject it.
    pub(super) without_client: Option<Arc<ClientConfig>>,
    pub(super) name: ServerName<'static>,
    pub(super) roots: Roots,
}

/// Returns the error of rustls in an error of the stream, if there is one.
pub(crate) fn error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// Reads the files. The error says why no handshake can be tried.
pub(super) async fn prepare(config: &Config) -> Result<Prepared, Problem> {
    let name = ServerName::try_from(config.server_name.clone()).map_err(|_| {
        let subject = "name in istiod's certificate";
        let expected = "a DNS name or an IP address";
        Problem::value(Code::IstiodSanInvalid, subject, &config.server_name, expected)
    })?;
    let roots = config.roots.clone();
    let anchors = trust_anchors::load(&roots).await?;
    let builder = config
        .policy
        .builder()
        .map_err(|error| Problem::new(Code::TlsUnusable, "TLS to istiod", error))?
        .dangerous()
        .with_custom_certificate_verifier(anchors);
    let anonymous = for_http2(builder.clone().with_no_client_auth());
    let client = match &config.client {
        Some(client) => client_pair(client).await?,
        None => None,
    };
    let (config, without_client) = match client.map(SingleCertAndKey::from) {
        Some(client) => {
            (for_http2(builder.with_client_cert_resolver(Arc::new(client))), Some(anonymous))
        }
        None => (anonymous, None),
    };
    Ok(Prepared { config, without_client, name, roots })
}

fn for_http2(mut tls: ClientConfig) -> Arc<ClientConfig> {
    tls.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(tls)
}

/// Reads the client certificate and its key. Warns and returns None if the certificate is unusable or has expired;
/// fails if only the key is unusable.
async fn client_pair(client: &ClientCertificate) -> Result<Option<CertifiedKey>, Problem> {
    let chain = match read_chain(&client.chain).await {
        Ok((chain, end)) if end >= SystemTime::now() => chain,
        Ok(_) => {
            tracing::warn!("cert expired, using token instead");
            return Ok(None);
        }
        Err(why) => {
            let path = client.chain.display();
            tracing::warn!("cannot parse the cert chain, using token instead: {path}: {why}");
            return Ok(None);
        }
    };
    let pem = regular_file::read_blocking(client.key.clone(), MAX_PEM)
        .await
        .map_err(|error| unusable(&client.key, error))?;
    let key = pem::first::<PrivateKeyDer>(&pem)
        .map_err(|error| unusable(&client.key, format!("no PEM private key: {error}")))?;
    certified(chain, &Zeroizing::new(key)).map(Some).map_err(|error| {
        unusable(&client.chain, format!("cannot be used with {}: {error}", client.key.display()))
    })
}

fn unusable(path: &Path, why: impl ToString) -> Problem {
    Problem::new(Code::ClientCertificateUnusable, path.display(), why)
}

async fn read_chain(path: &Path) -> Result<(Vec<CertificateDer<'static>>, SystemTime), BoxError> {
    let pem = regular_file::read_blocking(path.to_owned(), MAX_PEM).await?;
    let chain = pem::items::<CertificateDer>(&pem).collect::<Result<Vec<_>, _>>()?;
    let leaf = chain.first().ok_or_else(|| format!("no certificate in {} bytes", pem.len()))?;
    let end = not_after(leaf).ok_or("its first certificate is not X.509")?;
    Ok((chain, end))
}
