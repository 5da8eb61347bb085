//! One HTTP/1 request of the small commands, over a connection of its own.
//!
//! The answer's body is handed on piece by piece as it arrives, whatever its size. `localhost` is
//! both loopback addresses, without asking a resolver.
//!
//! Does not speak TLS, follow redirects or use proxies; has no deadline of its own.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::pin;

use bytes::Bytes;
use http::{Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// What is asked, and of whom.
#[derive(Clone, Debug)]
pub(super) struct Target {
    /// Host and port, as the request's Host header has them.
    authority: String,
    host: String,
    port: u16,
    path: String,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{found:?} is no address to ask, expected http://host[:port]/path")]
    Url { found: String },
    #[error("cannot find the address of {host}")]
    Resolve {
        host: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot connect to {authority}")]
    Connect {
        authority: String,
        #[source]
        source: io::Error,
    },
    #[error("the exchange with {authority} broke off")]
    Exchange {
        authority: String,
        #[source]
        source: hyper::Error,
    },
    #[error("cannot pass on the answer")]
    Output(#[source] io::Error),
}

impl Target {
    pub(super) fn parse(url: &str) -> Result<Self, Error> {
        let unusable = || Error::Url {
            found: url.to_owned(),
        };
        let uri: Uri = url.parse().map_err(|_| unusable())?;
        let authority = uri.authority().ok_or_else(unusable)?;
        if uri.scheme_str() != Some("http") || authority.host().is_empty() {
            return Err(unusable());
        }
        Ok(Self {
            authority: authority.to_string(),
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority.port_u16().unwrap_or(80),
            path: uri
                .path_and_query()
                .map_or("/", |path| path.as_str())
                .to_owned(),
        })
    }

    /// Whether the request stays on this machine.
    pub(super) fn is_local(&self) -> bool {
        let address: Result<IpAddr, _> = self.host.parse();
        self.host == "localhost" || address.is_ok_and(|address| address.is_loopback())
    }

    async fn addresses(&self) -> Result<Vec<SocketAddr>, Error> {
        if self.host == "localhost" {
            let hosts: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
            return Ok(hosts.map(|host| (host, self.port).into()).to_vec());
        }
        let found = tokio::net::lookup_host((self.host.as_str(), self.port)).await;
        let found = found.map_err(|source| Error::Resolve {
            host: self.host.clone(),
            source,
        })?;
        Ok(found.collect())
    }

    /// A connection to the first address that takes one; the error is that of the first.
    async fn connect(&self) -> Result<TcpStream, Error> {
        let mut first = None;
        for address in self.addresses().await? {
            match TcpStream::connect(address).await {
                Ok(stream) => return Ok(stream),
                Err(error) => first = first.or(Some(error)),
            }
        }
        Err(Error::Connect {
            authority: self.authority.clone(),
            source: first.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into()),
        })
    }

    /// Sends the request. `piece` gets the status with each piece of the body, in order.
    pub(super) async fn ask(
        &self,
        method: Method,
        body: String,
        mut piece: impl FnMut(StatusCode, &[u8]) -> io::Result<()>,
    ) -> Result<StatusCode, Error> {
        let request = Request::builder()
            .method(method)
            .uri(&self.path)
            .header(header::HOST, &self.authority)
            .header(header::CONNECTION, "close")
            .body(Full::new(Bytes::from(body)))
            .map_err(|_| Error::Url {
                found: self.path.clone(),
            })?;
        let broke_off = |source| Error::Exchange {
            authority: self.authority.clone(),
            source,
        };
        let stream = TokioIo::new(self.connect().await?);
        let (mut sender, connection) = http1::handshake(stream).await.map_err(broke_off)?;
        let mut answer = pin!(async {
            let mut answer = sender.send_request(request).await.map_err(broke_off)?;
            while let Some(frame) = answer.frame().await {
                if let Ok(data) = frame.map_err(broke_off)?.into_data() {
                    piece(answer.status(), &data).map_err(Error::Output)?;
                }
            }
            Ok(answer.status())
        });
        tokio::select! {
            answer = &mut answer => answer,
            // The answer hears of what went wrong, and may still be read when all went well.
            _ = connection => answer.await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_and_may_leave_out_the_rest() {
        for (url, host, port, path, local) in [
            (
                "http://localhost:15021/healthz/ready",
                "localhost",
                15021,
                "/healthz/ready",
                true,
            ),
            ("http://[::1]:80/x?y=z", "::1", 80, "/x?y=z", true),
            ("http://127.0.0.2", "127.0.0.2", 80, "/", true),
            ("http://example.com/", "example.com", 80, "/", false),
        ] {
            let target = Target::parse(url).expect("an address");
            let found = (target.host.as_str(), target.port, target.path.as_str());
            assert_eq!(found, (host, port, path));
            assert_eq!(target.is_local(), local, "{url}");
        }
        for url in [
            "",
            "localhost:15021",
            "https://localhost/",
            "/path",
            "http:///x",
            "http://a/b c",
        ] {
            assert!(
                matches!(Target::parse(url), Err(Error::Url { .. })),
                "{url}"
            );
        }
    }
}
