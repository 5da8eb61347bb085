//! Reads what this machine has, and compares it with what a configuration asks for.

use super::{Finding, Kind, compare};
use crate::capture::iptables::apply::{self, Failed, Request};
use crate::capture::layout::Layout;
use crate::capture::nftables::{self, Live};
use crate::capture::routes;
use crate::capture::rules::{Family, Rules};

/// Why the rules or routes cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Iptables(#[from] Failed),
    #[error(transparent)]
    Nftables(#[from] nftables::Error),
    #[error(transparent)]
    Routes(#[from] routes::Error),
}

/// The rules of a family, however they were set up. `path` has the directories of programs, separated
/// by colons.
pub async fn rules(family: Family, path: &str) -> Result<Layout, Error> {
    if !nftables::has_tables() {
        return Ok(apply::live(family, path).await?);
    }
    Ok(nftables::live().await?.of(family).clone())
}

/// The differences of rules and routes, by iptables or, if `is_native`, by nft. Changes nothing.
pub async fn findings(request: &Request<'_>, is_native: bool) -> Result<Vec<Finding>, Error> {
    let rules = Rules::new(request.config);
    let [v4, v6] = [Family::V4, Family::V6];
    let (versions, found) = match is_native {
        true => (vec![nftables::wanted(&rules)], nftables::live().await?),
        false => {
            let found = Live {
                v4: request.live(v4).await?,
                v6: request.live(v6).await?,
            };
            let versions = [rules, Rules::earlier(request.config)].map(|rules| Live {
                v4: Layout::new(&rules, v4),
                v6: Layout::new(&rules, v6),
            });
            (versions.into(), found)
        }
    };
    let mut findings = Vec::new();
    for family in [v4, v6] {
        let mut versions: Vec<_> = versions
            .iter()
            .map(|live| live.of(family).clone())
            .collect();
        for wanted in &mut versions {
            wanted.resolve(request.number);
        }
        findings.extend(compare(&versions, found.of(family), family));
    }
    for (family, detail) in routes::missing(request.config)? {
        findings.push(Finding {
            family,
            kind: Kind::Route,
            detail,
        });
    }
    Ok(findings)
}
