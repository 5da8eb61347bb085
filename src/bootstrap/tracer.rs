//! Configures the tracer Envoy reports spans to until istiod configures another.

use serde_json::{Value, json};

use super::config::Config;
use crate::proxy_config::ProxyConfig;
use crate::proxy_config::tracing::Tracer::{Datadog, Lightstep, Zipkin};

pub(super) struct Tracer<'a> {
    pub(super) name: &'static str,
    pub(super) cluster: &'static str,
    pub(super) address: &'a str,
    /// The token of Lightstep, which speaks HTTP/2.
    pub(super) token: Option<&'a str>,
}

impl<'a> Tracer<'a> {
    pub(super) fn configured(config: &'a ProxyConfig) -> Option<Self> {
        let tracer = config.tracing.as_ref()?.tracer.as_ref()?;
        let (name, cluster, address) = match tracer {
            Zipkin(it) => ("zipkin", "zipkin", &it.address),
            Lightstep(it) => ("lightstep", "lightstep", &it.address),
            Datadog(it) => ("datadog", "datadog_agent", &it.address),
            _ => return None,
        };
        let token = match tracer {
            Lightstep(it) => Some(it.access_token.as_str()),
            _ => None,
        };
        Some(Self {
            name,
            cluster,
            address,
            token,
        })
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
            _ => (
                "DatadogConfig",
                json!({ "service_name": config.node.cluster }),
            ),
        };
        let message = format!("type.googleapis.com/envoy.config.trace.v3.{message}");
        members["@type"] = json!(message);
        members["collector_cluster"] = json!(self.cluster);
        let name = format!("envoy.tracers.{}", self.name);
        json!({ "http": { "name": name, "typed_config": members } })
    }
}
