//! Reads what `nft -j list ruleset` prints.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, json};

use super::{TABLES, chain_name, hook, table_name};
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

#[derive(Debug, thiserror::Error)]
#[error("`nft -j list ruleset` printed something else than a rule set")]
pub struct Malformed(#[from] serde_json::Error);

#[derive(Deserialize)]
struct Ruleset {
    nftables: Vec<Object>,
}

/// Has one of its members; other kinds of objects have none.
#[derive(Deserialize)]
struct Object {
    chain: Option<ChainObject>,
    rule: Option<RuleObject>,
}

#[derive(Deserialize)]
struct ChainObject {
    family: String,
    table: String,
    name: String,
    #[serde(rename = "type")]
    kind: Option<String>,
    hook: Option<String>,
    prio: Option<i64>,
    policy: Option<String>,
}

#[derive(Deserialize)]
struct RuleObject {
    family: String,
    table: String,
    chain: String,
    #[serde(default)]
    expr: Value,
}

/// What rules of ours consist of. Anything else makes a rule foreign.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Statement {
    Match {
        op: String,
        left: Key,
        right: Value,
    },
    Counter(IgnoredAny),
    Return(()),
    Accept(()),
    Drop(()),
    Jump {
        target: String,
    },
    Redirect {
        port: u16,
    },
    Tproxy {
        family: String,
        port: u16,
    },
    Mangle {
        key: Key,
        value: Operand,
    },
    Reject {
        #[serde(rename = "type")]
        kind: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Key {
    Meta { key: String },
    Ct { key: String },
    Payload { protocol: String, field: String },
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Operand {
    Number(u32),
    Key(Key),
}

impl Key {
    fn name(&self) -> (&str, &str) {
        match self {
            Self::Meta { key } => ("meta", key),
            Self::Ct { key } => ("ct", key),
            Self::Payload { protocol, field } => (protocol, field),
        }
    }
}

impl Live {
    pub fn of(&self, family: Family) -> &Layout {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    /// Reads the program's output. A chain of ours that the kernel does not call as it should is unknown.
    pub fn parse(text: &[u8]) -> Result<Self, Malformed> {
        let Ruleset { nftables } = serde_json::from_slice(text)?;
        let mut live = Self::default();
        for object in nftables {
            if let Some(chain) = object.chain {
                live.add_chain(chain);
            }
            if let Some(rule) = object.rule {
                live.add_rule(&rule);
            }
        }
        Ok(live)
    }

    fn add_chain(&mut self, object: ChainObject) {
        let Some(table) = table_named(&object.family, &object.table) else {
            return;
        };
        let found = (object.kind.as_deref(), object.hook.as_deref(), object.prio);
        let expected = |chain| match hook(table, chain) {
            Some((kind, hook, priority)) => (Some(kind), Some(hook), Some(priority)),
            None => (None, None, None),
        };
        let drops = object.policy.is_some_and(|policy| policy != "accept");
        let chain = chain_named(&object.name).filter(|chain| !drops && expected(*chain) == found);
        for layout in [&mut self.v4, &mut self.v6] {
            match chain {
                Some(chain) => drop(layout.chains.entry((table, chain)).or_default()),
                None => layout.unknown_chains.push((table, object.name.clone())),
            }
        }
    }

    fn add_rule(&mut self, object: &RuleObject) {
        let Some(table) = table_named(&object.family, &object.table) else {
            return;
        };
        let Some(chain) = chain_named(&object.chain) else {
            return;
        };
        let statements = Vec::deserialize(&object.expr).ok();
        let (family, entry) = match statements.and_then(rule) {
            Some((family, matches, verdict)) => (family, Entry::rule(matches, verdict)),
            None => (None, Entry::Foreign(object.expr.to_string())),
        };
        for (of, layout) in [(Family::V4, &mut self.v4), (Family::V6, &mut self.v6)] {
            let rules = layout.chains.get_mut(&(table, chain));
            if let Some(rules) = rules.filter(|_| family.is_none_or(|family| family == of)) {
                rules.push(entry.clone());
            }
        }
    }
}

fn table_named(family: &str, name: &str) -> Option<Table> {
    let mut tables = TABLES.into_iter().filter(|_| family == "inet");
    tables.find(|table| table_name(*table) == name)
}

fn chain_named(name: &str) -> Option<Chain> {
    Chain::ALL
        .into_iter()
        .find(|chain| chain_name(*chain) == name)
}

/// The rule in terms of the model, with its family if it is for one only.
fn rule(mut statements: Vec<Statement>) -> Option<(Option<Family>, Vec<Match>, Verdict)> {
    statements.retain(|statement| !matches!(statement, Statement::Counter(_)));
    let is_match = |statement: &Statement| matches!(statement, Statement::Match { .. });
    let count = statements.iter().take_while(|each| is_match(each)).count();
    let rest = statements.split_off(count);
    let (verdict, mut matches) = (verdict(&rest)?, Vec::new());
    let mut family = match rest.as_slice() {
        [Statement::Tproxy { family, .. }, ..] => family_named(family),
        _ => None,
    };
    for statement in statements {
        let Statement::Match { op, left, right } = statement else {
            return None;
        };
        let (of, field) = left.name();
        let of = match (of, field) {
            ("meta", "nfproto") => right.as_str()?,
            _ => of,
        };
        if let Some(of) = family_named(of)
            && family.replace(of).is_some_and(|family| family != of)
        {
            return None;
        }
        if let Some(protocol) = protocol_named(of) {
            // A port is one of TCP or of UDP.
            matches.push(Match::Is(Criterion::Protocol(protocol)));
        }
        match op.as_str() {
            "==" if field == "nfproto" => {}
            "==" | "in" => matches.push(Match::Is(criterion(left.name(), &right)?)),
            "!=" => matches.push(Match::Not(criterion(left.name(), &right)?)),
            _ => return None,
        }
    }
    Some((family, matches, verdict))
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
        ("meta", "skuid") => Criterion::Owner(Owner::User(id(right)?)),
        ("meta", "skgid") => Criterion::Owner(Owner::Group(id(right)?)),
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

fn id(value: &Value) -> Option<Id> {
    range(value).map(Id::Numbers)
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

fn verdict(statements: &[Statement]) -> Option<Verdict> {
    use Statement::{Accept, Drop, Jump, Mangle, Redirect, Reject, Return, Tproxy};
    Some(match statements {
        [Return(())] => Verdict::Return,
        [Accept(())] => Verdict::Accept,
        [Drop(())] => Verdict::Drop,
        [Reject { kind }] if kind == "tcp reset" => Verdict::Reject,
        [Jump { target }] => Verdict::Jump(chain_named(target)?),
        [Redirect { port }] => Verdict::Redirect(*port),
        [Mangle { key, value }] => match (key.name(), value) {
            (("meta", "mark"), Operand::Number(mark)) => Verdict::SetMark(*mark),
            (("ct", "zone"), Operand::Number(zone)) => Verdict::Zone(u16::try_from(*zone).ok()?),
            (("ct", "mark"), Operand::Key(from)) if from.name() == ("meta", "mark") => {
                Verdict::SaveMark
            }
            (("meta", "mark"), Operand::Key(from)) if from.name() == ("ct", "mark") => {
                Verdict::RestoreMark
            }
            _ => return None,
        },
        [Tproxy { port, .. }, mark @ Mangle { .. }, Accept(())] => {
            let Some(Verdict::SetMark(mark)) = verdict(std::slice::from_ref(mark)) else {
                return None;
            };
            Verdict::Tproxy { port: *port, mark }
        }
        _ => return None,
    })
}
