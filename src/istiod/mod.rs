//! The one connection to the control plane.

pub mod tls;
pub mod token;

use std::time::Duration;

/// Where istiod is and how to speak to it.
#[derive(Clone, Debug)]
pub struct Config {
    /// `host:port`, resolved again at each dial.
    pub address: String,
    pub security: Security,
    pub token: token::Source,
    /// Headers of every call: `clusterid` and those of `XDS_HEADER_*` or `CA_HEADER_*`. Names are
    /// lower case.
    pub metadata: Vec<(http::HeaderName, http::HeaderValue)>,
    pub keepalive: Keepalive,
}

/// What protects the connection.
#[derive(Clone, Debug)]
pub enum Security {
    Plaintext,
    Tls(tls::Config),
}

/// HTTP/2 pings on a connection with open streams.
#[derive(Clone, Copy, Debug)]
pub struct Keepalive {
    pub interval: Duration,
    pub timeout: Duration,
}
