//! Sends requests to a server, repeats them after temporary failures, and downloads modules over HTTP.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, Uri, header};
use tokio::time::{Instant, sleep, timeout};

use super::download::Download;
use super::error::FetchError;
use super::{Config, Error, Source};
use crate::net::address::Cidr;
use crate::net::dial::{Dialer, Filter};
use crate::net::http_client::{self, Body, Client, Redirects};
use crate::net::unverified_tls;
use crate::problem::Code;
use crate::runtime::backoff::Backoff;
use crate::runtime::lifecycle::with_causes;
use crate::trust::compliance::Policy;
use crate::trust::trust_anchors::{self, Roots};

/// Waits between attempts are drawn from zero to 750 ms, 1.5 s, 3 s, …
const FIRST_WAIT: Duration = Duration::from_millis(750);
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Metadata services of Alibaba Cloud and AWS, whose addresses are not link-local.
const METADATA: [Cidr; 2] = [
    Cidr::single(IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200))),
    Cidr { address: IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0)), prefix: 32 },
];

/// A client for the requests of one fetch.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) client: Client,
    /// Time limit of a request, until the head of the response.
    pub(super) request_limit: Duration,
    pub(super) attempts: u32,
    /// The end of the attempts.
    pub(super) deadline: Instant,
}

impl Server {
    /// Returns the response or the error of the last attempt. An error that `is_final` ends the attempts.
    pub(super) async fn send(
        &self,
        request: &Request<Bytes>,
        is_final: impl Fn(&http_client::Error) -> bool,
    ) -> Result<Response<Body>, http_client::Error> {
        let host = request.uri().host().unwrap_or_default();
        let mut backoff = Backoff::new(FIRST_WAIT, MAX_WAIT);
        let limit = self.request_limit;
        let mut attempt = 1;
        loop {
            let in_time = timeout(limit, self.client.send(request.clone())).await;
            let sent = in_time.unwrap_or_else(|_| {
                Err(http_client::Error::Late { authority: host.to_owned(), limit })
            });
            let problem = match &sent {
                Ok(response) if !is_temporary(response.status()) => return sent,
                Err(error) if is_final(error) => return sent,
                Ok(response) => response.status().to_string(),
                Err(error) => with_causes(error),
            };
            let wait = backoff.next_wait();
            let left = self.deadline.saturating_duration_since(Instant::now());
            if attempt >= self.attempts || wait >= left {
                return sent;
            }
            tracing::debug!(target: "wasm", "attempt {attempt} to fetch from {host} failed: {problem}");
            sleep(wait).await;
            attempt += 1;
        }
    }
}

impl Config {
    /// Downloads and unpacks the module into `directory`. Attempts end by `deadline`.
    pub(crate) async fn download(
        &self,
        source: &Source,
        directory: &Path,
        deadline: Instant,
    ) -> Result<Download, Error> {
        let response = self.request(source, deadline).await.map_err(|error| {
            let url = source.redacted();
            let problem = with_causes(&error);
            let found = format!("wasm module download from {url} failed: {problem}");
            (Code::WasmDownloadFailed, found)
        })?;
        self.plan(source, directory).download(response.into_body()).await
    }

    /// Requests a module. Fails unless the status is 200.
    async fn request(
        &self,
        source: &Source,
        deadline: Instant,
    ) -> Result<Response<Body>, FetchError> {
        let request = get(source.uri.clone(), source.authorization.as_ref());
        let mut has_tls = source.uri.scheme_str() == Some("https");
        let response = loop {
            let server =
                self.server(source.authority(), has_tls, Redirects::Follow, deadline).await?;
            match server.send(&request, is_url_error).await {
                // The server redirects to https.
                Err(http_client::Error::Url { .. }) if !has_tls => has_tls = true,
                response => break response?,
            }
        };
        match response.status() {
            StatusCode::OK => Ok(response),
            status => Err(FetchError::Status(status)),
        }
    }

