//! Says what this agent does otherwise than pilot-agent for pods that are described, not run.
//!
//! Each difference has its row in `docs/differences.md`. What that page says of all pods, whatever their
//! settings, is not repeated for each.

mod pods;
mod rows;

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::cli::{self, Command, Refused, Typed, iptables};
use crate::config::described::described;
use crate::config::environment::{self, Environment};
use crate::doctor::report::{Check, Level};
use crate::problem::Diagnostics;
pub use pods::Unreadable;
use pods::{Container, Pod};

#[derive(Debug, Serialize)]
pub struct Report {
    /// The worst of all pods.
    pub level: Level,
    /// Those with a sidecar, a gateway or rules of traffic capture.
    pub pods: Vec<Checked>,
    /// The number of the others.
    pub others: usize,
}

#[derive(Debug, Serialize)]
pub struct Checked {
    pub name: String,
    pub level: Level,
    pub differences: Vec<Difference>,
}

#[derive(Debug, Serialize)]
pub struct Difference {
    pub container: String,
    #[serde(flatten)]
    pub check: Check,
    /// The first cell of the row in `docs/differences.md`; empty for what was not checked.
    pub row: &'static str,
}

/// Reads Kubernetes objects, as YAML or JSON, and compares the settings of their pods.
pub fn report(text: &str) -> Result<Report, Unreadable> {
    let all = pods::read(text)?;
    let pods: Vec<_> = all.iter().filter_map(checked).collect();
    let level = pods.iter().map(|pod| pod.level).max();
    Ok(Report {
        level: level.unwrap_or(Level::Ok),
        others: all.len() - pods.len(),
        pods,
    })
}

/// The pod's differences; None if nothing of Istio's runs in it.
fn checked(pod: &Pod) -> Option<Checked> {
    let containers = pod.containers.iter();
    let found: Vec<_> = containers.filter_map(|one| differences(pod, one)).collect();
    if found.is_empty() {
        return None;
    }
    let differences: Vec<_> = found.into_iter().flatten().collect();
    let level = differences.iter().map(|found| found.check.level).max();
    Some(Checked {
        name: pod.name.clone(),
        level: level.map_or(Level::Ok, |level| level.max(Level::Ok)),
        differences,
    })
}

/// The differences of a container that runs pilot-agent, or is named as such.
fn differences(pod: &Pod, container: &Container) -> Option<Vec<Difference>> {
    let mut findings = Findings {
        container: &container.name,
        found: Vec::new(),
    };
    let command = container.words.first().map_or("", String::as_str);
    match (command, container.name.as_str()) {
        ("proxy", "istio-proxy") | ("istio-iptables" | "istio-clean-iptables", _) => {
            findings.of_line(pod, container);
        }
        (_, "istio-proxy") => {
            let why = "not that of pilot-agent proxy, so it was not compared";
            findings.add(Check::skipped("command line", why), "");
        }
        _ => return None,
    }
    for name in &container.unread {
        let why = "from a ConfigMap, a Secret or a file, which is not read";
        findings.add(Check::skipped(name, why), "");
    }
    Some(findings.found)
}

struct Findings<'a> {
    container: &'a str,
    found: Vec<Difference>,
}

