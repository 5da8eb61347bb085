//! Implements the `config` and `bootstrap` commands, which print the configuration that the agent would run with
//! and the bootstrap that it would start Envoy with. Both take the flags of `proxy`. Also defines the flags of
//! `preflight`, and reads its input.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use clap::Args;

use super::FormatFlags;
use crate::bootstrap::{platform, show};
use crate::config::environment::Environment;
use crate::config::flags::{Flag, LogFlags, ProxyFlags};
use crate::config::{self, Unusable};
use crate::files::regular_file;
use crate::problem::Level;
use crate::runtime::exit_code::ExitCode;
use crate::runtime::lifecycle::BoxError;

/// Maximum size of all files that a command reads, in bytes.
pub(super) const MAX_INPUT: u64 = 256 << 20;

#[derive(Args, Clone, Debug)]
pub struct ConfigFlags {
    #[command(flatten)]
    pub proxy: ProxyFlags,
    /// Output format: yaml or json.
    #[arg(short, long, value_parser = super::version::output, default_value = "yaml")]
    pub output: String,
}

#[derive(Args, Clone, Debug)]
pub struct BootstrapFlags {
    #[command(flatten)]
    pub proxy: ProxyFlags,
    /// File to write the bootstrap to, instead of standard output.
    #[arg(long)]
    pub output: Option<PathBuf>,
    /// Runs Envoy to validate the bootstrap.
    #[arg(long)]
    pub validate: bool,
}

#[derive(Args, Clone, Debug)]
pub struct PreflightFlags {
    /// File with pods or pod templates as YAML or JSON, for example the output of kubectl get pods -A -o yaml;
    /// - means standard input.
    #[arg(default_value = "-")]
    pub file: String,
    /// Leaves out findings below this level. The exit code does not change.
    #[arg(long, value_enum, default_value_t = Level::Skipped)]
    pub level: Level,
    #[command(flatten)]
    pub format: FormatFlags,
}

impl PreflightFlags {
    /// Reads the file.
    pub fn read(&self) -> Result<String, BoxError> {
        read_input(self.file.as_ref(), MAX_INPUT)
            .map_err(|error| format!("cannot read {:?}: {error}", self.file).into())
    }
}

/// Reads a file, standard input, or a pipe that the shell has opened, as for `<(command)`, of at most `limit`
/// bytes. Opening any other pipe could hang, because it may not have a writer.
#[expect(clippy::disallowed_methods, reason = "the shell has opened the pipe behind /dev/fd")]
pub(super) fn read_input(path: &Path, limit: u64) -> io::Result<String> {
    let input: &mut dyn Read = if path == "-" || path == "/dev/stdin" {
        &mut io::stdin()
    } else if path.starts_with("/dev/fd") {
        &mut File::open(path)?
    } else {
        return regular_file::read_text(path, limit);
    };
    let text = io::read_to_string(input.take(limit + 1))?;
    if text.len() as u64 > limit {
        return Err(io::Error::other(format!("more than {limit} bytes")));
    }
    Ok(text)
}

/// Returns the effective configuration as text. Fails, by its code, if the agent would not start with it.
pub fn config(
    flags: &ConfigFlags,
    log: &LogFlags,
    all: &[Flag],
    environment: &Environment,
) -> (String, ExitCode) {
    let report = config::report::report(&flags.proxy, log, all, environment, ".".as_ref());
    let text = match flags.output.as_str() {
        "json" => format!("{:#}", report.json()),
        _ => report.yaml(),
    };
    let code = if report.is_usable() { ExitCode::Success } else { ExitCode::CommandFailed };
    (text, code)
}

/// Returns the bootstrap as text, which is empty if it was written to a file.
pub async fn bootstrap(
    flags: &BootstrapFlags,
    log: &LogFlags,
    environment: &Environment,
) -> Result<String, BoxError> {
    let mut config =
        config::load(&flags.proxy, log, environment, ".".as_ref()).map_err(Unusable)?;
    config.bootstrap.node.platform = platform::discover(&config.platform).await;
    let text = show::show(&config.bootstrap, flags.output.as_deref())?;
    if flags.validate {
        let Some(envoy) = config.envoy else {
            return Err("without Envoy the bootstrap cannot be validated".into());
        };
        let override_json = envoy.command.override_json.as_deref();
        show::validate(&config.bootstrap, &envoy.command.binary, override_json)?;
    }
    Ok(text.unwrap_or_default())
}
