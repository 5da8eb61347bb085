use bytes::Bytes;
use tonic::Status;

use std::time::Duration;

use super::record::MAX_UNANSWERED;
use super::*;
use crate::xds::response::Consumer;

const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";

fn observer() -> (Observer, Registry) {
    let registry = Registry::default();
    (Observer::new(&registry, None), registry)
}

fn response(type_url: &str, nonce: &str) -> Received {
    Received {
        type_url: type_url.to_owned(),
        version: format!("version of {nonce}"),
        nonce: nonce.to_owned(),
        resources: 3,
        removed: 0,
        bytes: 100,
        consumer: Consumer::Envoy,
        names: Default::default(),
    }
}

fn recorded(observer: &Observer, type_url: &str) -> TypeSnapshot {
    observer.snapshot().types.remove(type_url).unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_ack_or_nack_is_matched_by_its_nonce() {
    // Envoy's ACKs and NACKs after two responses, the recorded numbers of both, and the version accepted last.
    for (answers, acks, nacks, accepted) in [
        (vec![("1", None), ("2", None)], 2, 0, Some("version of 2")),
        (vec![("2", None), ("1", None)], 1, 0, Some("version of 2")),
        (vec![("2", None), ("2", None)], 1, 0, Some("version of 2")),
        (vec![("1", None)], 1, 0, Some("version of 1")),
        (vec![("", None), ("old", None)], 0, 0, None),
        (vec![("1", None), ("2", Some("no"))], 1, 1, Some("version of 1")),
        (vec![("old", Some("no"))], 0, 1, None),
    ] {
        let (observer, _) = observer();
        observer.record_response(response(CLUSTER, "1"), Source::Istiod);
        observer.record_response(response(CLUSTER, "2"), Source::Istiod);
        for &(nonce, rejection) in &answers {
            observer.record_ack_or_nack(CLUSTER, nonce, rejection);
        }
        let seen = recorded(&observer, CLUSTER);
        assert_eq!((seen.acks, seen.nacks), (acks, nacks), "{answers:?}");
        let version = seen.last_ack.map(|ack| ack.version);
        assert_eq!(version.as_deref(), accepted, "{answers:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn records_the_last_response_its_age_and_how_long_its_ack_took() {
    let (observer, registry) = observer();
    observer.record_response(response(CLUSTER, "1"), Source::Istiod);
    tokio::time::advance(Duration::from_millis(20)).await;
    observer.record_ack_or_nack(CLUSTER, "1", None);
    tokio::time::advance(Duration::from_secs(2)).await;
    let seen = recorded(&observer, CLUSTER);
    let last = seen.last_response.unwrap();
    assert_eq!((&*last.version, &*last.nonce), ("version of 1", "1"));
    assert_eq!((last.resources, last.bytes, last.answered), (3, 100, true));
    assert_eq!(last.age_seconds, 2.02);
    assert_eq!(seen.last_ack.unwrap().after_seconds, 0.02);
    let page = registry.render();
    for line in [
        "istio_agent_xds_proxy_responses 1",
        "istio_agent_xds_push_to_ack_seconds_bucket{le=\"0.05\"} 1",
        "istio_agent_xds_push_to_ack_seconds_sum 0.02",
        &format!("istio_agent_xds_pushes_total{{type=\"{CLUSTER}\"}} 1"),
        &format!("istio_agent_xds_push_bytes_total{{type=\"{CLUSTER}\"}} 100"),
        &format!("istio_agent_xds_acks_total{{type=\"{CLUSTER}\"}} 1"),
        &format!("istio_agent_xds_nacks_total{{type=\"{CLUSTER}\"}} 0"),
        &format!("istio_agent_xds_last_push_timestamp_seconds{{type=\"{CLUSTER}\"}} 1"),
    ] {
        assert!(page.contains(line), "{line} in\n{page}");
    }
}

#[test]
fn a_nack_is_recorded_with_its_version_and_reason() {
    let (observer, _) = observer();
    observer.record_response(response(CLUSTER, "1"), Source::Istiod);
    let request = Request {
        frame: Bytes::from_static(&[0; 47]),
        type_url: CLUSTER.to_owned(),
        nonce: "1".to_owned(),
        rejection: Some("no such port".to_owned()),
    };
    observer.record_request(&request);
    let seen = recorded(&observer, CLUSTER);
    assert_eq!((seen.requests, seen.nacks), (1, 1));
    let rejected = seen.last_nack.unwrap();
    assert_eq!(rejected.version.as_deref(), Some("version of 1"));
    assert_eq!(rejected.reason, "no such port");
    assert!(seen.last_ack.is_none() && seen.last_response.unwrap().answered);
}

#[tokio::test(start_paused = true)]
async fn types_without_an_answer_are_named_after_some_seconds() {
    const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
    let request = |type_url: &str| Request { type_url: type_url.to_owned(), ..Request::default() };
    let empty = |type_url| Received { resources: 0, ..response(type_url, "1") };
    // The types that are asked for, the answers, whether Envoy needs listeners, and the words of the finding.
    for (asked, answers, needs_listeners, expected) in [
        (&[CLUSTER][..], vec![], false, Some("clusters: asked for since")),
        (&[CLUSTER], vec![empty(CLUSTER)], false, None),
        (&[CLUSTER], vec![empty(CLUSTER)], true, Some("last response with 0 resources")),
        (&[CLUSTER, LISTENER], vec![empty(CLUSTER)], false, Some("listeners: asked for since")),
        (&[CLUSTER, LISTENER], vec![empty(CLUSTER), empty(LISTENER)], false, None),
        (&[], vec![], true, None),
    ] {
        let (observer, _) = observer();
        observer.record_stream_begin(1, Protocol::Delta);
        for type_url in asked {
            observer.record_request(&request(type_url));
        }
        for answer in answers {
            let type_url = answer.type_url.clone();
            observer.record_first_response(1);
            observer.record_response(answer, Source::Istiod);
            observer.record_ack_or_nack(&type_url, "1", None);
        }
        assert_eq!(observer.snapshot().missing_listeners(needs_listeners), None);
        tokio::time::advance(Duration::from_secs(5)).await;
        let found = observer.snapshot().missing_listeners(needs_listeners);
        let found = found.map(|problem| problem.found);
        let has_words = |words: &&str| found.as_ref().is_some_and(|found| found.contains(words));
        assert_eq!(found.is_some(), expected.is_some(), "{found:?}");
        assert!(expected.as_ref().is_none_or(has_words), "{found:?}");
    }
}

#[test]
fn the_record_does_not_grow_with_what_istiod_and_envoy_send() {
    let (observer, _) = observer();
    let long = "é".repeat(1000);
    for number in 0..1000 {
        observer.record_response(response(&format!("type {number}"), &long), Source::Istiod);
    }
    for number in 0..1000 {
        observer.record_response(response(&long, &number.to_string()), Source::Istiod);
        observer.record_response(response("type 0", &number.to_string()), Source::Istiod);
    }
    observer.record_ack_or_nack("type 1", &long, None);
    let snapshot = observer.snapshot();
    assert_eq!(snapshot.types.len(), MAX_TYPES + 1);
    assert_eq!(snapshot.types[OTHER].responses, 2000 - MAX_TYPES as u64);
    let last = snapshot.types["type 1"].last_response.clone().unwrap();
    assert_eq!((last.nonce.len(), last.answered), (MAX_TEXT, true));
    let table = observer.table.lock();
    assert_eq!(table.types["type 0"].unanswered.len(), MAX_UNANSWERED);
}

#[test]
fn ends_of_streams_are_counted_once_for_each_side() {
    let (observer, registry) = observer();
    observer.record_stream_begin(1, Protocol::Delta);
    observer.record_first_response(1);
    observer.record_stream_begin(2, Protocol::Sotw);
    observer.record_istiod_end(&End::stopped());
    observer.record_stream_end(1, &End::stopped());
    let snapshot = observer.snapshot();
    let stream = snapshot.stream.unwrap();
    assert_eq!((stream.id, stream.connected), (2, false));
    assert_eq!(snapshot.last_end.unwrap().id, 1);
    let bad = End::bad_request(&Status::internal("x".repeat(1000)));
    observer.record_stream_end(2, &bad);
    let snapshot = observer.snapshot();
    assert!(snapshot.stream.is_none());
    assert_eq!(snapshot.streams, 2);
    assert_eq!(snapshot.last_end.unwrap().reason.len(), MAX_TEXT);
    let page = registry.render();
    for line in [
        "istio_agent_istiod_connection_terminations{type=\"cancelled\"} 1\n",
        "istio_agent_envoy_connection_terminations{type=\"cancelled\"} 1\n",
        "istio_agent_envoy_connection_terminations{type=\"error\"} 1\n",
    ] {
        assert!(page.contains(line), "{line} in\n{page}");
    }
    assert!(!page.contains("istiod_connection_terminations{type=\"error\"}"));
}
