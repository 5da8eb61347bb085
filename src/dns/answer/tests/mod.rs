//! Tests the answers to queries.

mod refusals;

use std::net::IpAddr;

use proptest::prelude::*;

use super::*;
use crate::dns::name_table::tests::{domains, encode, external, kubernetes, sample};

const POLICY: Policy = Policy { ttl: 30, forward_before_first_table: false };

/// Encodes a query. With `edns`, it has an OPT record that announces this UDP size and asks for DNSSEC.
pub(crate) fn query(name: &str, kind: u16, edns: Option<u16>) -> Vec<u8> {
    // The id, the flags with RD, and the numbers of questions, answers, authorities and additional records.
    let mut query = vec![0x12, 0x34, 0x01, 0, 0, 1, 0, 0, 0, 0, 0, u8::from(edns.is_some())];
    for label in name.split('.').filter(|label| !label.is_empty()) {
        query.push(label.len() as u8);
        query.extend(label.as_bytes());
    }
    query.push(0);
    query.extend([kind.to_be_bytes(), wire::IN.to_be_bytes()].concat());
    if let Some(size) = edns {
        query.extend([0, 0, 41]);
        query.extend(size.to_be_bytes());
        query.extend([0, 0, 0x80, 0, 0, 0]);
    }
    query
}

/// A decoded message.
#[derive(Debug, PartialEq)]
pub(crate) struct Message {
    pub(crate) flags: [u8; 2],
    pub(crate) question: String,
    pub(crate) answers: Vec<(String, u16, u32, String)>,
    /// The encoded OPT record.
    pub(crate) edns: Option<Vec<u8>>,
}

/// The OPT record of the agent in an answer to a query that asks for DNSSEC.
pub(crate) const OWN_OPT: [u8; 11] = [0, 0, 41, 0x10, 0, 0, 0, 0x80, 0, 0, 0];

pub(crate) fn decode(message: &[u8]) -> Message {
    let word = |at: usize| u16::from_be_bytes([message[at], message[at + 1]]);
    let mut at = 12;
    let mut question = String::new();
    for _ in 0..word(4) {
        (question, at) = name(message, at);
        at += 4;
    }
    let mut answers = Vec::new();
    let mut edns = None;
    for _ in 0..word(6) + word(8) + word(10) {
        let start = at;
        let (owner, fixed) = name(message, at);
        let length = usize::from(word(fixed + 8));
        let data = &message[fixed + 10..fixed + 10 + length];
        at = fixed + 10 + length;
        let text = match word(fixed) {
            1 => IpAddr::from(<[u8; 4]>::try_from(data).unwrap()).to_string(),
            28 => IpAddr::from(<[u8; 16]>::try_from(data).unwrap()).to_string(),
            5 => name(message, fixed + 10).0,
            41 => {
                assert!(edns.is_none(), "two OPT records");
                edns = Some(message[start..at].to_vec());
                continue;
            }
            _ => String::new(),
        };
        let ttl = u32::from(word(fixed + 4)) << 16 | u32::from(word(fixed + 6));
        answers.push((owner, word(fixed), ttl, text));
    }
    assert_eq!(at, message.len(), "no more than the header counts");
    Message { flags: [message[2], message[3]], question, answers, edns }
}

fn name(message: &[u8], mut at: usize) -> (String, usize) {
    let (mut text, mut end) = (String::new(), None);
    loop {
        let length = usize::from(message[at]);
        if length >= 192 {
            end = end.or(Some(at + 2));
            at = (length & 63) << 8 | usize::from(message[at + 1]);
        } else if length == 0 {
            return (text, end.unwrap_or(at + 1));
        } else {
            text += &message[at + 1..at + 1 + length].escape_ascii().to_string();
            text += ".";
            at += 1 + length;
        }
    }
}

fn ask(table: Option<&NameTable>, query: &[u8], policy: Policy) -> (Action, Vec<u8>) {
    let mut out = Vec::new();
    let action = answer(query, Transport::Udp, table, policy, &mut out);
    (action, out)
}

