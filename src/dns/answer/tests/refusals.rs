//! Tests the responses to messages other than a standard query, and to arbitrary bytes.

use super::*;

#[test]
fn messages_other_than_a_standard_query_are_refused_or_ignored() {
    let good = query("www.google.com", 1, Some(1232));
    let changed = |at: usize, to: u8| {
        let mut query = good.clone();
        query[at] = to;
        query
    };
    let table = sample();
    // The expected second flags byte, which contains the response code, and the number of questions; `None` if
    // there is no response.
    for (what, query, expected) in [
        ("a fragment", good[..11].to_vec(), None),
        ("an answer", changed(2, 0x81), None),
        ("opcode STATUS", changed(2, 2 << 3), Some((0x84, 0))),
        ("opcode UPDATE", changed(2, 5 << 3), Some((0x84, 0))),
        ("no question", changed(5, 0), Some((0x81, 0))),
        ("two questions", changed(5, 2), Some((0x81, 0))),
        ("many questions", changed(4, 255), Some((0x81, 0))),
        ("many answers", changed(7, 2), Some((0x81, 1))),
        ("many authorities", changed(9, 2), Some((0x81, 1))),
        ("many additionals", changed(11, 3), Some((0x81, 1))),
        ("a header alone", good[..12].to_vec(), Some((0x81, 0))),
        ("half a name", good[..20].to_vec(), Some((0x81, 0))),
        ("a name without a type", good[..28].to_vec(), Some((0x81, 0))),
        ("half a record", good[..good.len() - 4].to_vec(), Some((0x81, 1))),
        ("a record too few", changed(11, 2), Some((0x81, 1))),
        ("a pointer to itself", changed(12, 0xc0), Some((0x81, 0))),
        ("a reserved label", changed(12, 0x40), Some((0x81, 0))),
        ("too long", [&good[..], &[0; 4096]].concat(), Some((0x81, 0))),
    ] {
        let (action, reply) = ask(Some(&table), &query, POLICY);
        let got = matches!(action, Action::Refuse).then(|| (reply[3], reply[5]));
        assert_eq!(got, expected, "{what}");
        let is_dropped = matches!(action, Action::Drop);
        assert_eq!(is_dropped, expected.is_none(), "{what}");
        if expected.is_some() {
            assert_eq!(reply[..2], query[..2], "{what}");
            decode(&reply);
        }
    }
}

#[test]
fn an_answer_has_the_agents_opt_record_without_the_clients_options() {
    let table = sample();
    let opt = [0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0];
    let with = |change: fn(&mut Vec<u8>)| {
        let mut opt = opt.to_vec();
        change(&mut opt);
        let mut asked = query("www.google.com", 1, None);
        asked[11] = 1;
        [asked, opt].concat()
    };
    let changed = |at: usize, to: u8| {
        let mut asked = with(|_| {});
        asked[at] = to;
        asked
    };
    let mut two = [with(|_| {}), opt.to_vec()].concat();
    two[11] = 2;
    let mut as_answer = changed(11, 0);
    as_answer[7] = 1;
    for (what, asked, rcode, flags) in [
        ("plain", with(|_| {}), 0, 0),
        ("DNSSEC", with(|opt| opt[7] = 0xff), 0, 0x80),
        ("no room", with(|opt| opt[3..5].fill(0)), 0, 0),
        (
            "a cookie",
            with(|opt| {
                opt[10] = 12;
                opt.extend([0, 10, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8]);
            }),
            0,
            0,
        ),
        ("no address of the family", changed(29, 28), 0, 0),
        ("version 1", with(|opt| opt[6] = 1), 16, 0),
        ("version 255 and DNSSEC", with(|opt| opt[6..8].fill(255)), 16, 0x80),
        ("two", two, 1, 0),
        ("not at the root", with(|opt| drop(opt.splice(..1, [1, b'a', 0]))), 1, 0),
        ("among the answers", as_answer, 1, 0),
        ("opcode UPDATE", changed(2, 5 << 3), 4, 0),
    ] {
        let (action, reply) = ask(Some(&table), &asked, POLICY);
        assert!(!matches!(action, Action::Forward(_) | Action::Drop), "{what}");
        let message = decode(&reply);
        let own = [0, 0, 41, 0x10, 0, rcode >> 4, 0, flags, 0, 0, 0];
        assert_eq!(message.edns, Some(own.to_vec()), "{what}");
        assert_eq!(message.flags[1] & 0xf, rcode & 0xf, "{what}");
        if let Action::Reply(_) = action {
            let (_, reply) = ask(None, &asked, POLICY);
            assert_eq!(decode(&reply).edns, Some(own.to_vec()), "{what} without a table");
        }
    }
    for asked in [query("www.google.com", 1, None), query("www.google.com", 1, None)[..30].to_vec()]
    {
        assert_eq!(decode(&ask(Some(&table), &asked, POLICY).1).edns, None);
    }
}

