//! Checks the MeshConfig file.
//!
//! Only `defaultConfig` has an effect on the agent. A few other members are checked, so that a file that
//! istiod would refuse is found early.

use std::time::Duration;

use crate::address::is_label;
use crate::duration;
use crate::problem::Problem;
use crate::proxy_config::field::camel_case;
use crate::proxy_config::yaml::{Node, Tree, line};

const PORT: &str = "a port from 1 to 65535";
const TIMEOUT: &str = "a duration from 1ms to 1h";
const DOMAIN: &str = "a name of labels, each of letters, digits and inner hyphens";

type Check = (&'static str, &'static str, fn(&Tree) -> bool);

const CHECKS: [Check; 5] = [
    ("proxy_listen_port", PORT, is_port),
    ("proxy_inbound_listen_port", PORT, is_port),
    ("connect_timeout", TIMEOUT, is_timeout),
    ("trust_domain", DOMAIN, is_domain),
    ("default_config", "an object", is_object),
];

pub(super) fn check(origin: &str, mesh: &Node) -> Vec<Problem> {
    let wrong = CHECKS.iter().filter_map(|(name, expected, is_good)| {
        let node = member(mesh, name).filter(|node| !is_good(&node.value))?;
        let subject = format!("{} of {origin} line {}", camel_case(name), line(node));
        Some(Problem::new(subject, node.value.shown(), *expected))
    });
    wrong.collect()
}

/// The member under its name in camel or snake case. A member that is null is not set.
pub(super) fn member<'n>(mesh: &'n Node, name: &str) -> Option<&'n Node> {
    let Tree::Map(entries) = &mesh.value else {
        return None;
    };
    let find = |name: &str| entries.iter().find(|(key, _)| key == name);
    let (_, node) = find(&camel_case(name)).or_else(|| find(name))?;
    (!matches!(node.value, Tree::Null)).then_some(node)
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

/// An empty name stands for the default.
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
    use crate::proxy_config::yaml;

    fn subjects(text: &str) -> Vec<String> {
        let mesh = yaml::object("mesh", text, &mut Vec::new())
            .expect("YAML")
            .expect("an object");
        let problems = check("mesh", &mesh).into_iter();
        problems.map(|problem| problem.subject).collect()
    }

    #[test]
    fn members_that_are_not_checked_do_no_harm() {
        let text = "proxyListenPort: 15001\nconnect_timeout: 10s\ntrustDomain: td-1.example\n\
                    extensionProviders: [{name: a}]\nfromTheFuture: 1\ndefaultConfig:\n";
        assert_eq!(subjects(text), [""; 0]);
    }

    #[test]
    fn values_istiod_would_refuse_are_named_with_their_line() {
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
