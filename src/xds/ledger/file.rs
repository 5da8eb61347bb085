//! Writes the resources that an Envoy has accepted to a file, and reads them.
//!
//! The file begins with [`MAGIC`] and has chunks: blocks as they are in memory ([`StoredBlock`]), and records. A
//! [`Record`] makes all before it valid, so that a kill leaves the state of the last record. Changes are appended; a file
//! that has become large is replaced as a whole. Any damage before the last record makes the file unusable.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crc32fast::Hasher;
use serde::{Deserialize, Serialize};

use super::store::{BLOCK, Store, StoredBlock, decompress};
use super::{DIRECTORY, FILE, TYPES};
use crate::files::directory::Directory;
use crate::files::regular_file::if_exists;
use crate::xds::wire::{ResourceField, Walker};

const MAGIC: &[u8] = b"istio-agent configuration 1\n";

/// The first byte of a chunk. The length of the rest follows, in 4 bytes.
const BLOCK_CHUNK: u8 = b'B';
const RECORD_CHUNK: u8 = b'R';

/// The bytes of a block's chunk before the beginnings of its fields: type, length, number of fields.
const BLOCK_HEAD: usize = 1 + 4 + 2;

/// The description of all before it in the file. A record with other members is not used.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    /// The identity of the node whose Envoy has accepted the resources.
    pub(super) identity: String,
    /// The last time at which istiod's stream was open, in seconds of Unix time.
    pub(super) current: u64,
    /// The names of the clusters that an Envoy has used, if it gets clusters on demand.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) used: Vec<String>,
    /// By type URL.
    pub(super) types: BTreeMap<String, TypeRecord>,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TypeRecord {
    /// The version of the last response of which Envoy has accepted all or a part.
    pub(super) version: String,
    /// The value of `current` when Envoy rejected resources that it still lacks: until then, istiod had their stored
    /// versions. None if Envoy lacks none.
    pub(super) rejected: Option<u64>,
}

/// A record with the checksum of all bytes before its chunk.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    record: Record,
    crc: u32,
}

/// Changes for the file, or all that it has to contain.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) is_whole: bool,
    pub(super) blocks: Vec<StoredBlock>,
    pub(super) record: Record,
}

/// Writes the file.
#[derive(Debug)]
pub(super) struct Writer {
    /// The directory of the volume.
    parent: PathBuf,
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    file: File,
    length: u64,
    hasher: Hasher,
}

impl Open {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.hasher.update(bytes);
        self.length += bytes.len() as u64;
        Ok(())
    }

    fn write_batch(&mut self, batch: &Batch) -> io::Result<()> {
        // Blocks are collected, so that a small change is one write.
        let mut bytes = Vec::new();
        for block in &batch.blocks {
            bytes.push(BLOCK_CHUNK);
            let length = BLOCK_HEAD + 2 * block.used.len() + block.data.len();
            bytes.extend_from_slice(&(length as u32).to_be_bytes());
            let type_of = TYPES.iter().position(|it| *it == block.type_of).unwrap_or_default();
            bytes.push(type_of as u8);
            bytes.extend_from_slice(&block.length.to_be_bytes());
            bytes.extend_from_slice(&(block.used.len() as u16).to_be_bytes());
            block.used.iter().for_each(|start| bytes.extend_from_slice(&start.to_be_bytes()));
            bytes.extend_from_slice(&block.data);
            if bytes.len() > BLOCK {
                self.write(&bytes)?;
                bytes.clear();
            }
        }
        self.write(&bytes)?;
        let sealed = Sealed { record: batch.record.clone(), crc: self.hasher.clone().finalize() };
        let record = serde_json::to_vec(&sealed)?;
        let length = (record.len() as u32).to_be_bytes();
        self.write(&[&[RECORD_CHUNK], &length[..], &record].concat())
    }
}

impl Writer {
    pub(super) fn new(parent: PathBuf) -> Self {
        Self { parent, open: None }
    }

    /// Writes a batch, and returns the length of the file. After an error, the file is removed, and the next batch must be
    /// whole.
    pub(super) fn write(&mut self, batch: &Batch) -> io::Result<u64> {
        self.try_write(batch).inspect_err(|_| self.remove())
    }

    fn try_write(&mut self, batch: &Batch) -> io::Result<u64> {
        if !batch.is_whole {
            let open = self.open.as_mut().ok_or_else(|| io::Error::other("there is no file"))?;
            if open.file.metadata()?.nlink() == 0 {
                return Err(io::Error::other("the file has been removed"));
            }
            open.write_batch(batch)?;
            return Ok(open.length);
        }
        let directory = Directory::private(&self.parent, DIRECTORY, true)?;
        let file = directory.create_file(&temporary())?;
        let mut open = Open { file, length: 0, hasher: Hasher::new() };
        open.write(MAGIC)?;
        open.write_batch(batch)?;
        directory.rename(&temporary(), FILE)?;
        // Former releases have a file for each type. They stay until this one is valid, so that one can go back.
        for type_of in TYPES {
            directory.remove_file(type_of.name())?;
        }
        Ok(self.open.insert(open).length)
    }

