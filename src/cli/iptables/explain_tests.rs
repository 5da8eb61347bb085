//! Tests how flows of `--explain` are completed.

use super::*;

const USERS: &str = "root:x:0:0::/:/bin/sh\nbroken\nistio-proxy:x:1338:1339::/:/bin/false\n:x::\n";

#[test]
fn a_user_is_found_by_number_and_name() {
    assert_eq!(field(USERS, 0, "istio-proxy", 2), Some(1338));
    assert_eq!(field(USERS, 2, "1338", 3), Some(1339));
    for name in ["broken", "other", "x"] {
        assert_eq!(field(USERS, 0, name, 2), None, "{name}");
    }
}

#[tokio::test]
async fn loopback_and_own_addresses_are_reached_over_lo() {
    let interfaces = machine::interfaces().expect("interfaces");
    for own in interfaces.iter().map(Interface::ip).filter(|ip| ip.is_ipv4()) {
        let flow = format!("out,tcp,0,{own}:80").parse().expect("a flow");
        assert_eq!(packet(&flow, &interfaces).await.interface, "lo", "{own}");
    }
    let flow = "out,tcp,0/7,127.1.2.3:80,eth7".parse().expect("a flow");
    let packet = packet(&flow, &interfaces).await;
    assert_eq!(packet.interface, "eth7");
    let sender = packet.sender.expect("sent");
    assert_eq!(sender.group, Id::from(7));
}

#[tokio::test]
async fn names_of_users_and_groups_become_numbers_where_they_are_known() {
    let name = |name: &str| Id::Name(name.to_owned());
    assert_eq!(numbered("passwd", name("root")).await, Id::from(0));
    assert_eq!(numbered("group", name("root")).await, Id::from(0));
    let unknown = name("no-such-user");
    assert_eq!(numbered("passwd", unknown.clone()).await, unknown);
}
