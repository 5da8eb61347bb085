//! The programs of iptables on this machine, and which of them to use.
//!
//! There are two kinds, which do not see each other's rules. What they are is found without running them,
//! and so is whether the kernel has tables of their kind at all.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;

use super::saved::{ISTIO, Saved};
use crate::capture::config::Kind;
use crate::capture::rules::Family;
use crate::capture::{problem, program};
use crate::netlink::nft_chains;
use crate::problem::{Problem, codes};

/// How long a program of kind legacy waits for another one.
const WAIT: &str = "--wait=30";
/// Time limit of a program, waiting included.
const LIMIT: Duration = Duration::from_secs(40);

/// Which kinds of tables the kernel has.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kernel {
    legacy: bool,
    /// None is a kernel without nftables.
    nft: Option<bool>,
    /// Whether nftables has chains of Istio's.
    pub(super) has_istio: bool,
}

/// The programs of one kind and family.
#[derive(Clone, Debug)]
pub(super) struct Programs {
    /// None is what neither its name nor its links say.
    pub(super) kind: Option<Kind>,
    /// The path without `-save` and `-restore`.
    pub(super) name: String,
    /// What `iptables-save` prints; empty if the kernel says that there are no tables.
    pub(super) saved: String,
}

impl Kernel {
    /// Whether there are programs for each kind of tables that may have rules of Istio's.
    pub(super) fn is_seen_by(self, programs: &[Programs]) -> bool {
        let has = |kind| {
            let mut kinds = programs.iter().map(|programs| programs.kind);
            kinds.any(|found| found.is_none_or(|found| found == kind))
        };
        (!self.legacy || has(Kind::Legacy)) && (!self.has_istio || has(Kind::Nft))
    }

    pub(super) fn look(family: Family) -> Result<Self, Problem> {
        let failed = |error| problem(codes::CAPTURE_RULES_UNREADABLE, command(family), error);
        let (number, names) = match family {
            Family::V4 => (2, "/proc/thread-self/net/ip_tables_names"),
            Family::V6 => (10, "/proc/thread-self/net/ip6_tables_names"),
        };
        let chains = match nft_chains() {
            Ok(chains) => Some(chains),
            Err(error) if is_not_supported(&error) => None,
            Err(error) => return Err(failed(error)),
        };
        let legacy = match fs::read(names) {
            Ok(names) => !names.is_empty(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(failed(error)),
        };
        let mut of_family = chains.iter().flatten().filter(|(it, ..)| *it == number);
        Ok(Self {
            legacy,
            has_istio: of_family.clone().any(|(.., name)| name.starts_with(ISTIO)),
            nft: chains.is_some().then(|| of_family.next().is_some()),
        })
    }
}

/// How kernels refuse what they are built without.
fn is_not_supported(error: &io::Error) -> bool {
    let known = [
        Errno::INVAL,
        Errno::PROTONOSUPPORT,
        Errno::OPNOTSUPP,
        Errno::AFNOSUPPORT,
    ];
    Errno::from_io_error(error).is_some_and(|errno| known.contains(&errno))
}

/// The error where there are no programs to see or set rules with.
pub(super) fn missing(family: Family, path: &str) -> Problem {
    let name = command(family);
    let found = format!("{name}-save and {name}-restore (nft or legacy) are not in PATH ({path})");
    Problem::new(codes::CAPTURE_PROGRAM_MISSING, name, found)
}

impl Programs {
    /// The programs of a family in the directories of `path`, one of each kind, with what they print: the
    /// one to use first. Tables of kind legacy count once they have rules: listing creates them.
    pub(super) async fn find(
        family: Family,
        kind: Option<Kind>,
        path: &str,
        kernel: Kernel,
    ) -> Result<Vec<Self>, Problem> {
        let name = command(family);
        let mut found: Vec<_> = ["-legacy", "-nft", ""]
            .iter()
            .filter_map(|suffix| Self::at(&format!("{name}{suffix}"), path))
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

    /// The first programs of this name.
    fn at(name: &str, path: &str) -> Option<Self> {
        let directories = path.split(':').filter(|directory| !directory.is_empty());
        let mut names = directories.map(|directory| format!("{directory}/{name}"));
        let name = names.find(|name| Path::new(&format!("{name}-restore")).is_file())?;
        Some(Self {
            kind: kind(&name),
            name,
            saved: String::new(),
        })
    }

    /// What `iptables-save` prints, with counters.
    pub(super) async fn save(&self) -> Result<String, Problem> {
        let text = self.run("save", &["--counters"], "").await?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Changes tables by the lines of a text. The option says what becomes of their other rules:
    /// `--noflush`, or `--counters` in place of them.
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

    async fn run(&self, what: &str, arguments: &[&str], input: &str) -> Result<Vec<u8>, Problem> {
        let program = format!("{}-{what}", self.name);
        program::run(&program, arguments, input, LIMIT).await
    }

    pub(super) fn parse<'a>(&self, text: &'a str) -> Result<Saved<'a>, Problem> {
        Saved::parse(text).map_err(|line| {
            let line: String = line.chars().take(80).collect();
            let subject = format!("output of `{}-save`", self.name);
            Problem::value(codes::CAPTURE_RULES_UNREADABLE, subject, &line, "rules")
        })
    }
}

/// What the name of a program says, or the name of the file it is a link to.
fn kind(name: &str) -> Option<Kind> {
    let restore = format!("{name}-restore");
    let target = fs::canonicalize(&restore).unwrap_or_default();
    let target = target.file_name().unwrap_or_default().to_string_lossy();
    let name = Path::new(name).file_name().unwrap_or_default();
    match format!("{} {target}", name.to_string_lossy()) {
        names if names.contains("nft") => Some(Kind::Nft),
        names if names.contains("legacy") => Some(Kind::Legacy),
        _ => None,
    }
}

fn command(family: Family) -> &'static str {
    match family {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    }
}

#[cfg(test)]
mod tests;
