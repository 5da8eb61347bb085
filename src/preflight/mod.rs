//! Reports, for pod manifests, where this agent differs from pilot-agent.
//!
//! Each finding belongs to a row of [`differences::TABLE`].

pub mod differences;
mod pods;

use std::fmt;

use indexmap::IndexMap;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::cli::{self, Command, ParseError, ParsedLine, iptables};
use crate::config::environment::{self, Environment};
use crate::config::flags::ProxyFlags;
use crate::config::pod::Pairs;
use crate::config::report::manifest_configuration;
use crate::json;
use crate::logging::printable;
use crate::problem::{Code, Diagnostics, Level, Problem};
use crate::report::Check;
use crate::runtime::lifecycle::BoxError;
use differences::{Difference, Selector, TABLE};
pub use pods::Owners;
use pods::{Container, Pods, add};

/// The most owners that the text names for a finding.
const MAX_OWNERS: usize = 5;

#[derive(Debug, Serialize)]
pub struct Report {
    /// The worst level of all pods.
    pub level: Level,
    /// The findings, sorted by level with the worst first.
    pub findings: Vec<Finding>,
    /// The numbers of pods by their worst finding.
    pub errors: usize,
    pub warnings: usize,
    pub neither: usize,
    /// The number of pods without a container of Istio.
    pub without_istio: usize,
    /// The number of pod templates without a container of Istio, whose webhook injects the sidecar into pods only.
    pub not_injected: usize,
}

/// A finding, and the pods that have it.
#[derive(Debug, Serialize)]
pub struct Finding {
    #[serde(flatten)]
    pub found: ContainerCheck,
    pub owners: Owners,
}

/// A check of a container, with the row of the table to which it belongs.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct ContainerCheck {
    pub container: String,
    #[serde(flatten)]
    pub check: Check,
    /// The row's id; empty for a setting that was not compared.
    pub row: &'static str,
}

/// Reads Kubernetes objects, as YAML or JSON, and compares the settings of their pods.
pub fn report(text: &str) -> Result<Report, BoxError> {
    // The limits of the parser are lifted, because the operator's text is trusted and may have thousands of pods.
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: usize::MAX,
            max_nodes: usize::MAX,
            max_documents: usize::MAX,
            max_total_scalar_bytes: usize::MAX,
        },
    };
    let documents = match serde_json::from_str::<Pods>(text) {
        Ok(pods) => vec![pods],
        Err(_) => serde_saphyr::from_multiple_with_options(text, options)
            .map_err(|error| format!("neither YAML nor JSON: {}", error.without_snippet()))?,
    };
    let pods = documents.into_iter().reduce(Pods::and).unwrap_or_default();
    if pods.settings.is_empty() && pods.without_istio + pods.not_injected == 0 {
        return Err("no pod and no template of pods in the text".into());
    }
    let mut findings = IndexMap::<ContainerCheck, Owners>::new();
    let mut worst = Level::Ok;
    let [mut errors, mut warnings, mut neither] = [0; 3];
    for (settings, owners) in &pods.settings {
        let mut level = Level::Ok;
        for container in &settings.containers {
            for found in differences(container, &settings.annotations) {
                level = level.max(found.check.level);
                add(findings.entry(found).or_default(), owners);
            }
        }
        let count = match level {
            Level::Error => &mut errors,
            Level::Warning => &mut warnings,
            Level::Ok | Level::Skipped => &mut neither,
        };
        *count += owners.values().sum::<usize>();
        worst = worst.max(level);
    }
    findings.sort_by(|one, _, other, _| other.check.level.cmp(&one.check.level));
    let findings = findings.into_iter().map(|(found, owners)| Finding { found, owners });
    Ok(Report {
        level: worst,
        findings: findings.collect(),
        errors,
        warnings,
        neither,
        without_istio: pods.without_istio,
        not_injected: pods.not_injected,
    })
}

