//! Reads what `nft -j list ruleset` prints.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{chain_name, hook, table_name};
use crate::address::Cidr;
use crate::capture::layout::{Entry, Layout};
use crate::capture::rules::{
    Chain, Criterion, Family, Id, Match, Owner, Ports, Protocol, Table, Verdict,
};

/// The rules of our tables, as the packets of each family meet them. Tables of others are not read.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Live {
    pub v4: Layout,
    pub v6: Layout,
}

#[derive(Deserialize)]
struct Ruleset {
    nftables: Vec<Value>,
}

impl Live {
    pub fn of(&self, family: Family) -> &Layout {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    /// Reads the program's output. A chain of ours that the kernel does not call as it should is unknown.
    pub fn parse(text: &[u8]) -> Result<Self, serde_json::Error> {
        let Ruleset { nftables } = serde_json::from_slice(text)?;
        let mut live = Self::default();
        for object in &nftables {
            // Other kinds of objects have neither.
            let (chain, rule) = (&object["chain"], &object["rule"]);
            if let Some((table, name)) = table_of(chain).zip(chain["name"].as_str()) {
                live.add_chain(table, name, chain);
            }
            let place = table_of(rule).zip(rule["chain"].as_str().and_then(chain_named));
            if let Some(place) = place {
                live.add_rule(place, &rule["expr"]);
            }
        }
        Ok(live)
    }

    fn add_chain(&mut self, table: Table, name: &str, object: &Value) {
        let text = |member: &str| object[member].as_str();
        let found = (text("type"), text("hook"), object["prio"].as_i64());
        let expected = |chain: Chain| match hook(table, chain) {
            Some((kind, hook, priority)) => (Some(kind), Some(hook), Some(priority)),
            None => (None, None, None),
        };
        let drops = text("policy").is_some_and(|policy| policy != "accept");
        let chain = chain_named(name).filter(|chain| !drops && expected(*chain) == found);
        for layout in [&mut self.v4, &mut self.v6] {
            match chain {
                Some(chain) => drop(layout.chains.entry((table, chain)).or_default()),
                None => layout.unknown_chains.push((table, name.to_owned())),
            }
        }
    }

    fn add_rule(&mut self, place: (Table, Chain), expr: &Value) {
        let (family, entry) = match rule(expr) {
            Some((family, matches, verdict)) => (family, Entry::rule(matches, verdict)),
            None => (None, Entry::Foreign(expr.to_string())),
        };
        for (of, layout) in [(Family::V4, &mut self.v4), (Family::V6, &mut self.v6)] {
            let rules = layout.chains.get_mut(&place);
            if let Some(rules) = rules.filter(|_| family.is_none_or(|family| family == of)) {
                rules.push(entry.clone());
            }
        }
    }
}

/// The table of a chain or rule, if it is ours.
fn table_of(object: &Value) -> Option<Table> {
    let mut tables = Table::ALL
        .into_iter()
        .filter(|_| object["family"] == "inet");
    tables.find(|table| object["table"] == table_name(*table))
}

fn chain_named(name: &str) -> Option<Chain> {
    let is_named = |chain: &Chain| chain_name(*chain) == name;
    Chain::ALL.into_iter().find(is_named)
}

/// The rule in terms of the model, with its family if it is for one only. None is a rule with anything
/// the model has not.
fn rule(expr: &Value) -> Option<(Option<Family>, Vec<Match>, Verdict)> {
    let (mut families, mut matches, mut actions) = (Vec::new(), Vec::new(), Vec::new());
    for statement in expr.as_array()? {
        match single(statement)? {
            ("counter", _) => {}
            ("match", condition) if actions.is_empty() => {
                let [op, left, right] = members(condition, ["op", "left", "right"])?;
                let left = key(left)?;
                let of = match left.1 {
                    "nfproto" => right.as_str()?,
                    _ => left.0,
                };
                families.extend(family_named(of));
                // A port is one of TCP or of UDP.
                matches.extend(protocol_named(of).map(|of| Match::Is(Criterion::Protocol(of))));
                match op.as_str()? {
                    "==" if left.1 == "nfproto" => {}
                    "==" | "in" => matches.push(Match::Is(criterion(left, right)?)),
                    "!=" => matches.push(Match::Not(criterion(left, right)?)),
                    _ => return None,
                }
            }
            action => actions.push(action),
        }
    }
    let verdict = verdict(&actions)?;
    if let Verdict::Tproxy { .. } = verdict {
        families.extend(family_named(actions[0].1["family"].as_str()?));
    }
    families.dedup();
    (families.len() < 2).then_some((families.first().copied(), matches, verdict))
}

/// The only member of an object.
fn single(value: &Value) -> Option<(&str, &Value)> {
    let object = value.as_object().filter(|object| object.len() == 1)?;
    object
        .iter()
        .next()
        .map(|(name, value)| (name.as_str(), value))
}

/// The members of an object that has no others, which would change its meaning.
fn members<'a, const N: usize>(value: &'a Value, names: [&str; N]) -> Option<[&'a Value; N]> {
    let object = value.as_object()?;
    (object.len() == N).then(|| names.map(|name| &value[name]))
}

