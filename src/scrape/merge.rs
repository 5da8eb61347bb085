//! Lines of one source in, families of the page out.
//!
//! A window of families is held, so that one whose samples stand apart comes out in one piece. What
//! does not fit leaves at the front: a family larger than the window passes through it while it
//! grows. A family that comes back after it has left is a second one of its name, which the page
//! refuses. Lines that are none are left out and counted.
//!
//! Does not wait for anything, and knows no other source.

use std::collections::{HashMap, VecDeque};
use std::mem;

use super::family::{Family, Kind, bases};
use super::line::{self, Format, Line, Sample};
use super::scan;

/// What is held back of a source that passes through, in bytes.
pub(super) const WINDOW: usize = 256 << 10;
/// Longest line read.
const LONGEST_LINE: usize = 64 << 10;

/// Takes families, one after the other.
pub(super) trait Sink {
    /// Begins a family, under another name if its own is taken and it has one. False refuses all of
    /// it.
    fn open(&mut self, family: &mut Family) -> bool;
    /// More samples of the family, whole lines.
    fn write(&mut self, samples: &[u8]);
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a line is longer than {LONGEST_LINE} bytes")]
pub(super) struct LineTooLong;

/// One source on its way to the page.
pub(super) struct Filter {
    from: Format,
    to: Format,
    /// Most that is held back, in bytes.
    window: usize,
    /// The beginning of a line whose end is still to come.
    partial: Vec<u8>,
    blocks: VecDeque<Block>,
    /// The number of the first block.
    first: u64,
    current: u64,
    numbers: HashMap<String, u64>,
    held: usize,
    has_ended: bool,
    is_finished: bool,
    malformed: u64,
}

struct Block {
    family: Family,
    samples: Vec<u8>,
    state: State,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Held,
    Open,
    Refused,
}

impl Filter {
    pub(super) fn new(from: Format, to: Format, window: usize) -> Self {
        Self {
            from,
            to,
            window,
            partial: Vec::new(),
            blocks: VecDeque::new(),
            first: 0,
            current: 0,
            numbers: HashMap::new(),
            held: 0,
            has_ended: false,
            is_finished: false,
            malformed: 0,
        }
    }

    /// Whether the source has said that it is complete.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Lines left out so far.
    pub(super) fn malformed(&self) -> u64 {
        self.malformed
    }

    pub(super) fn push(&mut self, data: &[u8], sink: &mut impl Sink) -> Result<(), LineTooLong> {
        let mut rest = data;
        while let Some(end) = scan::position(rest, |byte| byte == b'\n') {
            let (line, after) = rest.split_at(end);
            rest = &after[1..];
            if self.partial.len() + line.len() > LONGEST_LINE {
                return self.too_long();
            }
            if self.partial.is_empty() {
                self.line(line, sink);
            } else {
                let mut whole = mem::take(&mut self.partial);
                whole.extend_from_slice(line);
                self.line(&whole, sink);
                whole.clear();
                self.partial = whole;
            }
        }
        if self.partial.len() + rest.len() > LONGEST_LINE {
            return self.too_long();
        }
        self.partial.extend_from_slice(rest);
        Ok(())
    }

    fn too_long(&mut self) -> Result<(), LineTooLong> {
        self.partial = Vec::new();
        self.malformed += 1;
        Err(LineTooLong)
    }

    /// Lets out what is held. What follows the last line's end is a line only if the source is
    /// whole.
    pub(super) fn finish(&mut self, is_whole: bool, sink: &mut impl Sink) {
        let last = mem::take(&mut self.partial);
        if is_whole {
            self.line(&last, sink);
        } else if !last.is_empty() {
            self.malformed += 1;
        }
        self.is_finished = true;
        while !self.blocks.is_empty() {
            self.let_out_first(sink);
        }
    }

    fn line(&mut self, text: &[u8], sink: &mut impl Sink) {
        if self.has_ended {
            return;
        }
        let (from, to) = (self.from, self.to);
        match line::parse(text, from) {
            None => self.malformed += 1,
            Some(Line::Nothing) => {}
            Some(Line::End) => self.has_ended = true,
            Some(Line::Help(name, help)) => {
                self.describe(name, |family| family.set_help(help, from, to));
            }
            Some(Line::Unit(name, unit)) => self.describe(name, |family| family.set_unit(unit)),
            Some(Line::Type(name, kind)) => match Kind::parse(kind, from) {
                Some(kind) => self.set_kind(name, kind),
                None => self.malformed += 1,
            },
            Some(Line::Sample(sample)) => self.sample(&sample),
        }
        while self.held > self.window {
            self.let_out_first(sink);
        }
    }

