//! The rules that capture DNS.
//!
//! Zones of conntrack keep apart what the proxy asks its resolver (1) and what applications ask (2):
//! both may have the same addresses and ports.

use std::net::IpAddr;

use super::Chain::{Inbound, IstioOutput, Output, OutputDns, Prerouting};
use super::Criterion as C;
use super::Match::Is;
use super::Table::{Nat, Raw};
use super::build::{Builder, TCP, port};
use super::{DNS_PORT, Family, Match, Place, Protocol, Verdict};
use crate::address::Cidr;
use crate::capture::config::DnsCapture;

pub(super) const UDP: Match = Is(C::Protocol(Protocol::Udp));

impl Builder<'_> {
    pub(super) fn dns(&mut self) {
        let Some(dns) = &self.config.dns else {
            return;
        };
        self.append(Raw, Output, [], Verdict::Jump(OutputDns));
        let families = families(dns);
        for family in &families {
            let place = (Nat, IstioOutput, Place::Last);
            self.add(*family, place, Vec::new(), Verdict::Jump(OutputDns));
        }
        for protocol in [TCP, UDP] {
            let query = vec![protocol, Is(port(53))];
            self.per_server(
                dns,
                (Nat, OutputDns),
                query,
                C::Destination,
                Verdict::Redirect(DNS_PORT),
            );
        }
        for owner in self.config.proxies() {
            for (port, zone) in [(port(53), 1), (C::SourcePort(DNS_PORT), 2)] {
                let matches = [UDP, Is(port), Is(C::Owner(owner.clone()))];
                self.append(Raw, OutputDns, matches, Verdict::Zone(zone));
            }
        }
        for family in families {
            let place = (Raw, Prerouting, Place::Last);
            self.add(family, place, Vec::new(), Verdict::Jump(Inbound));
        }
        let query = vec![UDP, Is(port(53))];
        self.per_server(
            dns,
            (Raw, OutputDns),
            query,
            C::Destination,
            Verdict::Zone(2),
        );
        let reply = vec![UDP, Is(C::SourcePort(53))];
        self.per_server(dns, (Raw, Inbound), reply, C::Source, Verdict::Zone(1));
    }

    /// Appends a rule for each captured server, or one without an address if all are captured.
    fn per_server(
        &mut self,
        dns: &DnsCapture,
        (table, chain): (super::Table, super::Chain),
        matches: Vec<Match>,
        at: fn(Cidr) -> C,
        verdict: Verdict,
    ) {
        let place = (table, chain, Place::Last);
        let DnsCapture::Servers(servers) = dns else {
            return self.add(None, place, matches, verdict);
        };
        for server in servers {
            let server = Cidr::from(*server);
            let mut matches = matches.clone();
            matches.push(Is(at(server)));
            self.add(Some(server.family()), place, matches, verdict);
        }
    }
}

/// The families whose servers are captured; None is both, by one rule.
fn families(dns: &DnsCapture) -> Vec<Option<Family>> {
    let DnsCapture::Servers(servers) = dns else {
        return vec![None];
    };
    let v4 = servers.iter().any(IpAddr::is_ipv4);
    let v6 = servers.iter().any(IpAddr::is_ipv6);
    let v4 = v4.then_some(Some(Family::V4));
    let v6 = v6.then_some(Some(Family::V6));
    v4.into_iter().chain(v6).collect()
}
