//! Tests that a restarted Envoy gets the stored versions of resources that it refuses, with random histories of pushes,
//! NACKs and restarts.

use super::super::after_nack::{Stored, read_stored};
use super::super::file::LookupRequest;
use super::*;

/// An event of a history.
#[derive(Clone, Debug)]
enum Event {
    Push {
        /// The changed resources; true if Envoy does not accept the new version.
        names: Vec<(u8, bool)>,
        /// True if Envoy refuses all resources of the push when it does not accept one of them.
        refuses_all: bool,
        /// True if istiod's next response begins before the stored versions are read.
        is_overtaken: bool,
    },
    /// A restart of Envoy and the agent.
    Restart,
}

fn event() -> impl Strategy<Value = Event> {
    let push = (prop::collection::vec((0u8..8, any::<bool>()), 1..8), any::<[bool; 2]>());
    prop_oneof![
        5 => push.prop_map(|(names, [refuses_all, is_overtaken])| Event::Push { names, refuses_all, is_overtaken }),
        1 => Just(Event::Restart),
    ]
}

/// An Envoy with its agent.
struct Pod<'a> {
    parent: &'a Path,
    writer: Writer,
    lookup_requests: mpsc::Receiver<LookupRequest>,
    responses: u32,
    envoy: Resources,
}

impl<'a> Pod<'a> {
    fn start(parent: &'a Path) -> Self {
        let mut shared = handle(parent).shared;
        let address = ([127, 0, 0, 1], 1).into();
        let limit = Duration::from_secs(1);
        Arc::get_mut(&mut shared).unwrap().admin = Some(Admin { address, limit });
        let mut writer = Writer::new(shared);
        let (sender, lookup_requests) = mpsc::channel(16);
        let begin = WriteOp::Begin(IDENTITY.to_owned(), 1, sender);
        writer.apply_batch((1, vec![("", begin), (CLUSTER, subscribed(&[]))]));
        Self { parent, writer, lookup_requests, responses: 0, envoy: Resources::new() }
    }

    /// Relays a push, and Envoy's ACK or NACK of it. Returns the resources that Envoy accepts.
    fn push(&mut self, changed: &Resources, bad: &[String], is_whole: bool) -> Resources {
        self.responses += 1;
        let nonce = self.responses.to_string();
        let bytes = response(&nonce, changed, &[]);
        apply(&mut self.writer, 1, response_ops(&nonce, &bytes, Coverage::Part));
        let named: Vec<_> = bad.iter().map(|name| format!("{name}: bad")).collect();
        let (refusal, mut accepted) = match (bad.is_empty(), is_whole) {
            (true, _) => (None, changed.clone()),
            (false, true) => (Some("bad".to_owned()), Resources::new()),
            (false, false) => {
                let reason = format!("Error adding/updating cluster(s) {}", named.join(", "));
                (Some(reason), changed.clone())
            }
        };
        accepted.retain(|name, _| !bad.contains(name));
        self.envoy.extend(accepted.clone());
        apply(&mut self.writer, 1, vec![WriteOp::AckOrNack(nonce, refusal)]);
        accepted
    }

    /// Sends Envoy the stored versions that the writer requests, and returns them. Sends nothing if a response
    /// overtakes the requests.
    fn send_stored(&mut self, is_overtaken: bool) -> Resources {
        let mut sent = Resources::new();
        while let Ok(request) = self.lookup_requests.try_recv() {
            assert_eq!(request.answered_count, self.responses);
            if is_overtaken {
                continue;
            }
            self.writer.write(false);
            let accepted = self.envoy.keys().map(|name| digest(name.as_bytes())).collect();
            let Stored { request, frame, resources } =
                read_stored(&self.writer.shared, request, &accepted).unwrap();
            let names = request.reasons.keys().copied().collect();
            apply(&mut self.writer, 1, vec![WriteOp::LookedUp(names)]);
            let stored = stored_clusters(self.parent).unwrap().unwrap_or_default();
            assert_eq!(frame.is_some(), !resources.is_empty());
            for resource in resources {
                assert!(!self.envoy.contains_key(&resource.name), "Envoy has {}", resource.name);
                sent.insert(resource.name.clone(), stored[&resource.name].clone());
            }
        }
        self.envoy.extend(sent.clone());
        sent
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn envoy_has_the_version_that_was_accepted_last_of_each_resource(events in prop::collection::vec(event(), 1..30)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let _guard = runtime.enter();
        let parent = tempfile::tempdir().unwrap();
        let mut pod = Pod::start(parent.path());
        let name = |it: u8| format!("name {it}");
        // The content of each resource in istiod, and true if Envoy refuses it.
        let mut istiod: BTreeMap<_, _> = (0..8).map(|it| (name(it), ("first".to_owned(), false))).collect();
        let all = |istiod: &BTreeMap<String, (String, bool)>| istiod.keys().cloned().collect::<HashSet<_>>();
        let mut accepted = Resources::new();
        let mut names_to_send = all(&istiod);
        for (number, event) in events.into_iter().enumerate() {
            let Event::Push { names, refuses_all, is_overtaken } = event else {
                pod.writer.write(false);
                pod = Pod::start(parent.path());
                // The first response to a new Envoy has all resources.
                names_to_send = all(&istiod);
                continue;
            };
            if number > 0 {
                istiod.extend(names.iter().map(|(it, is_bad)| (name(*it), (number.to_string(), *is_bad))));
                names_to_send.extend(names.iter().map(|(it, _)| name(*it)));
            }
            let sent = std::mem::take(&mut names_to_send);
            let changed: Resources = sent.iter().map(|name| (name.clone(), istiod[name].0.clone())).collect();
            let bad: Vec<_> = sent.into_iter().filter(|name| istiod[name].1).collect();
            accepted.extend(pod.push(&changed, &bad, refuses_all));
            pod.send_stored(is_overtaken);
            pod.writer.write(false);
            let stored = stored_clusters(parent.path()).unwrap().unwrap_or_default();
            for name in changed.keys().filter(|name| !is_overtaken && stored.contains_key(*name)) {
                prop_assert!(pod.envoy.contains_key(name), "Envoy lacks {name}");
            }
            for (name, content) in &pod.envoy {
                prop_assert_eq!(Some(content), accepted.get(name), "{}", name);
            }
        }
    }
}
