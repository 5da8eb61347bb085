//! Roots, expected name and optional client certificate of the connection to istiod.

use std::path::PathBuf;

/// The files are read again at each dial, so a rotated one is in force for the next connection.
#[derive(Clone, Debug)]
pub struct Config {
    /// Sent as SNI and checked against the certificate.
    pub server_name: String,
    pub roots: Roots,
    pub client: Option<ClientCertificate>,
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
