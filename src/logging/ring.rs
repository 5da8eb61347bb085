//! The end of the log, for `/debug/log`.

use std::collections::VecDeque;

use parking_lot::Mutex;

const MOST: usize = 64 << 10;

/// The lines logged last.
pub(super) struct Ring(Mutex<VecDeque<u8>>);

impl Ring {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }

    /// Adds a line. One that is too long for the ring is left out.
    pub(super) fn add(&self, line: &str) {
        let mut ring = self.0.lock();
        while !ring.is_empty() && ring.len() + line.len() > MOST {
            let first = ring.iter().position(|byte| *byte == b'\n');
            let first = first.map_or(ring.len(), |end| end + 1);
            ring.drain(..first);
        }
        if line.len() <= MOST {
            ring.extend(line.as_bytes());
        }
    }

    pub(super) fn text(&self) -> String {
        let ring = self.0.lock();
        let (first, second) = ring.as_slices();
        String::from_utf8_lossy(&[first, second].concat()).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_64_kib_of_whole_lines_are_kept() {
        let ring = Ring::new();
        for number in 0..10_000 {
            ring.add(&format!("line {number}\n"));
        }
        ring.add(&"x".repeat(MOST + 1));
        let text = ring.text();
        assert!(text.is_empty());
        for number in 0..10_000 {
            ring.add(&format!("line {number}\n"));
        }
        let text = ring.text();
        assert!(
            text.len() <= MOST && text.len() > MOST - 20,
            "{}",
            text.len()
        );
        assert!(text.ends_with("line 9998\nline 9999\n"));
        assert!(text.starts_with("line "));
        assert!(ring.0.lock().capacity() <= MOST);
    }
}
