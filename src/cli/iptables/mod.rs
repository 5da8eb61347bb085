//! The `istio-iptables` command: the rules that send a pod's traffic to Envoy.
//!
//! With iptables, only `--dry-run` works so far.

mod explain;
mod flags;
mod machine;
mod report;
mod resolver;
mod verify;

use std::io;
use std::path::Path;

use crate::capture::config::{Config, Invalid};
use crate::capture::rules::{Family, Rules};
use crate::capture::validation::{self, Probe};
use crate::capture::{iptables, nftables};
use crate::config::environment::Environment;
use crate::exit_code::ExitCode;
use crate::replace_file::replace_file;
pub use flags::IptablesFlags;
use resolver::{Options, Resolver};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Invalid(#[from] Invalid),
    #[error(transparent)]
    Machine(#[from] machine::Error),
    #[error(transparent)]
    Nftables(#[from] nftables::Error),
    #[error(
        "istio-iptables can only print rules so far (--dry-run); {0} is not part of this agent yet: \
         let Istio's own image (istio/proxyv2) run it in the init container, or capture traffic with \
         the Istio CNI plugin"
    )]
    Missing(&'static str),
    #[error(
        "iptables validation failed, the pod is not ready for Istio: {0}. It has to run as the user of \
         --proxy-uid. With Istio CNI, the pod may have started before its node was ready: with \
         cni.repair.deletePods=true it is deleted and starts again, otherwise delete it, so that it \
         starts on a node where istio-cni runs"
    )]
    Validation(validation::Error),
    #[error("cannot write {path:?}, which DRY_RUN_FILE_PATH names")]
    DryRunFile {
        path: String,
        #[source]
        source: io::Error,
    },
}

impl Error {
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Validation(_) => ExitCode::NotCaptured,
            _ => ExitCode::CaptureFailed,
        }
    }
}

/// The text for standard output, and the exit code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub text: String,
    pub code: ExitCode,
}

impl From<String> for Report {
    fn from(text: String) -> Self {
        let code = ExitCode::Success;
        Self { text, code }
    }
}

/// Carries the command out.
pub async fn run(flags: &IptablesFlags, environment: &Environment) -> Result<Report, Error> {
    let resolver = Resolver { flags, environment };
    let (settings, options) = (resolver.settings(), resolver.options());
    let captures_servers = settings.redirect_dns && !settings.capture_all_dns;
    let (host, family) =
        machine::host(options.is_dual_stack, captures_servers, &options.envoy_user)?;
    let (config, warnings) = Config::check(&settings, &host)?;
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    if let Some(flow) = &flags.explain {
        return Ok(explain::explain(flow, &config, options.native_nftables)?.into());
    }
    if flags.verify {
        return verify::verify(&config, options.native_nftables).await;
    }
    if !options.dry_run {
        report::configuration(&settings, &options, &config);
    }
    let text = match options.skip_rule_apply {
        true => String::new(),
        false => set_up(&config, &options).await?,
    };
    if options.run_validation {
        validate(&config, &options, family).await?;
    }
    Ok(text.into())
}

/// Does with the rules what is asked for. Returns what a dry run prints.
async fn set_up(config: &Config, options: &Options) -> Result<String, Error> {
    refuse_missing(options)?;
    let rules = Rules::new(config);
    if options.native_nftables && !options.dry_run {
        match options.cleanup_only {
            true => nftables::clean().await?,
            false => nftables::apply(&rules).await?,
        }
        return Ok(String::new());
    }
    let text = match (options.native_nftables, options.cleanup_only) {
        (true, true) => nftables::removal(),
        (true, false) => nftables::transaction(&rules),
        (false, _) => iptables::dry_run(&rules),
    };
    if let Some(path) = options.dry_run_file.clone() {
        let written = replace_file(Path::new(&path), text.as_bytes(), 0o644);
        written.map_err(|source| Error::DryRunFile { path, source })?;
    }
    Ok(text)
}

async fn validate(config: &Config, options: &Options, family: Family) -> Result<(), Error> {
    let probe = Probe {
        family,
        ports: [config.outbound_port, config.inbound_port],
        destination: options.probe_port,
        limit: options.probe_timeout,
    };
    probe.run().await.map_err(Error::Validation)?;
    tracing::info!("traffic is captured");
    Ok(())
}

fn refuse_missing(options: &Options) -> Result<(), Error> {
    let missing = if options.native_nftables {
        return Ok(());
    } else if options.cleanup_only {
        "--cleanup-only"
    } else if !options.dry_run {
        "setting them up"
    } else {
        return Ok(());
    };
    Err(Error::Missing(missing))
}

#[cfg(test)]
mod tests;
