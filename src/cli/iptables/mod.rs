//! The `istio-iptables` command: the rules that send a pod's traffic to Envoy.

mod explain;
pub(super) mod flags;
mod machine;

use std::net::Ipv4Addr;
use std::path::Path;

use crate::capture::config::{Config, Host, Invalid, Mode, Settings};
use crate::capture::iptables::apply::Request;
use crate::capture::program::PATH;
use crate::capture::rules::{Family, Rules};
use crate::capture::validation::Probe;
use crate::capture::verify::{self, Finding};
use crate::capture::{self, iptables, lock, nftables, routes};
use crate::config::environment::Environment;
use crate::config::flags::Flag;
use crate::exit_code::ExitCode;
use crate::lifecycle::BoxError;
use crate::problem::{Diagnostics, Problem, codes};
use crate::replace_file::replace_file;
pub use flags::IptablesFlags;

/// The exit code of an error. The CNI plugin knows that of a validation.
pub fn exit_code(error: &BoxError) -> ExitCode {
    let problem = error.downcast_ref::<Problem>();
    if problem.is_some_and(|it| it.code == codes::CAPTURE_VALIDATION_FAILED) {
        ExitCode::NotCaptured
    } else {
        ExitCode::CaptureFailed
    }
}

/// The arguments that count, and what the checks say of them that need no machine.
pub fn checked(
    given: &[Flag],
    environment: &Environment,
) -> Result<(Vec<String>, Diagnostics), clap::Error> {
    let arguments = flags::arguments(given, environment);
    let flags = IptablesFlags::read(&arguments)?;
    let host = Host {
        has_v6: true,
        nameservers: vec![Ipv4Addr::LOCALHOST.into()],
        envoy_uid: None,
    };
    let (problems, warnings) = match Config::check(&flags.settings, &host) {
        Ok((_, warnings)) => (Vec::new(), warnings),
        Err(Invalid(problems)) => (problems, Vec::new()),
    };
    let notes = Diagnostics { problems, warnings };
    Ok((arguments, notes))
}

/// Carries the command out, or `istio-clean-iptables`. Returns the text for standard output, and the exit
/// code.
pub async fn run(
    given: &[Flag],
    is_cleanup: bool,
    environment: &Environment,
) -> Result<(String, ExitCode), BoxError> {
    let arguments = flags::arguments(given, environment);
    let mut flags = read(&arguments)?;
    flags.cleanup_only |= is_cleanup;
    let cleans = flags.cleanup_only && !flags.verify && flags.explain.is_none();
    let (host, family) = match cleans {
        true => (Host::default(), Family::V4),
        false => machine::host(&flags)?,
    };
    let (mut config, warnings) = match Config::check(&flags.settings, &host) {
        Err(invalid) if cleans => {
            tracing::warn!("{invalid}; the default settings are used to remove rules");
            Config::check(&IptablesFlags::read(&[])?.settings, &host)?
        }
        checked => checked?,
    };
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    // With the names that are given.
    let printed = Rules::new(&config);
    let unknown = match cleans {
        true => Vec::new(),
        false => machine::resolve(&mut config).await,
    };
    if let Some(flow) = &flags.explain {
        let text = explain::explain(flow, &config, flags.native_nftables).await?;
        return Ok((text, ExitCode::Success));
    }
    if !unknown.is_empty() {
        return Err(Invalid(unknown).into());
    }
    if cleans {
        // It asks for no routes.
        config.mode = Mode::Redirect;
    }
    let request = Request {
        config: &config,
        is_removal: flags.cleanup_only || flags.native_nftables,
        is_forced: flags.force_apply,
        path: environment.text("PATH").unwrap_or(PATH),
    };
    if flags.verify {
        return Ok(verify(&request, flags.native_nftables).await?);
    }
    if !flags.dry_run {
        let (has_v6, servers) = (host.has_v6, &host.nameservers);
        let arguments = arguments.join(" ");
        tracing::info!("Istio config: {arguments}; IPv6: {has_v6}; DNS servers: {servers:?}");
    }
    let text = match (flags.skip_rule_apply, flags.dry_run) {
        (true, _) => String::new(),
        (false, true) => dry_run(&request, &flags, &printed).await?,
        (false, false) => set_up(&request, &flags).await?,
    };
    if flags.run_validation {
        let probe = Probe {
            family,
            ports: [config.outbound_port, config.inbound_port],
            destination: flags.iptables_probe_port,
            limit: flags.probe_timeout,
        };
        probe.run().await?;
        tracing::info!("traffic is captured");
    }
    Ok((text, ExitCode::Success))
}

