//! Compares the ledger with a model, over random histories.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Event {
    Push {
        changed: Vec<u8>,
        removed: Vec<u8>,
        rejected: Rejection,
    },
    /// Envoy answers this many responses.
    Answer(usize),
    Write,
    Reconnect,
    /// Agent and Envoy are killed.
    Restart,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Rejection {
    None,
    /// Names of even numbers.
    Some,
    All,
}

fn event() -> impl Strategy<Value = Event> {
    let names = || prop::collection::vec(0..6_u8, 0..4);
    let rejection = prop_oneof![4 => Just(Rejection::None), 1 => Just(Rejection::Some), 1 => Just(Rejection::All)];
    prop_oneof![
        6 => (names(), names(), rejection).prop_map(|(changed, removed, rejected)| {
            let removed = removed.into_iter().filter(|it| !changed.contains(it)).collect();
            Event::Push { changed, removed, rejected }
        }),
        4 => (1..4_usize).prop_map(Event::Answer),
        2 => Just(Event::Write),
        1 => Just(Event::Reconnect),
        1 => Just(Event::Restart),
    ]
}

struct Unanswered {
    nonce: String,
    changed: Resources,
    removed: Vec<String>,
    rejected: Rejection,
    is_first: bool,
}

fn is_even(name: &str) -> bool {
    name.ends_with(['0', '2', '4'])
}

/// What Envoy and the store have.
#[derive(Default)]
struct Model {
    envoy: Resources,
    stored: Resources,
    lacking: HashSet<String>,
    unanswered: Vec<Unanswered>,
    is_first: bool,
}

impl Model {
    fn answer(&mut self, pod: &mut Pod) {
        if self.unanswered.is_empty() {
            return;
        }
        let next = self.unanswered.remove(0);
        let has_even = next.changed.keys().chain(&next.removed).any(|it| is_even(it));
        let is_all = next.rejected == Rejection::All;
        let rejects = |name: &str| is_all || next.rejected == Rejection::Some && is_even(name);
        match next.rejected {
            Rejection::Some if has_even => {
                let named = next.changed.keys().chain(&next.removed).filter(|it| is_even(it));
                let entries: Vec<_> = named.map(|it| format!("{it}: bad")).collect();
                let reason = format!("Error adding/updating cluster(s) {}", entries.join(", "));
                pod.nack(Type::CLUSTER, &next.nonce, &reason);
            }
            Rejection::All => pod.nack(Type::CLUSTER, &next.nonce, "bad"),
            _ => pod.ack(Type::CLUSTER, &next.nonce),
        }
        for (name, content) in &next.changed {
            if rejects(name) {
                self.lacking.insert(name.clone());
            } else {
                self.lacking.remove(name);
                self.envoy.insert(name.clone(), content.clone());
                self.stored.insert(name.clone(), content.clone());
            }
        }
        for name in &next.removed {
            if !rejects(name) {
                self.lacking.remove(name);
                self.envoy.remove(name);
                self.stored.remove(name);
            }
        }
        if next.is_first {
            if is_all {
                self.is_first = true;
            } else {
                let (envoy, lacking) = (&self.envoy, &self.lacking);
                self.stored.retain(|name, _| envoy.contains_key(name) || lacking.contains(name));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_ledger_and_the_file_have_what_envoy_has_accepted(
        events in prop::collection::vec(event(), 0..60),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async {
            let parent = tempfile::tempdir().unwrap();
            let mut pod = Pod::start(parent.path());
            let mut model = Model { is_first: true, ..Model::default() };
            let mut in_force = None;
            pod.subscribe_all();
            pod.accept(Type::LISTENER, "first", &Resources::new(), &[]);
            for (number, event) in events.into_iter().enumerate() {
                let nonce = number.to_string();
                match event {
                    Event::Push { changed, removed, rejected } => {
                        let content = |it: u8| (format!("n{it}"), format!("{it} of {nonce}"));
                        let changed: Resources = changed.into_iter().map(content).collect();
                        let removed: Vec<_> = removed.iter().map(|it| format!("n{it}")).collect();
                        let names: Vec<_> = removed.iter().map(String::as_str).collect();
                        pod.push(Type::CLUSTER, &nonce, &changed, &names);
                        let is_first = std::mem::take(&mut model.is_first);
                        let next = Unanswered { nonce, changed, removed, rejected, is_first };
                        model.unanswered.push(next);
                    }
                    Event::Answer(count) => {
                        (0..count).for_each(|_| model.answer(&mut pod));
                    }
                    Event::Write => {
                        if pod.write() {
                            assert!(model.unanswered.is_empty());
                            in_force = Some(model.stored.clone());
                        }
                    }
                    Event::Reconnect => {
                        pod.reconnect(pod.pid);
                        pod.subscribe(Type::LISTENER, &[]);
                        pod.accept(Type::LISTENER, "again", &Resources::new(), &[]);
                        let envoy = &model.envoy;
                        model.lacking.retain(|name| envoy.contains_key(name));
                        let had: Vec<_> = model.envoy.keys().map(String::as_str).collect();
                        pod.subscribe(Type::CLUSTER, &had);
                        model.unanswered.clear();
                        model.is_first = true;
                    }
                    Event::Restart => {
                        pod = Pod::start(parent.path());
                        pod.subscribe_all();
                        pod.accept(Type::LISTENER, "first", &Resources::new(), &[]);
                        let stored = in_force.clone().unwrap_or_default();
                        model = Model { stored, is_first: true, ..Model::default() };
                    }
                }
                assert_eq!(pod.stored(Type::CLUSTER), model.stored);
                if let Some(in_force) = &in_force {
                    assert_eq!(in_file(parent.path()), *in_force);
                }
            }
        });
    }
}
