//! Servers that serve one page each, on their own threads.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

pub const TEXT: &str = "text/plain; version=0.0.4";
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Starts a server of a page, and returns its port.
pub fn page(kind: &str, body: String) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    let port = listener.local_addr().expect("bound").port();
    let length = body.len();
    let head =
        format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n");
    let answer = Arc::new(head + &body);
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answer = answer.clone();
            // The client may have closed its connection; it needs no response then.
            thread::spawn(move || serve(&stream, &answer).ok());
        }
    });
    port
}

fn serve(mut stream: &TcpStream, answer: &str) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    while lines.read_line(&mut line)? > 0 {
        if line == "\r\n" {
            stream.write_all(answer.as_bytes())?;
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
