//! TLS to the application's metrics pages.
//!
//! The files are read at each scrape, because they are rotated. A client keeps its connections as long as they do not
//! change.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use rustls::pki_types::pem;
use rustls::sign::CertifiedKey;
use serde::Deserialize;
use tokio::task::{JoinError, spawn_blocking};
use zeroize::Zeroizing;

use crate::files::regular_file;
use crate::json;
use crate::net::http_client::{Client, Config, Redirects};
use crate::trust::key_pair::{self, Unusable};
use crate::trust::{tls_client, trust_anchors};

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

/// A file that was read.
#[derive(PartialEq)]
struct Content {
    path: PathBuf,
    pem: Zeroizing<Vec<u8>>,
}

/// The content of [`Files`], in the order of its members.
type Contents = [Option<Content>; 3];

/// Why the files cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("cannot read {}", .path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{}: {why}", .path.display())]
    Roots { path: PathBuf, why: trust_anchors::Error },
    #[error("{} has no PEM certificates", .path.display())]
    Chain { path: PathBuf, source: pem::Error },
    #[error("{} has no PEM key", .path.display())]
    Key { path: PathBuf, source: pem::Error },
    #[error("{} cannot be used with its key", .path.display())]
    Pair { path: PathBuf, source: rustls::Error },
    #[error("cannot set up TLS")]
    Tls(#[from] rustls::Error),
    #[error(transparent)]
    Panicked(#[from] JoinError),
}

/// The clients of targets by port, and the files that they were made of.
#[derive(Clone, Default)]
pub(super) struct Clients(Arc<Mutex<HashMap<u16, (Contents, Client)>>>);

/// The reason why the setting cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Invalid {
    #[error("expected a JSON object of ports, with objects of caFile, certFile and keyFile: {0}")]
    Json(#[from] serde_json::Error),
    #[error("port {0}: expected both of certFile and keyFile")]
    Half(u16),
}

/// Reads `ISTIO_AGENT_SCRAPE_TLS`: the files by port.
pub fn parse(text: &str) -> Result<BTreeMap<u16, Files>, Invalid> {
    let parsed: BTreeMap<u16, Files> = json::read::<Option<_>>(text)?.unwrap_or_default();
    for (port, files) in &parsed {
        if files.cert_file.is_some() != files.key_file.is_some() {
            return Err(Invalid::Half(*port));
        }
    }
    Ok(parsed)
}

impl Clients {
    /// Returns the client for a port. Fails if the files cannot be used.
    pub(super) async fn of(self, port: u16, files: Arc<Files>) -> Result<Client, Error> {
        spawn_blocking(move || {
            let contents = files.read()?;
            let mut clients = self.0.lock();
            if let Some((known, client)) = clients.get(&port)
                && *known == contents
            {
                return Ok(client.clone());
            }
            let client = Client::new(Config {
                tls: Some(tls(&contents)?),
                redirects: Redirects::Follow,
                keeps_connections: true,
                ..Config::default()
            });
            clients.insert(port, (contents, client.clone()));
            Ok(client)
        })
        .await?
    }
}

impl Files {
    fn read(&self) -> Result<Contents, Error> {
        Ok([
            self.ca_file.as_deref().map(Content::read).transpose()?,
            self.cert_file.as_deref().map(Content::read).transpose()?,
            self.key_file.as_deref().map(Content::read).transpose()?,
        ])
    }
}

impl Content {
    fn read(path: &Path) -> Result<Self, Error> {
        let path = path.to_owned();
        match regular_file::open_trusted(&path)
            .and_then(|file| regular_file::read_open(file, MAX_FILE))
        {
            Ok(pem) => Ok(Self { path, pem }),
            Err(source) => Err(Error::File { path, source }),
        }
    }
}

fn tls([roots, chain, key]: &Contents) -> Result<Arc<rustls::ClientConfig>, Error> {
    let roots = match roots {
        Some(Content { path, pem }) => {
            let roots = trust_anchors::parse(path, pem, SystemTime::now());
            Some(roots.map_err(|why| Error::Roots { path: path.clone(), why })?)
        }
        None => None,
    };
    let pair = match (chain, key) {
        (Some(chain), Some(key)) => Some(pair(chain, key)?),
        _ => None,
    };
    // The server is at the loopback address, so its names do not matter.
    Ok(tls_client::config(roots, Vec::new(), pair, vec![b"http/1.1".to_vec()])?.into())
}

fn pair(chain: &Content, key: &Content) -> Result<CertifiedKey, Error> {
    key_pair::from_pem(&chain.pem, &key.pem).map_err(|unusable| match unusable {
        Unusable::Chain(source) => Error::Chain { path: chain.path.clone(), source },
        Unusable::Key(source) => Error::Key { path: key.path.clone(), source },
        Unusable::Pair(source) => Error::Pair { path: chain.path.clone(), source },
    })
}
