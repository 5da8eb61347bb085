//! Servers that serve one page each, on their own threads.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use envoy_types::pb::io::prometheus::client::{Gauge, LabelPair, Metric, MetricFamily, MetricType};
use prost::Message;

pub const TEXT: &str = "text/plain; version=0.0.4";
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
pub const PROTOBUF: &str =
    "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited";

/// Starts a server of a page, and returns its port.
pub fn page(kind: &str, body: impl AsRef<[u8]>) -> u16 {
    let body = body.as_ref();
    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    let port = listener.local_addr().expect("bound").port();
    let length = body.len();
    let head =
        format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n");
    let answer = Arc::new([head.as_bytes(), body].concat());
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answer = answer.clone();
            // The client may have closed its connection; it needs no response then.
            thread::spawn(move || serve(&stream, &answer).ok());
        }
    });
    port
}

fn serve(mut stream: &TcpStream, answer: &[u8]) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    while lines.read_line(&mut line)? > 0 {
        if line == "\r\n" {
            stream.write_all(answer)?;
        }
        line.clear();
    }
    Ok(())
}

/// Returns a page with `lines` samples, in families of a hundred. It is valid text; with an `# EOF` line at its
/// end, it is valid OpenMetrics.
pub fn large(prefix: &str, lines: usize) -> String {
    let mut page = String::new();
    for line in 0..lines {
        let family = line / 100;
        if line % 100 == 0 {
            writeln!(page, "# TYPE {prefix}_requests_{family} gauge").expect("written");
        }
        let labels = format!("cluster=\"outbound|9080||reviews-{line}.default.svc\",code=\"200\"");
        writeln!(page, "{prefix}_requests_{family}{{{labels}}} {line}").expect("written");
    }
    page
}

/// Returns a page with one family of histograms, of ten samples each. All sums precede all buckets, as several processes
/// of Python write it.
pub fn histograms(count: usize) -> String {
    let label = |number: usize| format!("cluster=\"outbound|9080||reviews-{number}.default.svc\"");
    let mut page = "# TYPE duration histogram\n".to_owned();
    for number in 0..count {
        writeln!(page, "duration_sum{{{}}} 1.5", label(number)).expect("written");
    }
    for number in 0..count {
        for bound in ["1", "2", "3", "4", "5", "6", "7", "+Inf"] {
            let labels = format!("{},le=\"{bound}\"", label(number));
            writeln!(page, "duration_bucket{{{labels}}} 7").expect("written");
        }
        writeln!(page, "duration_count{{{}}} 7", label(number)).expect("written");
    }
    page
}

/// Returns the samples of [`large`] in protobuf.
pub fn large_in_protobuf(prefix: &str, lines: usize) -> Vec<u8> {
    let label =
        |name: &str, value: String| LabelPair { name: Some(name.to_owned()), value: Some(value) };
    let metric = |line: usize| Metric {
        label: vec![
            label("cluster", format!("outbound|9080||reviews-{line}.default.svc")),
            label("code", "200".to_owned()),
        ],
        gauge: Some(Gauge { value: Some(line as f64) }),
        ..Metric::default()
    };
    let families = (0..lines.div_ceil(100)).map(|family| MetricFamily {
        name: Some(format!("{prefix}_requests_{family}")),
        r#type: Some(MetricType::Gauge.into()),
        metric: (100 * family..lines.min(100 * (family + 1))).map(metric).collect(),
        ..MetricFamily::default()
    });
    families.flat_map(|family| family.encode_length_delimited_to_vec()).collect()
}
