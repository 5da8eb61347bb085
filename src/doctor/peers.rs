//! Examines endpoints for which Envoy's connections or requests fail: connects as Envoy does, with its TLS, and sends
//! no request.
//!
//! Only the running agent has the keys. Envoy's counters never decrease, so this connection decides.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, Error, InvalidMessage};
use serde_json::Value;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::{timeout, timeout_at};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::{PROBE_LIMIT, Subject, error, late};
use crate::envoy::admin::{self, Admin};
use crate::envoy::inspect::{self, FailingEndpoint};
use crate::istiod::tls;
use crate::problem::{Code, Level, Problem};
use crate::report::Check;
use crate::runtime::clock::{after, rfc3339};
use crate::runtime::lifecycle::BoxError;
use crate::secrets::name::Name;
use crate::secrets::{Facts, Secret, Subscription};
use crate::trust::{key_pair, tls_client, trust_anchors};

/// The limit of a connection attempt, and of a handshake. They leave time for other checks within the doctor's limit.
const DIAL_LIMIT: Duration = Duration::from_millis(700);
/// The time for which the peer may refuse the client's certificate after the handshake, as TLS 1.3 allows.
const ALERT_LIMIT: Duration = Duration::from_millis(300);
/// The number of failed requests from which an endpoint without successful ones is a warning.
const MANY_REQUESTS: u64 = 10;

/// The transport socket that Envoy uses for an endpoint.
#[derive(Debug, PartialEq)]
enum Transport {
    PlainText,
    Tls(Tls),
    /// The agent cannot connect in this way.
    Other(String),
}

/// The part of Envoy's `UpstreamTlsContext` that a handshake depends on.
#[derive(Clone, Debug, Default, PartialEq)]
struct Tls {
    sni: String,
    alpn: Vec<String>,
    /// The names of the secrets for the client's certificate and for the roots.
    certificate: Option<String>,
    roots: Option<String>,
    /// The names of which the certificate must have one. Empty if any will do.
    names: Vec<String>,
}

/// Why a peer and Envoy cannot talk.
type Fault = (Code, String);

/// Examines the failing endpoints, and lists the services without healthy ones.
pub(super) async fn checks(subject: Subject<'_>, admin: &Admin) -> Vec<Check> {
    let until = after(PROBE_LIMIT);
    let endpoints = match inspect::endpoints(admin).await {
        Ok(endpoints) => endpoints,
        Err(problem) => return vec![Check::from(&problem)],
    };
    let mut checks = Vec::new();
    if !endpoints.failing.is_empty() {
        let names: BTreeSet<_> = endpoints.failing.iter().map(|it| &*it.cluster).collect();
        let dials = join_all(endpoints.failing.iter().map(|it| dial(&it.address)));
        let (clusters, dials) = tokio::join!(inspect::clusters(admin, &names), dials);
        let examined = endpoints.failing.iter().zip(dials).map(async |(endpoint, dialed)| {
            match timeout_at(until, examine(subject, endpoint, dialed, &clusters)).await {
                Ok(check) => check,
                Err(_) => late(&endpoint.cluster, "no answer in time"),
            }
        });
        checks = join_all(examined).await;
    }
    for (code, subject, names) in [
        (Code::NoHealthyEndpoint, "services without a healthy endpoint", endpoints.without_healthy),
        (Code::BootstrapHostUnresolved, "clusters whose host has no address", endpoints.unresolved),
    ] {
        if !names.is_empty() {
            checks.push(error(code, subject, Vec::from_iter(names).join(", ")));
        }
    }
    checks
}

async fn dial(address: &str) -> io::Result<TcpStream> {
    timeout(DIAL_LIMIT, TcpStream::connect(address))
        .await
        .unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "no answer")))
}

