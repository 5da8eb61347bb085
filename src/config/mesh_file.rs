//! The MeshConfig file, as far as it can be wrong.
//!
//! Only `defaultConfig` has an effect on the agent. A few other members are checked, because a file
//! that istiod would refuse is best found early.
//!
//! Does not know the schema of MeshConfig.

use std::time::Duration;

use super::members::is_label;
use super::yaml::{Node, Tree};
use super::{Notes, Problem, duration};

const PORT: &str = "a port from 1 to 65535";
const TIMEOUT: &str = "a duration from 1ms to 1h";
const DOMAIN: &str = "a name of labels, each of letters, digits and inner hyphens";

type Check = (&'static str, &'static str, &'static str, fn(&Tree) -> bool);

const CHECKS: [Check; 5] = [
    ("proxyListenPort", "proxy_listen_port", PORT, is_port),
    (
        "proxyInboundListenPort",
        "proxy_inbound_listen_port",
        PORT,
        is_port,
    ),
    ("connectTimeout", "connect_timeout", TIMEOUT, is_timeout),
    ("trustDomain", "trust_domain", DOMAIN, is_domain),
    ("defaultConfig", "default_config", "an object", is_object),
];

pub(super) fn check(origin: &str, mesh: &Node, notes: &mut Notes) {
    for (camel, snake, expected, is_good) in CHECKS {
        let given = member(mesh, camel, snake);
        let wrong = given.filter(|node| !matches!(node.tree, Tree::Null) && !is_good(&node.tree));
        notes.problems.extend(wrong.map(|node| Problem {
            subject: format!("{camel} of {origin} line {}", node.line),
            found: node.tree.shown(),
            expected: expected.to_owned(),
        }));
    }
}

/// The member under its name in camel or in snake case.
pub(super) fn member<'n>(mesh: &'n Node, camel: &str, snake: &str) -> Option<&'n Node> {
    let Tree::Map(entries) = &mesh.tree else {
        return None;
    };
    let find = |name: &str| entries.iter().find(|(key, _)| key == name);
    let entry = find(camel).or_else(|| find(snake))?;
    Some(&entry.1)
}

fn is_port(tree: &Tree) -> bool {
    let port = match tree {
        Tree::Number(number) => number.as_u64(),
        Tree::Text(text) => text.parse().ok(),
        _ => None,
    };
    port.is_some_and(|port| (1..=65535).contains(&port))
}

fn is_timeout(tree: &Tree) -> bool {
    let Tree::Text(text) = tree else {
        return false;
    };
    let allowed = Duration::from_millis(1)..=Duration::from_secs(3600);
    duration::parse(text).is_some_and(|timeout| allowed.contains(&timeout))
}

/// An empty one stands for the default.
fn is_domain(tree: &Tree) -> bool {
    let Tree::Text(text) = tree else {
        return false;
    };
    text.is_empty() || text.split('.').all(is_label)
}

fn is_object(tree: &Tree) -> bool {
    matches!(tree, Tree::Map(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::yaml;

    fn subjects(text: &str) -> Vec<String> {
        let mut notes = Notes::default();
        let mesh = yaml::object("mesh", text)
            .expect("YAML")
            .expect("an object");
        check("mesh", &mesh, &mut notes);
        let problems = notes.problems.into_iter();
        problems.map(|problem| problem.subject).collect()
    }

    #[test]
    fn a_mesh_istiod_would_take_is_good_whatever_else_it_says() {
        let text = "proxyListenPort: 15001\nconnect_timeout: 10s\ntrustDomain: td-1.example\n\
                    extensionProviders: [{name: a}]\nfromTheFuture: 1\ndefaultConfig:\n";
        assert_eq!(subjects(text), [""; 0]);
    }

    #[test]
    fn what_istiod_would_refuse_is_named_with_its_line() {
        let text = "proxyListenPort: 0\nproxy_inbound_listen_port: 70000\nconnectTimeout: 2h\n\
                    trustDomain: a..b\ndefaultConfig: []\n";
        let expected = [
            "proxyListenPort of mesh line 1",
            "proxyInboundListenPort of mesh line 2",
            "connectTimeout of mesh line 3",
            "trustDomain of mesh line 4",
            "defaultConfig of mesh line 5",
        ];
        assert_eq!(subjects(text), expected);
    }
}
