//! A store that is damaged, or whose writer is killed.

use std::fs;
use std::io::{self, BufRead as _};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use proptest::prelude::*;

use super::super::segment::{Index, Segment};
use super::{Resources, files, keep, kept, resources, response, writer};
use crate::xds::Protocol;
use crate::xds::intercept::frame;

/// A store with two files of clusters.
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
    assert_eq!(files(parent), 3);
    found
}

#[test]
fn a_store_truncated_at_any_byte_is_not_used() {
    let parent = tempfile::tempdir().unwrap();
    store_of_two(parent.path());
    for name in ["manifest", "0", "1"] {
        let path = parent.path().join("istio-agent-config").join(name);
        let content = fs::read(&path).unwrap();
        for length in (0..content.len()).rev() {
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(length as u64).unwrap();
            kept(parent.path(), Protocol::Delta).expect_err(name);
        }
        fs::write(&path, content).unwrap();
    }
    kept(parent.path(), Protocol::Delta).unwrap().unwrap();
}

#[test]
fn a_store_with_a_flipped_bit_is_not_used() {
    let parent = tempfile::tempdir().unwrap();
    store_of_two(parent.path());
    for name in ["manifest", "0", "1"] {
        let path = parent.path().join("istio-agent-config").join(name);
        let content = fs::read(&path).unwrap();
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        for (at, byte) in content.iter().enumerate() {
            let flipped = [byte ^ (1 << (at % 8))];
            file.write_all_at(&flipped, at as u64).unwrap();
            kept(parent.path(), Protocol::Delta).expect_err(name);
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
            let segment = Segment {
                file: 0,
                length: content.len() as u64,
                crc: crc32fast::hash(content),
            };
            for protocol in [Protocol::Sotw, Protocol::Delta] {
                let _ = Index::read(protocol, std::slice::from_ref(&segment), |_| fs::File::open(&path));
            }
        }
    }
}

/// In the process that is killed: where to keep, and which generation to begin with.
const KEEPER: &str = "KEPT_BY_A_PROCESS_THAT_IS_KILLED";

/// Resources of one generation, 40 KB.
fn generation(number: u64) -> Resources {
    let content = format!("{number:8}").repeat(50);
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
        std::thread::sleep(Duration::from_millis(fastrand::u64(0..60)));
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
