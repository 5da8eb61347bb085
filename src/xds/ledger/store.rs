//! Stores resources in memory: compressed blocks, and an index of them by type and name.
//!
//! A block has fields of delta responses of one type: resources, and names of removed ones. Fields are appended to the
//! open block of their type, which is compressed when it is full. A field that is larger than a block has a block of its
//! own, which is compressed in parts while its bytes arrive. istiod often sends a large route table again without a
//! change: equal parts are compressed once, and an equal field keeps its place. Blocks in which nothing is in use are freed; those in which little is
//! in use are merged ([`Store::compact`]). The file has the same blocks ([`super::file`]).
//!
//! zstd fails only if there is no memory. The block is empty then, and cannot be read.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, Cursor, Read as _};
use std::ops::Range;
use std::sync::{Arc, Weak};

use zstd::Decoder;
use zstd::bulk::Compressor;

use super::Type;
use crate::xds::wire::NameDigest;

/// The most uncompressed bytes of a block, unless it is one longer field.
pub(super) const BLOCK: usize = 64 * 1024;

/// The distance over which zstd finds repetitions, as a power of two. It bounds the memory for reading.
const WINDOW_LOG: u32 = BLOCK.ilog2();

/// Of the levels of zstd, the one with the least CPU time.
const LEVEL: i32 = 1;

/// The number of blocks of a type, each with less than half a block in use, from which they are merged.
const MIN_MERGED: usize = 8;

/// The bytes of an entry of the index, with the unused part of its table.
const ENTRY: usize = 40;

/// The number of a block. Later blocks have higher numbers.
pub(in crate::xds) type BlockNumber = u32;

/// The place of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::xds) struct Place {
    block: BlockNumber,
    offset: u16,
    length: u32,
}

struct Block {
    type_of: Type,
    data: Data,
    /// The uncompressed bytes.
    length: u32,
    /// The uncompressed bytes in use.
    used: u32,
    /// True if the bytes in use are in the file, and none belongs to an unanswered response.
    is_written: bool,
}

/// Compressed bytes: a frame of zstd, or several.
type Part = Arc<[u8]>;

enum Data {
    Open(Vec<u8>),
    /// A long field, while its bytes arrive: its compressed parts, and the bytes after them.
    Long(Vec<Part>, Vec<u8>),
    /// The parts of a long field, or the block.
    Compressed(Vec<Part>),
}

/// A block as it is in the file.
#[derive(Clone, Debug)]
pub(super) struct StoredBlock {
    pub(super) type_of: Type,
    pub(super) data: Arc<[u8]>,
    pub(super) length: u32,
    /// The beginnings of the fields in use.
    pub(super) used: Vec<u16>,
}

/// Fields in one block.
#[derive(Debug)]
pub(in crate::xds) struct Piece {
    data: Arc<[u8]>,
    length: u32,
    ranges: Vec<Range<usize>>,
}

impl Piece {
    /// Decompresses the block, and returns all fields.
    pub(in crate::xds) fn bytes(self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for part in self.parts()? {
            bytes.extend_from_slice(&part?);
        }
        Ok(bytes)
    }

    /// Decompresses the block, and returns the fields in parts of at most [`BLOCK`] bytes.
    pub(super) fn parts(self) -> io::Result<impl Iterator<Item = io::Result<Vec<u8>>> + Send> {
        let mut position = 0;
        Ok(decompress(self.data, self.length)?.map(move |part| {
            let part = part?;
            let begin = position;
            position += part.len();
            let mut fields = Vec::new();
            for range in &self.ranges {
                let start = range.start.max(begin);
                let end = range.end.min(position);
                if start < end {
                    fields.extend_from_slice(&part[start - begin..end - begin]);
                }
            }
            Ok(fields)
        }))
    }
}

/// Decompresses a block of this length, in parts of at most [`BLOCK`] bytes.
pub(super) fn decompress(
    data: Arc<[u8]>,
    length: u32,
) -> io::Result<impl Iterator<Item = io::Result<Vec<u8>>> + Send> {
    let mut decoder = Decoder::with_buffer(Cursor::new(data))?;
    decoder.window_log_max(WINDOW_LOG)?;
    let mut left = length as usize;
    Ok(std::iter::from_fn(move || {
        let mut part = vec![0; left.min(BLOCK)];
        left -= part.len();
        let read = decoder.read_exact(&mut part).and_then(|()| {
            if left == 0 && decoder.read(&mut [0])? > 0 {
                return Err(io::Error::other("a block is longer than its header says"));
            }
            Ok(())
        });
        (!part.is_empty()).then(|| read.map(|()| part))
    }))
}

