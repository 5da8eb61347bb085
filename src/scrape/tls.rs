//! TLS to the application's metrics pages.
//!
//! The files are read at each scrape, because they are rotated. A client keeps its connections as long as they do not
//! change.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::SingleCertAndKey;
use serde::Deserialize;
use tokio::task::spawn_blocking;
use zeroize::Zeroizing;

use crate::files::regular_file;
use crate::json;
use crate::net::http_client::{Client, Config, Redirects};
use crate::net::unverified_tls;
use crate::trust::chain_verifier::AnyName;
use crate::trust::compliance::Policy;
use crate::trust::key_pair::certified;
use crate::trust::{pem, trust_anchors};

/// The largest file.
const MAX_FILE: u64 = 1 << 20;

/// The files for the TLS of a target.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Files {
    /// The roots of the target's certificate, whose names are not checked. Without it any certificate is accepted.
    ca_file: Option<PathBuf>,
    /// The agent's certificate, with its key.
    cert_file: Option<PathBuf>,
    key_file: Option<PathBuf>,
}

/// The content of [`Files`], in the order of its members.
type Contents = [Option<Zeroizing<Vec<u8>>>; 3];

/// The clients of targets by port, and the files that they were made of.
#[derive(Clone, Default)]
pub(super) struct Clients(Arc<Mutex<HashMap<u16, (Contents, Client)>>>);

/// Reads `ISTIO_AGENT_SCRAPE_TLS`: the files by port.
pub fn parse(text: &str) -> Result<BTreeMap<u16, Files>, String> {
    let parsed: Option<BTreeMap<u16, Files>> = json::read(text).map_err(|error| {
        format!(
            "expected a JSON object of ports, with objects of caFile, certFile and keyFile: {error}"
        )
    })?;
    let parsed = parsed.unwrap_or_default();
    let is_half = |files: &Files| files.cert_file.is_some() != files.key_file.is_some();
    match parsed.iter().find(|(_, files)| is_half(files)) {
        Some((port, _)) => Err(format!("port {port}: expected both of certFile and keyFile")),
        None => Ok(parsed),
    }
}

impl Clients {
    /// Returns the client for a port. Fails if the files cannot be used.
    pub(super) async fn of(self, port: u16, files: Arc<Files>) -> Result<Client, String> {
        let made = spawn_blocking(move || {
            let contents = files.read()?;
            let mut clients = self.0.lock();
            if let Some((known, client)) = clients.get(&port)
                && *known == contents
            {
                return Ok(client.clone());
            }
            let client = Client::new(Config {
                tls: Some(files.tls(&contents)?),
                redirects: Redirects::Follow,
                keeps_connections: true,
                ..Config::default()
            });
            clients.insert(port, (contents, client.clone()));
            Ok(client)
        });
        made.await.map_err(|panic| panic.to_string())?
    }
}

impl Files {
    fn read(&self) -> Result<Contents, String> {
        let read = |path: &Option<PathBuf>| {
            let path = path.as_ref()?;
            let file = regular_file::open_trusted(path);
            let content = file.and_then(|file| regular_file::read_open(file, MAX_FILE));
            Some(content.map_err(|error| format!("{}: {error}", path.display())))
        };
        Ok([
            read(&self.ca_file).transpose()?,
            read(&self.cert_file).transpose()?,
            read(&self.key_file).transpose()?,
        ])
    }

    fn tls(&self, [roots, chain, key]: &Contents) -> Result<Arc<rustls::ClientConfig>, String> {
        let verifier: Arc<dyn ServerCertVerifier> = match roots {
            None => unverified_tls::verifier(),
            Some(pem) => {
                let path = self.ca_file.as_deref().unwrap_or(Path::new(""));
                let roots = trust_anchors::parse(path, pem, SystemTime::now())
                    .map_err(|why| format!("{}: {why}", path.display()))?;
                Arc::new(AnyName(roots))
            }
        };
        let builder = Policy::None.builder().map_err(|error| error.to_string())?;
        let builder = builder.dangerous().with_custom_certificate_verifier(verifier);
        let mut config = match (chain, key) {
            (Some(chain), Some(key)) => {
                let pair = pair(chain, key).map_err(|why| {
                    let path = self.cert_file.as_deref().unwrap_or(Path::new(""));
                    format!("{} and its key: {why}", path.display())
                })?;
                builder.with_client_cert_resolver(Arc::new(pair))
            }
            _ => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config.into())
    }
}

fn pair(chain: &[u8], key: &[u8]) -> Result<SingleCertAndKey, String> {
    let chain: Result<Vec<_>, _> = pem::items::<CertificateDer>(chain).collect();
    let chain = chain.map_err(|error| format!("no PEM certificates: {error}"))?;
    let key = pem::first::<PrivateKeyDer>(key).map_err(|error| format!("no PEM key: {error}"))?;
    let pair = certified(chain, &Zeroizing::new(key)).map_err(|error| error.to_string())?;
    Ok(pair.into())
}
