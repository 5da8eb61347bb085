use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};

use super::*;

fn resources(contents: &[(&str, &str, &[u8])]) -> Resources {
    let mut snapshot = Snapshot::default();
    for (type_url, name, content) in contents {
        snapshot.insert("common", Resource::new(*name, *type_url, content.to_vec()));
    }
    snapshot.of_node([])
}

fn error() -> Option<rpc::Status> {
    Some(rpc::Status::default())
}

mod state_of_the_world_protocol {
    use super::*;

    fn ask(type_url: &str, names: &[&str], nonce: &str) -> DiscoveryRequest {
        DiscoveryRequest {
            type_url: type_url.to_owned(),
            resource_names: names.iter().map(|name| (*name).to_owned()).collect(),
            response_nonce: nonce.to_owned(),
            ..DiscoveryRequest::default()
        }
    }

    fn names(response: &DiscoveryResponse) -> Vec<&[u8]> {
        let resources = response.resources.iter();
        resources.map(|any| any.value.as_slice()).collect()
    }

    #[test]
    fn answers_the_first_request_and_ignores_ack_nack_and_stale_nonces() {
        let all = resources(&[(CLUSTERS, "a", b"a"), (CLUSTERS, "b", b"b")]);
        let mut stream = state_of_the_world::Subscriptions::new(Report::default());
        let first = stream.request(ask(CLUSTERS, &[], ""), &all).unwrap();
        assert_eq!(names(&first), [b"a", b"b"]);
        assert!(stream.request(ask(CLUSTERS, &[], "old"), &all).is_none());
        assert!(stream.request(ask(CLUSTERS, &[], &first.nonce), &all).is_none());
        let nack =
            DiscoveryRequest { error_detail: error(), ..ask(CLUSTERS, &["c"], &first.nonce) };
        assert!(stream.request(nack, &all).is_none());
        let again = stream.request(ask(CLUSTERS, &[], ""), &all).unwrap();
        assert_eq!(again.version_info, first.version_info);
        assert_ne!(again.nonce, first.nonce);
    }

    #[test]
    fn sends_subscribed_resources_until_envoy_unsubscribes() {
        let all = resources(&[(ENDPOINTS, "a", b"a"), (ENDPOINTS, "b", b"b")]);
        let mut stream = state_of_the_world::Subscriptions::new(Report::default());
        let first = stream.request(ask(ENDPOINTS, &["a"], ""), &all).unwrap();
        assert_eq!(names(&first), [b"a"]);
        let more = stream.request(ask(ENDPOINTS, &["a", "b"], &first.nonce), &all).unwrap();
        assert_eq!(names(&more), [b"a", b"b"]);
        assert!(stream.request(ask(ENDPOINTS, &["b"], &more.nonce), &all).is_none());
        let changed = resources(&[(ENDPOINTS, "a", b"new"), (ENDPOINTS, "b", b"b")]);
        assert!(stream.update(&changed).is_empty());
        assert!(stream.request(ask(ENDPOINTS, &[], &more.nonce), &all).is_none());
        assert!(stream.update(&resources(&[])).is_empty());
    }

    #[test]
    fn pushes_changes_in_envoys_order_and_the_endpoints_of_changed_clusters_again() {
        let before = resources(&[
            (ROUTES, "r", b"r"),
            (LISTENERS, "l", b"l"),
            (ENDPOINTS, "a", b"e"),
            (CLUSTERS, "a", b"c"),
        ]);
        let mut stream = state_of_the_world::Subscriptions::new(Report::default());
        for (type_url, names) in
            [(ROUTES, &["r"][..]), (LISTENERS, &[]), (ENDPOINTS, &["a"]), (CLUSTERS, &[])]
        {
            assert!(stream.request(ask(type_url, names, ""), &before).is_some());
        }
        assert!(stream.update(&before).is_empty());
        let mut after = before.clone();
        after.extend(resources(&[(CLUSTERS, "a", b"new"), (LISTENERS, "l", b"new")]));
        let pushed = stream.update(&after);
        let types: Vec<_> = pushed.iter().map(|push| push.type_url.as_str()).collect();
        assert_eq!(types, [CLUSTERS, ENDPOINTS, LISTENERS, ROUTES]);
    }
}

mod delta_protocol {
    use super::*;

    fn ask(type_url: &str, subscribe: &[&str]) -> DeltaDiscoveryRequest {
        DeltaDiscoveryRequest {
            type_url: type_url.to_owned(),
            resource_names_subscribe: subscribe.iter().map(|name| (*name).to_owned()).collect(),
            ..DeltaDiscoveryRequest::default()
        }
    }

    fn names(response: &DeltaDiscoveryResponse) -> Vec<&str> {
        let resources = response.resources.iter();
        resources.map(|resource| resource.name.as_str()).collect()
    }

