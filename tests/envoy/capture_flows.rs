//! `istio-iptables --verify`, and what real packets do beside what `--explain` says.

use crate::capture::{istio_iptables, text};
use crate::support::namespace;

#[test]
fn verify_says_what_differs_and_exits_with_3_if_traffic_goes_elsewhere() {
    const TEST: &str =
        "capture_flows::verify_says_what_differs_and_exits_with_3_if_traffic_goes_elsewhere";
    if !namespace::is_inside(TEST) {
        return;
    }
    namespace::add_address("10.9.0.1/24");
    namespace::add_address("2001:db8::1/64");
    let words = "-i * -b * -d 15021 --dual-stack --native-nftables";
    let verify = || {
        let output = istio_iptables(0, &format!("{words} --verify"));
        (output.status.code(), text(&output))
    };
    let (code, said) = verify();
    assert_eq!(code, Some(3), "{said}");
    assert!(
        said.contains("IPv4: a rule is missing: nat: -A OUTPUT -j ISTIO_OUTPUT"),
        "{said}"
    );
    assert!(said.contains("IPv6: TCP from user "), "{said}");
    let output = istio_iptables(0, words);
    assert!(output.status.success(), "{}", text(&output));
    let right = "The rules are those that these arguments ask for: traffic is captured.\n";
    assert_eq!(verify(), (Some(0), right.to_owned()));
    // Named, and harmless.
    namespace::run("nft", &["add chain inet istio-proxy-nat istio-old"]);
    let (code, said) = verify();
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.contains("IPv4: a chain is not of this version of Istio: nat: istio-old\n"),
        "{said}"
    );
    namespace::run(
        "nft",
        &["insert rule inet istio-proxy-nat output ip daddr 10.0.0.0/8 accept"],
    );
    let (code, said) = verify();
    assert_eq!(code, Some(3), "{said}");
    let first = "IPv4: a rule of others comes first and may take traffic: nat: -A OUTPUT -d 10.0.0.0/8 -j ACCEPT";
    let example = "goes to its destination, expected that it is redirected to port 15001; it matches nat: -A OUTPUT -d 10.0.0.0/8 -j ACCEPT";
    assert!(said.contains(first) && said.contains(example), "{said}");
    assert!(!said.contains("IPv6: a rule"), "{said}");
}