/// Compares a container of a pod with these annotations with the table.
fn differences(container: &Container, annotations: &Pairs) -> Vec<ContainerCheck> {
    let mut findings = Findings { container: &container.name, found: Vec::new() };
    if let Some(words) = &container.words {
        let env = container.env.clone().into_iter().collect();
        findings.command_line(words.clone(), &env, annotations);
        findings.image(container, &env);
    } else {
        let why = "it is not a command line of a sidecar or gateway, so it was not compared";
        findings.add(Check::skipped("command line", why), None);
    }
    for name in &container.unread {
        let why = "from a ConfigMap, a Secret or a file, which is not read";
        findings.add(Check::skipped(name, why), None);
    }
    findings.found
}

/// The first minor version of Istio 1 whose Envoy can discover clusters.
const FIRST_ON_DEMAND: u32 = 31;

/// Collects the findings of a container.
struct Findings<'a> {
    container: &'a str,
    found: Vec<ContainerCheck>,
}

impl Findings<'_> {
    fn command_line(&mut self, words: Vec<String>, env: &Environment, annotations: &Pairs) {
        let typed = match cli::parse(["pilot-agent".to_owned()].into_iter().chain(words)) {
            Ok(typed) => typed,
            Err(ParseError::Invalid(text) | ParseError::Help(text)) => return self.refused(text),
        };
        if let Some(Command::Proxy(flags)) = &typed.cli.command {
            return self.proxy(flags, &typed, env, annotations);
        }
        match iptables::check(&typed.flags, env) {
            Ok((arguments, notes)) => {
                self.problems(&notes);
                self.settings(&arguments.iter().filter_map(|flag| flag.split_once('=')).collect());
            }
            Err(error) => self.refused(error),
        }
    }

    fn proxy(
        &mut self,
        flags: &ProxyFlags,
        line: &ParsedLine,
        env: &Environment,
        annotations: &Pairs,
    ) {
        for flag in &line.unknown_flags {
            self.add(Check::new("flag", Level::Warning, flag), find_row(Selector::UnknownFlag));
        }
        let (mut given, notes) =
            manifest_configuration(flags, &line.cli.log, env, annotations.clone());
        self.problems(&notes);
        for flag in line.flags.iter().filter(|flag| flag.is_given) {
            given.insert(format!("--{}", flag.name), flag.value.as_str().into());
        }
        given.extend(annotations.iter().map(|(name, value)| (name.clone(), value.as_str().into())));
        given.extend(env.with_prefix("").map(|(name, value)| (name.to_owned(), value.into())));
        self.settings(&given.into());
        let text = env.text(environment::ISTIO_KUBE_APP_PROBERS.row.name);
        let probers = text.and_then(|text| json::read::<Map<_, Value>>(text).ok());
        for (path, prober) in probers.iter().flatten() {
            if prober["timeoutSeconds"].is_null()
                && !path.starts_with("/app-lifecycle/")
                && let Some(row) = find_row(Selector::ProbeWithoutTimeout)
            {
                self.difference(path, row);
            }
        }
        for (name, why) in env.without_effect() {
            if why != environment::UNUSED {
                self.add(Check::ok(name, why), find_row(Selector::VariableWithoutEffect));
            }
        }
    }

    /// Warns of an image whose Envoy cannot discover clusters.
    fn image(&mut self, container: &Container, env: &Environment) {
        let variable = &environment::ISTIO_AGENT_ON_DEMAND_CLUSTERS;
        let code = Code::OnDemandOff;
        let is_off = !env.get(variable) || self.found.iter().any(|it| it.check.code == code.name());
        if let Some(minor) = container.istio_minor.filter(|it| *it < FIRST_ON_DEMAND && !is_off) {
            let found = format!("the image has Istio 1.{minor}, whose Envoy is older than 1.39.0");
            self.problem(Level::Warning, &Problem::new(code, variable.row.name, found));
        }
    }

    fn problems(&mut self, notes: &Diagnostics) {
        for problem in &notes.problems {
            self.problem(Level::Error, problem);
        }
        for problem in &notes.warnings {
            self.problem(Level::Warning, problem);
        }
    }

    fn problem(&mut self, level: Level, problem: &Problem) {
        let exact = find_row(Selector::Problem(problem.code));
        let row = exact.or_else(|| find_row(Selector::Problem(Code::SettingInvalid)));
        self.add(Check::with_level(level, problem), row);
    }

    fn refused(&mut self, found: impl ToString) {
        self.problem(Level::Error, &Problem::new(Code::ArgumentInvalid, "command line", found));
    }

    /// Adds the rows of settings that have another effect in this agent.
    fn settings(&mut self, given: &Value) {
        for row in TABLE {
            let mut settings = Vec::new();
            for selector in row.selectors {
                if let Selector::Set(names) = selector
                    && names.split(' ').all(|name| is_set(given, name))
                {
                    settings.push(*names);
                }
            }
            if !settings.is_empty() && !self.found.iter().any(|found| found.row == row.id) {
                self.difference(&settings.join(", "), row);
            }
        }
    }

    /// Adds a difference with both behaviours.
    fn difference(&mut self, setting: &str, row: &Difference) {
        let found = format!("{}; {}", row.pilot_agent, row.this_agent);
        let mut check = Check::new(setting, row.level, found);
        row.advice.clone_into(&mut check.remedy);
        self.add(check, Some(row));
    }

    fn add(&mut self, check: Check, row: Option<&Difference>) {
        self.found.push(ContainerCheck {
            container: self.container.to_owned(),
            check,
            row: row.map_or("", |row| row.id),
        });
    }
}

