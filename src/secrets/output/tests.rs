use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use tempfile::TempDir;
use tokio::task::JoinSet;

use super::*;
use crate::metrics::Registry;
use crate::secrets::fake_authority::{FakeAuthority, clock, config};
use crate::secrets::files;

const ROTATIONS: usize = 1000;

/// Creates a directory, in memory if possible, because every rotation is synced to disk.
pub(super) fn directory() -> TempDir {
    let shared = Path::new("/dev/shm");
    if shared.is_dir() {
        tempfile::tempdir_in(shared).unwrap()
    } else {
        tempfile::tempdir().unwrap()
    }
}

fn config_of(directory: &TempDir) -> Config {
    Config { directory: directory.path().to_owned(), readable_by_all: false }
}

/// Returns secret files of which none exists.
pub(in crate::secrets) fn no_files() -> Files {
    let config =
        files::Config { workload: None, system_roots: "/none".into(), debounce: Duration::ZERO };
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
fn plain_files_links_and_leftovers_are_replaced() {
    let directory = directory();
    let path = |name: &str| directory.path().join(name);
    fs::write(path(NAMES[0]), "plain").unwrap();
    symlink("..data/cert-chain.pem", path(NAMES[1])).unwrap();
    symlink("elsewhere", path("root-cert.pem.tmp")).unwrap();
    write_all(&config_of(&directory), all("new")).unwrap();
    assert_eq!(read(&directory), ["new"; 3]);
    let is_plain = |name: &&str| path(name).symlink_metadata().unwrap().is_file();
    assert!(NAMES.iter().all(is_plain));
    assert_eq!(entries(&directory), 3);
}

#[test]
fn a_reader_finds_each_file_complete() {
    let directory = directory();
    let config = config_of(&directory);
    let content = |rotation: usize| rotation.to_string().repeat(10_000);
    write_all(&config, all(&content(0))).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for read in read(&directory) {
                    let one = read.len() / 10_000;
                    assert!(one > 0 && read == read[..one].repeat(10_000));
                }
            }
        });
        for rotation in 1..=ROTATIONS {
            write_all(&config, all(&content(rotation))).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        reading.join().unwrap();
    });
    assert_eq!(entries(&directory), 3);
}

#[test]
fn a_failed_write_leaves_the_other_files_and_no_temporary_files() {
    let directory = directory();
    let config = config_of(&directory);
    write_all(&config, all("a")).unwrap();
    // A directory in place of a file makes the write fail, because a file cannot be renamed over a directory.
    let key = directory.path().join(NAMES[0]);
    fs::remove_file(&key).unwrap();
    fs::create_dir(&key).unwrap();
    for _ in 0..3 {
        assert!(write_all(&config, all("b")).is_err());
    }
    fs::remove_dir(&key).unwrap();
    for name in &NAMES[1..] {
        let content = fs::read_to_string(directory.path().join(name)).unwrap();
        assert_eq!(content, "a", "{name}");
    }
    assert_eq!(entries(&directory), 2, "something was left behind");
    write_all(&config, all("b")).unwrap();
    assert_eq!(read(&directory), ["b"; 3]);
}

#[tokio::test(start_paused = true)]
async fn writes_every_rotation_without_any_reader_and_waits_for_its_directory() {
    let place = directory();
    let config_of_output = Config { directory: place.path().join("certs"), readable_by_all: false };
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
        while secrets.latest().workload.is_some_and(|now| Arc::ptr_eq(&now, &workload)) {
            secrets.changed().await;
        }
    }
}
