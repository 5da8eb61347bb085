//! Copies Envoy's standard error to the agent's own, and keeps its end for the record of a crash.
//!
//! A thread per Envoy reads a pipe and writes what it read, byte for byte. A slow reader of the
//! agent's output so makes Envoy wait, as without the pipe, and not the agent. An agent that is
//! stopped makes Envoy wait, too, once the pipe is full; one that dies takes Envoy with it. Standard
//! output, with the access logs, is Envoy's own.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// How much is kept.
const KEPT: usize = 4 << 10;
/// All that fits into a pipe, so that lines stay whole. Only what was read is ever touched.
const CHUNK: usize = 64 << 10;
/// The wait for what Envoy wrote last. A program it has started may hold the pipe open.
const REST: Duration = Duration::from_millis(250);

/// The standard error of one Envoy.
#[derive(Debug, Default)]
pub(super) struct Stderr {
    last: Arc<Mutex<VecDeque<u8>>>,
    /// Closed with the pipe.
    copied: Option<oneshot::Receiver<()>>,
}

impl Stderr {
    /// Returns what Envoy is to be started with. Without a pipe or a thread Envoy has the agent's
    /// standard error itself, and nothing is kept. Calls `when_read` after each read.
    pub(super) fn copy(when_read: impl Fn() + Send + 'static) -> (Self, Stdio) {
        let start = || {
            let to = File::from(io::stderr().as_fd().try_clone_to_owned()?);
            let (from, pipe) = io::pipe()?;
            Ok((Self::start(from, to, when_read)?, Stdio::from(pipe)))
        };
        start().unwrap_or_else(|error: io::Error| {
            tracing::warn!("cannot keep what Envoy writes to standard error: {error}");
            (Self::default(), Stdio::inherit())
        })
    }

    fn start(
        mut from: impl Read + Send + 'static,
        mut to: impl Write + Send + 'static,
        when_read: impl Fn() + Send + 'static,
    ) -> io::Result<Self> {
        let last = Arc::new(Mutex::new(VecDeque::with_capacity(2 * KEPT)));
        let kept = Arc::clone(&last);
        let (open, copied) = oneshot::channel();
        let mut chunk = vec![0; CHUNK];
        let copy = move || {
            let _open = open;
            loop {
                let read = match from.read(&mut chunk) {
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Ok(0) | Err(_) => return,
                    Ok(length) => &chunk[..length],
                };
                keep(&mut kept.lock(), read);
                when_read();
                // Envoy goes on when the agent's output is closed.
                let _ = to.write_all(read);
            }
        };
        let thread = std::thread::Builder::new().name("envoy-stderr".to_owned());
        thread.spawn(copy)?;
        Ok(Self {
            last,
            copied: Some(copied),
        })
    }

    /// The last lines, once Envoy has ended.
    pub(super) async fn last_lines(&mut self) -> Vec<String> {
        if let Some(copied) = self.copied.take() {
            // What has come until then is all there will be.
            let _ = tokio::time::timeout(REST, copied).await;
        }
        lines(&self.last.lock())
    }
}

fn keep(last: &mut VecDeque<u8>, read: &[u8]) {
    last.extend(&read[read.len().saturating_sub(KEPT)..]);
    let surplus = last.len().saturating_sub(KEPT);
    last.drain(..surplus);
}

/// Whole lines; the first may have lost its beginning and is left out when there are others.
fn lines(last: &VecDeque<u8>) -> Vec<String> {
    let bytes: Vec<u8> = last.iter().copied().collect();
    let text = String::from_utf8_lossy(&bytes);
    let is_cut = bytes.len() == KEPT && text.trim_end().contains('\n');
    let lines = text.lines().skip(usize::from(is_cut));
    lines.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn copies_every_byte_to_a_slow_reader_and_keeps_the_last_lines() {
        let text = (0..20_000).fold(String::new(), |text, n| text + &format!("line {n}\n"));
        let (from, mut envoy) = io::pipe().expect("a pipe");
        let (mut reader, to) = io::pipe().expect("a pipe");
        let mut stderr = Stderr::start(from, to, || {}).expect("a thread");
        // More than both pipes hold, so that the copying has to wait.
        let read = tokio::task::spawn_blocking(move || {
            let mut copied = Vec::new();
            reader.read_to_end(&mut copied).map(|_| copied)
        });
        let all = [text.as_bytes(), b"\xff end"].concat();
        let written = all.clone();
        let write = tokio::task::spawn_blocking(move || envoy.write_all(&written));
        write.await.expect("no panic").expect("written");
        assert_eq!(read.await.expect("no panic").expect("read"), all);
        let lines = stderr.last_lines().await;
        assert_eq!(lines[lines.len() - 2..], ["line 19999", "\u{fffd} end"]);
        let (count, first) = (lines.len(), &lines[0]);
        assert!(count > 300 && first.starts_with("line "), "{first}");
    }

    #[tokio::test]
    async fn an_open_pipe_and_a_stalled_reader_delay_the_end_by_a_moment_only() {
        let (from, mut envoy) = io::pipe().expect("a pipe");
        let (stalled, to) = io::pipe().expect("a pipe");
        let mut stderr = Stderr::start(from, to, || {}).expect("a thread");
        for _ in 0..3 {
            envoy.write_all(&[b'x'; CHUNK / 2]).expect("written");
        }
        envoy.write_all(b"\nlast words\n").expect("written");
        assert!(!stderr.last_lines().await.concat().is_empty());
        drop(stalled);
    }

    #[test]
    fn a_line_longer_than_what_is_kept_is_kept_in_part() {
        let mut last = VecDeque::new();
        keep(&mut last, &[b'x'; KEPT * 2]);
        assert_eq!(lines(&last), ["x".repeat(KEPT)]);
    }
}