async fn examine(
    subject: Subject<'_>,
    endpoint: &FailingEndpoint,
    dialed: io::Result<TcpStream>,
    clusters: &Result<[Value; 2], admin::Error>,
) -> Check {
    let FailingEndpoint { cluster, address, .. } = endpoint;
    let stream = match dialed {
        Ok(stream) => stream,
        Err(error) => {
            let code = if cluster.starts_with("inbound|") {
                Code::ApplicationPortClosed
            } else {
                Code::UpstreamUnreachable
            };
            let count = endpoint.failed_connections;
            let found = format!("{address}: {error}; failed connections of Envoy: {count}");
            return super::error(code, cluster, found);
        }
    };
    let fault = match fault(subject, endpoint, stream, clusters).await {
        Ok(fault) => fault,
        Err(why) => {
            let found = format!("{address}: the handshake was not checked: {why}");
            return Check::skipped(cluster, found);
        }
    };
    match fault {
        Some((code, found)) => error(code, cluster, format!("{address}: {found}")),
        None => requests(endpoint),
    }
}

/// Finds out why the peer does not answer a connection like Envoy's.
async fn fault(
    subject: Subject<'_>,
    endpoint: &FailingEndpoint,
    stream: TcpStream,
    clusters: &Result<[Value; 2], admin::Error>,
) -> Result<Option<Fault>, BoxError> {
    let clusters = clusters.as_ref().map_err(ToString::to_string)?;
    let transport = transport(clusters, &endpoint.cluster, &endpoint.address);
    match transport.ok_or("Envoy does not have the cluster any more")? {
        Transport::PlainText if endpoint.requests_fail() => Ok(plain_text(stream).await),
        Transport::PlainText => Ok(None),
        Transport::Tls(tls) => Ok(handshake(stream, &tls, client(subject, &tls)?).await),
        Transport::Other(name) => Err(format!("transport socket {name}").into()),
    }
}

/// Reports the requests that fail at an endpoint whose connections work.
fn requests(endpoint: &FailingEndpoint) -> Check {
    let FailingEndpoint { cluster, address, failed_requests: failed, .. } = endpoint;
    if !endpoint.requests_fail() {
        return Check::ok(cluster, format!("{address}: connections work again"));
    }
    let late = endpoint.late_requests;
    let good = endpoint.successful_requests;
    let found = format!(
        "{address}: since Envoy's start {failed} requests failed ({late} of them without an answer in time), \
         {good} did not; connections work"
    );
    let level = if *failed >= MANY_REQUESTS && good == 0 { Level::Warning } else { Level::Ok };
    Check::with_level(level, &Problem::new(Code::RequestsFail, cluster, found))
}

/// Returns the transport socket that Envoy takes for the endpoint: the first whose labels the endpoint has. None if
/// the cluster is unknown.
fn transport([clusters, endpoints]: &[Value; 2], name: &str, address: &str) -> Option<Transport> {
    let cluster = inspect::entries(clusters, "configs")
        .map(|config| &config["cluster"])
        .find(|cluster| cluster["name"] == name)?;
    if cluster.get("transport_socket_matcher").is_some() {
        return Some(Transport::Other("chosen by a matcher".to_owned()));
    }
    let service = cluster["eds_cluster_config"]["service_name"].as_str().unwrap_or(name);
    let labels = inspect::entries(endpoints, "configs")
        .map(|config| &config["endpoint_config"])
        .filter(|config| config["cluster_name"] == service)
        .flat_map(|config| inspect::entries(config, "endpoints"))
        .flat_map(|locality| inspect::entries(locality, "lb_endpoints"))
        .find(|endpoint| is_at(&endpoint["endpoint"]["address"]["socket_address"], address))
        .map(|endpoint| &endpoint["metadata"]["filter_metadata"]["envoy.transport_socket_match"]);
    let matching = inspect::entries(cluster, "transport_socket_matches").find(|entry| {
        let mut wanted = entry["match"].as_object().into_iter().flatten();
        wanted.all(|(key, value)| labels.is_some_and(|labels| labels[key] == *value))
    });
    let socket = match matching {
        Some(entry) => entry.get("transport_socket"),
        None => cluster.get("transport_socket"),
    };
    let Some(config) = socket.map(|socket| &socket["typed_config"]) else {
        return Some(Transport::PlainText);
    };
    let type_url = config["@type"].as_str().unwrap_or_default();
    Some(match type_url.rsplit('.').next().unwrap_or_default() {
        "RawBuffer" => Transport::PlainText,
        "UpstreamTlsContext" => Transport::Tls(Tls::read(config, cluster)),
        name => Transport::Other(name.to_owned()),
    })
}

