//! Files that come, change, break and go, and what subscribers hear of it.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use rcgen::{CertificateParams, KeyPair};
use tempfile::TempDir;
use tokio::task::JoinSet;

use super::*;

/// No step waits for it; it only ends a test that hangs.
const LIMIT: Duration = Duration::from_secs(20);

struct Fixture {
    directory: TempDir,
    registry: Registry,
    files: Files,
    _keeper: JoinSet<()>,
}

/// Certificate and key, as PEM.
fn generated() -> (String, String) {
    let key = KeyPair::generate().expect("generates");
    let certificate = CertificateParams::default().self_signed(&key);
    (certificate.expect("signs").pem(), key.serialize_pem())
}

/// A keeper for a directory where the workload's files may be.
fn start(directory: TempDir, is_only_source: bool) -> Fixture {
    let registry = Registry::default();
    let config = Config {
        workload: Some(WorkloadFiles {
            chain: directory.path().join("cert-chain.pem"),
            key: directory.path().join("key.pem"),
            roots: directory.path().join("root-cert.pem"),
            is_only_source,
        }),
        system_roots: directory.path().join("system.pem"),
        debounce: Duration::from_millis(20),
    };
    let (files, keeper) = new(config, Clock::system(), &registry);
    let mut tasks = JoinSet::new();
    tasks.spawn(keeper);
    Fixture {
        directory,
        registry,
        files,
        _keeper: tasks,
    }
}

fn empty() -> Fixture {
    start(tempfile::tempdir().unwrap(), false)
}

