//! Builds the rules from the configuration, in Istio's order.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Chain::{
    Divert, Drop, InRedirect, Inbound, IstioOutput, Output, OutputDns, Prerouting, ProtectAdmin,
    Redirect,
};
use super::Criterion as C;
use super::Match::{Is, Not};
use super::Table::{Filter, Mangle, Nat, Raw};
use super::Verdict::{Jump, Return, Zone};
use super::{Chain, DNS_PORT, Id, Match, Ports, Protocol, Rule, Rules, Table, Verdict};
use crate::capture::config::{Config, Mode, Selection};
use crate::net::address::Cidr;

/// Source addresses of connections that Envoy forwards unchanged to the application.
const PASSTHROUGH: [Cidr; 2] = [
    Cidr::single(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 6))),
    Cidr::single(IpAddr::V6(Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0, 6))),
];
/// Mark of what Envoy sends to an address of its own pod (TPROXY).
const SELF_CALL_MARK: u32 = 1338;
/// Envoy's admin port.
const ADMIN: u16 = 15000;

const TCP: Match = Is(C::Protocol(Protocol::Tcp));
const UDP: Match = Is(C::Protocol(Protocol::Udp));

/// Collects the rules in the order in which they are added to their chains.
struct Builder<'a> {
    config: &'a Config,
    /// Selects the rules of [`Rules::earlier`].
    is_earlier: bool,
    rules: Vec<Rule>,
}

impl Rules {
    /// Builds the rules as Istio's current version writes them.
    pub fn new(config: &Config) -> Self {
        Self::build(config, false)
    }

    /// Builds the rules as Istio writes them by iptables since 1.25, when DNS got its own chains: the jump is for
    /// both families, and queries of the proxy return once more, although they have left the chain before.
    pub fn earlier(config: &Config) -> Self {
        Self::build(config, true)
    }

    fn build(config: &Config, is_earlier: bool) -> Self {
        let mut builder = Builder { config, is_earlier, rules: Vec::new() };
        builder.add_interfaces();
        builder.drop_invalid();
        builder.add_redirects();
        builder.add_inbound();
        builder.add_outbound();
        if !config.dns.is_empty() {
            builder.add_dns();
        }
        builder.add_destinations();
        if config.mode == Mode::Tproxy {
            builder.add_tproxy_marks();
        }
        if config.protect_admin {
            builder.protect_admin();
        }
        Self { rules: builder.rules, has_v6: config.has_v6 }
    }
}

