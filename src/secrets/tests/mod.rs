//! Tests the renewal of certificates, with a paused clock and an authority that can misbehave.

use bytes::Bytes;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::Code;

use super::certificate::{Certificate, Workload};
use super::fake_authority::{Answer, FakeAuthority, clock, config};
use super::*;
use crate::problem;

const HOUR: Duration = Duration::from_secs(3600);

mod cache;
mod faults;
mod outages;

struct Fixture {
    clock: Clock,
    authority: FakeAuthority,
    registry: Registry,
    secrets: Secrets,
    _renewal: JoinSet<()>,
}

/// Starts the renewal task, with an authority that reacts with `answer`.
fn start(config: Config, answer: Answer) -> Fixture {
    let clock = clock();
    let authority = FakeAuthority::new(&clock);
    authority.set(answer);
    let registry = Registry::default();
    let (secrets, renewal) = new(config, authority.clone(), clock.clone(), &registry);
    let mut tasks = JoinSet::new();
    tasks.spawn(renewal);
    Fixture { clock, authority, registry, secrets, _renewal: tasks }
}

impl Fixture {
    async fn workload_after(&mut self, condition: impl Fn(&State) -> bool) -> Arc<Workload> {
        let state = self.state_after(|state| state.workload.is_some() && condition(state));
        state.await.workload.expect("is there")
    }

    async fn first(&mut self) -> Arc<Workload> {
        self.workload_after(|_| true).await
    }

    async fn renewed(&mut self, old: &Arc<Workload>) -> Arc<Workload> {
        let is_new = |state: &State| !state.workload.as_ref().is_some_and(|w| Arc::ptr_eq(w, old));
        self.workload_after(is_new).await
    }

    async fn state_after(&mut self, condition: impl Fn(&State) -> bool) -> State {
        let reached = async {
            while !condition(&self.secrets.latest()) {
                self.secrets.changed().await;
            }
            self.secrets.latest()
        };
        let limit = tokio::time::timeout(48 * HOUR, reached);
        limit.await.expect("the state is reached")
    }

    fn is_serving(&self, workload: &Arc<Workload>) -> bool {
        let latest = self.secrets.latest().workload;
        latest.is_some_and(|latest| Arc::ptr_eq(&latest, workload))
    }
}

#[tokio::test(start_paused = true)]
async fn requests_a_certificate_at_once_and_serves_the_response_unchanged() {
    let mut fixture = start(config(), Answer::Signed);
    let workload = fixture.first().await;
    let roots = fixture.authority.root_pem();
    let chain = std::str::from_utf8(workload.certificate.chain_pem()).expect("is PEM");
    assert!(chain.ends_with(&roots));
    assert_eq!(chain.matches("BEGIN CERTIFICATE").count(), 2);
    let anchors = roots.trim().replace('\r', "");
    assert_eq!(workload.roots.pem(), anchors.as_bytes());
    assert!(workload.certificate.key_pem().starts_with(b"-----BEGIN EC PRIVATE KEY"));
    assert!(!format!("{:?}", fixture.secrets.latest()).contains("PRIVATE KEY"));
}

#[tokio::test(start_paused = true)]
async fn renews_at_half_life_without_subscribers() {
    let mut fixture = start(config(), Answer::Signed);
    let first = fixture.first().await;
    let start = Instant::now();
    let second = fixture.renewed(&first).await;
    let off = start.elapsed().abs_diff(12 * HOUR);
    assert!(off < Duration::from_secs(2), "{off:?}");
    assert_ne!(
        first.certificate.key_pem(),
        second.certificate.key_pem(),
        "each request has its own key"
    );
    assert_eq!(fixture.authority.distinct_keys(), 2);
}

#[tokio::test(start_paused = true)]
async fn keeps_the_last_good_certificate_while_the_authority_is_down() {
    let mut fixture = start(config(), Answer::Signed);
    let first = fixture.first().await;
    fixture.authority.set(Answer::Fails(Code::Unavailable));
    tokio::time::sleep(24 * HOUR - Duration::from_secs(10)).await;
    assert!(fixture.is_serving(&first));
    assert!(fixture.secrets.latest().failure.is_some());
    fixture.authority.set(Answer::Signed);
    let before = Instant::now();
    fixture.renewed(&first).await;
    assert!(before.elapsed() < Duration::from_secs(10));
    assert!(fixture.secrets.latest().failure.is_none());
}

