//! The configuration of the status port and of the application's probes.

use std::net::IpAddr;
use std::path::PathBuf;

use super::Sources;
use super::environment as variables;
use crate::probe;
use crate::status::{self, Probers};

impl Sources<'_> {
    /// None while the port is switched off.
    pub(super) fn status(&mut self, grpc_bootstrap: Option<PathBuf>) -> Option<status::Config> {
        let probers = self.probers();
        let is_legacy = self.get(&variables::REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION);
        let address = self.addresses[0];
        // Of the probed address' family. Traffic capture leaves both alone.
        let source = match address {
            IpAddr::V4(_) => [127_u8, 0, 0, 6].into(),
            IpAddr::V6(_) => [0_u16, 0, 0, 0, 0, 0, 0, 6].into(),
        };
        let config = status::Config {
            port: self.proxy_config.agent_port().unwrap_or_default(),
            metrics_localhost_only: self.get(&variables::METRICS_LOCALHOST_ACCESS_ONLY),
            application: match is_legacy {
                true => "localhost".to_owned(),
                false => address.to_string(),
            },
            probers,
            probes: probe::Config {
                source,
                offers_http2: self.get(&variables::ISTIO_ENABLE_HTTP2_PROBING),
                keeps_connections: self.get(&variables::ENABLE_PROBE_KEEPALIVE_CONNECTIONS),
            },
            grpc_bootstrap,
        };
        (config.port != 0).then_some(config)
    }

    fn probers(&mut self) -> Probers {
        let text = self.get(&variables::ISTIO_KUBE_APP_PROBERS);
        Probers::parse(&text).unwrap_or_else(|found| {
            for problem in found {
                let name = variables::ISTIO_KUBE_APP_PROBERS.name;
                let expected = "JSON of good probers by their paths";
                self.problem(name, &problem, expected);
            }
            Probers::default()
        })
    }
}
