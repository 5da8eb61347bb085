//! Reports, for pod manifests, where this agent differs from pilot-agent.
//!
//! Each finding belongs to a row of [`differences::TABLE`]. Rows without a selector hold for all pods,
//! and are not repeated for each.

pub mod differences;

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::cli::{self, Command, Refused, Typed, iptables};
use crate::config::environment::{self, Environment};
use crate::config::flags::ProxyFlags;
use crate::config::pod::Pairs;
use crate::config::report::described;
use crate::doctor::report::{Check, Level};
use crate::json;
use crate::lifecycle::BoxError;
use crate::logging::printable;
use crate::problem::{Diagnostics, codes};
use differences::{Difference, Impact, Selector, TABLE};

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
    pub differences: Vec<Found>,
}

#[derive(Debug, Serialize)]
pub struct Found {
    pub container: String,
    #[serde(flatten)]
    pub check: Check,
    /// The row's id; empty for a setting that was not compared.
    pub row: &'static str,
}

/// Reads Kubernetes objects, as YAML or JSON, and compares the settings of their pods.
pub fn report(text: &str) -> Result<Report, BoxError> {
    compare(text, TABLE)
}

fn compare(text: &str, table: &[Difference]) -> Result<Report, BoxError> {
    // The text is the operator's own, and may be of thousands of pods.
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: usize::MAX,
            max_nodes: usize::MAX,
            max_documents: usize::MAX,
            max_total_scalar_bytes: usize::MAX,
        },
    };
    let json = serde_json::from_str(text).map(|object: Value| vec![object]);
    let documents = json.or_else(|_| serde_saphyr::from_multiple_with_options(text, options));
    let mut documents: Vec<_> =
        documents.map_err(|error| format!("neither YAML nor JSON: {}", error.without_snippet()))?;
    documents.retain_mut(json::remove_null);
    let mut all = Vec::new();
    for document in &documents {
        collect(document, &mut all);
    }
    if all.is_empty() {
        return Err("no pod and no template of pods in the text".into());
    }
    let pods = all.iter().filter_map(|pod| checked(pod, table));
    let pods: Vec<_> = pods.collect();
    Ok(Report {
        level: pods.iter().map(|pod| pod.level).fold(Level::Ok, Level::max),
        others: all.len() - pods.len(),
        pods,
    })
}

/// Adds the pod, or the template of pods, in an object or in each item of a list, with a name.
fn collect<'a>(object: &'a Value, found: &mut Vec<(String, &'a Value)>) {
    for item in object["items"].as_array().into_iter().flatten() {
        collect(item, found);
    }
    let places = ["", "/spec/template", "/spec/jobTemplate/spec/template"];
    let mut pods = places.iter().filter_map(|place| object.pointer(place));
    if let Some(pod) = pods.find(|pod| pod["spec"]["containers"].is_array()) {
        let metadata = &object["metadata"];
        let kind = object["kind"].as_str().unwrap_or("Pod");
        let name = metadata["name"].as_str();
        let name = name.or(metadata["generateName"].as_str()).unwrap_or("?");
        let name = match metadata["namespace"].as_str() {
            Some(namespace) => format!("{kind} {namespace}/{name}"),
            None => format!("{kind} {name}"),
        };
        found.push((name, pod));
    }
}

/// The pod's differences; None if nothing of Istio's runs in it.
fn checked((name, pod): &(String, &Value), table: &[Difference]) -> Option<Checked> {
    let annotations = Pairs::deserialize(&pod["metadata"]["annotations"]).unwrap_or_default();
    let lists = ["initContainers", "containers"].iter();
    let lists = lists.filter_map(|list| pod["spec"][list].as_array());
    let found = lists.flatten();
    let found = found.filter_map(|container| differences(container, &annotations, table));
    let differences = found.reduce(|all, more| all.into_iter().chain(more).collect())?;
    let levels = differences.iter().map(|found| found.check.level);
    Some(Checked {
        name: name.clone(),
        level: levels.fold(Level::Ok, Level::max),
        differences,
    })
}

