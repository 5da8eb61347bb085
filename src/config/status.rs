//! What the status port is told: who may ask, and how the application is probed.
//!
//! Does not bind or ask anything.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use super::environment as variables;
use super::{Problem, Sources};
use crate::probe;
use crate::status::{self, Probers};

/// Where probes come from. Traffic capture knows both and leaves them alone.
const ORIGIN: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 6));
const ORIGIN_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0, 6));

impl Sources<'_> {
    /// None where the port is switched off.
    pub(super) fn status(&mut self, grpc_bootstrap: Option<PathBuf>) -> Option<status::Config> {
        let probers = self.probers();
        let is_legacy = self.get(&variables::REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION);
        let address = self.addresses[0];
        // What is asked must be of the same family.
        let origin = match address {
            IpAddr::V4(_) => ORIGIN,
            IpAddr::V6(_) => ORIGIN_V6,
        };
        let config = status::Config {
            port: self.mesh.status_port.unwrap_or_default(),
            metrics_localhost_only: self.get(&variables::METRICS_LOCALHOST_ACCESS_ONLY),
            application: match is_legacy {
                true => "localhost".to_owned(),
                false => address.to_string(),
            },
            probers,
            probes: probe::Config {
                origin: probe::Origin(origin),
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
            self.problems.extend(found.into_iter().map(|problem| {
                let name = variables::ISTIO_KUBE_APP_PROBERS.name;
                Problem {
                    subject: name.to_owned(),
                    found: problem.to_string(),
                    expected: "JSON of good probers by their paths".to_owned(),
                }
            }));
            Probers::default()
        })
    }
}