/// Reads the flags. `--verify` and `--explain` need the settings of a pod.
fn read(arguments: &[String]) -> Result<IptablesFlags, BoxError> {
    let mut flags = IptablesFlags::read(arguments)?;
    if flags.verify || flags.explain.is_some() {
        require_pod_settings(arguments)?;
        if flags.skip_rule_apply {
            follow_cni_plugin(&mut flags.settings, arguments);
        }
    }
    Ok(flags)
}

/// Changes the settings of istio-validation, which does not set up rules, to the settings with which
/// Istio's CNI plugin sets up the rules of the same pod.
fn follow_cni_plugin(settings: &mut Settings, arguments: &[String]) {
    // The template puts two ports before the ports of the annotation. The plugin reads the annotation.
    let given: Vec<_> = settings.istio_local_exclude_ports.split(',').collect();
    let annotated = given.strip_prefix(&["15090", "15021"]).unwrap_or(&given);
    let mut ports = Vec::new();
    for port in annotated.iter().chain(&["15020", "15021", "15090"]) {
        if !ports.contains(port) {
            ports.push(*port);
        }
    }
    settings.istio_local_exclude_ports = ports.join(",");
    if !is_given(arguments, "--istio-local-outbound-ports-exclude") {
        "15020".clone_into(&mut settings.istio_local_outbound_ports_exclude);
    }
    settings.capture_all_dns = true;
}

fn is_given(arguments: &[String], flag: &str) -> bool {
    arguments.iter().any(|argument| argument.starts_with(flag))
}

/// Refuses arguments that capture nothing because they lack the settings of the pod. Those settings are
/// arguments of another container, and without them every answer would be about other rules.
fn require_pod_settings(arguments: &[String]) -> Result<(), Problem> {
    for flag in ["--istio-service-cidr", "--istio-inbound-ports"] {
        if !is_given(arguments, flag) {
            return Err(Problem::new(codes::CAPTURE_OPTION_MISSING, flag, "missing"));
        }
    }
    Ok(())
}

/// Compares the live rules with the rules of these arguments.
async fn verify(request: &Request<'_>, is_native: bool) -> Result<(String, ExitCode), Problem> {
    let findings = verify::findings(request, is_native).await?;
    let affects_traffic = findings.iter().any(Finding::affects_traffic);
    let (summary, code) = match (findings.is_empty(), affects_traffic) {
        (true, _) => (
            "The rules are those that these arguments ask for: traffic is captured.",
            ExitCode::Success,
        ),
        (false, false) => (
            "Traffic is captured as these arguments ask, in spite of these differences:",
            ExitCode::Success,
        ),
        (false, true) => (
            "Traffic may not be captured as these arguments ask:",
            ExitCode::CaptureDiffers,
        ),
    };
    let lines = findings.iter().map(|finding| format!("\n  {finding}"));
    Ok((summary.to_owned() + &lines.collect::<String>(), code))
}

/// Sets rules and routes up, or removes them.
async fn set_up(request: &Request<'_>, flags: &IptablesFlags) -> Result<String, Problem> {
    let config = request.config;
    let failed = |error| capture::problem(codes::CAPTURE_LOCKED, lock::NAMESPACE, error);
    let _lock = lock::acquire().await.map_err(failed)?;
    // Marked packets are lost without their routes, but these take none by themselves.
    if !flags.cleanup_only {
        routes::add(config)?;
    }
    if flags.native_nftables && !flags.cleanup_only {
        nftables::apply(&Rules::new(config)).await?;
        if let Err(error) = request.carry_out().await {
            tracing::warn!("rules of iptables may remain: {error}");
        }
    } else {
        let done = request.carry_out().await;
        // Rules that capture stay until others do, but a removal removes what it can.
        if done.is_ok() || flags.cleanup_only {
            nftables::clean().await?;
        }
        done?;
    }
    routes::remove(config)?;
    Ok(String::new())
}

/// What would be given to the programs.
async fn dry_run(
    request: &Request<'_>,
    flags: &IptablesFlags,
    rules: &Rules,
) -> Result<String, Problem> {
    let text = match (flags.native_nftables, flags.cleanup_only) {
        (_, true) if nftables::has_tables() => request.preview().await? + &nftables::removal(),
        (_, true) => request.preview().await?,
        (true, false) => nftables::transaction(rules),
        (false, false) => iptables::dry_run(rules),
    };
    let path = &flags.dry_run_file_path;
    if !path.is_empty() {
        let written = replace_file(Path::new(path), text.as_bytes(), 0o644);
        let code = codes::CAPTURE_OPTION_INVALID;
        written.map_err(|error| {
            capture::problem(code, format!("--dry-run-file-path {path:?}"), error)
        })?;
    }
    Ok(text)
}

#[cfg(test)]
mod docs_tests;
#[cfg(test)]
mod tests;
