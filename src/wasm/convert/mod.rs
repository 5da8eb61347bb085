//! Recognises Wasm filters with a remote module in ECDS resources, and rewrites them.
//!
//! A resource is an encoded `Any`. One that is no such filter is not touched. In one that is, only the
//! reference to the module and the environment variables for the agent are replaced; all other fields,
//! unknown ones too, stay as they were written.

mod messages;
mod typed_struct;
pub(crate) mod wire;

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use prost::{DecodeError, Message};
use zeroize::Zeroizing;

pub(crate) use messages::Any;
use messages::{
    AsyncDataSource, DataSource, Entry, EnvironmentVariables, PluginConfig, RemoteDataSource,
    Specifier, TypedExtensionConfig, TypedStruct, Wasm,
};

const EXTENSION: &str = "envoy.config.core.v3.TypedExtensionConfig";
const TYPED_STRUCT: &str = "type.googleapis.com/udpa.type.v1.TypedStruct";

/// Environment variables of a module that are for the agent begin with this.
const FOR_AGENT: &str = "ISTIO_META_";
const PULL_SECRET: &str = "ISTIO_META_WASM_IMAGE_PULL_SECRET";
const PULL_POLICY: &str = "ISTIO_META_WASM_IMAGE_PULL_POLICY";
const RESOURCE_VERSION: &str = "ISTIO_META_WASM_PLUGIN_RESOURCE_VERSION";

/// The time limit of a fetch without one of its own.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// The chain of filters a module belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Http,
    Network,
}

/// A Wasm filter whose module has to be fetched.
#[derive(Clone, Debug)]
pub(crate) struct Filter {
    /// The name of the resource.
    pub(crate) name: String,
    pub(crate) module: Result<Request, Unusable>,
    kind: Kind,
    fails_open: bool,
    /// The `Any`, and the filter's own configuration in it.
    resource: Bytes,
    wasm: Bytes,
}

/// A module as a filter's configuration asks for it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) url: String,
    /// Lower-case hexadecimal SHA-256. Empty if the configuration has none.
    pub(crate) checksum: String,
    pub(crate) time_limit: Duration,
    pub(crate) pull_policy: PullPolicy,
    /// That of the Kubernetes object; empty if unknown.
    pub(crate) resource_version: String,
    /// Docker's configuration file as JSON.
    pub(crate) pull_secret: Option<Zeroizing<String>>,
}

/// When a module without a digest is fetched anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PullPolicy {
    #[default]
    Unspecified,
    IfNotPresent,
    /// With each new version of the Kubernetes object.
    Always,
}

/// Why a filter does not say what to fetch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unusable {
    #[error("wasm remote fetch does not have httpUri specified for config {0}")]
    NoUri(String),
    #[error("cannot fetch Wasm module {0}: missing image pulling secret")]
    NoSecret(String),
}

/// The filter in a resource, if it is Wasm with a remote module. An error is a resource that cannot be
/// read, for which pilot-agent refuses the response.
pub(crate) fn filter(resource: &Bytes) -> Result<Option<Filter>, String> {
    let failed = |error: &dyn fmt::Display| {
        format!("failed to unmarshal extension config resource: {error}")
    };
    let any = Any::decode(resource.clone()).map_err(|error| failed(&error))?;
    if any.type_url.rsplit('/').next() != Some(EXTENSION) {
        let problem = format!("found a {:?}, expected {EXTENSION}", any.type_url);
        return Err(failed(&problem));
    }
    let extension = TypedExtensionConfig::decode(any.value).map_err(|error| failed(&error))?;
    let name = extension.name;
    let config = extension.typed_config.ok_or_else(|| {
        format!("typed extension config {name:?} does not contain any typed config")
    })?;
    let failed = |error: &dyn fmt::Display| {
        format!("failed to unmarshal the typed config of extension {name:?}: {error}")
    };
    let (kind, wasm) = if config.type_url == TYPED_STRUCT {
        let typed = TypedStruct::decode(config.value).map_err(|error| failed(&error))?;
        let Some(kind) = Kind::of(&typed.type_url) else {
            return Ok(None);
        };
        let value = typed.value.ok_or_else(|| failed(&"it has no value"))?;
        let wasm = typed_struct::wasm(&value).map_err(|error| failed(&error))?;
        (kind, wasm)
    } else {
        match Kind::of(&config.type_url) {
            Some(kind) => (kind, config.value),
            None => return Ok(None),
        }
    };
    let decoded = Wasm::decode(wasm.clone()).map_err(|error| failed(&error))?;
    let plugin = decoded.config.unwrap_or_default();
    let vm = plugin.vm_config.clone().unwrap_or_default();
    let remote = match vm.code.and_then(|code| code.specifier) {
        Some(Specifier::Remote(remote)) => remote,
        Some(Specifier::Local(_)) => return Ok(None),
        None => {
            let kind = kind.name();
            let problem = "no remote and local load found in Wasm";
            return Err(format!("{problem} {kind} filter {name:?}"));
        }
    };
    Ok(Some(Filter {
        module: request(&name, &plugin.name, remote, vm.environment_variables),
        fails_open: fails_open(&plugin),
        resource: resource.clone(),
        kind,
        wasm,
        name,
    }))
}

