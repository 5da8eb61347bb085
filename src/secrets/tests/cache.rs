//! Tests the certificate cache across restarts of the agent.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::*;
use crate::files::volume::Volume;
use crate::secrets::cache::CertificateCache;

pub(super) fn directory() -> Option<tempfile::TempDir> {
    let memory = Path::new("/dev/shm");
    memory.is_dir().then(|| tempfile::tempdir_in(memory).expect("a directory"))
}

pub(super) fn caching(directory: &tempfile::TempDir) -> Config {
    Config { cache: Some(Volume::named(directory.path())), ..config() }
}

/// Runs an agent until it has cached its first certificate, and returns this certificate.
async fn predecessor(directory: &tempfile::TempDir) -> Arc<Workload> {
    let mut before = start(caching(directory), Answer::Signed);
    let workload = before.first().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    workload
}

#[tokio::test(start_paused = true)]
async fn a_restarted_agent_serves_the_cached_certificate_and_renews_it_when_due() {
    let Some(directory) = directory() else { return };
    let first = predecessor(&directory).await;
    let mut fixture = start(caching(&directory), Answer::Fails(Code::Unavailable));
    let second = fixture.first().await;
    assert_eq!(fixture.authority.requests(), 0);
    assert_eq!(second.certificate.key_pem(), first.certificate.key_pem());
    assert_eq!(second.certificate.chain_pem(), first.certificate.chain_pem());
    assert_eq!(second.roots, first.roots);
    fixture.authority.set(Answer::Signed);
    let start = Instant::now();
    fixture.renewed(&second).await;
    let off = start.elapsed().abs_diff(12 * HOUR);
    assert!(off < Duration::from_secs(5), "{off:?}");
}

#[tokio::test(start_paused = true)]
async fn a_damaged_or_mismatched_cached_certificate_is_not_used() {
    type Change = fn(&Path, &mut Config);
    let changes: [(&str, Change); 7] = [
        ("another identity", |_, config| config.identity.namespace.push('x')),
        ("another key", |_, config| config.key_type = KeyType::P384),
        ("another encoding", |_, config| config.encoding = Encoding::Pkcs8),
        ("no file", |file, _| fs::remove_file(file).expect("removed")),
        ("garbage", |file, _| fs::write(file, "{}").expect("written")),
        ("a file for all", |file, _| {
            fs::set_permissions(file, Permissions::from_mode(0o644)).expect("set");
        }),
        ("a directory for all", |file, _| {
            let directory = file.parent().expect("is in one");
            fs::set_permissions(directory, Permissions::from_mode(0o755)).expect("set");
        }),
    ];
    for (what, change) in changes {
        let Some(directory) = directory() else { return };
        let first = predecessor(&directory).await;
        let file = directory.path().join("istio-agent/workload.json");
        let mode = |path: &Path| fs::metadata(path).expect("is there").permissions().mode();
        assert_eq!(mode(&file) & 0o777, 0o600);
        let mut config = caching(&directory);
        change(&file, &mut config);
        let mut fixture = start(config, Answer::Signed);
        let second = fixture.first().await;
        assert_eq!(fixture.authority.requests(), 1, "{what}");
        assert_ne!(second.certificate.key_pem(), first.certificate.key_pem(), "{what}");
    }
}

#[test]
fn nothing_is_cached_on_a_disk() {
    // The source directory is on a disk on every machine that builds this project.
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory");
    let cache = CertificateCache::new(&caching(&directory)).expect("it is named");
    let refused = cache.store(b"key", Vec::new(), SystemTime::now());
    let refused = refused.expect_err("on a disk").to_string();
    assert!(refused.contains("on a disk"), "{refused}");
    assert!(!directory.path().join("istio-agent/workload.json").exists());
}

#[tokio::test(start_paused = true)]
async fn a_certificate_that_cannot_be_cached_is_known_until_one_is() {
    let Some(directory) = directory() else { return };
    let place = directory.path().join("istio-agent");
    fs::write(&place, "in the way").expect("written");
    let mut fixture = start(caching(&directory), Answer::Signed);
    let first = fixture.first().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let problem = fixture.secrets.latest().uncached.expect("a problem");
    assert_eq!(problem.code, problem::Code::CertificateCacheUnwritable);
    fs::remove_file(&place).expect("removed");
    fixture.renewed(&first).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(fixture.secrets.latest().uncached, None);
}

#[test]
fn a_directory_repeatedly_swapped_with_a_link_causes_no_writes_outside() {
    let Some(parent) = directory() else { return };
    let outside = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory");
    fs::set_permissions(outside.path(), Permissions::from_mode(0o700)).expect("set");
    let file = outside.path().join("workload.json");
    fs::write(&file, "untouched").expect("written");
    let (place, link) = (parent.path().join("istio-agent"), parent.path().join("link"));
    std::os::unix::fs::symlink(outside.path(), &link).expect("a link");
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                let (cwd, flags) = (rustix::fs::CWD, rustix::fs::RenameFlags::EXCHANGE);
                // The exchange fails until the cache has created its directory.
                let _ = rustix::fs::renameat_with(cwd, &link, cwd, &place, flags);
            }
        });
        let mut stored = 0;
        for _ in 0..2000 {
            let cache = CertificateCache::new(&caching(&parent)).expect("it is named");
            let result = cache.store(b"key", Vec::new(), SystemTime::now());
            stored += usize::from(result.is_ok());
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(stored > 0);
    });
    assert_eq!(fs::read_to_string(&file).expect("is there"), "untouched");
    assert_eq!(fs::read_dir(outside.path()).expect("listed").count(), 1);
}
