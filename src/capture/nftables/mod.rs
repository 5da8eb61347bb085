//! Renders the rules as one transaction of `nft`, applies it, and reads the live rules.
//!
//! The tables have no rules of others. Their family is inet: IPv4 and IPv6 share the chains.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, json};

use super::config::range;
use super::layout::{self, Entry, Layout};
use super::rules::{
    Chain, Criterion, Family, Id, Match, Ports, Protocol, Rule, Rules, Table, Verdict, named,
};
use crate::net::address::Cidr;
use crate::net::netlink::nft_chains;
use crate::problem::{Code, Problem};
use crate::program;

/// Time limit of `nft`.
const LIMIT: Duration = Duration::from_secs(60);

/// Replaces the rules in our tables by these, in one transaction.
pub async fn apply(rules: &Rules) -> Result<(), Problem> {
    execute(&transaction(rules)).await
}

/// Removes our tables in one transaction, if there are any.
pub async fn clean() -> Result<(), Problem> {
    if !has_tables() {
        return Ok(());
    }
    execute(&removal()).await
}

async fn execute(text: &str) -> Result<(), Problem> {
    for line in text.lines() {
        tracing::info!("nft: {line}");
    }
    nft(&["-f", "-"], text).await.map(drop)
}

/// Returns true if the kernel has our tables; false if it does not list any.
pub fn has_tables() -> bool {
    const INET: u8 = 1;
    let tables = Table::ALL.map(|(table, _)| table_name(table));
    nft_chains().is_ok_and(|chains| {
        chains.iter().any(|(family, table, _)| *family == INET && tables.contains(table))
    })
}

/// Reads the rules in the kernel, as the packets of a family pass them.
pub async fn read_rules(family: Family) -> Result<Layout, Problem> {
    parse(&nft(&["-j", "list", "ruleset"], "").await?, family).map_err(|error| {
        let found = format!("the output is not a rule set: {error}");
        Problem::new(Code::CaptureRulesUnreadable, "`nft -j list ruleset`", found)
    })
}

async fn nft(arguments: &[&str], input: &str) -> Result<Vec<u8>, Problem> {
    let mut printed = program::run("nft", arguments, input, LIMIT).await;
    if let Err(problem) = &mut printed
        && problem.code == Code::CaptureProgramMissing
    {
        problem.found = "nativeNftables is enabled, but the nft binary is missing in the sidecar container image".to_owned();
    }
    printed
}

/// Renders the input of `nft -f -` that removes our tables. nft refuses to delete a table that does not exist,
/// so each is added before.
pub fn removal() -> String {
    let mut text = String::new();
    for table in Table::ALL.map(|(table, _)| table_name(table)) {
        text += &format!("add table inet {table}\ndelete table inet {table}\n");
    }
    text
}

/// Renders the input of `nft -f -` that replaces our tables.
pub fn transaction(rules: &Rules) -> String {
    let rules = rules_for_shared_chains(rules);
    let chains = layout::chains(&rules);
    let mut text = removal();
    let tables: BTreeSet<_> = chains.keys().map(|(table, _)| *table).collect();
    for table in tables {
        text += &format!("add table inet {}\n", table_name(table));
    }
    for (table, chain) in chains.keys() {
        let hook = hook(*table, *chain).map_or_else(String::new, |(kind, hook, priority)| {
            format!(" {{ type {kind} hook {hook} priority {priority} ; }}")
        });
        text += &format!("add chain inet {} {}{hook}\n", table_name(*table), chain_name(*chain));
    }
    for ((table, chain), rules) in &chains {
        let start = format!("add rule inet {} {}", table_name(*table), chain_name(*chain));
        for rule in rules {
            text += &format!("{start} {}\n", statements(rule));
        }
    }
    text
}

/// Returns the layout of a family after [`apply`], and then its layout after pilot-agent or Istio's CNI
/// plugin, whose rules without an address apply to IPv6 as well in pods without IPv6.
pub fn versions(rules: &Rules, family: Family) -> Vec<Layout> {
    vec![
        Layout::shared(&rules_for_shared_chains(rules), family),
        Layout::shared(&merge_families(rules), family),
    ]
}

/// Returns the rules for chains that both families share. Without rules for IPv6, its packets leave our
/// chains at once, because rules without an address would capture them.
fn rules_for_shared_chains(rules: &Rules) -> Vec<Rule> {
    let mut shared = merge_families(rules);
    if !rules.has_v6 {
        let mut chains: BTreeSet<_> = shared.iter().map(|rule| (rule.table, rule.chain)).collect();
        chains.retain(|(_, chain)| chain.is_builtin());
        shared.extend(chains.into_iter().map(|(table, chain)| Rule {
            family: Some(Family::V6),
            table,
            chain,
            position: Some(1),
            matches: Vec::new(),
            verdict: Verdict::Return,
        }));
    }
    shared
}

