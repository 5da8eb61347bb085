//! Subscriptions in the delta protocol: a push contains only the differences from the resources that
//! Envoy has.

use std::collections::{BTreeMap, BTreeSet};

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource as WireResource,
};
use envoy_types::pb::google::rpc;

use super::{
    Answer, Protocol, Pushed, Report, Selected, common_version, depends_on, has_wildcard,
    in_push_order, select,
};
use crate::snapshot::Resources;

#[derive(Debug)]
pub(super) struct Subscriptions {
    watches: BTreeMap<String, Watch>,
    nonces: u64,
    report: Report,
}

#[derive(Debug, Default)]
struct Watch {
    wildcard: bool,
    names: BTreeSet<String>,
    /// The resources that Envoy has: name to version.
    has: BTreeMap<String, String>,
    last: Pushed,
}

/// The resources that a push repeats although Envoy has them.
enum Resend<'a> {
    Nothing,
    Names(&'a [String]),
    Everything,
}

impl Protocol for Subscriptions {
    type Request = DeltaDiscoveryRequest;
    type Response = DeltaDiscoveryResponse;

    fn new(report: Report) -> Self {
        Self { watches: BTreeMap::new(), nonces: 0, report }
    }

    fn node(request: &DeltaDiscoveryRequest) -> Option<&Node> {
        request.node.as_ref()
    }

    fn type_url(request: &DeltaDiscoveryRequest) -> &str {
        &request.type_url
    }

    fn error(request: &DeltaDiscoveryRequest) -> Option<&rpc::Status> {
        request.error_detail.as_ref()
    }

    fn request(
        &mut self,
        request: DeltaDiscoveryRequest,
        resources: &Resources,
    ) -> Option<DeltaDiscoveryResponse> {
        let type_url = &request.type_url;
        let Some(watch) = self.watches.get_mut(type_url) else {
            let watch = Watch::begin(&request);
            self.watches.insert(type_url.clone(), watch);
            let asked: Vec<_> = request.resource_names_subscribe;
            if is_withheld(resources, type_url, &asked) {
                return None;
            }
            return Some(self.push(type_url, resources, &Resend::Nothing, &asked));
        };
        if !request.response_nonce.is_empty() {
            let (nonce, error) = (&request.response_nonce, request.error_detail.as_ref());
            let answer = self.report.answered(type_url, &watch.last, nonce, error);
            if answer == Answer::Stale {
                return None;
            }
        }
        watch.change(&request);
        let asked = request.resource_names_subscribe;
        if asked.is_empty() || is_withheld(resources, type_url, &asked) {
            return None;
        }
        Some(self.push(type_url, resources, &Resend::Names(&asked), &asked))
    }

    fn update(&mut self, resources: &Resources) -> Vec<DeltaDiscoveryResponse> {
        let mut pushed: Vec<DeltaDiscoveryResponse> = Vec::new();
        for type_url in in_push_order(self.watches.keys()) {
            let again = depends_on(&type_url)
                .is_some_and(|other| pushed.iter().any(|response| response.type_url == other));
            let again = if again { Resend::Everything } else { Resend::Nothing };
            if self.has_news(&type_url, resources, &again) {
                pushed.push(self.push(&type_url, resources, &again, &[]));
            }
        }
        pushed
    }
}

impl Subscriptions {
    fn has_news(&self, type_url: &str, resources: &Resources, again: &Resend<'_>) -> bool {
        self.watches.get(type_url).is_some_and(|watch| {
            let selected = select(resources, type_url, |name| watch.wants(name));
            !watch.news(&selected, again).is_empty() || !watch.gone(&selected).is_empty()
        })
    }

    /// Builds a push and records it. Names in `asked` that do not exist are reported as removed.
    fn push(
        &mut self,
        type_url: &str,
        resources: &Resources,
        again: &Resend<'_>,
        asked: &[String],
    ) -> DeltaDiscoveryResponse {
        self.nonces += 1;
        let watch = self.watches.entry(type_url.to_owned()).or_default();
        let selected = select(resources, type_url, |name| watch.wants(name));
        let news = watch.news(&selected, again);
        let mut gone = watch.gone(&selected);
        let absent =
            asked.iter().filter(|name| *name != "*" && !selected.contains_key(name.as_str()));
        gone.extend(absent.cloned());
        watch.has.retain(|name, _| !gone.contains(name));
        for resource in &news {
            watch.has.insert(resource.name.clone(), resource.version.clone());
        }
        let version = common_version(&selected);
        watch.last = Pushed { nonce: format!("{version}-{}", self.nonces), version };
        self.report.pushed(type_url, &watch.last.version, news.len(), gone.len());
        DeltaDiscoveryResponse {
            system_version_info: watch.last.version.clone(),
            resources: news,
            type_url: type_url.to_owned(),
            nonce: watch.last.nonce.clone(),
            removed_resources: gone.into_iter().collect(),
            ..DeltaDiscoveryResponse::default()
        }
    }
}

impl Watch {
    /// Begins a subscription. A reconnected Envoy lists the resources that it has; without a wildcard,
    /// it is subscribed to them.
    fn begin(request: &DeltaDiscoveryRequest) -> Self {
        let mut watch = Self {
            wildcard: request.resource_names_subscribe.is_empty()
                && has_wildcard(&request.type_url),
            has: request.initial_resource_versions.clone().into_iter().collect(),
            ..Self::default()
        };
        watch.change(request);
        if !watch.wildcard {
            watch.names.extend(watch.has.keys().cloned());
        }
        watch
    }

    fn change(&mut self, request: &DeltaDiscoveryRequest) {
        for name in &request.resource_names_subscribe {
            match name.as_str() {
                "*" => self.wildcard = true,
                _ => drop(self.names.insert(name.clone())),
            }
        }
        for name in &request.resource_names_unsubscribe {
            match name.as_str() {
                "*" => self.wildcard = false,
                _ => drop(self.names.remove(name)),
            }
        }
        if !request.resource_names_unsubscribe.is_empty() {
            // Envoy has dropped these resources itself, so no removal is sent.
            let (wildcard, names) = (self.wildcard, &self.names);
            self.has.retain(|name, _| wildcard || names.contains(name));
        }
    }

    fn wants(&self, name: &str) -> bool {
        self.wildcard || self.names.contains(name)
    }

    fn news(&self, selected: &Selected<'_>, again: &Resend<'_>) -> Vec<WireResource> {
        let differs = |name: &str, version: &String| self.has.get(name) != Some(version);
        selected
            .iter()
            .filter(|(_, resource)| !resource.is_withheld())
            .filter(|(name, resource)| match again {
                Resend::Everything => true,
                Resend::Names(names) if names.iter().any(|again| again == *name) => true,
                _ => differs(name, &resource.version),
            })
            .map(|(name, resource)| WireResource {
                name: (*name).to_owned(),
                version: resource.version.clone(),
                resource: Some(resource.any.clone()),
                ..WireResource::default()
            })
            .collect()
    }

    fn gone(&self, selected: &Selected<'_>) -> BTreeSet<String> {
        let names = self.has.keys();
        names.filter(|name| !selected.contains_key(name.as_str())).cloned().collect()
    }
}

/// Returns true if names are requested and all of them are withheld.
fn is_withheld(resources: &Resources, type_url: &str, asked: &[String]) -> bool {
    let of_type = resources.get(type_url);
    let found = |name| of_type.and_then(|it| it.get(name));
    let mut asked_for = asked.iter().map(found);
    !asked.is_empty() && asked_for.all(|it| it.is_some_and(|it| it.is_withheld()))
}