/// Returns true if a `SocketAddress` of Envoy is this address.
fn is_at(socket: &Value, address: &str) -> bool {
    let ip: Option<IpAddr> = socket["address"].as_str().and_then(|ip| ip.parse().ok());
    address.parse().is_ok_and(|address: SocketAddr| {
        ip == Some(address.ip()) && socket["port_value"] == address.port()
    })
}

impl Tls {
    fn alpn(&self) -> Vec<Vec<u8>> {
        self.alpn.iter().map(|name| name.clone().into_bytes()).collect()
    }

    fn read(context: &Value, cluster: &Value) -> Self {
        let common = &context["common_tls_context"];
        let combined = &common["combined_validation_context"];
        let roots = [
            &combined["validation_context_sds_secret_config"],
            &common["validation_context_sds_secret_config"],
        ];
        let names = [&combined["default_validation_context"], &common["validation_context"]];
        let options = "/typed_extension_protocol_options/envoy.extensions.upstreams.http.v3.HttpProtocolOptions/\
                       upstream_http_protocol_options/auto_sni";
        let sni = match context["sni"].as_str() {
            Some(sni) => sni,
            // Envoy then sends the host of the request.
            None if cluster.pointer(options) == Some(&Value::Bool(true)) => {
                cluster["name"].as_str().and_then(|name| name.rsplit('|').next()).unwrap_or("")
            }
            None => "",
        };
        Self {
            sni: sni.to_owned(),
            alpn: inspect::entries(common, "alpn_protocols").filter_map(text).collect(),
            certificate: inspect::entries(common, "tls_certificate_sds_secret_configs")
                .find_map(|secret| text(&secret["name"])),
            roots: roots.iter().find_map(|secret| text(&secret["name"])),
            names: names
                .into_iter()
                .flat_map(|context| {
                    inspect::entries(context, "match_typed_subject_alt_names")
                        .map(|name| &name["matcher"])
                        .chain(inspect::entries(context, "match_subject_alt_names"))
                })
                // istiod sends only exact names. Others are not checked.
                .filter_map(|matcher| text(&matcher["exact"]))
                .collect(),
        }
    }
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

/// Prepares a handshake with the secrets that Envoy has from the agent.
fn client(subject: Subject<'_>, tls: &Tls) -> Result<ClientConfig, BoxError> {
    let running = subject.running.ok_or("only the running agent has the key")?;
    if !running.serves_secrets {
        return Err("another process serves the key".into());
    }
    let secrets = Subscription::new(running.secrets.clone(), &running.files);
    let roots = match secret(&secrets, tls.roots.as_deref())? {
        Some(Secret::Roots(roots)) => {
            let path = Path::new(tls.roots.as_deref().unwrap_or_default());
            Some(trust_anchors::parse(path, roots.pem(), SystemTime::now())?)
        }
        _ => None,
    };
    let pair = match secret(&secrets, tls.certificate.as_deref())? {
        Some(Secret::Certificate(pair)) => {
            Some(key_pair::from_pem(pair.chain_pem(), pair.key_pem())?)
        }
        _ => None,
    };
    Ok(tls_client::config(roots, tls.names.clone(), pair, tls.alpn())?)
}

fn secret(secrets: &Subscription, name: Option<&str>) -> Result<Option<Secret>, BoxError> {
    let Some(name) = name else {
        return Ok(None);
    };
    let known = name.parse::<Name>().ok().and_then(|name| secrets.get(&name).available());
    Ok(Some(known.ok_or_else(|| format!("the agent does not have the secret {name}"))?))
}

async fn handshake(stream: TcpStream, tls: &Tls, client: ClientConfig) -> Option<Fault> {
    let address = stream.peer_addr();
    let mut stream = match connect(stream, &tls.sni, client).await {
        Ok(stream) => stream,
        Err(error) => return Some(failed(&error, address.ok(), tls).await),
    };
    match timeout(ALERT_LIMIT, stream.read_u8()).await {
        // A peer that waits for a request has accepted the certificate.
        Err(_) | Ok(Ok(_)) => None,
        Ok(Err(error)) => {
            let why = match tls::error(&error) {
                Some(Error::AlertReceived(alert)) => format!("with the alert {alert:?}"),
                _ => "without an alert".to_owned(),
            };
            let found = format!("the peer closes the connection after the handshake, {why}");
            Some((Code::PeerRefusesHandshake, found))
        }
    }
}

async fn connect(
    stream: TcpStream,
    sni: &str,
    mut client: ClientConfig,
) -> io::Result<TlsStream<TcpStream>> {
    let name = match ServerName::try_from(sni.to_owned()) {
        Ok(name) => name,
        Err(_) => {
            client.enable_sni = false;
            stream.peer_addr()?.ip().into()
        }
    };
    timeout(DIAL_LIMIT, TlsConnector::from(Arc::new(client)).connect(name, stream))
        .await
        .unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "no answer")))
}

