//! TLS of Envoy's own connections: to tracers and sinks, and from Prometheus.
//!
//! Certificates come from the agent by SDS: the workload's, or files by name.

use serde_json::{Map, Value, json};

use super::config::ClientFiles;
use crate::proxy_config::{TlsMode, TlsSettings};

const UPSTREAM: &str =
    "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext";
const DOWNSTREAM: &str =
    "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext";

/// A connection to a service.
pub(super) struct Peer<'a> {
    pub(super) settings: &'a TlsSettings,
    pub(super) files: &'a ClientFiles,
    /// Name in the handshake when none is configured and the certificate is the workload's.
    pub(super) default_sni: &'a str,
    /// Whether ALPN offers HTTP/2.
    pub(super) http2: bool,
}

/// The transport socket, or nothing for plaintext.
pub(super) fn upstream(peer: &Peer<'_>) -> Option<Value> {
    let mut context = Map::new();
    context.insert("@type".to_owned(), json!(UPSTREAM));
    context.insert("common_tls_context".to_owned(), common(peer)?);
    let sni = match (peer.settings.mode, peer.settings.sni.as_str()) {
        (TlsMode::IstioMutual, "") => peer.default_sni,
        (_, sni) => sni,
    };
    if !sni.is_empty() {
        context.insert("sni".to_owned(), json!(sni));
    }
    Some(socket(context.into()))
}

/// The transport socket of a listener that requires a certificate of the mesh.
pub(super) fn downstream() -> Value {
    socket(json!({
        "@type": DOWNSTREAM,
        "require_client_certificate": true,
        "common_tls_context": {
            "tls_certificate_sds_secret_configs": [from_sds("default")],
            "combined_validation_context": {
                "default_validation_context": {},
                "validation_context_sds_secret_config": from_sds("ROOTCA"),
            },
        },
    }))
}

fn socket(typed_config: Value) -> Value {
    json!({ "name": "envoy.transport_sockets.tls", "typed_config": typed_config })
}

fn common(peer: &Peer<'_>) -> Option<Value> {
    let (certificate, roots) = secrets(peer)?;
    let mut common = Map::new();
    if let Some(protocols) = protocols(peer) {
        common.insert("alpn_protocols".to_owned(), protocols);
    }
    let (name, validation) = validation(peer.settings, roots);
    common.insert(name.to_owned(), validation);
    if let Some(certificate) = certificate {
        let certificates = json!([certificate]);
        common.insert(
            "tls_certificate_sds_secret_configs".to_owned(),
            certificates,
        );
    }
    Some(common.into())
}

fn protocols(peer: &Peer<'_>) -> Option<Value> {
    peer.http2.then(|| match peer.settings.mode {
        TlsMode::IstioMutual => json!(["istio", "h2"]),
        _ => json!(["h2"]),
    })
}

/// Where the certificate and the roots come from; nothing for plaintext.
fn secrets(peer: &Peer<'_>) -> Option<(Option<Value>, Option<Value>)> {
    let either = |file: &str, setting: &str| {
        let first = [file, setting].into_iter().find(|path| !path.is_empty());
        first.map(str::to_owned)
    };
    let (files, settings) = (peer.files, peer.settings);
    let roots = either(&files.roots, &settings.ca_certificates)
        .map(|path| from_sds(&format!("file-root:{path}")));
    let pair = either(&files.certificate, &settings.client_certificate)
        .zip(either(&files.key, &settings.private_key))
        .map(|(certificate, key)| from_sds(&format!("file-cert:{certificate}~{key}")));
    match settings.mode {
        TlsMode::Disable => None,
        TlsMode::Simple => Some((None, roots)),
        TlsMode::Mutual => Some((pair, roots)),
        TlsMode::IstioMutual => Some((
            Some(required_from_sds("default")),
            Some(required_from_sds("ROOTCA")),
        )),
    }
}

