//! Tests what subscribers get when secret files are created, changed, damaged and removed.

mod arbitrary;
mod unwatched;

use std::fs;
use std::path::Path;

use rcgen::{CertificateParams, KeyPair};
use tempfile::TempDir;
use tokio::task::JoinSet;

use super::*;

/// The time limit of a step. It only ends a test that hangs.
const LIMIT: Duration = Duration::from_secs(20);

struct Fixture {
    directory: TempDir,
    registry: Registry,
    files: Files,
    _watcher: JoinSet<()>,
}

/// Generates a self-signed certificate and its key. Returns both as PEM.
fn generated() -> (String, String) {
    let key = KeyPair::generate().expect("generates");
    let certificate = CertificateParams::default().self_signed(&key);
    (certificate.expect("signs").pem(), key.serialize_pem())
}

/// Starts a watcher. `directory` contains the workload's files, if there are any.
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
    let (files, watcher) = new(config, Clock::system(), &registry);
    let mut tasks = JoinSet::new();
    tasks.spawn(watcher);
    Fixture { directory, registry, files, _watcher: tasks }
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
        Name::FileCert { chain: self.path(chain), key: self.path(key) }
    }

    fn root(&self, name: &str) -> Name {
        Name::FileRoot(self.path(name))
    }

    fn want(&self, names: &[&Name]) -> Subscription {
        let mut subscription = Subscription::new(None, &self.files);
        subscription.want(names.iter().map(|&name| name.clone()).collect());
        subscription
    }
}

fn write(directory: &Path, name: &str, content: &str) {
    fs::write(directory.join("draft"), content).unwrap();
    fs::rename(directory.join("draft"), directory.join(name)).unwrap();
}

/// Waits until the state of a secret satisfies `is`, and returns this state.
async fn wait_for_state(
    subscription: &mut Subscription,
    name: &Name,
    is: impl Fn(&SecretState) -> bool,
) -> SecretState {
    let reached = async {
        loop {
            let found = subscription.get(name);
            if is(&found) {
                return found;
            }
            subscription.changed().await;
        }
    };
    tokio::time::timeout(LIMIT, reached).await.expect("in time")
}

async fn chain_is(subscription: &mut Subscription, name: &Name, expected: &str) {
    let is = |state: &SecretState| match state {
        SecretState::Available(Secret::Certificate(pair)) => pair.chain_pem() == expected,
        _ => false,
    };
    wait_for_state(subscription, name, is).await;
}

async fn roots_are(subscription: &mut Subscription, name: &Name, expected: &str) {
    let is = |state: &SecretState| match state {
        SecretState::Available(Secret::Roots(roots)) => roots.pem() == expected,
        _ => false,
    };
    wait_for_state(subscription, name, is).await;
}

fn is_available(state: &SecretState) -> bool {
    matches!(state, SecretState::Available(_))
}

/// Returns true if the secret has no files, so that the authority has to sign it.
fn is_unsigned(state: &SecretState) -> bool {
    matches!(state, SecretState::Unsigned)
}

async fn roots(subscription: &mut Subscription, name: &Name) -> Roots {
    match wait_for_state(subscription, name, is_available).await {
        SecretState::Available(Secret::Roots(roots)) => roots,
        other => panic!("no roots: {other:?}"),
    }
}

async fn wait_for_problem(subscription: &mut Subscription, name: &Name) -> Arc<Problem> {
    match wait_for_state(subscription, name, |found| matches!(found, SecretState::Unusable(_)))
        .await
    {
        SecretState::Unusable(problem) => problem,
        _ => panic!("is missing"),
    }
}

/// Waits longer than the debounce time of the watcher, so that it has read changed files.
async fn wait_out_debounce() {
    tokio::time::sleep(Duration::from_millis(150)).await;
}

#[tokio::test]
async fn a_pair_is_served_when_it_matches_and_kept_otherwise() {
    let fixture = empty();
    let name = fixture.cert("cert", "key");
    let mut subscription = fixture.want(&[&name]);
    let problem = wait_for_problem(&mut subscription, &name).await;
    assert_eq!(problem.code, Code::SecretFileMissing);
    assert_eq!(problem.subject, fixture.path("cert"));
    let ((first, first_key), (second, second_key)) = (generated(), generated());
    fixture.write("cert", &first);
    fixture.write("key", &first_key);
    chain_is(&mut subscription, &name, &first).await;

    fixture.write("cert", &second);
    wait_out_debounce().await;
    chain_is(&mut subscription, &name, &first).await;
    let page = fixture.registry.render();
    assert!(page.contains("istio_agent_num_file_secret_failures_total "), "{page}");
    // Now only the key changes; the new chain that matches it is on disk already.
    fixture.write("key", &second_key);
    chain_is(&mut subscription, &name, &second).await;
    for broken in ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        fixture.write("cert", broken);
        wait_out_debounce().await;
        chain_is(&mut subscription, &name, &second).await;
    }
    fs::remove_file(fixture.path("cert")).unwrap();
    wait_out_debounce().await;
    chain_is(&mut subscription, &name, &second).await;
    fixture.write("cert", &second);
    fixture.write("cert", &first);
    fixture.write("key", &first_key);
    chain_is(&mut subscription, &name, &first).await;
    assert!(!format!("{:?}", subscription.get(&name)).contains("PRIVATE"));
}

