//! Reads pods, and templates of pods, from Kubernetes objects.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// A pod, or a template of pods.
#[derive(Debug)]
pub(super) struct Pod {
    /// Kind, namespace and name of its object.
    pub(super) name: String,
    pub(super) annotations: BTreeMap<String, String>,
    pub(super) containers: Vec<Container>,
}

#[derive(Debug)]
pub(super) struct Container {
    pub(super) name: String,
    /// The command line without the program.
    pub(super) words: Vec<String>,
    /// Those whose values the object has.
    pub(super) variables: Vec<(String, String)>,
    /// The names of those whose values other objects have.
    pub(super) unread: Vec<String>,
    pub(super) has_cpu_limit: bool,
}

/// Why there are no pods in a text.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    #[error("neither YAML nor JSON: {0}")]
    Syntax(String),
    #[error("{0}: expected a Kubernetes object, with its kind")]
    NoObject(String),
    #[error("{0}: expected a list spec.containers")]
    NoContainers(String),
    #[error("no pod and no template of pods, only: {0}")]
    NoPods(String),
}

/// The pods of all documents, one or more.
pub(super) fn read(text: &str) -> Result<Vec<Pod>, Unreadable> {
    let (mut pods, mut others) = (Vec::new(), BTreeSet::new());
    for (index, document) in documents(text)?.iter().enumerate() {
        if !document.is_null() {
            let place = format!("document {}", index + 1);
            collect(document, &place, None, &mut pods, &mut others)?;
        }
    }
    if pods.is_empty() {
        let others = others.into_iter().collect::<Vec<_>>().join(", ");
        let nothing = || "nothing".to_owned();
        return Err(Unreadable::NoPods(
            Some(others)
                .filter(|kinds| !kinds.is_empty())
                .unwrap_or_else(nothing),
        ));
    }
    Ok(pods)
}

fn documents(text: &str) -> Result<Vec<Value>, Unreadable> {
    if text.trim_start().starts_with('{') {
        let json = serde_json::Deserializer::from_str(text).into_iter();
        if let Ok(documents) = json.collect() {
            return Ok(documents);
        }
    }
    // The length of the text is limited.
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: usize::MAX,
            max_nodes: usize::MAX,
            max_documents: usize::MAX,
            max_total_scalar_bytes: usize::MAX,
        },
    };
    serde_saphyr::from_multiple_with_options(text, options).map_err(|error| {
        let text = error.without_snippet().to_string();
        Unreadable::Syntax(text.lines().next().unwrap_or_default().to_owned())
    })
}

/// Adds the pods of an object, or of the items of a list, and the kinds of objects without.
fn collect(
    object: &Value,
    place: &str,
    kind_of_list: Option<&str>,
    pods: &mut Vec<Pod>,
    others: &mut BTreeSet<String>,
) -> Result<(), Unreadable> {
    let Some(kind) = object["kind"].as_str().or(kind_of_list) else {
        return Err(Unreadable::NoObject(place.to_owned()));
    };
    if let Some(items) = object["items"].as_array() {
        // The items of a PodList need not have a kind.
        let kind = kind.strip_suffix("List").filter(|kind| !kind.is_empty());
        for (index, item) in items.iter().enumerate() {
            let place = format!("{place} item {}", index + 1);
            collect(item, &place, kind, pods, others)?;
        }
        if items.is_empty() {
            others.insert("an empty list".to_owned());
        }
        return Ok(());
    }
    let name = text(&object["metadata"]["name"]).or(text(&object["metadata"]["generateName"]));
    let namespace = text(&object["metadata"]["namespace"]).map(|space| space + "/");
    let name = format!(
        "{kind} {}{}",
        namespace.unwrap_or_default(),
        name.unwrap_or_else(|| format!("of {place}"))
    );
    let templates = [
        "/spec/template",
        "/spec/jobTemplate/spec/template",
        "/template",
    ];
    let mut templates = templates.iter().filter_map(|path| object.pointer(path));
    let pod = match kind {
        "Pod" => Some(object),
        _ => templates.find(|template| template["spec"]["containers"].is_array()),
    };
    match pod {
        Some(pod) if pod["spec"]["containers"].is_array() => pods.push(Pod::read(name, pod)),
        Some(_) => return Err(Unreadable::NoContainers(format!("{place}, {name}"))),
        None => drop(others.insert(kind.to_owned())),
    }
    Ok(())
}

impl Pod {
    fn read(name: String, pod: &Value) -> Self {
        let lists = ["initContainers", "containers"];
        let lists = lists.iter().filter_map(|list| pod["spec"][list].as_array());
        let annotations = pod["metadata"]["annotations"].as_object();
        let annotations = annotations.into_iter().flatten();
        Self {
            name,
            annotations: annotations
                .filter_map(|(key, value)| Some((key.clone(), text(value)?)))
                .collect(),
            containers: lists
                .flatten()
                .map(|container| Container::read(container, pod))
                .collect(),
        }
    }
}

impl Container {
    fn read(container: &Value, pod: &Value) -> Self {
        let (mut variables, mut unread) = (Vec::<(String, String)>::new(), Vec::new());
        for variable in container["env"].as_array().into_iter().flatten() {
            let name = text(&variable["name"]).unwrap_or_default();
            let from = &variable["valueFrom"];
            if let Some(field) = text(&from["fieldRef"]["fieldPath"]) {
                variables.extend(field_of(pod, &field).map(|value| (name, value)));
            } else if from["resourceFieldRef"].is_object() {
                // Any number will do: none is compared.
                variables.push((name, "1".to_owned()));
            } else if from.is_object() {
                unread.push(name);
            } else {
                let value = text(&variable["value"]).unwrap_or_default();
                variables.push((name, expanded(value, &variables)));
            }
        }
        if container["envFrom"]
            .as_array()
            .is_some_and(|from| !from.is_empty())
        {
            unread.push("envFrom".to_owned());
        }
        let words = ["command", "args"].iter();
        let words = words
            .filter_map(|list| container[list].as_array())
            .flatten();
        let words = words
            .filter_map(text)
            .map(|word| expanded(word, &variables));
        let is_program = |word: &String| word.rsplit('/').next() == Some("pilot-agent");
        Self {
            name: text(&container["name"]).unwrap_or_default(),
            words: words.skip_while(is_program).collect(),
            variables,
            unread,
            has_cpu_limit: !container["resources"]["limits"]["cpu"].is_null(),
        }
    }
}

/// The text of a scalar.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

/// The value of a path such as `metadata.name` or `metadata.labels['app']`, if the object has it.
fn field_of(pod: &Value, path: &str) -> Option<String> {
    if let Some((parent, key)) = path.split_once("['") {
        let parent = pod.pointer(&format!("/{}", parent.replace('.', "/")))?;
        return text(&parent[key.trim_end_matches("']")]);
    }
    text(pod.pointer(&format!("/{}", path.replace('.', "/")))?)
}

/// The text with the values of variables such as `$(POD_NAMESPACE)`; unknown ones stay.
fn expanded(text: String, variables: &[(String, String)]) -> String {
    variables
        .iter()
        .fold(text, |text, (name, value)| match text.contains("$(") {
            true => text.replace(&format!("$({name})"), value),
            false => text,
        })
}