impl Fixture {
    fn write(&self, name: &str, content: &str) {
        write(self.directory.path(), name, content);
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    fn cert(&self, chain: &str, key: &str) -> Name {
        Name::FileCert {
            chain: self.path(chain),
            key: self.path(key),
        }
    }

    fn root(&self, name: &str) -> Name {
        Name::FileRoot(self.path(name))
    }

    fn want(&self, names: &[&Name]) -> Subscription {
        let mut subscription = self.files.subscribe();
        subscription.want(names.iter().map(|&name| name.clone()).collect());
        subscription
    }
}

fn write(directory: &Path, name: &str, content: &str) {
    fs::write(directory.join("draft"), content).unwrap();
    fs::rename(directory.join("draft"), directory.join(name)).unwrap();
}

/// What is found once it is as it should be.
async fn once(of: &Subscription, name: &Name, is: impl Fn(&Found) -> bool) -> Found {
    let reached = async {
        loop {
            let found = of.found(name);
            if is(&found) {
                return found;
            }
            of.changed().await;
        }
    };
    tokio::time::timeout(LIMIT, reached).await.expect("in time")
}

async fn chain_is(of: &Subscription, name: &Name, expected: &str) {
    let is = |found: &Found| {
        matches!(found, Found::There(secret)
            if matches!(&secret.content, Content::Pair { chain, .. } if chain == expected))
    };
    once(of, name, is).await;
}

async fn missing(of: &Subscription, name: &Name) -> String {
    match once(of, name, |found| matches!(found, Found::Missing(_))).await {
        Found::Missing(error) => error.to_string(),
        _ => panic!("is missing"),
    }
}

async fn rest() {
    tokio::time::sleep(Duration::from_millis(150)).await;
}

#[tokio::test]
async fn a_pair_is_served_when_it_matches_and_kept_while_it_does_not() {
    let fixture = empty();
    let name = fixture.cert("cert", "key");
    let subscription = fixture.want(&[&name]);
    assert!(missing(&subscription, &name).await.contains("cannot read"));
    let ((first, first_key), (second, second_key)) = (generated(), generated());
    fixture.write("cert", &first);
    fixture.write("key", &first_key);
    chain_is(&subscription, &name, &first).await;

    fixture.write("cert", &second);
    rest().await;
    chain_is(&subscription, &name, &first).await;
    let page = fixture.registry.render();
    assert!(
        page.contains("istio_agent_num_file_secret_failures_total "),
        "{page}"
    );
    // The key alone changes now.
    fixture.write("key", &second_key);
    chain_is(&subscription, &name, &second).await;
    for broken in [
        "",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    ] {
        fixture.write("cert", broken);
        rest().await;
        chain_is(&subscription, &name, &second).await;
    }
    fs::remove_file(fixture.path("cert")).unwrap();
    rest().await;
    chain_is(&subscription, &name, &second).await;
    fixture.write("cert", &second);
    fixture.write("cert", &first);
    fixture.write("key", &first_key);
    chain_is(&subscription, &name, &first).await;
    assert!(!format!("{:?}", subscription.found(&name)).contains("PRIVATE"));
}

#[tokio::test]
async fn the_same_content_again_is_no_change() {
    let fixture = empty();
    let name = fixture.root("root");
    let (pem, _) = generated();
    fixture.write("root", &pem);
    let subscription = fixture.want(&[&name]);
    let is_there = |found: &Found| matches!(found, Found::There(_));
    let Found::There(first) = once(&subscription, &name, is_there).await else {
        panic!("is there")
    };
    for _ in 0..3 {
        fixture.write("root", &pem);
        rest().await;
    }
    let Found::There(last) = subscription.found(&name) else {
        panic!("is there")
    };
    assert!(Arc::ptr_eq(&first, &last));
}

#[tokio::test]
async fn the_bundle_of_the_mesh_joins_the_workloads_roots_and_no_others() {
    let directory = tempfile::tempdir().unwrap();
    let (own, _) = generated();
    write(directory.path(), "root-cert.pem", &own);
    let fixture = start(directory, true);
    let (name, by_path) = (Name::RootCa, fixture.root("root-cert.pem"));
    let subscription = fixture.want(&[&name, &by_path]);
    let count = |found: &Found| match found {
        Found::There(secret) => match &secret.content {
            Content::Roots { pem, .. } => {
                let pem = String::from_utf8_lossy(pem);
                pem.matches("BEGIN CERTIFICATE").count()
            }
            Content::Pair { .. } => panic!("no roots"),
        },
        _ => 0,
    };
    once(&subscription, &name, |found| count(found) == 1).await;
    let (mesh, _) = generated();
    assert!(fixture.files.trust("no PEM").is_err());
    let told = fixture.want(&[&name]);
    for (is_new, expected) in [(true, 2), (false, 2)] {
        assert_eq!(fixture.files.trust(&format!("{mesh}{own}")), Ok(is_new));
        once(&subscription, &name, |found| count(found) == expected).await;
    }
    let telling = tokio::time::timeout(LIMIT, told.changed());
    telling.await.expect("is told");
    let two = [subscription.found(&name), subscription.found(&name)];
    let [Found::There(one), Found::There(other)] = &two else {
        panic!("are there")
    };
    assert!(Arc::ptr_eq(one, other), "merged again for nothing");
    fixture.write("root-cert.pem", &format!("{own}{}", generated().0));
    once(&subscription, &name, |found| count(found) == 3).await;
    assert_eq!(count(&subscription.found(&by_path)), 2);
    assert_eq!(fixture.files.trust(""), Ok(true));
    once(&subscription, &name, |found| count(found) == 2).await;
}

#[tokio::test]
async fn of_a_bundle_every_good_certificate_is_taken_wherever_it_stands() {
    let fixture = empty();
    let name = fixture.root("root");
    let ((one, _), (two, key)) = (generated(), generated());
    let broken = "-----BEGIN CERTIFICATE-----\n%%%%\n-----END CERTIFICATE-----\n";
    let cut = "-----BEGIN CERTIFICATE-----\nMIIB\n";
    let bundle = format!("# comment\n{cut}{one}{broken}noise\n{key}{two}{cut}");
    fixture.write("root", &bundle);
    let subscription = fixture.want(&[&name]);
    let found = once(&subscription, &name, |found| {
        matches!(found, Found::There(_))
    })
    .await;
    let Found::There(secret) = found else {
        panic!("is there")
    };
    let Content::Roots { pem, broken } = &secret.content else {
        panic!("no roots");
    };
    let text = std::str::from_utf8(pem).unwrap().replace('\r', "");
    assert_eq!(text.matches("BEGIN CERTIFICATE").count(), 2);
    assert!(
        !text.contains("PRIVATE") && *broken == 3,
        "{broken}: {text}"
    );
}

#[tokio::test]
async fn odd_files_are_refused_with_a_reason_that_holds_nothing_of_them() {
    let fixture = empty();
    let (pem, key) = generated();
    fixture.write("cert", &pem);
    fixture.write("key", &key);
    fixture.write("other-key", &generated().1);
    fixture.write("secret", "hunter2");
    fixture.write(
        "odd-key",
        "-----BEGIN PRIVATE KEY-----\nhunter2=\n-----END PRIVATE KEY-----\n",
    );
    fs::create_dir(fixture.path("directory")).unwrap();
    fixture.write("huge", &"x".repeat(5 << 20));
    rustix::fs::mknodat(
        rustix::fs::CWD,
        fixture.path("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    for (chain, key, expected) in [
        ("cert", "other-key", "does not belong"),
        ("cert", "secret", "holds no private key in 7 bytes"),
        ("cert", "odd-key", "of no kind that can be used"),
        ("cert", "cert", "holds no private key"),
        ("key", "key", "holds no certificate"),
        ("secret", "key", "holds no certificate"),
        ("directory", "key", "not a regular file"),
        ("pipe", "key", "not a regular file"),
        ("cert/none", "key", "cannot read"),
        ("huge", "key", "more than"),
    ] {
        let name = fixture.cert(chain, key);
        let subscription = fixture.want(&[&name]);
        let reason = missing(&subscription, &name).await;
        assert!(reason.contains(expected), "{chain} {key}: {reason}");
        assert!(!reason.contains("hunter2"), "{reason}");
    }
}

#[tokio::test]
async fn the_workloads_files_go_first_once_they_are_there_and_for_good() {
    let fixture = empty();
    let names = [&Name::Default, &Name::RootCa];
    let subscription = fixture.want(&names);
    for name in names {
        assert!(matches!(subscription.found(name), Found::NoFile));
    }
    let (pem, key) = generated();
    fixture.write("cert-chain.pem", &pem);
    fixture.write("key.pem", &key);
    chain_is(&subscription, &Name::Default, &pem).await;
    assert!(matches!(subscription.found(&Name::RootCa), Found::NoFile));
    for file in ["cert-chain.pem", "key.pem"] {
        fs::remove_file(fixture.path(file)).unwrap();
    }
    rest().await;
    chain_is(&subscription, &Name::Default, &pem).await;
}

#[tokio::test]
async fn files_that_are_there_at_the_start_and_no_good_are_waited_for_until_they_go() {
    let directory = tempfile::tempdir().unwrap();
    let ((pem, key), (_, other)) = (generated(), generated());
    write(directory.path(), "cert-chain.pem", &pem);
    write(directory.path(), "key.pem", &other);
    write(directory.path(), "root-cert.pem", "");
    let fixture = start(directory, false);
    let subscription = fixture.want(&[&Name::Default, &Name::RootCa]);
    missing(&subscription, &Name::Default).await;
    // An empty file is none.
    assert!(matches!(subscription.found(&Name::RootCa), Found::NoFile));
    fixture.write("root-cert.pem", "nonsense");
    rest().await;
    assert!(matches!(subscription.found(&Name::RootCa), Found::NoFile));
    fs::remove_file(fixture.path("key.pem")).unwrap();
    let gone = |found: &Found| matches!(found, Found::NoFile);
    once(&subscription, &Name::Default, gone).await;
    fixture.write("key.pem", &key);
    chain_is(&subscription, &Name::Default, &pem).await;
}

#[tokio::test]
async fn files_that_are_there_at_the_start_are_known_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let (pem, key) = generated();
    write(directory.path(), "cert-chain.pem", &pem);
    write(directory.path(), "key.pem", &key);
    let fixture = start(directory, true);
    assert!(fixture.files.have(&Name::Default));
    assert!(!fixture.files.have(&Name::RootCa));
    let found = fixture.want(&[&Name::RootCa]).found(&Name::RootCa);
    assert!(matches!(found, Found::Missing(_)), "{found:?}");
}

#[tokio::test]
async fn hundreds_of_pairs_are_read_and_one_that_is_not_there_keeps_none_waiting() {
    let fixture = empty();
    let (pem, key) = generated();
    for n in (0..500).filter(|n| *n != 250) {
        fs::write(fixture.path(&format!("{n}.pem")), &pem).unwrap();
        fs::write(fixture.path(&format!("{n}.key")), &key).unwrap();
    }
    let names: Vec<Name> = (0..500)
        .map(|n| fixture.cert(&format!("{n}.pem"), &format!("{n}.key")))
        .collect();
    let subscription = fixture.want(&names.iter().collect::<Vec<_>>());
    for (n, name) in names.iter().enumerate() {
        let found = once(&subscription, name, |found| {
            !matches!(found, Found::Pending)
        })
        .await;
        assert_eq!(matches!(found, Found::There(_)), n != 250, "{n}");
    }
}

/// The way to secrets of `directory`, for a keeper of one's own.
fn files_of(directory: &TempDir, shared: Arc<Shared>) -> Files {
    Files {
        config: Arc::new(Config {
            workload: None,
            system_roots: directory.path().join("system.pem"),
            debounce: Duration::ZERO,
        }),
        shared,
        mesh: Mesh::default(),
        merged: Arc::default(),
        claimed: [false; 2],
    }
}

#[tokio::test(start_paused = true)]
async fn a_path_that_cannot_be_watched_is_counted_once_and_read_again_all_the_same() {
    let fixture = empty();
    fixture.write("file", "no directory");
    let name = fixture.root("file/root.pem");
    let subscription = fixture.want(&[&name]);
    missing(&subscription, &name).await;
    let failures = "istio_agent_num_file_watcher_failures_total 1\n";
    assert!(fixture.registry.render().contains(failures));
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(fixture.registry.render().contains(failures));
    fs::remove_file(fixture.path("file")).unwrap();
    fs::create_dir(fixture.path("file")).unwrap();
    write(
        &fixture.directory.path().join("file"),
        "root.pem",
        &generated().0,
    );
    let before = tokio::time::Instant::now();
    once(&subscription, &name, |found| {
        matches!(found, Found::There(_))
    })
    .await;
    assert!(before.elapsed() <= Duration::from_secs(6));
}

#[tokio::test(start_paused = true)]
async fn a_keeper_without_a_watch_looks_at_files_that_need_not_be_there_and_tries_again() {
    let directory = tempfile::tempdir().unwrap();
    let shared = Arc::new(Shared::default());
    let mut keeper = Keeper::unwatched(shared.clone(), Metrics::new(&Registry::default()));
    let files = files_of(&directory, shared);
    let path = directory.path().join("system.pem");
    keeper.pin(Source::Roots(path), true);
    assert!(!keeper.is_watching());
    let mut tasks = JoinSet::new();
    let name = Name::SystemRoots;
    let mut subscription = files.subscribe();
    subscription.want(BTreeSet::from([name.clone()]));
    tasks.spawn(keeper.run());
    missing(&subscription, &name).await;
    write(directory.path(), "system.pem", &generated().0);
    once(&subscription, &name, |found| {
        matches!(found, Found::There(_))
    })
    .await;

    let shared = Arc::new(Shared::default());
    let mut keeper = Keeper::unwatched(shared, Metrics::new(&Registry::default()));
    keeper.poll_unwatched();
    assert!(keeper.is_watching());
}

#[tokio::test]
async fn a_name_there_was_no_room_for_is_admitted_when_others_have_gone() {
    let directory = tempfile::tempdir().unwrap();
    let shared = Arc::new(Shared::default());
    let files = files_of(&directory, shared.clone());
    let many = (0..table::MOST_SOURCES).map(|n| Name::FileRoot(n.to_string()));
    let mut greedy = files.subscribe();
    greedy.want(many.collect());
    let name = Name::SystemRoots;
    let (mut late, mut gone) = (files.subscribe(), files.subscribe());
    for subscription in [&mut late, &mut gone] {
        subscription.want(BTreeSet::from([name.clone()]));
    }
    let reason = missing(&late, &name).await;
    assert!(reason.contains("10000 secrets are read"), "{reason}");
    drop((greedy, gone));
    assert!(shared.sweep().is_empty());
    assert_eq!(shared.sweep().len(), table::MOST_SOURCES);
    once(&late, &name, |found| matches!(found, Found::Pending)).await;
    assert!(
        shared
            .fresh()
            .contains(&Source::Roots(directory.path().join("system.pem")))
    );
}

#[tokio::test(start_paused = true)]
async fn what_the_watches_miss_is_read_within_a_minute_and_what_nobody_wants_is_forgotten() {
    let shared = Arc::new(Shared::default());
    let registry = Registry::default();
    let keeper = Keeper::unwatched(shared.clone(), Metrics::new(&registry));
    let directory = tempfile::tempdir().unwrap();
    let files = files_of(&directory, shared.clone());
    let mut tasks = JoinSet::new();
    tasks.spawn(keeper.run());
    let mut subscription = files.subscribe();
    subscription.want(BTreeSet::from([Name::SystemRoots]));
    let name = Name::SystemRoots;
    missing(&subscription, &name).await;
    write(directory.path(), "system.pem", &generated().0);
    once(&subscription, &name, |found| {
        matches!(found, Found::There(_))
    })
    .await;
    drop(subscription);
    assert!(shared.is_polled());
    let forgotten = async {
        while shared.is_polled() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    let limit = Duration::from_secs(300);
    tokio::time::timeout(limit, forgotten)
        .await
        .expect("is forgotten");
}

proptest! {
    /// Whatever the files hold ends in an error or in use, and never in a pair that does not match.
    #[test]
    fn arbitrary_files_do_no_harm(
        chain in pem_like(),
        key in pem_like(),
        cut in 0..2000_usize,
        flip in 0..2000_usize,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let (good, good_key) = generated();
        let mut damaged = good.clone().into_bytes();
        if let Some(byte) = damaged.get_mut(flip) {
            *byte ^= 1;
        }
        damaged.truncate(cut);
        let pair = |chain: &[u8], key: &[u8]| {
            let [chain_path, key_path] = ["c", "k"].map(|name| directory.path().join(name));
            fs::write(&chain_path, chain).unwrap();
            fs::write(&key_path, key).unwrap();
            Source::Pair { chain: chain_path, key: key_path }.read()
        };
        prop_assert!(pair(good.as_bytes(), good_key.as_bytes()).is_ok());
        prop_assert!(pair(&chain, &key).is_err());
        prop_assert!(pair(good.as_bytes(), &key).is_err());
        // What is damaged may still be read, so only the absence of a panic counts.
        drop(pair(&damaged, good_key.as_bytes()));
        let path = directory.path().join("r");
        fs::write(&path, [&chain[..], &damaged, &key].concat()).unwrap();
        drop(Source::Roots(path).read());
    }
}

fn pem_like() -> impl Strategy<Value = Vec<u8>> {
    let label = prop_oneof![
        "CERTIFICATE",
        "PRIVATE KEY",
        "EC PRIVATE KEY",
        "RSA PRIVATE KEY",
        "X"
    ];
    let block = (label, "[A-Za-z0-9+/=\n ]{0,200}").prop_map(|(label, text)| {
        format!("-----BEGIN {label}-----\n{text}\n-----END {label}-----\n").into_bytes()
    });
    prop_oneof![block, proptest::collection::vec(any::<u8>(), 0..300)]
}
