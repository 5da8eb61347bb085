//! The rules in the words of earlier versions of Istio, which capture the same traffic by them.

use super::Chain::{Drop, IstioOutput, OutputDns};
use super::Criterion as C;
use super::Match::Is;
use super::build::{TCP, port};
use super::dns::UDP;
use super::{Place, Rule, Table, Verdict};
use crate::capture::config::Config;

pub(super) fn rules(config: &Config, mut rules: Vec<Rule>) -> Vec<Rule> {
    let is_query =
        |rule: &Rule| (rule.table, rule.chain) == (Table::Nat, OutputDns) && rule.matches[0] == UDP;
    if config.dns.is_none() {
        // Without the query for DNS, only TCP was looked at; no chain of its own dropped packets.
        rules.retain(|rule| rule.chain != Drop);
        for rule in &mut rules {
            match rule.verdict {
                Verdict::Jump(IstioOutput) => rule.matches.push(TCP),
                Verdict::Jump(Drop) => rule.verdict = Verdict::Drop,
                _ => {}
            }
        }
        return rules;
    }
    // Queries of the proxy, which have left before, were returned once more, in both families.
    for rule in &mut rules {
        if rule.verdict == Verdict::Jump(OutputDns) {
            rule.family = None;
        }
    }
    rules.dedup();
    let at = rules.iter().position(is_query).unwrap_or(rules.len());
    let returns = config.proxies().map(|owner| Rule {
        family: None,
        table: Table::Nat,
        chain: OutputDns,
        place: Place::Last,
        matches: vec![UDP, Is(port(53)), Is(C::Owner(owner))],
        verdict: Verdict::Return,
    });
    rules.splice(at..at, returns.collect::<Vec<_>>());
    rules
}
