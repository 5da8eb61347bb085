//! Pages of several application targets, held until all are there.
//!
//! A family that more than one target has must come in one piece, and targets are read at the same
//! time, so their pages are kept: in segments that are compressed one by one, with a list of where
//! each family is. Joining them goes through the targets in order and looks each family up in those
//! that follow. Where targets have the same series, the first one's stands; of a histogram or a
//! summary that is the whole group.
//!
//! Does not read from targets, and leaves names that are taken to the page.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

use super::body::Output;
use super::counts::{Counts, Origin};
use super::family::{Family, Kind};
use super::line::{self, Format, Line, Sample};
use super::merge::Sink;
use super::page::Names;

/// What is held back of a target before it is kept, in bytes: all of them are read at once.
pub(super) const WINDOW: usize = 32 << 10;
const SEGMENT: usize = 32 << 10;
/// Most memory for what is known of families, per target.
const MOST_KNOWLEDGE: usize = 4 << 20;
/// Most series of one family that are told apart.
const MOST_SERIES: usize = 1 << 16;

/// The page of one target.
pub(super) struct Spool {
    to: Format,
    counts: Counts,
    names: Names,
    families: Vec<Held>,
    knowledge: usize,
    segments: Vec<Segment>,
    /// The segment that still grows.
    open: Vec<u8>,
    /// Room to compress into.
    packed: Vec<u8>,
}

struct Held {
    family: Family,
    pieces: Vec<Piece>,
}

/// Whole lines of one family.
struct Piece {
    segment: usize,
    lines: Range<usize>,
}

struct Segment {
    data: Box<[u8]>,
    length: usize,
    is_packed: bool,
}

impl Spool {
    pub(super) fn new(to: Format, counts: Counts) -> Self {
        Self {
            to,
            counts,
            names: Names::default(),
            families: Vec::new(),
            knowledge: 0,
            segments: Vec::new(),
            open: Vec::new(),
            packed: Vec::new(),
        }
    }

    fn seal(&mut self) {
        if !self.open.is_empty() {
            self.segments
                .push(Segment::of(&self.open, &mut self.packed));
            self.open.clear();
        }
    }
}

impl Sink for Spool {
    fn open(&mut self, family: &mut Family) -> bool {
        self.knowledge += family.size();
        let fits = self.knowledge <= MOST_KNOWLEDGE && self.names.take(family, self.to);
        if fits {
            self.families.push(Held {
                family: family.clone(),
                pieces: Vec::with_capacity(1),
            });
        } else {
            self.counts.duplicate(Origin::Application, &family.name);
        }
        fits
    }

    fn write(&mut self, samples: &[u8]) {
        // A piece must not be of a segment that never comes to be.
        let Some(held) = self.families.last_mut().filter(|_| !samples.is_empty()) else {
            return;
        };
        let begin = self.open.len();
        self.open.extend_from_slice(samples);
        held.pieces.push(Piece {
            segment: self.segments.len(),
            lines: begin..self.open.len(),
        });
        if self.open.len() >= SEGMENT {
            self.seal();
        }
    }
}

impl Segment {
    /// What does not get half as large stays as it is.
    fn of(lines: &[u8], packed: &mut Vec<u8>) -> Self {
        packed.clear();
        packed.reserve_exact(lines.len() / 2);
        let packing = Compress::new(Compression::fast(), false).compress_vec(
            lines,
            packed,
            FlushCompress::Finish,
        );
        let is_packed = matches!(packing, Ok(Status::StreamEnd));
        Self {
            data: if is_packed { packed } else { lines }.into(),
            length: lines.len(),
            is_packed,
        }
    }

    fn lines(&self) -> io::Result<Vec<u8>> {
        if !self.is_packed {
            return Ok(self.data.to_vec());
        }
        let mut lines = Vec::with_capacity(self.length);
        let finish = FlushDecompress::Finish;
        Decompress::new(false).decompress_vec(&self.data, &mut lines, finish)?;
        Ok(lines)
    }
}