fn fails_open(plugin: &PluginConfig) -> bool {
    match plugin.failure_policy {
        // UNSPECIFIED
        0 => plugin.fail_open,
        policy => policy == 3,
    }
}

fn request(
    name: &str,
    plugin: &str,
    remote: RemoteDataSource,
    variables: Option<EnvironmentVariables>,
) -> Result<Request, Unusable> {
    let variables = variables.unwrap_or_default().key_values;
    let uri = remote.http_uri;
    let uri = uri.ok_or_else(|| Unusable::NoUri(name.to_owned()))?;
    let pull_secret = variables.get(PULL_SECRET).cloned().map(Zeroizing::new);
    if pull_secret.as_ref().is_some_and(|secret| secret.is_empty()) {
        return Err(Unusable::NoSecret(plugin.to_owned()));
    }
    let time_limit = match uri.timeout {
        // A negative one has passed.
        Some(limit) => Duration::try_from(limit).unwrap_or_default(),
        None => TIME_LIMIT,
    };
    Ok(Request {
        url: uri.uri,
        checksum: Some(remote.sha256)
            .filter(|checksum| checksum != "nil")
            .unwrap_or_default(),
        time_limit,
        pull_policy: match variables.get(PULL_POLICY).map(String::as_str) {
            Some("IfNotPresent") => PullPolicy::IfNotPresent,
            Some("Always") => PullPolicy::Always,
            _ => PullPolicy::Unspecified,
        },
        resource_version: variables.get(RESOURCE_VERSION).cloned().unwrap_or_default(),
        pull_secret,
    })
}

impl Filter {
    /// The resource with the module at `path`.
    pub(crate) fn with_module(&self, path: &str) -> Result<Bytes, DecodeError> {
        let local = AsyncDataSource {
            specifier: Some(Specifier::Local(DataSource {
                filename: path.to_owned(),
            })),
        };
        let wasm = wire::edited(&self.wasm, 1, |plugin| {
            let plugin = wire::edited(&plugin, 3, |vm| {
                let vm = wire::edited(&vm, 7, without_variables_for_agent)?;
                let local = Bytes::from(local.encode_to_vec());
                wire::edited(&vm, 3, |_| Ok(Some(local))).map(Some)
            });
            plugin.map(Some)
        })?;
        self.with_config(self.kind.type_url(), wasm)
    }

    /// The resource with a filter in place of the module that could not be fetched: one that lets all
    /// requests pass, or refuses them all.
    pub(crate) fn fallback(&self) -> Result<Bytes, DecodeError> {
        // RBAC without rules allows; with rules that are empty it denies. The other field is a prefix
        // of statistics.
        let (rules, prefix): (&[u8], &[u8]) = match self.fails_open {
            true => (&[], b"wasm-default-allow"),
            false => (&[0x0a, 0], b"wasm-default-deny"),
        };
        let (type_url, field) = match self.kind {
            Kind::Http => (
                "type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC",
                6,
            ),
            Kind::Network => (
                "type.googleapis.com/envoy.extensions.filters.network.rbac.v3.RBAC",
                3,
            ),
        };
        let mut rbac = rules.to_vec();
        wire::append(&mut rbac, field, prefix);
        self.with_config(type_url, rbac.into())
    }

    /// What [`Filter::fallback`] does with requests.
    pub(crate) fn policy(&self) -> &'static str {
        match self.fails_open {
            true => "allow",
            false => "deny",
        }
    }

    fn with_config(&self, type_url: &str, value: Bytes) -> Result<Bytes, DecodeError> {
        let type_url = type_url.to_owned();
        let config = Bytes::from(Any { type_url, value }.encode_to_vec());
        wire::edited(&self.resource, 2, |extension| {
            wire::edited(&extension, 2, |_| Ok(Some(config))).map(Some)
        })
    }
}

/// The environment of a module without what is for the agent; none if nothing else is left.
fn without_variables_for_agent(environment: Bytes) -> Result<Option<Bytes>, DecodeError> {
    let (mut left, mut is_empty) = (Vec::new(), true);
    for field in wire::fields(&environment)? {
        if let (2, Some(entry)) = (field.number, field.content)
            && Entry::decode(entry)?.key.starts_with(FOR_AGENT)
        {
            continue;
        }
        is_empty &= !matches!(field.number, 1 | 2);
        left.extend_from_slice(&field.record);
    }
    Ok((!is_empty).then(|| left.into()))
}

impl Kind {
    fn of(type_url: &str) -> Option<Self> {
        let kinds = [Self::Http, Self::Network].into_iter();
        kinds.into_iter().find(|kind| kind.type_url() == type_url)
    }

    fn type_url(self) -> &'static str {
        match self {
            Self::Http => "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm",
            Self::Network => "type.googleapis.com/envoy.extensions.filters.network.wasm.v3.Wasm",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Http => "HTTP",
            Self::Network => "Network",
        }
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may hold a password, and the secret is one.
        f.debug_struct("Request").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
