//! Implements the `support-bundle` command. It takes the flags of `proxy`, which it needs if no agent runs.

use std::fs::OpenOptions;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use clap::Args;

use super::{doctor, ignore_closed_pipe, with_progress};
use crate::config::environment::Environment;
use crate::config::flags::{Flag, LogFlags, ProxyFlags};
use crate::config::{self, report};
use crate::problem::{Code, Problem};
use crate::runtime::blocking::{THREADS, run_within};
use crate::runtime::lifecycle::BoxError;
use crate::support_bundle::{self, STEP_LIMIT, Sources};
use crate::{logging, version};

#[derive(Args, Clone, Debug)]
pub struct SupportBundleFlags {
    #[command(flatten)]
    pub proxy: ProxyFlags,
    /// New file to write the bundle to, instead of standard output.
    #[arg(long)]
    pub output: Option<PathBuf>,
}

/// Opens the output, and sends the log to standard error, because standard output may be the bundle.
pub fn open(flags: &SupportBundleFlags) -> Result<Box<dyn Write>, BoxError> {
    logging::init(logging::Options {
        targets: vec!["stderr".to_owned()],
        ..logging::Options::default()
    })?;
    let Some(path) = &flags.output else {
        if io::stdout().is_terminal() {
            return Err(unusable("standard output", "is a terminal").into());
        }
        return Ok(Box::new(io::stdout()));
    };
    // The bundle describes the mesh, so only its owner may read it.
    #[expect(clippy::disallowed_methods, reason = "the file is created, and must not exist")]
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Ok(file) => Ok(Box::new(file)),
        Err(error) => Err(unusable(format!("--output {path:?}"), error).into()),
    }
}

fn unusable(subject: impl ToString, found: impl ToString) -> Problem {
    Problem::new(Code::BundleOutputUnusable, subject, found)
}

/// Reads the sources of the bundle from the configuration in a directory.
fn sources(
    flags: &ProxyFlags,
    log: &LogFlags,
    all: &[Flag],
    environment: &Environment,
    root: &Path,
) -> Sources {
    let istio = super::version::istio(environment).unwrap_or_else(|error| error.to_string());
    Sources {
        version: version::full(&istio),
        proxy_config: config::proxy_config(flags, environment, root),
        admin_socket: config::admin_socket(environment, root),
        config: report::report(flags, log, all, environment, root).json(),
    }
}

/// Collects the bundle and writes it.
pub async fn run(
    flags: &SupportBundleFlags,
    log: &LogFlags,
    all: &[Flag],
    environment: &Environment,
    mut output: Box<dyn Write>,
) -> Result<(), BoxError> {
    let read = run_within(STEP_LIMIT, &THREADS, {
        let proxy = flags.proxy.clone();
        let log = log.clone();
        let all = all.to_vec();
        let environment = environment.clone();
        move || sources(&proxy, &log, &all, &environment, ".".as_ref())
    });
    let sources = read.await.unwrap_or_else(|why| {
        tracing::warn!("{}", Problem::new(Code::BundleSettingsLate, "configuration files", why));
        // There are no files under this root, so only flags and variables are read.
        sources(&flags.proxy, log, all, environment, "/dev/null".as_ref())
    });
    let doctor = doctor::report(&flags.proxy, log, environment);
    let collecting = support_bundle::collect(&sources, doctor);
    let bundle =
        with_progress("collecting configuration, debug pages and checks", collecting).await;
    ignore_closed_pipe(bundle.write(&mut output))
        .map_err(|error| unusable("support bundle", error).into())
}