#[tokio::test]
async fn the_same_content_again_is_no_change() {
    let fixture = empty();
    let name = fixture.root("root");
    let (pem, _) = generated();
    fixture.write("root", &pem);
    let mut subscription = fixture.want(&[&name]);
    let first = roots(&mut subscription, &name).await;
    for _ in 0..3 {
        fixture.write("root", &pem);
        wait_out_debounce().await;
    }
    let last = roots(&mut subscription, &name).await;
    assert_eq!(first.pem().as_ptr(), last.pem().as_ptr());
}

#[tokio::test]
async fn the_bundle_of_the_mesh_joins_the_workloads_roots_and_no_others() {
    let directory = tempfile::tempdir().unwrap();
    let (own, _) = generated();
    write(directory.path(), "root-cert.pem", &own);
    let fixture = start(directory, true);
    let (name, by_path) = (Name::RootCa, fixture.root("root-cert.pem"));
    let mut subscription = fixture.want(&[&name, &by_path]);
    let count = |state: &SecretState| match state {
        SecretState::Available(Secret::Roots(roots)) => {
            let pem = String::from_utf8_lossy(roots.pem());
            pem.matches("BEGIN CERTIFICATE").count()
        }
        _ => 0,
    };
    wait_for_state(&mut subscription, &name, |found| count(found) == 1).await;
    let (mesh, _) = generated();
    assert!(fixture.files.set_mesh_bundle("no PEM").is_err());
    let mut notified = fixture.want(&[&name]);
    for (is_new, expected) in [(true, 2), (false, 2)] {
        assert_eq!(fixture.files.set_mesh_bundle(&format!("{mesh}{own}")), Ok(is_new));
        wait_for_state(&mut subscription, &name, |found| count(found) == expected).await;
    }
    let notification = tokio::time::timeout(LIMIT, notified.changed());
    notification.await.expect("is notified");
    let mut pointers = Vec::new();
    for _ in 0..2 {
        pointers.push(roots(&mut subscription, &name).await.pem().as_ptr());
    }
    assert_eq!(pointers[0], pointers[1], "merged again for nothing");
    fixture.write("root-cert.pem", &format!("{own}{}", generated().0));
    wait_for_state(&mut subscription, &name, |found| count(found) == 3).await;
    assert_eq!(count(&subscription.get(&by_path)), 2);
    assert_eq!(fixture.files.set_mesh_bundle(""), Ok(true));
    wait_for_state(&mut subscription, &name, |found| count(found) == 2).await;
}

#[tokio::test]
async fn every_good_certificate_of_a_bundle_is_taken() {
    let fixture = empty();
    let name = fixture.root("root");
    let ((one, _), (two, key)) = (generated(), generated());
    let broken = "-----BEGIN CERTIFICATE-----\n%%%%\n-----END CERTIFICATE-----\n";
    let cut = "-----BEGIN CERTIFICATE-----\nMIIB\n";
    let bundle = format!("# comment\n{cut}{one}{broken}noise\n{key}{two}{cut}");
    fixture.write("root", &bundle);
    let mut subscription = fixture.want(&[&name]);
    let roots = roots(&mut subscription, &name).await;
    let text = std::str::from_utf8(roots.pem()).unwrap().replace('\r', "");
    assert_eq!(text.matches("BEGIN CERTIFICATE").count(), 2);
    assert!(!text.contains("PRIVATE"), "{text}");
    let checked = Source::Roots(fixture.path("root").into()).read().unwrap();
    assert_eq!(checked.invalid_certificates, 3);
}

#[tokio::test]
async fn files_that_envoy_cannot_read_are_rewritten_and_others_are_not() {
    let fixture = empty();
    let ((leaf, key), (root, _)) = (generated(), generated());
    let (cert, root_name) = (fixture.cert("cert", "key"), fixture.root("root"));
    let plain = format!("# comment\n{leaf}{root}");
    let forms: [fn(&str) -> String; 4] = [
        |pem| pem.replace("-----\n-----", "----------"),
        |pem| pem.replace('\n', "\r"),
        |pem| format!("\u{feff}{pem}"),
        |pem| pem.replace('\n', "\n "),
    ];
    for form in forms {
        for (name, pem) in [
            ("cert", format!("{leaf}{root}")),
            ("key", format!("{root}{key}")),
            ("root", format!("{leaf}{root}")),
        ] {
            fixture.write(name, &form(&pem));
        }
        let mut subscription = fixture.want(&[&cert, &root_name]);
        chain_is(&mut subscription, &cert, &format!("{leaf}{root}")).await;
        let SecretState::Available(Secret::Certificate(pair)) = subscription.get(&cert) else {
            panic!("no pair");
        };
        assert_eq!(pair.key_pem(), key.as_bytes());
        roots_are(&mut subscription, &root_name, &format!("{leaf}{root}")).await;
        // All forms are served as the same text. The plain form in between makes the next form a change.
        fixture.write("cert", &plain);
        fixture.write("root", &plain);
        chain_is(&mut subscription, &cert, &plain).await;
        roots_are(&mut subscription, &root_name, &plain).await;
    }
}