/// Queries the sample table. Returns the records of the answer, each as owner and data, sorted after a CNAME;
/// `None` if the query is forwarded.
fn answers_of(name: &str, kind: u16) -> Option<Vec<(String, String)>> {
    let query = query(name, kind, None);
    let (Action::Reply(_), reply) = ask(Some(&sample()), &query, POLICY) else {
        return None;
    };
    let message = decode(&reply);
    assert_eq!(message.flags, [0x85, 0x80], "authoritative, no error");
    assert_eq!(message.question, name);
    assert_eq!(reply[..2], query[..2], "the id");
    let is_first = |kind| message.answers.first().is_some_and(|answer| answer.1 == kind);
    let has_cname = message.answers.iter().any(|answer| answer.1 == 5);
    assert_eq!(has_cname, is_first(5), "a CNAME stands first");
    assert!(message.answers.iter().all(|answer| answer.2 == 30));
    let mut answers: Vec<_> = message.answers.into_iter().map(|a| (a.0, a.3)).collect();
    let first = usize::from(has_cname);
    answers[first..].sort();
    Some(answers)
}

const SEARCH: &str = "ns1.svc.cluster.local.";
const V6: &str = "2001:db8::ff00:42:8329";

#[test]
fn answers_addresses_as_the_table_says() {
    let remote = "details.ns2.svc.cluster.remote.";
    for (name, ip) in [
        ("www.google.com.", "1.1.1.1"),
        ("productpage.ns1.svc.cluster.local.", "9.9.9.9"),
        ("productpage.ns1.", "9.9.9.9"),
        ("productpage.ns1.svc.", "9.9.9.9"),
        ("productpage.", "9.9.9.9"),
        ("example.ns2.", "10.10.10.10"),
        ("example.ns2.svc.cluster.local.", "10.10.10.10"),
        ("example.ns2.svc.", "10.10.10.10"),
        ("svc-with-alt.", "15.15.15.15"),
        ("svc-with-alt.ns1.", "15.15.15.15"),
        ("svc-with-alt.ns1.svc.", "15.15.15.15"),
        ("svc-with-alt.ns1.svc.cluster.local.", "15.15.15.15"),
        ("svc-with-alt.ns1.svc.clusterset.local.", "15.15.15.15"),
        ("dual.localhost.", "2.2.2.2"),
        ("foo.wildcard.", "10.10.10.10"),
        ("a.b.wildcard.", "11.11.11.11"),
        ("x.a.b.wildcard.", "11.11.11.11"),
        ("*.wildcard.", "10.10.10.10"),
        ("foo.svc.mesh.company.net.", "10.1.2.3"),
        ("foo.foons.svc.mesh.company.net.", "10.1.2.3"),
        ("example.localhost.", "3.3.3.3"),
    ] {
        assert_eq!(answers_of(name, 1), Some(vec![(name.into(), ip.into())]), "{name}");
    }
    let four = [11, 12, 13, 14].map(|n| (remote.to_owned(), format!("{n}.{n}.{n}.{n}")));
    assert_eq!(answers_of(remote, 1), Some(four.into()));
    for name in ["dual.localhost.", "ipv6.localhost."] {
        assert_eq!(answers_of(name, 28), Some(vec![(name.into(), V6.into())]));
    }
}

#[test]
fn a_name_with_a_search_domain_is_a_cname() {
    for (name, target, ip) in [
        ("www.google.com.", "www.google.com.", "1.1.1.1"),
        ("productpage.ns1.", "productpage.ns1.", "9.9.9.9"),
        ("productpage.ns1.svc.", "productpage.ns1.svc.", "9.9.9.9"),
        ("example.ns2.svc.cluster.local.", "example.ns2.svc.cluster.local.", "10.10.10.10"),
        ("details.ns2.svc.cluster.remote.", "details.ns2.svc.cluster.remote.", "11.11.11.11"),
    ] {
        let searched = format!("{name}{SEARCH}");
        let said = answers_of(&searched, 1).expect(&searched);
        assert_eq!(said[0], (searched, target.to_owned()));
        assert_eq!(said[1], (target.to_owned(), ip.to_owned()));
    }
}

