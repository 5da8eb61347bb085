//! The configuration of the agent's DNS.
//!
//! The listen addresses follow from the families of the pod's resolvers, and short names from its
//! namespace, domain and first search domain, so resolv.conf is read here once. The forwarder
//! follows its later changes.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use super::environment as variables;
use super::pod::NodeType;
use super::{Loader, below};
use crate::dns::forward::resolv_conf::ResolvConf;
use crate::dns::forward::{self, cache};
use crate::dns::{self, Policy, SearchDomains, listen};

/// The copy of a machine's resolv.conf while the original names the agent.
const ORIGINAL: &str = "/var/lib/istio/resolv.conf";

#[derive(Clone, Debug)]
pub struct DnsParameters {
    pub server: dns::Config,
    pub forwarder: forward::Config,
}

impl Loader<'_> {
    pub(super) fn dns(&mut self) -> Option<DnsParameters> {
        let captures = self.get(&variables::ISTIO_META_DNS_CAPTURE);
        let serves = self.get(&variables::ISTIO_META_ENABLE_DNS_SERVER);
        if !(serves || captures && self.flags.kind == NodeType::Sidecar) {
            return None;
        }
        let said = self.get(&variables::DNS_PROXY_ADDR);
        let is_root = rustix::process::getuid().is_root();
        let address = listen::address(&said, is_root);
        let path = self.resolv_conf_path(address);
        let resolv_conf = self.resolv_conf(&path);
        let nameservers = resolv_conf.nameservers.iter().map(SocketAddr::ip);
        let nameservers: Vec<_> = nameservers.collect();
        let addresses = listen::listen(address, &nameservers, &self.own_addresses);
        let own = addresses.iter().filter_map(|own| own.parse().ok());
        let forwarder = forward::Config {
            resolv_conf: path,
            parallel: self.get(&variables::DNS_FORWARD_PARALLEL),
            timeout: self.get(&variables::DNS_FORWARD_TIMEOUT),
            own_addresses: own.collect(),
            cache: self.dns_cache(),
        };
        let policy = Policy {
            ttl: self.get(&variables::ISTIO_AGENT_DNS_TTL),
            forward_before_first_table: listen::is_machine_resolver(address),
        };
        let server = dns::Config {
            addresses,
            search_domains: SearchDomains::new(
                &self.namespace,
                &self.domain(),
                &resolv_conf.search,
            ),
            policy,
        };
        Some(DnsParameters { server, forwarder })
    }

    fn dns_cache(&mut self) -> cache::Config {
        let entries = self.get(&variables::ISTIO_AGENT_DNS_CACHE_MAX_ENTRIES);
        let bytes = self.get(&variables::ISTIO_AGENT_DNS_CACHE_MAX_BYTES);
        cache::Config {
            max_entries: usize::try_from(entries).unwrap_or(usize::MAX),
            max_bytes: usize::try_from(bytes).unwrap_or(usize::MAX),
            max_ttl: self.get(&variables::ISTIO_AGENT_DNS_CACHE_MAX_TTL),
            max_negative_ttl: self.get(&variables::ISTIO_AGENT_DNS_CACHE_MAX_NEGATIVE_TTL),
            max_stale: self.get(&variables::ISTIO_AGENT_DNS_CACHE_MAX_STALE),
        }
    }

    pub(super) fn resolv_conf_path(&mut self, address: &str) -> PathBuf {
        let named = self.env.is_set(&variables::ISTIO_AGENT_RESOLV_CONF);
        let original = self.root.join(ORIGINAL);
        if listen::is_machine_resolver(address) && !named && original.exists() {
            return original;
        }
        let path = self.get(&variables::ISTIO_AGENT_RESOLV_CONF);
        below(self.root, path)
    }

    /// Without resolvers, names of the mesh are still answered.
    fn resolv_conf(&mut self, path: &Path) -> ResolvConf {
        ResolvConf::read(path).unwrap_or_else(|problem| {
            self.notes.warnings.push(problem);
            ResolvConf::default()
        })
    }
}