impl Builder<'_> {
    /// Appends a rule to a chain.
    fn append(&mut self, table: Table, chain: Chain, matches: &[Match], verdict: Verdict) {
        self.add((table, chain, None), matches, verdict);
    }

    /// Appends a rule to ISTIO_OUTPUT in the nat table, which decides on outbound traffic.
    fn append_outbound(&mut self, matches: &[Match], verdict: Verdict) {
        self.append(Nat, IstioOutput, matches, verdict);
    }

    /// Adds a rule for the family of its addresses, or for both families if it has no address.
    fn add(
        &mut self,
        (table, chain, position): (Table, Chain, Option<usize>),
        matches: &[Match],
        verdict: Verdict,
    ) {
        let family = matches.iter().find_map(|(Is(criterion) | Not(criterion))| match criterion {
            C::Source(range) | C::Destination(range) => Some(range.family()),
            _ => None,
        });
        self.rules.push(Rule {
            family,
            table,
            chain,
            position,
            matches: matches.to_vec(),
            verdict,
        });
    }

    fn loopback(&self) -> [Cidr; 2] {
        [self.config.loopback, Cidr::single(Ipv6Addr::LOCALHOST.into())]
    }

    /// Lets traffic over excluded interfaces pass, and traffic from virtual machines:
    /// [`Self::add_destinations`] inserts the rules that capture the latter before these.
    fn add_interfaces(&mut self) {
        let tables: &[Table] = match self.config.mode {
            Mode::Redirect => &[Nat],
            Mode::Tproxy => &[Nat, Mangle],
        };
        for table in tables {
            for name in &self.config.exclude_interfaces {
                self.append(*table, Prerouting, &[arrives_by(name)], Return);
                self.append(*table, Output, &[leaves_by(name)], Return);
            }
        }
        for name in &self.config.virtual_interfaces {
            self.add((Nat, Prerouting, Some(1)), &[arrives_by(name)], Return);
        }
    }

    fn drop_invalid(&mut self) {
        if self.config.drop_invalid {
            self.append(Mangle, Prerouting, &[Is(C::StateInvalid)], Jump(Drop));
            self.append(Mangle, Drop, &[], Verdict::Drop);
        }
    }

    /// Fills the chains that redirect to Envoy. Connections to the HBONE port are left alone.
    fn add_redirects(&mut self) {
        self.append(Nat, Inbound, &[TCP, Is(port(self.config.tunnel_port))], Return);
        self.append(Nat, Redirect, &[TCP], Verdict::Redirect(self.config.outbound_port));
        self.append(Nat, InRedirect, &[TCP], Verdict::Redirect(self.config.inbound_port));
    }

    /// Captures inbound connections to the selected ports.
    fn add_inbound(&mut self) {
        let config = self.config;
        if !config.captures_inbound() {
            return;
        }
        let table = match config.mode {
            Mode::Redirect => Nat,
            Mode::Tproxy => {
                self.add_tproxy_targets();
                Mangle
            }
        };
        self.append(table, Prerouting, &[TCP], Jump(Inbound));
        match &config.inbound {
            Selection::AllBut(excluded) => {
                for ports in excluded {
                    self.append(table, Inbound, &[TCP, Is(in_ports(ports))], Return);
                }
                self.capture_inbound(table, &[TCP]);
            }
            Selection::Only(included) => {
                for ports in included {
                    self.capture_inbound(table, &[TCP, Is(in_ports(ports))]);
                }
            }
        }
    }

    /// Fills the chains that mark packets and hand them to Envoy (TPROXY).
    fn add_tproxy_targets(&mut self) {
        let mark = self.config.tproxy_mark;
        let to_envoy = Verdict::Tproxy { port: self.config.inbound_port, mark };
        self.append(Mangle, Divert, &[], Verdict::SetMark(mark));
        self.append(Mangle, Divert, &[], Verdict::Accept);
        for range in self.loopback() {
            self.append(Mangle, Chain::Tproxy, &[Not(C::Destination(range)), TCP], to_envoy);
        }
    }

    /// Captures inbound connections that match.
    fn capture_inbound(&mut self, table: Table, matches: &[Match]) {
        if self.config.mode == Mode::Redirect {
            return self.append(table, Inbound, matches, Jump(InRedirect));
        }
        let known = [matches, &[Is(C::StateRelatedOrEstablished)]].concat();
        self.append(table, Inbound, &known, Jump(Divert));
        self.append(table, Inbound, matches, Jump(Chain::Tproxy));
    }

    /// Lets traffic pass that is excluded by port, source or owner. [`Self::add_destinations`] captures the rest.
    fn add_outbound(&mut self) {
        let config = self.config;
        self.append(Nat, Output, &[], Jump(IstioOutput));
        for excluded in &config.exclude_outbound_ports {
            for protocol in [TCP, UDP] {
                self.append_outbound(&[protocol, Is(in_ports(excluded))], Return);
            }
        }
        for range in PASSTHROUGH {
            self.append_outbound(&[leaves_by("lo"), Is(C::Source(range))], Return);
        }
        for owner in proxy_owners(config) {
            self.add_proxy_traffic(&owner);
        }
        match &config.owner_groups {
            Selection::AllBut(excluded) => {
                for id in excluded {
                    self.append_outbound(&[Is(C::Group(id.clone()))], Return);
                }
            }
            Selection::Only(included) => {
                let in_none: Vec<_> = included.iter().cloned().map(C::Group).map(Not).collect();
                self.append_outbound(&in_none, Return);
            }
        }
    }

    /// Lets the proxy's own traffic pass, except calls over `lo` to the pod's own address, which are
    /// inbound traffic. Lets the traffic of applications over `lo` pass.
    fn add_proxy_traffic(&mut self, owner: &C) {
        let tunnel = self.config.tunnel_port;
        let has_dns = !self.config.dns.is_empty();
        let not_inbound = match owner {
            C::User(_) if has_dns => C::DestinationPort(vec![53..=53, tunnel..=tunnel]),
            _ => port(tunnel),
        };
        for range in self.loopback() {
            let matches = [
                leaves_by("lo"),
                Not(C::Destination(range)),
                TCP,
                Not(not_inbound.clone()),
                Is(owner.clone()),
            ];
            self.append_outbound(&matches, Jump(InRedirect));
        }
        if !self.config.includes_loopback() {
            let mut matches = vec![leaves_by("lo")];
            if has_dns {
                matches.extend([TCP, Not(port(53))]);
            }
            matches.push(Not(owner.clone()));
            self.append_outbound(&matches, Return);
        }
        self.append_outbound(&[Is(owner.clone())], Return);
    }

    /// Redirects queries to the agent. Conntrack zones separate the proxy's queries to its resolver (1) from
    /// the queries of applications (2), because both may have the same addresses and ports.
    fn add_dns(&mut self) {
        self.append(Raw, Output, &[], Jump(OutputDns));
        if self.is_earlier {
            self.append_outbound(&[], Jump(OutputDns));
        } else {
            self.add_dns_jumps(Nat, IstioOutput, OutputDns);
        }
        let to_agent = Verdict::Redirect(DNS_PORT);
        for protocol in [TCP, UDP] {
            if self.is_earlier && protocol == UDP {
                for owner in proxy_owners(self.config) {
                    self.append(Nat, OutputDns, &[UDP, Is(port(53)), Is(owner)], Return);
                }
            }
            let query = [protocol, Is(port(53))];
            self.add_per_server((Nat, OutputDns), &query, C::Destination, to_agent);
        }
        for owner in proxy_owners(self.config) {
            for (port, zone) in [(port(53), 1), (C::SourcePort(DNS_PORT), 2)] {
                self.append(Raw, OutputDns, &[UDP, Is(port), Is(owner.clone())], Zone(zone));
            }
        }
        self.add_dns_jumps(Raw, Prerouting, Inbound);
        self.add_per_server((Raw, OutputDns), &[UDP, Is(port(53))], C::Destination, Zone(2));
        self.add_per_server((Raw, Inbound), &[UDP, Is(C::SourcePort(53))], C::Source, Zone(1));
    }

    /// Appends a jump for each family whose servers are captured, or one for both if all are.
    fn add_dns_jumps(&mut self, table: Table, chain: Chain, target: Chain) {
        let families = self.config.dns.iter().map(|server| server.map(|it| it.family()));
        for family in families.collect::<BTreeSet<_>>() {
            let matches = Vec::new();
            let verdict = Jump(target);
            self.rules.push(Rule { family, table, chain, position: None, matches, verdict });
        }
    }

    /// Appends a rule for each captured server, or one without an address if all are captured.
    fn add_per_server(
        &mut self,
        (table, chain): (Table, Chain),
        matches: &[Match],
        address: fn(Cidr) -> C,
        verdict: Verdict,
    ) {
        for server in &self.config.dns {
            let address = server.map(address).map(Is);
            let matches: Vec<_> = matches.iter().cloned().chain(address).collect();
            self.append(table, chain, &matches, verdict);
        }
    }

    /// Lets traffic to excluded destinations pass, and captures traffic to included ones.
    fn add_destinations(&mut self) {
        let config = self.config;
        for range in self.loopback().iter().chain(&config.exclude_ranges) {
            self.append_outbound(&[Is(C::Destination(*range))], Return);
        }
        let capture = Jump(Redirect);
        for included in &config.include_outbound_ports {
            self.append_outbound(&[TCP, Is(in_ports(included))], capture);
        }
        match &config.include_ranges {
            None => {
                self.append_outbound(&[], capture);
                for name in &config.virtual_interfaces {
                    self.add((Nat, Prerouting, Some(1)), &[arrives_by(name)], capture);
                }
            }
            Some(ranges) => {
                for range in ranges {
                    let destination = Is(C::Destination(*range));
                    for name in &config.virtual_interfaces {
                        let matches = [arrives_by(name), destination.clone()];
                        self.add((Nat, Prerouting, Some(1)), &matches, capture);
                    }
                    self.append_outbound(&[destination], capture);
                }
            }
        }
    }

    /// Marks Envoy's connections, whose source is the client's address.
    fn add_tproxy_marks(&mut self) {
        let marked = Is(C::Mark(self.config.tproxy_mark));
        let matches = [TCP, marked.clone()];
        self.append(Mangle, Prerouting, &matches, Verdict::SaveMark);
        let matches = [TCP, leaves_by("lo"), marked.clone()];
        self.append(Mangle, Output, &matches, Return);
        for owner in proxy_owners(self.config) {
            for range in self.loopback() {
                let matches = [Not(C::Destination(range)), TCP, leaves_by("lo"), Is(owner.clone())];
                self.append(Mangle, Output, &matches, Verdict::SetMark(SELF_CALL_MARK));
            }
        }
        let connection = Is(C::ConnectionMark(self.config.tproxy_mark));
        self.append(Mangle, Output, &[TCP, connection], Verdict::RestoreMark);
        self.add((Mangle, Inbound, Some(1)), &[TCP, marked], Return);
        for range in PASSTHROUGH {
            let matches = [TCP, Is(C::Source(range)), arrives_by("lo")];
            self.add((Mangle, Inbound, Some(2)), &matches, Return);
        }
        let matches = [TCP, arrives_by("lo"), Not(C::Mark(SELF_CALL_MARK))];
        self.add((Mangle, Inbound, Some(3)), &matches, Return);
    }

    /// Lets only root and the proxy's users open connections to the admin port. Later packets of a
    /// connection pass, because they may not have an owner any more.
    fn protect_admin(&mut self) {
        let matches = [leaves_by("lo"), TCP, Is(port(ADMIN))];
        self.add((Filter, Output, Some(1)), &matches, Jump(ProtectAdmin));
        self.append(Filter, ProtectAdmin, &[Is(C::StateRelatedOrEstablished)], Return);
        for user in [Id::from(0)].iter().chain(&self.config.uids) {
            self.append(Filter, ProtectAdmin, &[Is(C::User(user.clone()))], Return);
        }
        self.append(Filter, ProtectAdmin, &[TCP], Verdict::Reject);
    }
}

/// Returns criteria for each user and group of the proxy.
fn proxy_owners(config: &Config) -> impl Iterator<Item = C> {
    config.uids.iter().cloned().map(C::User).chain(config.gids.iter().cloned().map(C::Group))
}

fn arrives_by(interface: &str) -> Match {
    Is(C::InInterface(interface.to_owned()))
}

fn leaves_by(interface: &str) -> Match {
    Is(C::OutInterface(interface.to_owned()))
}

fn port(port: u16) -> C {
    C::DestinationPort(vec![port..=port])
}

fn in_ports(ports: &Ports) -> C {
    C::DestinationPort(vec![ports.clone()])
}
