//! Archives made by hand, good and bad.

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;

use super::*;

const MODULE: &[u8] = b"\0asm\x01\0\0\0 and so on";

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).expect("in memory");
    encoder.finish().expect("in memory")
}

/// An entry of an archive whose header states `size`.
fn entry(name: &str, kind: u8, size: &str, content: &[u8]) -> Vec<u8> {
    let mut header = vec![0; BLOCK];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[124..124 + size.len()].copy_from_slice(size.as_bytes());
    header[156] = kind;
    header[USTAR].copy_from_slice(b"ustar");
    header.extend_from_slice(content);
    header.resize(header.len().next_multiple_of(BLOCK), 0);
    header
}

fn file(name: &str, content: &[u8]) -> Vec<u8> {
    entry(name, b'0', &format!("{:011o}", content.len()), content)
}

fn unpacked(bytes: &[u8], packing: Packing, limit: u64) -> Result<Vec<u8>, String> {
    let mut output = Vec::new();
    let found = unpack(&mut &*bytes, packing, limit, &mut output);
    let (size, sha256) = found.map_err(|error| crate::lifecycle::with_causes(&error))?;
    let digest = aws_lc_rs::digest::digest(&SHA256, &output);
    assert_eq!(
        (size, sha256),
        (output.len() as u64, hexadecimal(digest.as_ref()))
    );
    Ok(output)
}

#[test]
fn modules_come_out_of_every_packing_of_an_http_server() {
    let tar = file("any/name", MODULE);
    let directory = entry("./", b'5', "0", b"");
    let extension = entry("x", b'x', "00000000013", b"11 path=a\n");
    let later = [
        directory,
        extension,
        tar.clone(),
        file("other", b"no module"),
    ]
    .concat();
    for (what, bytes) in [
        ("plain", MODULE.to_vec()),
        ("gzip", gzip(MODULE)),
        ("tar", tar.clone()),
        ("tar.gz", gzip(&tar)),
        ("gzip in tar", file("a.gz", &gzip(MODULE))),
        ("after other entries", later),
        (
            "a name out of the directory",
            file("../../etc/passwd", MODULE),
        ),
    ] {
        assert_eq!(
            unpacked(&bytes, Packing::Detect, 5000).as_deref(),
            Ok(MODULE),
            "{what}"
        );
    }
}

#[test]
fn the_plugin_of_a_layer_is_found_by_its_base_name() {
    let link = |kind| entry("plugin.wasm", kind, "0", b"");
    let before = [
        file("plugin.wasm.txt", b"x"),
        link(b'1'),
        link(b'2'),
        link(b'5'),
    ]
    .concat();
    for name in [
        "plugin.wasm",
        "./plugin.wasm",
        "/deep/down/plugin.wasm",
        "../plugin.wasm",
    ] {
        let layer = gzip(&[&before[..], &file(name, MODULE)].concat());
        assert_eq!(
            unpacked(&layer, Packing::Layer, 10_000).as_deref(),
            Ok(MODULE),
            "{name}"
        );
    }
    for archive in [before, Vec::new(), vec![0; 1024]] {
        let error = unpacked(&gzip(&archive), Packing::Layer, 10_000);
        assert_eq!(error, Err("it has no plugin.wasm".to_owned()));
    }
}

#[test]
fn bombs_and_what_is_no_module_are_refused() {
    let huge = |size: &str| entry("plugin.wasm", b'0', size, b"");
    let nested = (0..8).fold(MODULE.to_vec(), |inner, _| gzip(&inner));
    let zeros = [MODULE, &vec![0; 1 << 20]].concat();
    let bomb = "more than 5000 bytes once unpacked";
    for (what, bytes, packing, expected) in [
        ("gzip bomb", gzip(&zeros), Packing::Detect, bomb),
        (
            "bomb in tar",
            gzip(&file("a", &zeros)),
            Packing::Detect,
            "bytes, over 5000",
        ),
        (
            "bomb before the plugin",
            gzip(&file("a", &[0; 4096]).repeat(3)),
            Packing::Layer,
            bomb,
        ),
        (
            "huge entry",
            gzip(&huge("77777777777")),
            Packing::Layer,
            "8589934591 bytes, over 5000",
        ),
        (
            "binary size",
            huge("\u{80}"),
            Packing::Detect,
            "broken header",
        ),
        (
            "size that is none",
            huge("x"),
            Packing::Detect,
            "broken header",
        ),
        (
            "cut header",
            file("a", MODULE)[..300].to_vec(),
            Packing::Detect,
            "broken header",
        ),
        (
            "cut entry",
            file("a", MODULE)[..BLOCK + 12].to_vec(),
            Packing::Detect,
            "is cut off",
        ),
        (
            "cut gzip",
            gzip(MODULE)[..20].to_vec(),
            Packing::Detect,
            "cannot unpack it",
        ),
        (
            "gzip in gzip in gzip",
            nested,
            Packing::Detect,
            "it begins with \"\\x1f\\x8b",
        ),
        ("empty", Vec::new(), Packing::Detect, "it begins with \"\""),
        (
            "short",
            b"\0asm".to_vec(),
            Packing::Detect,
            "it begins with \"\\x00asm\"",
        ),
        (
            "page",
            b"<!DOCTYPE html>".to_vec(),
            Packing::Detect,
            "\"<!DOCTYPE html>\"",
        ),
        (
            "zip",
            b"PK\x03\x04........".to_vec(),
            Packing::Detect,
            "\"PK\\x03\\x04........\"",
        ),
        (
            "magic",
            b"\0asn\x01\0\0\0".to_vec(),
            Packing::Plain,
            "\"\\x00asn",
        ),
        (
            "packed artifact",
            gzip(MODULE),
            Packing::Plain,
            "\"\\x1f\\x8b",
        ),
        (
            "plain layer",
            MODULE.to_vec(),
            Packing::Layer,
            "cannot unpack it",
        ),
        (
            "archive of nothing",
            [entry("a/", b'5', "0", b""), vec![0; 512]].concat(),
            Packing::Detect,
            "no file",
        ),
    ] {
        let error = unpacked(&bytes, packing, 5000).expect_err(what);
        assert!(error.contains(expected), "{what}: {error}");
    }
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
                archive[124..136].copy_from_slice(&size);
                archive
            };
        }
        for packing in [Packing::Plain, Packing::Detect, Packing::Layer] {
            if let Ok(module) = unpacked(&packed, packing, 1000) {
                prop_assert!(module.starts_with(MAGIC));
            }
        }
    }
}
