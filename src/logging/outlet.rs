//! Standard output or error to log to, of which the reader may be slow.
//!
//! The thread that serves logs, too, and Envoy's access log fills the same pipe: whoever writes into
//! a full one waits for its reader. So a line for which there is no room is kept, and a thread that
//! may wait writes what is kept, until nothing is. Beyond [`MOST`] bytes lines are left out, which a
//! line says afterwards.
//!
//! The descriptor is Envoy's as well and cannot be made not to wait: if Envoy takes the room in the
//! moment between the look and the write, this waits after all.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::Level;

use super::levels::DEFAULT;
use super::line::{Content, Line};

/// Most bytes of lines that are kept.
const MOST: usize = 256 << 10;
/// A pipe that takes anything takes so much: PIPE_BUF.
pub(crate) const PIECE: usize = 4 << 10;

/// Outlets that are waiting for their readers, and when there are none any more.
static WAITING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// Waits until all lines are written, within `limit`.
pub(super) fn finish(limit: Duration) {
    let (count, changed) = &WAITING;
    let mut waiting = count.lock();
    // After that they are lost.
    let _ = changed.wait_while_for(&mut waiting, |waiting| *waiting > 0, limit);
}

/// Where lines go. Each write is taken for one.
pub(super) struct Outlet<W> {
    to: Arc<W>,
    json: bool,
    kept: Arc<Mutex<Kept>>,
}

#[derive(Default)]
struct Kept {
    lines: Vec<u8>,
    left_out: u64,
    /// Whether a thread writes what is kept.
    is_waiting: bool,
}

impl<W> Outlet<W>
where
    W: AsFd + Send + Sync + 'static,
    for<'w> &'w W: Write,
{
    pub(super) fn new(to: W, json: bool) -> Self {
        let (to, kept) = (Arc::new(to), Arc::default());
        Self { to, json, kept }
    }

    fn put(&self, line: &[u8]) {
        let mut kept = self.kept.lock();
        let mut rest = line;
        let is_next = !kept.is_waiting && kept.lines.is_empty();
        while is_next && !rest.is_empty() && has_room(&*self.to) {
            let (piece, more) = rest.split_at(rest.len().min(PIECE));
            write(&self.to, piece);
            rest = more;
        }
        if rest.is_empty() {
            return;
        }
        kept.keep(rest);
        if kept.is_waiting {
            return;
        }
        let (to, json, shared) = (self.to.clone(), self.json, self.kept.clone());
        let waiting = move || {
            loop {
                // Others log while this waits.
                let lines = shared.lock().take(json);
                let Some(lines) = lines else { break };
                write(&to, &lines);
            }
            *WAITING.0.lock() -= 1;
            WAITING.1.notify_all();
        };
        *WAITING.0.lock() += 1;
        let thread = std::thread::Builder::new().name("log".to_owned());
        kept.is_waiting = thread.spawn(waiting).is_ok();
        if !kept.is_waiting {
            // The next line tries again.
            *WAITING.0.lock() -= 1;
        }
    }
}

impl Kept {
    fn keep(&mut self, line: &[u8]) {
        // The rest of one that has begun is kept, however long.
        if !self.lines.is_empty() && self.lines.len() + line.len() > MOST {
            self.left_out += 1;
        } else {
            self.lines.extend_from_slice(line);
        }
    }

    /// What is to be written next. None if that is nothing; whoever asked is not asked again then.
    fn take(&mut self, json: bool) -> Option<Vec<u8>> {
        self.is_waiting = !self.lines.is_empty() || self.left_out > 0;
        if !self.is_waiting {
            return None;
        }
        let mut lines = std::mem::take(&mut self.lines);
        let left_out = std::mem::take(&mut self.left_out);
        if left_out > 0 {
            let line = Line {
                time: SystemTime::now(),
                level: Level::WARN,
                scope: DEFAULT,
                caller: None,
                content: Content::of(format!(
                    "{left_out} lines of the log were left out, as nobody read it"
                )),
            };
            let line = if json { line.json() } else { line.text() };
            lines.extend_from_slice(line.as_bytes());
        }
        Some(lines)
    }
}

impl<W> Write for Outlet<W>
where
    W: AsFd + Send + Sync + 'static,
    for<'w> &'w W: Write,
{
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.put(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whoever closed the output does not want to know.
fn write<W>(to: &W, bytes: &[u8])
where
    for<'w> &'w W: Write,
{
    let mut to = to;
    let _ = to.write_all(bytes).and_then(|()| to.flush());
}

/// Whether [`PIECE`] bytes can be written without waiting.
pub(crate) fn has_room(to: &impl AsFd) -> bool {
    let mut ask = [PollFd::new(to, PollFlags::OUT)];
    poll(&mut ask, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read};

    use super::*;

    #[test]
    fn lines_nobody_reads_hold_nobody_up_and_come_in_order_once_somebody_does() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let outlet = Outlet::new(writer, false);
        let line = |number: usize| format!("{number:0999}\n");
        // More than the pipe and what is kept hold together.
        let count = 2 * (MOST + (64 << 10)) / 1000;
        (0..count).for_each(|number| outlet.put(line(number).as_bytes()));
        let mut read = BufReader::new(&mut reader).lines();
        let (mut came, mut left_out) = (0, 0);
        let mut last = None;
        while came + left_out < count {
            let line = read.next().expect("a line").expect("text");
            // How many were left out is said each time some were.
            match line.split_once("\twarn\t") {
                None => {
                    let number: usize = line.parse().expect("a number");
                    assert!(last.is_none_or(|last| last < number), "{last:?}, {number}");
                    last = Some(number);
                    came += 1;
                }
                Some((_, note)) => {
                    let (number, rest) = note.split_once(' ').expect("words");
                    assert_eq!(rest, "lines of the log were left out, as nobody read it");
                    left_out += number.parse::<usize>().expect("a number");
                }
            }
        }
        assert_eq!(came + left_out, count);
        assert!(came * 1000 > MOST && left_out > 0, "{came}, {left_out}");
        finish(Duration::from_secs(60));
        let mut bytes = [0; 100];
        outlet.put(b"again\n");
        let length = reader.read(&mut bytes).expect("bytes");
        assert_eq!(&bytes[..length], b"again\n");
    }

    #[test]
    fn a_line_longer_than_a_pipe_comes_whole() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let outlet = Outlet::new(writer, false);
        let line = "x".repeat(2 * MOST) + "\n";
        outlet.put(line.as_bytes());
        let mut read = vec![0; line.len()];
        reader.read_exact(&mut read).expect("bytes");
        assert!(read == line.as_bytes());
    }
}