async fn failed(error: &io::Error, peer: Option<SocketAddr>, tls: &Tls) -> Fault {
    match tls::error(error) {
        Some(Error::InvalidMessage(InvalidMessage::InvalidContentType)) => {
            let found = "Envoy sends TLS, and the peer answers in plain text".to_owned();
            (Code::PeerInPlainText, found)
        }
        Some(Error::AlertReceived(alert)) => {
            let found = format!("the peer ends the handshake with the alert {alert:?}");
            (Code::PeerRefusesHandshake, found)
        }
        Some(why) => {
            let peer = match peer {
                Some(address) => presented(address, tls).await,
                None => None,
            };
            let peer = peer.map_or_else(|| "unknown".to_owned(), |peer| described(&peer));
            let mut found =
                format!("Envoy does not accept the peer's certificate: {why}; the peer is {peer}");
            if !tls.names.is_empty() {
                found += &format!(", Envoy expects {}", tls.names.join(", "));
            }
            (Code::PeerCertificateRefused, found)
        }
        None => {
            let found = format!("the peer does not complete the handshake: {error}");
            (Code::PeerRefusesHandshake, found)
        }
    }
}

/// Returns the certificate that the peer presents to a client without one, whatever it is.
async fn presented(address: SocketAddr, tls: &Tls) -> Option<Facts> {
    let stream = dial(&address.to_string()).await.ok()?;
    let client = tls_client::config(None, Vec::new(), None, tls.alpn()).ok()?;
    peer(&connect(stream, &tls.sni, client).await.ok()?)
}

fn peer(stream: &TlsStream<TcpStream>) -> Option<Facts> {
    let (_, session) = stream.get_ref();
    Facts::read(session.peer_certificates()?.first()?).ok()
}

fn described(peer: &Facts) -> String {
    let [from, until] = [peer.not_before, peer.not_after].map(rfc3339);
    format!("{peer} (issued by {}, valid from {from} until {until})", peer.issuer)
}

