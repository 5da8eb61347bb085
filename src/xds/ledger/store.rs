//! Stores resources in memory: compressed blocks, and an index of them by type and name.
//!
//! A block has fields of delta responses of one type: resources, and names of removed ones. Fields are appended to the
//! open block of their type, which is compressed when it is full. A field that is larger than a block has blocks of its
//! own. Blocks in which nothing is in use are freed; those in which little is in use are merged ([`Store::compact`]).
//! The file has the same blocks ([`super::file`]).

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use zstd::bulk::{Compressor, Decompressor};

use super::Type;
use crate::xds::wire::NameDigest;

/// The most uncompressed bytes of a block.
pub(super) const BLOCK: usize = 64 * 1024;

/// Of the levels of zstd, the one with the least CPU time.
const LEVEL: i32 = 1;

/// The number of blocks of a type, each with less than half a block in use, from which they are merged.
const MIN_MERGED: usize = 8;

/// The bytes of an entry of the index, with the unused part of its table.
const ENTRY: usize = 40;

/// The place of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The block, or the first one if the field is larger than a block.
    block: u32,
    offset: u16,
    length: u32,
}

#[derive(Debug)]
struct Block {
    type_of: Type,
    /// Blocks with a higher number are newer. A number is not used again.
    number: u64,
    data: Data,
    /// The uncompressed bytes.
    length: u32,
    /// The uncompressed bytes in use.
    used: u32,
    role: Role,
    /// True if the bytes in use are in the file.
    is_written: bool,
}

#[derive(Debug)]
enum Data {
    Open(Vec<u8>),
    Compressed(Arc<[u8]>),
}

/// The part that a block has in a field.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Role {
    /// The block has whole fields.
    Whole,
    /// The block is part of a field that continues in the next one, if there is one.
    Part { next: Option<u32> },
}

/// A field that is larger than a block, while its bytes arrive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Long {
    first: u32,
    last: u32,
    length: u32,
}

/// A block as it is in the file.
#[derive(Clone, Debug)]
pub(super) struct StoredBlock {
    pub(super) type_of: Type,
    pub(super) data: Arc<[u8]>,
    pub(super) length: u32,
    /// True if the last field continues in the next block.
    pub(super) continues: bool,
    /// The beginnings of the fields in use.
    pub(super) used: Vec<u16>,
}

/// Fields in one block, or a part of a field.
#[derive(Debug)]
pub(super) struct Piece {
    data: Arc<[u8]>,
    length: u32,
    ranges: Vec<Range<usize>>,
}

impl Piece {
    /// Decompresses the block, and calls `each` with the fields.
    pub(super) fn read(&self, mut each: impl FnMut(&[u8])) -> io::Result<()> {
        let block = decompress(&self.data, self.length)?;
        for range in &self.ranges {
            let part = block.get(range.clone());
            each(part.ok_or_else(|| io::Error::other("a block is too short"))?);
        }
        Ok(())
    }
}

/// Decompresses a block of this length.
pub(super) fn decompress(data: &[u8], length: u32) -> io::Result<Vec<u8>> {
    let block = Decompressor::new()?.decompress(data, length as usize)?;
    if block.len() == length as usize {
        Ok(block)
    } else {
        Err(io::Error::other("a block has another length than its header says"))
    }
}

/// The resources of all types.
#[derive(Default)]
pub(super) struct Store {
    blocks: Vec<Option<Block>>,
    free: Vec<u32>,
    next_number: u64,
    types: BTreeMap<Type, TypeIndex>,
    /// The compressed bytes of all blocks.
    compressed: usize,
    /// Exists while blocks are compressed, because it has much memory.
    compressor: Option<Compressor<'static>>,
}

#[derive(Debug, Default)]
struct TypeIndex {
    resources: HashMap<NameDigest, Place>,
    /// The names of removed resources that are not in the file.
    removals: Vec<Place>,
    open: Option<u32>,
    /// The open block of resources from other blocks.
    merged: Option<u32>,
}

