//! The `istio-iptables` command: the rules that send a pod's traffic to Envoy.

mod explain;
mod flags;
mod machine;
mod report;
mod resolver;
mod verify;

use std::io;
use std::path::Path;

use crate::capture::config::{Config, Host, Invalid};
use crate::capture::iptables::apply::{self, Request};
use crate::capture::rules::{Family, Rules};
use crate::capture::validation::{self, Probe};
use crate::capture::verify::live;
use crate::capture::{iptables, lock, nftables, routes};
use crate::config::environment::Environment;
use crate::exit_code::ExitCode;
use crate::lifecycle::with_causes;
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
    #[error(transparent)]
    Verify(#[from] live::Error),
    #[error(transparent)]
    Lock(#[from] lock::Error),
    #[error(transparent)]
    Routes(#[from] routes::Error),
    #[error(transparent)]
    Iptables(#[from] apply::Failed),
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
    let (mut settings, options) = (resolver.settings(), resolver.options());
    let captures_servers = settings.redirect_dns && !settings.capture_all_dns;
    let cleans = options.cleanup_only && !flags.verify && flags.explain.is_none();
    if cleans {
        // It asks for no routes.
        settings.interception_mode.clear();
    }
    let (host, family) = match cleans {
        true => (Host::default(), Family::V4),
        false => machine::host(options.is_dual_stack, captures_servers, &options.envoy_user)?,
    };
    let (config, warnings) = match Config::check(&settings, &host) {
        Err(invalid) if cleans => {
            tracing::warn!("{invalid}; rules are removed without these settings");
            let (flags, environment) = Default::default();
            let (flags, environment) = (&flags, &environment);
            Config::check(&Resolver { flags, environment }.settings(), &host)?
        }
        checked => checked?,
    };
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    if let Some(flow) = &flags.explain {
        return Ok(explain::explain(flow, &config, options.native_nftables)?.into());
    }
    let unknown = match cleans {
        true => Vec::new(),
        false => machine::unknown_names(&config).await,
    };
    if !unknown.is_empty() {
        return Err(Invalid(unknown).into());
    }
    let request = Request {
        config: &config,
        is_removal: options.cleanup_only || options.native_nftables,
        is_forced: options.force_apply,
        path: &options.path,
        number: machine::number,
    };
    if flags.verify {
        return verify::verify(&request, options.native_nftables).await;
    }
    if !options.dry_run {
        report::configuration(&settings, &options, &config);
    }
    let text = match options.skip_rule_apply {
        true => String::new(),
        false => set_up(&request, &options).await?,
    };
    if options.run_validation {
        validate(&config, &options, family).await?;
    }
    Ok(text.into())
}

/// Does with the rules what is asked for. Returns what a dry run prints.
async fn set_up(request: &Request<'_>, options: &Options) -> Result<String, Error> {
    if options.dry_run {
        return dry_run(request, options).await;
    }
    let config = request.config;
    let _lock = lock::acquire().await?;
    // Marked packets are lost without their routes, but these take none by themselves.
    if !options.cleanup_only {
        routes::add(config)?;
    }
    let mut marks = Vec::new();
    if options.native_nftables && !options.cleanup_only {
        marks.extend(nftables::apply(&Rules::new(config)).await?);
        match request.carry_out().await {
            Ok(gone) => marks.extend(gone),
            Err(error) => tracing::warn!("rules of iptables may be left: {}", with_causes(&error)),
        }
    } else {
        marks.extend(request.carry_out().await?);
        marks.extend(nftables::clean().await?);
    }
    routes::remove(config, &marks)?;
    Ok(String::new())
}

async fn dry_run(request: &Request<'_>, options: &Options) -> Result<String, Error> {
    let rules = Rules::new(request.config);
    let text = match (options.native_nftables, options.cleanup_only) {
        (_, true) if nftables::has_tables() => request.preview().await? + &nftables::removal(),
        (_, true) => request.preview().await?,
        (true, false) => nftables::transaction(&rules),
        (false, false) => iptables::dry_run(&rules),
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

#[cfg(test)]
mod docs_tests;
#[cfg(test)]
mod tests;
