//! The rules of DNS as Istio writes them since 1.25, when it gave them chains of their own: queries of the
//! proxy, which have left before, return once more, in both families.

use super::Chain::OutputDns;
use super::Criterion as C;
use super::Match::Is;
use super::build::port;
use super::dns::UDP;
use super::{Place, Rule, Table, Verdict};
use crate::capture::config::Config;

pub(super) fn rules(config: &Config, mut rules: Vec<Rule>) -> Vec<Rule> {
    for rule in &mut rules {
        if rule.verdict == Verdict::Jump(OutputDns) {
            rule.family = None;
        }
    }
    rules.dedup();
    let is_query =
        |rule: &Rule| (rule.table, rule.chain) == (Table::Nat, OutputDns) && rule.matches[0] == UDP;
    if let Some(at) = rules.iter().position(is_query) {
        let returns = config.proxies().map(|owner| Rule {
            family: None,
            table: Table::Nat,
            chain: OutputDns,
            place: Place::Last,
            matches: vec![UDP, Is(port(53)), Is(C::Owner(owner))],
            verdict: Verdict::Return,
        });
        rules.splice(at..at, returns.collect::<Vec<_>>());
    }
    rules
}