#[tokio::test(start_paused = true)]
async fn an_expired_certificate_is_withdrawn_until_the_authority_answers_again() {
    for answer in [Answer::Fails(Code::Unavailable), Answer::Waits] {
        let mut fixture = start(config(), Answer::Signed);
        let first = fixture.first().await;
        fixture.authority.set(answer);
        let state = fixture.state_after(|state| state.workload.is_none()).await;
        assert!(fixture.clock.now() >= first.certificate.not_after());
        assert!(state.failure.is_some_and(|problem| problem.failures > 100));
        assert!(state.roots.is_some());
        fixture.authority.set(Answer::Signed);
        let before = Instant::now();
        fixture.first().await;
        assert!(before.elapsed() <= Duration::from_secs(5));
    }
}

#[tokio::test(start_paused = true)]
async fn an_unusable_response_is_never_published_and_retried_with_backoff() {
    for answer in [
        Answer::Empty,
        Answer::LeafOnly,
        Answer::GarbageLeaf,
        Answer::GarbageRoots,
        Answer::ForeignKey,
        Answer::Fails(Code::PermissionDenied),
        Answer::Fails(Code::Unavailable),
    ] {
        let mut fixture = start(config(), answer);
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(fixture.secrets.latest().workload.is_none(), "{answer:?}");
        assert!(fixture.secrets.latest().roots.is_none(), "{answer:?}");
        let a_minute = fixture.authority.requests() / 10;
        assert!((10..60).contains(&a_minute), "{answer:?}: {a_minute}");

        fixture.authority.set(Answer::Signed);
        let good = fixture.first().await;
        fixture.authority.set(answer);
        let requests = fixture.authority.requests();
        tokio::time::sleep(14 * HOUR).await;
        assert!(fixture.is_serving(&good), "{answer:?}");
        let in_two_hours = fixture.authority.requests() - requests;
        assert!((80..1200).contains(&in_two_hours), "{answer:?}: {in_two_hours}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_ratio_of_one_renews_every_few_seconds_and_not_without_pause() {
    let config = Config { grace_ratio: 1.0, ..config() };
    let mut fixture = start(config, Answer::Signed);
    fixture.first().await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!((10..15).contains(&fixture.authority.requests()));
}

#[tokio::test(start_paused = true)]
async fn requests_are_sent_one_at_a_time_and_time_out() {
    let mut fixture = start(config(), Answer::Waits);
    let state = fixture.state_after(|state| state.failure.is_some()).await;
    let problem = state.failure.expect("is there").problem;
    assert_eq!(problem.code, problem::Code::CertificateRequestFailed);
    assert!(problem.found.contains("no answer within 2 min"), "{problem}");
    assert_eq!(fixture.authority.requests(), 1);
    fixture.authority.set(Answer::Signed);
    fixture.first().await;
    assert_eq!(fixture.authority.requests(), 2);
    assert_eq!(fixture.authority.most_in_flight(), 1);
}

#[tokio::test(start_paused = true)]
async fn changed_roots_are_published_before_the_certificate_they_signed() {
    let mut fixture = start(config(), Answer::Signed);
    let first = fixture.first().await;
    fixture.authority.rotate_root();
    let state = fixture.state_after(|state| state.roots.as_ref() != Some(&first.roots)).await;
    assert!(state.workload.is_some_and(|w| Arc::ptr_eq(&w, &first)));
    let before = Instant::now();
    let second = fixture.renewed(&first).await;
    assert!(before.elapsed() <= Duration::from_secs(2));
    let both = state.roots.expect("are there");
    assert_eq!(both, first.roots.union(&second.roots));
    assert_eq!(fixture.secrets.latest().roots.as_ref(), Some(&second.roots));
    assert_eq!(fixture.authority.most_in_flight(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_error_for_a_refused_answer_says_what_was_found() {
    const UNUSABLE: problem::Code = problem::Code::CertificateAnswerUnusable;
    for (answer, code, expected) in [
        (Answer::Empty, UNUSABLE, "found 0 elements"),
        (Answer::LeafOnly, UNUSABLE, "found 1 elements"),
        (
            Answer::GarbageLeaf,
            UNUSABLE,
            "element 0 of the chain: no certificate in 14 bytes, expected PEM",
        ),
        (Answer::GarbageRoots, UNUSABLE, "element 1 of the chain"),
        (Answer::ForeignKey, UNUSABLE, "does not belong to the certificate"),
        (Answer::Expired, problem::Code::ClocksDiffer, "already expired (valid until 2026-02-02T"),
    ] {
        let mut fixture = start(config(), Answer::Signed);
        fixture.first().await;
        fixture.authority.set(answer);
        let state = fixture.state_after(|state| state.failure.is_some()).await;
        let problem = state.failure.expect("is there").problem;
        assert_eq!(problem.code, code, "{problem}");
        assert!(problem.found.contains(expected), "{problem}");
    }
}

#[tokio::test]
async fn a_foreign_identity_and_a_different_clock_are_reported_and_not_refused() {
    let clock = clock();
    let authority = FakeAuthority::new(&clock);
    let ours = config().identity;
    let request =
        crate::ca::csr::generate(KeyType::P256, Default::default(), &ours).expect("generates");
    let answer = authority.sign(&request.csr_pem, HOUR).await.expect("signs");
    let behind = clock.now() - HOUR;
    let workload = Workload::new(&answer, request.key_pem).expect("is accepted");
    let certificate: &Certificate = &workload.certificate;
    let ahead = clock.now() + HOUR;
    let other = SpiffeId::new("cluster.local", "shop", "till");
    for (identity, now, code) in [
        (&ours, clock.now(), None),
        (&ours, behind, Some(problem::Code::ClocksDiffer)),
        (&ours, ahead, Some(problem::Code::ClocksDiffer)),
        (&other, clock.now(), Some(problem::Code::CertificateForOtherIdentity)),
    ] {
        let problems = certificate.problems(identity, now).into_iter();
        let found = Vec::from_iter(problems.map(|problem| problem.code));
        assert_eq!(found, Vec::from_iter(code));
    }
}

#[tokio::test]
async fn an_answer_is_served_readable_for_envoy_without_empty_elements() {
    const BROKEN: &str = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let authority = FakeAuthority::new(&clock());
    let ours = config().identity;
    let request = crate::ca::csr::generate(KeyType::P256, Default::default(), &ours).unwrap();
    let answer = authority.sign(&request.csr_pem, HOUR).await.expect("signs");
    let [leaf, root] = &answer[..] else {
        panic!("two elements");
    };
    let served = |answer: &[&str]| {
        let answer: Vec<_> = answer.iter().map(|&element| element.to_owned()).collect();
        let workload = Workload::new(&answer, request.key_pem.clone());
        let text = |workload: Workload| workload.certificate.chain_pem().clone();
        workload.map(text).map_err(|error| error.to_string())
    };
    let whole = Bytes::from(answer.concat());
    assert_eq!(served(&[leaf, root]), Ok(whole.clone()));
    let joined = format!("{}{root}", leaf.trim());
    for answer in [
        &[&*joined, root][..],
        &[&leaf.replace('\n', "\r"), root, root],
        &[leaf, root, &format!("{BROKEN}{root}")],
    ] {
        assert_eq!(served(answer), Ok(Bytes::from(format!("{leaf}{root}{root}"))));
    }
    let with_empty = served(&["", leaf, "\n", root]).expect("is accepted");
    let lines = |text: &Bytes| -> Vec<String> {
        let text = String::from_utf8(text.to_vec()).unwrap();
        text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
    };
    assert_eq!(lines(&with_empty), lines(&whole));
    for answer in [&[&**leaf, ""][..], &["", root]] {
        served(answer).expect_err("lacks a leaf or roots");
    }
}

#[tokio::test]
async fn every_type_of_key_is_recognised_in_its_certificate() {
    for key_type in [KeyType::P256, KeyType::P384, KeyType::Rsa(2048)] {
        let request = crate::ca::csr::generate(key_type, Default::default(), &config().identity)
            .expect("generates");
        let key = rcgen::KeyPair::from_pem(&request.key_pem).expect("is a key");
        let itself = rcgen::CertificateParams::default().self_signed(&key).expect("signs").pem();
        let answer = [itself.clone(), itself];
        Workload::new(&answer, request.key_pem).expect("matches its key");
        let other = crate::ca::csr::generate(key_type, Default::default(), &config().identity)
            .expect("generates");
        let problem = Workload::new(&answer, other.key_pem).expect_err("is another key");
        assert_eq!(problem.code, problem::Code::CertificateAnswerUnusable);
    }
}

impl Fixture {
    /// Asserts the numbers of requests, retries and failures. A series without a value is not on the page.
    fn assert_counts(&self, counts: [u32; 3]) {
        let names = ["outgoing_requests", "outgoing_retries", "failed_outgoing_requests"];
        for (name, count) in names.into_iter().zip(counts) {
            let series = format!("istio_agent_num_{name}{{request_type=\"csr\"}}");
            match count {
                0 => self.assert_page(&[], &[&series]),
                _ => self.assert_page(&[&format!("{series} {count}")], &[]),
            }
        }
    }

    fn assert_page(&self, holds: &[&str], lacks: &[&str]) {
        let page = self.registry.render();
        for line in holds {
            assert!(page.contains(&format!("{line}\n")), "{line} in\n{page}");
        }
        for text in lacks {
            assert!(!page.contains(text), "no {text} in\n{page}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn certificate_requests_their_failures_and_retries_are_counted_as_by_pilot_agent() {
    // The requests, retries and failures after some attempts that fail, and then after one that succeeds.
    for (code, attempts, before, after) in [
        (Code::Unavailable, 2, [1, 1, 0], [1, 2, 0]),
        (Code::Unavailable, 4, [1, 3, 0], [1, 4, 0]),
        (Code::Unavailable, 5, [1, 4, 1], [2, 4, 1]),
        (Code::Unavailable, 7, [2, 5, 1], [2, 6, 1]),
        (Code::Unauthenticated, 2, [2, 0, 2], [3, 0, 2]),
        (Code::DeadlineExceeded, 2, [2, 0, 2], [3, 0, 2]),
    ] {
        let mut fixture = start(config(), Answer::Fails(code));
        fixture.assert_page(&[], &["num_", "cert_"]);
        let failed = |state: &State| {
            let failure = state.failure.as_ref();
            failure.is_some_and(|failure| failure.failures == attempts)
        };
        fixture.state_after(failed).await;
        fixture.assert_counts(before);
        fixture.assert_page(&["istio_agent_outgoing_latency{request_type=\"csr\"} 0"], &["cert_"]);
        fixture.authority.set(Answer::Waits);
        tokio::time::sleep(Duration::from_secs(30)).await;
        fixture.authority.set(Answer::Signed);
        fixture.first().await;
        fixture.assert_counts(after);
        fixture.assert_page(&[], &["istio_agent_outgoing_latency{request_type=\"csr\"} 0\n"]);
    }
}

#[tokio::test(start_paused = true)]
async fn the_dates_of_the_certificate_are_reported_also_when_it_has_expired() {
    let mut fixture = start(config(), Answer::Signed);
    fixture.first().await;
    fixture.authority.set(Answer::Waits);
    tokio::time::sleep(23 * HOUR).await;
    const NOW: u64 = 1_770_000_000;
    let [life, half] = [24, 12].map(|hours| NOW + hours * 3600);
    let label = "{resource_name=\"default\"}";
    let dates = [
        format!("istio_agent_cert_issued_timestamp_seconds{label} {NOW}"),
        format!("istio_agent_cert_not_before_timestamp_seconds{label} {}", NOW - 120),
        format!("istio_agent_cert_not_after_timestamp_seconds{label} {life}"),
        format!("istio_agent_cert_next_renewal_timestamp_seconds{label} {half}"),
    ];
    let dates = dates.each_ref().map(String::as_str);
    fixture.assert_page(&dates, &[]);
    fixture.assert_page(&[&format!("istio_agent_cert_expiry_seconds{label} 3600")], &[]);
    tokio::time::sleep(2 * HOUR).await;
    fixture.assert_page(&dates, &[]);
    fixture.assert_page(&[&format!("istio_agent_cert_expiry_seconds{label} -3600")], &[]);
}

#[tokio::test(start_paused = true)]
async fn the_snapshot_has_served_secrets_and_the_problem_but_no_key() {
    let mut fixture = start(config(), Answer::Signed);
    let empty = fixture.secrets.snapshot();
    assert!(empty.secrets.iter().all(|secret| !secret.served));
    fixture.first().await;
    fixture.authority.set(Answer::Fails(Code::PermissionDenied));
    fixture.state_after(|state| state.failure.is_some()).await;
    let snapshot = fixture.secrets.snapshot();
    let [leaf, roots] = &snapshot.secrets[..] else { panic!("two secrets") };
    assert_eq!((leaf.name, roots.name), ("default", "ROOTCA"));
    assert!(leaf.served && roots.served);
    let certificate = &leaf.certificates[0];
    assert_eq!(certificate.spiffe_ids, [config().identity.to_string()]);
    assert!(!certificate.serial.is_empty());
    assert_eq!(certificate.not_after, "2026-02-03T02:40:00Z");
    assert_eq!(leaf.renewed_at.as_deref(), Some("2026-02-02T02:40:00Z"));
    assert_eq!(leaf.next_renewal.as_deref(), Some("2026-02-02T14:40:00Z"));
    assert_eq!(certificate.remaining_seconds.round(), 12.0 * 3600.0);
    assert_eq!(roots.certificates.len(), 1);
    let json = serde_json::to_value(&snapshot).expect("is JSON");
    let problem = &json["problem"];
    let error = problem["error"].as_str().expect("is text");
    assert!(error.contains("told to fail"), "{problem}");
    assert_eq!(problem["code"], "ISTIOD_ERROR");
    assert_eq!(problem["failures"], 1);
    assert!(problem["next_attempt"].is_string());
    assert!(!json.to_string().contains("PRIVATE KEY"), "{json}");
}
