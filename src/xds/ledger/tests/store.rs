use super::*;

/// Returns content that is not compressed to nearly nothing.
fn content(length: usize) -> String {
    std::iter::repeat_with(|| fastrand::char(' '..'~')).take(length).collect()
}

#[tokio::test(start_paused = true)]
async fn a_resource_of_any_size_comes_out_as_it_went_in_whatever_the_chunks() {
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
            assert!(pod.ledger.0.state.lock().is_unused(), "{length} {chunk}");
            assert!(in_file(parent.path()).is_empty());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn blocks_do_not_pile_up_while_resources_change_and_the_file_stays_small() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    let mut all: Resources = (0..500).map(|it| (format!("name-{it}"), content(400))).collect();
    pod.accept_first(&all);
    assert!(pod.write());
    let file = parent.path().join(DIRECTORY).join(FILE);
    let (first, memory) = (file.metadata().unwrap().len(), pod.ledger.0.state.lock().memory());
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
    let (length, after) = (file.metadata().unwrap().len(), pod.ledger.0.state.lock().memory());
    assert!(after < 2 * memory, "{memory} {after}");
    assert!(length < 4 * first + 64 * 1024, "{first} {length}");
    assert!(pod.stored(Type::CLUSTER) == all);
    assert!(in_file(parent.path()) == all);
}
