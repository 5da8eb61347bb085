//! Configures the agent's DNS.
//!
//! The listen addresses depend on the families of the pod's resolvers, and short names on its namespace,
//! domain and first search domain, so resolv.conf is read here once. The forwarder follows its later
//! changes.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::environment as variables;
use super::pod::NodeType;
use super::{Loader, below};
use crate::dns::forward::resolv_conf::ResolvConf;
use crate::dns::forward::{self, cache};
use crate::dns::{self, Policy, SearchDomains, listen};

/// The copy of a machine's original resolv.conf, while that file names the agent as the resolver.
const ORIGINAL: &str = "/var/lib/istio/resolv.conf";

/// The configuration of the DNS server and of its forwarder.
#[derive(Clone, Debug)]
pub struct DnsParameters {
    pub server: dns::Config,
    pub forwarder: forward::Config,
}

impl Loader<'_> {
    /// None if the agent does not answer DNS queries.
    pub(super) fn dns(&mut self) -> Option<DnsParameters> {
        let captures = self.get(&variables::ISTIO_META_DNS_CAPTURE);
        let serves = self.get(&variables::ISTIO_META_ENABLE_DNS_SERVER);
        if !(serves || captures && self.flags.kind == NodeType::Sidecar) {
            return None;
        }
        let configured = self.get(&variables::DNS_PROXY_ADDR);
        let address = listen::configured_address(&configured, rustix::process::getuid().is_root());
        let path = self.resolv_conf_path(address);
        let resolv_conf = ResolvConf::read(&path).unwrap_or_else(|problem| {
            // Without resolvers the agent still answers names of the mesh.
            self.notes.warnings.push(problem);
            ResolvConf::default()
        });
        let resolvers: Vec<_> = resolv_conf.nameservers.iter().map(SocketAddr::ip).collect();
        let addresses = listen::listen_addresses(address, &resolvers, &self.interface_addresses);
        let domain = self.domain();
        Some(DnsParameters {
            forwarder: forward::Config {
                resolv_conf: path,
                parallel: self.get(&variables::DNS_FORWARD_PARALLEL),
                timeout: self.get(&variables::DNS_FORWARD_TIMEOUT),
                listen_addresses: addresses.iter().filter_map(|it| it.parse().ok()).collect(),
                cache: self.dns_cache(),
            },
            server: dns::Config {
                addresses,
                search_domains: SearchDomains::new(&self.namespace, &domain, &resolv_conf.search),
                policy: Policy {
                    ttl: self.get(&variables::ISTIO_AGENT_DNS_TTL),
                    forward_before_first_table: listen::is_machine_resolver(address),
                },
            },
        })
    }

    fn dns_cache(&self) -> cache::Config {
        cache::Config {
            max_entries: self.get(&variables::ISTIO_AGENT_DNS_CACHE_MAX_ENTRIES),
            max_bytes: self.get(&variables::ISTIO_AGENT_DNS_CACHE_MAX_BYTES),
            max_ttl: self.get(&variables::ISTIO_AGENT_DNS_CACHE_MAX_TTL),
            max_negative_ttl: self.get(&variables::ISTIO_AGENT_DNS_CACHE_MAX_NEGATIVE_TTL),
            max_stale: self.get(&variables::ISTIO_AGENT_DNS_CACHE_MAX_STALE),
        }
    }

    /// Returns the file with the pod's resolvers for an agent that listens at `address`.
    pub(super) fn resolv_conf_path(&self, address: &str) -> PathBuf {
        let variable = &variables::ISTIO_AGENT_RESOLV_CONF;
        let original = self.root.join(ORIGINAL);
        if listen::is_machine_resolver(address) && !self.env.is_set(variable) && original.exists() {
            return original;
        }
        below(self.root, self.get(variable))
    }
}