impl Findings<'_> {
    fn of_line(&mut self, pod: &Pod, container: &Container) {
        let program = ["pilot-agent".to_owned()].into_iter();
        let typed = match cli::parse(program.chain(container.words.iter().cloned())) {
            Ok(typed) => typed,
            Err(Refused::Error(text) | Refused::Help(text)) => {
                let is_of_other_program = text.contains("is not supported by this agent");
                return match is_of_other_program {
                    true => self.add(Check::skipped("command line", text), rows::NODE_TYPE),
                    false => self.add(Check::error("command line", text), rows::CONFIGURATION),
                };
            }
        };
        let variables = container.variables.iter().cloned();
        match &typed.cli.command {
            Some(Command::Proxy(_)) => {
                self.proxy(&typed, &variables.collect(), pod, container.has_cpu_limit);
            }
            _ => self.capture(&typed, &variables.collect()),
        }
    }

    fn proxy(&mut self, typed: &Typed, env: &Environment, pod: &Pod, has_cpu_limit: bool) {
        let Some(Command::Proxy(flags)) = &typed.cli.command else {
            return;
        };
        for flag in &typed.unknown_flags {
            self.add(Check::warning("flag", flag), rows::UNKNOWN_FLAG);
        }
        let config = described(flags, &typed.cli.log, env, pod.annotations.clone());
        self.problems(&config.notes);
        let mut settings = pod.annotations.clone();
        flatten("", &Value::Object(config.members), &mut settings);
        let is_without_envoy = env.get(&environment::DISABLE_ENVOY, &mut Vec::new());
        if has_cpu_limit && !is_without_envoy && !settings.contains_key("concurrency") {
            self.treated("concurrency (not set)", rows::THREADS);
        }
        let given = typed.flags.iter().filter(|flag| flag.is_given);
        settings.extend(given.map(|flag| (format!("--{}", flag.name), flag.value.clone())));
        let variables = env.with_prefix("");
        settings.extend(variables.map(|(name, value)| (name.to_owned(), value.to_owned())));
        self.settings(&settings);
        let size = environment::WORKLOAD_RSA_KEY_SIZE.name;
        if !settings.contains_key(size) {
            // It holds for nearly all pods, and seldom matters.
            let check = Check::ok(format!("{size} (not set)"), rows::sentence(rows::KEY));
            self.add(check, rows::KEY);
        }
        let probers = settings.get(environment::ISTIO_KUBE_APP_PROBERS.name);
        let probers = probers.and_then(|json| serde_json::from_str::<Map<_, Value>>(json).ok());
        for (path, prober) in probers.iter().flatten() {
            if prober.get("timeoutSeconds").is_none() && !path.starts_with("/app-lifecycle/") {
                self.treated(path, rows::PROBE_TIMEOUT);
            }
        }
        for (name, why) in env.without_effect() {
            if !why.starts_with("pilot-agent") {
                self.add(Check::ok(name, why), rows::WITHOUT_EFFECT);
            }
        }
    }

    fn capture(&mut self, typed: &Typed, env: &Environment) {
        match iptables::checked(&typed.flags, env) {
            Ok((arguments, notes)) => {
                self.problems(&notes);
                let settings = arguments.iter().filter_map(|text| text.split_once('='));
                let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned()));
                self.settings(&settings.collect());
            }
            Err(error) => self.add(Check::error("command line", error), rows::CONFIGURATION),
        }
    }

    fn problems(&mut self, notes: &Diagnostics) {
        for (level, problems) in [
            (Level::Error, &notes.problems),
            (Level::Warning, &notes.warnings),
        ] {
            for problem in problems {
                let check = Check::new(&problem.subject, level, problem.quoted());
                let row = rows::of_problem(problem);
                self.add(check.expected(&problem.expected), row);
            }
        }
    }

    /// Adds the settings, by name, that have another effect here.
    fn settings(&mut self, settings: &BTreeMap<String, String>) {
        for (name, row) in rows::SETTINGS {
            let value = settings.get(*name).map(String::as_str);
            if value.is_some_and(|value| !["", "0", "false"].contains(&value)) {
                self.treated(name, row);
            }
        }
    }

    /// Adds what the row says, as a warning if it can surprise.
    fn treated(&mut self, name: &str, row: &'static str) {
        let surprise = rows::row(row).map_or("", |row| row.surprise);
        let level = match surprise {
            "" => Level::Ok,
            _ => Level::Warning,
        };
        let check = Check::new(name, level, rows::sentence(row));
        self.add(check.remedy(surprise), row);
    }

    fn add(&mut self, check: Check, row: &'static str) {
        self.found.push(Difference {
            container: self.container.to_owned(),
            check,
            row,
        });
    }
}

/// Adds the members of objects by their paths, such as `tracing.zipkin.address`.
fn flatten(path: &str, value: &Value, settings: &mut BTreeMap<String, String>) {
    if !path.is_empty() {
        let text = value.as_str().map(str::to_owned);
        settings.insert(path.to_owned(), text.unwrap_or_else(|| value.to_string()));
    }
    for (name, value) in value.as_object().into_iter().flatten() {
        let dot = if path.is_empty() { "" } else { "." };
        flatten(&format!("{path}{dot}{name}"), value, settings);
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for pod in &self.pods {
            writeln!(f, "{}", pod.name)?;
            for Difference {
                container,
                check,
                row,
            } in &pod.differences
            {
                let row = match *row {
                    "" => String::new(),
                    row => format!(" [{row}]"),
                };
                writeln!(f, "  {container}: {check}{row}")?;
            }
        }
        let at = |level| self.pods.iter().filter(|pod| pod.level == level).count();
        let [errors, warnings, ok] = [Level::Error, Level::Warning, Level::Ok].map(at);
        write!(
            f,
            "pods with errors: {errors}, with warnings: {warnings}, with neither: {ok}, without Istio: {}; \
             [rows] are those of docs/differences.md",
            self.others
        )
    }
}

#[cfg(test)]
mod tests;
