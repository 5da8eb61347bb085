//! Tests how flows are parsed, and how decisions about them are explained.

use proptest::prelude::*;

use super::*;
use crate::capture::config::tests::checked;
use crate::capture::layout::Layout;
use crate::capture::packet::simulate;
use crate::capture::rules::{Family, Rules};

#[test]
fn a_flow_is_read_field_by_field() {
    let flow: Flow = "out, tcp, envoy/1337, 127.0.0.6, 10.0.0.5:443, eth1".parse().expect("a flow");
    let expected = Flow {
        user: Some(account("envoy").expect("a name")),
        group: Some(account("1337").expect("a number")),
        protocol: Protocol::Tcp,
        source: Some([127, 0, 0, 6].into()),
        destination: Some([10, 0, 0, 5].into()),
        port: 443,
        interface: Some("eth1".to_owned()),
    };
    assert_eq!(flow, expected);
    for text in [
        "out,udp,0,[2001:db8::5]:53",
        "in,tcp,8080",
        "in,tcp,10.0.0.9,8080",
        "in,tcp,2001:db8::9,[2001:db8::5]:8080,eth0",
        "in,udp,8080,eth0",
    ] {
        assert!(text.parse::<Flow>().is_ok(), "{text}");
    }
}

#[test]
fn a_wrong_flow_is_refused_with_what_was_found_and_expected() {
    for text in [
        "up,tcp,80",
        "out,tcp,-1,1.1.1.1:1",
        "out,tcp,1-2,1.1.1.1:1",
        "out,tcp,,1.1.1.1:1",
        "out,tcp,0/,1.1.1.1:1",
        "out,tcp,0/4294967296,1.1.1.1:1",
        "out,tcp,0,80",
        "out,tcp,0,1.1.1.1:65536",
        "out,tcp,0,1.1.1.1:0",
        "out,tcp,0,::1:443",
        "in,tcp,0",
        "in,tcp,host:80",
        "in,tcp,80,lo",
        "out,tcp,0,1.1.1.1:1,a b",
        "out,tcp,0,1.1.1.1:1,",
        "in,tcp,::1,1.1.1.1:1",
        "in,tcp,80,eth0,more",
        "out,tcp",
        "out",
        "",
    ] {
        let error = text.parse::<Flow>().expect_err(text);
        assert_eq!(error, problem("--explain", text, GRAMMAR));
    }
    let error = "out,sctp,0,1.1.1.1:1".parse::<Flow>().expect_err("sctp");
    let expected = problem("the protocol of --explain", "sctp", "tcp or udp");
    assert_eq!(error, expected);
}

#[test]
fn a_decision_is_explained_with_its_rules() {
    let (config, _) = checked(|s| {
        (s.istio_service_cidr, s.istio_inbound_ports) = ("*".to_owned(), "*".to_owned());
    });
    let layout = Layout::new(&Rules::new(&config), Family::V4);
    let mut packet = Packet {
        sender: Some(Sender {
            user: account("1337").expect("a number"),
            group: account("1337").expect("a number"),
        }),
        protocol: Protocol::Tcp,
        source: ([10, 0, 0, 1], 0).into(),
        destination: ([10, 0, 0, 5], 443).into(),
        interface: "eth0".to_owned(),
    };
    let text = |packet: &Packet| explain(packet, &simulate(&layout, packet), &config);
    assert_eq!(
        text(&packet),
        "TCP from user 1337, group 1337 at 10.0.0.1 to 10.0.0.5:443 over eth0 goes to its destination, not to Envoy\n  \
         nat: -A OUTPUT -j ISTIO_OUTPUT\n  \
         nat: -A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN\n"
    );
    packet.sender = None;
    packet.source = ([0, 0, 0, 0], 0).into();
    assert_eq!(
        text(&packet),
        "TCP to 10.0.0.5:443 over eth0 is redirected to port 15006, Envoy's for inbound connections\n  \
         nat: -A PREROUTING -p tcp -j ISTIO_INBOUND\n  \
         nat: -A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT\n  \
         nat: -A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006\n"
    );
    packet.protocol = Protocol::Udp;
    assert_eq!(
        text(&packet),
        "UDP to 10.0.0.5:443 over eth0 goes to its destination, not to Envoy\n  no rule matches\n"
    );
}

proptest! {
    #[test]
    fn a_flow_of_any_text_is_read_or_refused(
        text in "(out|in|x)?,(tcp|udp)?(,[0-9a-z:.\\[\\]/ \u{e9}-]{0,12}){0,4}|[ -~]{0,20}",
    ) {
        match text.parse::<Flow>() {
            Ok(flow) => prop_assert!(flow.port != 0 && flow.user.is_some() == text.trim_start().starts_with("out")),
            Err(problem) => prop_assert!(!problem.expected.is_empty()),
        }
    }
}
