//! Tests the unpacking of valid and invalid archives.

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use tar::EntryType;

use super::*;

const PLUGIN: Option<&str> = Some("plugin.wasm");
const MODULE: &[u8] = b"\0asm\x01\0\0\0 and so on";

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).expect("in memory");
    encoder.finish().expect("in memory")
}

/// Returns an archive entry whose header states `size`, which may differ from the size of `content`.
fn entry(name: &str, kind: EntryType, size: u64, content: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_cksum();
    let mut archive = [header.as_bytes(), content].concat();
    archive.resize(archive.len().next_multiple_of(512), 0);
    archive
}

fn file(name: &str, content: &[u8]) -> Vec<u8> {
    entry(name, EntryType::Regular, content.len() as u64, content)
}

fn plan(file: Option<&'static str>, limit: u64) -> Plan {
    Plan {
        url: String::new(),
        file,
        max_received: limit,
        max_unpacked: limit,
        directory: PathBuf::new(),
        digest: None,
    }
}

fn unpacked(bytes: &[u8], file: Option<&'static str>, limit: u64) -> Result<Vec<u8>, String> {
    let mut output = Vec::new();
    let found = plan(file, limit).unpack(&mut &*bytes, &mut output, MAX_LAYERS);
    let (size, sha256) = found.map_err(|error| with_causes(&error))?;
    let digest = aws_lc_rs::digest::digest(&SHA256, &output);
    assert_eq!((size, sha256), (output.len() as u64, hexadecimal(digest.as_ref())));
    Ok(output)
}

#[test]
fn modules_are_unpacked_from_plain_tar_and_gzip_downloads() {
    let tar = file("any/name", MODULE);
    let directory = entry("./", EntryType::Directory, 0, b"");
    let extension = entry("x", EntryType::XHeader, 10, b"10 path=a\n");
    let later = [directory, extension, tar.clone(), file("other", b"no module")].concat();
    for (what, bytes) in [
        ("plain", MODULE.to_vec()),
        ("gzip", gzip(MODULE)),
        ("tar", tar.clone()),
        ("tar.gz", gzip(&tar)),
        ("gzip in tar", file("a.gz", &gzip(MODULE))),
        ("after other entries", later),
        ("a name out of the directory", file("../../etc/passwd", MODULE)),
    ] {
        assert_eq!(unpacked(&bytes, None, 5000).as_deref(), Ok(MODULE), "{what}");
    }
}

#[test]
fn the_plugin_of_a_layer_is_found_by_its_base_name() {
    let link = |kind| entry("plugin.wasm", kind, 0, b"");
    let before = [
        file("plugin.wasm.txt", b"x"),
        link(EntryType::Link),
        link(EntryType::Symlink),
        link(EntryType::Directory),
    ]
    .concat();
    for name in ["plugin.wasm", "./plugin.wasm", "/deep/down/plugin.wasm", "../plugin.wasm"] {
        let layer = gzip(&[&before[..], &file(name, MODULE)].concat());
        assert_eq!(unpacked(&layer, PLUGIN, 10_000).as_deref(), Ok(MODULE), "{name}");
    }
    let error = unpacked(&gzip(&before), PLUGIN, 10_000);
    assert_eq!(error, Err("its archive has no plugin.wasm".to_owned()));
}

#[test]
fn decompression_bombs_and_files_that_are_not_modules_are_refused() {
    let mut broken = file("a", MODULE);
    broken[124] = b'x';
    let nested = (0..8).fold(MODULE.to_vec(), |inner, _| gzip(&inner));
    let zeros = [MODULE, &vec![0; 1 << 20]].concat();
    let bomb = "more bytes than a module may have";
    for (what, bytes, name, expected) in [
        ("gzip bomb", gzip(&zeros), None, bomb),
        ("bomb in tar", gzip(&file("a", &zeros)), None, bomb),
        ("bomb before the plugin", gzip(&file("a", &[0; 4096]).repeat(3)), PLUGIN, bomb),
        (
            "huge entry",
            gzip(&entry("plugin.wasm", EntryType::Regular, 1 << 40, MODULE)),
            PLUGIN,
            "bytes are missing",
        ),
        ("broken header", broken, None, "cannot unpack it"),
        ("cut header", file("a", MODULE)[..300].to_vec(), None, "cannot unpack it"),
        ("cut entry", file("a", MODULE)[..524].to_vec(), None, "6 bytes are missing"),
        ("cut gzip", gzip(MODULE)[..20].to_vec(), None, "cannot unpack it"),
        ("empty gzip", gzip(b""), PLUGIN, "it begins with \"\""),
        ("gzip in gzip in gzip", nested, None, "it begins with \"\\x1f\\x8b"),
        ("empty", Vec::new(), None, "it begins with \"\""),
        ("short", b"\0asm".to_vec(), None, "it begins with \"\\x00asm\""),
        ("page", b"<!DOCTYPE html>".to_vec(), None, "\"<!DOCTYPE html>\""),
        ("zip", b"PK\x03\x04........".to_vec(), None, "\"PK\\x03\\x04........\""),
        ("magic", b"\0asn\x01\0\0\0".to_vec(), None, "\"\\x00asn"),
        (
            "archive of nothing",
            [entry("a/", EntryType::Directory, 0, b""), vec![0; 512]].concat(),
            None,
            "its archive has no file",
        ),
    ] {
        let error = unpacked(&bytes, name, 5000).expect_err(what);
        assert!(error.contains(expected), "{what}: {error}");
    }
}

#[test]
fn a_full_disk_is_an_error_that_says_so() {
    let disk = std::fs::File::options().write(true).open("/dev/full");
    let mut disk = disk.expect("a device");
    let unpacked = plan(None, 5000).unpack(&mut &*MODULE, &mut disk, MAX_LAYERS);
    let text = with_causes(&unpacked.expect_err("full"));
    assert!(text.contains("cannot write it to disk: No space left"), "{text}");
}

proptest! {
    #[test]
    fn bytes_of_any_kind_do_no_harm(
        bytes in prop::collection::vec(any::<u8>(), 0..2000),
        size in any::<[u8; 12]>(),
        wraps in prop::collection::vec(any::<bool>(), 0..5),
    ) {
        let mut packed = bytes;
        for is_gzip in wraps {
            packed = if is_gzip { gzip(&packed) } else {
                let mut archive = file("plugin.wasm", &packed);
                let mut header = tar::Header::from_byte_slice(&archive[..512]).clone();
                header.as_old_mut().size = size;
                header.set_cksum();
                archive[..512].copy_from_slice(header.as_bytes());
                archive
            };
        }
        for file in [None, PLUGIN] {
            if let Ok(module) = unpacked(&packed, file, 1000) {
                prop_assert!(module.starts_with(MAGIC));
            }
        }
    }
}