/// The resources of all types.
#[derive(Default)]
pub(in crate::xds) struct Store {
    blocks: BTreeMap<BlockNumber, Block>,
    next_number: BlockNumber,
    types: BTreeMap<Type, TypeIndex>,
    /// Exists while blocks are compressed, because it has much memory.
    compressor: Option<Compressor<'static>>,
    /// The parts of long fields, by the digests of their uncompressed bytes.
    parts: HashMap<u64, Weak<[u8]>>,
    digests: RandomState,
}

#[derive(Debug, Default)]
struct TypeIndex {
    resources: HashMap<NameDigest, Place>,
    /// The names of removed resources that are not in the file.
    removals: Vec<Place>,
    open: Option<BlockNumber>,
    /// The open block of resources from other blocks.
    merged: Option<BlockNumber>,
}

impl Block {
    fn new(type_of: Type, data: Data, is_written: bool) -> Self {
        Self { type_of, data, length: 0, used: 0, is_written }
    }

    /// Counts bytes that have been appended, and are in use.
    fn grow(&mut self, length: usize) {
        self.length = self.length.saturating_add(length as u32);
        self.used = self.used.saturating_add(length as u32);
    }

    /// Returns the bytes in memory.
    fn memory(&self) -> usize {
        match &self.data {
            Data::Open(bytes) => bytes.len(),
            Data::Long(parts, rest) => length_of(parts) + rest.len(),
            Data::Compressed(parts) => length_of(parts),
        }
    }
}

impl Store {
    /// Returns true if no block is in use.
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(in crate::xds) fn get(&self, type_of: Type, name: NameDigest) -> Option<Place> {
        self.types.get(&type_of)?.resources.get(&name).copied()
    }

    /// Returns the number of resources of a type.
    pub(in crate::xds) fn count(&self, type_of: Type) -> usize {
        self.types.get(&type_of).map_or(0, |index| index.resources.len())
    }

    /// Returns the places of all resources of a type.
    pub(in crate::xds) fn all(&self, type_of: Type) -> Vec<Place> {
        let index = self.types.get(&type_of);
        index.map_or_else(Vec::new, |index| index.resources.values().copied().collect())
    }

    /// Returns the memory of blocks and index.
    pub(super) fn memory(&self) -> usize {
        let entries: usize = self.types.values().map(|index| index.resources.len()).sum();
        self.blocks.values().map(Block::memory).sum::<usize>() + entries * ENTRY
    }

    /// Returns the compressed bytes of the blocks of each type.
    pub(super) fn bytes(&self) -> BTreeMap<Type, u64> {
        let mut bytes = BTreeMap::new();
        for block in self.blocks.values() {
            if let Data::Compressed(data) = &block.data {
                *bytes.entry(block.type_of).or_default() += length_of(data) as u64;
            }
        }
        bytes
    }

    /// Appends a field of at most [`BLOCK`] bytes. It is in use until [`Store::release`].
    pub(super) fn append(&mut self, type_of: Type, field: &[u8]) -> Place {
        let open = self.types.entry(type_of).or_default().open;
        let place = self.append_to(open, type_of, field, false);
        self.types.entry(type_of).or_default().open = Some(place.block);
        place
    }

    /// Appends a field to an open block, or to a new one if there is none or it has no room.
    fn append_to(
        &mut self,
        open: Option<BlockNumber>,
        type_of: Type,
        field: &[u8],
        is_written: bool,
    ) -> Place {
        let has_room = |block: &Block| block.length as usize + field.len() <= BLOCK;
        let number = match open {
            Some(number) if self.blocks.get(&number).is_some_and(has_room) => number,
            full => {
                full.into_iter().for_each(|number| self.seal(number));
                self.insert(Block::new(type_of, Data::Open(Vec::new()), is_written))
            }
        };
        let mut place = Place { block: number, offset: 0, length: field.len() as u32 };
        if let Some(block) = self.blocks.get_mut(&number)
            && let Data::Open(bytes) = &mut block.data
        {
            place.offset = bytes.len() as u16;
            bytes.extend_from_slice(field);
            block.grow(field.len());
        }
        place
    }

