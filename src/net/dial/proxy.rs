//! Selects the HTTP proxy of an outgoing connection, and opens a tunnel through it.
//!
//! Call [`Proxies::find`], connect to the proxy, and call [`Proxy::tunnel`] (CONNECT, RFC 9110, section 9.3.6).
//! `HTTPS_PROXY` and `NO_PROXY` have the forms of Go's package httpproxy.

use std::io;
use std::net::IpAddr;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::HeaderValue;
use percent_encoding::percent_decode_str;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::net::address::Cidr;

/// The longest head of a response, in bytes.
const MAX_HEAD: usize = 16 << 10;

/// A proxy, which is connected to in plaintext.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxy {
    pub host: String,
    pub port: u16,
    /// The value of a header, with credentials of basic authentication. `Debug` does not show it.
    pub authorization: Option<HeaderValue>,
}

#[derive(Clone, Debug, Default)]
pub struct Proxies {
    pub http: Option<Proxy>,
    /// The proxy for `https` URLs, and for other connections with TLS.
    pub https: Option<Proxy>,
    /// Hosts that need no proxy, in the form of `NO_PROXY`.
    pub excluded: String,
}

impl Proxies {
    pub fn find(&self, has_tls: bool, host: &str, port: u16) -> Option<&Proxy> {
        let proxy = if has_tls { &self.https } else { &self.http }.as_ref()?;
        if is_excluded(&self.excluded, host, port) { None } else { Some(proxy) }
    }
}

impl Proxy {
    /// Parses `[http://][user[:password]@]host[:port]`. The default port is 80. Returns None for other forms.
    pub fn parse(text: &str) -> Option<Self> {
        let (scheme, rest) = text.split_once("://").unwrap_or(("http", text));
        if scheme != "http" {
            return None;
        }
        let (authorization, address) = split_user(rest.split(['/', '?', '#']).next()?);
        let with_port = match address.strip_suffix(':').unwrap_or(address) {
            bare if crate::net::address::split_lenient(bare).is_none() => format!("{bare}:80"),
            with_port => with_port.to_owned(),
        };
        let (host, port) = crate::net::address::split(&with_port)?;
        Some(Self { host: host.to_owned(), port, authorization })
    }

    /// Requests a tunnel to `host`: afterwards `stream` is connected to it. The caller limits the time.
    pub async fn tunnel(&self, stream: &mut TcpStream, host: &str, port: u16) -> io::Result<()> {
        let target =
            if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let credentials = self.authorization.as_ref().and_then(|it| it.to_str().ok());
        let authorization =
            credentials.map(|it| format!("Proxy-Authorization: {it}\r\n")).unwrap_or_default();
        let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{authorization}\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut head = Vec::new();
        // Byte by byte, because the bytes after the head belong to the tunnel.
        while !head.ends_with(b"\r\n\r\n") {
            if head.len() == MAX_HEAD {
                return Err(io::Error::other("the head of its response is too long"));
            }
            head.push(stream.read_u8().await?);
        }
        let head = String::from_utf8_lossy(&head);
        let status = head.lines().next().unwrap_or_default();
        let code = status.split(' ').nth(1).unwrap_or_default();
        if !status.starts_with("HTTP/") || !code.starts_with('2') {
            let found = format!("it answered {status:?} to CONNECT {target}, expected 200");
            return Err(io::Error::other(found));
        }
        Ok(())
    }
}

/// Splits the authority of a URL into a header with its user and password, and its host and port.
pub(crate) fn split_user(authority: &str) -> (Option<HeaderValue>, &str) {
    let Some((user, address)) = authority.rsplit_once('@') else {
        return (None, authority);
    };
    let colon = if user.contains(':') { "" } else { ":" };
    let decoded: Vec<u8> = percent_decode_str(&format!("{user}{colon}")).collect();
    (basic(&decoded), address)
}

