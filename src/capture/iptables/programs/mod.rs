//! Finds the programs of iptables on this machine, and selects which of them to use.
//!
//! There are two kinds, which do not see each other's rules. The kind of a program, and whether the kernel has
//! tables of a kind, are detected without running programs.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;

use super::saved::{ISTIO, Saved};
use crate::capture::config::Kind;
use crate::capture::problem;
use crate::capture::rules::Family;
use crate::files::regular_file;
use crate::net::netlink::nft_chains;
use crate::problem::{Code, Problem};
use crate::program;

/// Seconds for which a program of kind legacy waits for another one.
const WAIT: &str = "--wait=30";
/// Time limit of a program, including the wait.
const LIMIT: Duration = Duration::from_secs(40);

/// The kinds of tables that the kernel has.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kernel {
    legacy: bool,
    /// None for a kernel without nftables.
    nft: Option<bool>,
    /// True if nftables has Istio's chains.
    pub(super) has_istio: bool,
}

/// The programs of one kind and family.
#[derive(Clone, Debug)]
pub(super) struct Programs {
    /// None if neither the name nor the link says it.
    pub(super) kind: Option<Kind>,
    /// The path without `-save` and `-restore`.
    pub(super) name: String,
    /// Output of `iptables-save`; empty if the kernel has no tables of the kind.
    pub(super) saved: String,
}

impl Kernel {
    /// Returns true if there are programs for each kind of tables that may have Istio's rules.
    pub(super) fn is_covered_by(self, programs: &[Programs]) -> bool {
        let has = |kind| programs.iter().any(|it| it.kind.is_none_or(|found| found == kind));
        (!self.legacy || has(Kind::Legacy)) && (!self.has_istio || has(Kind::Nft))
    }

    pub(super) fn read(family: Family) -> Result<Self, Problem> {
        let failed = |error| problem(Code::CaptureRulesUnreadable, command(family), error);
        let (number, names) = match family {
            Family::V4 => (2, "/proc/thread-self/net/ip_tables_names"),
            Family::V6 => (10, "/proc/thread-self/net/ip6_tables_names"),
        };
        let chains = match nft_chains() {
            Ok(chains) => Some(chains),
            Err(error) if is_not_supported(&error) => None,
            Err(error) => return Err(failed(error)),
        };
        let legacy = match regular_file::read_kernel(names) {
            Ok(names) => !names.is_empty(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(failed(error)),
        };
        let of_family = chains.iter().flatten().filter(|(it, ..)| *it == number);
        Ok(Self {
            legacy,
            has_istio: of_family.clone().any(|(.., name)| name.starts_with(ISTIO)),
            nft: chains.as_ref().map(|_| of_family.count() > 0),
        })
    }
}

/// Returns true for the errors of kernels that are built without nftables.
fn is_not_supported(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::INVAL | Errno::PROTONOSUPPORT | Errno::OPNOTSUPP | Errno::AFNOSUPPORT)
    )
}

/// Returns the error of a machine without programs that read or set up rules.
pub(super) fn missing(family: Family, path: &str) -> Problem {
    let name = command(family);
    let found = format!("{name}-save and {name}-restore (nft or legacy) are not in PATH ({path})");
    Problem::new(Code::CaptureProgramMissing, name, found)
}

impl Programs {
    /// Finds the programs of a family in the directories of `path`, one of each kind, and runs them to read the
    /// rules. The first is the one to use. Legacy tables only count if they have rules, because listing
    /// creates them.
    pub(super) async fn find(
        family: Family,
        kind: Option<Kind>,
        path: &str,
        kernel: Kernel,
    ) -> Result<Vec<Self>, Problem> {
        let name = command(family);
        let mut found: Vec<_> = ["-legacy", "-nft", ""]
            .iter()
            .filter_map(|suffix| Self::find_named(&format!("{name}{suffix}"), path))
            .filter(|found| kind.is_none() || found.kind == kind)
            .collect();
        found.sort_by_key(|found| found.kind);
        found.dedup_by_key(|found| found.kind);
        for programs in &mut found {
            let has_tables = match programs.kind {
                Some(Kind::Legacy) => kernel.legacy,
                Some(Kind::Nft) => kernel.nft == Some(true),
                None => true,
            };
            if has_tables {
                programs.saved = programs.save().await?;
            }
        }
        found.sort_by_key(|found| match found.kind {
            Some(Kind::Legacy) if found.saved.contains(" -A ") => 0,
            Some(Kind::Nft) if kernel.nft.is_some() => 1,
            None => 2,
            Some(Kind::Legacy) => 3,
            Some(Kind::Nft) => 4,
        });
        Ok(found)
    }

    /// Finds the first programs of this name.
    fn find_named(name: &str, path: &str) -> Option<Self> {
        let name = path
            .split(':')
            .filter(|directory| !directory.is_empty())
            .map(|directory| format!("{directory}/{name}"))
            .find(|name| Path::new(&format!("{name}-restore")).is_file())?;
        Some(Self { kind: kind(&name), name, saved: String::new() })
    }

    /// Runs `iptables-save` and returns its output, with counters.
    pub(super) async fn save(&self) -> Result<String, Problem> {
        Ok(String::from_utf8_lossy(&self.run("save", &["--counters"], "").await?).into_owned())
    }

    /// Runs `iptables-restore` with a text. The option decides about other rules of the same tables:
    /// `--noflush` keeps them, `--counters` replaces them.
    pub(super) async fn restore(&self, text: &str, option: &str) -> Result<(), Problem> {
        let arguments: &[_] = match self.kind {
            Some(Kind::Nft) => &[option],
            // Programs of kind nft ignore the option.
            _ => &[option, WAIT],
        };
        for line in text.lines() {
            tracing::info!("{}-restore: {line}", self.name);
        }
        self.run("restore", arguments, text).await.map(drop)
    }

    async fn run(&self, verb: &str, arguments: &[&str], input: &str) -> Result<Vec<u8>, Problem> {
        let program = format!("{}-{verb}", self.name);
        program::run(&program, arguments, input, LIMIT).await
    }

    pub(super) fn parse<'a>(&self, text: &'a str) -> Result<Saved<'a>, Problem> {
        Saved::parse(text).map_err(|line| {
            let start: String = line.chars().take(80).collect();
            let subject = format!("output of `{}-save`", self.name);
            Problem::value(Code::CaptureRulesUnreadable, subject, &start, "rules")
        })
    }
}

/// Detects the kind by the name of a program, or of the file that it is a link to.
fn kind(name: &str) -> Option<Kind> {
    let target = fs::canonicalize(format!("{name}-restore")).unwrap_or_default();
    let files = [Path::new(name), &target].map(|path| path.file_name().unwrap_or_default());
    let names = files.map(OsStr::to_string_lossy).join(" ");
    if names.contains("nft") {
        return Some(Kind::Nft);
    }
    if names.contains("legacy") { Some(Kind::Legacy) } else { None }
}

fn command(family: Family) -> &'static str {
    match family {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    }
}

#[cfg(test)]
mod tests;
