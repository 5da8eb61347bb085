//! Builds the rules from the configuration, in Istio's order.

use std::collections::BTreeSet;

use super::Chain::{
    Divert, Drop, InRedirect, Inbound, IstioOutput, Output, OutputDns, Prerouting, ProtectAdmin,
    Redirect,
};
use super::Criterion as C;
use super::Match::{Is, Not};
use super::Place::At;
use super::Table::{Filter, Mangle, Nat, Raw};
use super::{
    Chain, Criterion, DNS_PORT, Id, Match, Owner, Place, Ports, Protocol, Rule, Table, Verdict,
};
use crate::address::Cidr;
use crate::capture::config::{Config, DnsCapture, InboundPorts, Mode, OutboundRanges, OwnerGroups};

/// Source of connections that Envoy passes on unchanged to the application.
const PASSTHROUGH: [Cidr; 2] = [Cidr::v4(127, 0, 0, 6, 32), Cidr::low_v6(6)];
/// Mark of what Envoy sends to an address of its own pod (TPROXY).
const SELF_CALL_MARK: u32 = 1338;
/// Envoy's admin port.
const ADMIN: u16 = 15000;

const TCP: Match = Is(C::Protocol(Protocol::Tcp));
const UDP: Match = Is(C::Protocol(Protocol::Udp));

/// The rules so far.
struct Builder<'a> {
    config: &'a Config,
    rules: Vec<Rule>,
}

pub(super) fn rules(config: &Config) -> Vec<Rule> {
    let mut builder = Builder {
        config,
        rules: Vec::new(),
    };
    builder.interfaces();
    builder.drop_invalid();
    builder.redirects();
    builder.inbound();
    builder.outbound();
    if let Some(dns) = &config.dns {
        builder.dns(dns);
    }
    builder.destinations();
    if config.mode == Mode::Tproxy {
        builder.tproxy_marks();
    }
    if config.protect_admin {
        builder.protect_admin();
    }
    builder.rules
}

/// The rules as Istio writes them since 1.25, when it gave DNS chains of its own: queries of the proxy,
/// which have left before, return once more, in both families.
pub(super) fn earlier(config: &Config) -> Vec<Rule> {
    let mut rules = rules(config);
    for rule in &mut rules {
        if rule.verdict == Verdict::Jump(OutputDns) {
            rule.family = None;
        }
    }
    rules.dedup();
    let is_query =
        |rule: &Rule| (rule.table, rule.chain) == (Nat, OutputDns) && rule.matches[0] == UDP;
    if let Some(at) = rules.iter().position(is_query) {
        let returns = config.proxies().map(|owner| Rule {
            family: None,
            table: Nat,
            chain: OutputDns,
            place: Place::Last,
            matches: vec![UDP, Is(port(53)), Is(C::Owner(owner))],
            verdict: Verdict::Return,
        });
        rules.splice(at..at, returns.collect::<Vec<_>>());
    }
    rules
}