/// Converts the rules to chains that both families share. They differ from iptables in two points:
///
/// - one jump serves the DNS servers of both families, because the rules after the jump have addresses;
/// - only TCP packets are dropped as invalid, as in Istio.
fn merge_families(rules: &Rules) -> Vec<Rule> {
    let mut shared = Vec::<Rule>::new();
    for rule in rules.all() {
        let mut rule = rule.clone();
        if rule.matches.is_empty() && rule.family.take().is_some() && shared.contains(&rule) {
            continue;
        }
        if rule.matches.contains(&Match::Is(Criterion::StateInvalid)) {
            rule.matches.push(Match::Is(Criterion::Protocol(Protocol::Tcp)));
        }
        shared.push(rule);
    }
    shared
}

/// Renders a rule without its chain.
fn statements(rule: &Rule) -> String {
    let is_v6 = rule.family == Some(Family::V6);
    let udp = Match::Is(Criterion::Protocol(Protocol::Udp));
    let protocol = if rule.matches.contains(&udp) { "udp" } else { "tcp" };
    let conditions = rule.matches.iter().map(|each| match each {
        Match::Is(criterion) => condition(protocol, "", criterion),
        Match::Not(criterion) => condition(protocol, "!= ", criterion),
    });
    let mut text: String = conditions.collect();
    if is_v6 && rule.matches.is_empty() {
        text += "meta nfproto ipv6 ";
    }
    if let Verdict::Tproxy { port, mark } = rule.verdict {
        text += if is_v6 { "tproxy ip6" } else { "tproxy ip" };
        text += &format!(" to :{port} meta mark set {mark} ");
    }
    text += "counter ";
    text + &match rule.verdict {
        Verdict::Return => "return".to_owned(),
        Verdict::Accept | Verdict::Tproxy { .. } => "accept".to_owned(),
        Verdict::Drop => "drop".to_owned(),
        Verdict::Reject => "reject with tcp reset".to_owned(),
        Verdict::Jump(chain) => format!("jump {}", chain_name(chain)),
        Verdict::Redirect(port) => format!("redirect to :{port}"),
        Verdict::SetMark(mark) => format!("meta mark set {mark}"),
        Verdict::SaveMark => "ct mark set mark".to_owned(),
        Verdict::RestoreMark => "meta mark set ct mark".to_owned(),
        Verdict::Zone(zone) => format!("ct zone set {zone}"),
    }
}

/// Renders a criterion of a rule for this protocol. `not` is put before its value.
fn condition(protocol: &str, not: &str, criterion: &Criterion) -> String {
    match criterion {
        // `+` means any interface. nftables cannot express it, so the criterion is left out.
        Criterion::InInterface(name) | Criterion::OutInterface(name) if name == "+" => {
            String::new()
        }
        Criterion::InInterface(name) => format!("iifname {not}{} ", interface(name)),
        Criterion::OutInterface(name) => format!("oifname {not}{} ", interface(name)),
        Criterion::Source(range) => format!("{} saddr {not}{range} ", protocol_of(range)),
        Criterion::Destination(range) => format!("{} daddr {not}{range} ", protocol_of(range)),
        Criterion::Protocol(protocol) => format!("meta l4proto {not}{} ", protocol.name()),
        Criterion::SourcePort(port) => format!("{protocol} sport {not}{port} "),
        Criterion::DestinationPort(ports) => {
            match ports.iter().map(|ports| range(ports, '-')).collect::<Vec<_>>().as_slice() {
                [port] => format!("{protocol} dport {not}{port} "),
                ports => format!("{protocol} dport {not}{{ {} }} ", ports.join(", ")),
            }
        }
        Criterion::User(id) => format!("skuid {not}{} ", owner(id)),
        Criterion::Group(id) => format!("skgid {not}{} ", owner(id)),
        Criterion::StateInvalid => format!("ct state {not}invalid "),
        Criterion::StateRelatedOrEstablished => format!("ct state {not}related,established "),
        Criterion::Mark(mark) => format!("mark {not}{mark} "),
        Criterion::ConnectionMark(mark) => format!("ct mark {not}{mark} "),
    }
}

fn protocol_of(range: &Cidr) -> &'static str {
    match range.family() {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    }
}

/// Quotes an interface's name. In the model, `+` at its end stands for any further characters.
fn interface(name: &str) -> String {
    match name.strip_suffix('+') {
        Some(prefix) => format!("\"{prefix}*\""),
        None => format!("\"{name}\""),
    }
}

/// Renders a user or group. A name is quoted, because `$` and `@` have a meaning before a bare name.
fn owner(id: &Id) -> String {
    match id {
        Id::Numbers(numbers) => range(numbers, '-'),
        Id::Name(name) => format!("\"{name}\""),
    }
}

