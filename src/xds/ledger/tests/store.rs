use super::*;

/// Returns content that is not compressed to nearly nothing.
fn content(length: usize) -> String {
    std::iter::repeat_with(|| fastrand::char(' '..'~')).take(length).collect()
}

#[tokio::test(start_paused = true)]
async fn a_resource_of_any_size_survives_in_any_chunks() {
    for length in [1, 70, 65_000, 65_536, 65_537, 131_072, 5_000_000] {
        for chunk in [1_000, 16_384, 65_536, 10_000_000] {
            let parent = tempfile::tempdir().unwrap();
            let mut pod = Pod::start(parent.path());
            let all = resources(&[("a", "first"), ("b", &content(length)), ("c", &content(100))]);
            pod.subscribe_all();
            let response = Pod::response(Type::CLUSTER, "1", &all, &[]);
            pod.pass(Type::CLUSTER, "1", &response, chunk);
            pod.ack(Type::CLUSTER, "1");
            pod.accept(Type::LISTENER, "1", &Resources::new(), &[]);
            assert!(pod.stored(Type::CLUSTER) == all, "{length} {chunk}");
            assert!(pod.write());
            assert!(in_file(parent.path()) == all, "{length} {chunk}");
            pod.accept(Type::CLUSTER, "2", &Resources::new(), &["a", "b", "c"]);
            assert!(pod.stored(Type::CLUSTER).is_empty());
            assert!(pod.write());
            assert!(pod.ledger.0.state.lock().store.is_empty(), "{length} {chunk}");
            assert!(in_file(parent.path()).is_empty());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_large_unchanged_resource_is_not_written_again() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    let (a, b) = (content(1_000_000), content(1_000_000));
    let all = resources(&[("a", &a), ("b", &b)]);
    pod.accept_first(&all);
    assert!(pod.write());
    let length = || parent.path().join(DIRECTORY).join(FILE).metadata().unwrap().len();
    let (before, memory) = (length(), pod.ledger.0.state.lock().store.memory());
    pod.accept(Type::CLUSTER, "2", &all, &[]);
    assert!(pod.write());
    assert!(length() < before + 4096, "a record only");
    assert_eq!(pod.ledger.0.state.lock().store.memory(), memory);
    // A change at the end of one.
    let changed = resources(&[("a", &format!("{}!", &a[..a.len() - 1])), ("b", &b)]);
    pod.accept(Type::CLUSTER, "3", &changed, &[]);
    assert!(pod.write());
    assert!(pod.stored(Type::CLUSTER) == changed && in_file(parent.path()) == changed);
}

#[tokio::test(start_paused = true)]
async fn blocks_do_not_pile_up_and_the_file_stays_small() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    let mut all: Resources = (0..500).map(|it| (format!("name-{it}"), content(400))).collect();
    pod.accept_first(&all);
    assert!(pod.write());
    let file = parent.path().join(DIRECTORY).join(FILE);
    let (first, memory) =
        (file.metadata().unwrap().len(), pod.ledger.0.state.lock().store.memory());
    for round in 0..1000 {
        let name = format!("name-{}", fastrand::usize(..500));
        let changed = resources(&[(&name, &content(400))]);
        pod.accept(Type::CLUSTER, &round.to_string(), &changed, &[]);
        all.extend(changed);
        if round % 5 == 0 {
            assert!(pod.write());
        }
    }
    assert!(pod.write());
    let (length, after) =
        (file.metadata().unwrap().len(), pod.ledger.0.state.lock().store.memory());
    assert!(after < 2 * memory, "{memory} {after}");
    assert!(length < 4 * first + 64 * 1024, "{first} {length}");
    assert!(pod.stored(Type::CLUSTER) == all);
    assert!(in_file(parent.path()) == all);
}

#[tokio::test(start_paused = true)]
async fn blocks_do_not_pile_up_in_a_ledger_without_a_file() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::with(Config { on_demand: true, ..config(parent.path()) });
    pod.ledger.0.state.lock().turn_off();
    let all: Resources = (0..500).map(|it| (format!("name-{it}"), content(400))).collect();
    pod.accept_first(&all);
    assert!(!pod.write());
    let memory = pod.ledger.0.state.lock().store.memory();
    for round in 0..1000 {
        let name = format!("name-{}", fastrand::usize(..500));
        let changed = resources(&[(&name, &content(400))]);
        pod.accept(Type::CLUSTER, &round.to_string(), &changed, &[]);
        let unanswered = resources(&[(&name, &content(400))]);
        pod.push(Type::CLUSTER, &format!("{round}-again"), &unanswered, &[]);
        assert!(!pod.write());
        pod.ack(Type::CLUSTER, &format!("{round}-again"));
    }
    let after = pod.ledger.0.state.lock().store.memory();
    assert!(after < 2 * memory, "{memory} {after}");
    assert!(!parent.path().join(DIRECTORY).join(FILE).exists());
}

#[tokio::test(start_paused = true)]
async fn an_hour_of_changed_endpoints_writes_at_most_4_mb() {
    // Like istiod's, the ten endpoints differ in a few bytes only.
    let assignment = || {
        let endpoint = || {
            let address = fastrand::u32(0..1 << 24);
            let [_, a, b, c] = address.to_be_bytes();
            format!(
                "10.{a}.{b}.{c} 8080 tls istio security.istio.io/tlsMode workload checkout-{address:x} \
                 payments Kubernetes region/zone-a topology.istio.io/network HEALTHY"
            )
        };
        std::iter::repeat_with(endpoint).take(10).collect::<String>()
    };
    for count in [3_000, 10_000] {
        let parent = tempfile::tempdir().unwrap();
        let mut pod = Pod::start(parent.path());
        let name = |number| format!("outbound|80||service-{number}.namespace.svc.cluster.local");
        let all: Resources = (0..count).map(|number| (name(number), assignment())).collect();
        pod.accept_first(&Resources::new());
        pod.want(Type::ENDPOINTS, &all.keys().map(|name| &**name).collect::<Vec<_>>());
        pod.accept(Type::ENDPOINTS, "first", &all, &[]);
        assert!(pod.write());
        let length = || parent.path().join(DIRECTORY).join(FILE).metadata().unwrap().len();
        let (mut written, mut before) = (0, length());
        for second in 0..3600 {
            advance(Duration::from_secs(1)).await;
            let changed = [(name(fastrand::usize(..count)), assignment())].into();
            pod.accept(Type::ENDPOINTS, &second.to_string(), &changed, &[]);
            let due = pod.ledger.0.state.lock().write_due();
            if due.is_some_and(|due| due.elapsed() > Duration::ZERO) && pod.write() {
                let after = length();
                // A file that has become shorter was written as a whole.
                written += after.checked_sub(before).unwrap_or(after);
                before = after;
            }
        }
        assert!(written > 0 && written <= 4_000_000, "{count}: {written}");
    }
}