impl Builder<'_> {
    /// Appends a rule to a chain, of the family of its addresses, or else of both.
    fn append(&mut self, table: Table, chain: Chain, matches: &[Match], verdict: Verdict) {
        self.add((table, chain, Place::Last), matches, verdict);
    }

    fn add(
        &mut self,
        (table, chain, place): (Table, Chain, Place),
        matches: &[Match],
        verdict: Verdict,
    ) {
        let family = |(Is(criterion) | Not(criterion)): &Match| match criterion {
            C::Source(range) | C::Destination(range) => Some(range.family()),
            _ => None,
        };
        self.rules.push(Rule {
            family: matches.iter().find_map(family),
            table,
            chain,
            place,
            matches: matches.to_vec(),
            verdict,
        });
    }

    fn loopback(&self) -> [Cidr; 2] {
        [self.config.loopback, Cidr::low_v6(1)]
    }

    fn interfaces(&mut self) {
        let tables: &[Table] = match self.config.mode {
            Mode::Redirect => &[Nat],
            Mode::Tproxy => &[Nat, Mangle],
        };
        for table in tables {
            for name in &self.config.exclude_interfaces {
                let (came, leaves) = (C::InInterface(name.clone()), C::OutInterface(name.clone()));
                self.append(*table, Prerouting, &[Is(came)], Verdict::Return);
                self.append(*table, Output, &[Is(leaves)], Verdict::Return);
            }
        }
        for name in &self.config.virtual_interfaces {
            let came = Is(C::InInterface(name.clone()));
            self.add((Nat, Prerouting, At(1)), &[came], Verdict::Return);
        }
    }

    fn drop_invalid(&mut self) {
        if self.config.drop_invalid {
            let invalid = Is(C::StateInvalid);
            self.append(Mangle, Prerouting, &[invalid], Verdict::Jump(Drop));
            self.append(Mangle, Drop, &[], Verdict::Drop);
        }
    }

    fn redirects(&mut self) {
        let config = self.config;
        let tunnel = port(config.tunnel_port);
        self.append(Nat, Inbound, &[TCP, Is(tunnel)], Verdict::Return);
        for (chain, port) in [
            (Redirect, config.outbound_port),
            (InRedirect, config.inbound_port),
        ] {
            self.append(Nat, chain, &[TCP], Verdict::Redirect(port));
        }
    }

    fn inbound(&mut self) {
        let config = self.config;
        if config.inbound == InboundPorts::None {
            return;
        }
        let table = match config.mode {
            Mode::Redirect => Nat,
            Mode::Tproxy => {
                self.tproxy_targets();
                Mangle
            }
        };
        self.append(table, Prerouting, &[TCP], Verdict::Jump(Inbound));
        match &config.inbound {
            InboundPorts::None => {}
            InboundPorts::AllBut(excluded) => {
                for excluded in excluded {
                    let matches = [TCP, Is(in_ports(excluded))];
                    self.append(table, Inbound, &matches, Verdict::Return);
                }
                self.capture_inbound(table, &[TCP]);
            }
            InboundPorts::Only(ports) => {
                for included in ports {
                    self.capture_inbound(table, &[TCP, Is(in_ports(included))]);
                }
            }
        }
    }

    fn tproxy_targets(&mut self) {
        let mark = self.config.tproxy_mark;
        let verdict = Verdict::Tproxy {
            port: self.config.inbound_port,
            mark,
        };
        self.append(Mangle, Divert, &[], Verdict::SetMark(mark));
        self.append(Mangle, Divert, &[], Verdict::Accept);
        for range in self.loopback() {
            let matches = [Not(C::Destination(range)), TCP];
            self.append(Mangle, Chain::Tproxy, &matches, verdict);
        }
    }

    /// Captures inbound connections that match.
    fn capture_inbound(&mut self, table: Table, matches: &[Match]) {
        if self.config.mode == Mode::Redirect {
            return self.append(table, Inbound, matches, Verdict::Jump(InRedirect));
        }
        let known = [matches, &[Is(C::StateRelatedOrEstablished)]].concat();
        self.append(table, Inbound, &known, Verdict::Jump(Divert));
        self.append(table, Inbound, matches, Verdict::Jump(Chain::Tproxy));
    }

    fn outbound(&mut self) {
        let config = self.config;
        self.append(Nat, Output, &[], Verdict::Jump(IstioOutput));
        for excluded in &config.exclude_outbound_ports {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                let matches = [Is(C::Protocol(protocol)), Is(in_ports(excluded))];
                self.append(Nat, IstioOutput, &matches, Verdict::Return);
            }
        }
        for range in PASSTHROUGH {
            let matches = [leaves_by_lo(), Is(C::Source(range))];
            self.append(Nat, IstioOutput, &matches, Verdict::Return);
        }
        for owner in config.proxies() {
            self.proxy(&owner);
        }
        let group = |id: &Id| C::Owner(Owner::Group(id.clone()));
        match &config.owner_groups {
            OwnerGroups::AllBut(excluded) => {
                for excluded in excluded {
                    self.append(Nat, IstioOutput, &[Is(group(excluded))], Verdict::Return);
                }
            }
            OwnerGroups::Only(included) => {
                let none = included.iter().map(|included| Not(group(included)));
                let none: Vec<_> = none.collect();
                self.append(Nat, IstioOutput, &none, Verdict::Return);
            }
        }
    }

    /// What the proxy's own processes send passes, but calls over `lo` to the pod's own address, which
    /// are inbound traffic; what applications send over `lo` passes.
    fn proxy(&mut self, owner: &Owner) {
        let tunnel = self.config.tunnel_port;
        let has_dns = self.config.dns.is_some();
        let not_inbound = match owner {
            Owner::User(_) if has_dns => C::DestinationPort(vec![53..=53, tunnel..=tunnel]),
            _ => port(tunnel),
        };
        for range in self.loopback() {
            let matches = [
                leaves_by_lo(),
                Not(C::Destination(range)),
                TCP,
                Not(not_inbound.clone()),
                Is(C::Owner(owner.clone())),
            ];
            self.append(Nat, IstioOutput, &matches, Verdict::Jump(InRedirect));
        }
        let foreign = Not(C::Owner(owner.clone()));
        if !self.config.includes_loopback() {
            let matches = match has_dns {
                true => vec![leaves_by_lo(), TCP, Not(port(53)), foreign],
                false => vec![leaves_by_lo(), foreign],
            };
            self.append(Nat, IstioOutput, &matches, Verdict::Return);
        }
        let own = Is(C::Owner(owner.clone()));
        self.append(Nat, IstioOutput, &[own], Verdict::Return);
    }

    /// Zones of conntrack keep apart what the proxy asks its resolver (1) and what applications ask (2):
    /// both may have the same addresses and ports.
    fn dns(&mut self, dns: &DnsCapture) {
        self.append(Raw, Output, &[], Verdict::Jump(OutputDns));
        self.dns_jump(dns, Nat, IstioOutput, OutputDns);
        let query = |protocol| [protocol, Is(port(53))];
        for protocol in [TCP, UDP] {
            let to_agent = Verdict::Redirect(DNS_PORT);
            self.per_server(
                dns,
                (Nat, OutputDns),
                query(protocol),
                C::Destination,
                to_agent,
            );
        }
        for owner in self.config.proxies() {
            for (port, zone) in [(port(53), 1), (C::SourcePort(DNS_PORT), 2)] {
                let matches = [UDP, Is(port), Is(C::Owner(owner.clone()))];
                self.append(Raw, OutputDns, &matches, Verdict::Zone(zone));
            }
        }
        self.dns_jump(dns, Raw, Prerouting, Inbound);
        self.per_server(
            dns,
            (Raw, OutputDns),
            query(UDP),
            C::Destination,
            Verdict::Zone(2),
        );
        let reply = [UDP, Is(C::SourcePort(53))];
        self.per_server(dns, (Raw, Inbound), reply, C::Source, Verdict::Zone(1));
    }

    /// Appends a jump for each family whose servers are captured, or one for both if all are.
    fn dns_jump(&mut self, dns: &DnsCapture, table: Table, chain: Chain, target: Chain) {
        let families: BTreeSet<_> = match dns {
            DnsCapture::All => [None].into(),
            DnsCapture::Servers(servers) => {
                let servers = servers.iter().map(|server| Cidr::from(*server));
                servers.map(|server| Some(server.family())).collect()
            }
        };
        self.rules.extend(families.into_iter().map(|family| Rule {
            family,
            table,
            chain,
            place: Place::Last,
            matches: Vec::new(),
            verdict: Verdict::Jump(target),
        }));
    }

    /// Appends a rule for each captured server, or one without an address if all are captured.
    fn per_server(
        &mut self,
        dns: &DnsCapture,
        (table, chain): (Table, Chain),
        matches: [Match; 2],
        at: fn(Cidr) -> C,
        verdict: Verdict,
    ) {
        let DnsCapture::Servers(servers) = dns else {
            return self.append(table, chain, &matches, verdict);
        };
        for server in servers {
            let server = Is(at(Cidr::from(*server)));
            let matches = [&matches[..], &[server]].concat();
            self.append(table, chain, &matches, verdict);
        }
    }

    fn destinations(&mut self) {
        let config = self.config;
        for range in self.loopback().iter().chain(&config.exclude_ranges) {
            let to = Is(C::Destination(*range));
            self.append(Nat, IstioOutput, &[to], Verdict::Return);
        }
        let capture = Verdict::Jump(Redirect);
        for included in &config.include_outbound_ports {
            self.append(Nat, IstioOutput, &[TCP, Is(in_ports(included))], capture);
        }
        let came = |name: &String| Is(C::InInterface(name.clone()));
        match &config.include_ranges {
            OutboundRanges::All => {
                self.append(Nat, IstioOutput, &[], capture);
                for name in &config.virtual_interfaces {
                    self.add((Nat, Prerouting, At(1)), &[came(name)], capture);
                }
            }
            OutboundRanges::Only(ranges) => {
                for range in ranges {
                    let to = Is(C::Destination(*range));
                    for name in &config.virtual_interfaces {
                        let matches = [came(name), to.clone()];
                        self.add((Nat, Prerouting, At(1)), &matches, capture);
                    }
                    self.append(Nat, IstioOutput, &[to], capture);
                }
            }
        }
    }

    /// Tells Envoy's connections apart, whose source is the client's address.
    fn tproxy_marks(&mut self) {
        let config = self.config;
        let marked = || Is(C::Mark(config.tproxy_mark));
        self.append(Mangle, Prerouting, &[TCP, marked()], Verdict::SaveMark);
        let matches = [TCP, leaves_by_lo(), marked()];
        self.append(Mangle, Output, &matches, Verdict::Return);
        for owner in config.proxies() {
            for range in self.loopback() {
                let matches = [
                    Not(C::Destination(range)),
                    TCP,
                    leaves_by_lo(),
                    Is(C::Owner(owner.clone())),
                ];
                let verdict = Verdict::SetMark(SELF_CALL_MARK);
                self.append(Mangle, Output, &matches, verdict);
            }
        }
        let connection = Is(C::ConnectionMark(config.tproxy_mark));
        self.append(Mangle, Output, &[TCP, connection], Verdict::RestoreMark);
        self.add((Mangle, Inbound, At(1)), &[TCP, marked()], Verdict::Return);
        let came_by_lo = || Is(C::InInterface("lo".to_owned()));
        for range in PASSTHROUGH {
            let matches = [TCP, Is(C::Source(range)), came_by_lo()];
            self.add((Mangle, Inbound, At(2)), &matches, Verdict::Return);
        }
        let matches = [TCP, came_by_lo(), Not(C::Mark(SELF_CALL_MARK))];
        self.add((Mangle, Inbound, At(3)), &matches, Verdict::Return);
    }

    /// Lets root and the proxy's users alone open connections to the admin port. What a connection sends
    /// later passes: it may have no owner any more.
    fn protect_admin(&mut self) {
        let matches = [leaves_by_lo(), TCP, Is(port(ADMIN))];
        self.add(
            (Filter, Output, At(1)),
            &matches,
            Verdict::Jump(ProtectAdmin),
        );
        let known = Is(C::StateRelatedOrEstablished);
        self.append(Filter, ProtectAdmin, &[known], Verdict::Return);
        for user in [Id::from(0)].iter().chain(&self.config.uids) {
            let owner = Is(C::Owner(Owner::User(user.clone())));
            self.append(Filter, ProtectAdmin, &[owner], Verdict::Return);
        }
        self.append(Filter, ProtectAdmin, &[TCP], Verdict::Reject);
    }
}

fn leaves_by_lo() -> Match {
    Is(C::OutInterface("lo".to_owned()))
}

fn port(port: u16) -> Criterion {
    C::DestinationPort(vec![port..=port])
}

fn in_ports(ports: &Ports) -> Criterion {
    C::DestinationPort(vec![ports.clone()])
}