#[tokio::test]
async fn invalid_files_are_refused_with_a_reason_that_does_not_quote_them() {
    let fixture = empty();
    let (pem, key) = generated();
    fixture.write("cert", &pem);
    fixture.write("key", &key);
    fixture.write("other-key", &generated().1);
    fixture.write("secret", "hunter2");
    fixture.write("odd-key", "-----BEGIN PRIVATE KEY-----\nhunter2=\n-----END PRIVATE KEY-----\n");
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
        ("cert", "secret", "no private key in 7 bytes"),
        ("cert", "odd-key", "of a kind that is not supported"),
        ("cert", "cert", "no private key"),
        ("key", "key", "no certificate"),
        ("secret", "key", "no certificate"),
        ("directory", "key", "not a regular file"),
        ("pipe", "key", "not a regular file"),
        ("cert/none", "key", "Not a directory"),
        ("huge", "key", "more than"),
    ] {
        let name = fixture.cert(chain, key);
        let mut subscription = fixture.want(&[&name]);
        let problem = wait_for_problem(&mut subscription, &name).await;
        let found = &problem.found;
        assert!(found.contains(expected), "{chain} {key}: {found}");
        assert!(!problem.to_string().contains("hunter2"), "{problem}");
    }
}

#[tokio::test]
async fn the_workloads_files_replace_the_authority_once_they_exist_and_stay() {
    let fixture = empty();
    let names = [&Name::Default, &Name::RootCa];
    let mut subscription = fixture.want(&names);
    for name in names {
        assert!(is_unsigned(&subscription.get(name)));
    }
    let (pem, key) = generated();
    fixture.write("cert-chain.pem", &pem);
    fixture.write("key.pem", &key);
    chain_is(&mut subscription, &Name::Default, &pem).await;
    assert!(is_unsigned(&subscription.get(&Name::RootCa)));
    for file in ["cert-chain.pem", "key.pem"] {
        fs::remove_file(fixture.path(file)).unwrap();
    }
    wait_out_debounce().await;
    chain_is(&mut subscription, &Name::Default, &pem).await;
}

#[tokio::test]
async fn bad_files_at_the_start_are_waited_for_until_they_are_removed() {
    let directory = tempfile::tempdir().unwrap();
    let ((pem, key), (_, other)) = (generated(), generated());
    write(directory.path(), "cert-chain.pem", &pem);
    write(directory.path(), "key.pem", &other);
    write(directory.path(), "root-cert.pem", "");
    let fixture = start(directory, false);
    let mut subscription = fixture.want(&[&Name::Default, &Name::RootCa]);
    wait_for_problem(&mut subscription, &Name::Default).await;
    // An empty file counts as missing.
    assert!(is_unsigned(&subscription.get(&Name::RootCa)));
    fixture.write("root-cert.pem", "nonsense");
    wait_out_debounce().await;
    assert!(is_unsigned(&subscription.get(&Name::RootCa)));
    fs::remove_file(fixture.path("key.pem")).unwrap();
    wait_for_state(&mut subscription, &Name::Default, is_unsigned).await;
    fixture.write("key.pem", &key);
    chain_is(&mut subscription, &Name::Default, &pem).await;
}

#[tokio::test]
async fn files_that_exist_at_the_start_are_known_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let (pem, key) = generated();
    write(directory.path(), "cert-chain.pem", &pem);
    write(directory.path(), "key.pem", &key);
    let fixture = start(directory, true);
    assert!(fixture.files.have(&Name::Default));
    assert!(!fixture.files.have(&Name::RootCa));
    let found = fixture.want(&[&Name::RootCa]).get(&Name::RootCa);
    assert!(matches!(found, SecretState::Unusable(_)), "{found:?}");
}

#[tokio::test]
async fn hundreds_of_pairs_are_read_and_a_missing_one_delays_none() {
    let fixture = empty();
    let (pem, key) = generated();
    for n in (0..500).filter(|n| *n != 250) {
        fs::write(fixture.path(&format!("{n}.pem")), &pem).unwrap();
        fs::write(fixture.path(&format!("{n}.key")), &key).unwrap();
    }
    let names: Vec<Name> =
        (0..500).map(|n| fixture.cert(&format!("{n}.pem"), &format!("{n}.key"))).collect();
    let mut subscription = fixture.want(&names.iter().collect::<Vec<_>>());
    for (n, name) in names.iter().enumerate() {
        let found =
            wait_for_state(&mut subscription, name, |found| !matches!(found, SecretState::Reading))
                .await;
        assert_eq!(matches!(found, SecretState::Available(_)), n != 250, "{n}");
    }
}