/// Finds out why a peer does not answer plain text: it closes the connection, or it accepts mutual TLS.
async fn plain_text(mut stream: TcpStream) -> Option<Fault> {
    let address = stream.peer_addr().ok()?;
    if let Ok(Err(error)) = timeout(ALERT_LIMIT, stream.read_u8()).await {
        let found = format!("the peer closes a connection before a request: {error}");
        return Some((Code::RequestsFail, found));
    }
    drop(stream);
    let mesh = Tls { alpn: vec!["istio".to_owned()], ..Tls::default() };
    let peer = presented(address, &mesh).await?;
    let is_workload = peer.names.iter().any(|name| name.starts_with("spiffe://"));
    let found =
        format!("Envoy sends plain text, and the peer accepts TLS: it is {}", described(&peer));
    is_workload.then_some((Code::PeerExpectsTls, found))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const TLS: &str =
        "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext";

    fn socket(type_url: &str, more: Value) -> Value {
        let mut config = json!({ "@type": type_url });
        let members = more.as_object().expect("an object").clone();
        config.as_object_mut().expect("an object").extend(members);
        json!({ "typed_config": config })
    }

    /// Returns the transport of an endpoint of the cluster `a`, which has these labels.
    fn transport_of(mut cluster: Value, labels: Value) -> Option<Transport> {
        cluster["name"] = json!("a");
        let address = json!({ "address": "fd00:0::1", "port_value": 80 });
        let endpoint = json!({
            "endpoint": { "address": { "socket_address": address } },
            "metadata": { "filter_metadata": { "envoy.transport_socket_match": labels } },
        });
        let endpoints = json!([{ "lb_endpoints": [endpoint] }]);
        let assignment = json!({ "cluster_name": "a", "endpoints": endpoints });
        let dumps = [
            json!({ "configs": [{ "cluster": cluster }] }),
            json!({ "configs": [{ "endpoint_config": assignment }] }),
        ];
        assert_eq!(transport(&dumps, "b", "[fd00::1]:80"), None);
        transport(&dumps, "a", "[fd00::1]:80")
    }

    #[test]
    fn the_transport_socket_is_chosen_as_envoy_does() {
        let tls = |sni: &str| Transport::Tls(Tls { sni: sni.to_owned(), ..Tls::default() });
        let raw = "type.googleapis.com/envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer";
        let other = "type.googleapis.com/envoy.InternalUpstreamTransport";
        let matches = json!([
            { "match": { "tlsMode": "istio" }, "transport_socket": socket(TLS, json!({ "sni": "x" })) },
            { "match": {}, "transport_socket": socket(raw, json!({})) },
        ]);
        let by_label = json!({ "transport_socket_matches": matches });
        let own = json!({ "transport_socket": socket(TLS, json!({ "sni": "y" })) });
        for (cluster, labels, expected) in [
            (json!({}), json!({}), Transport::PlainText),
            (by_label.clone(), json!({ "tlsMode": "istio", "other": 1 }), tls("x")),
            (by_label.clone(), json!({ "tlsMode": "disabled" }), Transport::PlainText),
            (by_label, Value::Null, Transport::PlainText),
            (own, json!({ "tlsMode": "istio" }), tls("y")),
            (
                json!({ "transport_socket": socket(other, json!({})) }),
                json!({}),
                Transport::Other("InternalUpstreamTransport".to_owned()),
            ),
            (
                json!({ "transport_socket_matcher": {} }),
                json!({}),
                Transport::Other("chosen by a matcher".to_owned()),
            ),
        ] {
            assert_eq!(transport_of(cluster, labels), Some(expected));
        }
    }

    #[test]
    fn each_form_of_a_tls_context_yields_names_secrets_and_alpn() {
        let exact = json!({ "exact": "spiffe://a/b" });
        let roots = json!({ "name": "ROOTCA" });
        let expected = Tls {
            sni: "a".to_owned(),
            alpn: vec!["istio".to_owned()],
            certificate: Some("default".to_owned()),
            roots: Some("ROOTCA".to_owned()),
            names: vec!["spiffe://a/b".to_owned()],
        };
        for (context, names) in [
            (json!({ "match_subject_alt_names": [exact] }), 1),
            (json!({ "match_typed_subject_alt_names": [{ "matcher": exact }] }), 1),
            (json!({ "match_subject_alt_names": [{ "prefix": "spiffe://" }] }), 0),
        ] {
            let common = json!({
                "alpn_protocols": ["istio"],
                "tls_certificate_sds_secret_configs": [{ "name": "default" }],
                "combined_validation_context": {
                    "default_validation_context": context,
                    "validation_context_sds_secret_config": roots,
                },
            });
            let found = Tls::read(&json!({ "sni": "a", "common_tls_context": common }), &json!({}));
            let names = expected.names[..names].to_vec();
            assert_eq!(found, Tls { names, ..expected.clone() });
        }
    }
}
