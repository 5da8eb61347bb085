//! Serves discovery from a snapshot, with one session per stream. Each protocol variant has its own
//! subscriptions.
//!
//! A session takes the node from the first request and compares it with the caller's identity, in the
//! way that istiod does. It then responds to requests, and pushes the changes of each new snapshot in
//! the order that Envoy needs.

mod delta;
mod machines;
mod node;
mod state_of_the_world;

use std::collections::BTreeMap;
use std::sync::Arc;

use prost::Message;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tonic::Status;

use super::event::{Event, Events};
use super::resource::{Resource, version_of};
use super::snapshot::{Resources, Snapshot};
use super::stream::{Stream, Variant};
use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::google::rpc;
use machines::{Machines, View};

const CLUSTERS: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const ENDPOINTS: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";
const LISTENERS: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
const ROUTES: &str = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration";
const SECRETS: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";
const EXTENSIONS: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";
const HEALTH: &str = "type.googleapis.com/istio.v1.HealthInformation";

/// Serves streams until all have ended and no further stream can be accepted. Dropping the future ends
/// the streams.
pub(super) async fn serve(
    mut streams: mpsc::Receiver<Stream>,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    events: Events,
) {
    let mut sessions = JoinSet::new();
    let machines = Machines::default();
    loop {
        tokio::select! {
            stream = streams.recv() => match stream {
                Some(stream) => {
                    let served = ResourceSource {
                        snapshots: snapshots.clone(),
                        view: machines.view(),
                    };
                    sessions.spawn(serve_one(stream, served, machines.clone(), events.clone()));
                }
                None => break,
            },
            Some(_) = sessions.join_next() => {}
        }
    }
    while sessions.join_next().await.is_some() {}
}

/// The sources of the resources of a session.
struct ResourceSource {
    snapshots: watch::Receiver<Arc<Snapshot>>,
    view: View,
}

impl ResourceSource {
    /// Waits until [`Served::resources`] may have changed. This function is cancel safe.
    async fn changed(&mut self) {
        tokio::select! {
            Ok(()) = self.snapshots.changed() => {}
            () = self.view.changed() => {}
        }
    }

    fn resources(&mut self, node: &node::Identified) -> Resources {
        let folders = node.folders.iter().map(String::as_str);
        let mut resources = self.snapshots.borrow_and_update().of_node(folders);
        self.view.fill(&mut resources);
        resources
    }
}

async fn serve_one(mut stream: Stream, served: ResourceSource, machines: Machines, events: Events) {
    let status = match stream.variant {
        Variant::StateOfTheWorld => {
            session::<state_of_the_world::Subscriptions>(&mut stream, served, machines, events)
                .await
        }
        Variant::Delta => {
            session::<delta::Subscriptions>(&mut stream, served, machines, events).await
        }
    };
    match status {
        Ok(()) => drop(stream),
        Err(status) => stream.end(status).await,
    }
}

/// The differences of the two variants: their messages and their responses.
trait Protocol {
    type Request: Message + Default;
    type Response: Message;

    fn new(report: Report) -> Self;
    fn node(request: &Self::Request) -> Option<&Node>;
    fn type_url(request: &Self::Request) -> &str;
    fn error(request: &Self::Request) -> Option<&rpc::Status>;

    /// Returns the response to a request, if the request needs one.
    fn request(&mut self, request: Self::Request, resources: &Resources) -> Option<Self::Response>;

    /// Returns the pushes that are needed after a change of the resources.
    fn update(&mut self, resources: &Resources) -> Vec<Self::Response>;
}

/// Serves one stream. Returns once the client has ended it, or with the status that ends it.
async fn session<P: Protocol>(
    stream: &mut Stream,
    mut served: ResourceSource,
    machines: Machines,
    events: Events,
) -> Result<(), Status> {
    let Some((node, first)) = introduction::<P>(stream).await? else {
        return Ok(());
    };
    let report = Report { node: node.title.clone(), events };
    report.events.report(Event::Opened { node: report.node.clone(), variant: stream.variant });
    let registration = node.machine.as_ref().map(|(machine, is_probed)| {
        report.events.report(Event::Registered {
            node: report.node.clone(),
            group: machine.group.clone(),
            address: machine.address.clone(),
        });
        machines.register(machine, !is_probed)
    });
    let health = |error: Option<&rpc::Status>| {
        report.health(error);
        if let Some(registration) = &registration {
            registration.report(error.is_none());
        }
    };
    let subscriptions = P::new(report.clone());
    let result = run_session(stream, &node, first, &mut served, subscriptions, health).await;
    let reason = match &result {
        Ok(()) => "the client is done".to_owned(),
        Err(status) => format!("{:?}: {}", status.code(), status.message()),
    };
    report.events.report(Event::Closed { node: report.node.clone(), reason });
    result
}

/// Returns the node and the request that named it; None if the stream ended before. Health reports
/// before that request do not name the node and are skipped.
async fn introduction<P: Protocol>(
    stream: &mut Stream,
) -> Result<Option<(node::Identified, P::Request)>, Status> {
    loop {
        let Some(request) = stream.next::<P::Request>().await? else {
            return Ok(None);
        };
        if P::type_url(&request) == HEALTH && P::node(&request).is_none() {
            continue;
        }
        let node = node::identify(P::node(&request), stream.caller.as_ref())?;
        return Ok(Some((node, request)));
    }
}

