//! Tests certificates with a faulty authority, with wrong clocks, and with changes of the mesh's trust bundle.

use std::io;
use std::sync::Mutex;

use super::*;

const MINUTE: Duration = Duration::from_secs(60);

/// Returns each way in which an authority can fail to issue a usable certificate for the agent.
fn faults() -> Vec<Answer> {
    let codes = (1..=16).map(|code| Answer::Fails(Code::from(code)));
    let others = [
        Answer::Waits,
        Answer::Empty,
        Answer::LeafOnly,
        Answer::GarbageLeaf,
        Answer::GarbageRoots,
        Answer::ForeignKey,
        Answer::Expired,
    ];
    codes.chain(others).collect()
}

/// The text of the log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").write(text)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn take(&self) -> String {
        let text = std::mem::take(&mut *self.0.lock().expect("no panic"));
        String::from_utf8(text).expect("is text")
    }
}

#[tokio::test(start_paused = true)]
async fn each_fault_of_the_authority_is_reported_and_the_certificate_stays() {
    // With a single subscriber, `tracing` disables a log line for all threads if the thread of another test, which has
    // no subscriber, reaches the line first. A second subscriber prevents this.
    let _another = tracing::Dispatch::new(tracing_subscriber::registry());
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone());
    let _logging = tracing::subscriber::set_default(subscriber.finish());
    for fault in faults() {
        let mut fixture = start(config(), Answer::Signed);
        let good = fixture.first().await;
        fixture.authority.set(fault);
        tokio::time::sleep(12 * HOUR + 15 * MINUTE).await;
        let before = fixture.authority.requests();
        let failures =
            |fixture: &Fixture| fixture.secrets.latest().failure.map_or(0, |it| it.failures);
        let failed = failures(&fixture);
        tokio::time::sleep(10 * MINUTE).await;
        assert!(fixture.is_serving(&good), "{fault:?}");
        let requests = fixture.authority.requests() - before;
        assert!((2..=60).contains(&requests), "{fault:?}: {requests} in ten minutes");
        // A request may be in flight at the beginning and at the end of the ten minutes.
        let reported = (failures(&fixture) - failed) as usize;
        assert!(reported.abs_diff(requests) <= 1, "{fault:?}: {reported}");
        let text = log.take();
        assert!(text.contains("failure 1 in a row, next attempt in "), "{text}");
        assert!(!text.contains("PRIVATE"));

        tokio::time::sleep(12 * HOUR).await;
        // Once the good certificate has expired, an expired one of the authority is served, because there is no other.
        let is_gone = fixture.secrets.latest().workload.is_none();
        assert_eq!(is_gone, fault != Answer::Expired, "{fault:?}");
        assert!(fixture.secrets.latest().roots.is_some(), "{fault:?}");
        let before = fixture.authority.requests();
        tokio::time::sleep(10 * MINUTE).await;
        let requests = fixture.authority.requests() - before;
        assert!((2..=400).contains(&requests), "{fault:?}: {requests} in ten minutes");

        fixture.authority.set(Answer::Signed);
        let healing = Instant::now();
        fixture.first().await;
        assert!(healing.elapsed() <= Duration::from_secs(5), "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn clock_skew_and_short_lifetimes_do_not_cause_a_storm_of_requests() {
    const SHORT: Duration = Duration::from_secs(10);
    const LONG: Duration = Duration::from_secs(24 * 3600);
    // The seconds by which the authority's clock is ahead, the requested lifetime, and the requests in ten minutes.
    for (skew, ttl, requests) in [
        (0, LONG, 1..=1),
        (3600, LONG, 1..=1),
        (-3600, LONG, 1..=1),
        (0, SHORT, 100..=130),
        (3600, SHORT, 1..=1),
        // The certificate has already expired when it arrives.
        (-3600, SHORT, 5..=20),
    ] {
        let fixture = start(Config { ttl, ..config() }, Answer::Waits);
        fixture.authority.set_skew(skew);
        fixture.authority.set(Answer::Signed);
        let mut withdrawn = 0;
        for _ in 0..600 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            withdrawn += u32::from(fixture.secrets.latest().workload.is_none());
        }
        let found = fixture.authority.requests();
        assert!(requests.contains(&found), "{skew} s, {ttl:?}: {found}");
        assert_eq!(withdrawn, 0, "{skew} s, {ttl:?}");
    }
}

