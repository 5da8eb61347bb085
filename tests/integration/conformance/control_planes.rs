//! Tests several control planes of one authority: while the first one is unreachable, the second one serves.

use std::time::Duration;

use local_istiod::{Keys, LocalIstiod, Options};

use crate::support::place::Place;
use crate::support::programs::is_this_agent;
use crate::support::{ask_for_secrets, next_response, options, relays, until};

#[tokio::test]
async fn certificates_and_discovery_fail_over_and_return_to_the_first_control_plane() {
    if !is_this_agent("several control planes") {
        return;
    }
    let keys = Keys::generate("cluster.local").unwrap();
    // Each control plane has a certificate for its own address only, and signs certificates that are renewed within
    // seconds.
    let start = || {
        LocalIstiod::start(Options {
            keys: Some(keys.clone()),
            max_cert_ttl: Duration::from_secs(6),
            ..options()
        })
    };
    let (mut first, mut second) = (start().await.unwrap(), start().await.unwrap());
    let addresses = format!("{}, {}", first.address, second.address);
    let place = Place::with_envoy(&first).set("DISCOVERY_ADDRESS", &addresses);
    let agent = place.start().await;
    let mut secrets = ask_for_secrets(&place, &["default"]).await;
    next_response(&mut secrets).await;
    relays(&place, &mut first).await;
    assert_eq!(second.connections(), []);

    let options = first.kill().await;
    relays(&place, &mut second).await;
    until("a renewal", || second.certificates_signed() > 0).await;
    next_response(&mut secrets).await;
    let tried = format!("failed to connect to upstream {}", options.listen);
    // Two connections have tried three times each: the one for certificates, and the one for clients other than
    // Envoy, such as this test.
    assert_eq!(agent.log().matches(&tried).count(), 6);

    let mut first = LocalIstiod::start(options).await.unwrap();
    second.kill().await;
    relays(&place, &mut first).await;
    until("a renewal", || first.certificates_signed() > 0).await;
}