fn table_name(table: Table) -> String {
    format!("istio-proxy-{}", table.name())
}

/// Returns type, hook and priority of a chain that the kernel calls.
fn hook(table: Table, chain: Chain) -> Option<(&'static str, &'static str, i64)> {
    let hook = match chain {
        Chain::Prerouting => "prerouting",
        Chain::Output => "output",
        _ => return None,
    };
    Some(match (table, chain) {
        (Table::Nat, _) => ("nat", hook, -100),
        (Table::Mangle, Chain::Output) => ("route", hook, -150),
        (Table::Mangle, _) => ("filter", hook, -150),
        (Table::Raw, _) => ("filter", hook, -300),
        (Table::Filter, _) => ("filter", hook, 0),
    })
}

fn chain_name(chain: Chain) -> String {
    chain.name().to_lowercase().replace('_', "-")
}

#[derive(Deserialize)]
struct Ruleset {
    nftables: Vec<Value>,
}

/// A statement of a rule.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Statement {
    Counter(IgnoredAny),
    Match { op: String, left: Key, right: Value },
    Return,
    Accept,
    Drop,
    Reject { r#type: String },
    Jump { target: String },
    Redirect { port: u16 },
    Mangle { key: Key, value: Value },
    Tproxy { family: String, port: u16 },
}

/// A part of a packet or connection that is compared or set.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Key {
    Meta { key: String },
    Ct { key: String },
    Payload { protocol: String, field: String },
}

impl Key {
    fn parts(&self) -> (&str, &str) {
        match self {
            Self::Meta { key } => ("meta", key),
            Self::Ct { key } => ("ct", key),
            Self::Payload { protocol, field } => (protocol, field),
        }
    }
}

/// Reads the output of `nft -j list ruleset`: the rules of our tables, as the packets of a family pass them. A
/// chain of ours with another hook, type, priority or policy is unknown. Tables of others are not read.
pub fn parse(text: &[u8], family: Family) -> Result<Layout, serde_json::Error> {
    let Ruleset { nftables } = serde_json::from_slice(text)?;
    let mut layout = Layout::default();
    for object in &nftables {
        // Indexing returns null in objects of other kinds, and null has no table.
        let chain = &object["chain"];
        let rule = &object["rule"];
        if let Some((table, name)) = table_of(chain).zip(chain["name"].as_str()) {
            match chain_named(name).filter(|known| has_hook(table, *known, chain)) {
                Some(known) => drop(layout.chains.entry((table, known)).or_default()),
                None => layout.unknown_chains.push((table, name.to_owned())),
            }
        }
        let place = table_of(rule).zip(rule["chain"].as_str().and_then(chain_named));
        if let Some(rules) = place.and_then(|place| layout.chains.get_mut(&place)) {
            let expr = &rule["expr"];
            let (only, entry) = match self::rule(expr) {
                Some((only, matches, verdict)) => (only, Entry::rule(matches, verdict)),
                None => (None, Entry::Foreign(expr.to_string())),
            };
            if only.is_none_or(|only| only == family) {
                rules.push(entry);
            }
        }
    }
    Ok(layout)
}

/// Returns true if the kernel calls a chain by its expected hook, type and priority, and accepts by default.
fn has_hook(table: Table, chain: Chain, object: &Value) -> bool {
    let found = object["hook"]
        .as_str()
        .and_then(|hook| Some((object["type"].as_str()?, hook, object["prio"].as_i64()?)));
    found == hook(table, chain) && object["policy"].as_str().is_none_or(|policy| policy == "accept")
}

/// Returns the table of a chain or rule if it is one of our tables.
fn table_of(object: &Value) -> Option<Table> {
    if object["family"] != "inet" {
        return None;
    }
    Table::ALL.map(|(table, _)| table).into_iter().find(|it| object["table"] == table_name(*it))
}

fn chain_named(name: &str) -> Option<Chain> {
    Chain::ALL.into_iter().map(|(chain, _)| chain).find(|chain| chain_name(*chain) == name)
}

/// Converts a rule to the model, with its family if it is for one only. nft does not accept a rule with addresses
/// of both. Returns None if the model cannot express the rule.
fn rule(expr: &Value) -> Option<(Option<Family>, Vec<Match>, Verdict)> {
    let statements = Vec::<Statement>::deserialize(expr).ok()?;
    let mut family = None;
    let mut matches = Vec::new();
    let mut actions = Vec::new();
    for statement in &statements {
        match statement {
            Statement::Counter(_) => {}
            Statement::Match { op, left, right } if actions.is_empty() => {
                let (object, field) = left.parts();
                let is_family = field == "nfproto";
                let name = if is_family { right.as_str()? } else { object };
                family = family.or(family_named(name));
                // A match on a TCP port implies the protocol.
                matches.extend(named(&Protocol::ALL, name).map(Criterion::Protocol).map(Match::Is));
                match op.as_str() {
                    "==" if is_family => {}
                    "==" | "in" => matches.push(Match::Is(criterion(object, field, right)?)),
                    "!=" => matches.push(Match::Not(criterion(object, field, right)?)),
                    _ => return None,
                }
            }
            action => actions.push(action),
        }
    }
    if let Some(Statement::Tproxy { family: name, .. }) = actions.first() {
        family = family.or(family_named(name));
    }
    Some((family, matches, verdict(&actions)?))
}

