//! The tracer Envoy reports spans to until istiod configures another.

use serde_json::{Value, json};

use super::config::Config;
use crate::proxy_config::{ProxyConfig, Secret};

/// The one tracer that is configured, with its address.
pub(super) enum Tracer<'a> {
    Zipkin(&'a str),
    Lightstep(&'a str, &'a Secret),
    Datadog(&'a str),
}

impl<'a> Tracer<'a> {
    pub(super) fn of(config: &'a ProxyConfig) -> Option<Self> {
        let tracing = config.tracing.as_ref()?;
        if let Some(zipkin) = &tracing.zipkin {
            return Some(Self::Zipkin(&zipkin.address));
        }
        if let Some(lightstep) = &tracing.lightstep {
            let (address, token) = (&lightstep.address, &lightstep.access_token);
            return Some(Self::Lightstep(address, token));
        }
        let datadog = tracing.datadog.as_ref()?;
        Some(Self::Datadog(&datadog.address))
    }

    pub(super) fn cluster(&self) -> &'static str {
        match self {
            Self::Zipkin(_) => "zipkin",
            Self::Lightstep(..) => "lightstep",
            Self::Datadog(_) => "datadog_agent",
        }
    }

    pub(super) fn address(&self) -> &'a str {
        match self {
            Self::Zipkin(address) | Self::Lightstep(address, _) | Self::Datadog(address) => address,
        }
    }

    pub(super) fn section(&self, config: &Config) -> Value {
        let (name, message, mut members) = match self {
            Self::Zipkin(_) => (
                "zipkin",
                "ZipkinConfig",
                json!({
                    "collector_endpoint": "/api/v2/spans",
                    "collector_endpoint_version": "HTTP_JSON",
                    "trace_id_128bit": true,
                    "shared_span_context": false,
                }),
            ),
            Self::Lightstep(..) => {
                let file = config.token_file();
                let members = json!({ "access_token_file": file.to_string_lossy() });
                ("lightstep", "LightstepConfig", members)
            }
            Self::Datadog(_) => {
                let members = json!({ "service_name": config.node.cluster });
                ("datadog", "DatadogConfig", members)
            }
        };
        let message = format!("type.googleapis.com/envoy.config.trace.v3.{message}");
        members["@type"] = json!(message);
        members["collector_cluster"] = json!(self.cluster());
        json!({ "http": { "name": format!("envoy.tracers.{name}"), "typed_config": members } })
    }
}
