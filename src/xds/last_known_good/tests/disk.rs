//! A directory that vanishes, is full, read-only or not ours alone.

use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::process::Command;

use rustix::process::geteuid;
use tempfile::TempDir;

use super::*;

/// A file system in memory, until it is dropped.
struct Mount(TempDir);

impl Mount {
    /// None if we may not mount.
    fn new(options: &str) -> Option<Self> {
        let mount = Self(tempfile::tempdir().unwrap());
        mount.mount(options).then_some(mount)
    }

    fn mount(&self, options: &str) -> bool {
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", options, "tmpfs"]);
        command.arg(self.0.path()).status().unwrap().success()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).output(); // It may not be mounted.
    }
}

/// Hands a response in, and its ACK; the first error.
fn try_keep(writer: &mut Writer, nonce: &str, content: &str) -> io::Result<()> {
    let bytes = response(Protocol::Delta, nonce, &resources(&[("a", content)]), &[]);
    for op in [
        WriteOp::Bytes(vec![bytes.clone()]),
        complete(nonce, &bytes, true),
        answered(nonce, true),
    ] {
        writer.take(1, op)?;
    }
    Ok(())
}

#[test]
fn on_a_full_disk_a_type_is_not_kept_until_there_is_space() {
    // One lets the agent see the end of the space, the other the end of the files.
    for (options, large) in [("size=66m", 4 << 20), ("size=66m,nr_inodes=3", 1)] {
        let Some(mount) = Mount::new(options) else {
            return;
        };
        let (status, identity) = (Status::new(&Registry::default()), IDENTITY.to_owned());
        let mut writer = Writer::new(mount.0.path().to_owned(), status.clone());
        let protocol = Protocol::Delta;
        writer
            .take(1, WriteOp::Node { protocol, identity })
            .unwrap();
        if large > 1 {
            try_keep(&mut writer, "1", "1").unwrap();
        }
        try_keep(&mut writer, "2", &"2".repeat(large)).unwrap();
        assert_eq!(kept(mount.0.path(), Protocol::Delta).unwrap(), None);
        assert_eq!(status.failures.get(), 1, "{options}");
        assert!(mount.mount("remount,size=100m,nr_inodes=100"));
        try_keep(&mut writer, "3", "3").unwrap();
        let expected = Some(resources(&[("a", "3")]));
        assert_eq!(kept(mount.0.path(), Protocol::Delta).unwrap(), expected);
    }
}

#[test]
fn on_a_disk_that_becomes_read_only_the_last_response_that_counted_stays() {
    let Some(mount) = Mount::new("size=100m") else {
        return;
    };
    let mut first = writer(mount.0.path(), Protocol::Delta);
    try_keep(&mut first, "1", "1").unwrap();
    assert!(mount.mount("remount,ro"));
    let error = try_keep(&mut first, "2", "2").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem);
    let expected = Some(resources(&[("a", "1")]));
    assert_eq!(kept(mount.0.path(), Protocol::Delta).unwrap(), expected);
    assert!(mount.mount("remount,rw"));
    try_keep(&mut writer(mount.0.path(), Protocol::Delta), "3", "3").unwrap();
    let expected = Some(resources(&[("a", "3")]));
    assert_eq!(kept(mount.0.path(), Protocol::Delta).unwrap(), expected);
}

#[test]
fn a_directory_that_vanishes_is_made_anew_for_the_next_stream() {
    let parent = tempfile::tempdir().unwrap();
    let (sender, ops) = mpsc::channel(10);
    let status = Status::new(&Registry::default());
    let writer = Writer::new(parent.path().to_owned(), status.clone());
    let thread =
        std::thread::spawn(move || writer.run(ops, &AtomicBool::new(false), &Ended::default()));
    let send = |op| sender.blocking_send((1, op)).unwrap();
    let bytes = response(Protocol::Delta, "1", &resources(&[("a", "1")]), &[]);
    for directory_is_there in [true, false, true] {
        let (protocol, identity) = (Protocol::Delta, IDENTITY.to_owned());
        send(WriteOp::Node { protocol, identity });
        while sender.capacity() < 10 {
            std::thread::yield_now();
        }
        if !directory_is_there {
            while fs::remove_dir_all(parent.path().join("istio-agent-config")).is_err() {}
        }
        send(WriteOp::Bytes(vec![bytes.clone()]));
        send(complete("1", &bytes, true));
        send(answered("1", true));
    }
    drop(sender);
    thread.join().unwrap();
    assert!(kept(parent.path(), Protocol::Delta).unwrap().is_some());
    assert!(status.failures.get() >= 1);
}

#[test]
fn too_large_a_response_and_a_full_disk_are_refused() {
    let parent = tempfile::tempdir().unwrap();
    let store = Store::open(parent.path()).unwrap();
    store.has_space_for(0, 1).unwrap();
    let error = store.has_space_for(store::MAX_BYTES, 1).unwrap_err();
    assert!(error.to_string().contains("would be kept"), "{error}");
    let found = rustix::fs::statvfs(parent.path()).unwrap();
    let free = found.f_bavail * found.f_frsize;
    if free < store::MAX_BYTES {
        let error = store.has_space_for(0, free).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    }
}

#[test]
fn what_another_user_can_write_and_links_are_not_used() {
    let parent = tempfile::tempdir().unwrap();
    let bytes = response(Protocol::Delta, "1", &resources(&[("a", "1")]), &[]);
    keep(
        &mut writer(parent.path(), Protocol::Delta),
        "1",
        &bytes,
        true,
    );
    let directory = parent.path().join("istio-agent-config");
    let refused = |what: &str| {
        let error = kept(parent.path(), Protocol::Delta)
            .expect_err(what)
            .to_string();
        assert!(
            error.contains("expected") || error.contains("symbolic"),
            "{what}: {error}"
        );
    };
    let entries = fs::read_dir(&directory).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.push(directory.clone());
    for path in paths {
        let mode = fs::metadata(&path).unwrap().permissions();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        refused("mode");
        fs::set_permissions(&path, mode).unwrap();
        if geteuid().is_root() {
            lchown(&path, Some(1), None).unwrap();
            refused("owner");
            if path == directory {
                Store::open(parent.path()).unwrap_err();
            }
            lchown(&path, Some(0), None).unwrap();
        }
        let aside = parent.path().join("aside");
        fs::rename(&path, &aside).unwrap();
        symlink(&aside, &path).unwrap();
        refused("link");
        fs::remove_file(&path).unwrap();
        fs::rename(&aside, &path).unwrap();
    }
    assert!(kept(parent.path(), Protocol::Delta).unwrap().is_some());
}
