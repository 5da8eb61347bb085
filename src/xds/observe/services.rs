//! Counts the services that Envoy was sent, by its subscriptions to endpoints. There is one for each cluster,
//! named `outbound|<port>|<subset>|<host>`.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};

use crate::xds::request::{Request, Subscription};
use crate::xds::{ENDPOINTS, Protocol};

const OUTBOUND: &[u8] = b"outbound|";

/// The subscriptions to endpoints on one stream. Clusters and hosts are stored as hashes.
#[derive(Debug, Default)]
pub(in crate::xds) struct Services {
    hasher: RandomState,
    /// The host of each cluster.
    hosts: HashMap<u64, u64>,
}

impl Services {
    /// Applies a request that changes the subscriptions to endpoints, and returns the number of services after it.
    /// Returns None for any other request.
    pub(crate) fn apply_request(&mut self, request: &Request, protocol: Protocol) -> Option<usize> {
        if request.type_url != ENDPOINTS {
            return None;
        }
        let Subscription { names, unsubscribed, .. } = request.subscription().ok()?;
        match protocol {
            Protocol::Sotw => self.hosts.clear(),
            Protocol::Delta if names.is_empty() && unsubscribed.is_empty() => return None,
            Protocol::Delta => {}
        }
        // In SotW this is the type, which is not the name of a cluster.
        for name in unsubscribed {
            self.hosts.remove(&self.hasher.hash_one(&*name));
        }
        for name in names.iter().filter(|name| name.starts_with(OUTBOUND)) {
            let host = name.rsplit(|byte| *byte == b'|').next();
            let cluster = self.hasher.hash_one(&**name);
            self.hosts.insert(cluster, self.hasher.hash_one(host));
        }
        Some(self.hosts.values().collect::<HashSet<_>>().len())
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest};
    use prost::Message;

    use super::*;
    use crate::xds::request::frame;

    const NAMES: [&str; 4] = [
        "outbound|80||a.shop.svc.cluster.local",
        "outbound|80|v1|a.shop.svc.cluster.local",
        "outbound|443||b.shop.svc.cluster.local",
        "other",
    ];

    fn request(type_url: &str, message: &impl Message) -> Request {
        Request {
            frame: frame(&message.encode_to_vec()),
            type_url: type_url.to_owned(),
            ..Request::default()
        }
    }

    fn owned(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn ports_and_subsets_of_a_host_are_one_service() {
        let mut services = Services::default();
        let mut sotw = |names: &[&str]| {
            let resource_names = owned(names);
            let message = DiscoveryRequest { resource_names, ..Default::default() };
            services.apply_request(&request(ENDPOINTS, &message), Protocol::Sotw)
        };
        assert_eq!(sotw(&NAMES), Some(2));
        assert_eq!(sotw(&NAMES[2..]), Some(1), "all is said anew");
        let other = request("other", &DiscoveryRequest::default());
        assert_eq!(services.apply_request(&other, Protocol::Sotw), None);
    }

    #[test]
    fn delta_requests_add_and_remove() {
        let mut services = Services::default();
        let mut delta = |added: &[&str], removed: &[&str]| {
            let message = DeltaDiscoveryRequest {
                resource_names_subscribe: owned(added),
                resource_names_unsubscribe: owned(removed),
                ..Default::default()
            };
            services.apply_request(&request(ENDPOINTS, &message), Protocol::Delta)
        };
        assert_eq!(delta(&NAMES, &[]), Some(2));
        assert_eq!(delta(&NAMES[..1], &[]), Some(2), "once more");
        assert_eq!(delta(&[], &NAMES[..1]), Some(2), "a subset is left");
        assert_eq!(delta(&[], &NAMES[1..2]), Some(1));
        assert_eq!(delta(&[], &[]), None, "an ACK");
    }
}
