//! Tests when files are written, and which part of a refused response is stored.

use std::os::unix::fs::FileExt as _;

use tokio::time::{Instant, advance};

use super::*;

fn one(name: &str, mark: &str) -> Bytes {
    response(mark, &resources(&[(name, mark)]), &[])
}

/// Gives the writer a response and its ACK, without writing files.
fn apply_accepted(writer: &mut Writer, nonce: &str, bytes: &Bytes, coverage: Coverage) {
    apply(writer, 1, response_ops(nonce, bytes, coverage));
    apply(writer, 1, ack_or_nack_ops(nonce, true));
}

#[tokio::test(start_paused = true)]
async fn changes_of_five_seconds_are_written_together_each_resource_once() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path());
    let both = resources(&[("a", "0"), ("b", "0")]);
    store_accepted(&mut writer, "0", &response("0", &both, &[]), Coverage::All);
    let length = file(parent.path()).metadata().unwrap().len();
    let start = Instant::now();
    for number in 1..50 {
        let mark = number.to_string();
        apply_accepted(&mut writer, &mark, &one("a", &mark), Coverage::Part);
        assert_eq!(writer.due(), Some(start + Duration::from_secs(5)));
        advance(Duration::from_millis(100)).await;
    }
    assert_stored(parent.path(), Some(&both));
    let removed = response("50", &Resources::new(), &["b".to_owned()]);
    apply_accepted(&mut writer, "50", &removed, Coverage::Part);
    writer.write(false);
    assert_stored(parent.path(), Some(&resources(&[("a", "49")])));
    let added = file(parent.path()).metadata().unwrap().len() - length;
    assert!(added < 200, "{added}");
    assert!(writer.due() > Some(start + Duration::from_secs(1000)));
}

#[test]
fn more_than_two_megabytes_are_not_made_to_wait() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path());
    let large = |name: &str| resources(&[(name, &"1".repeat(600 << 10))]);
    let mut all = large("0");
    apply_accepted(&mut writer, "0", &response("0", &all, &[]), Coverage::All);
    for name in ["1", "2", "3"] {
        assert_stored(parent.path(), None);
        all.extend(large(name));
        let bytes = response(name, &large(name), &[]);
        apply_accepted(&mut writer, name, &bytes, Coverage::Part);
    }
    assert_stored(parent.path(), Some(&all));
}

#[test]
fn resources_above_the_size_limit_are_not_stored_and_this_is_not_a_failure() {
    let parent = tempfile::tempdir().unwrap();
    let mut handle = handle(parent.path());
    Arc::get_mut(&mut handle.shared).unwrap().config.max_bytes = 200_000;
    let mut writer = Writer::new(handle.shared.clone());
    let content = |bytes: usize| resources(&[("a", &"1".repeat(bytes))]);
    for (bytes, is_kept) in [(90_000, true), (210_000, false), (90_000, true)] {
        begin(&mut writer, 1, 1, IDENTITY);
        let log = logged(|| {
            store_accepted(&mut writer, "1", &response("1", &content(bytes), &[]), Coverage::All)
        });
        assert_stored(parent.path(), is_kept.then(|| content(bytes)).as_ref());
        assert_eq!(log.contains("needs more than 200000 bytes"), !is_kept, "{log}");
        let directory = fs::read_dir(parent.path().join(DIRECTORY)).unwrap();
        assert_eq!(directory.count(), usize::from(is_kept));
    }
    assert_eq!(writer.shared.failures.get(), 0);
}

/// Returns the stored resources after a response that changes `a`, `b` and `c` is refused with this reason.
fn stored_after_nack(reason: &str, coverage: Coverage) -> Resources {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path());
    let before = resources(&[("a", "0"), ("b", "0"), ("c", "0"), ("gone", "0")]);
    store_accepted(&mut writer, "0", &response("0", &before, &[]), Coverage::All);
    let changed = resources(&[("a", "1"), ("b", "1"), ("c", "1")]);
    apply(&mut writer, 1, response_ops("1", &response("1", &changed, &[]), coverage));
    let refused = WriteOp::AckOrNack("1".to_owned(), Some(reason.to_owned()));
    apply_and_write(&mut writer, 1, vec![refused]);
    assert_eq!(writer.shared.failures.get(), 0);
    stored_clusters(parent.path()).unwrap().unwrap()
}

#[test]
fn resources_that_the_reason_of_a_nack_does_not_name_are_stored() {
    let cluster = "Error adding/updating cluster(s) ";
    let listener = "Error adding/updating listener(s) ";
    let none = ["a", "b", "c"];
    for (reason, refused) in [
        (format!("{cluster}b: no such thing: c"), &["b"][..]),
        (format!("{cluster}a: bad, c: worse, really"), &["a", "c"]),
        (format!("{listener}c: bad\nmore of it\na: worse\n"), &["a", "c"]),
        // The reason names a resource of another response, or it is truncated, or it contains no names. Then all
        // resources of the response count as refused.
        (format!("{cluster}other: bad"), &none),
        (format!("{cluster}a: bad...(truncated)"), &none),
        ("a: bad".to_owned(), &none),
        (String::new(), &none),
    ] {
        for coverage in [Coverage::Part, Coverage::All] {
            let version = |name| if refused.contains(&name) { "0" } else { "1" };
            let mut expected = resources(&none.map(|name| (name, version(name))));
            // A first response of which nothing is accepted does not remove the resources that it lacks.
            if coverage == Coverage::Part || refused == none {
                expected.insert("gone".into(), "0".into());
            }
            assert_eq!(stored_after_nack(&reason, coverage), expected, "{reason}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_time_in_a_file_is_refreshed_each_hour_and_at_the_end_of_the_stream() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = writer(parent.path());
    store_accepted(&mut writer, "1", &one("a", "1"), Coverage::All);
    // Damages the header. It stays damaged if it is not written again.
    let mut is_refreshed = |op: Option<WriteOp>| {
        let opened = fs::File::options().write(true).open(file(parent.path()));
        opened.unwrap().write_all_at(&[0], 4095).unwrap();
        apply(&mut writer, 1, op.into_iter().collect());
        if writer.due().is_some_and(|due| due <= Instant::now()) {
            writer.write(false);
        }
        stored_clusters(parent.path()).is_ok()
    };
    assert!(!is_refreshed(None));
    advance(Duration::from_secs(3599)).await;
    assert!(!is_refreshed(None));
    advance(Duration::from_secs(1)).await;
    assert!(is_refreshed(None));
    assert!(!is_refreshed(None));
    assert!(is_refreshed(Some(WriteOp::End)));
    advance(Duration::from_secs(7200)).await;
    assert!(!is_refreshed(None));
}

#[tokio::test(start_paused = true)]
async fn pending_changes_are_written_when_the_agent_stops() {
    let parent = tempfile::tempdir().unwrap();
    let shutdown = CancellationToken::new();
    let config = handle(parent.path()).shared.config.clone();
    let (handle, writing) =
        LastKnownGood::new(config, None, &Registry::default(), shutdown.clone());
    let response = response_ops("1", &one("a", "1"), Coverage::All).into_iter();
    let ops = response.chain(ack_or_nack_ops("1", true)).map(|op| (CLUSTER, op));
    let first = ("", WriteOp::Begin(IDENTITY.to_owned(), 1, mpsc::channel(1).0));
    let batch = (1, std::iter::once(first).chain(ops).collect());
    handle.batches.send(batch).await.unwrap();
    let start = Instant::now();
    shutdown.cancel();
    writing.await;
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_stored(parent.path(), Some(&resources(&[("a", "1")])));
}
