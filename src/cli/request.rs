//! Implements the `request` command: sends one HTTP request to a port of the agent or of Envoy.
//!
//! The body of the response is copied to standard output as it arrives, followed by a line feed. A status over
//! 399 is an error that quotes the body, except 404, whose body is printed.
//!
//! Requests to port 15000 go to Envoy's admin interface, which may listen on a Unix socket instead. Then there are no
//! redirects, and each status outside of 200 to 299 is an error.
//!
//! Only Istio's own ports are allowed, and the status port of this pod, over which a native sidecar is drained.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use clap::Args;
use http::{Method, Request, StatusCode};

use super::ignore_closed_pipe;
use super::redirected;
use crate::config;
use crate::config::environment::Environment;
use crate::net::http_client::{Client, http_url};
use crate::runtime::lifecycle::BoxError;
use crate::standby;

const PORTS: [i32; 4] = [ADMIN, 15004, 15020, 15021];
const ADMIN: i32 = 15000;
const LIMIT: Duration = Duration::from_secs(60);
/// Maximum length of the body that is quoted in an error, in bytes.
const MAX_QUOTE: usize = 64 << 10;

#[derive(Args, Clone, Debug)]
pub struct RequestFlags {
    /// Port on localhost: 15000 (Envoy's admin), 15004, 15020 (the agent), 15021 (health), or the
    /// agent's status port if the pod configures another.
    #[arg(long = "debug-port", default_value_t = 15000)]
    debug_port: i32,
    /// Method of the request, such as GET or POST.
    method: String,
    /// Path, with or without a leading slash.
    path: String,
    /// Body of the request.
    #[arg(default_value = "")]
    body: String,
    /// Further words, which pilot-agent ignores too.
    #[arg(hide = true)]
    ignored: Vec<String>,
}

#[derive(Args, Clone, Debug)]
pub struct DebugFlags {
    /// Page, such as overview, xdsz, istiod, certs, envoy, ndsz, wasm, health, standby, scope, config, log, logging or
    /// doctor.
    page: String,
}

impl DebugFlags {
    /// Returns the request for the page, to the agent's status port.
    pub fn request(
        &self,
        environment: &Environment,
        root: &Path,
    ) -> Result<RequestFlags, BoxError> {
        let port = config::status_port(environment, root);
        Ok(RequestFlags {
            debug_port: port.ok_or("the agent has no status port (statusPort is 0)")?.into(),
            method: "GET".to_owned(),
            path: format!("debug/{}", self.page),
            body: String::new(),
            ignored: Vec::new(),
        })
    }
}

/// Sends the request and writes the body of the response to `output`. `root` is the agent's working directory.
///
/// A drain by a standby container is not sent, because its preStop hook would drain the other container.
pub async fn run(
    flags: &RequestFlags,
    environment: &Environment,
    root: &Path,
    output: &mut impl Write,
) -> Result<(), BoxError> {
    let port = flags.debug_port;
    if !PORTS.contains(&port) && config::status_port(environment, root).map(i32::from) != Some(port)
    {
        return Err(
            format!("debug port {port} is not in allowed list [15000 15004 15020 15021]").into()
        );
    }
    let path = flags.path.strip_prefix('/').unwrap_or(&flags.path);
    if path == "drain" && flags.method == "POST" && standby::another_serves(environment) {
        return Ok(ignore_closed_pipe(writeln!(output, "another container of this pod serves"))?);
    }
    let socket = match port {
        ADMIN => config::admin_socket(environment, root),
        _ => None,
    };
    let (url, server) = match &socket {
        Some(socket) => (format!("http://localhost/{path}"), socket.display().to_string()),
        None => (format!("http://localhost:{port}/{path}"), format!("port {port}")),
    };
    let sent = tokio::time::timeout(LIMIT, send(flags, &url, socket.as_deref(), output)).await;
    sent.map_err(|_| format!("no complete answer from {server} within {} s", LIMIT.as_secs()))?
}

