//! Forwards Envoy's output to the agent's, and keeps the end of its standard error for the crash record.
//!
//! A thread per output copies byte for byte. A slow reader of the agent's output makes Envoy wait, not the agent. A
//! stopped agent makes Envoy wait once the pipe is full.
//!
//! Envoy inherits standard output, with the access logs, if it can open it as `/dev/stdout`. It cannot open a socket,
//! such as the journal's, or an output of another user.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::fchown;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use tokio::sync::oneshot;

/// The size of the stored end of standard error.
const MAX_STORED: usize = 4 << 10;
/// The capacity of a pipe, so that lines stay together. Only pages with data use memory.
const CHUNK: usize = 64 << 10;
/// The wait for the last output after Envoy's exit. A program that Envoy has started may hold a pipe open.
const REST: Duration = Duration::from_millis(250);

#[derive(Debug, Default)]
pub(super) struct Output {
    /// The end of standard error.
    last: Arc<Mutex<VecDeque<u8>>>,
    /// The receivers, closed when the pipes have been read to their end.
    copied: Vec<oneshot::Receiver<()>>,
}

impl Output {
    /// Starts the threads that copy, and returns the standard output and error for an Envoy of `user`, or else of the
    /// agent's user. Without a pipe or a thread Envoy inherits the agent's, and nothing is stored.
    pub(super) fn copy(user: Option<u32>) -> (Self, [Stdio; 2]) {
        let mut output = Self::default();
        let stdout = io::stdout();
        let stderr = io::stderr();
        let stdout = if user.is_none() && is_openable(stdout.as_fd()) {
            Stdio::inherit()
        } else {
            or_inherit(output.pipe(stdout.as_fd(), "envoy-stdout", user, |_| {}))
        };
        let stderr = or_inherit(output.stderr_pipe(stderr.as_fd(), user));
        (output, [stdout, stderr])
    }

    fn stderr_pipe(&mut self, to: BorrowedFd<'_>, user: Option<u32>) -> io::Result<PipeWriter> {
        let last = Arc::clone(&self.last);
        self.pipe(to, "envoy-stderr", user, move |read| {
            store(&mut last.lock(), read);
        })
    }

    /// Creates a pipe that is copied to `to`. It belongs to `user`, because only its owner can open it by name.
    fn pipe(
        &mut self,
        to: BorrowedFd<'_>,
        thread: &str,
        user: Option<u32>,
        inspect: impl Fn(&[u8]) + Send + 'static,
    ) -> io::Result<PipeWriter> {
        let mut to = File::from(to.try_clone_to_owned()?);
        let (mut from, pipe) = io::pipe()?;
        fchown(&pipe, user, user)?;
        let (sender, copied) = oneshot::channel::<()>();
        let mut chunk = vec![0; CHUNK];
        std::thread::Builder::new().name(thread.to_owned()).spawn(move || {
            let _sender = sender;
            loop {
                let read = match from.read(&mut chunk) {
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Ok(0) | Err(_) => return,
                    Ok(length) => &chunk[..length],
                };
                inspect(read);
                // Envoy must not block when the agent's output is closed, so its pipe is read anyway.
                let _ = to.write_all(read);
            }
        })?;
        self.copied.push(copied);
        Ok(pipe)
    }

    /// Returns the line of standard error with the reason of Envoy's exit; empty if there is none.
    pub(super) async fn reason(&mut self) -> String {
        reason(&self.last_lines().await).unwrap_or_default().to_owned()
    }

    /// Returns the last lines of standard error, after Envoy's exit.
    pub(super) async fn last_lines(&mut self) -> Vec<String> {
        // An output that is still open after the limit may belong to another program.
        let _ = tokio::time::timeout(REST, join_all(self.copied.drain(..))).await;
        lines(&self.last.lock())
    }
}

/// Returns true if this process, or one of the same user, can open the file behind a descriptor by name.
fn is_openable(output: BorrowedFd<'_>) -> bool {
    let name = format!("/proc/self/fd/{}", output.as_raw_fd());
    // Otherwise a named pipe without a reader would block, and a terminal could become the controlling one.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    rustix::fs::open(name, OFlags::WRONLY | flags, Mode::empty()).is_ok()
}

fn or_inherit(pipe: io::Result<PipeWriter>) -> Stdio {
    pipe.map(Stdio::from).unwrap_or_else(|error| {
        tracing::warn!("cannot forward Envoy's output; Envoy inherits the agent's: {error}");
        Stdio::inherit()
    })
}

/// Appends the bytes and drops the oldest ones beyond the limit.
fn store(last: &mut VecDeque<u8>, read: &[u8]) {
    last.extend(&read[read.len().saturating_sub(MAX_STORED)..]);
    let surplus = last.len().saturating_sub(MAX_STORED);
    last.drain(..surplus);
}