/// What is compared or set.
fn key(value: &Value) -> Option<(&str, &str)> {
    match single(value)? {
        (of @ ("meta" | "ct"), value) => {
            let [key] = members(value, ["key"])?;
            Some((of, key.as_str()?))
        }
        ("payload", value) => {
            let [protocol, field] = members(value, ["protocol", "field"])?;
            Some((protocol.as_str()?, field.as_str()?))
        }
        _ => None,
    }
}

fn family_named(name: &str) -> Option<Family> {
    match name {
        "ip" | "ipv4" => Some(Family::V4),
        "ip6" | "ipv6" => Some(Family::V6),
        _ => None,
    }
}

fn protocol_named(name: &str) -> Option<Protocol> {
    match name {
        "tcp" => Some(Protocol::Tcp),
        "udp" => Some(Protocol::Udp),
        _ => None,
    }
}

fn criterion(left: (&str, &str), right: &Value) -> Option<Criterion> {
    Some(match left {
        ("meta", "iifname") => Criterion::InInterface(interface(right)?),
        ("meta", "oifname") => Criterion::OutInterface(interface(right)?),
        // Without /etc/protocols, nft prints numbers.
        ("meta", "l4proto") if right == 6 => Criterion::Protocol(Protocol::Tcp),
        ("meta", "l4proto") if right == 17 => Criterion::Protocol(Protocol::Udp),
        ("meta", "l4proto") => Criterion::Protocol(protocol_named(right.as_str()?)?),
        ("meta", "skuid") => Criterion::Owner(Owner::User(Id::Numbers(range(right)?))),
        ("meta", "skgid") => Criterion::Owner(Owner::Group(Id::Numbers(range(right)?))),
        ("meta", "mark") => Criterion::Mark(number(right)?),
        ("ct", "mark") => Criterion::ConnectionMark(number(right)?),
        ("ct", "state") if right == "invalid" => Criterion::StateInvalid,
        ("ct", "state") if *right == json!(["established", "related"]) => {
            Criterion::StateRelatedOrEstablished
        }
        ("ip" | "ip6", "saddr") => Criterion::Source(cidr(right)?),
        ("ip" | "ip6", "daddr") => Criterion::Destination(cidr(right)?),
        ("tcp" | "udp", "sport") => Criterion::SourcePort(number(right)?),
        ("tcp" | "udp", "dport") => Criterion::DestinationPort(ports(right)?),
        _ => return None,
    })
}

fn interface(value: &Value) -> Option<String> {
    let name = value.as_str()?;
    let prefix = name.strip_suffix('*').map(|prefix| format!("{prefix}+"));
    Some(prefix.unwrap_or_else(|| name.to_owned()))
}

fn number<T: DeserializeOwned>(value: &Value) -> Option<T> {
    T::deserialize(value).ok()
}

/// Consecutive numbers, or a single one.
fn range<T: DeserializeOwned + Copy>(value: &Value) -> Option<RangeInclusive<T>> {
    let (first, last) = match value.get("range") {
        Some(range) => number(range)?,
        None => number(value).map(|number| (number, number))?,
    };
    Some(first..=last)
}

fn ports(value: &Value) -> Option<Vec<Ports>> {
    match value.get("set") {
        Some(set) => set.as_array()?.iter().map(range).collect(),
        None => range(value).map(|ports| vec![ports]),
    }
}

fn cidr(value: &Value) -> Option<Cidr> {
    let address = |value: &Value| value.as_str()?.parse::<IpAddr>().ok();
    let Some(prefix) = value.get("prefix") else {
        return address(value).map(Cidr::from);
    };
    let (address, length): (_, u8) = (address(&prefix["addr"])?, number(&prefix["len"])?);
    Cidr::parse(&format!("{address}/{length}"))
}

fn verdict(actions: &[(&str, &Value)]) -> Option<Verdict> {
    Some(match actions {
        [("return", Value::Null)] => Verdict::Return,
        [("accept", Value::Null)] => Verdict::Accept,
        [("drop", Value::Null)] => Verdict::Drop,
        [("reject", how)] if **how == json!({"type": "tcp reset"}) => Verdict::Reject,
        [("jump", to)] => {
            let [target] = members(to, ["target"])?;
            Verdict::Jump(chain_named(target.as_str()?)?)
        }
        [("redirect", to)] => {
            let [port] = members(to, ["port"])?;
            Verdict::Redirect(number(port)?)
        }
        [("mangle", change)] => {
            let [key, value] = members(change, ["key", "value"])?;
            match (self::key(key)?, self::key(value)) {
                (("meta", "mark"), None) => Verdict::SetMark(number(value)?),
                (("ct", "zone"), None) => Verdict::Zone(number(value)?),
                (("ct", "mark"), Some(("meta", "mark"))) => Verdict::SaveMark,
                (("meta", "mark"), Some(("ct", "mark"))) => Verdict::RestoreMark,
                _ => return None,
            }
        }
        [("tproxy", to), mark, ("accept", Value::Null)] => {
            let [_, port] = members(to, ["family", "port"])?;
            let Verdict::SetMark(mark) = verdict(&[*mark])? else {
                return None;
            };
            let port = number(port)?;
            Verdict::Tproxy { port, mark }
        }
        _ => return None,
    })
}