/// Writes what targets have brought, in their order.
pub(super) async fn join(spools: Vec<Spool>, output: &mut Output) -> io::Result<()> {
    let mut readers: Vec<_> = spools.into_iter().map(Reader::new).collect();
    let state = RandomState::new();
    let mut holders = Vec::new();
    for (target, reader) in readers.iter().enumerate() {
        let families = reader.spool.families.iter().enumerate();
        holders.extend(families.map(|(index, held)| Holder {
            key: state.hash_one(&held.family.name),
            target,
            index,
        }));
    }
    let order = holders.clone();
    holders.sort_unstable();
    for first in order {
        let begin = holders.partition_point(|holder| holder.key < first.key);
        let end = holders.partition_point(|holder| holder.key <= first.key);
        // Otherwise an earlier target has brought it.
        if holders[begin] == first {
            family(&mut readers, &holders[begin..end], output).await?;
        }
    }
    Ok(())
}

/// A target that has a family.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Holder {
    key: u64,
    target: usize,
    index: usize,
}

async fn family(readers: &mut [Reader], holders: &[Holder], output: &mut Output) -> io::Result<()> {
    let first = &mut readers[holders[0].target].spool.families[holders[0].index].family;
    let kind = first.kind.unwrap_or(Kind::Unknown);
    if !output.page.open(first) {
        return Ok(());
    }
    let mut series = Series::new(kind, holders[0].target, output.page.to);
    for holder in holders {
        let held = &readers[holder.target].spool.families[holder.index];
        if held.family.kind.unwrap_or(Kind::Unknown) != kind {
            let counts = output.page.counts();
            counts.duplicate(Origin::Application, &held.family.name);
            continue;
        }
        for piece in 0..held.pieces.len() {
            let lines = readers[holder.target].piece(holder.index, piece)?;
            if holders.len() == 1 {
                output.page.write(lines);
            } else {
                for line in lines.split_inclusive(|byte| *byte == b'\n') {
                    if series.is_first(line, holder.target) {
                        output.page.write(line);
                    }
                }
            }
            output.offer().await;
        }
    }
    if series.is_cut {
        let family = &readers[holders[0].target].spool.families[holders[0].index].family;
        let counts = output.page.counts();
        counts.duplicate(Origin::Application, &family.name);
    }
    Ok(())
}

/// A spool read piece by piece: mostly in order, so one segment is kept unpacked.
struct Reader {
    spool: Spool,
    number: Option<usize>,
    lines: Vec<u8>,
}

impl Reader {
    fn new(mut spool: Spool) -> Self {
        spool.seal();
        spool.names = Names::default();
        (spool.open, spool.packed) = (Vec::new(), Vec::new());
        Self {
            spool,
            number: None,
            lines: Vec::new(),
        }
    }

    fn piece(&mut self, family: usize, piece: usize) -> io::Result<&[u8]> {
        let piece = &self.spool.families[family].pieces[piece];
        if self.number != Some(piece.segment) {
            let segment = self.spool.segments.get(piece.segment);
            self.lines = segment.map_or(Ok(Vec::new()), Segment::lines)?;
            self.number = Some(piece.segment);
        }
        Ok(self.lines.get(piece.lines.clone()).unwrap_or_default())
    }
}

/// Which target has brought which series of a family.
struct Series {
    kind: Kind,
    /// All of its series are first.
    target: usize,
    to: Format,
    state: RandomState,
    targets: HashMap<u64, usize>,
    /// Whether a series was left out because there are too many to tell it from others.
    is_cut: bool,
}

impl Series {
    fn new(kind: Kind, target: usize, to: Format) -> Self {
        Self {
            kind,
            target,
            to,
            state: RandomState::new(),
            targets: HashMap::new(),
            is_cut: false,
        }
    }

    fn is_first(&mut self, line: &[u8], target: usize) -> bool {
        let is_first_target = target == self.target;
        if is_first_target && self.targets.len() >= MOST_SERIES {
            return true;
        }
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let Some(Line::Sample(sample)) = line::parse(line, self.to) else {
            return false;
        };
        let key = self.key(&sample);
        if let Some(known) = self.targets.get(&key) {
            return *known == target;
        }
        let fits = self.targets.len() < MOST_SERIES;
        if fits {
            self.targets.insert(key, target);
        }
        self.is_cut |= !fits;
        fits
    }

    /// The series, whatever the order of its labels; of a group of samples, the group.
    fn key(&self, sample: &Sample<'_>) -> u64 {
        let inner = self.kind.inner_label();
        let mut labels = line::labels(&sample.labels);
        labels.retain(|(name, _)| Some(*name) != inner);
        labels.sort_unstable();
        let name = inner.map_or(sample.name, |_| "");
        self.state.hash_one((name, labels))
    }
}
