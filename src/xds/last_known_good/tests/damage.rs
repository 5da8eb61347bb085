//! A store that is damaged, or whose writer is killed.

use std::fs;
use std::io::{self, BufRead as _};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use proptest::prelude::*;

use super::super::file::{Index, KeptFile};
use super::{Resources, files, keep, kept, resources, response, writer};
use crate::xds::Protocol;
use crate::xds::intercept::frame;

/// A store with two responses of clusters.
fn store_of_two(parent: &Path) -> Resources {
    let mut writer = writer(parent, Protocol::Delta);
    let first: Resources = (0..40)
        .map(|i| (format!("name {i}"), "1".repeat(30)))
        .collect();
    keep(
        &mut writer,
        "1",
        &response(Protocol::Delta, "1", &first, &[]),
        true,
    );
    let second = response(
        Protocol::Delta,
        "2",
        &resources(&[("a", "2")]),
        &["name 3".to_owned()],
    );
    keep(&mut writer, "2", &second, false);
    let found = kept(parent, Protocol::Delta).unwrap().unwrap();
    assert_eq!(found.len(), 40);
    assert_eq!(files(parent), 2);
    found
}

/// The files of a store.
fn paths(parent: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(parent.join("istio-agent-config")).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_store_truncated_at_any_byte_is_not_used() {
    let parent = tempfile::tempdir().unwrap();
    store_of_two(parent.path());
    for path in paths(parent.path()) {
        let content = fs::read(&path).unwrap();
        for length in (0..content.len()).rev() {
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(length as u64).unwrap();
            kept(parent.path(), Protocol::Delta).unwrap_err();
        }
        fs::write(&path, content).unwrap();
    }
    kept(parent.path(), Protocol::Delta).unwrap().unwrap();
}

#[test]
fn a_store_with_a_flipped_bit_is_not_used() {
    let parent = tempfile::tempdir().unwrap();
    store_of_two(parent.path());
    for path in paths(parent.path()) {
        let content = fs::read(&path).unwrap();
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        for (at, byte) in content.iter().enumerate() {
            let flipped = [byte ^ (1 << (at % 8))];
            file.write_all_at(&flipped, at as u64).unwrap();
            kept(parent.path(), Protocol::Delta).unwrap_err();
            file.write_all_at(&[*byte], at as u64).unwrap();
        }
    }
    kept(parent.path(), Protocol::Delta).unwrap().unwrap();
}

proptest! {
    #[test]
    fn arbitrary_files_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("0");
        // With its head, so that the walk comes to the fields.
        for content in [&bytes[..], &frame(&bytes)] {
            fs::write(&path, content).unwrap();
            let kept = KeptFile {
                length: content.len() as u64,
                crc: crc32fast::hash(content),
                ..KeptFile::default()
            };
            for protocol in [Protocol::Sotw, Protocol::Delta] {
                let _ = Index::read(protocol, &kept, fs::File::open(&path).unwrap());
            }
        }
    }
}

/// In the process that is killed: where to keep, and which generation to begin with.
const KEEPER: &str = "KEPT_BY_A_PROCESS_THAT_IS_KILLED";

/// Bytes of a generation, 40,000 if it is not set. With 100 MB the test takes minutes.
const BYTES: &str = "KILL_TEST_BYTES";

#[expect(clippy::disallowed_methods, reason = "for a longer run by hand")]
fn bytes() -> usize {
    let bytes = std::env::var(BYTES)
        .ok()
        .map(|bytes| bytes.parse().unwrap());
    bytes.unwrap_or(40_000)
}

/// Resources of one generation.
fn generation(number: u64) -> Resources {
    let content = format!("{number:8}").repeat(bytes() / 800);
    (0..100).map(|i| (i.to_string(), content.clone())).collect()
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "the process that is killed is this test again"
)]
fn after_a_kill_at_any_moment_the_store_is_one_that_was_committed() {
    if let Ok(arguments) = std::env::var(KEEPER) {
        let (first, parent) = arguments.split_once(' ').unwrap();
        let mut writer = writer(Path::new(parent), Protocol::Delta);
        println!("{KEEPER}");
        for number in first.parse().unwrap().. {
            let whole = response(Protocol::Delta, "whole", &generation(number), &[]);
            keep(&mut writer, "whole", &whole, number % 5 == 0);
            for part in 0..3 {
                let content = resources(&[("part", &format!("{number} {part}"))]);
                let part = response(Protocol::Delta, "part", &content, &[]);
                keep(&mut writer, "part", &part, false);
            }
        }
    }
    let parent = tempfile::tempdir().unwrap();
    let mut newest = 0;
    for _ in 0..200 {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "--nocapture",
                concat!(
                    module_path!(),
                    "::after_a_kill_at_any_moment_the_store_is_one_that_was_committed"
                )
                .split_once("::")
                .unwrap()
                .1,
            ])
            .env(KEEPER, format!("{newest} {}", parent.path().display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = io::BufReader::new(process.stdout.take().unwrap());
        assert!(output.lines().any(|line| line.unwrap().contains(KEEPER)));
        std::thread::sleep(Duration::from_millis(fastrand::u64(
            0..60 + bytes() as u64 / 15_000,
        )));
        process.kill().unwrap();
        process.wait().unwrap();
        let Some(mut found) = kept(parent.path(), Protocol::Delta).unwrap() else {
            assert_eq!(newest, 0);
            continue;
        };
        found.remove("part");
        let number: u64 = found["0"][..8].trim().parse().unwrap();
        assert!(found == generation(number), "a mixture");
        assert!(number >= newest, "{number} after {newest}");
        newest = number;
    }
    assert!(newest > 20, "only {newest} generations");
}