#[test]
fn a_family_without_addresses_is_an_empty_answer() {
    for (name, kind) in [
        ("ipv6.localhost.", 1),
        ("ipv4.localhost.", 28),
        ("productpage.ns1.ns1.svc.cluster.local.", 28),
        ("foo.wildcard.", 28),
    ] {
        assert_eq!(answers_of(name, kind), Some(vec![]), "{name}");
    }
}

#[test]
fn a_wildcard_with_a_search_domain_is_answered_without_a_star() {
    let mut alt = kubernetes("web", "ns1", &["7.7.7.7"]);
    alt.alt_hosts = vec!["*.web.example".into()];
    let hosts = [
        ("*.dual", external(&["1.1.1.1", "2.2.2.2", "::1"])),
        ("*.v6", external(&["::6"])),
        ("*.a.dual", external(&["3.3.3.3"])),
        ("web.ns1.svc.cluster.local", alt),
        ("*.ns1.svc.cluster.local", kubernetes("*", "ns1", &["8.8.8.8"])),
    ];
    let table = NameTable::build(&encode(hosts), domains()).expect("a table");
    for (name, kind, expected) in [
        ("x.dual", 1, &["1.1.1.1", "2.2.2.2"][..]),
        ("x.dual", 28, &["::1"]),
        ("x.dual", 255, &["1.1.1.1", "2.2.2.2", "::1"]),
        ("x.y.dual", 1, &["1.1.1.1", "2.2.2.2"]),
        ("x.a.dual", 1, &["3.3.3.3"]),
        ("x.a.dual", 28, &[]),
        ("X.v6", 28, &["::6"]),
        ("x.v6", 1, &[]),
        ("x.web.example", 1, &["7.7.7.7"]),
        ("x.ns1", 1, &["8.8.8.8"]),
        // The queried name itself has a star.
        ("*.dual", 28, &["::1"]),
    ] {
        for ending in ["", ".ns1.svc.cluster.local"] {
            let name = format!("{name}{ending}.");
            let (_, reply) = ask(Some(&table), &query(&name, kind, None), POLICY);
            let mut answers = decode(&reply).answers;
            answers.sort();
            assert!(answers.iter().all(|answer| answer.0 == name), "{answers:?}");
            let said: Vec<_> = answers.iter().map(|answer| &*answer.3).collect();
            assert_eq!(said, expected, "{name} {kind}");
        }
    }
}

#[test]
fn names_and_types_not_in_the_name_table_are_forwarded() {
    for (name, kind) in [
        ("www.bing.com.", 1),
        ("productpage.ns1.svc.cluster.local.ns1.svc.cluster.local.", 1),
        ("example.", 1),
        ("details.ns2.", 1),
        ("example.ns2.svc.cluster.", 1),
        ("wildcard.", 1),
        ("www.google.com.svc.cluster.local.", 1),
        (".", 1),
        ("www.google.com.", 15),
        ("www.google.com.", 16),
        ("www.google.com.", 33),
        ("www.google.com.", 64),
        ("www.google.com.", 65),
    ] {
        assert_eq!(answers_of(name, kind), None, "{name} {kind}");
    }
    let mut chaos = query("www.google.com", 1, None);
    *chaos.last_mut().unwrap() = 3;
    assert!(matches!(ask(Some(&sample()), &chaos, POLICY).0, Action::Forward(_)));
}

#[test]
fn a_query_of_type_any_is_answered_with_both_address_families() {
    let name = "dual.localhost.".to_owned();
    let both = vec![(name.clone(), "2.2.2.2".to_owned()), (name.clone(), V6.to_owned())];
    let mut said = answers_of(&name, 255).unwrap();
    said.sort();
    assert_eq!(said, both);
}

