//! Reads what this machine has, and compares it with what a configuration asks for.

use super::{Finding, Kind, compare};
use crate::capture::iptables::apply::{self, Request};
use crate::capture::layout::Layout;
use crate::capture::nftables;
use crate::capture::routes;
use crate::capture::rules::{Family, Rules};
use crate::lifecycle::BoxError;

/// The rules of a family, however they were set up. `path` has the directories of programs, separated
/// by colons.
pub async fn rules(family: Family, path: &str) -> Result<Layout, BoxError> {
    Ok(match nftables::has_tables() {
        true => nftables::live().await?.of(family).clone(),
        false => apply::live(family, None, path).await?,
    })
}

/// The differences of rules and routes, by iptables or, if `is_native`, by nft. Changes nothing.
pub async fn findings(request: &Request<'_>, is_native: bool) -> Result<Vec<Finding>, BoxError> {
    let config = request.config;
    let versions = [Rules::new(config), Rules::earlier(config)];
    let native = match is_native {
        true => Some((nftables::wanted(&versions[0]), nftables::live().await?)),
        false => None,
    };
    let mut findings = Vec::new();
    for family in [Family::V4, Family::V6] {
        let (mut versions, found) = match &native {
            Some((wanted, found)) => (vec![wanted.of(family).clone()], found.of(family).clone()),
            None => (
                versions
                    .iter()
                    .map(|rules| Layout::new(rules, family))
                    .collect(),
                apply::live(family, config.kind, request.path).await?,
            ),
        };
        for wanted in &mut versions {
            wanted.resolve(request.number);
        }
        findings.extend(compare(&versions, &found, family));
    }
    let missing = routes::missing(config)?.into_iter();
    findings.extend(missing.map(|(family, detail)| Finding {
        family,
        kind: Kind::Route,
        detail,
    }));
    Ok(findings)
}
