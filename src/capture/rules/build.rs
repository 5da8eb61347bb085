//! Builds the rules from the configuration, in Istio's order.

use super::Chain::{
    Divert, Drop, InRedirect, Inbound, IstioOutput, Output, Prerouting, ProtectAdmin, Redirect,
};
use super::Criterion as C;
use super::Match::{Is, Not};
use super::Table::{Filter, Mangle, Nat};
use super::{
    Chain, Criterion, Family, Id, Match, Owner, Place, Ports, Protocol, Rule, Table, Verdict,
};
use crate::address::Cidr;
use crate::capture::config::{Config, InboundPorts, Mode, OutboundRanges, OwnerGroups};

/// Source of connections that Envoy passes on unchanged to the application.
const PASSTHROUGH: [Cidr; 2] = [Cidr::v4(127, 0, 0, 6, 32), Cidr::low_v6(6)];
/// Mark of what Envoy sends to an address of its own pod (TPROXY).
const SELF_CALL_MARK: u32 = 1338;
/// Envoy's admin port.
const ADMIN: u16 = 15000;

pub(super) const TCP: Match = Is(C::Protocol(Protocol::Tcp));

/// The rules so far.
pub(super) struct Builder<'a> {
    pub(super) config: &'a Config,
    pub(super) rules: Vec<Rule>,
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
    builder.dns();
    builder.destinations();
    if config.mode == Mode::Tproxy {
        builder.tproxy_marks();
    }
    if config.protect_admin {
        builder.protect_admin();
    }
    builder.rules
}

