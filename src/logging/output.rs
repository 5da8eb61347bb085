//! Writes to a log target (standard output, standard error or a file) without waiting for its reader.
//!
//! Envoy's access log fills the same pipe, and the thread that logs also serves. A line that does not fit
//! into the pipe is therefore queued, and another thread writes the queue until it is empty. Lines
//! beyond [`MAX_QUEUED`] bytes are dropped, which a later line reports.
//!
//! Envoy shares the descriptor, so it cannot be made non-blocking: if Envoy fills the pipe between
//! the poll and the write, the write blocks after all.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::Level;

use super::levels::DEFAULT;
use super::line::{Content, Line};
use crate::problem::{Code, Problem};

const MAX_QUEUED: usize = 256 << 10;
/// The bytes that a pipe accepts without blocking if it polls as writable.
const PIPE_BUF: usize = 4 << 10;

/// The number of threads that write queues, and a signal that one has ended.
static WRITERS: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// Waits until all queues are written, at most for `limit`. Lines that are still queued then are lost.
pub(super) fn finish(limit: Duration) {
    let (count, changed) = &WRITERS;
    let _ = changed.wait_while_for(&mut count.lock(), |writers| *writers > 0, limit);
}

pub(super) struct Output {
    file: Arc<File>,
    json: bool,
    /// Locked while a line is written or queued, so that lines of several threads do not mix.
    queue: Arc<Mutex<Queue>>,
}

#[derive(Default)]
struct Queue {
    lines: Vec<u8>,
    dropped: u64,
    has_writer: bool,
}

impl Output {
    pub(super) fn new(file: File, json: bool) -> Self {
        Self { file: Arc::new(file), json, queue: Arc::default() }
    }

    pub(super) fn write(&self, line: &[u8]) {
        let mut queue = self.queue.lock();
        let mut rest = line;
        let is_first = !queue.has_writer && queue.lines.is_empty();
        while is_first && !rest.is_empty() && has_room(&*self.file) {
            let (chunk, more) = rest.split_at(rest.len().min(PIPE_BUF));
            write_all(&self.file, chunk);
            rest = more;
        }
        if !rest.is_empty() {
            queue.add(rest);
            // If no thread can be started, the next line tries again.
            queue.has_writer = queue.has_writer || self.start_writer();
        }
    }

    fn start_writer(&self) -> bool {
        let file = self.file.clone();
        let json = self.json;
        let queue = self.queue.clone();
        *WRITERS.0.lock() += 1;
        let started = std::thread::Builder::new().name("log".to_owned()).spawn(move || {
            loop {
                let lines = queue.lock().take(json);
                let Some(lines) = lines else { break };
                // The queue is not locked meanwhile.
                write_all(&file, &lines);
            }
            *WRITERS.0.lock() -= 1;
            WRITERS.1.notify_all();
        });
        if started.is_err() {
            *WRITERS.0.lock() -= 1;
        }
        started.is_ok()
    }
}

impl Queue {
    fn add(&mut self, line: &[u8]) {
        // The first line is queued whatever its length, because its beginning may be written already.
        if !self.lines.is_empty() && self.lines.len() + line.len() > MAX_QUEUED {
            self.dropped += 1;
        } else {
            self.lines.extend_from_slice(line);
        }
    }

    /// Takes the lines to write next; None ends the writer.
    fn take(&mut self, json: bool) -> Option<Vec<u8>> {
        self.has_writer = !self.lines.is_empty() || self.dropped > 0;
        if !self.has_writer {
            return None;
        }
        let mut lines = std::mem::take(&mut self.lines);
        let dropped = std::mem::take(&mut self.dropped);
        if dropped > 0 {
            let found = format!("{dropped} lines dropped because its reader is too slow");
            let problem = Problem::new(Code::LogLinesDropped, "log", found);
            let line = Line {
                time: SystemTime::now(),
                level: Level::WARN,
                scope: DEFAULT,
                caller: None,
                content: Content::new(problem.to_string()),
            };
            lines.extend_from_slice(line.format(json).as_bytes());
        }
        Some(lines)
    }
}

/// Ignores errors, because a failure to log cannot be logged.
fn write_all(mut file: &File, bytes: &[u8]) {
    let _ = file.write_all(bytes);
}

/// Returns true if [`PIPE_BUF`] bytes can be written without blocking.
fn has_room(to: &impl AsFd) -> bool {
    let mut ask = [PollFd::new(to, PollFlags::OUT)];
    poll(&mut ask, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use std::io::{self, BufRead, BufReader, Read};
    use std::os::fd::OwnedFd;

    use super::*;

    #[test]
    fn unread_lines_block_no_caller_and_arrive_in_order_later() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let output = Output::new(File::from(OwnedFd::from(writer)), false);
        let line = |number: usize| format!("{number:0999}\n");
        // The lines do not fit into the pipe and the queue together.
        let count = 2 * (MAX_QUEUED + (64 << 10)) / 1000;
        (0..count).for_each(|number| output.write(line(number).as_bytes()));
        let mut read = BufReader::new(&mut reader).lines();
        let (mut came, mut dropped) = (0, 0);
        let mut last = None;
        while came + dropped < count {
            let line = read.next().expect("a line").expect("text");
            // Each time lines were dropped, a line reports their number.
            match line.split_once("\twarn\t") {
                None => {
                    let number: usize = line.parse().expect("a number");
                    assert!(last.is_none_or(|last| last < number), "{last:?}, {number}");
                    last = Some(number);
                    came += 1;
                }
                Some((_, note)) => {
                    let number = note.strip_prefix("log: ").and_then(|it| it.split(' ').next());
                    let number = number.expect("words");
                    assert!(note.ends_with("[LOG_LINES_DROPPED]"), "{note}");
                    dropped += number.parse::<usize>().expect("a number");
                }
            }
        }
        assert_eq!(came + dropped, count);
        assert!(came * 1000 > MAX_QUEUED && dropped > 0, "{came}, {dropped}");
        finish(Duration::from_secs(60));
        let mut bytes = [0; 100];
        output.write(b"again\n");
        let length = reader.read(&mut bytes).expect("bytes");
        assert_eq!(&bytes[..length], b"again\n");
    }

    #[test]
    fn a_line_longer_than_a_pipe_arrives_whole() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let output = Output::new(File::from(OwnedFd::from(writer)), false);
        let line = "x".repeat(2 * MAX_QUEUED) + "\n";
        output.write(line.as_bytes());
        let mut read = vec![0; line.len()];
        reader.read_exact(&mut read).expect("bytes");
        assert!(read == line.as_bytes());
    }
}
