//! Tests the store after damage to its files, and after its writer was killed.

use std::fs;
use std::io::{self, BufRead as _};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use proptest::prelude::*;

use super::super::DIRECTORY;
use super::super::file::{Header, Index};
use super::{
    CLUSTER, Coverage, HELD_RESOURCE, IDENTITY, Resources, assert_stored, file, resources,
    response, store_accepted, stored_clusters, writer,
};
use crate::xds::request::frame;

/// Stores two responses of clusters in a file, and returns the stored resources.
fn store_two_responses(parent: &Path) -> Resources {
    let mut writer = writer(parent);
    let first: Resources = (0..40).map(|i| (format!("name {i}"), "1".repeat(30))).collect();
    let first = response("1", &first, &[]);
    store_accepted(&mut writer, "1", &first, Coverage::All);
    let second = resources(&[("a", "2")]);
    let second = response("2", &second, &["name 3".to_owned()]);
    store_accepted(&mut writer, "2", &second, Coverage::Part);
    let found = stored_clusters(parent).unwrap().unwrap();
    assert_eq!(found.len(), 40);
    found
}

#[test]
fn a_file_truncated_at_any_byte_is_not_used() {
    let parent = tempfile::tempdir().unwrap();
    store_two_responses(parent.path());
    let path = file(parent.path());
    let opened = fs::OpenOptions::new().write(true).open(&path).unwrap();
    for length in (0..opened.metadata().unwrap().len()).rev() {
        opened.set_len(length).unwrap();
        stored_clusters(parent.path()).unwrap_err();
    }
}

#[test]
fn a_file_with_changed_bytes_is_not_used_and_ends_no_writer() {
    let parent = tempfile::tempdir().unwrap();
    let found = store_two_responses(parent.path());
    let path = file(parent.path());
    let content = fs::read(&path).unwrap();
    for number in 0..10_000 {
        let mut damaged = content.clone();
        // First each byte is changed alone, then ranges of bytes.
        let at = number % content.len();
        let length = if number < content.len() { 1 } else { fastrand::usize(1..200) };
        for byte in damaged.iter_mut().skip(at).take(length) {
            *byte ^= fastrand::u8(1..);
        }
        fs::write(&path, &damaged).unwrap();
        stored_clusters(parent.path()).unwrap_err();
    }
    let mut writer = writer(parent.path());
    let bytes = response("3", &found, &[]);
    store_accepted(&mut writer, "3", &bytes, Coverage::All);
    assert_stored(parent.path(), Some(&found));
}

#[test]
fn names_in_stored_files_are_never_used_as_paths() {
    let parent = tempfile::tempdir().unwrap();
    let outside = parent.path().join("outside");
    fs::write(&outside, "untouched").unwrap();
    store_two_responses(parent.path());
    let directory = parent.path().join(DIRECTORY);
    for name in [outside.to_str().unwrap(), "../outside", "/dev/zero", "../.."] {
        let json = serde_json::json!({"format": 2, "identity": IDENTITY, "types": {CLUSTER: {
            "version": "", "accepted": 0, "file": {"name": name, "length": 9, "crc": 0, "first": 9},
        }}});
        let sum = crc32fast::hash(json.to_string().as_bytes());
        fs::write(directory.join("manifest"), format!("{sum:08x}\n{json}")).unwrap();
        // A header of the current format, with additional members. The manifest above has an earlier format.
        let header = serde_json::json!({"identity": name, "version": name, "current": 0,
            "length": u64::MAX, "crc": 0, "first": u64::MAX, "name": name, "file": name});
        let text = format!("{:4092}", header.to_string());
        let sum = crc32fast::hash(text.as_bytes()).to_be_bytes();
        fs::write(file(parent.path()), [&sum, text.as_bytes()].concat()).unwrap();
        fs::set_permissions(file(parent.path()), PermissionsExt::from_mode(0o600)).unwrap();
        stored_clusters(parent.path()).unwrap_err();
        let mut writer = writer(parent.path());
        let bytes = response("1", &resources(&[("a", "1")]), &[]);
        store_accepted(&mut writer, "1", &bytes, Coverage::All);
        assert_eq!(fs::read_to_string(&outside).unwrap(), "untouched");
        let expected = resources(&[("a", "1")]);
        assert_stored(parent.path(), Some(&expected));
    }
}

proptest! {
    #[test]
    fn arbitrary_files_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("0");
        for content in [&bytes[..], &frame(&bytes)] {
            let header = serde_json::json!({"identity": "", "version": "", "current": 0,
                "length": content.len(), "crc": crc32fast::hash(content), "first": 0});
            let text = format!("{:4092}", header.to_string());
            let sum = crc32fast::hash(text.as_bytes()).to_be_bytes();
            fs::write(&path, [&sum, text.as_bytes(), content].concat()).unwrap();
            let file = fs::File::open(&path).unwrap();
            let header = Header::read(&file).unwrap();
            let _ = Index::read(header, file);
        }
    }
}

/// The environment variable with the arguments of the process that is killed: the first generation to store, and the
/// directory.
const CHILD_ARGUMENTS: &str = "KEPT_BY_A_PROCESS_THAT_IS_KILLED";

/// The environment variable with the size of a generation in bytes; 40,000 if it is not set. With 100 MB the test takes
/// minutes.
const BYTES: &str = "KILL_TEST_BYTES";

#[expect(clippy::disallowed_methods, reason = "for a longer run by hand")]
fn bytes() -> usize {
    let bytes = std::env::var(BYTES).ok().map(|bytes| bytes.parse().unwrap());
    bytes.unwrap_or(40_000)
}

/// Returns the resources of a generation.
fn generation(number: u64) -> Resources {
    let content = format!("{number:8}").repeat(bytes() / 800);
    (0..100).map(|i| (i.to_string(), content.clone())).collect()
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the process that is killed is this test again")]
fn after_a_kill_at_any_moment_the_store_is_one_that_was_committed() {
    if let Ok(arguments) = std::env::var(CHILD_ARGUMENTS) {
        let (first, parent) = arguments.split_once(' ').unwrap();
        let mut writer = writer(Path::new(parent));
        println!("{CHILD_ARGUMENTS}");
        for number in first.parse().unwrap().. {
            let whole = response("whole", &generation(number), &[]);
            let coverage = match number % 5 {
                0 => Coverage::All,
                _ => Coverage::Initial,
            };
            store_accepted(&mut writer, "whole", &whole, coverage);
            for part in 0..3 {
                let content = resources(&[(HELD_RESOURCE, &format!("{number} {part}"))]);
                let part = response("part", &content, &[]);
                store_accepted(&mut writer, "part", &part, Coverage::Part);
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
            .env(CHILD_ARGUMENTS, format!("{newest} {}", parent.path().display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = io::BufReader::new(process.stdout.take().unwrap());
        assert!(output.lines().any(|line| line.unwrap().contains(CHILD_ARGUMENTS)));
        std::thread::sleep(Duration::from_millis(fastrand::u64(0..60 + bytes() as u64 / 15_000)));
        process.kill().unwrap();
        process.wait().unwrap();
        let Some(mut found) = stored_clusters(parent.path()).unwrap() else {
            assert_eq!(newest, 0);
            continue;
        };
        found.remove(HELD_RESOURCE);
        let number: u64 = found["0"][..8].trim().parse().unwrap();
        assert!(found == generation(number), "a mixture");
        assert!(number >= newest, "{number} after {newest}");
        newest = number;
    }
    assert!(newest > 20, "only {newest} generations");
}