    #[test]
    fn sends_changed_resources_and_names_removed_ones() {
        let before = resources(&[(CLUSTERS, "a", b"a"), (CLUSTERS, "b", b"b")]);
        let mut stream = delta::Subscriptions::new(Report::default());
        let first = stream.request(ask(CLUSTERS, &[]), &before).unwrap();
        assert_eq!(names(&first), ["a", "b"]);
        let ack =
            DeltaDiscoveryRequest { response_nonce: first.nonce.clone(), ..ask(CLUSTERS, &[]) };
        assert!(stream.request(ack, &before).is_none());
        assert!(stream.update(&before).is_empty());
        let after = resources(&[(CLUSTERS, "b", b"new"), (CLUSTERS, "c", b"c")]);
        let pushed = stream.update(&after);
        assert_eq!(names(&pushed[0]), ["b", "c"]);
        assert_eq!(pushed[0].removed_resources, ["a"]);
        assert!(stream.update(&after).is_empty());
    }

    #[test]
    fn says_nothing_about_a_resource_that_is_withheld() {
        let mut snapshot = Snapshot::default();
        for name in ["a", "b"] {
            snapshot.insert("common", Resource::withheld(name, ENDPOINTS));
        }
        let withheld = snapshot.of_node([]);
        let mut stream = delta::Subscriptions::new(Report::default());
        assert!(stream.request(ask(ENDPOINTS, &["a"]), &withheld).is_none());
        assert!(stream.request(ask(ENDPOINTS, &["b"]), &withheld).is_none());
        let answer = stream.request(ask(ENDPOINTS, &["a", "none"]), &withheld);
        assert_eq!(answer.unwrap().removed_resources, ["none"]);
        let sent = resources(&[(ENDPOINTS, "a", b"a"), (ENDPOINTS, "b", b"b")]);
        assert_eq!(names(&stream.update(&sent)[0]), ["a", "b"]);
        assert!(stream.update(&withheld).is_empty());
    }

    #[test]
    fn does_not_resend_what_a_reconnected_envoy_has() {
        let all = resources(&[(CLUSTERS, "a", b"a"), (CLUSTERS, "b", b"b")]);
        let mut stream = delta::Subscriptions::new(Report::default());
        let has = [("a", version_of([&b"a"[..]])), ("gone", "1".to_owned())];
        let reconnect = DeltaDiscoveryRequest {
            initial_resource_versions: has.map(|(name, version)| (name.to_owned(), version)).into(),
            ..ask(CLUSTERS, &[])
        };
        let first = stream.request(reconnect, &all).unwrap();
        assert_eq!(names(&first), ["b"]);
        assert_eq!(first.removed_resources, ["gone"]);
    }

    #[test]
    fn adds_and_drops_names_and_answers_for_absent_ones() {
        let all = resources(&[(ENDPOINTS, "a", b"a"), (ENDPOINTS, "b", b"b")]);
        let mut stream = delta::Subscriptions::new(Report::default());
        let first = stream.request(ask(ENDPOINTS, &["a", "none"]), &all).unwrap();
        assert_eq!(names(&first), ["a"]);
        assert_eq!(first.removed_resources, ["none"]);
        let more = stream.request(ask(ENDPOINTS, &["b"]), &all).unwrap();
        assert_eq!(names(&more), ["b"]);
        let unsubscribe = DeltaDiscoveryRequest {
            resource_names_unsubscribe: vec!["a".to_owned()],
            ..ask(ENDPOINTS, &[])
        };
        assert!(stream.request(unsubscribe, &all).is_none());
        let changed = resources(&[(ENDPOINTS, "a", b"new"), (ENDPOINTS, "b", b"new")]);
        assert_eq!(names(&stream.update(&changed)[0]), ["b"]);
        let again = stream.request(ask(ENDPOINTS, &["b"]), &changed).unwrap();
        assert_eq!(names(&again), ["b"]);
    }

    #[test]
    fn ignores_stale_nonces_and_is_silent_to_a_nack() {
        let all = resources(&[(ENDPOINTS, "a", b"a"), (ENDPOINTS, "b", b"b")]);
        let mut stream = delta::Subscriptions::new(Report::default());
        let first = stream.request(ask(ENDPOINTS, &["a"]), &all).unwrap();
        let stale =
            DeltaDiscoveryRequest { response_nonce: "old".to_owned(), ..ask(ENDPOINTS, &["b"]) };
        assert!(stream.request(stale, &all).is_none());
        let nack = DeltaDiscoveryRequest {
            response_nonce: first.nonce,
            error_detail: error(),
            ..ask(ENDPOINTS, &[])
        };
        assert!(stream.request(nack, &all).is_none());
    }

    #[test]
    fn sends_the_endpoints_of_changed_clusters_again() {
        let before = resources(&[(CLUSTERS, "a", b"c"), (ENDPOINTS, "a", b"e")]);
        let mut stream = delta::Subscriptions::new(Report::default());
        assert!(stream.request(ask(CLUSTERS, &[]), &before).is_some());
        assert!(stream.request(ask(ENDPOINTS, &["a"]), &before).is_some());
        let after = resources(&[(CLUSTERS, "a", b"new"), (ENDPOINTS, "a", b"e")]);
        let pushed = stream.update(&after);
        let types: Vec<_> = pushed.iter().map(|push| push.type_url.as_str()).collect();
        assert_eq!(types, [CLUSTERS, ENDPOINTS]);
        assert_eq!(names(&pushed[1]), ["a"]);
    }
}