    fn describe(&mut self, name: &str, change: impl FnOnce(&mut Family)) {
        let number = self.described(name);
        if let Some(block) = self.block(number) {
            let before = block.family.size();
            change(&mut block.family);
            let grown = block.family.size() - before;
            self.held += grown;
        }
    }

    /// The family that metadata speaks of, begun if there is none.
    fn described(&mut self, name: &str) -> u64 {
        let known = self.numbers.get(name).copied();
        self.current = known.unwrap_or_else(|| self.begin(name));
        self.current
    }

    /// A type counts once, and before the samples it speaks of.
    fn set_kind(&mut self, name: &str, kind: Kind) {
        let (from, to) = (self.from, self.to);
        let number = self.described(name);
        let Some(block) = self.block(number) else {
            return;
        };
        let is_late = block.state != State::Held || !block.samples.is_empty();
        if is_late || block.family.kind.is_some() {
            self.malformed += 1;
            return;
        }
        block.family.set_kind(kind, from, to);
        let name = block.family.name.clone();
        self.numbers.entry(name).or_insert(number);
    }

    fn sample(&mut self, sample: &Sample<'_>) {
        let (from, to) = (self.from, self.to);
        let number = self.owner(sample.name);
        self.current = number;
        let Some(block) = self.block(number) else {
            return;
        };
        if block.state == State::Refused || block.family.has_no_place_for(sample.name, from, to) {
            return;
        }
        let before = block.samples.len();
        block.family.write(sample, from, to, &mut block.samples);
        self.held += self.block(number).map_or(0, |block| block.samples.len()) - before;
    }

    /// The family a sample belongs to, begun if there is none.
    fn owner(&mut self, name: &str) -> u64 {
        if self.fits(self.current, name) {
            return self.current;
        }
        let known = [name].into_iter().chain(bases(name));
        let known = known.filter_map(|base| self.numbers.get(base).copied());
        let known = known.into_iter().find(|number| self.fits(*number, name));
        known.unwrap_or_else(|| self.begin(name))
    }

    fn fits(&self, number: u64, sample: &str) -> bool {
        let block = number
            .checked_sub(self.first)
            .and_then(|index| self.blocks.get(usize::try_from(index).ok()?));
        block.is_some_and(|block| {
            block.family.owns(sample, self.to)
                || block.family.has_no_place_for(sample, self.from, self.to)
        })
    }

    fn begin(&mut self, name: &str) -> u64 {
        let number = self.first + self.blocks.len() as u64;
        let block = Block {
            family: Family::new(name),
            samples: Vec::new(),
            state: State::Held,
        };
        self.held += block.family.size();
        self.blocks.push_back(block);
        self.numbers.insert(name.to_owned(), number);
        number
    }

    fn block(&mut self, number: u64) -> Option<&mut Block> {
        let index = number.checked_sub(self.first)?;
        self.blocks.get_mut(usize::try_from(index).ok()?)
    }

    /// Lets out samples of the first family, and the family with them unless it still grows.
    fn let_out_first(&mut self, sink: &mut impl Sink) {
        let grows = self.current == self.first && !self.is_finished;
        let Some(block) = self.blocks.front_mut() else {
            return;
        };
        let samples = mem::take(&mut block.samples);
        self.held -= samples.len();
        if block.state == State::Held && !samples.is_empty() {
            let name = block.family.name.clone();
            block.state = match sink.open(&mut block.family) {
                true => State::Open,
                false => State::Refused,
            };
            if block.family.name != name && self.numbers.get(&name) == Some(&self.first) {
                self.numbers.remove(&name);
            }
        }
        if block.state == State::Open {
            sink.write(&samples);
        }
        if grows && !samples.is_empty() {
            block.samples = samples;
            block.samples.clear();
        } else {
            self.close_first();
        }
    }

    fn close_first(&mut self) {
        let Some(block) = self.blocks.pop_front() else {
            return;
        };
        self.held -= block.family.size();
        for name in [&block.family.base, &block.family.name] {
            if self.numbers.get(name) == Some(&self.first) {
                self.numbers.remove(name);
            }
        }
        self.first += 1;
    }
}

#[cfg(test)]
#[path = "merge_tests.rs"]
mod tests;