    /// Creates a client for one fetch. Trust anchors are read only for TLS.
    pub(super) async fn server(
        &self,
        authority: &str,
        has_tls: bool,
        redirects: Redirects,
        deadline: Instant,
    ) -> Result<Server, FetchError> {
        let tls = if !has_tls {
            None
        } else if self.is_insecure(authority) {
            Some(unverified_tls::config(false)?)
        } else {
            let roots = trust_anchors::load(&Roots::System(self.roots.clone())).await?;
            let mut tls = Policy::None
                .builder()?
                .dangerous()
                .with_custom_certificate_verifier(roots)
                .with_no_client_auth();
            tls.alpn_protocols = vec![b"http/1.1".to_vec()];
            Some(Arc::new(tls))
        };
        let client = Client::new(http_client::Config {
            dialer: Dialer::with_filter(Arc::new(Blocked(self.blocked.clone()))),
            tls,
            proxies: self.proxies.clone(),
            redirects,
            ..http_client::Config::default()
        });
        Ok(Server { client, request_limit: self.request_limit, attempts: self.attempts, deadline })
    }
}

pub(super) fn get(uri: Uri, authorization: Option<&HeaderValue>) -> Request<Bytes> {
    let mut request = Request::new(Bytes::new());
    *request.uri_mut() = uri;
    if let Some(value) = authorization {
        request.headers_mut().insert(header::AUTHORIZATION, value.clone());
    }
    request
}

fn is_url_error(error: &http_client::Error) -> bool {
    matches!(error, http_client::Error::Url { .. })
}

/// Returns true if another attempt may succeed.
fn is_temporary(status: StatusCode) -> bool {
    let status = status.as_u16();
    matches!(status, 408 | 429 | 500..=599) && !matches!(status, 501 | 505 | 511)
}

/// Blocks connections to link-local addresses, metadata services of clouds, and the networks of
/// `BLOCKED_CIDRS_IN_WASM_FETCH`.
#[derive(Clone, Debug)]
struct Blocked(Vec<Cidr>);

impl Filter for Blocked {
    fn check(&self, address: IpAddr) -> Result<(), String> {
        // An IPv4-mapped IPv6 address is the same destination.
        let address = address.to_canonical();
        let is_link_local = match address {
            IpAddr::V4(v4) => v4.is_link_local() || v4.octets()[..3] == [224, 0, 0],
            // fe80::/10, and multicast of link-local scope
            IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.segments()[0] & 0xff0f == 0xff02,
        };
        if is_link_local {
            Err("is link-local".to_owned())
        } else if METADATA.iter().any(|network| network.contains(address)) {
            Err("is a known cloud metadata address".to_owned())
        } else if let Some(network) = self.0.iter().find(|network| network.contains(address)) {
            Err(format!("is in blocked CIDR range {network}"))
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_local_metadata_and_configured_addresses_are_blocked() {
        let networks = ["10.1.0.0/16", "fd12::/16", "8.8.8.8/32", "::/128"];
        let networks = networks.map(|text| Cidr::parse(text).expect("a network"));
        let blocked = Blocked(networks.to_vec());
        for (address, expected) in [
            ("169.254.169.254", Err("is link-local")),
            ("::ffff:169.254.1.1", Err("is link-local")),
            ("fe80::1", Err("is link-local")),
            ("febf::1", Err("is link-local")),
            ("fec0::1", Ok(())),
            ("224.0.0.251", Err("is link-local")),
            ("224.0.1.1", Ok(())),
            ("ff02::1", Err("is link-local")),
            ("ff05::1", Ok(())),
            ("100.100.100.200", Err("is a known cloud metadata address")),
            ("100.100.100.201", Ok(())),
            ("fd00:ec2::254", Err("is a known cloud metadata address")),
            ("10.1.2.3", Err("is in blocked CIDR range 10.1.0.0/16")),
            ("::ffff:10.1.2.3", Err("is in blocked CIDR range 10.1.0.0/16")),
            ("10.2.0.1", Ok(())),
            ("fd12:1::1", Err("is in blocked CIDR range fd12::/16")),
            ("8.8.8.8", Err("is in blocked CIDR range 8.8.8.8/32")),
            ("127.0.0.1", Ok(())),
            ("::1", Ok(())),
            ("192.168.1.1", Ok(())),
        ] {
            let found = blocked.check(address.parse().expect("an address"));
            assert_eq!(found, expected.map_err(str::to_owned), "{address}");
        }
        let all = Blocked(vec![Cidr::parse("0.0.0.0/0").expect("a network")]);
        assert!(all.check(Ipv4Addr::LOCALHOST.into()).is_err());
    }
}