/// Makes a header of the Basic scheme from `user:password`. `Debug` does not show its value.
pub(crate) fn basic(credentials: &[u8]) -> Option<HeaderValue> {
    let text = BASE64_STANDARD.encode(credentials);
    let mut value = HeaderValue::try_from(format!("Basic {text}")).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Returns true if `NO_PROXY` or the host itself excludes a connection from proxies. Loopback addresses and
/// `localhost` are always excluded.
fn is_excluded(no_proxy: &str, host: &str, port: u16) -> bool {
    let address: Option<IpAddr> = host.parse().ok();
    let is_loopback = address.is_some_and(|address| address.is_loopback());
    let no_proxy = no_proxy.to_ascii_lowercase();
    let host = host.to_ascii_lowercase();
    let mut items = no_proxy.split(',').map(str::trim).filter(|item| !item.is_empty());
    is_loopback || host == "localhost" || items.any(|item| excludes(item, &host, address, port))
}

/// Returns true if an item of `NO_PROXY` matches: `*`, a range or an address, a name with its subdomains, or
/// with a dot in front the subdomains alone. A port after address or name limits the item to this port.
fn excludes(item: &str, host: &str, address: Option<IpAddr>, port: u16) -> bool {
    if item == "*" {
        return true;
    }
    if let Some(range) = Cidr::parse(item) {
        return address.is_some_and(|address| range.contains(address.to_canonical()));
    }
    let (name, only_port) = crate::net::address::split_lenient(item).unwrap_or((item, port));
    if only_port != port {
        return false;
    }
    if let Ok(excluded) = name.parse::<IpAddr>() {
        return address == Some(excluded);
    }
    // `*.a` means the same as `.a`.
    let name = name.strip_prefix('*').filter(|rest| rest.starts_with('.')).unwrap_or(name);
    if name.starts_with('.') {
        host.ends_with(name)
    } else {
        format!(".{host}").ends_with(&format!(".{name}"))
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn a_proxy_is_read_with_its_port_and_credentials() {
        for (text, expected) in [
            ("http://proxy:3128", Some(("proxy", 3128, None))),
            ("proxy:3128", Some(("proxy", 3128, None))),
            ("http://proxy/", Some(("proxy", 80, None))),
            ("http://proxy:/x", Some(("proxy", 80, None))),
            ("10.0.0.1", Some(("10.0.0.1", 80, None))),
            ("http://[::1]:8080", Some(("::1", 8080, None))),
            ("http://[::1]", Some(("::1", 80, None))),
            ("http://u:p%40s@proxy:1", Some(("proxy", 1, Some("u:p@s")))),
            ("u@proxy:1", Some(("proxy", 1, Some("u:")))),
            ("https://proxy:3128", None),
            ("socks5://proxy:1", None),
            ("http://", None),
            ("proxy:x", None),
            ("pro xy:1", None),
            ("proxy:0", None),
            ("proxy:65536", None),
        ] {
            let expected = expected.map(|(host, port, user)| Proxy {
                host: host.to_owned(),
                port,
                authorization: user.and_then(|user: &str| basic(user.as_bytes())),
            });
            assert_eq!(Proxy::parse(text), expected, "{text}");
        }
        let debug = format!("{:?}", Proxy::parse("http://user:hush@proxy:1"));
        assert!(debug.contains("authorization: Some(Sensitive)"), "{debug}");
    }

    #[test]
    fn a_proxy_is_found_by_the_scheme_unless_the_host_is_excluded() {
        let proxies = Proxies {
            http: Proxy::parse("plain:1"),
            https: Proxy::parse("tls:2"),
            excluded: "direct.test:443".to_owned(),
        };
        for (has_tls, host, port, expected) in [
            (false, "a.test", 80, Some("plain")),
            (true, "a.test", 443, Some("tls")),
            (true, "direct.test", 443, None),
            (false, "direct.test", 80, Some("plain")),
            (true, "localhost", 443, None),
        ] {
            let found = proxies.find(has_tls, host, port);
            assert_eq!(found.map(|proxy| proxy.host.as_str()), expected, "{host}");
        }
        assert_eq!(Proxies::default().find(true, "a.test", 443), None);
    }

    #[test]
    fn hosts_are_excluded_as_by_go() {
        for (no_proxy, host, excluded) in [
            ("", "a.test", false),
            ("", "localhost", true),
            ("", "127.3.2.1", true),
            ("", "::1", true),
            ("", "0.0.0.0", false),
            ("*", "a.test", true),
            ("x, *", "10.0.0.1", true),
            ("a.test", "a.test", true),
            ("A.test", "a.TEST", true),
            ("a.test", "b.a.test", true),
            ("a.test", "ba.test", false),
            (".a.test", "a.test", false),
            (".a.test", "b.a.test", true),
            ("*.a.test", "b.a.test", true),
            ("*.a.test", "a.test", false),
            ("*a.test", "ba.test", false),
            ("b.test,, a.test ,", "a.test", true),
            ("a.test:15012", "a.test", true),
            ("a.test:1", "a.test", false),
            ("10.0.0.1", "10.0.0.1", true),
            ("10.0.0.1:15012", "10.0.0.1", true),
            ("10.0.0.1:1", "10.0.0.1", false),
            ("10.0.0.0/8", "10.255.0.1", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("0.0.0.0/0", "11.0.0.1", true),
            ("::/0", "11.0.0.1", false),
            ("2001:db8::/32", "2001:db8:1::1", true),
            ("[2001:db8::1]:15012", "2001:db8::1", true),
            ("2001:db8::1", "2001:db8::1", true),
            ("10.0.0.0/33", "10.0.0.1", false),
            ("10.0.0.0/x", "10.0.0.1", false),
            ("10.0.0", "10.0.0.1", false),
            ("/,:1,.,*.", "a.test", false),
        ] {
            assert_eq!(is_excluded(no_proxy, host, 15012), excluded, "{no_proxy} {host}");
        }
    }

    /// Opens a tunnel through a proxy that sends this response. Returns the result, and the request that the proxy
    /// received.
    async fn tunnel(answer: &str) -> (Result<(), String>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let proxy = Proxy::parse(&format!("http://u:p@{address}")).expect("a proxy");
        let serving = async {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut request = vec![0; 1024];
            let count = stream.read(&mut request).await.expect("a request");
            // The client may close the connection before it has read the entire response.
            let _ = stream.write_all(answer.as_bytes()).await;
            String::from_utf8_lossy(&request[..count]).into_owned()
        };
        let asking = async {
            let mut stream = TcpStream::connect(address).await.expect("a connection");
            let result = proxy.tunnel(&mut stream, "fd00::1", 1).await;
            result.map_err(|error| error.to_string())
        };
        tokio::join!(asking, serving)
    }

    #[tokio::test]
    async fn a_refused_connect_request_is_an_error_with_the_proxys_status() {
        let (result, request) = tunnel("HTTP/1.0 200 Connection established\r\nA: b\r\n\r\n").await;
        assert_eq!(result, Ok(()));
        assert_eq!(
            request,
            "CONNECT [fd00::1]:1 HTTP/1.1\r\nHost: [fd00::1]:1\r\nProxy-Authorization: Basic dTpw\r\n\r\n"
        );
        let endless = "x".repeat(MAX_HEAD + 1);
        for (answer, expected) in [
            ("HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "407 Proxy"),
            ("HTTP/1.1 403 Forbidden\r\n\r\n<html>", "403 Forbidden"),
            ("<html>200 OK</html>\r\n\r\n", "<html>"),
            ("", "end of file"),
            ("HTTP/1.1 200", "end of file"),
            (&endless, "is too long"),
        ] {
            let (result, _) = tunnel(answer).await;
            let error = result.expect_err(answer);
            assert!(error.contains(expected), "{error}");
        }
    }
}
