//! Measures what the merged page of metrics costs, compared with fetching the same pages directly.
//! `benches/README.md` says how to read the table.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::arithmetic_side_effects,
    clippy::disallowed_methods,
    clippy::disallowed_types,
    unreachable_pub
)]

use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use istio_agent::metrics::Registry;
use istio_agent::scrape::targets::Target;
use istio_agent::scrape::{Config, Scrape};
use support::table::Table;
use support::{block_on, median};
use tokio::net::TcpStream;

#[path = "../tests/integration/scrape/server.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod server;
mod support;

const ROUNDS: usize = 9;

fn main() {
    let mut table =
        Table::new(&["page", "lines", "targets", "MB", "direct", "merged", "MB/s", "of direct"]);
    for (lines, targets, format) in [
        (100, 1, Format::Text),
        (10_000, 1, Format::Text),
        (100_000, 1, Format::Text),
        (100, 2, Format::Text),
        (100_000, 2, Format::Text),
        (100_000, 1, Format::Copied),
        (100_000, 1, Format::Converted),
    ] {
        let ports: Vec<_> = (0..=targets)
            .map(|number| {
                let (prefix, lines) = (format!("source{number}"), lines / (targets + 1));
                match (format, number) {
                    (Format::Text, _) => server::page(server::TEXT, server::large(&prefix, lines)),
                    // One sample in protobuf makes the page protobuf.
                    (Format::Converted, 0) => {
                        server::page(server::PROTOBUF, server::large_in_protobuf(&prefix, 1))
                    }
                    (Format::Converted, _) => {
                        server::page(server::TEXT, server::large(&prefix, 2 * lines))
                    }
                    (Format::Copied, _) => {
                        server::page(server::PROTOBUF, server::large_in_protobuf(&prefix, lines))
                    }
                }
            })
            .collect();
        let scrape = scrape(&ports);
        let (mut bytes, mut direct, mut merged) = (0, Vec::new(), Vec::new());
        // Both take turns, so that they meet the same noise of the machine.
        for _ in 0..ROUNDS {
            direct.push(timed(|| block_on(fetch(&ports))).as_secs_f64());
            merged.push(timed(|| bytes = block_on(merge(&scrape))).as_secs_f64());
        }
        let (direct, merged) = (median(direct), median(merged));
        let megabytes = bytes as f64 / 1e6;
        table.row([
            format.name().to_owned(),
            lines.to_string(),
            targets.to_string(),
            format!("{megabytes:.2}"),
            format!("{:.2} ms", direct * 1e3),
            format!("{:.2} ms", merged * 1e3),
            format!("{:.0}", megabytes / merged),
            format!("{:.1}", merged / direct),
        ]);
    }
    table.print();
}

/// The format of the merged page, and the one of the sources.
#[derive(Clone, Copy)]
enum Format {
    Text,
    /// Protobuf of protobuf.
    Copied,
    /// Protobuf of text.
    Converted,
}

impl Format {
    fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Copied => "protobuf",
            Self::Converted => "protobuf of text",
        }
    }
}

fn scrape(ports: &[u16]) -> Scrape {
    let targets = ports[1..].iter().map(|port| Target {
        port: *port,
        path: "/metrics".to_owned(),
        tls: None,
    });
    let config = Config {
        envoy_port: Some(ports[0]),
        hidden: Vec::new(),
        targets: targets.collect(),
        limit: 100 << 20,
        timeout: Duration::from_secs(60),
    };
    Scrape::new(config, Registry::default())
}

fn timed(run: impl FnOnce()) -> Duration {
    let begin = Instant::now();
    run();
    begin.elapsed()
}

/// Reads the pages one after the other, and discards them.
async fn fetch(ports: &[u16]) {
    for port in ports {
        let stream = TcpStream::connect(("127.0.0.1", *port)).await.expect("connected");
        let handshake = http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.expect("a connection");
        let request = http::Request::get("/metrics").body(Empty::<Bytes>::new());
        let reading = async {
            let answer = sender.send_request(request.expect("a request")).await;
            let mut body = answer.expect("an answer").into_body();
            while let Some(frame) = body.frame().await {
                frame.expect("a page");
            }
        };
        tokio::select! {
            () = reading => {}
            ended = connection => panic!("the connection ended: {ended:?}"),
        }
    }
}

/// Reads the merged page, and returns its length.
async fn merge(scrape: &Scrape) -> usize {
    let request =
        http::Request::get("/stats/prometheus").header("accept", server::PROTOBUF).body(());
    let request = request.expect("a request").into_parts().0;
    let mut body = scrape.page(request).await.into_body();
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        let data = frame.expect("a page").into_data();
        length += data.map_or(0, |data| data.len());
    }
    length
}