/// Envoy takes expected names only together with roots, so without any these are the system's.
fn validation(settings: &TlsSettings, roots: Option<Value>) -> (&'static str, Value) {
    if roots.is_none() && settings.insecure_skip_verify == Some(true) {
        return ("validation_context", json!({}));
    }
    let names = settings.subject_alt_names.iter();
    let names: Vec<_> = names.map(|name| json!({ "exact": name })).collect();
    let mut expected = Map::new();
    if !names.is_empty() {
        expected.insert("match_subject_alt_names".to_owned(), json!(names));
    }
    let combined = json!({
        "default_validation_context": expected,
        "validation_context_sds_secret_config":
            roots.unwrap_or_else(|| from_sds("file-root:system")),
    });
    ("combined_validation_context", combined)
}

fn from_sds(name: &str) -> Value {
    json!({ "name": name, "sds_config": {
        "api_config_source": {
            "api_type": "GRPC",
            "grpc_services": [{ "envoy_grpc": { "cluster_name": "sds-grpc" } }],
            "set_node_on_first_message_only": true,
            "transport_api_version": "V3",
        },
        "resource_api_version": "V3",
    }})
}

/// A secret for which Envoy waits without limit.
fn required_from_sds(name: &str) -> Value {
    let mut secret = from_sds(name);
    secret["sds_config"]["initial_fetch_timeout"] = json!("0s");
    secret
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(settings: Value, files: &ClientFiles, http2: bool) -> Option<Value> {
        let settings = crate::proxy_config::from_json(&settings);
        let peer = Peer {
            settings: &settings,
            files,
            default_sni: "tracer",
            http2,
        };
        upstream(&peer).map(|socket| socket["typed_config"].clone())
    }

    #[test]
    fn without_a_mode_the_connection_is_plaintext() {
        let none = ClientFiles::default();
        assert_eq!(context(json!({}), &none, true), None);
        assert_eq!(context(json!({"mode": "DISABLE"}), &none, true), None);
    }

    #[test]
    fn files_of_the_metadata_win() {
        let files = ClientFiles {
            certificate: "c".to_owned(),
            key: "k".to_owned(),
            roots: "r".to_owned(),
        };
        let settings = json!({"mode": "MUTUAL", "clientCertificate": "x", "privateKey": "y",
                              "caCertificates": "z"});
        let text = context(settings, &files, true).expect("TLS").to_string();
        assert!(
            text.contains("file-cert:c~k") && text.contains("file-root:r"),
            "{text}"
        );
    }

    #[test]
    fn the_meshs_own_tls_has_its_names() {
        let none = ClientFiles::default();
        let context = context(json!({"mode": "ISTIO_MUTUAL"}), &none, true).expect("TLS");
        assert_eq!(context["sni"], "tracer");
        let common = &context["common_tls_context"];
        assert_eq!(common["alpn_protocols"], json!(["istio", "h2"]));
        let certificate = &common["tls_certificate_sds_secret_configs"][0];
        assert_eq!(certificate["name"], "default");
        assert_eq!(certificate["sds_config"]["initial_fetch_timeout"], "0s");
    }

    #[test]
    fn without_roots_the_systems_are_used_unless_nothing_is_to_be_checked() {
        let none = ClientFiles::default();
        let settings = json!({"mode": "SIMPLE", "subjectAltNames": ["a"]});
        let checked = context(settings, &none, false).expect("TLS");
        let checked = &checked["common_tls_context"]["combined_validation_context"];
        assert_eq!(
            checked["validation_context_sds_secret_config"]["name"],
            "file-root:system"
        );
        let names = &checked["default_validation_context"]["match_subject_alt_names"];
        assert_eq!(*names, json!([{"exact": "a"}]));
        let settings = json!({"mode": "SIMPLE", "insecureSkipVerify": true});
        let unchecked = context(settings, &none, false).expect("TLS");
        let expected = json!({ "validation_context": {} });
        assert_eq!(unchecked["common_tls_context"], expected);
    }
}
