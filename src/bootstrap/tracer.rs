//! The tracer Envoy reports spans to until istiod configures another.

use serde_json::{Value, json};

use super::config::Config;
use crate::proxy_config::{ProxyConfig, tracing::Tracer as Given};

/// The one tracer that is configured.
pub(super) struct Tracer<'a> {
    pub(super) name: &'static str,
    pub(super) cluster: &'static str,
    pub(super) address: &'a str,
    /// The token of Lightstep, which speaks HTTP/2.
    pub(super) token: Option<&'a str>,
}

impl<'a> Tracer<'a> {
    pub(super) fn of(config: &'a ProxyConfig) -> Option<Self> {
        let tracing = config.tracing.as_ref()?;
        let tracer = |name, cluster, address| Self {
            name,
            cluster,
            address,
            token: None,
        };
        match tracing.tracer.as_ref()? {
            Given::Zipkin(zipkin) => Some(tracer("zipkin", "zipkin", &zipkin.address)),
            Given::Lightstep(lightstep) => Some(Self {
                token: Some(&lightstep.access_token),
                ..tracer("lightstep", "lightstep", &lightstep.address)
            }),
            Given::Datadog(datadog) => Some(tracer("datadog", "datadog_agent", &datadog.address)),
            _ => None,
        }
    }

    pub(super) fn section(&self, config: &Config) -> Value {
        let (message, mut members) = match self.name {
            "zipkin" => (
                "ZipkinConfig",
                json!({
                    "collector_endpoint": "/api/v2/spans",
                    "collector_endpoint_version": "HTTP_JSON",
                    "trace_id_128bit": true,
                    "shared_span_context": false,
                }),
            ),
            "lightstep" => {
                let file = config.token_file();
                let members = json!({ "access_token_file": file.to_string_lossy() });
                ("LightstepConfig", members)
            }
            _ => {
                let members = json!({ "service_name": config.node.cluster });
                ("DatadogConfig", members)
            }
        };
        let message = format!("type.googleapis.com/envoy.config.trace.v3.{message}");
        members["@type"] = json!(message);
        members["collector_cluster"] = json!(self.cluster);
        let name = format!("envoy.tracers.{}", self.name);
        json!({ "http": { "name": name, "typed_config": members } })
    }
}