/// The differences of a container that runs pilot-agent, or is named as such.
fn differences(container: &Value, annotations: &Pairs, table: &[Difference]) -> Option<Vec<Found>> {
    let name = container["name"].as_str().unwrap_or_default();
    let words = ["command", "args"].map(|list| Vec::<String>::deserialize(&container[list]));
    let words = words.into_iter().flatten().flatten();
    let is_program = |word: &String| word.rsplit('/').next() == Some("pilot-agent");
    let words: Vec<_> = words.skip_while(is_program).collect();
    let first = |at: usize| words.get(at).map_or("", String::as_str);
    let mut findings = Findings {
        container: name,
        table,
        found: Vec::new(),
    };
    let (env, unread) = variables(container);
    let is_compared = match first(0) {
        "proxy" => name == "istio-proxy" && !["ztunnel", "agentgateway"].contains(&first(1)),
        command => ["istio-iptables", "istio-clean-iptables"].contains(&command),
    };
    if is_compared {
        findings.of_line(words, &env, annotations);
    } else if name == "istio-proxy" {
        let why = "not that of a sidecar or gateway, so it was not compared";
        findings.add(Check::skipped("command line", why), None);
    } else {
        return None;
    }
    for name in unread {
        let why = "from a ConfigMap, a Secret or a file, which is not read";
        findings.add(Check::skipped(name, why), None);
    }
    Some(findings.found)
}

/// The variables with a value, and the names of those whose values other objects have. The pod's own names
/// and addresses make no difference.
fn variables(container: &Value) -> (Environment, Vec<&str>) {
    let (mut values, mut unread) = (Pairs::new(), Vec::new());
    for variable in container["env"].as_array().into_iter().flatten() {
        let [name, value] = ["name", "value"].map(|one| variable[one].as_str().unwrap_or_default());
        let from = &variable["valueFrom"];
        if from.is_null() {
            values.insert(name.to_owned(), value.to_owned());
        } else if from["resourceFieldRef"].is_object() {
            // Any number will do: none is compared.
            values.insert(name.to_owned(), "1".to_owned());
        } else if !from["fieldRef"].is_object() {
            unread.push(name);
        }
    }
    if !container["envFrom"].is_null() {
        unread.push("envFrom");
    }
    (values.into_iter().collect(), unread)
}

struct Findings<'a> {
    container: &'a str,
    table: &'a [Difference],
    found: Vec<Found>,
}

impl<'a> Findings<'a> {
    fn of_line(&mut self, words: Vec<String>, env: &Environment, annotations: &Pairs) {
        let program = ["pilot-agent".to_owned()].into_iter();
        let typed = match cli::parse(program.chain(words)) {
            Ok(typed) => typed,
            Err(Refused::Error(text) | Refused::Help(text)) => {
                let row = self.row(Selector::Problem(codes::SETTING_INVALID));
                return self.add(Check::error("command line", text), row);
            }
        };
        if let Some(Command::Proxy(flags)) = &typed.cli.command {
            return self.proxy(flags, &typed, env, annotations);
        }
        match iptables::checked(&typed.flags, env) {
            Ok((arguments, notes)) => {
                self.problems(&notes);
                let given = arguments.iter().filter_map(|flag| flag.split_once('='));
                self.settings(&given.collect());
            }
            Err(error) => {
                let row = self.row(Selector::Problem(codes::SETTING_INVALID));
                self.add(Check::error("command line", error), row);
            }
        }
    }

