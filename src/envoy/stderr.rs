//! Envoy's standard error on its way to the agent's own, with the last of it kept.
//!
//! A pipe takes what Envoy writes; a task copies it on, byte for byte, and remembers the end for the
//! record of a crash. Whoever reads the agent's output slowly makes Envoy wait, as without the pipe,
//! but nobody else: the copying then waits outside the agent's thread. There is nothing to do while
//! Envoy is silent. An agent that is stopped makes Envoy wait, too, once the pipe is full; one that
//! dies takes Envoy with it anyway.
//!
//! Does not touch standard output, where access logs go: that Envoy has by itself.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::task::JoinSet;

use crate::logging::{PIPE_BUF, has_room};

/// How much is remembered.
const KEPT: usize = 4 << 10;
/// All that fits into a pipe, so that lines arrive whole. Only what was read is ever touched.
const CHUNK: usize = 64 << 10;
/// For what Envoy wrote last. A program it has started may hold the pipe open.
const REST: Duration = Duration::from_millis(250);

/// The copying of one Envoy's standard error. Dropping it ends that.
#[derive(Debug)]
pub(super) struct Tee {
    last: Last,
    copying: JoinSet<()>,
}

#[derive(Clone, Debug, Default)]
struct Last(Arc<Mutex<VecDeque<u8>>>);

impl Tee {
    /// Calls `when_read` after each piece.
    pub(super) fn start(
        from: impl AsyncRead + Unpin + Send + 'static,
        to: impl Write + AsFd + Send + 'static,
        when_read: impl Fn() + Send + 'static,
    ) -> Self {
        let last = Last::default();
        let kept = last.clone();
        let mut copying = JoinSet::new();
        copying.spawn(async move {
            if let Err(error) = copy(from, to, &kept, when_read).await {
                tracing::warn!(%error, "cannot read what Envoy writes to standard error");
            }
        });
        Self { last, copying }
    }

    /// The last lines, once Envoy has ended.
    pub(super) async fn last_lines(mut self) -> Vec<String> {
        let rest = tokio::time::timeout(REST, self.copying.join_next());
        let _ = rest.await; // What has come until now is all there will be.
        self.last.lines()
    }
}

async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl Write + AsFd + Send + 'static,
    last: &Last,
    when_read: impl Fn(),
) -> io::Result<()> {
    let mut chunk = Vec::with_capacity(CHUNK);
    while from.read_buf(&mut chunk).await? > 0 {
        last.push(&chunk);
        when_read();
        for piece in chunk.chunks(PIPE_BUF) {
            to = write(to, piece).await?;
        }
        chunk.clear();
    }
    Ok(())
}

/// Writes at once what there is room for; waits for room on a thread of its own.
async fn write<W: Write + AsFd + Send + 'static>(mut to: W, piece: &[u8]) -> io::Result<W> {
    if has_room(&to) {
        // An agent whose output is closed has nobody to tell; Envoy goes on.
        let _ = to.write_all(piece);
        return Ok(to);
    }
    let piece = piece.to_vec();
    let waiting = tokio::task::spawn_blocking(move || {
        let _ = to.write_all(&piece); // The same.
        to
    });
    waiting.await.map_err(io::Error::other)
}

impl Last {
    fn push(&self, bytes: &[u8]) {
        let mut last = self.lock();
        last.extend(&bytes[bytes.len().saturating_sub(KEPT)..]);
        let surplus = last.len().saturating_sub(KEPT);
        last.drain(..surplus);
    }

    /// Whole lines; the first may have lost its beginning and is left out when there are others.
    fn lines(&self) -> Vec<String> {
        let bytes: Vec<u8> = self.lock().iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let is_cut = bytes.len() == KEPT && text.trim_end().contains('\n');
        let lines = text.lines().skip(usize::from(is_cut));
        lines.map(str::to_owned).collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<u8>> {
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test]
    async fn copies_every_byte_to_a_slow_reader_and_keeps_the_last_lines() {
        let text = (0..20_000).fold(String::new(), |text, n| text + &format!("line {n}\n"));
        let (mut envoy, from) = tokio::io::duplex(CHUNK);
        let (mut reader, to) = io::pipe().expect("a pipe");
        let tee = Tee::start(from, to, || {});
        // More than the pipe holds, so that the copying has to wait.
        let read = tokio::task::spawn_blocking(move || {
            let mut copied = Vec::new();
            reader.read_to_end(&mut copied).map(|_| copied)
        });
        envoy.write_all(text.as_bytes()).await.expect("written");
        envoy.write_all(b"\xff end").await.expect("written");
        drop(envoy);
        let copied = read.await.expect("no panic").expect("read");
        assert_eq!(copied, [text.as_bytes(), b"\xff end"].concat());
        let lines = tee.last_lines().await;
        assert_eq!(lines[lines.len() - 2..], ["line 19999", "\u{fffd} end"]);
        let (count, first) = (lines.len(), &lines[0]);
        assert!(count > 300 && first.starts_with("line "), "{first}");
    }

    #[tokio::test]
    async fn a_pipe_that_stays_open_and_a_reader_that_stalls_hold_nobody_up() {
        let (mut envoy, from) = tokio::io::duplex(CHUNK);
        let (stalled, to) = io::pipe().expect("a pipe");
        let tee = Tee::start(from, to, || {});
        for _ in 0..4 {
            envoy.write_all(&[b'x'; CHUNK / 2]).await.expect("written");
        }
        envoy.write_all(b"\nlast words\n").await.expect("written");
        assert!(tee.last_lines().await.concat().contains('x'));
        drop(stalled);
    }

    #[test]
    fn a_line_longer_than_what_is_kept_is_kept_in_part() {
        let last = Last::default();
        last.push(&[b'x'; KEPT * 2]);
        assert_eq!(last.lines(), ["x".repeat(KEPT)]);
    }
}