    /// Appends a complete field of any length.
    pub(in crate::xds) fn append_any(&mut self, type_of: Type, field: &[u8]) -> Place {
        if field.len() <= BLOCK {
            return self.append(type_of, field);
        }
        let long = self.extend(None, type_of, field);
        self.end(long)
    }

    /// Appends bytes to a field that is larger than a block, or begins one. Returns its block.
    pub(super) fn extend(
        &mut self,
        long: Option<BlockNumber>,
        type_of: Type,
        bytes: &[u8],
    ) -> BlockNumber {
        let number = long.unwrap_or_else(|| {
            self.insert(Block::new(type_of, Data::Long(Vec::new(), Vec::new()), false))
        });
        let Some(mut block) = self.blocks.remove(&number) else {
            return number;
        };
        block.grow(bytes.len());
        if let Data::Long(parts, rest) = &mut block.data {
            let mut bytes = bytes;
            while let Some((part, after)) = bytes.split_at_checked(BLOCK - rest.len()) {
                rest.extend_from_slice(part);
                parts.push(self.compress_part(rest));
                rest.clear();
                bytes = after;
            }
            rest.extend_from_slice(bytes);
        }
        self.blocks.insert(number, block);
        number
    }

    /// Compresses a part of a long field, unless it is stored already.
    fn compress_part(&mut self, bytes: &[u8]) -> Part {
        let digest = self.digests.hash_one(bytes);
        if let Some(part) = self.parts.get(&digest).and_then(Weak::upgrade) {
            return part;
        }
        let part = Part::from(self.compress(bytes).unwrap_or_default());
        if part.is_empty() {
            return part;
        }
        if self.parts.len() == self.parts.capacity() {
            self.parts.retain(|_, part| part.strong_count() > 0);
        }
        self.parts.insert(digest, Arc::downgrade(&part));
        part
    }

    fn compress(&mut self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let compressor = self.compressor.take().map_or_else(|| Compressor::new(LEVEL), Ok)?;
        self.compressor.insert(compressor).compress(bytes)
    }

    /// Ends a field that is larger than a block.
    pub(super) fn end(&mut self, long: BlockNumber) -> Place {
        self.seal(long);
        let length = self.blocks.get(&long).map_or(0, |block| block.length);
        Place { block: long, offset: 0, length }
    }

    fn insert(&mut self, block: Block) -> BlockNumber {
        let number = self.next_number;
        self.next_number += 1;
        self.blocks.insert(number, block);
        number
    }

    /// Compresses a block, or frees it if nothing in it is in use.
    fn seal(&mut self, number: BlockNumber) {
        let Some(mut block) = self.blocks.remove(&number) else { return };
        if let Some(index) = self.types.get_mut(&block.type_of) {
            index.open.take_if(|open| *open == number);
            index.merged.take_if(|merged| *merged == number);
        }
        if block.used == 0 {
            return;
        }
        block.data = Data::Compressed(match block.data {
            Data::Open(bytes) => vec![self.compress(&bytes).unwrap_or_default().into()],
            Data::Long(mut parts, rest) => {
                if !rest.is_empty() {
                    parts.push(self.compress_part(&rest));
                }
                parts
            }
            Data::Compressed(parts) => parts,
        });
        self.blocks.insert(number, block);
    }

    /// Compresses all open blocks.
    pub(super) fn seal_all(&mut self) {
        let open = self.types.values().flat_map(|index| [index.open, index.merged]);
        for number in Vec::from_iter(open.flatten()) {
            self.seal(number);
        }
        self.compressor = None;
    }

    /// Ends the use of a field. Frees blocks in which nothing is in use.
    pub(super) fn release(&mut self, place: Place) {
        if let Some(block) = self.blocks.get_mut(&place.block) {
            block.used = block.used.saturating_sub(place.length);
            if block.used == 0 && !matches!(block.data, Data::Open(_)) {
                self.blocks.remove(&place.block);
            }
        }
    }

