//! Checks every control plane: resolves its name, dials it, and sends a discovery request.
//!
//! The request is as cheap for istiod as possible. It asks for the endpoints of a cluster that does not exist: istiod
//! answers any name and any kind of proxy with an empty list, without generating clusters or listeners. The node has no
//! metadata by which istiod registers machines (`AUTO_REGISTER_GROUP`, `WorkloadEntry`), so istiod writes nothing to the
//! Kubernetes cluster when the stream opens and ends.

use std::time::SystemTime;

use envoy_types::pb::envoy::config::core::v3::Node as EnvoyNode;
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use futures_util::StreamExt;
use futures_util::future::{OptionFuture, join_all};
use tokio::time::{Instant, timeout_at};
use tonic::Status;
use tonic::metadata::MetadataMap;

use super::token::Credentials;
use super::{PROBE_LIMIT, Subject, checked};
use crate::bootstrap::node::Node;
use crate::istiod::{Config, Probe, Security, open_probe, refusal};
use crate::problem::{Code, Level};
use crate::report::Check;
use crate::runtime::duration::rounded;
use crate::secrets::Facts;
use crate::xds::observe::Source;

const RENEW: &str =
    "renew istiod's certificate: kubectl rollout restart deployment istiod -n istio-system";
const ENDPOINTS: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";
const NO_CLUSTER: &str = "outbound|1||istio-agent-doctor.invalid";
/// The metadata that istiod compares with the token, and from which it derives the format of its response.
const METADATA: [&str; 4] = ["NAMESPACE", "SERVICE_ACCOUNT", "CLUSTER_ID", "ISTIO_VERSION"];

pub(super) async fn checks(
    subject: Subject<'_>,
    credentials: &Credentials,
    until: Instant,
) -> Vec<Check> {
    if credentials.lacks_roots {
        let why = "not dialed: there are no roots to verify istiod with";
        return vec![Check::skipped("connections", why)];
    }
    let config = subject.config;
    let stream = open_stream(subject);
    let in_use = subject.running.map(|running| running.istiod.address());
    let planes = std::iter::once(&config.istiod).chain(&config.istiod.fallbacks);
    let examining = planes.map(async |plane| {
        let is_used = in_use.is_none_or(|address| *address == *plane.address);
        let credentials = if stream.is_none() || !is_used { Some(credentials) } else { None };
        let (checks, works) = examine(subject, plane, credentials, until).await;
        // The failure of the control plane in use stays an error even if another one works.
        (checks, works && is_used)
    });
    let ca = config.ca_istiod.as_ref();
    let authority = ca.map(async |ca| examine(subject, ca, None, until).await.0);
    let (planes, authority) = tokio::join!(join_all(examining), OptionFuture::from(authority));
    let works = stream.is_some() || planes.iter().any(|(_, works)| *works);
    let mut checks: Vec<_> = planes.into_iter().flat_map(|(checks, _)| checks).collect();
    if works {
        // A failure is a warning if another control plane works.
        for check in checks.iter_mut().filter(|it| it.level == Level::Error) {
            check.level = Level::Warning;
        }
    }
    // istiod without delta xDS answers the doctor's request, and rejects only Envoy's delta requests.
    if stream.is_none()
        && let Some(running) = subject.running
        && let Some(failed) = running.istiod.status().last_error
        && failed.problem.code == Code::IstiodWithoutDelta
    {
        checks.push(Check::with_level(Level::Error, &failed.problem));
    }
    checks.extend(stream);
    checks.extend(authority.into_iter().flatten());
    checks
}

/// Checks the agent's own stream, if istiod has answered on it: then a request of the doctor is not sent, because it
/// would show nothing more and istiod would prepare another proxy for it.
fn open_stream(subject: Subject<'_>) -> Option<Check> {
    let running = subject.running?;
    let seen = running.discovery.snapshot();
    let stream = seen.stream?;
    if !stream.connected || stream.source != Source::Istiod {
        return None;
    }
    let address = running.istiod.address();
    let found = format!("open to {address} since {}, {} types", stream.since, seen.types.len());
    Some(Check::ok("discovery stream", found))
}

