//! How a flow is completed.

use super::*;

const USERS: &str = "root:x:0:0::/:/bin/sh\nbroken\nistio-proxy:x:1338:1339::/:/bin/false\n:x::\n";

#[test]
fn a_user_is_known_by_number_and_name() {
    let account = |number, name: Option<&str>| Account {
        number,
        name: name.map(str::to_owned),
    };
    let proxy = account(Some(1338), Some("istio-proxy"));
    for (given, completed) in [
        (account(None, Some("istio-proxy")), proxy.clone()),
        (account(Some(1338), None), proxy),
        (account(Some(7), None), account(Some(7), None)),
        (account(None, Some("broken")), account(None, Some("broken"))),
    ] {
        assert_eq!(complete(given, USERS), completed);
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
    assert_eq!(group.number, Some(7));
}
