//! Checks that Envoy can discover clusters, by the version in its node.

use std::fmt;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::node::UserAgentVersionType;
use envoy_types::pb::envoy::config::core::v3::{BuildVersion, Node};
use envoy_types::pb::google::protobuf::value::Kind;
use prost::Message;

use super::OnDemand;
use crate::problem::{Code, Problem};
use crate::xds::request::Request;

/// The variable that switches the discovery of clusters on.
const SETTING: &str = "ISTIO_AGENT_ON_DEMAND_CLUSTERS";

/// The first version, major and minor. Two filters of earlier ones hang if there are several first requests.
const MIN: (u32, u32) = (1, 39);

/// The member of the version's metadata with the part after the numbers.
const LABEL: &str = "build.label";

/// Envoy's ability to discover clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Support {
    Tested,
    /// A development build between two releases.
    Untested,
    /// Major, minor and patch of a version that is too old.
    TooOld([u32; 3]),
    /// The node does not have a version.
    Unknown,
}

impl Support {
    /// Reads Envoy's version in an encoded node.
    fn of(node: &Bytes) -> Self {
        let node = Node::decode(node.clone()).unwrap_or_default();
        let Some(UserAgentVersionType::UserAgentBuildVersion(build)) = node.user_agent_version_type
        else {
            return Self::Unknown;
        };
        let is_dev = is_dev(&build);
        match build.version {
            None => Self::Unknown,
            Some(it) if (it.major_number, it.minor_number) < MIN => {
                Self::TooOld([it.major_number, it.minor_number, it.patch])
            }
            Some(_) if is_dev => Self::Untested,
            Some(_) => Self::Tested,
        }
    }
}

impl fmt::Display for Support {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = MIN;
        match self {
            Self::Tested => f.write_str("Envoy is a release"),
            Self::Untested => f.write_str("Envoy is a development build, which was not tested"),
            Self::TooOld([found @ .., patch]) => {
                let [found_major, found_minor] = found;
                write!(f, "Envoy {found_major}.{found_minor}.{patch} is too old")?;
                write!(f, ", expected {major}.{minor}.0 or later")
            }
            Self::Unknown => {
                write!(f, "Envoy does not report its version, expected {major}.{minor}.0 or later")
            }
        }
    }
}

fn is_dev(build: &BuildVersion) -> bool {
    let label = build.metadata.as_ref().and_then(|it| it.fields.get(LABEL)?.kind.as_ref());
    matches!(label, Some(Kind::StringValue(label)) if label.contains("dev"))
}

impl OnDemand {
    /// Returns true if a request is the first one of an Envoy that cannot discover clusters, and logs the reason. Such an
    /// Envoy gets all clusters.
    pub(in crate::xds) fn is_unsupported(&self, request: &Request) -> bool {
        if self.has_begun {
            return false;
        }
        let Some(node) = request.subscription().ok().and_then(|it| it.node) else {
            return false;
        };
        let support = Support::of(&node);
        match support {
            Support::Tested => false,
            Support::Untested => {
                // An Envoy that sends no versions is on its first stream.
                if !self.is_ready {
                    tracing::warn!(target: "xdsproxy", id = self.id, "{SETTING}: {support}");
                }
                false
            }
            Support::TooOld(_) | Support::Unknown => {
                let problem = Problem::new(Code::OnDemandOff, SETTING, support);
                tracing::warn!(target: "xdsproxy", id = self.id, "{problem}");
                self.cache.lock().view(self.cache.pid()).gets_all_clusters = true;
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::r#type::v3::SemanticVersion;
    use envoy_types::pb::google::protobuf::{Struct, Value};

    use std::time::Duration;

    use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::logging::logged;
    use crate::metrics::Registry;
    use crate::xds::interceptor::Interceptors;
    use crate::xds::ledger::{Config, Ledger};
    use crate::xds::observe::Observer;
    use crate::xds::request::frame;
    use crate::xds::stream::StreamState;
    use crate::xds::{CLUSTER, Protocol};

    /// Returns a ledger in memory.
    fn ledger() -> Ledger {
        let config = Config {
            volume: None,
            former: None,
            own: None,
            max_bytes: 1 << 20,
            max_age: Duration::ZERO,
            after: Duration::ZERO,
            on_nack: false,
            on_demand: true,
        };
        Ledger::new(config, None, &Registry::default(), CancellationToken::new()).0
    }

    fn node(version: Option<[u32; 3]>, label: &str) -> Bytes {
        let [major_number, minor_number, patch] = version.unwrap_or_default();
        let text = Value { kind: Some(Kind::StringValue(label.to_owned())) };
        let build = BuildVersion {
            version: version.map(|_| SemanticVersion { major_number, minor_number, patch }),
            metadata: Some(Struct { fields: [(LABEL.to_owned(), text)].into() }),
        };
        let version = Some(UserAgentVersionType::UserAgentBuildVersion(build));
        Node { user_agent_version_type: version, ..Default::default() }.encode_to_vec().into()
    }

    #[test]
    fn envoy_1_39_and_later_are_supported() {
        for (version, label, expected) in [
            (Some([1, 39, 0]), "", Support::Tested),
            (Some([1, 40, 2]), "", Support::Tested),
            (Some([2, 0, 0]), "", Support::Tested),
            (Some([1, 39, 0]), "dev", Support::Untested),
            (Some([1, 38, 3]), "", Support::TooOld([1, 38, 3])),
            (Some([1, 38, 0]), "dev", Support::TooOld([1, 38, 0])),
            (None, "", Support::Unknown),
        ] {
            assert_eq!(Support::of(&node(version, label)), expected, "{version:?}{label}");
        }
        for node in [Bytes::new(), Bytes::from_static(b"\xff")] {
            assert_eq!(Support::of(&node), Support::Unknown);
        }
        let text = Support::TooOld([1, 38, 3]).to_string();
        assert_eq!(text, "Envoy 1.38.3 is too old, expected 1.39.0 or later");
    }

    #[test]
    fn an_old_envoy_gets_all_clusters_and_the_log_says_so_once() {
        for (version, is_old) in [([1, 38, 3], true), ([1, 39, 0], false)] {
            let request = DeltaDiscoveryRequest {
                node: Some(Node::decode(node(Some(version), "")).unwrap()),
                type_url: CLUSTER.to_owned(),
                ..Default::default()
            };
            let first = frame(&request.encode_to_vec());
            let ledger = ledger();
            let log = logged(|| {
                for id in [1, 2] {
                    let observer = Observer::new(&Registry::default(), None);
                    let cache = ledger.envoy_cache(7, Protocol::Delta);
                    let (protocol, interceptors) = (Protocol::Delta, Interceptors::default());
                    let mut stream =
                        StreamState::new(id, protocol, interceptors, observer, 1000, cache);
                    stream.read_requests(first.clone()).unwrap();
                    assert_eq!(stream.on_demand.is_none(), is_old, "{version:?}");
                    assert_eq!(stream.to_istiod.len(), 1);
                }
            });
            assert_eq!(log.matches("ON_DEMAND_OFF").count(), usize::from(is_old), "{log}");
        }
    }
}