/// Dials a control plane, or a separate authority, like the agent. With `credentials`, also sends a
/// discovery request. Returns true with the checks if the request was answered.
async fn examine(
    subject: Subject<'_>,
    config: &Config,
    credentials: Option<&Credentials>,
    until: Instant,
) -> (Vec<Check>, bool) {
    let probe = match open_probe(config, until.saturating_duration_since(Instant::now())).await {
        Ok(probe) => probe,
        Err(problem) => return (vec![Check::from(&problem)], false),
    };
    let mut checks = vec![connected(config, &probe)];
    let Some(credentials) = credentials else {
        return (checks, false);
    };
    let check = if credentials.checks.iter().any(|it| it.level == Level::Error) {
        Check::skipped("discovery request", "not sent: istiod would refuse the token")
    } else {
        ask(subject, config, probe, credentials, until).await
    };
    let works = check.level == Level::Ok;
    checks.push(check);
    (checks, works)
}

fn connected(config: &Config, probe: &Probe) -> Check {
    let name = format!("connection to {}", config.subject());
    let about = probe.connection.about();
    let (Some(tls), Security::Tls(expected)) = (&about.tls, &config.security) else {
        return Check::ok(name, format!("{}, plaintext", about.peer));
    };
    let version = tls.version.as_deref().unwrap_or("TLS");
    let found = format!("{}, {version} as {}", about.peer, expected.server_name);
    let Some(facts) = tls.peer_certificate.as_ref().and_then(|der| Facts::read(der).ok()) else {
        return Check::ok(name, found);
    };
    let mut check = facts.validity(&name, SystemTime::now());
    check.found = format!("{found}; {}", check.found);
    if check.level != Level::Ok {
        RENEW.clone_into(&mut check.remedy);
    }
    check
}

async fn ask(
    subject: Subject<'_>,
    config: &Config,
    probe: Probe,
    credentials: &Credentials,
    until: Instant,
) -> Check {
    // The stream stays open until the response arrives.
    let request = std::future::ready(request(&subject.config.bootstrap.node));
    let requests = futures_util::stream::once(request).chain(futures_util::stream::pending());
    let mut call = tonic::Request::new(requests);
    let headers = config.headers(credentials.authorization.clone());
    *call.metadata_mut() = MetadataMap::from_headers(headers);
    let service = probe.connection.clone().service();
    let mut client = AggregatedDiscoveryServiceClient::with_origin(service, config.uri("/"));
    let answer = async {
        let mut responses = client.stream_aggregated_resources(call).await?.into_inner();
        responses.message().await?.ok_or_else(|| Status::ok("the stream ended without an answer"))
    };
    let answer = timeout_at(until, answer).await.unwrap_or_else(|_| {
        Err(Status::deadline_exceeded(format!("no answer within {}", rounded(PROBE_LIMIT))))
    });
    let found = answer
        .map(|response| format!("answered, version {:?}", response.version_info))
        .map_err(|status| refusal::explain(config, &credentials.token, Code::IstiodError, &status));
    checked(format!("discovery request to {}", config.subject()), found)
}

fn request(node: &Node) -> DiscoveryRequest {
    let members = METADATA.into_iter().filter_map(|name| member(node, name));
    DiscoveryRequest {
        node: Some(EnvoyNode {
            id: node.id.clone(),
            metadata: Some(Struct { fields: members.collect() }),
            ..Default::default()
        }),
        type_url: ENDPOINTS.to_owned(),
        resource_names: vec![NO_CLUSTER.to_owned()],
        ..Default::default()
    }
}

fn member(node: &Node, name: &str) -> Option<(String, Value)> {
    let text = node.metadata.get(name)?.as_str()?.to_owned();
    Some((name.to_owned(), Value { kind: Some(Kind::StringValue(text)) }))
}