/// Sends the request to a URL, or to this socket.
async fn send(
    flags: &RequestFlags,
    url: &str,
    socket: Option<&Path>,
    output: &mut impl Write,
) -> Result<(), BoxError> {
    let mut request = Request::new(Bytes::from(flags.body.clone()));
    *request.uri_mut() = http_url(url)?;
    let method = Method::from_bytes(flags.method.as_bytes());
    *request.method_mut() =
        method.map_err(|_| format!("{:?} is not an HTTP method", flags.method))?;
    let client = socket.map_or_else(redirected, Client::of_socket);
    let (head, mut body) = client.send(request).await?.into_parts();
    let status = head.status;
    let is_error = match socket {
        Some(_) => !status.is_success(),
        None => status.as_u16() > 399 && status != StatusCode::NOT_FOUND,
    };
    if is_error {
        let mut quote = BytesMut::new();
        body.read_into(&mut quote, MAX_QUOTE).await?;
        let body = String::from_utf8_lossy(&quote);
        return Err(format!("received unsuccessful status code {}: {body}", status.as_u16()).into());
    }
    while let Some(chunk) = body.chunk().await {
        let written = output.write_all(&chunk?);
        if written.is_err() {
            return Ok(ignore_closed_pipe(written)?);
        }
    }
    Ok(ignore_closed_pipe(output.write_all(b"\n").and_then(|()| output.flush()))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::fake_server::serve;

    fn flags(port: i32, path: &str) -> RequestFlags {
        RequestFlags {
            debug_port: port,
            method: "POST".into(),
            path: path.into(),
            body: "hello".into(),
            ignored: Vec::new(),
        }
    }

    /// Returns the result and the output of `request` for this response, and the request that the server received.
    async fn exchange(answer: &'static str) -> (Result<(), BoxError>, String, String) {
        let (url, server) = serve(vec![answer]).await;
        let url = format!("{url}drain");
        let (mut output, flags) = (Vec::new(), flags(15000, "drain"));
        let (result, seen) = tokio::join!(send(&flags, &url, None, &mut output), server);
        (result, String::from_utf8(output).expect("text"), seen.concat())
    }

    #[tokio::test]
    async fn prints_the_body_and_a_line_feed() {
        let (result, output, seen) =
            exchange("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nOK").await;
        result.expect("an answer");
        assert_eq!(output, "OK\n");
        assert!(seen.starts_with("POST /drain HTTP/1.1\r\n"), "{seen}");
        assert!(seen.ends_with("\r\n\r\nhello"), "{seen}");
    }

    #[tokio::test]
    async fn not_found_is_an_answer_and_other_failures_are_errors() {
        let (result, output, _) =
            exchange("HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\ngone").await;
        result.expect("an answer");
        assert_eq!(output, "gone\n");
        let (result, output, _) =
            exchange("HTTP/1.1 503 Busy\r\ncontent-length: 5\r\n\r\nlater").await;
        let error = result.expect_err("a failure").to_string();
        assert_eq!(error, "received unsuccessful status code 503: later");
        assert_eq!(output, "");
    }

    #[tokio::test]
    async fn a_redirect_of_a_get_request_is_followed() {
        let moved = "HTTP/1.1 307 Moved\r\nlocation: /there\r\ncontent-length: 4\r\n\r\nmove";
        let answer = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nOK";
        let (url, server) = serve(vec![moved, answer]).await;
        let get =
            RequestFlags { method: "GET".into(), body: String::new(), ..flags(15000, "here") };
        let mut output = Vec::new();
        let (result, seen) = tokio::join!(send(&get, &url, None, &mut output), server);
        result.expect("an answer");
        assert_eq!(output, b"OK\n");
        assert!(seen[1].starts_with("GET /there HTTP/1.1\r\n"), "{seen:?}");
    }

    #[tokio::test]
    async fn an_incomplete_answer_is_an_error() {
        let (result, ..) = exchange("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nO").await;
        let error = result.expect_err("incomplete").to_string();
        assert!(error.contains("before the end of the answer"), "{error}");
    }

    #[tokio::test]
    async fn the_status_port_of_the_pod_may_be_requested() {
        // Port 1 is reserved and refuses connections.
        let environment = [("PROXY_CONFIG", "statusPort: 1")].into_iter().collect();
        let answer = run(&flags(1, "drain"), &environment, Path::new(""), &mut Vec::new()).await;
        let error = answer.expect_err("no listener");
        assert!(error.to_string().starts_with("cannot connect"), "{error}");
    }

    #[test]
    fn a_debug_page_is_requested_from_the_status_port_of_the_pod() {
        let page = DebugFlags { page: "xdsz".to_owned() };
        for (config, expected) in
            [("{}", Some(15020)), ("statusPort: 7", Some(7)), ("statusPort: 0", None)]
        {
            let environment = [("PROXY_CONFIG", config)].into_iter().collect();
            let request = page.request(&environment, Path::new("")).ok();
            assert_eq!(request.as_ref().map(|it| it.debug_port), expected, "{config}");
            if let Some(RequestFlags { method, path, .. }) = request {
                assert_eq!((method.as_str(), path.as_str()), ("GET", "debug/xdsz"));
            }
        }
    }

    #[tokio::test]
    async fn other_ports_and_impossible_paths_are_refused() {
        let (environment, root) = (Environment::default(), Path::new(""));
        let error = run(&flags(8080, "x"), &environment, root, &mut Vec::new()).await;
        assert_eq!(
            error.expect_err("refused").to_string(),
            "debug port 8080 is not in allowed list [15000 15004 15020 15021]"
        );
        let error = run(&flags(15000, "a b"), &environment, root, &mut Vec::new()).await;
        assert!(error.is_err_and(|error| error.to_string().contains("expected http")));
    }
}