async fn run_session<P: Protocol>(
    stream: &mut Stream,
    node: &node::Identified,
    first: P::Request,
    served: &mut ResourceSource,
    mut subscriptions: P,
    health: impl Fn(Option<&rpc::Status>),
) -> Result<(), Status> {
    let mut resources = served.resources(node);
    let mut next = Some(first);
    loop {
        let responses = match next.take() {
            Some(request) if P::type_url(&request) == HEALTH => {
                health(P::error(&request));
                Vec::new()
            }
            Some(request) => subscriptions.request(request, &resources).into_iter().collect(),
            None => {
                resources = served.resources(node);
                subscriptions.update(&resources)
            }
        };
        for response in responses {
            if stream.send(&response).await.is_err() {
                return Ok(());
            }
        }
        tokio::select! {
            request = stream.next() => match request? {
                Some(request) => next = Some(request),
                None => return Ok(()),
            },
            () = served.changed() => {}
        }
    }
}

/// A reporter of the events of one node.
#[derive(Clone, Debug, Default)]
struct Report {
    node: String,
    events: Events,
}

impl Report {
    fn pushed(&self, type_url: &str, version: &str, resources: usize, removed: usize) {
        self.events.report(Event::Pushed {
            node: self.node.clone(),
            type_url: type_url.to_owned(),
            version: version.to_owned(),
            resources,
            removed,
        });
    }

    /// Reports an ACK or NACK as an event, and returns which it is. It is stale if it does not refer to
    /// the last push.
    fn answered(
        &self,
        type_url: &str,
        pushed: &Pushed,
        nonce: &str,
        error: Option<&rpc::Status>,
    ) -> Answer {
        let node = self.node.clone();
        let (type_url, version) = (type_url.to_owned(), pushed.version.clone());
        let (event, answer) = match error {
            _ if nonce != pushed.nonce => {
                let nonce = nonce.to_owned();
                let stale = Event::Stale { node, type_url, nonce };
                (stale, Answer::Stale)
            }
            Some(error) => {
                let error = error.message.clone();
                let nacked = Event::Nacked { node, type_url, version, error };
                (nacked, Answer::Nack)
            }
            None => {
                let acked = Event::Acked { node, type_url, version };
                (acked, Answer::Ack)
            }
        };
        self.events.report(event);
        answer
    }

    fn health(&self, error: Option<&rpc::Status>) {
        self.events.report(Event::Health { node: self.node.clone(), healthy: error.is_none() });
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Ack,
    Nack,
    Stale,
}

/// The last push of a type.
#[derive(Clone, Debug, Default)]
struct Pushed {
    nonce: String,
    version: String,
}

/// Returns true if a subscription without names means all resources of the type.
fn has_wildcard(type_url: &str) -> bool {
    ![ENDPOINTS, ROUTES, SECRETS, EXTENSIONS].contains(&type_url)
}

/// Returns the types in the order that Envoy needs: clusters, their endpoints, listeners, their routes,
/// then all other types.
fn in_push_order<'a>(types: impl Iterator<Item = &'a String>) -> Vec<String> {
    let rank = |type_url: &str| {
        let order = [CLUSTERS, ENDPOINTS, LISTENERS, ROUTES];
        order.iter().position(|known| *known == type_url).unwrap_or(order.len())
    };
    let mut types: Vec<String> = types.cloned().collect();
    types.sort_by(|a, b| rank(a).cmp(&rank(b)).then_with(|| a.cmp(b)));
    types
}

/// Returns the type whose pushes make this type be pushed again. Envoy warms a changed cluster or
/// listener and waits for its endpoints or routes, although these are unchanged.
fn depends_on(type_url: &str) -> Option<&'static str> {
    match type_url {
        ENDPOINTS => Some(CLUSTERS),
        ROUTES => Some(LISTENERS),
        _ => None,
    }
}

type Selected<'a> = BTreeMap<&'a str, &'a Resource>;

/// Returns the resources of a type whose names are `wanted`.
fn select<'a>(
    resources: &'a Resources,
    type_url: &str,
    wanted: impl Fn(&str) -> bool,
) -> Selected<'a> {
    let of_type = resources.get(type_url).into_iter().flatten();
    of_type
        .filter(|(name, _)| wanted(name))
        .map(|(name, resource)| (name.as_str(), resource.as_ref()))
        .collect()
}

fn versions(selected: &Selected<'_>) -> BTreeMap<String, String> {
    selected.iter().map(|(name, resource)| ((*name).to_owned(), resource.version.clone())).collect()
}

/// Returns one version for many resources.
fn common_version(selected: &Selected<'_>) -> String {
    version_of(
        selected.iter().flat_map(|(name, resource)| {
            [name.as_bytes(), b"\0", resource.version.as_bytes(), b"\0"]
        }),
    )
}

#[cfg(test)]
mod tests;