    /// Makes a field the version of a resource.
    pub(in crate::xds) fn set(&mut self, type_of: Type, name: NameDigest, place: Place) {
        let before = self.get(type_of, name);
        if before.is_some_and(|before| self.is_equal(before, place)) {
            return self.release(place);
        }
        self.types.entry(type_of).or_default().resources.insert(name, place);
        before.into_iter().for_each(|before| self.release(before));
    }

    /// Returns true if two long fields are known to be equal.
    fn is_equal(&self, a: Place, b: Place) -> bool {
        let parts = |place: Place| match &self.blocks.get(&place.block)?.data {
            Data::Compressed(parts) if parts.len() > 1 => Some(parts),
            _ => None,
        };
        let pair = parts(a).zip(parts(b)).filter(|_| a.block != b.block && a.length == b.length);
        pair.is_some_and(|(a, b)| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| Arc::ptr_eq(a, b))
        })
    }

    /// Removes a resource. `removal` is the field with its name.
    pub(in crate::xds) fn remove(&mut self, type_of: Type, name: NameDigest, removal: Place) {
        let index = self.types.entry(type_of).or_default();
        index.removals.push(removal);
        if let Some(before) = index.resources.remove(&name) {
            self.release(before);
        }
    }

    /// Removes the resources of a type for which `keeps` returns false, without fields that say so. Returns true if there
    /// were any.
    pub(super) fn retain(&mut self, type_of: Type, keeps: impl Fn(&NameDigest) -> bool) -> bool {
        let Some(index) = self.types.get_mut(&type_of) else { return false };
        let removed: Vec<_> = index.resources.extract_if(|name, _| !keeps(name)).collect();
        removed.iter().for_each(|(_, place)| self.release(*place));
        !removed.is_empty()
    }

    /// Returns the blocks of these fields, in the order of their bytes, adjacent fields at once.
    pub(in crate::xds) fn pieces(&mut self, mut places: Vec<Place>) -> Vec<Piece> {
        places.sort_unstable();
        for number in BTreeSet::from_iter(places.iter().map(|place| place.block)) {
            self.seal(number);
        }
        self.compressor = None;
        let mut pieces = Vec::new();
        for fields in places.chunk_by(|a, b| a.block == b.block) {
            let block = fields.first().and_then(|place| self.blocks.get(&place.block));
            if let Some(Block { data: Data::Compressed(data), length, .. }) = block {
                let mut ranges = Vec::<Range<usize>>::new();
                for Place { offset, length, .. } in fields {
                    let start = usize::from(*offset);
                    let end = start + *length as usize;
                    match ranges.last_mut() {
                        Some(before) if before.end == start => before.end = end,
                        _ => ranges.push(start..end),
                    }
                }
                pieces.push(Piece { data: joined(data), length: *length, ranges });
            }
        }
        pieces
    }

    /// Returns the total length of these fields.
    pub(super) fn length(places: &[Place]) -> u64 {
        places.iter().map(|place| u64::from(place.length)).sum()
    }

    /// Moves the resources of one compressed block into the open merged block of its type, if less than half of [`BLOCK`]
    /// is in use. A type begins this with [`MIN_MERGED`] such blocks. Returns true if there may be more. Blocks with fields
    /// of unanswered responses stay. If the ledger has a file (`is_stored`), blocks that are not in it stay, too.
    pub(super) fn compact(&mut self, is_stored: bool) -> io::Result<bool> {
        let mut used_by_resources = BTreeMap::<BlockNumber, u32>::new();
        if !is_stored {
            self.release_removals();
            // Fields of unanswered responses may be in any block.
            for place in self.types.values().flat_map(|index| index.resources.values()) {
                *used_by_resources.entry(place.block).or_default() += place.length;
            }
        }
        let mut sparse = BTreeMap::<Type, Vec<BlockNumber>>::new();
        for (number, block) in &self.blocks {
            let is_sparse = (block.used as usize) < BLOCK / 2;
            let can_move = if is_stored {
                block.is_written
            } else {
                used_by_resources.get(number) == Some(&block.used)
            };
            if can_move && is_sparse && matches!(block.data, Data::Compressed(_)) {
                sparse.entry(block.type_of).or_default().push(*number);
            }
        }
        let is_merging = |type_of| self.types.get(type_of).is_some_and(|it| it.merged.is_some());
        let found = sparse.iter().find(|(it, all)| all.len() >= MIN_MERGED || is_merging(it));
        let Some((type_of, number)) = found.and_then(|(it, all)| Some((*it, *all.first()?))) else {
            return Ok(false);
        };
        let Some(Block { data: Data::Compressed(data), length, .. }) = self.blocks.get(&number)
        else {
            return Ok(false);
        };
        let bytes = decompress(joined(data), *length)?.collect::<io::Result<Vec<_>>>()?.concat();
        let resources = self.types.get(&type_of).into_iter().flat_map(|index| &index.resources);
        let moved = resources.filter(|(_, place)| place.block == number);
        for (name, place) in Vec::from_iter(moved.map(|(name, place)| (*name, *place))) {
            let start = usize::from(place.offset);
            let field = bytes.get(start..start + place.length as usize);
            let field = field.ok_or_else(|| io::Error::other("a block is too short"))?;
            let merged = self.types.get(&type_of).and_then(|index| index.merged);
            // If there is a file, it has this field already.
            let place = self.append_to(merged, type_of, field, true);
            self.types.entry(type_of).or_default().merged = Some(place.block);
            self.set(type_of, name, place);
        }
        Ok(true)
    }

    /// Returns the blocks with changes that are not in the file, or `all` blocks in use, in the order of their numbers.
    /// They count as written then, unless they also have fields of responses that are not answered.
    pub(super) fn take_blocks(&mut self, all: bool) -> Vec<StoredBlock> {
        self.seal_all();
        if all {
            self.release_removals();
        }
        let indexes = self.types.values();
        let places = indexes.flat_map(|index| index.resources.values().chain(&index.removals));
        let mut used = BTreeMap::<BlockNumber, (Vec<u16>, u32)>::new();
        for place in places {
            if all || self.blocks.get(&place.block).is_some_and(|block| !block.is_written) {
                let (starts, length) = used.entry(place.block).or_default();
                starts.push(place.offset);
                *length += place.length;
            }
        }
        let mut taken = Vec::new();
        for (number, (mut used, length)) in used {
            if let Some(block) = self.blocks.get_mut(&number)
                && let Data::Compressed(data) = &block.data
            {
                used.sort_unstable();
                block.is_written = block.used == length;
                let Block { type_of, length, .. } = *block;
                taken.push(StoredBlock { type_of, data: joined(data), length, used });
            }
        }
        self.release_removals();
        taken
    }

    fn release_removals(&mut self) {
        let removals = self.types.values_mut().flat_map(|it| std::mem::take(&mut it.removals));
        for place in Vec::from_iter(removals) {
            self.release(place);
        }
    }

    /// Adds a block of a file. `fields` are the resources in use, and the removed ones (None).
    pub(super) fn add_block(
        &mut self,
        stored: StoredBlock,
        fields: Vec<(NameDigest, Option<Range<u64>>)>,
    ) {
        let mut block = Block::new(stored.type_of, Data::Compressed(vec![stored.data]), true);
        let number = self.next_number;
        block.length = stored.length;
        block.used = fields.iter().flat_map(|(_, range)| range).map(length).sum();
        if block.used > 0 {
            self.insert(block);
        }
        for (name, range) in fields {
            let place = range.map(|range| Place {
                block: number,
                offset: range.start as u16,
                length: length(&range),
            });
            let resources = &mut self.types.entry(stored.type_of).or_default().resources;
            let before = match place {
                Some(place) => resources.insert(name, place),
                None => resources.remove(&name),
            };
            before.into_iter().for_each(|place| self.release(place));
        }
    }
}

fn length_of(parts: &[Part]) -> usize {
    parts.iter().map(|part| part.len()).sum()
}

/// Returns the compressed bytes of a block at one place.
fn joined(parts: &[Part]) -> Part {
    match parts {
        [part] => part.clone(),
        parts => parts.concat().into(),
    }
}

/// Returns the length of a field in a block.
fn length(range: &Range<u64>) -> u32 {
    (range.end - range.start) as u32
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("blocks", &self.blocks.len()).finish_non_exhaustive()
    }
}