impl Builder<'_> {
    /// Appends a rule to a chain, of both families.
    pub(super) fn append<const N: usize>(
        &mut self,
        table: Table,
        chain: Chain,
        matches: [Match; N],
        verdict: Verdict,
    ) {
        self.add(None, (table, chain, Place::Last), matches.into(), verdict);
    }

    /// Appends a rule with a range of addresses, of that range's family.
    pub(super) fn append_ranged<const N: usize>(
        &mut self,
        range: Cidr,
        (table, chain): (Table, Chain),
        matches: [Match; N],
        verdict: Verdict,
    ) {
        let family = Some(range.family());
        self.add(family, (table, chain, Place::Last), matches.into(), verdict);
    }

    fn insert<const N: usize>(
        &mut self,
        (table, chain, at): (Table, Chain, usize),
        matches: [Match; N],
        verdict: Verdict,
    ) {
        self.add(None, (table, chain, Place::At(at)), matches.into(), verdict);
    }

    pub(super) fn add(
        &mut self,
        family: Option<Family>,
        (table, chain, place): (Table, Chain, Place),
        matches: Vec<Match>,
        verdict: Verdict,
    ) {
        self.rules.push(Rule {
            family,
            table,
            chain,
            place,
            matches,
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
                self.append(*table, Prerouting, [Is(came)], Verdict::Return);
                self.append(*table, Output, [Is(leaves)], Verdict::Return);
            }
        }
        for name in &self.config.virtual_interfaces {
            let came = Is(C::InInterface(name.clone()));
            self.insert((Nat, Prerouting, 1), [came], Verdict::Return);
        }
    }

    fn drop_invalid(&mut self) {
        if self.config.drop_invalid {
            let invalid = Is(C::StateInvalid);
            self.append(Mangle, Prerouting, [invalid], Verdict::Jump(Drop));
            self.append(Mangle, Drop, [], Verdict::Drop);
        }
    }

    fn redirects(&mut self) {
        let config = self.config;
        let tunnel = port(config.tunnel_port);
        self.append(Nat, Inbound, [TCP, Is(tunnel)], Verdict::Return);
        for (chain, port) in [
            (Redirect, config.outbound_port),
            (InRedirect, config.inbound_port),
        ] {
            self.append(Nat, chain, [TCP], Verdict::Redirect(port));
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
        self.append(table, Prerouting, [TCP], Verdict::Jump(Inbound));
        match &config.inbound {
            InboundPorts::None => {}
            InboundPorts::AllBut(excluded) => {
                for excluded in excluded {
                    let matches = [TCP, Is(in_ports(excluded))];
                    self.append(table, Inbound, matches, Verdict::Return);
                }
                self.capture_inbound(table, vec![TCP]);
            }
            InboundPorts::Only(ports) => {
                for included in ports {
                    self.capture_inbound(table, vec![TCP, Is(in_ports(included))]);
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
        self.append(Mangle, Divert, [], Verdict::SetMark(mark));
        self.append(Mangle, Divert, [], Verdict::Accept);
        for range in self.loopback() {
            let matches = [Not(C::Destination(range)), TCP];
            self.append_ranged(range, (Mangle, Chain::Tproxy), matches, verdict);
        }
    }

    /// Captures inbound connections that match.
    fn capture_inbound(&mut self, table: Table, matches: Vec<Match>) {
        let place = (table, Inbound, Place::Last);
        if self.config.mode == Mode::Redirect {
            return self.add(None, place, matches, Verdict::Jump(InRedirect));
        }
        let mut known = matches.clone();
        known.push(Is(C::StateRelatedOrEstablished));
        self.add(None, place, known, Verdict::Jump(Divert));
        self.add(None, place, matches, Verdict::Jump(Chain::Tproxy));
    }

    fn outbound(&mut self) {
        let config = self.config;
        self.append(Nat, Output, [], Verdict::Jump(IstioOutput));
        for excluded in &config.exclude_outbound_ports {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                let matches = [Is(C::Protocol(protocol)), Is(in_ports(excluded))];
                self.append(Nat, IstioOutput, matches, Verdict::Return);
            }
        }
        for range in PASSTHROUGH {
            let matches = [leaves_by_lo(), Is(C::Source(range))];
            self.append_ranged(range, (Nat, IstioOutput), matches, Verdict::Return);
        }
        for owner in config.proxies() {
            self.proxy(&owner);
        }
        let group = |id: &Id| C::Owner(Owner::Group(id.clone()));
        match &config.owner_groups {
            OwnerGroups::AllBut(excluded) => {
                for excluded in excluded {
                    self.append(Nat, IstioOutput, [Is(group(excluded))], Verdict::Return);
                }
            }
            OwnerGroups::Only(included) => {
                let none = included.iter().map(|included| Not(group(included)));
                let place = (Nat, IstioOutput, Place::Last);
                self.add(None, place, none.collect(), Verdict::Return);
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
            self.append_ranged(
                range,
                (Nat, IstioOutput),
                matches,
                Verdict::Jump(InRedirect),
            );
        }
        let foreign = Not(C::Owner(owner.clone()));
        match (self.config.includes_loopback(), has_dns) {
            (true, _) => {}
            (false, true) => {
                let matches = [leaves_by_lo(), TCP, Not(port(53)), foreign];
                self.append(Nat, IstioOutput, matches, Verdict::Return);
            }
            (false, false) => {
                let matches = [leaves_by_lo(), foreign];
                self.append(Nat, IstioOutput, matches, Verdict::Return);
            }
        }
        let own = Is(C::Owner(owner.clone()));
        self.append(Nat, IstioOutput, [own], Verdict::Return);
    }

    fn destinations(&mut self) {
        let config = self.config;
        let place = (Nat, IstioOutput);
        for range in self.loopback().iter().chain(&config.exclude_ranges) {
            let to = Is(C::Destination(*range));
            self.append_ranged(*range, place, [to], Verdict::Return);
        }
        let capture = Verdict::Jump(Redirect);
        for included in &config.include_outbound_ports {
            self.append(Nat, IstioOutput, [TCP, Is(in_ports(included))], capture);
        }
        let came = |name: &String| Is(C::InInterface(name.clone()));
        match &config.include_ranges {
            OutboundRanges::All => {
                self.append(Nat, IstioOutput, [], capture);
                for name in &config.virtual_interfaces {
                    self.insert((Nat, Prerouting, 1), [came(name)], capture);
                }
            }
            OutboundRanges::Only(ranges) => {
                for range in ranges {
                    let to = Is(C::Destination(*range));
                    for name in &config.virtual_interfaces {
                        let first = (Nat, Prerouting, Place::At(1));
                        let matches = vec![came(name), to.clone()];
                        self.add(Some(range.family()), first, matches, capture);
                    }
                    self.append_ranged(*range, place, [to], capture);
                }
            }
        }
    }

    /// Tells Envoy's connections apart, whose source is the client's address.
    fn tproxy_marks(&mut self) {
        let config = self.config;
        let marked = || Is(C::Mark(config.tproxy_mark));
        self.append(Mangle, Prerouting, [TCP, marked()], Verdict::SaveMark);
        let matches = [TCP, leaves_by_lo(), marked()];
        self.append(Mangle, Output, matches, Verdict::Return);
        for owner in config.proxies() {
            for range in self.loopback() {
                let matches = [
                    Not(C::Destination(range)),
                    TCP,
                    leaves_by_lo(),
                    Is(C::Owner(owner.clone())),
                ];
                let verdict = Verdict::SetMark(SELF_CALL_MARK);
                self.append_ranged(range, (Mangle, Output), matches, verdict);
            }
        }
        let connection = Is(C::ConnectionMark(config.tproxy_mark));
        self.append(Mangle, Output, [TCP, connection], Verdict::RestoreMark);
        self.insert((Mangle, Inbound, 1), [TCP, marked()], Verdict::Return);
        let came_by_lo = || Is(C::InInterface("lo".to_owned()));
        for range in PASSTHROUGH {
            let matches = vec![TCP, Is(C::Source(range)), came_by_lo()];
            let second = (Mangle, Inbound, Place::At(2));
            self.add(Some(range.family()), second, matches, Verdict::Return);
        }
        let matches = [TCP, came_by_lo(), Not(C::Mark(SELF_CALL_MARK))];
        self.insert((Mangle, Inbound, 3), matches, Verdict::Return);
    }

    /// Lets root and the proxy's users alone open connections to the admin port. What a connection sends
    /// later passes: it may have no owner any more.
    fn protect_admin(&mut self) {
        let matches = [leaves_by_lo(), TCP, Is(port(ADMIN))];
        self.insert((Filter, Output, 1), matches, Verdict::Jump(ProtectAdmin));
        let known = Is(C::StateRelatedOrEstablished);
        self.append(Filter, ProtectAdmin, [known], Verdict::Return);
        for user in [Id::from(0)].iter().chain(&self.config.uids) {
            let owner = Is(C::Owner(Owner::User(user.clone())));
            self.append(Filter, ProtectAdmin, [owner], Verdict::Return);
        }
        self.append(Filter, ProtectAdmin, [TCP], Verdict::Reject);
    }
}

fn leaves_by_lo() -> Match {
    Is(C::OutInterface("lo".to_owned()))
}

pub(super) fn port(port: u16) -> Criterion {
    C::DestinationPort(vec![port..=port])
}

fn in_ports(ports: &Ports) -> Criterion {
    C::DestinationPort(vec![ports.clone()])
}
