//! How a flow is completed.

use super::*;

const USERS: &str = "root:x:0:0::/:/bin/sh\nbroken\nistio-proxy:x:1338:1339::/:/bin/false\n:x::\n";

#[test]
fn a_user_is_found_by_number_and_name() {
    assert_eq!(machine::uid_of("istio-proxy", USERS), Some(1338));
    assert_eq!(field(USERS, 2, "1338", 3), Some(1339));
    for name in ["broken", "other", "x"] {
        assert_eq!(machine::uid_of(name, USERS), None, "{name}");
    }
}

#[test]
fn loopback_and_own_addresses_are_reached_over_lo() {
    let interfaces = machine::interfaces().expect("interfaces");
    for own in interfaces
        .iter()
        .map(Interface::ip)
        .filter(|ip| ip.is_ipv4())
    {
        let flow = format!("out,tcp,0,{own}:80").parse().expect("a flow");
        assert_eq!(packet(&flow, &interfaces).interface, "lo", "{own}");
    }
    let flow = "out,tcp,0/7,127.1.2.3:80,eth7".parse().expect("a flow");
    let packet = packet(&flow, &interfaces);
    assert_eq!(packet.interface, "eth7");
    let Direction::Out { group, .. } = packet.direction else {
        panic!("sent");
    };
    assert_eq!(group, Id::from(7));
}