/// Splits the stored bytes into lines. A first line without its beginning is left out if others follow.
fn lines(last: &VecDeque<u8>) -> Vec<String> {
    let bytes: Vec<u8> = last.iter().copied().collect();
    let text = String::from_utf8_lossy(&bytes);
    let is_cut = bytes.len() == MAX_STORED && text.trim_end().contains('\n');
    text.lines().skip(usize::from(is_cut)).map(str::to_owned).collect()
}

/// Finds the reason of Envoy's exit: the line it prints after its log, or else the first critical line, before a
/// backtrace.
pub(super) fn reason(lines: &[String]) -> Option<&str> {
    let last = lines.iter().rfind(|line| !line.trim().is_empty());
    last.filter(|line| !is_logged(line))
        .or_else(|| lines.iter().find(|line| line.contains("critical")))
        .map(|line| line.trim())
}

/// Returns true if a line begins as in Envoy's log, with or without JSON.
fn is_logged(line: &str) -> bool {
    line.starts_with(|first: char| "[{".contains(first) || first.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn copy(to: &PipeWriter) -> (Output, PipeWriter) {
        let mut output = Output::default();
        let envoy = output.stderr_pipe(to.as_fd(), None);
        (output, envoy.expect("a pipe and a thread"))
    }

    #[tokio::test]
    async fn copies_every_byte_to_a_slow_reader_and_keeps_the_last_lines() {
        let text = (0..20_000).fold(String::new(), |text, n| text + &format!("line {n}\n"));
        let (mut reader, to) = io::pipe().expect("a pipe");
        let (mut output, mut envoy) = copy(&to);
        drop(to);
        // The text does not fit into both pipes, so the thread that copies has to wait for the reader.
        let read = tokio::task::spawn_blocking(move || {
            let mut copied = Vec::new();
            reader.read_to_end(&mut copied).map(|_| copied)
        });
        let all = [text.as_bytes(), b"\xff end"].concat();
        let written = all.clone();
        let write = tokio::task::spawn_blocking(move || envoy.write_all(&written));
        write.await.expect("no panic").expect("written");
        assert_eq!(read.await.expect("no panic").expect("read"), all);
        let lines = output.last_lines().await;
        assert_eq!(lines[lines.len() - 2..], ["line 19999", "\u{fffd} end"]);
        let (count, first) = (lines.len(), &lines[0]);
        assert!(count > 300 && first.starts_with("line "), "{first}");
    }

    #[tokio::test]
    async fn an_open_pipe_and_a_stalled_reader_delay_the_end_briefly() {
        let (stalled, to) = io::pipe().expect("a pipe");
        let (mut output, mut envoy) = copy(&to);
        for _ in 0..3 {
            envoy.write_all(&[b'x'; CHUNK / 2]).expect("written");
        }
        envoy.write_all(b"\nlast words\n").expect("written");
        assert!(!output.last_lines().await.concat().is_empty());
        drop(stalled);
    }

    /// Uses the last lines of Envoy 1.40.
    #[test]
    fn the_reason_of_an_end_is_envoys_last_or_first_critical_line() {
        let bind = "cannot bind '127.0.0.1:15000': Address already in use";
        let critical = "2026-11-23T20:06:17.478956Z\tcritical\tenvoy main server.cc:449\terror \
                        `cannot bind` initializing config\tthread=1";
        let json = r#"{"time":"2026-11-23T20:06:17.4Z","level":"critical","msg":"assert failure"}"#;
        let caught = "[2026-11-23 20:07:26.615][1][critical][backtrace] Caught Segmentation fault";
        let frame = "[2026-11-23 20:07:26.622][1][critical][backtrace] #0: [0x7f0206310050]";
        let info =
            "2026-11-23T20:06:17.478981Z\tinfo\tenvoy main server.cc:1159\texiting\tthread=1";
        for (lines, expected) in [
            (&[critical, " {\"admin\":{}} '\tthread=1", info, bind][..], Some(bind)),
            (
                &["error: invalid log level specified 'loud'", ""],
                Some("error: invalid log level specified 'loud'"),
            ),
            (&[info, caught, frame], Some(caught)),
            (&[info, json, frame], Some(json)),
            // The log of a killed Envoy ends without a reason.
            (&[info, info], None),
            (&[], None),
        ] {
            let lines: Vec<_> = lines.iter().map(|&line| line.to_owned()).collect();
            assert_eq!(reason(&lines), expected, "{lines:?}");
        }
    }

    #[test]
    fn a_socket_cannot_be_opened_by_name_and_pipes_and_files_can() {
        let (_peer, socket) = UnixStream::pair().expect("sockets");
        let (_reader, pipe) = io::pipe().expect("a pipe");
        let file = tempfile::tempfile().expect("a file");
        assert!(!is_openable(socket.as_fd()));
        assert!(is_openable(pipe.as_fd()));
        assert!(is_openable(file.as_fd()));
    }

    #[test]
    fn a_line_above_the_storage_limit_is_stored_in_part() {
        let mut last = VecDeque::new();
        store(&mut last, &[b'x'; MAX_STORED * 2]);
        assert_eq!(lines(&last), ["x".repeat(MAX_STORED)]);
    }
}
