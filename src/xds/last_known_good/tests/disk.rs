//! Tests a store whose directory is deleted, full, read-only or writable by other users.

use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::process::Command;

use rustix::process::geteuid;
use tempfile::TempDir;

use super::*;

/// A mounted file system in memory. It is unmounted when it is dropped.
struct Mount(TempDir);

impl Mount {
    /// Mounts a file system with these options. Returns None if this process lacks the permission.
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

/// Gives the writer a response with cluster `a`, and its ACK.
fn store_one(writer: &mut Writer, nonce: &str, content: &str) {
    let bytes = response(nonce, &resources(&[("a", content)]), &[]);
    store_accepted(writer, nonce, &bytes, Coverage::All);
}

#[test]
fn on_a_full_disk_nothing_is_kept_until_there_is_space() {
    // The first file system has too little space for the response; the second one also has too few inodes.
    for options in ["size=2m", "size=2m,nr_inodes=4"] {
        let Some(mount) = Mount::new(options) else {
            return;
        };
        let parent = mount.0.path();
        let mut writer = writer(parent);
        store_one(&mut writer, "1", "1");
        store_one(&mut writer, "2", &"2".repeat(4 << 20));
        assert_stored(parent, None);
        assert_eq!(writer.shared.failures.get(), 1, "{options}");
        let directory = fs::read_dir(parent.join(DIRECTORY)).unwrap();
        assert_eq!(directory.count(), 0);
        assert!(mount.mount("remount,size=100m,nr_inodes=100"));
        begin(&mut writer, 1, 1, IDENTITY);
        store_one(&mut writer, "3", "3");
        assert_stored(parent, Some(&resources(&[("a", "3")])));
    }
}

#[test]
fn on_a_disk_that_becomes_read_only_the_last_stored_response_stays() {
    let Some(mount) = Mount::new("size=100m") else {
        return;
    };
    let parent = mount.0.path();
    store_one(&mut writer(parent), "1", "1");
    assert!(mount.mount("remount,ro"));
    store_one(&mut writer(parent), "2", "2");
    let directory = Directory::open(&parent.join(DIRECTORY)).unwrap();
    assert!(directory.read_private("Cluster").is_ok());
    assert!(mount.mount("remount,rw"));
    assert_stored(parent, Some(&resources(&[("a", "1")])));
    store_one(&mut writer(parent), "3", "3");
    assert_stored(parent, Some(&resources(&[("a", "3")])));
}

#[test]
fn a_deleted_directory_is_created_again_for_the_next_stream() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path());
    store_one(&mut writer, "1", "1");
    fs::remove_dir_all(parent.path().join(DIRECTORY)).unwrap();
    store_one(&mut writer, "2", "2");
    assert_stored(parent.path(), None);
    assert_eq!(writer.shared.failures.get(), 1);
    begin(&mut writer, 1, 1, IDENTITY);
    store_one(&mut writer, "3", "3");
    let expected = resources(&[("a", "3")]);
    assert_stored(parent.path(), Some(&expected));
}

#[test]
fn a_directory_repeatedly_swapped_with_a_link_causes_no_writes_outside() {
    let parent = tempfile::tempdir().unwrap();
    let outside = parent.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::set_permissions(&outside, PermissionsExt::from_mode(0o700)).unwrap();
    let names = ["Cluster", "manifest", "workload.json"];
    for name in names {
        fs::write(outside.join(name), "untouched").unwrap();
    }
    let (place, link) = (parent.path().join(DIRECTORY), parent.path().join("link"));
    symlink(&outside, &link).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                let cwd = rustix::fs::CWD;
                let _ = rustix::fs::renameat_with(cwd, &link, cwd, &place, flags);
            }
        });
        for number in 0..500 {
            store_one(&mut writer(parent.path()), "1", &number.to_string());
            let _ = stored_clusters(parent.path());
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let mut found: Vec<_> =
        fs::read_dir(&outside).unwrap().map(|it| it.unwrap().file_name()).collect();
    found.sort();
    assert_eq!(found, names);
    for name in names {
        assert_eq!(fs::read_to_string(outside.join(name)).unwrap(), "untouched");
    }
}

#[test]
fn files_that_other_users_can_write_and_links_are_not_used() {
    let parent = tempfile::tempdir().unwrap();
    store_one(&mut writer(parent.path()), "1", "1");
    let directory = parent.path().join(DIRECTORY);
    let refused = |what: &str| {
        let error = stored_clusters(parent.path()).expect_err(what).to_string();
        assert!(
            ["expected", "symbolic", "Not a directory"].iter().any(|it| error.contains(it)),
            "{what}: {error}"
        );
    };
    for path in [file(parent.path()), directory.clone()] {
        let mode = fs::metadata(&path).unwrap().permissions();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        refused("mode");
        fs::set_permissions(&path, mode).unwrap();
        if geteuid().is_root() {
            lchown(&path, Some(1), None).unwrap();
            refused("owner");
            if path == directory {
                let writer = writer(parent.path());
                assert_eq!(writer.shared.failures.get(), 1);
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
    assert!(stored_clusters(parent.path()).unwrap().is_some());
}
