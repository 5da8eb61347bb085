//! Configures TLS of Envoy's own connections: to tracers and sinks, and from Prometheus.
//!
//! Certificates come from the agent by SDS: the workload's, or files by name.

use serde_json::{Value, json};

use super::document::extension;
use super::node::Metadata;
use crate::proxy_config::{TlsSettings, tls_settings::Mode};

/// Returns the transport socket, or None for plaintext. Files of the node metadata override files of the
/// settings. `default_sni` is the name in the handshake if none is configured and the certificate is the
/// workload's.
pub(super) fn upstream(
    settings: &TlsSettings,
    metadata: &Metadata,
    default_sni: &str,
    is_http2: bool,
) -> Option<Value> {
    let (certificate, roots) = secrets(settings, metadata)?;
    let (protocols, default_sni) = match settings.mode() {
        Mode::IstioMutual => (json!(["istio", "h2"]), default_sni),
        _ => (json!(["h2"]), ""),
    };
    let mut server_names = [settings.sni.as_str(), default_sni].into_iter();
    let names = settings.subject_alt_names.iter();
    let matchers: Vec<_> = names.map(|name| json!({ "exact": name })).collect();
    let expected_names = (!matchers.is_empty()).then_some(matchers);
    let is_checked = roots.is_some() || settings.insecure_skip_verify != Some(true);
    // Envoy takes expected names only together with roots, so without any these are the system's.
    let roots = roots.unwrap_or_else(|| from_sds("file-root:system", None));
    let context = json!({
        "common_tls_context": {
            "alpn_protocols": is_http2.then_some(protocols),
            "validation_context": (!is_checked).then(|| json!({})),
            "combined_validation_context": is_checked.then(|| json!({
                "default_validation_context": { "match_subject_alt_names": expected_names },
                "validation_context_sds_secret_config": roots,
            })),
            "tls_certificate_sds_secret_configs": certificate.map(|certificate| [certificate]),
        },
        "sni": server_names.find(|name| !name.is_empty()),
    });
    Some(socket("UpstreamTlsContext", context))
}

/// Returns the transport socket of a listener that requires a certificate of the mesh.
pub(super) fn downstream() -> Value {
    let context = json!({
        "require_client_certificate": true,
        "common_tls_context": {
            "tls_certificate_sds_secret_configs": [from_sds("default", None)],
            "combined_validation_context": {
                "default_validation_context": {},
                "validation_context_sds_secret_config": from_sds("ROOTCA", None),
            },
        },
    });
    socket("DownstreamTlsContext", context)
}

fn socket(message: &str, context: Value) -> Value {
    let message = format!("envoy.extensions.transport_sockets.tls.v3.{message}");
    extension("envoy.transport_sockets.tls", &message, context)
}

/// Returns the sources of the certificate and of the roots, or None for plaintext.
fn secrets(settings: &TlsSettings, metadata: &Metadata) -> Option<(Option<Value>, Option<Value>)> {
    let roots = path(metadata, "TLS_CLIENT_ROOT_CERT", &settings.ca_certificates)
        .map(|path| from_sds(&format!("file-root:{path}"), None));
    let pair = path(metadata, "TLS_CLIENT_CERT_CHAIN", &settings.client_certificate)
        .zip(path(metadata, "TLS_CLIENT_KEY", &settings.private_key))
        .map(|(chain, key)| from_sds(&format!("file-cert:{chain}~{key}"), None));
    match settings.mode() {
        Mode::Disable => None,
        Mode::Simple => Some((None, roots)),
        Mode::Mutual => Some((pair, roots)),
        // A timeout of 0 s has Envoy wait for these without limit.
        Mode::IstioMutual => {
            Some((Some(from_sds("default", Some("0s"))), Some(from_sds("ROOTCA", Some("0s")))))
        }
    }
}

fn path<'a>(metadata: &'a Metadata, member: &str, setting: &'a str) -> Option<&'a str> {
    let file = metadata.get(member).and_then(Value::as_str).unwrap_or_default();
    [file, setting].into_iter().find(|path| !path.is_empty())
}

fn from_sds(name: &str, initial_fetch_timeout: Option<&str>) -> Value {
    json!({ "name": name, "sds_config": {
        "api_config_source": {
            "api_type": "GRPC",
            "grpc_services": [{ "envoy_grpc": { "cluster_name": "sds-grpc" } }],
            "set_node_on_first_message_only": true,
            "transport_api_version": "V3",
        },
        "resource_api_version": "V3",
        "initial_fetch_timeout": initial_fetch_timeout,
    }})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::document::without_nulls;

    fn context(settings: Value, metadata: &Metadata, http2: bool) -> Option<Value> {
        let settings = crate::proxy_config::from_json(&settings);
        upstream(&settings, metadata, "tracer", http2)
            .map(|socket| without_nulls(socket["typed_config"].clone()))
    }

    #[test]
    fn without_a_mode_the_connection_is_plaintext() {
        let none = Metadata::default();
        assert_eq!(context(json!({}), &none, true), None);
        assert_eq!(context(json!({"mode": "DISABLE"}), &none, true), None);
    }

    #[test]
    fn tls_files_in_the_node_metadata_override_the_tls_settings() {
        let files = [
            ("TLS_CLIENT_CERT_CHAIN", "c"),
            ("TLS_CLIENT_KEY", "k"),
            ("TLS_CLIENT_ROOT_CERT", "r"),
        ];
        let files = Metadata::from(files.map(|(name, path)| (name.to_owned(), json!(path))));
        let settings = json!({"mode": "MUTUAL", "clientCertificate": "x", "privateKey": "y",
                              "caCertificates": "z"});
        let text = context(settings, &files, true).expect("TLS").to_string();
        assert!(text.contains("file-cert:c~k") && text.contains("file-root:r"), "{text}");
    }

    #[test]
    fn istio_mutual_uses_the_workload_certificate_and_istios_alpn() {
        let none = Metadata::default();
        let context = context(json!({"mode": "ISTIO_MUTUAL"}), &none, true).expect("TLS");
        assert_eq!(context["sni"], "tracer");
        let common = &context["common_tls_context"];
        assert_eq!(common["alpn_protocols"], json!(["istio", "h2"]));
        let certificate = &common["tls_certificate_sds_secret_configs"][0];
        assert_eq!(certificate["name"], "default");
        assert_eq!(certificate["sds_config"]["initial_fetch_timeout"], "0s");
    }

    #[test]
    fn without_ca_certificates_the_system_roots_are_used_unless_verification_is_off() {
        let none = Metadata::default();
        let settings = json!({"mode": "SIMPLE", "subjectAltNames": ["a"]});
        let checked = context(settings, &none, false).expect("TLS");
        let checked = &checked["common_tls_context"]["combined_validation_context"];
        assert_eq!(checked["validation_context_sds_secret_config"]["name"], "file-root:system");
        let names = &checked["default_validation_context"]["match_subject_alt_names"];
        assert_eq!(*names, json!([{"exact": "a"}]));
        let settings = json!({"mode": "SIMPLE", "insecureSkipVerify": true});
        let unchecked = context(settings, &none, false).expect("TLS");
        let expected = json!({ "validation_context": {} });
        assert_eq!(unchecked["common_tls_context"], expected);
    }
}
