use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use rustix::fs::{Mode, OFlags, inotify, openat};
use tempfile::TempDir;
use tokio::task::JoinSet;

use super::writer::{DATA, STALE};
use super::*;
use crate::metrics::Registry;
use crate::secrets::fake_authority::{FakeAuthority, clock, config};
use crate::secrets::files;

const ROTATIONS: usize = 1000;

/// In memory where there is such a place: every rotation is synced.
pub(super) fn directory() -> TempDir {
    let shared = Path::new("/dev/shm");
    match shared.is_dir() {
        true => tempfile::tempdir_in(shared).unwrap(),
        false => tempfile::tempdir().unwrap(),
    }
}

fn writer(directory: &TempDir, readable_by_all: bool) -> Writer {
    Writer::new(Config {
        directory: directory.path().to_owned(),
        readable_by_all,
    })
}

/// Without files for any name.
pub(in crate::secrets) fn no_files() -> Files {
    let config = files::Config {
        workload: None,
        system_roots: "/none".into(),
        debounce: Duration::ZERO,
    };
    files::new(config, clock(), &Registry::default()).0
}

pub(super) fn all(content: &str) -> [&[u8]; 3] {
    [content.as_bytes(); 3]
}

pub(super) fn read(directory: impl AsRef<Path>) -> [String; 3] {
    NAMES.map(|name| fs::read_to_string(directory.as_ref().join(name)).unwrap())
}

fn entries(directory: &TempDir) -> usize {
    fs::read_dir(directory.path()).unwrap().count()
}

#[test]
fn modes_depend_on_the_configuration_and_not_on_earlier_files() {
    for (readable_by_all, file, parent) in [(false, 0o600, 0o700), (true, 0o644, 0o755)] {
        let directory = directory();
        let mut writer = writer(&directory, readable_by_all);
        writer.write([b"key", b"chain", b"roots"]).unwrap();
        assert_eq!(read(&directory), ["key", "chain", "roots"]);
        let mode = |path: &str| directory.path().join(path).metadata().unwrap().mode() & 0o777;
        assert!(NAMES.iter().all(|name| mode(name) == file));
        assert_eq!(mode(DATA), parent);
    }
}

#[test]
fn present_content_is_not_written_again_also_by_another_agent() {
    let directory = directory();
    writer(&directory, false).write(all("a")).unwrap();
    let link = || fs::read_link(directory.path().join(DATA)).unwrap();
    let first = link();
    let mut second = writer(&directory, false);
    second.write(all("a")).unwrap();
    assert_eq!(link(), first);
    for content in ["b", "c", "d"] {
        second.write(all(content)).unwrap();
        assert_ne!(link(), first);
        assert_eq!(read(&directory), [content; 3]);
    }
    // Three names, the link, what it leads to and what it led to before.
    assert_eq!(entries(&directory), 6);
}

#[test]
fn plain_files_are_replaced_and_stale_leftovers_cleared() {
    let directory = directory();
    for name in NAMES {
        fs::write(directory.path().join(name), "plain").unwrap();
    }
    let stale = directory.path().join("..istio-certs-1");
    fs::create_dir(&stale).unwrap();
    let long_ago = SystemTime::now() - 2 * STALE;
    File::open(&stale).unwrap().set_modified(long_ago).unwrap();
    let mut writer = writer(&directory, false);
    writer.write(all("new")).unwrap();
    assert_eq!(read(&directory), ["new"; 3]);
    assert!(!stale.exists());
}

#[test]
fn who_opens_the_link_once_never_sees_a_mixture() {
    let directory = directory();
    let mut writer = writer(&directory, false);
    writer.write(all("0")).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut seen = 0;
            while !done.load(Ordering::Relaxed) || seen == 0 {
                let flags = OFlags::DIRECTORY | OFlags::RDONLY;
                let Ok(data) = File::open(directory.path())
                    .and_then(|parent| Ok(openat(parent, DATA, flags, Mode::empty())?))
                else {
                    continue;
                };
                let file = |name| {
                    let fd = openat(&data, name, OFlags::RDONLY, Mode::empty())?;
                    io::read_to_string(File::from(fd))
                };
                // Two rotations on, what was opened has gone: opened again.
                if let (Ok(key), Ok(chain)) = (file(NAMES[0]), file(NAMES[1])) {
                    assert_eq!(key, chain);
                    seen += 1;
                }
            }
        });
        for rotation in 1..=ROTATIONS {
            writer.write(all(&rotation.to_string())).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        reading.join().unwrap();
    });
    assert_eq!(entries(&directory), 6);
}

#[test]
fn a_reader_of_the_plain_names_never_sees_a_mixture_after_an_event() {
    let directory = directory();
    let mut writer = writer(&directory, false);
    writer.write(all("0")).unwrap();
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
    let events = inotify::WatchFlags::MOVED_TO;
    inotify::add_watch(&watch, directory.path(), events).unwrap();
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    for rotation in 1..=ROTATIONS {
        let rotation = rotation.to_string();
        writer.write(all(&rotation)).unwrap();
        let mut reader = inotify::Reader::new(&watch, &mut buffer);
        let event = reader.next().unwrap();
        // One event stands for all three files.
        assert_eq!(event.file_name().unwrap().to_bytes(), DATA.as_bytes());
        assert!(reader.is_buffer_empty());
        assert_eq!(read(&directory), [rotation.as_str(); 3]);
    }
}

#[test]
fn a_write_that_fails_leaves_the_files_as_they_were() {
    let directory = directory();
    let mut writer = writer(&directory, false);
    writer.write(all("a")).unwrap();
    // Nothing can be made into a link that is a directory.
    let key = directory.path().join(NAMES[0]);
    fs::remove_file(&key).unwrap();
    fs::create_dir(&key).unwrap();
    let before = entries(&directory);
    for _ in 0..3 {
        assert!(writer.write(all("b")).is_err());
    }
    fs::remove_dir(&key).unwrap();
    for name in &NAMES[1..] {
        let content = fs::read_to_string(directory.path().join(name)).unwrap();
        assert_eq!(content, "a", "{name}");
    }
    assert_eq!(entries(&directory), before - 1, "something was left behind");
    writer.write(all("b")).unwrap();
    assert_eq!(read(&directory), ["b"; 3]);
}

#[tokio::test(start_paused = true)]
async fn writes_every_rotation_without_any_reader_and_waits_for_its_directory() {
    let place = directory();
    let config_of_output = Config {
        directory: place.path().join("certs"),
        readable_by_all: false,
    };
    let clock = clock();
    let authority = FakeAuthority::new(&clock);
    let registry = Registry::default();
    let (mut secrets, renewal) = crate::secrets::new(config(), authority, clock, &registry);
    let mut tasks = JoinSet::new();
    tasks.spawn(renewal);
    let files = no_files();
    tasks.spawn(run(config_of_output.clone(), Some(secrets.clone()), files));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!config_of_output.directory.exists());
    fs::create_dir(&config_of_output.directory).unwrap();
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_secs(120)).await;
        let workload = secrets.latest().workload.unwrap();
        let file = |name| fs::read_to_string(config_of_output.directory.join(name)).unwrap();
        assert_eq!(file(NAMES[0]).as_bytes(), workload.certificate.key_pem());
        assert_eq!(file(NAMES[1]).as_bytes(), *workload.certificate.chain_pem());
        assert_eq!(file(NAMES[2]).as_bytes(), *workload.roots.pem());
        while secrets
            .latest()
            .workload
            .is_some_and(|now| Arc::ptr_eq(&now, &workload))
        {
            secrets.changed().await;
        }
    }
}
