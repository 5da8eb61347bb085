use prost::Message;

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;

use super::*;
use crate::xds::request::{HEAD, frame};

/// A stream, and a control plane that answers questions only when the test says so.
struct Stream {
    liveness: Liveness,
    history: History,
}

impl Stream {
    fn new() -> Self {
        Self { liveness: Liveness::new(), history: History::default() }
    }

    /// Begins another stream of the same agent.
    fn next(self) -> Self {
        Self { liveness: Liveness::new(), ..self }
    }

    /// Lets time pass, and checks when it is due. Returns the code of a new problem.
    async fn pass(&mut self, seconds: u64) -> Option<&'static str> {
        let end = later(Instant::now(), Duration::from_secs(seconds));
        let mut found = None;
        while let Some(due) = self.liveness.due(true).filter(|due| *due <= end) {
            tokio::time::sleep_until(due).await;
            self.liveness.check();
            found = found.or(self.new_problem());
        }
        tokio::time::sleep_until(end).await;
        found
    }

    fn new_problem(&mut self) -> Option<&'static str> {
        let news = self.liveness.news.take();
        (news == Some(News::Problem)).then(|| self.liveness.problem().unwrap().code.name())
    }

    /// Takes the requests for istiod, in a short form.
    fn sent(&mut self) -> Vec<String> {
        let frames = std::mem::take(&mut self.liveness.requests);
        frames.iter().for_each(|frame| self.liveness.note_request(frame));
        let requests = frames.iter().map(|it| DeltaDiscoveryRequest::decode(&it[HEAD..]).unwrap());
        let texts = requests.map(|it| {
            assert_eq!((it.node, it.response_nonce.as_str(), it.error_detail), (None, "", None));
            let mut names: Vec<_> = it.resource_names_subscribe;
            names.extend(it.resource_names_unsubscribe.iter().map(|name| format!("-{name}")));
            names.sort();
            format!("{} {}", short_type(&it.type_url), names.join(" "))
        });
        texts.collect()
    }

    /// Answers the question of the agent. Returns the code of a new problem.
    fn answer(&mut self) -> Option<&'static str> {
        self.liveness.note_bytes();
        self.liveness.note_answer(&mut self.history);
        self.new_problem()
    }

    fn subscribe(&mut self, type_url: &str, names: &[&str]) {
        self.request(type_url, |it| it.resource_names_subscribe = owned(names));
    }

    fn request(&mut self, type_url: &str, change: impl FnOnce(&mut DeltaDiscoveryRequest)) {
        let mut request =
            DeltaDiscoveryRequest { type_url: type_url.to_owned(), ..Default::default() };
        change(&mut request);
        self.liveness.note_request(&frame(&request.encode_to_vec()));
    }

    fn respond(&mut self, type_url: &str, names: &[&str]) {
        self.liveness.note_bytes();
        let names = names.iter().map(|name| NameDigest::of(name.as_bytes())).collect();
        self.liveness.end(type_url, &names, Some(&mut self.history));
    }

    /// Makes istiod answer its first question.
    async fn proven() -> Self {
        let mut stream = Self::new();
        assert_eq!(stream.pass(90).await, None);
        assert_eq!(stream.sent(), ["istio.io/debug ndsz"]);
        assert_eq!(stream.answer(), None);
        stream
    }
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_judged_only_after_its_first_answer() {
    let mut unproven = Stream::new();
    unproven.subscribe(ENDPOINTS, &["a"]);
    assert_eq!(unproven.pass(30).await, None);
    assert_eq!(unproven.sent(), ["istio.io/debug ndsz"]);
    assert_eq!(unproven.pass(7200).await, None);
    assert_eq!(unproven.sent(), [""; 0], "it is asked once");

    let mut proven = Stream::proven().await;
    assert_eq!(proven.pass(240 - 1).await, None);
    assert_eq!(proven.sent(), [""; 0]);
    let mut stalled = None;
    while stalled.is_none() {
        stalled = proven.pass(1).await;
    }
    assert_eq!(stalled, Some("DISCOVERY_STALLED"));
    assert_eq!(proven.sent(), ["istio.io/debug ndsz"]);
    assert_eq!(proven.pass(240).await, None);
    assert!(proven.liveness.problem().is_some());
    assert_eq!(proven.pass(120 + 10 + 1).await, Some("DISCOVERY_STALLED"), "it is asked again");
    assert_eq!(proven.sent(), ["istio.io/debug ndsz"]);
    assert_eq!(proven.answer(), None);
    assert_eq!(proven.liveness.problem(), None);
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_subscription_is_renewed_once_and_reported_once() {
    let mut stream = Stream::new();
    stream.subscribe(ENDPOINTS, &["a", "b"]);
    stream.respond(ENDPOINTS, &["b", "other"]);
    stream.pass(30).await;
    assert_eq!(stream.sent(), ["istio.io/debug ndsz"]);
    assert_eq!(stream.answer(), None);
    assert_eq!(stream.sent(), ["EDS -a", "EDS a"]);
    stream.pass(30).await;
    assert_eq!(stream.sent(), ["istio.io/debug ndsz"]);
    assert_eq!(stream.answer(), Some("SUBSCRIPTION_UNANSWERED"));
    let problem = stream.liveness.problem().unwrap();
    assert_eq!(problem.found, "1 subscriptions are not answered: EDS a");
    assert_eq!(stream.sent(), [""; 0]);

    let mut stream = stream.next();
    stream.subscribe(ENDPOINTS, &["a", "lost"]);
    stream.pass(30).await;
    assert_eq!(stream.sent(), ["istio.io/debug ndsz"]);
    assert_eq!(stream.answer(), None, "it is not new");
    assert_eq!(stream.sent(), ["EDS -lost", "EDS lost"]);
    stream.respond(ENDPOINTS, &["lost"]);
    assert!(stream.liveness.problem().is_some());
    stream.respond(ENDPOINTS, &["a"]);
    assert_eq!(stream.liveness.problem(), None);

    stream.subscribe(ENDPOINTS, &["a"]);
    stream.pass(30).await;
    stream.sent();
    assert_eq!(stream.answer(), None);
    assert_eq!(stream.sent(), ["EDS -a", "EDS a"], "it was answered in the meantime");
}

#[tokio::test(start_paused = true)]
async fn istiod_is_judged_only_by_what_it_got_before_the_question() {
    let mut stream = Stream::new();
    stream.subscribe(ROUTES, &["old"]);
    stream.pass(20).await;
    stream.subscribe(ROUTES, &["young"]);
    stream.pass(10).await;
    assert_eq!(stream.sent(), ["istio.io/debug ndsz"]);
    stream.pass(5).await;
    stream.subscribe(ROUTES, &["new"]);
    stream.pass(4).await;
    stream.answer();
    assert_eq!(stream.sent(), ["RDS -old", "RDS old"]);
    stream.pass(21).await;
    assert_eq!(stream.sent(), ["istio.io/debug ndsz"]);
    stream.answer();
    assert_eq!(stream.sent(), ["RDS -young", "RDS young"]);
}

type Step = fn(&mut Stream);

#[tokio::test(start_paused = true)]
async fn only_what_istiod_owes_an_answer_for_is_renewed() {
    const NAMES: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";
    const WORKLOAD: &str = "type.googleapis.com/istio.workload.Workload";
    let cases: [(&str, &[Step], &[&str]); 13] = [
        ("all clusters", &[|it| it.subscribe(CLUSTER, &[])], &["CDS *"]),
        ("all and some", &[|it| it.subscribe(LISTENER, &["*", "a"])], &["LDS *"]),
        (
            "a response of the type",
            &[|it| it.subscribe(CLUSTER, &[]), |it| it.respond(CLUSTER, &["a"])],
            &[],
        ),
        (
            "a response of another type",
            &[|it| it.subscribe(CLUSTER, &[]), |it| it.respond(LISTENER, &["*"])],
            &["CDS *"],
        ),
        (
            "a name in an ACK",
            &[|it| {
                it.request(ENDPOINTS, |it| {
                    it.resource_names_subscribe = owned(&["a"]);
                    it.response_nonce = "1".into();
                });
            }],
            &["EDS -a", "EDS a"],
        ),
        ("an ACK", &[|it| it.request(CLUSTER, |it| it.response_nonce = "1".into())], &[]),
        ("clusters by name", &[|it| it.subscribe(CLUSTER, &["a"])], &[]),
        ("the agent's own", &[|it| it.subscribe(NAMES, &[])], &[]),
        ("workloads", &[|it| it.subscribe(WORKLOAD, &["a"])], &[]),
        (
            "an ended subscription",
            &[
                |it| it.subscribe(SECRET, &["a", "b"]),
                |it| it.request(SECRET, |it| it.resource_names_unsubscribe = owned(&["a"])),
            ],
            &["SDS -b", "SDS b"],
        ),
        (
            "names that Envoy has, without a response",
            &[|it| {
                it.request(ENDPOINTS, |it| {
                    it.resource_names_subscribe = owned(&["a"]);
                    it.initial_resource_versions = [("a".into(), "1".into())].into();
                });
            }],
            &["EDS -a", "EDS a"],
        ),
        (
            "names that Envoy has, and others, after a response",
            &[
                |it| {
                    it.request(ENDPOINTS, |it| {
                        it.resource_names_subscribe = owned(&["a", "b", "c"]);
                        it.initial_resource_versions = [("a".into(), "1".into())].into();
                    });
                },
                |it| it.respond(ENDPOINTS, &["c"]),
            ],
            &["EDS -b", "EDS b"],
        ),
        ("no message", &[|it| it.liveness.note_request(&frame(b"\xff"))], &[]),
    ];
    for (name, steps, expected) in cases {
        let mut stream = Stream::new();
        steps.iter().for_each(|step| step(&mut stream));
        stream.pass(90).await;
        assert_eq!(stream.sent(), ["istio.io/debug ndsz"], "{name}");
        stream.answer();
        assert_eq!(stream.sent(), expected, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn time_without_reading_and_late_checks_do_not_count() {
    let seconds = Duration::from_secs;
    let mut stream = Stream::proven().await;
    while stream.sent().is_empty() {
        stream.pass(1).await;
    }
    // Envoy takes one part of a large response every 9 s.
    for _ in 0..60 {
        assert_eq!(stream.liveness.due(false), None);
        tokio::time::advance(seconds(9)).await;
        stream.liveness.heard = Instant::now();
        assert!(stream.liveness.due(true).unwrap() > Instant::now());
    }
    // The agent is stopped for a minute.
    tokio::time::advance(seconds(60)).await;
    stream.liveness.check();
    assert_eq!(stream.new_problem(), None);
    assert_eq!(stream.sent(), [""; 0]);
    assert_eq!(stream.pass(10).await, Some("DISCOVERY_STALLED"));
}

#[tokio::test(start_paused = true)]
async fn responses_extend_the_wait_for_an_answer_to_a_minute() {
    let mut stream = Stream::proven().await;
    while stream.sent().is_empty() {
        assert_eq!(stream.pass(1).await, None);
    }
    for _ in 0..58 {
        assert_eq!(stream.pass(1).await, None);
        stream.liveness.heard = Instant::now();
    }
    assert_eq!(stream.pass(2).await, Some("DISCOVERY_STALLED"));
}

#[tokio::test(start_paused = true)]
async fn an_end_of_the_stream_after_the_first_question_is_a_refusal() {
    // The code of the end, the seconds since the question, and the result.
    for (code, seconds, refuses) in [
        (Code::Unauthenticated, 1, true),
        (Code::Unknown, 600, true),
        (Code::Ok, 1, true),
        (Code::Ok, 600, false),
        (Code::Unavailable, 1, false),
        (Code::DeadlineExceeded, 1, false),
    ] {
        let mut stream = Stream::new();
        assert!(!stream.liveness.is_refused(code), "it was not asked");
        while stream.sent().is_empty() {
            stream.pass(1).await;
        }
        stream.pass(seconds).await;
        assert_eq!(stream.liveness.is_refused(code), refuses, "{code} {seconds}");
        stream.answer();
        assert!(!stream.liveness.is_refused(code), "it has answered");
    }
}

#[tokio::test(start_paused = true)]
async fn a_name_each_second_without_answers_makes_two_questions_a_minute() {
    let mut stream = Stream::proven().await;
    let mut asked = 0;
    for second in 0..300 {
        stream.subscribe(ENDPOINTS, &[&format!("{second}")]);
        stream.pass(1).await;
        if stream.sent().iter().any(|it| it == "istio.io/debug ndsz") {
            asked += 1;
            stream.answer();
            stream.sent();
        }
    }
    assert!((9..=10).contains(&asked), "{asked}");
}

#[tokio::test(start_paused = true)]
async fn an_hour_of_quiet_or_churn_has_no_problem() {
    for (name, interval) in [("quiet", 3600), ("churn", 7)] {
        let (mut stream, mut questions) = (Stream::new(), 0);
        stream.subscribe(CLUSTER, &[]);
        stream.respond(CLUSTER, &["a"]);
        for second in 1..=3600_u32 {
            assert_eq!(stream.pass(1).await, None, "{name}");
            for request in stream.sent() {
                assert_eq!(request, "istio.io/debug ndsz", "{name}");
                questions += 1;
                assert_eq!(stream.answer(), None, "{name}");
            }
            if second % interval == 0 {
                // istiod answers the last but three; one is withdrawn.
                let old = second / interval;
                stream.subscribe(ENDPOINTS, &[&format!("{old}"), &format!("gone {old}")]);
                stream.respond(ENDPOINTS, &[&format!("{}", old.saturating_sub(3))]);
                let names = [format!("gone {}", old.saturating_sub(3))];
                stream.request(ENDPOINTS, |it| it.resource_names_unsubscribe = names.to_vec());
            }
        }
        assert_eq!(stream.liveness.problem(), None, "{name}");
        assert!((0..=16).contains(&questions), "{name}: {questions}");
        assert_eq!(questions > 0, name == "quiet", "{name}: {questions}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_problem_names_some_of_many_subscriptions() {
    let mut stream = Stream::new();
    let names: Vec<_> = (0..100).map(|number| number.to_string()).collect();
    stream.request(ENDPOINTS, |it| it.resource_names_subscribe.clone_from(&names));
    for _ in 0..2 {
        stream.pass(30).await;
        stream.sent();
        stream.answer();
        stream.sent();
    }
    let found = stream.liveness.problem().unwrap().found;
    assert!(found.starts_with("100 subscriptions are not answered: EDS "), "{found}");
    assert_eq!(found.matches("EDS ").count(), MAX_SHOWN);
}