fn family_named(name: &str) -> Option<Family> {
    match name {
        "ip" | "ipv4" => Some(Family::V4),
        "ip6" | "ipv6" => Some(Family::V6),
        _ => None,
    }
}

fn criterion(object: &str, field: &str, right: &Value) -> Option<Criterion> {
    Some(match (object, field) {
        ("meta", "iifname") => Criterion::InInterface(interface_of(right)?),
        ("meta", "oifname") => Criterion::OutInterface(interface_of(right)?),
        // Without /etc/protocols, nft prints numbers.
        ("meta", "l4proto") if right == 6 => Criterion::Protocol(Protocol::Tcp),
        ("meta", "l4proto") if right == 17 => Criterion::Protocol(Protocol::Udp),
        ("meta", "l4proto") => Criterion::Protocol(named(&Protocol::ALL, right.as_str()?)?),
        ("meta", "skuid") => Criterion::User(Id::Numbers(range_of(right)?)),
        ("meta", "skgid") => Criterion::Group(Id::Numbers(range_of(right)?)),
        ("meta", "mark") => Criterion::Mark(read(right)?),
        ("ct", "mark") => Criterion::ConnectionMark(read(right)?),
        ("ct", "state") if right == "invalid" => Criterion::StateInvalid,
        ("ct", "state") if *right == json!(["established", "related"]) => {
            Criterion::StateRelatedOrEstablished
        }
        ("ip" | "ip6", "saddr") => Criterion::Source(cidr(right)?),
        ("ip" | "ip6", "daddr") => Criterion::Destination(cidr(right)?),
        ("tcp" | "udp", "sport") => Criterion::SourcePort(read(right)?),
        ("tcp" | "udp", "dport") => Criterion::DestinationPort(ports(right)?),
        _ => return None,
    })
}

fn interface_of(value: &Value) -> Option<String> {
    let name = value.as_str()?;
    Some(match name.strip_suffix('*') {
        Some(prefix) => format!("{prefix}+"),
        None => name.to_owned(),
    })
}

fn read<T: DeserializeOwned>(value: &Value) -> Option<T> {
    T::deserialize(value).ok()
}

/// Reads consecutive numbers, or a single one.
fn range_of<T: DeserializeOwned + Copy>(value: &Value) -> Option<RangeInclusive<T>> {
    if let Some(range) = value.get("range") {
        return read(range).map(|(first, last)| first..=last);
    }
    read(value).map(|number| number..=number)
}

fn ports(value: &Value) -> Option<Vec<Ports>> {
    match value.get("set") {
        Some(set) => set.as_array()?.iter().map(range_of).collect(),
        None => range_of(value).map(|ports| vec![ports]),
    }
}

fn cidr(value: &Value) -> Option<Cidr> {
    let Some(prefix) = value.get("prefix") else {
        return read::<IpAddr>(value).map(Cidr::single);
    };
    let (address, length): (IpAddr, u8) = (read(&prefix["addr"])?, read(&prefix["len"])?);
    Cidr::parse(&format!("{address}/{length}"))
}

fn verdict(actions: &[&Statement]) -> Option<Verdict> {
    Some(match actions {
        [Statement::Return] => Verdict::Return,
        [Statement::Accept] => Verdict::Accept,
        [Statement::Drop] => Verdict::Drop,
        [Statement::Reject { r#type }] if r#type == "tcp reset" => Verdict::Reject,
        [Statement::Jump { target }] => Verdict::Jump(chain_named(target)?),
        [Statement::Redirect { port }] => Verdict::Redirect(*port),
        [Statement::Mangle { key, value }] => {
            match (key.parts(), Key::deserialize(value).ok().as_ref().map(Key::parts)) {
                (("meta", "mark"), None) => Verdict::SetMark(read(value)?),
                (("ct", "zone"), None) => Verdict::Zone(read(value)?),
                (("ct", "mark"), Some(("meta", "mark"))) => Verdict::SaveMark,
                (("meta", "mark"), Some(("ct", "mark"))) => Verdict::RestoreMark,
                _ => return None,
            }
        }
        [Statement::Tproxy { port, .. }, mark, Statement::Accept] => match verdict(&[mark])? {
            Verdict::SetMark(mark) => Verdict::Tproxy { port: *port, mark },
            _ => return None,
        },
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