/// Returns true if a setting has the value in `name`, as `name=value`, or any that is not zero, false or empty.
fn is_set(given: &Value, name: &str) -> bool {
    let (name, wanted) = name.split_once('=').map_or((name, None), |(n, v)| (n, Some(v)));
    let value = given.get(name).or_else(|| given.pointer(&format!("/{}", name.replace('.', "/"))));
    let text = value.map_or_else(String::new, |value| value.to_string().replace('"', ""));
    match wanted {
        Some(wanted) => text == wanted,
        None => !["", "0", "false"].contains(&text.as_str()),
    }
}

/// Returns the row of the table that has this selector.
fn find_row(selector: Selector) -> Option<&'static Difference> {
    TABLE.iter().find(|row| row.selectors.contains(&selector))
}

impl Report {
    /// Removes findings below a level.
    pub fn retain(&mut self, min: Level) {
        self.findings.retain(|it| it.found.check.level >= min);
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Finding { found, owners } in &self.findings {
            write!(f, "{}", found.check)?;
            if !found.row.is_empty() && found.check.code.is_empty() {
                write!(f, " [{}]", found.row)?;
            }
            let pods: usize = owners.values().sum();
            let first = owners.iter().take(MAX_OWNERS);
            let mut named: Vec<_> =
                first.map(|(owner, pods)| format!("{owner} ({pods})")).collect();
            if owners.len() > MAX_OWNERS {
                named.push(format!("{} others", owners.len() - MAX_OWNERS));
            }
            let s = if pods == 1 { "" } else { "s" };
            let text = format!("{} of {pods} pod{s}: {}", found.container, named.join(", "));
            writeln!(f, "\n         {}", printable(&text))?;
        }
        write!(
            f,
            "pods with errors: {}, with warnings: {}, with neither: {}, without Istio: {}; [codes] are \
             explained in docs/differences.md and docs/problems.md",
            self.errors, self.warnings, self.neither, self.without_istio
        )?;
        if self.not_injected > 0 {
            write!(
                f,
                "\nnot compared: {} pod templates without a sidecar; inject them first, with `istioctl \
                 kube-inject`, or pass pods of a cluster",
                self.not_injected
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod docs_tests;
#[cfg(test)]
mod small_differences;
#[cfg(test)]
mod tests;
