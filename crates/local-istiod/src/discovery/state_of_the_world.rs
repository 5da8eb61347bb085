//! Subscriptions in the state-of-the-world protocol: every push contains all requested resources of a
//! type.

use std::collections::{BTreeMap, BTreeSet};

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use envoy_types::pb::google::rpc;

use super::{
    Answer, Protocol, Pushed, Report, common_version, depends_on, has_wildcard, in_push_order,
    select, versions,
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
    /// The requested names; empty for all resources.
    names: BTreeSet<String>,
    sent: BTreeMap<String, String>,
    last: Pushed,
}

impl Protocol for Subscriptions {
    type Request = DiscoveryRequest;
    type Response = DiscoveryResponse;

    fn new(report: Report) -> Self {
        Self { watches: BTreeMap::new(), nonces: 0, report }
    }

    fn node(request: &DiscoveryRequest) -> Option<&Node> {
        request.node.as_ref()
    }

    fn type_url(request: &DiscoveryRequest) -> &str {
        &request.type_url
    }

    fn error(request: &DiscoveryRequest) -> Option<&rpc::Status> {
        request.error_detail.as_ref()
    }

    fn request(
        &mut self,
        request: DiscoveryRequest,
        resources: &Resources,
    ) -> Option<DiscoveryResponse> {
        let type_url = request.type_url;
        let names: BTreeSet<_> = request.resource_names.into_iter().collect();
        let mut wants_answer = true;
        if let Some(watch) = self.watches.get(&type_url)
            && !request.response_nonce.is_empty()
        {
            let (nonce, error) = (&request.response_nonce, request.error_detail.as_ref());
            match self.report.answered(&type_url, &watch.last, nonce, error) {
                Answer::Stale => return None,
                Answer::Nack => wants_answer = false,
                Answer::Ack => wants_answer = !names.is_subset(&watch.names),
            }
        }
        if names.is_empty() && !has_wildcard(&type_url) {
            self.watches.remove(&type_url);
            return None;
        }
        let watch = self.watches.entry(type_url.clone()).or_default();
        watch.names = names;
        watch.forget_unwanted();
        wants_answer.then(|| self.push(&type_url, resources))
    }

    fn update(&mut self, resources: &Resources) -> Vec<DiscoveryResponse> {
        let mut pushed = Vec::new();
        for type_url in in_push_order(self.watches.keys()) {
            let selected = select(resources, &type_url, |name| self.wants(&type_url, name));
            let current = self.watches.get(&type_url).map(|watch| &watch.sent);
            let again = depends_on(&type_url).is_some_and(|other| {
                pushed.iter().any(|r: &DiscoveryResponse| r.type_url == other)
            });
            if current != Some(&versions(&selected)) || (again && !selected.is_empty()) {
                pushed.push(self.push(&type_url, resources));
            }
        }
        pushed
    }
}

impl Subscriptions {
    fn wants(&self, type_url: &str, name: &str) -> bool {
        self.watches.get(type_url).is_some_and(|watch| watch.wants(name))
    }

    fn push(&mut self, type_url: &str, resources: &Resources) -> DiscoveryResponse {
        let selected = select(resources, type_url, |name| self.wants(type_url, name));
        let version = common_version(&selected);
        self.nonces += 1;
        let last = Pushed { nonce: format!("{version}-{}", self.nonces), version };
        let watch = self.watches.entry(type_url.to_owned()).or_default();
        watch.sent = versions(&selected);
        watch.last = last.clone();
        self.report.pushed(type_url, &last.version, selected.len(), 0);
        DiscoveryResponse {
            version_info: last.version,
            resources: selected.values().map(|resource| resource.any.clone()).collect(),
            type_url: type_url.to_owned(),
            nonce: last.nonce,
            ..DiscoveryResponse::default()
        }
    }
}

impl Watch {
    fn wants(&self, name: &str) -> bool {
        self.names.is_empty() || self.names.contains("*") || self.names.contains(name)
    }

    /// Forgets the sent resources that are no longer requested, because an unsubscription must not cause
    /// a push.
    fn forget_unwanted(&mut self) {
        let sent = std::mem::take(&mut self.sent);
        self.sent = sent.into_iter().filter(|(name, _)| self.wants(name)).collect();
    }
}
