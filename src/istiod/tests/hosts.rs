//! Tests the choice between several control planes.

use std::time::Duration;

use http_body_util::BodyExt;

use super::hold;
use crate::istiod::fake::{Fake, plaintext, run};
use crate::istiod::hosts::{Hosts, RETURN_AFTER};
use crate::istiod::{Body, Config};
use crate::problem::{Code, Problem};
use crate::runtime::duration::scaled;

fn why() -> Problem {
    Problem::new(Code::IstiodError, "istiod", "why")
}

fn several(addresses: &[impl std::fmt::Display]) -> Config {
    let mut configs = addresses.iter().map(plaintext);
    let first = configs.next().unwrap();
    Config { fallbacks: configs.collect(), ..first }
}

#[tokio::test(start_paused = true)]
async fn three_consecutive_failures_switch_the_control_plane_for_ten_minutes() {
    let hosts = Hosts::new(several(&["a:1", "b:1", "c:1"]));
    let mut used = String::new();
    for failed in [1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1] {
        let current = hosts.current().clone();
        used += &current.address[..1];
        assert_eq!(hosts.due().is_some(), !used.ends_with('a'));
        match failed {
            0 => hosts.record_success(&current),
            _ => {
                let has_moved = hosts.record_failure(&current, false, &why());
                assert_eq!(has_moved, hosts.current().address != current.address);
            }
        }
    }
    assert_eq!(used, "aaaaaabbbccca");
    let first = hosts.first().clone();
    assert!(!hosts.record_failure(&first, false, &why()));
    assert!(hosts.record_failure(&first, false, &why()));
    assert_eq!(hosts.current().address, "b:1");
    for _ in 0..2 {
        let wait = hosts.due().unwrap() - tokio::time::Instant::now();
        assert!((600..=660).contains(&wait.as_secs()), "{wait:?}");
        tokio::time::advance(wait).await;
        hosts.postpone();
    }
    hosts.return_to_first();
    assert_eq!((&*hosts.current().address, hosts.due()), ("a:1", None));
}

#[test]
fn a_single_control_plane_is_never_abandoned() {
    let hosts = Hosts::new(several(&["a:1"]));
    for timed_out in [false, true].repeat(5) {
        assert!(!hosts.record_failure(&hosts.current().clone(), timed_out, &why()));
        assert_eq!((&*hosts.current().address, hosts.due()), ("a:1", None));
    }
}

#[test]
fn a_silent_control_plane_is_abandoned_and_its_late_results_ignored() {
    let hosts = Hosts::new(several(&["a:1", "b:1"]));
    let first = hosts.current().clone();
    // Neither a failure nor a success of the abandoned control plane counts for the one in use.
    for _ in 0..5 {
        assert!(hosts.record_failure(&first, true, &why()));
        assert_eq!(&*hosts.current().address, "b:1");
    }
    let second = hosts.current().clone();
    assert!(!hosts.record_failure(&second, false, &why()));
    assert!(!hosts.record_failure(&second, false, &why()));
    hosts.record_success(&first);
    assert!(hosts.record_failure(&second, false, &why()));
    assert_eq!(&*hosts.current().address, "a:1");
}

/// Waits until the worker has set its timer, then advances the clock to the next dial of the first
/// control plane.
async fn ten_minutes_later() {
    tokio::time::sleep(Duration::from_millis(100)).await;
    tokio::time::pause();
    tokio::time::advance(scaled(RETURN_AFTER, 1.2)).await;
    tokio::time::resume();
}

#[tokio::test]
async fn calls_stay_with_the_second_until_the_first_answers_again() {
    let address = super::unused_address().await;
    let second = Fake::start(None).await;
    let (istiod, _tasks) = run(several(&[address, second.address]));
    let mut connection = istiod.connection().await.unwrap();
    assert_eq!(connection.about().peer, second.address.to_string());
    assert_eq!(istiod.address(), second.address.to_string());
    assert_eq!(istiod.status().dials, 4);
    let mut stream = hold(&istiod, &mut connection).await;
    let authority = second.seen().requests[0].uri.authority().cloned();
    assert_eq!(authority.unwrap().as_str(), second.address.to_string());

    ten_minutes_later().await;
    while istiod.status().dials < 5 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    second.say("still here");
    let data = stream.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(data, "still here");

    let first = Fake::at(address, None).await;
    ten_minutes_later().await;
    connection.superseded().await;
    // A call that is in flight continues on the old connection.
    second.say("the last word");
    let data = stream.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(data, "the last word");
    let mut connection = istiod.connection().await.unwrap();
    assert_eq!(connection.about().peer, address.to_string());
    assert_eq!(istiod.address(), address.to_string());
    let request = istiod.request("/any", Body::empty());
    connection.send(request).await.unwrap();
    let authority = first.seen().requests[0].uri.authority().cloned();
    assert_eq!(authority.unwrap().as_str(), address.to_string());
    // The first control plane is used again until it has failed three times.
    first.close();
    super::wait_until_disconnected(&istiod).await;
    assert_eq!(istiod.connection().await.unwrap().about().peer, address.to_string());
}