    /// Removes the file.
    pub(super) fn remove(&mut self) {
        self.open = None;
        if let Ok(directory) = Directory::private(&self.parent, DIRECTORY, false) {
            let _ = directory.remove_file(FILE); // A file that stays has the last accepted state.
            let _ = directory.remove_file(&temporary());
        }
    }
}

/// The name of a file that will replace the file.
fn temporary() -> String {
    format!("{FILE}.tmp")
}

/// Reads the file below a directory of the volume. Returns None if there is none. Fails if it is damaged, or larger than
/// `max_bytes`.
pub(super) fn read(parent: &Path, max_bytes: u64) -> io::Result<Option<(Store, Record)>> {
    let opened = Directory::private(parent, DIRECTORY, false)
        .and_then(|directory| directory.open_private_file(FILE));
    let Some(mut file) = if_exists(opened)? else { return Ok(None) };
    let length = file.metadata()?.len();
    if length > max_bytes {
        let found = format!("it has {length} bytes, expected at most {max_bytes}");
        return Err(io::Error::other(found));
    }
    let (record, end) = last_record(&file)?;
    file.rewind()?;
    let mut reader = BufReader::with_capacity(BLOCK, file.take(end));
    reader.read_exact(&mut [0; MAGIC.len()])?;
    let mut store = Store::default();
    while let Some((kind, chunk)) = next_chunk(&mut reader)? {
        if kind == BLOCK_CHUNK {
            let block = parse_block(&chunk);
            add(&mut store, block.ok_or_else(|| io::Error::other("a block is malformed"))?)?;
        }
    }
    Ok(Some((store, record)))
}

/// Returns the last record, and the length of the file up to its end.
fn last_record(file: &File) -> io::Result<(Record, u64)> {
    let mut reader = BufReader::with_capacity(BLOCK, file);
    let mut magic = [0; MAGIC.len()];
    if reader.read_exact(&mut magic).is_err() || magic != *MAGIC {
        return Err(io::Error::other("it does not begin as stored configuration does"));
    }
    let mut hasher = Hasher::new();
    let mut end = MAGIC.len() as u64;
    let mut last = None;
    hasher.update(MAGIC);
    // After a kill in the middle of a write, the rest of the file is incomplete.
    while let Some((kind, chunk)) = next_chunk(&mut reader)? {
        end += 5 + chunk.len() as u64;
        if kind == RECORD_CHUNK {
            let sealed: Sealed = serde_json::from_slice(&chunk)?;
            if sealed.crc != hasher.clone().finalize() {
                return Err(io::Error::other("its checksum is wrong"));
            }
            last = Some((sealed.record, end));
        }
        hasher.update(&[kind]);
        hasher.update(&(chunk.len() as u32).to_be_bytes());
        hasher.update(&chunk);
    }
    last.ok_or_else(|| io::Error::other("it has no complete record"))
}

/// Reads the next chunk. Returns None at the end, also if the last chunk is incomplete.
fn next_chunk(reader: &mut impl Read) -> io::Result<Option<(u8, Vec<u8>)>> {
    let mut head = [0; 5];
    match reader.read_exact(&mut head) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let [kind, length @ ..] = head;
    let length = u32::from_be_bytes(length);
    if ![BLOCK_CHUNK, RECORD_CHUNK].contains(&kind) {
        return Err(io::Error::other("it has a chunk of an unknown form"));
    }
    let mut chunk = Vec::new();
    let is_complete = reader.take(length.into()).read_to_end(&mut chunk)? == length as usize;
    Ok(is_complete.then_some((kind, chunk)))
}

/// Returns None if the block is malformed.
fn parse_block(chunk: &[u8]) -> Option<StoredBlock> {
    let (&[type_of, a, b, c, d, e, f], rest) = chunk.split_first_chunk()?;
    let count = usize::from(u16::from_be_bytes([e, f]));
    let (used, data) = rest.split_at_checked(2 * count)?;
    let (used, _) = used.as_chunks();
    let block = StoredBlock {
        type_of: *TYPES.get(usize::from(type_of))?,
        data: Arc::from(data),
        length: u32::from_be_bytes([a, b, c, d]),
        used: used.iter().map(|start| u16::from_be_bytes(*start)).collect(),
    };
    block.used.is_sorted().then_some(block)
}

/// Adds a block. Its fields that are not in use are skipped.
fn add(store: &mut Store, block: StoredBlock) -> io::Result<()> {
    let mut walker = Walker::finder(block.length.into());
    let mut fields = Vec::new();
    for part in decompress(block.data.clone(), block.length)? {
        let walked = walker.find(&part?, |ResourceField { name, range, is_removed }| {
            let start = u16::try_from(range.start);
            if start.is_ok_and(|start| block.used.binary_search(&start).is_ok()) {
                fields.push((name, (!is_removed).then_some(range)));
            }
        });
        walked.map_err(io::Error::other)?;
    }
    walker.finish().map_err(io::Error::other)?;
    store.add_block(block, fields);
    Ok(())
}
