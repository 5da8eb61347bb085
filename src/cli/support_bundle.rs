//! The `support-bundle` command. Takes the flags of `proxy`, for when no agent runs.

use std::fs::OpenOptions;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use tokio::time::timeout;

use super::{doctor, unless_unread};
use crate::config::environment::Environment;
use crate::config::flags::{Flag, LogFlags, ProxyFlags};
use crate::config::{self, report};
use crate::lifecycle::BoxError;
use crate::problem::{Problem, codes};
use crate::support_bundle::{self, PATIENCE, Sources};
use crate::{logging, version};

#[derive(Args, Clone, Debug)]
pub struct SupportBundleFlags {
    #[command(flatten)]
    pub proxy: ProxyFlags,
    /// New file to write the bundle to, instead of standard output.
    #[arg(long)]
    pub output: Option<PathBuf>,
}

/// Opens the output, and sends the log to standard error: standard output may be the bundle.
pub fn open(flags: &SupportBundleFlags) -> Result<Box<dyn Write>, BoxError> {
    let log = logging::Options::parse("", &["stderr".to_owned()], false, "")?;
    logging::init(log)?;
    let Some(path) = &flags.output else {
        if io::stdout().is_terminal() {
            return Err(unusable("standard output", "is a terminal").into());
        }
        return Ok(Box::new(io::stdout()));
    };
    // The bundle describes the mesh, so only its owner may read it.
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(path);
    let file = file.map_err(|error| unusable(format!("--output {path:?}"), error))?;
    Ok(Box::new(file))
}

fn unusable(subject: impl ToString, found: impl ToString) -> Problem {
    Problem::new(codes::BUNDLE_OUTPUT_UNUSABLE, subject, found)
}

/// Reads from the configuration in a directory where things are, and the path of the token.
fn sources(
    flags: &ProxyFlags,
    log: &LogFlags,
    all: &[Flag],
    environment: &Environment,
    root: &Path,
) -> (Sources, Option<PathBuf>) {
    let istio = super::version::istio(environment).unwrap_or_else(|error| error.to_string());
    let sources = Sources {
        version: version::full(&istio),
        proxy_config: config::proxy_config(flags, environment, root),
        config: report::report(flags, log, all, environment, root).json(),
    };
    let config = config::load(flags, log, environment, root).ok();
    let token = config.and_then(|config| config.token_file().map(Path::to_owned));
    (sources, token)
}

/// Collects the bundle and writes it.
pub async fn run(
    flags: &SupportBundleFlags,
    log: &LogFlags,
    all: &[Flag],
    environment: &Environment,
    mut to: Box<dyn Write>,
) -> Result<(), BoxError> {
    let (proxy, of_log, all) = (flags.proxy.clone(), log.clone(), all.to_vec());
    let env = environment.clone();
    let read = move |root: &str| sources(&proxy, &of_log, &all, &env, root.as_ref());
    let from_files = tokio::task::spawn_blocking({
        let read = read.clone();
        move || read(".")
    });
    let (sources, token) = match timeout(PATIENCE, from_files).await {
        Ok(Ok(found)) => found,
        _ => {
            let (code, found) = (codes::BUNDLE_SETTINGS_LATE, "not read within 5 s");
            tracing::warn!("{}", Problem::new(code, "configuration files", found));
            read("/dev/null")
        }
    };
    let secrets = support_bundle::known_secrets(environment, token).await;
    let secrets = secrets.map_err(|error| format!("cannot tell secrets apart: {error}"))?;
    let doctor = async {
        match doctor::report(&flags.proxy, log, environment).await {
            Ok(report) => (report.text(true, usize::MAX), json!(report)),
            Err(refused) => (refused.to_string(), json!(refused)),
        }
    };
    let bundle = support_bundle::collect(&sources, secrets, doctor).await;
    let written = unless_unread(bundle.write(&mut to));
    written.map_err(|error| unusable("support bundle", error).into())
}