#[test]
fn a_pointer_loop_behind_the_question_is_an_error() {
    let mut query = query("www.google.com", 1, Some(1232));
    let at = query.len() - 11;
    let [high, low] = (at as u16 | 0xc000).to_be_bytes();
    query.splice(at..=at, [high, low]);
    let (_, reply) = ask(Some(&sample()), &query, POLICY);
    assert_eq!(reply[3] & 0xf, 1);
}

#[test]
fn an_answer_keeps_the_flags_that_a_client_sets() {
    let mut query = query("www.google.com", 1, None);
    query[3] = 0x10;
    let (_, reply) = ask(Some(&sample()), &query, POLICY);
    assert_eq!(decode(&reply).flags, [0x85, 0x90]);
}

proptest! {
    /// `PROPTEST_CASES` sets the number of cases.
    #[test]
    fn arbitrary_bytes_get_a_valid_dns_answer_or_none(bytes: Vec<u8>) {
        check(&bytes)?;
    }

    #[test]
    fn altered_queries_get_a_valid_dns_answer_or_none(
        changes in prop::collection::vec((0_usize..80, any::<u8>()), 0..4),
        cut in 0_usize..80,
        name in prop::sample::select(vec!["www.google.com", "a.wildcard.ns1.svc.cluster.local"]),
        edns: Option<u16>,
        kind in 0_u16..260,
    ) {
        let mut query = query(name, kind, edns);
        for (at, to) in changes {
            if let Some(byte) = query.get_mut(at) {
                *byte = to;
            }
        }
        check(&query)?;
        query.truncate(cut);
        check(&query)?;
    }

    #[test]
    fn a_message_is_cut_to_any_length(bytes: Vec<u8>, limit in 0_usize..2000, count: u8) {
        let mut message = query("giant.example", 1, None);
        message[7] = count;
        for n in 0..count {
            message.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4, 10, 0, 0, n]);
        }
        let mut cut = message.clone();
        wire::truncate(&mut cut, limit);
        prop_assert!(cut.len() <= limit.max(512));
        decode(&cut);
        message.extend(bytes.iter().cycle().take(3000));
        if message.len() > limit.max(512) {
            wire::truncate(&mut message, limit);
            prop_assert!(message.len() <= limit.max(512) && message[2] & wire::TC != 0);
        }
    }
}

fn check(query: &[u8]) -> Result<(), TestCaseError> {
    let table = sample();
    let mut out = Vec::new();
    let action = answer(query, Transport::Udp, Some(&table), POLICY, &mut out);
    if let Action::Reply(_) | Action::Refuse = action {
        prop_assert_eq!(&out[..2], &query[..2]);
        prop_assert!(out[2] & wire::QR != 0);
        decode(&out);
    }
    if let Action::Reply(question) | Action::Forward(question) = action {
        write_servfail(query, &question, &mut out);
        decode(&out);
    }
    Ok(())
}
