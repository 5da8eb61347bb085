//! Tests the copy of the configuration that another container has stored, also with hostile files.

use std::os::unix::fs::{chown, symlink};

use rustix::fs::{CWD, FileType, mknodat};

use super::super::copy::copy;
use super::*;

const MAX: u64 = 1 << 20;

/// A volume with the store of another container, which has clusters and listeners, and an older one of this container,
/// which also has endpoints.
fn volume() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let volume = tempfile::tempdir().unwrap();
    let [other, own] = ["other", "own"].map(|name| volume.path().join(name));
    for (path, mark) in [(&other, "other"), (&own, "own")] {
        fs::create_dir(path).unwrap();
        let mut writer = writer(path);
        let bytes = response("1", &resources(&[("a", mark)]), &[]);
        store_accepted(&mut writer, "1", &bytes, Coverage::All);
        accept_listeners(&mut writer, 1);
        writer.write(false);
    }
    let directory = own.join(DIRECTORY);
    fs::rename(directory.join("Listener"), directory.join("ClusterLoadAssignment")).unwrap();
    (volume, other, own)
}

#[test]
fn a_container_continues_with_a_copy_of_what_the_other_one_has_stored() {
    let (_volume, other, own) = volume();
    copy(&other, &own, MAX).unwrap();
    assert_stored(&own, Some(&resources(&[("a", "other")])));
    let directory = own.join(DIRECTORY);
    assert!(directory.join("Listener").exists());
    let former = directory.join("ClusterLoadAssignment");
    assert!(!former.exists(), "it is of a former time");
    // The copy grows independently.
    let mut writer = writer(&own);
    let bytes = response("2", &resources(&[("b", "2")]), &[]);
    store_accepted(&mut writer, "2", &bytes, Coverage::Part);
    assert_stored(&own, Some(&resources(&[("a", "other"), ("b", "2")])));
    assert_stored(&other, Some(&resources(&[("a", "other")])));
    let missing = copy(&other.join("missing"), &own, MAX).unwrap_err();
    assert_eq!(missing.kind(), io::ErrorKind::NotFound);
}

#[test]
fn nothing_is_copied_of_a_store_that_another_user_may_have_changed() {
    type Change = fn(&Path);
    let changes: &[(Change, &str)] = &[
        (
            |file| mknodat(CWD, file, FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap(),
            "regular file",
        ),
        (|file| symlink("/etc/passwd", file).unwrap(), "symbolic link"),
        (|file| fs::create_dir(file).unwrap(), "directory"),
        (|file| fs::write(file, "forged").unwrap(), "access for others"),
        (
            |file| {
                let damaged = tempfile::tempdir().unwrap();
                let mut writer = writer(damaged.path());
                let bytes = response("1", &resources(&[("a", &"x".repeat(1000))]), &[]);
                store_accepted(&mut writer, "1", &bytes, Coverage::All);
                let mut content = fs::read(super::file(damaged.path())).unwrap();
                *content.last_mut().unwrap() ^= 1;
                write_private(file, &content);
            },
            "checksum",
        ),
        (|file| write_private(file, b"short"), "fill whole buffer"),
    ];
    for (change, expected) in changes {
        let (_volume, other, own) = volume();
        let file = other.join(DIRECTORY).join("Cluster");
        fs::remove_file(&file).unwrap();
        change(&file);
        let error = copy(&other, &own, MAX).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}, expected {expected}");
        assert_stored(&own, Some(&resources(&[("a", "own")])));
    }
}

fn write_private(path: &Path, content: &[u8]) {
    use std::os::unix::fs::PermissionsExt;
    fs::write(path, content).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

#[test]
fn a_store_above_the_size_limit_is_not_copied() {
    let (_volume, other, own) = volume();
    let error = copy(&other, &own, 8000).unwrap_err().to_string();
    assert!(error.contains("expected at most 8000"), "{error}");
    assert_stored(&own, Some(&resources(&[("a", "own")])));
}

#[test]
fn files_of_another_user_are_not_copied() {
    if !rustix::process::getuid().is_root() {
        eprintln!("Only root gives files away: this test is not run.");
        return;
    }
    for name in ["istio-agent-config", "istio-agent-config/Cluster"] {
        let (_volume, other, own) = volume();
        chown(other.join(name), Some(1000), Some(1000)).unwrap();
        let error = copy(&other, &own, MAX).unwrap_err().to_string();
        assert!(error.contains("user 1000"), "{error}");
    }
}
