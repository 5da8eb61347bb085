//! Tests the output of certificates into a directory that it shares with a hostile application.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::fs::{CWD, Mode, RenameFlags, inotify, mkfifoat, renameat_with};
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use tempfile::TempDir;

use super::tests::{all, directory, read};
use super::{Config, NAMES, write_all};

const ROTATIONS: usize = 10_000;

/// The user id of the application.
const APPLICATION: u32 = 4321;

const SECRET: &str = "a token";

/// A shared directory, and an outside directory next to it in which every access is recorded.
struct Place {
    _parent: TempDir,
    shared: PathBuf,
    outside: PathBuf,
    watch: OwnedFd,
}

impl Place {
    fn new() -> Self {
        let parent = directory();
        let (shared, outside) = (parent.path().join("shared"), parent.path().join("outside"));
        for (path, mode) in [(&shared, 0o777), (&outside, 0o755)] {
            fs::create_dir(path).unwrap();
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        }
        fs::set_permissions(parent.path(), Permissions::from_mode(0o711)).unwrap();
        for name in NAMES {
            fs::write(outside.join(name), SECRET).unwrap();
        }
        let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
        let watch = inotify::init(flags).unwrap();
        inotify::add_watch(&watch, &outside, inotify::WatchFlags::ALL_EVENTS).unwrap();
        Self { _parent: parent, shared, outside, watch }
    }

    fn write(&self, contents: [&[u8]; 3]) -> std::io::Result<()> {
        let config = Config { directory: self.shared.clone(), readable_by_all: true };
        write_all(&config, contents)
    }

    /// Asserts that no file in the outside directory was opened, changed or removed.
    #[track_caller]
    fn assert_outside_is_untouched(&self) {
        let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
        if let Ok(event) = inotify::Reader::new(&self.watch, &mut buffer).next() {
            panic!("{:?} of {:?}", event.events(), event.file_name());
        }
        for name in NAMES {
            let content = fs::read_to_string(self.outside.join(name)).unwrap();
            assert_eq!(content, SECRET);
        }
        // Discards the events that the reads above have caused.
        while inotify::Reader::new(&self.watch, &mut buffer).next().is_ok() {}
    }
}

#[test]
fn a_link_in_place_of_a_file_is_neither_read_nor_published() {
    let place = Place::new();
    for name in NAMES {
        symlink(place.outside.join(name), place.shared.join(name)).unwrap();
    }
    for name in NAMES {
        let leftover = place.shared.join(format!("{name}.tmp"));
        symlink(place.outside.join(name), leftover).unwrap();
    }
    place.write(all("new")).unwrap();
    place.assert_outside_is_untouched();
    assert_eq!(read(&place.shared), ["new"; 3]);
}

#[test]
fn hostile_links_expose_nothing_outside_in_10_000_rotations() {
    let place = Place::new();
    let (done, attacks) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (mut rotations, mut written) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if geteuid().is_root() {
                become_application();
            }
            while !done.load(Ordering::Relaxed) {
                let succeeds = attack(&place).is_ok();
                attacks.fetch_add(usize::from(succeeds), Ordering::Relaxed);
            }
        });
        // The number of successful writes and attacks depends on the scheduler. The loop ends once there are enough.
        while rotations < ROTATIONS
            || (rotations < 20 * ROTATIONS
                && (written < ROTATIONS / 10 || attacks.load(Ordering::Relaxed) < ROTATIONS / 10))
        {
            // The directory is cleared from time to time, as an operator would do it.
            if rotations % 20 == 0 {
                clear(&place.shared);
            }
            written += usize::from(place.write(all(&rotations.to_string())).is_ok());
            rotations += 1;
        }
        done.store(true, Ordering::Relaxed);
    });
    place.assert_outside_is_untouched();
    let attacks = attacks.into_inner();
    println!("{written} of {rotations} rotations written, {attacks} attacks");
    assert!(written >= ROTATIONS / 10 && attacks >= ROTATIONS / 10);
}

/// Removes everything in the shared directory. Links are not followed.
fn clear(shared: &Path) {
    for entry in fs::read_dir(shared).unwrap() {
        let path = entry.unwrap().path();
        // The application may already have removed the entry.
        let _ = fs::remove_file(&path);
        let _ = fs::remove_dir_all(&path);
    }
}

/// Changes this thread alone to the user of the application.
fn become_application() {
    let (user, group) = (Uid::from_raw(APPLICATION), Gid::from_raw(APPLICATION));
    set_thread_groups(&[]).unwrap();
    set_thread_res_gid(group, group, group).unwrap();
    set_thread_res_uid(user, user, user).unwrap();
}

/// Makes a random change in the shared directory. It fails if the application lacks the permission.
fn attack(place: &Place) -> std::io::Result<()> {
    let entries = fs::read_dir(&place.shared)?.filter_map(|entry| Some(entry.ok()?.path()));
    let fixed =
        [NAMES[0], NAMES[1], NAMES[2], "key.pem.tmp", "cert-chain.pem.tmp", "root-cert.pem.tmp"];
    let mut paths: Vec<_> = fixed.map(|name| place.shared.join(name)).to_vec();
    paths.extend(entries);
    let any = || paths[fastrand::usize(..paths.len())].clone();
    let (path, other) = (any(), any());
    let targets = ["../outside", "../outside/key.pem", "../outside/root-cert.pem", "..", "key.pem"];
    let target = targets[fastrand::usize(..targets.len())];
    match fastrand::u8(..20) {
        0..5 => fs::remove_file(path),
        5..12 => fs::remove_dir_all(path),
        12 => fs::rename(path, other),
        13..15 => Ok(renameat_with(CWD, path, CWD, other, RenameFlags::EXCHANGE)?),
        15..18 => {
            let _ = fs::remove_file(&path);
            symlink(target, path)
        }
        18 => {
            DirBuilder::new().mode(0o777).create(&path)?;
            NAMES.iter().try_for_each(|name| symlink(place.outside.join(name), path.join(name)))
        }
        _ => {
            let _ = fs::remove_file(&path);
            if fastrand::bool() {
                return Ok(mkfifoat(CWD, path, Mode::from_raw_mode(0o666))?);
            }
            let mut options = OpenOptions::new();
            options.write(true).create_new(true).mode(0o666);
            options.open(path).map(drop)
        }
    }
}