/// Waits for the first certificate and its renewal, with an authority that refuses ECDSA keys with `code`. Returns
/// the number of requests and the last key; zero and no key if the authority does not sign within five minutes.
async fn keys_after(code: Code, falls_back_to_rsa: bool) -> (usize, Vec<u8>) {
    let config = Config { falls_back_to_rsa, ..config() };
    let mut fixture = start(config, Answer::RefusesEcdsa(code));
    let Ok(first) = tokio::time::timeout(5 * MINUTE, fixture.first()).await else {
        return (0, Vec::new());
    };
    let second = fixture.renewed(&first).await;
    let key = second.certificate.key_pem().to_vec();
    (fixture.authority.requests(), key)
}

#[tokio::test(start_paused = true)]
async fn an_authority_that_may_refuse_the_default_key_gets_rsa_requests() {
    for (code, requests) in [
        (Code::InvalidArgument, 3),
        (Code::FailedPrecondition, 3),
        (Code::Unimplemented, 3),
        // This error may be temporary, so the agent tries the ECDSA key three times.
        (Code::Internal, 5),
    ] {
        let (found, key) = keys_after(code, true).await;
        assert!(key.starts_with(b"-----BEGIN RSA PRIVATE KEY"), "{code:?}");
        // The authority refuses only requests before the first certificate; the renewal uses RSA at once.
        assert_eq!(found, requests, "{code:?}");
        assert_eq!(keys_after(code, false).await.0, 0, "{code:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_for_another_reason_than_the_key_changes_no_key() {
    for code in [
        Code::Cancelled,
        Code::Unknown,
        Code::DeadlineExceeded,
        Code::NotFound,
        Code::AlreadyExists,
        Code::PermissionDenied,
        Code::ResourceExhausted,
        Code::Aborted,
        Code::OutOfRange,
        Code::Unavailable,
        Code::DataLoss,
        Code::Unauthenticated,
    ] {
        assert_eq!(keys_after(code, true).await.0, 0, "{code:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_authority_that_refuses_rsa_as_well_is_asked_for_ecdsa_again() {
    for (code, refusals) in [
        (Code::InvalidArgument, 2),
        (Code::FailedPrecondition, 2),
        (Code::Unimplemented, 2),
        // Only the third failure with ECDSA counts as a refusal of the key; the fourth request has an RSA key.
        (Code::Internal, 4),
    ] {
        let config = Config { falls_back_to_rsa: true, ..config() };
        let mut fixture = start(config, Answer::Fails(code));
        let refused = async |count: usize| {
            while fixture.authority.requests() < count {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            // The response to the last request arrives in this time.
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        refused(refusals).await;
        fixture.authority.set(Answer::Signed);
        let first = fixture.first().await;
        let key = first.certificate.key_pem();
        assert!(key.starts_with(b"-----BEGIN EC PRIVATE KEY"), "{code:?}");
        assert_eq!(fixture.authority.requests(), refusals + 1, "{code:?}");
        // From now on, the authority signs only RSA keys.
        fixture.authority.set(Answer::RefusesEcdsa(code));
        let key = fixture.renewed(&first).await.certificate.key_pem().to_vec();
        assert!(key.starts_with(b"-----BEGIN RSA PRIVATE KEY"), "{code:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_certificate_without_any_lifetime_is_requested_again_with_backoff() {
    let mut fixture = start(config(), Answer::ZeroLifetime);
    let first = fixture.first().await;
    assert!(first.certificate.not_after() <= fixture.clock.now());
    tokio::time::sleep(10 * MINUTE).await;
    let requests = fixture.authority.requests();
    assert!((5..=60).contains(&requests), "{requests} in ten minutes");
    fixture.authority.set(Answer::Signed);
    tokio::time::sleep(MINUTE).await;
    let workload = fixture.secrets.latest().workload.expect("is there");
    assert!(workload.certificate.not_after() > fixture.clock.now());
    // No request follows, because the next renewal is due in hours.
    let requests = fixture.authority.requests();
    tokio::time::sleep(10 * MINUTE).await;
    assert_eq!(fixture.authority.requests(), requests);
}

#[tokio::test(start_paused = true)]
async fn a_clock_ahead_serves_the_certificate_and_renews_each_minute() {
    let mut fixture = start(config(), Answer::Waits);
    fixture.authority.set_skew(-25 * 3600);
    fixture.authority.set(Answer::Signed);
    let first = fixture.first().await;
    assert!(first.certificate.not_after() <= fixture.clock.now());
    // While the authority fails, the certificate stays in use, and the agent does not send more requests than it would
    // without a certificate.
    fixture.authority.set(Answer::Fails(Code::Unavailable));
    tokio::time::sleep(10 * MINUTE).await;
    assert!(fixture.is_serving(&first));
    let requests = fixture.authority.requests();
    assert!((60..600).contains(&requests), "{requests}");
    // Once the clocks agree, a valid certificate is served until it expires.
    fixture.authority.set_skew(0);
    fixture.authority.set(Answer::Signed);
    let second = fixture.renewed(&first).await;
    assert!(second.certificate.not_after() > fixture.clock.now());
    fixture.authority.set(Answer::Fails(Code::Unavailable));
    tokio::time::sleep(24 * HOUR).await;
    assert!(fixture.secrets.latest().workload.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_certificate_for_another_name_is_used_and_reported() {
    let mut fixture = start(config(), Answer::ForeignName);
    assert!(!fixture.first().await.certificate.is_issued_to(&config().identity));
}

#[tokio::test(start_paused = true)]
async fn every_certificate_published_during_a_root_rotation_is_valid_under_its_roots() {
    for rotate in [FakeAuthority::rotate_root, FakeAuthority::rotate_root_with_overlap] {
        let mut fixture = start(config(), Answer::Signed);
        let first = fixture.first().await;
        fixture.secrets.set_mesh_bundle(&fixture.authority.root_pem()).expect("is one");
        rotate(&fixture.authority);
        let mut certificates = vec![first];
        while certificates.len() < 3 {
            let state = fixture.secrets.latest();
            let (workload, roots) = (state.workload.expect("is there"), state.roots);
            let roots = roots.expect("are there");
            assert_eq!(roots.union(&workload.roots), roots);
            if !certificates.iter().any(|known| Arc::ptr_eq(known, &workload)) {
                certificates.push(workload);
            }
            fixture.secrets.changed().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn jumped_clocks_and_resumed_machines_renew_within_seconds() {
    // The renewal is due half an hour later.
    let early = 11 * HOUR + 30 * MINUTE;
    for (is_forward, expected) in [(true, Duration::ZERO), (false, 30 * MINUTE)] {
        let mut fixture = start(config(), Answer::Signed);
        let first = fixture.first().await;
        tokio::time::sleep(early).await;
        if is_forward {
            fixture.clock.jump(HOUR);
        } else {
            fixture.clock.jump_back(HOUR);
        }
        let before = Instant::now();
        fixture.renewed(&first).await;
        let late = before.elapsed().saturating_sub(expected);
        assert!(late < Duration::from_secs(5), "{late:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_machine_resumed_between_two_attempts_makes_the_next_at_once() {
    let mut fixture = start(config(), Answer::Signed);
    let first = fixture.first().await;
    fixture.authority.set(Answer::Fails(Code::PermissionDenied));
    tokio::time::sleep(13 * HOUR).await;
    fixture.authority.set(Answer::Signed);
    fixture.clock.jump(HOUR);
    let before = Instant::now();
    fixture.renewed(&first).await;
    assert!(before.elapsed() < Duration::from_secs(5), "{:?}", before.elapsed());
}

#[tokio::test(start_paused = true)]
async fn mesh_roots_join_the_authoritys_and_a_changed_bundle_causes_renewal() {
    let other = FakeAuthority::new(&clock());
    let mut fixture = start(config(), Answer::Waits);
    fixture.secrets.set_mesh_bundle(&other.root_pem()).expect("is one");
    assert!(fixture.secrets.latest().roots.is_none());
    fixture.authority.set(Answer::Signed);
    let first = fixture.first().await;
    let anchors = |secrets: &Secrets| {
        let pem = secrets.latest().roots.expect("are there").pem().to_vec();
        String::from_utf8(pem).expect("is text").matches("BEGIN").count()
    };
    assert_eq!(anchors(&fixture.secrets), 2);
    let error = fixture.secrets.set_mesh_bundle("no PEM").expect_err("is none");
    assert!(error.to_string().contains("in 6 bytes"), "{error}");
    fixture.secrets.set_mesh_bundle(&other.root_pem()).expect("is one");
    tokio::time::sleep(HOUR).await;
    assert_eq!((fixture.authority.requests(), anchors(&fixture.secrets)), (1, 2));

    let two = format!("{}{}", other.root_pem(), FakeAuthority::new(&clock()).root_pem());
    fixture.secrets.set_mesh_bundle(&two).expect("are two");
    tokio::task::yield_now().await;
    assert_eq!(anchors(&fixture.secrets), 3);
    let before = Instant::now();
    let second = fixture.renewed(&first).await;
    assert!(before.elapsed() <= MINUTE, "{:?}", before.elapsed());

    let repeated = format!("{two}{}", other.root_pem());
    fixture.secrets.set_mesh_bundle(&repeated).expect("are two");
    let before = Instant::now();
    fixture.renewed(&second).await;
    assert!(before.elapsed() <= MINUTE, "a root was repeated {:?} ago", before.elapsed());
    assert_eq!(anchors(&fixture.secrets), 3);
    fixture.secrets.set_mesh_bundle("").expect("is none");
    tokio::task::yield_now().await;
    assert_eq!(anchors(&fixture.secrets), 1);
}

#[tokio::test(start_paused = true)]
async fn a_bundle_that_comes_while_the_authority_answers_brings_the_renewal_forward() {
    let other = FakeAuthority::new(&clock());
    let mut fixture = start(config(), Answer::Waits);
    fixture.secrets.set_mesh_bundle(&other.root_pem()).expect("is one");
    while fixture.authority.requests() == 0 {
        tokio::task::yield_now().await;
    }
    let another = FakeAuthority::new(&clock()).root_pem();
    fixture.secrets.set_mesh_bundle(&another).expect("is one");
    fixture.authority.set(Answer::Signed);
    let first = fixture.first().await;
    let before = Instant::now();
    fixture.renewed(&first).await;
    assert!(before.elapsed() <= 10 * MINUTE, "{:?}", before.elapsed());
}

/// Each certificate that a subscriber gets matches its key, and memory and open files do not grow.
#[tokio::test(start_paused = true)]
#[ignore = "a soak of minutes"]
async fn ten_thousand_rotations_show_no_bad_pair_and_leave_nothing_behind() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let output = output::Config { directory: directory.path().to_owned(), readable_by_all: false };
    let mut fixture = start(Config { grace_ratio: 1.0, ..config() }, Answer::Signed);
    let mut tasks = JoinSet::new();
    let secrets = Some(fixture.secrets.clone());
    tasks.spawn(output::run(output, secrets, output::tests::no_files()));
    let mut workload = fixture.first().await;
    let mut usage = Vec::new();
    for rotation in 0..10_000 {
        workload = fixture.renewed(&workload).await;
        let key = rcgen::KeyPair::from_pem(
            std::str::from_utf8(workload.certificate.key_pem()).expect("is text"),
        )
        .expect("is a key");
        let chain = workload.certificate.chain_pem();
        let (_, leaf) = x509_parser::pem::parse_x509_pem(chain).expect("is PEM");
        let leaf = leaf.parse_x509().expect("is a certificate");
        let public = &leaf.public_key().subject_public_key.data;
        assert_eq!(**public, *rcgen::PublicKeyData::der_bytes(&key));
        fixture.authority.forget_keys();
        if rotation % 1000 == 999 {
            let files = std::fs::read_dir("/proc/self/fd").expect("is there").count();
            let memory = std::fs::read_to_string("/proc/self/statm").expect("is there");
            let pages = memory.split(' ').nth(1).expect("is there").to_owned();
            usage.push((pages.parse::<usize>().expect("is a number"), files));
        }
    }
    eprintln!("pages and files: {usage:?}");
    let (first, last) = (usage[1], usage[9]);
    assert!(last.0 <= first.0 + 256, "{usage:?}");
    assert_eq!(last.1, first.1, "{usage:?}");
}

/// Returns the log lines of this number of consecutive failures, except INFO lines.
async fn lines_of(failures: u32, answer: Answer, has_certificate: bool) -> Vec<String> {
    let _another = tracing::Dispatch::new(tracing_subscriber::registry());
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false);
    let subscriber = subscriber.with_writer(move || writer.clone());
    let _logging = tracing::subscriber::set_default(subscriber.finish());
    let first = if has_certificate { Answer::Signed } else { answer };
    let mut fixture = start(config(), first);
    if has_certificate {
        fixture.first().await;
        log.take();
        fixture.authority.set(answer);
    }
    let reached = |state: &State| state.failure.as_ref().is_some_and(|it| it.failures == failures);
    fixture.state_after(reached).await;
    let lines = log.take();
    let lines = lines.lines().filter(|line| !line.contains(" INFO "));
    lines.map(str::to_owned).collect()
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_two_lines_and_repetitions_follow_at_growing_intervals() {
    const OURS: &str = "resource:default failed to sign: ";
    let refused = Answer::Fails(Code::Unavailable);
    for (has_certificate, theirs) in [
        (
            false,
            "failed to warm certificate: failed to generate workload certificate: create certificate: rpc error: code = Unavailable",
        ),
        (true, "ca request failed, starting attempt 2 in "),
    ] {
        let lines = lines_of(1, refused, has_certificate).await;
        let [first, second] = &lines[..] else {
            panic!("{lines:#?}");
        };
        assert!(first.contains(theirs), "{first}");
        assert!(second.contains(OURS), "{second}");
        assert!(second.contains("failure 1 in a row, next attempt in "), "{second}");
        assert!(second.ends_with(']'), "{second}");
        let lines = lines_of(20, refused, has_certificate).await;
        let counts = Vec::from_iter(lines.iter().filter_map(|line| {
            let (_, count) = line.split_once("; failure ")?;
            count.split(' ').next()
        }));
        assert_eq!(counts, ["1", "2", "4", "8", "16"]);
        assert_eq!(lines.len(), 10, "{lines:#?}");
    }
    let lines = lines_of(1, Answer::ForeignKey, true).await;
    assert_eq!(lines.len(), 1, "{lines:#?}");
    assert!(lines[0].ends_with("[CERTIFICATE_ANSWER_UNUSABLE]"), "{lines:#?}");
}

#[tokio::test(start_paused = true)]
async fn the_problem_names_the_cause_the_expiry_and_since_when_renewals_fail() {
    let mut fixture = start(config(), Answer::Waits);
    let code = |fixture: &Fixture| fixture.secrets.problem().map(|problem| problem.code);
    assert_eq!(code(&fixture), Some(problem::Code::CertificateNotIssued));
    fixture.authority.set(Answer::Signed);
    fixture.first().await;
    assert_eq!(code(&fixture), None);
    fixture.authority.set(Answer::Fails(Code::PermissionDenied));
    let state = fixture.state_after(|state| state.failure.is_some()).await;
    let cause = state.failure.expect("has failed").problem;
    let problem = fixture.secrets.problem().expect("has failed");
    assert_eq!((problem.code, &problem.subject), (cause.code, &cause.subject));
    let since = "(1 failures since 2026-02-02T14:40:00Z, next attempt at 2026-02-02T14:4";
    assert!(problem.found.contains(since), "{problem}");
    fixture.state_after(|state| state.workload.is_none()).await;
    let problem = fixture.secrets.problem().expect("has expired");
    assert_eq!(problem.code, problem::Code::CertificateExpired);
    assert_eq!(problem.remedy, cause.remedy);
    for words in [
        "expired at 2026-02-03T02:40:00Z; renewals fail: ",
        &cause.found,
        "failures since 2026-02-02T14:40:00Z",
    ] {
        assert!(problem.found.contains(words), "{words}: {problem}");
    }
}