impl Store {
    /// Returns true if no block is in use.
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.iter().all(Option::is_none)
    }

    pub(super) fn has(&self, type_of: Type, name: NameDigest) -> bool {
        self.get(type_of, name).is_some()
    }

    pub(super) fn get(&self, type_of: Type, name: NameDigest) -> Option<Place> {
        self.types.get(&type_of)?.resources.get(&name).copied()
    }

    /// Returns the places of all resources of a type.
    pub(super) fn all(&self, type_of: Type) -> Vec<Place> {
        let index = self.types.get(&type_of);
        index.map_or_else(Vec::new, |index| index.resources.values().copied().collect())
    }

    /// Returns the memory of blocks and index.
    pub(super) fn memory(&self) -> usize {
        let entries: usize = self.types.values().map(|index| index.resources.len()).sum();
        let open = self.blocks.iter().flatten().map(|block| match &block.data {
            Data::Open(bytes) => bytes.len(),
            Data::Compressed(_) => 0,
        });
        self.compressed + open.sum::<usize>() + entries * ENTRY
    }

    /// Returns the compressed bytes of the blocks of each type.
    pub(super) fn bytes(&self) -> BTreeMap<Type, u64> {
        let mut bytes = BTreeMap::new();
        for block in self.blocks.iter().flatten() {
            if let Data::Compressed(data) = &block.data {
                *bytes.entry(block.type_of).or_default() += data.len() as u64;
            }
        }
        bytes
    }

    /// Appends a field of at most [`BLOCK`] bytes. It is in use until [`Store::release`].
    pub(super) fn append(&mut self, type_of: Type, field: &[u8]) -> Place {
        let open = self.types.entry(type_of).or_default().open;
        let (block, place) = self.append_to(open, type_of, field, false);
        self.types.entry(type_of).or_default().open = Some(block);
        place
    }

    /// Appends a field to an open block, or to a new one if there is none or it has no room.
    fn append_to(
        &mut self,
        open: Option<u32>,
        type_of: Type,
        field: &[u8],
        is_written: bool,
    ) -> (u32, Place) {
        let length = field.len() as u32;
        if let Some(id) = open
            && let Some(block) = &mut self.blocks[id as usize]
            && let Data::Open(bytes) = &mut block.data
        {
            if bytes.len() + field.len() <= BLOCK {
                let offset = bytes.len() as u16;
                bytes.extend_from_slice(field);
                block.length += length;
                block.used += length;
                return (id, Place { block: id, offset, length });
            }
            self.seal(id);
        }
        let id = self.insert(Block {
            type_of,
            number: 0,
            data: Data::Open(field.to_vec()),
            length,
            used: length,
            role: Role::Whole,
            is_written,
        });
        (id, Place { block: id, offset: 0, length })
    }

    /// Appends at most [`BLOCK`] bytes to a long field, or begins one.
    pub(super) fn extend(&mut self, long: Option<Long>, type_of: Type, bytes: &[u8]) -> Long {
        let length = bytes.len() as u32;
        let id = self.insert(Block {
            type_of,
            number: 0,
            data: Data::Open(bytes.to_vec()),
            length,
            used: length,
            role: Role::Part { next: None },
            is_written: false,
        });
        self.seal(id);
        let Some(long) = long else {
            return Long { first: id, last: id, length };
        };
        if let Some(Block { role: Role::Part { next }, .. }) = &mut self.blocks[long.last as usize]
        {
            *next = Some(id);
        }
        Long { last: id, length: long.length.saturating_add(length), ..long }
    }

    /// Ends a long field.
    pub(super) fn end(long: Long) -> Place {
        Place { block: long.first, offset: 0, length: long.length }
    }

    fn insert(&mut self, block: Block) -> u32 {
        let block = Some(Block { number: self.next_number, ..block });
        self.next_number += 1;
        if let Some(id) = self.free.pop() {
            self.blocks[id as usize] = block;
            return id;
        }
        self.blocks.push(block);
        self.blocks.len() as u32 - 1
    }

    /// Compresses a block, or frees it if nothing in it is in use.
    fn seal(&mut self, id: u32) {
        let Some(block) = &mut self.blocks[id as usize] else {
            return;
        };
        if let Data::Open(bytes) = &mut block.data {
            if block.used > 0 {
                let mut compressed = Vec::new();
                if self.compressor.is_none() {
                    self.compressor = Compressor::new(LEVEL).ok();
                }
                if let Some(compressor) = &mut self.compressor
                    && let Ok(data) = compressor.compress(bytes)
                {
                    compressed = data;
                }
                self.compressed += compressed.len();
                block.data = Data::Compressed(compressed.into());
            } else {
                self.blocks[id as usize] = None;
                self.free.push(id);
            }
        }
        for index in self.types.values_mut() {
            index.open.take_if(|open| *open == id);
            index.merged.take_if(|merged| *merged == id);
        }
    }

    /// Compresses all open blocks.
    pub(super) fn seal_all(&mut self) {
        let open = self.types.values().flat_map(|index| [index.open, index.merged]);
        for id in Vec::from_iter(open.flatten()) {
            self.seal(id);
        }
        self.compressor = None;
    }

    /// Ends the use of a field. Frees blocks in which nothing is in use.
    pub(super) fn release(&mut self, place: Place) {
        let mut next = Some((place.block, place.length));
        while let Some((id, length)) = next.take() {
            let Some(block) = &mut self.blocks[id as usize] else {
                return;
            };
            block.used = match block.role {
                Role::Whole => block.used.saturating_sub(length),
                Role::Part { next: following } => {
                    next = following.map(|id| (id, 0));
                    0
                }
            };
            if block.used == 0
                && let Data::Compressed(data) = &block.data
            {
                self.compressed -= data.len();
                self.blocks[id as usize] = None;
                self.free.push(id);
            }
        }
    }

    /// Makes a field the version of a resource.
    pub(super) fn set(&mut self, type_of: Type, name: NameDigest, place: Place) {
        let index = self.types.entry(type_of).or_default();
        if let Some(before) = index.resources.insert(name, place) {
            self.release(before);
        }
    }

    /// Removes a resource. `removal` is the field with its name.
    pub(super) fn remove(&mut self, type_of: Type, name: NameDigest, removal: Place) {
        let index = self.types.entry(type_of).or_default();
        index.removals.push(removal);
        if let Some(before) = index.resources.remove(&name) {
            self.release(before);
        }
    }

    /// Removes the resources of a type for which `keeps` returns false, without fields that say so. Returns true if there
    /// were any.
    pub(super) fn retain(&mut self, type_of: Type, keeps: impl Fn(&NameDigest) -> bool) -> bool {
        let Some(index) = self.types.get_mut(&type_of) else {
            return false;
        };
        let removed: Vec<_> = index.resources.extract_if(|name, _| !keeps(name)).collect();
        removed.iter().for_each(|(_, place)| self.release(*place));
        !removed.is_empty()
    }

    /// Returns the blocks of these fields, in the order of their bytes, adjacent fields at once.
    pub(super) fn pieces(&mut self, mut places: Vec<Place>) -> Vec<Piece> {
        self.seal_all();
        let number = |place: &Place| {
            self.blocks[place.block as usize].as_ref().map_or(0, |block| block.number)
        };
        places.sort_unstable_by_key(|place| (number(place), place.offset));
        let (mut pieces, mut last) = (Vec::<Piece>::new(), None);
        for place in places {
            let mut next = Some(place.block);
            while let Some(id) = next.take() {
                let Some(block) = &self.blocks[id as usize] else {
                    break;
                };
                let Data::Compressed(data) = &block.data else {
                    break;
                };
                let range = match block.role {
                    Role::Whole => {
                        let start = usize::from(place.offset);
                        start..start + place.length as usize
                    }
                    Role::Part { next: following } => {
                        next = following;
                        0..block.length as usize
                    }
                };
                match pieces.last_mut().filter(|_| last == Some(id)) {
                    Some(Piece { ranges, .. }) => match ranges.last_mut() {
                        Some(before) if before.end == range.start => before.end = range.end,
                        _ => ranges.push(range),
                    },
                    None => pieces.push(Piece {
                        data: data.clone(),
                        length: block.length,
                        ranges: vec![range],
                    }),
                }
                last = Some(id);
            }
        }
        pieces
    }

    /// Returns the total length of these fields.
    pub(super) fn length(places: &[Place]) -> u64 {
        places.iter().map(|place| u64::from(place.length)).sum()
    }

    /// Merges a block of which less than half is in use into another one, if there are several of its type. Returns true
    /// if there is more to merge. Blocks that are not in the file stay.
    pub(super) fn compact(&mut self) -> io::Result<bool> {
        let mut sparse = BTreeMap::<Type, Vec<u32>>::new();
        for (id, block) in self.blocks.iter().enumerate() {
            if let Some(block) = block
                && block.is_written
                && block.role == Role::Whole
                && matches!(block.data, Data::Compressed(_))
                && (block.used as usize) < BLOCK / 2
            {
                sparse.entry(block.type_of).or_default().push(id as u32);
            }
        }
        let is_merging = |type_of| self.types.get(type_of).is_some_and(|it| it.merged.is_some());
        let found =
            sparse.iter().find(|(type_of, ids)| ids.len() >= MIN_MERGED || is_merging(type_of));
        let Some((type_of, id)) = found.and_then(|(it, ids)| Some((*it, *ids.first()?))) else {
            return Ok(false);
        };
        let index = self.types.entry(type_of).or_default();
        let moved = index.resources.iter().filter(|(_, place)| place.block == id);
        let moved: Vec<_> = moved.map(|(name, place)| (*name, *place)).collect();
        let Some(Block { data: Data::Compressed(data), length, .. }) = &self.blocks[id as usize]
        else {
            return Ok(false);
        };
        let bytes = decompress(data, *length)?;
        for (name, place) in moved {
            let start = usize::from(place.offset);
            let field = bytes.get(start..start + place.length as usize);
            let field = field.ok_or_else(|| io::Error::other("a block is too short"))?;
            let merged = self.types.get(&type_of).and_then(|index| index.merged);
            let (block, place) = self.append_to(merged, type_of, field, true);
            self.types.entry(type_of).or_default().merged = Some(block);
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
        let mut used = HashMap::<u32, (Vec<u16>, u32)>::new();
        for index in self.types.values() {
            for place in index.resources.values().chain(&index.removals) {
                let is_written =
                    self.blocks[place.block as usize].as_ref().is_none_or(|it| it.is_written);
                if all || !is_written {
                    let (starts, length) = used.entry(place.block).or_default();
                    starts.push(place.offset);
                    *length += place.length;
                }
            }
        }
        let mut firsts: Vec<_> = used.into_iter().collect();
        firsts.sort_unstable_by_key(|(id, _)| {
            self.blocks[*id as usize].as_ref().map_or(0, |block| block.number)
        });
        let mut taken = Vec::new();
        for (first, (mut starts, length)) in firsts {
            starts.sort_unstable();
            let mut next = Some(first);
            while let Some(id) = next.take() {
                let Some(block) = &mut self.blocks[id as usize] else {
                    break;
                };
                block.is_written = match block.role {
                    Role::Whole => block.used == length,
                    Role::Part { next: following } => {
                        next = following;
                        true
                    }
                };
                if let Data::Compressed(data) = &block.data {
                    taken.push(StoredBlock {
                        type_of: block.type_of,
                        data: data.clone(),
                        length: block.length,
                        continues: next.is_some(),
                        used: std::mem::take(&mut starts),
                    });
                }
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

    /// Adds blocks of a file: one with whole fields, or all of a long field. `fields` are the resources in use, and the
    /// removed ones (None), in the order of their bytes.
    pub(super) fn add_blocks(
        &mut self,
        blocks: Vec<StoredBlock>,
        fields: Vec<(NameDigest, Option<Range<u64>>)>,
    ) {
        let is_long = blocks.len() > 1 || blocks.first().is_some_and(|block| block.continues);
        let (mut first, mut last, mut type_of) = (None, None::<u32>, None);
        for stored in blocks {
            self.compressed += stored.data.len();
            let role = if is_long { Role::Part { next: None } } else { Role::Whole };
            type_of = Some(stored.type_of);
            let id = self.insert(Block {
                type_of: stored.type_of,
                number: 0,
                data: Data::Compressed(stored.data),
                length: stored.length,
                used: if is_long { stored.length } else { 0 },
                role,
                is_written: true,
            });
            if let Some(last) = last
                && let Some(Block { role: Role::Part { next }, .. }) =
                    &mut self.blocks[last as usize]
            {
                *next = Some(id);
            }
            (first, last) = (first.or(Some(id)), Some(id));
        }
        let (Some(first), Some(type_of)) = (first, type_of) else {
            return;
        };
        let length = |range: &Range<u64>| (range.end - range.start) as u32;
        if let (false, Some(block)) = (is_long, &mut self.blocks[first as usize]) {
            block.used = fields.iter().filter_map(|(_, range)| range.as_ref()).map(length).sum();
        }
        let mut is_used = false;
        for (name, range) in fields {
            let place = range.map(|range| Place {
                block: first,
                offset: range.start as u16,
                length: length(&range),
            });
            is_used |= place.is_some();
            let resources = &mut self.types.entry(type_of).or_default().resources;
            let before = match place {
                Some(place) => resources.insert(name, place),
                None => resources.remove(&name),
            };
            self.release_all(before);
        }
        if !is_used {
            self.release(Place { block: first, offset: 0, length: 0 });
        }
    }

    fn release_all(&mut self, places: impl IntoIterator<Item = Place>) {
        places.into_iter().for_each(|place| self.release(place));
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("compressed", &self.compressed).finish_non_exhaustive()
    }
}
