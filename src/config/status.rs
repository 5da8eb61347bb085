//! The configuration of the status port and of the application's probes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use super::Sources;
use super::environment as variables;
use crate::probe;
use crate::status::{self, Probers};

/// Source addresses of probes. Traffic capture leaves both alone.
const PROBE_SOURCE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 6));
const PROBE_SOURCE_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0, 6));

impl Sources<'_> {
    /// None while the port is switched off.
    pub(super) fn status(&mut self, grpc_bootstrap: Option<PathBuf>) -> Option<status::Config> {
        let probers = self.probers();
        let is_legacy = self.get(&variables::REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION);
        let address = self.addresses[0];
        // The probed address must be of the same family.
        let source = match address {
            IpAddr::V4(_) => PROBE_SOURCE,
            IpAddr::V6(_) => PROBE_SOURCE_V6,
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