    fn proxy(&mut self, flags: &ProxyFlags, typed: &Typed, env: &Environment, annotations: &Pairs) {
        for flag in &typed.unknown_flags {
            self.add(
                Check::warning("flag", flag),
                self.row(Selector::UnknownFlag),
            );
        }
        let (mut given, notes) = described(flags, &typed.cli.log, env, annotations.clone());
        self.problems(&notes);
        let flags = typed.flags.iter().filter(|flag| flag.is_given);
        given.extend(flags.map(|flag| (format!("--{}", flag.name), flag.value.as_str().into())));
        let texts = annotations.iter().map(|(name, value)| (&**name, &**value));
        let texts = texts.chain(env.with_prefix(""));
        given.extend(texts.map(|(name, value)| (name.to_owned(), value.into())));
        self.settings(&given.into());
        let probers = env.text(environment::ISTIO_KUBE_APP_PROBERS.name);
        let probers = probers.and_then(|text| json::read::<Map<_, Value>>(text).ok());
        for (path, prober) in probers.iter().flatten() {
            if prober["timeoutSeconds"].is_null() && !path.starts_with("/app-lifecycle/") {
                let row = self.row(Selector::ProbeWithoutTimeout);
                row.into_iter().for_each(|row| self.treated(path, row));
            }
        }
        for (name, why) in env.without_effect() {
            if why != environment::UNUSED {
                self.add(
                    Check::ok(name, why),
                    self.row(Selector::VariableWithoutEffect),
                );
            }
        }
    }

    fn problems(&mut self, notes: &Diagnostics) {
        let errors = notes.problems.iter().map(|one| (Level::Error, one));
        let warnings = notes.warnings.iter().map(|one| (Level::Warning, one));
        for (level, problem) in errors.chain(warnings) {
            let row = self.row(Selector::Problem(problem.code));
            let row = row.or_else(|| self.row(Selector::Problem(codes::SETTING_INVALID)));
            self.add(Check::problem(level, problem), row);
        }
    }

    /// Adds the rows of settings that have another effect here.
    fn settings(&mut self, given: &Value) {
        let has = |name: &str| {
            let path = format!("/{}", name.replace('.', "/"));
            let value = given.get(name).or_else(|| given.pointer(&path));
            let text = value.map_or_else(String::new, |value| value.to_string().replace('"', ""));
            !["", "0", "false"].contains(&text.as_str())
        };
        for row in self.table {
            let settings = row.selectors.iter().filter_map(|selector| match selector {
                Selector::Set(names) => names.split(' ').all(has).then_some(*names),
                _ => None,
            });
            let settings: Vec<_> = settings.collect();
            let is_known = self.found.iter().any(|found| found.row == row.id);
            if !settings.is_empty() && !is_known {
                self.treated(&settings.join(", "), row);
            }
        }
    }

    /// Adds both behaviours, as a warning if the difference can surprise.
    fn treated(&mut self, setting: &str, row: &Difference) {
        let found = format!("{}; {}", row.pilot_agent, row.this_agent);
        let check = match row.impact {
            Impact::Benign => Check::ok(setting, found),
            Impact::Surprising | Impact::Harmful => Check::warning(setting, found),
        };
        self.add(check.remedy(row.advice), Some(row));
    }

    fn add(&mut self, check: Check, row: Option<&Difference>) {
        self.found.push(Found {
            container: self.container.to_owned(),
            check,
            row: row.map_or("", |row| row.id),
        });
    }

    fn row(&self, selector: Selector) -> Option<&'a Difference> {
        let mut rows = self.table.iter();
        rows.find(|row| row.selectors.contains(&selector))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for pod in &self.pods {
            writeln!(f, "{}", printable(&pod.name))?;
            for found in &pod.differences {
                write!(f, "  {}: {}", printable(&found.container), found.check)?;
                match found.row {
                    "" => writeln!(f)?,
                    row => writeln!(f, " [{row}]")?,
                }
            }
        }
        let at = |level| self.pods.iter().filter(|pod| pod.level == level).count();
        let [errors, warnings, ok] = [Level::Error, Level::Warning, Level::Ok].map(at);
        write!(
            f,
            "pods with errors: {errors}, with warnings: {warnings}, with neither: {ok}, without Istio: {}; \
             [codes] are explained in docs/differences.md",
            self.others
        )
    }
}

#[cfg(test)]
pub(crate) mod docs_tests;
#[cfg(test)]
mod tests;
