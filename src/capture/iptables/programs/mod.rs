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
use crate::capture::config::Binaries;
use crate::capture::program::{self, Cause};
use crate::capture::rules::Family;
use crate::netlink::nft_chains;

/// How long a program of kind legacy waits for another one.
const WAIT: &str = "--wait=30";
/// Time limit of a program, waiting included.
const LIMIT: Duration = Duration::from_secs(40);
/// The tables that `iptables-nft` knows.
const NFT_TABLES: [&str; 5] = ["filter", "mangle", "nat", "raw", "security"];

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no {0}-save and {0}-restore of the right kind on PATH ({1})")]
    Missing(&'static str, String),
    #[error("cannot tell which tables the kernel has")]
    Kernel(#[source] io::Error),
    #[error("{meaning}{0}", meaning = meaning(.0))]
    Program(program::Error),
    #[error("`{program}` printed no rules")]
    Output {
        program: String,
        #[source]
        source: super::saved::Unreadable,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Legacy,
    Nft,
    /// What neither its name nor its links say.
    Unknown,
}

/// Which kinds of tables the kernel has.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kernel {
    legacy: bool,
    /// None is a kernel without nftables.
    nft: Option<bool>,
    /// Whether nftables has chains of Istio's.
    has_istio: bool,
}

/// The programs of one kind and family.
#[derive(Clone, Debug)]
pub(super) struct Programs {
    pub(super) kind: Kind,
    /// The path without `-save` and `-restore`.
    pub(super) name: String,
    /// False if the kernel says that there are no tables.
    pub(super) has_tables: bool,
    /// What `iptables-save` prints; empty without tables.
    pub(super) saved: String,
}

impl Kernel {
    /// Whether there are programs for each kind of tables that may have rules of Istio's.
    pub(super) fn is_seen_by(self, programs: &[Programs]) -> bool {
        let has = |kind| {
            let mut kinds = programs.iter().map(|programs| programs.kind);
            kinds.any(|found| found == kind || found == Kind::Unknown)
        };
        (!self.legacy || has(Kind::Legacy)) && (!self.has_istio || has(Kind::Nft))
    }

    pub(super) fn look(family: Family) -> Result<Self, Error> {
        let (number, names) = match family {
            Family::V4 => (2, "/proc/thread-self/net/ip_tables_names"),
            Family::V6 => (10, "/proc/thread-self/net/ip6_tables_names"),
        };
        let mut chains = match nft_chains() {
            Ok(chains) => Some(chains),
            Err(error) if is_not_supported(&error) => None,
            Err(error) => return Err(Error::Kernel(error)),
        };
        if let Some(chains) = &mut chains {
            chains.retain(|(of, table, _)| *of == number && NFT_TABLES.contains(&table.as_str()));
        }
        let legacy = match fs::read(names) {
            Ok(names) => !names.is_empty(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(Error::Kernel(error)),
        };
        let nft = chains.as_ref().map(|chains| !chains.is_empty());
        let mut chains = chains.iter().flatten();
        let has_istio = chains.any(|(_, _, name)| name.starts_with(ISTIO));
        Ok(Self {
            legacy,
            nft,
            has_istio,
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
    known
        .iter()
        .any(|known| error.raw_os_error() == Some(known.raw_os_error()))
}

impl Error {
    pub(super) fn missing(family: Family, path: &str) -> Self {
        Self::Missing(command(family), path.to_owned())
    }
}

impl Programs {
    /// The programs of a family in the directories of `path`, one of each kind, with what they print: the
    /// one to use first. Tables of kind legacy count once they have rules: listing creates them.
    pub(super) async fn find(
        family: Family,
        of: Binaries,
        path: &str,
        kernel: Kernel,
    ) -> Result<Vec<Self>, Error> {
        let name = command(family);
        let mut found: Vec<_> = ["-legacy", "-nft", ""]
            .iter()
            .filter_map(|suffix| Self::at(&format!("{name}{suffix}"), path, kernel))
            .filter(|found| match of {
                Binaries::Detected => true,
                Binaries::Legacy => found.kind == Kind::Legacy,
                Binaries::Nft => found.kind == Kind::Nft,
            })
            .collect();
        found.sort_by_key(|found| found.kind);
        found.dedup_by_key(|found| found.kind);
        for programs in found.iter_mut().filter(|programs| programs.has_tables) {
            programs.saved = programs.save().await?;
        }
        found.sort_by_key(|found| match found.kind {
            Kind::Legacy if found.saved.contains("\n-A ") => 0,
            Kind::Nft if kernel.nft.is_some() => 1,
            Kind::Unknown => 2,
            Kind::Legacy => 3,
            Kind::Nft => 4,
        });
        Ok(found)
    }

    /// The first programs of this name.
    fn at(name: &str, path: &str, kernel: Kernel) -> Option<Self> {
        let directories = path.split(':').filter(|directory| !directory.is_empty());
        let mut names = directories.map(|directory| format!("{directory}/{name}"));
        let name = names.find(|name| Path::new(&format!("{name}-restore")).is_file())?;
        let kind = kind(&name);
        let has_tables = match kind {
            Kind::Legacy => kernel.legacy,
            Kind::Nft => kernel.nft.unwrap_or_default(),
            Kind::Unknown => true,
        };
        Some(Self {
            kind,
            name,
            has_tables,
            saved: String::new(),
        })
    }

    /// What `iptables-save` prints.
    pub(super) async fn save(&self) -> Result<String, Error> {
        let text = self.run("save", &[], "").await?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Adds to what is there, by the lines of a text.
    pub(super) async fn restore(&self, text: &str) -> Result<(), Error> {
        let arguments: &[_] = match self.kind {
            Kind::Nft => &["--noflush"],
            // Versions of kind nft ignore it.
            Kind::Legacy | Kind::Unknown => &["--noflush", WAIT],
        };
        for line in text.lines() {
            tracing::info!("{}-restore: {line}", self.name);
        }
        self.run("restore", arguments, text).await.map(drop)
    }

    async fn run(&self, what: &str, arguments: &[&str], input: &str) -> Result<Vec<u8>, Error> {
        let program = format!("{}-{what}", self.name);
        let run = program::run(&program, arguments, input, LIMIT);
        run.await.map_err(Error::Program)
    }

    pub(super) fn parse<'a>(&self, text: &'a str) -> Result<Saved<'a>, Error> {
        Saved::parse(text).map_err(|source| Error::Output {
            program: format!("{}-save", self.name),
            source,
        })
    }
}

/// What the name of a program says, or the name of the file it is a link to.
fn kind(name: &str) -> Kind {
    let restore = format!("{name}-restore");
    let target = fs::canonicalize(&restore).unwrap_or_default();
    let target = target.file_name().unwrap_or_default().to_string_lossy();
    let name = Path::new(name).file_name().unwrap_or_default();
    match format!("{} {target}", name.to_string_lossy()) {
        names if names.contains("nft") => Kind::Nft,
        names if names.contains("legacy") => Kind::Legacy,
        _ => Kind::Unknown,
    }
}

fn command(family: Family) -> &'static str {
    match family {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    }
}

/// What the exit codes of these programs mean.
fn meaning(error: &program::Error) -> &'static str {
    let Cause::Failed { status, .. } = &error.cause else {
        return "";
    };
    match status.code() {
        Some(1) => "xtables other problem: ",
        Some(2) => "xtables parameter problem: ",
        Some(3) => "xtables version problem: ",
        Some(4) => "xtables resource problem: ",
        _ => "",
    }
}

#[cfg(test)]
mod tests;