#[test]
fn case_is_kept_in_names_and_lower_in_targets() {
    let (_, reply) = ask(Some(&sample()), &query("wWw.GooGle.coM", 1, None), POLICY);
    let message = decode(&reply);
    assert_eq!(message.question, "wWw.GooGle.coM.");
    assert_eq!(message.answers[0].0, "wWw.GooGle.coM.");
    let searched = format!("ProductPage.Ns1.{SEARCH}");
    let (_, reply) = ask(Some(&sample()), &query(&searched, 1, None), POLICY);
    let answers = decode(&reply).answers;
    assert_eq!(answers[0].0, searched);
    assert_eq!((&*answers[0].3, &*answers[1].0), ("productpage.ns1.", "productpage.ns1."));
}

#[test]
fn a_dot_byte_inside_a_label_does_not_separate_labels() {
    let mut query = query("wwwxgoogle.com", 1, None);
    query[16] = b'.';
    assert!(matches!(ask(Some(&sample()), &query, POLICY).0, Action::Forward(_)));
}

fn question(query: &[u8]) -> Question {
    wire::read_query(query).expect("a question")
}

#[test]
fn names_that_need_escapes_as_text_are_not_looked_up() {
    let long = "UP.".repeat(80);
    for (text, is_plain) in [
        ("www.google.com.", true),
        (&long, true),
        (".", true),
        ("a_b.*.c/9:-.", true),
        ("[A].z{.", true),
        ("caf\u{e9}.com.", false),
        ("a b.", false),
        ("a'.bcdefghijk.", true),
        ("ab.", true),
    ] {
        let query = query(text, 1, None);
        let expected = text.trim_end_matches('.').to_ascii_lowercase();
        let found = question(&query).text(&query);
        let expected = is_plain.then_some(expected.as_bytes());
        assert_eq!(found.as_deref(), expected, "{text}");
    }
    for label in 0..=u8::MAX {
        let mut query = query("xx", 1, None);
        query[13] = label;
        let is_plain = label.is_ascii_graphic() && label != b'.';
        let expected = [label.to_ascii_lowercase(), b'x'];
        let found = question(&query).text(&query);
        assert_eq!(found.as_deref(), is_plain.then_some(&expected[..]));
    }
}

#[test]
fn without_a_table_a_query_fails_or_is_passed_on() {
    let query = query("www.google.com", 1, None);
    let (_, reply) = ask(None, &query, POLICY);
    let message = decode(&reply);
    assert_eq!((message.flags, &*message.question), ([0x81, 0x82], "www.google.com."));
    let policy = Policy { forward_before_first_table: true, ..POLICY };
    assert!(matches!(ask(None, &query, policy).0, Action::Forward(_)));
}

#[test]
fn an_answer_is_no_longer_than_the_client_takes() {
    let ips: Vec<_> = (0..200).map(|n| format!("10.0.0.{n}")).collect();
    let ips: Vec<_> = ips.iter().map(String::as_str).collect();
    let table = NameTable::build(&encode([("giant", external(&ips))]), domains()).unwrap();
    // The header and the question have 23 bytes, the OPT record 11, and each address 16.
    for (edns, length, count) in
        [(None, 512, 30), (Some(0), 512, 29), (Some(600), 600, 35), (Some(4096), 3234, 200)]
    {
        let (_, reply) = ask(Some(&table), &query("giant", 1, edns), POLICY);
        let message = decode(&reply);
        assert!(reply.len() <= length, "{}", reply.len());
        assert_eq!(message.answers.len(), count, "{edns:?}");
        assert_eq!(message.flags[0] & wire::TC != 0, count < 200);
        assert_eq!(message.edns, edns.map(|_| OWN_OPT.to_vec()));
    }
    let mut out = Vec::new();
    let query = query("giant", 1, None);
    let action = answer(&query, Transport::Tcp, Some(&table), POLICY, &mut out);
    assert!(matches!(action, Action::Reply(_)));
    assert_eq!(out.len(), 23 + 200 * 16);
}

#[test]
fn addresses_take_turns() {
    let name = "details.ns2.svc.cluster.remote";
    let firsts: std::collections::BTreeSet<_> = (0..200)
        .map(|_| {
            decode(&ask(Some(&sample()), &query(name, 1, None), POLICY).1).answers[0].3.clone()
        })
        .collect();
    assert_eq!(firsts.len(), 4);
}
