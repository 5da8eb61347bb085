//! Reads pods and pod templates from manifests. Only the settings that are compared stay in memory, once for all
//! pods with equal settings, because a cluster may have thousands of pods.

use std::collections::BTreeMap;
use std::fmt;

use indexmap::IndexMap;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::config::pod::Pairs;
use crate::json;

/// Owners, such as a Deployment, with the number of their pods.
pub type Owners = BTreeMap<String, usize>;

#[derive(Debug, Default)]
pub(super) struct Pods {
    pub(super) settings: IndexMap<Settings, Owners>,
    /// The number of pods without a container of Istio.
    pub(super) without_istio: usize,
    /// The number of templates without a container of Istio.
    pub(super) not_injected: usize,
}

#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Settings {
    pub(super) annotations: Pairs,
    pub(super) containers: Vec<Container>,
}

/// A container that runs pilot-agent, or is named as such.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Container {
    pub(super) name: String,
    /// The command and its arguments, without the program. None if another program runs.
    pub(super) words: Option<Vec<String>>,
    pub(super) env: Pairs,
    /// The minor version of Istio 1, if the container has an image of Istio's proxy.
    pub(super) istio_minor: Option<u32>,
    /// Variables with a value from a ConfigMap, a Secret or a file.
    pub(super) unread: Vec<String>,
}

impl Pods {
    #[must_use]
    pub(super) fn and(mut self, more: Self) -> Self {
        for (settings, owners) in more.settings {
            add(self.settings.entry(settings).or_default(), &owners);
        }
        self.without_istio += more.without_istio;
        self.not_injected += more.not_injected;
        self
    }

    /// Reads the pod, or the pod template, in an object.
    fn in_object(object: &Value) -> Self {
        let mut pods = Self::default();
        let places = ["", "/spec/template", "/spec/jobTemplate/spec/template"];
        let mut found = places.iter().filter_map(|place| object.pointer(place));
        let Some(pod) = found.find(|pod| pod["spec"]["containers"].is_array()) else {
            return pods;
        };
        let lists = ["initContainers", "containers"].map(|name| pod["spec"][name].as_array());
        let all = lists.into_iter().flatten().flatten();
        let containers: Vec<_> = all.filter_map(Container::read).collect();
        if !containers.is_empty() {
            let read = Pairs::deserialize(&pod["metadata"]["annotations"]);
            let mut annotations = read.unwrap_or_default();
            annotations.retain(|name, _| name.contains("istio.io/"));
            annotations.remove("sidecar.istio.io/status");
            pods.settings.insert(Settings { annotations, containers }, [(owner(object), 1)].into());
        } else if std::ptr::eq(pod, object) {
            pods.without_istio = 1;
        } else {
            pods.not_injected = 1;
        }
        pods
    }
}

/// Adds the pods of each owner.
pub(super) fn add(all: &mut Owners, more: &Owners) {
    for (owner, count) in more {
        *all.entry(owner.clone()).or_default() += count;
    }
}

/// Returns kind and name of the object that an operator edits: the controller, or the object itself.
fn owner(object: &Value) -> String {
    let metadata = &object["metadata"];
    let mut owners = metadata["ownerReferences"].as_array().into_iter().flatten();
    let (kind, name) = match owners.find(|owner| owner["controller"] == true) {
        Some(owner) => (&owner["kind"], owner["name"].as_str()),
        None => (&object["kind"], metadata["name"].as_str().or(metadata["generateName"].as_str())),
    };
    let mut kind = kind.as_str().unwrap_or("Pod");
    let mut name = name.unwrap_or("?");
    // A Deployment names its ReplicaSets after itself and the hash of the template.
    let hash = metadata["labels"]["pod-template-hash"].as_str();
    if let Some(deployment) = name.strip_suffix(&format!("-{}", hash.unwrap_or_default()))
        && kind == "ReplicaSet"
    {
        (kind, name) = ("Deployment", deployment);
    }
    match metadata["namespace"].as_str() {
        Some(namespace) => format!("{kind} {namespace}/{name}"),
        None => format!("{kind} {name}"),
    }
}

impl Container {
    fn read(container: &Value) -> Option<Self> {
        let name = container["name"].as_str().unwrap_or_default();
        let lists = ["command", "args"].map(|list| Vec::<String>::deserialize(&container[list]));
        let line = lists.into_iter().flatten().flatten();
        let words = line.skip_while(|word| word.rsplit('/').next() == Some("pilot-agent"));
        let words: Vec<_> = words.collect();
        let is_compared = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["proxy", "ztunnel" | "agentgateway", ..] => false,
            ["proxy", ..] => name == "istio-proxy",
            ["istio-iptables" | "istio-clean-iptables", ..] => true,
            _ => false,
        };
        if !is_compared && name != "istio-proxy" {
            return None;
        }
        let (env, unread) = variables(container);
        Some(Self {
            name: name.to_owned(),
            istio_minor: istio_minor(container["image"].as_str().unwrap_or_default()),
            words: if is_compared { Some(words) } else { None },
            env,
            unread,
        })
    }
}

/// Returns the minor version in the name of an image of Istio's proxy, such as `docker.io/istio/proxyv2:1.31.0`.
fn istio_minor(image: &str) -> Option<u32> {
    let (_, tag) = image.split('@').next()?.rsplit_once("/proxyv2:")?;
    tag.strip_prefix("1.")?.split(['.', '-']).next()?.parse().ok()
}

/// Returns the variables with a value, and the names of those whose value is in another object. The pod's own names,
/// addresses and limits are left out, because they make no difference.
fn variables(container: &Value) -> (Pairs, Vec<String>) {
    let mut values = Pairs::new();
    let mut unread = Vec::new();
    for variable in container["env"].as_array().into_iter().flatten() {
        let [name, value] = ["name", "value"].map(|one| variable[one].as_str().unwrap_or_default());
        let from = &variable["valueFrom"];
        if from.is_null() {
            values.insert(name.to_owned(), value.to_owned());
        } else if !from["fieldRef"].is_object() && !from["resourceFieldRef"].is_object() {
            unread.push(name.to_owned());
        }
    }
    if !container["envFrom"].is_null() {
        unread.push("envFrom".to_owned());
    }
    (values, unread)
}

/// Reads an object, a list of objects in `items`, or a sequence of them.
impl<'de> Deserialize<'de> for Pods {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PodsVisitor)
    }
}

struct PodsVisitor;

impl<'de> Visitor<'de> for PodsVisitor {
    type Value = Pods;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kubernetes objects")
    }

    fn visit_unit<E>(self) -> Result<Pods, E> {
        Ok(Pods::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut objects: A) -> Result<Pods, A::Error> {
        let mut pods = Pods::default();
        while let Some(more) = objects.next_element()? {
            pods = pods.and(more);
        }
        Ok(pods)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Pods, A::Error> {
        let mut pods = Pods::default();
        let mut object = Map::new();
        while let Some(name) = members.next_key::<String>()? {
            if name == "items" {
                pods = members.next_value()?;
            } else {
                object.insert(name, members.next_value()?);
            }
        }
        let mut object = Value::Object(object);
        json::remove_null(&mut object);
        Ok(pods.and(Pods::in_object(&object)))
    }
}
