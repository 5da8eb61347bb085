//! Implements the `istio-iptables` command, which sets up the rules that send a pod's traffic to Envoy, and
//! `istio-clean-iptables`, which removes them. [`run`] runs either; [`check`] checks the settings of a manifest.

mod explain;
pub(super) mod flags;
mod machine;

use std::net::Ipv4Addr;
use std::path::Path;

use indexmap::IndexSet;

use crate::capture::config::{Config, Host, Invalid, Mode, Settings};
use crate::capture::iptables::apply::Request;
use crate::capture::rules::{Family, Rules};
use crate::capture::verify::{self, Finding};
use crate::capture::{self, iptables, lock, nftables, routes, validation};
use crate::config::environment::Environment;
use crate::config::flags::Flag;
use crate::files::replace_file::replace_file;
use crate::problem::{Code, Diagnostics, Problem};
use crate::program::PATH;
use crate::runtime::exit_code::ExitCode;
use crate::runtime::lifecycle::BoxError;
pub use flags::IptablesFlags;

/// Returns the exit code of an error. The CNI plugin recognizes the code of a failed validation.
pub fn exit_code(error: &BoxError) -> ExitCode {
    match error.downcast_ref::<Problem>() {
        Some(it) if it.code == Code::CaptureValidationFailed => ExitCode::NotCaptured,
        _ => ExitCode::CaptureFailed,
    }
}

/// Returns the effective arguments, and the result of the checks that do not depend on the machine.
pub fn check(
    given: &[Flag],
    environment: &Environment,
) -> Result<(Vec<String>, Diagnostics), clap::Error> {
    let arguments = flags::arguments(given, environment);
    let flags = IptablesFlags::read(&arguments)?;
    let host =
        Host { has_v6: true, nameservers: vec![Ipv4Addr::LOCALHOST.into()], envoy_uid: None };
    let mut diagnostics = Diagnostics::default();
    match Config::check(&flags.settings, &host) {
        Ok((_, warnings)) => diagnostics.warnings = warnings,
        Err(Invalid(problems)) => diagnostics.problems = problems,
    }
    Ok((arguments, diagnostics))
}

/// Runs the command, or `istio-clean-iptables`. Returns the text for standard output, and the exit code.
pub async fn run(
    given: &[Flag],
    is_cleanup: bool,
    environment: &Environment,
) -> Result<(String, ExitCode), BoxError> {
    let arguments = flags::arguments(given, environment);
    let mut flags = read(&arguments)?;
    flags.cleanup_only |= is_cleanup;
    let removes_only = flags.cleanup_only && !flags.verify && flags.explain.is_none();
    let (host, family) =
        if removes_only { (Host::default(), Family::V4) } else { machine::host(&flags)? };
    let (mut config, warnings) = match Config::check(&flags.settings, &host) {
        Err(invalid) if removes_only => {
            tracing::warn!("{invalid}; the default settings are used to remove rules");
            Config::check(&IptablesFlags::read(&[])?.settings, &host)?
        }
        checked => checked?,
    };
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    // A dry run prints names of users and groups as they are given.
    let printed = Rules::new(&config);
    let mut unknown = Vec::new();
    if !removes_only {
        unknown = machine::resolve(&mut config).await;
    }
    if let Some(flow) = &flags.explain {
        return Ok((explain::explain(flow, &config).await?, ExitCode::Success));
    }
    if !unknown.is_empty() {
        return Err(Invalid(unknown).into());
    }
    if removes_only {
        // Only mode TPROXY needs routes, so all routes are removed.
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
        let Host { has_v6, nameservers, .. } = &host;
        let arguments = arguments.join(" ");
        tracing::info!("Istio config: {arguments}; IPv6: {has_v6}; DNS servers: {nameservers:?}");
    }
    let mut text = String::new();
    if flags.dry_run && !flags.skip_rule_apply {
        text = dry_run(&request, &flags, &printed).await?;
    } else if !flags.skip_rule_apply {
        set_up(&request, &flags).await?;
    }
    if flags.run_validation {
        validation::run(&config, family, flags.iptables_probe_port, flags.probe_timeout).await?;
        tracing::info!("traffic is captured");
    }
    Ok((text, ExitCode::Success))
}

/// Reads the flags. `--verify` and `--explain` need the settings of the pod, which are arguments of another
/// container. Without them the rules capture nothing, and every answer would be about other rules.
fn read(arguments: &[String]) -> Result<IptablesFlags, BoxError> {
    let mut flags = IptablesFlags::read(arguments)?;
    if flags.verify || flags.explain.is_some() {
        for flag in ["--istio-service-cidr", "--istio-inbound-ports"] {
            if !is_given(arguments, flag) {
                return Err(Problem::new(Code::CaptureOptionMissing, flag, "missing").into());
            }
        }
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
    let mut ports = IndexSet::<&str>::from_iter(annotated.iter().copied());
    ports.extend(["15020", "15021", "15090"]);
    settings.istio_local_exclude_ports = Vec::from_iter(ports).join(",");
    if !is_given(arguments, "--istio-local-outbound-ports-exclude") {
        "15020".clone_into(&mut settings.istio_local_outbound_ports_exclude);
    }
    settings.capture_all_dns = true;
}

fn is_given(arguments: &[String], flag: &str) -> bool {
    arguments.iter().any(|argument| argument.starts_with(flag))
}

/// Compares the live rules with the rules of these arguments.
async fn verify(request: &Request<'_>, is_native: bool) -> Result<(String, ExitCode), Problem> {
    let findings = verify::findings(request, is_native).await?;
    let affects_traffic = findings.iter().any(Finding::affects_traffic);
    let summary = if affects_traffic {
        "Traffic may not be captured as these arguments ask:"
    } else if findings.is_empty() {
        "The rules are those that these arguments ask for: traffic is captured."
    } else {
        "Traffic is captured as these arguments ask, in spite of these differences:"
    };
    let mut text = summary.to_owned();
    for finding in findings {
        text += &format!("\n  {finding}");
    }
    Ok((text, if affects_traffic { ExitCode::CaptureDiffers } else { ExitCode::Success }))
}

/// Sets up rules and routes, or removes them.
async fn set_up(request: &Request<'_>, flags: &IptablesFlags) -> Result<(), Problem> {
    let config = request.config;
    let _lock = lock::acquire()
        .await
        .map_err(|error| capture::problem(Code::CaptureLocked, lock::NAMESPACE, error))?;
    // Without routes marked packets are lost. Without rules routes have no effect, so they are added first.
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
        // Old rules stay until the new ones capture, but a removal removes as much as it can.
        if done.is_ok() || flags.cleanup_only {
            nftables::clean().await?;
        }
        done?;
    }
    routes::remove_unneeded(config)
}

/// Returns the programs that would run, with their input. Writes it to a file as well if the flags name one.
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
        replace_file(Path::new(path), text.as_bytes(), 0o644).map_err(|error| {
            let subject = format!("--dry-run-file-path {path:?}");
            capture::problem(Code::CaptureOptionInvalid, subject, error)
        })?;
    }
    Ok(text)
}

#[cfg(test)]
mod docs_tests;
#[cfg(test)]
mod tests;
