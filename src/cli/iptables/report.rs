//! Logs the configuration of traffic capture as pilot-agent does.

use std::fmt::Display;

use super::resolver::Options;
use crate::capture::config::{Config, DnsCapture, Settings};

/// Logs the settings that count, and what the machine decided.
pub(super) fn configuration(settings: &Settings, options: &Options, config: &Config) {
    let servers = match &config.dns {
        Some(DnsCapture::Servers(servers)) => list(servers),
        _ => String::new(),
    };
    let (uids, gids) = (list(&config.uids), list(&config.gids));
    let timeout = format!("{:?}", options.probe_timeout);
    let values: [(&str, &dyn Display); 34] = [
        ("PROXY_PORT", &config.outbound_port),
        ("PROXY_INBOUND_CAPTURE_PORT", &config.inbound_port),
        ("PROXY_TUNNEL_PORT", &config.tunnel_port),
        ("PROXY_UID", &uids),
        ("PROXY_GID", &gids),
        ("INBOUND_INTERCEPTION_MODE", &settings.interception_mode),
        ("INBOUND_TPROXY_MARK", &config.tproxy_mark),
        ("INBOUND_TPROXY_ROUTE_TABLE", &config.tproxy_route_table),
        ("INBOUND_PORTS_INCLUDE", &settings.inbound_ports),
        ("INBOUND_PORTS_EXCLUDE", &settings.local_exclude_ports),
        ("OUTBOUND_OWNER_GROUPS_INCLUDE", &settings.owner_groups),
        (
            "OUTBOUND_OWNER_GROUPS_EXCLUDE",
            &settings.owner_groups_exclude,
        ),
        ("OUTBOUND_IP_RANGES_INCLUDE", &settings.service_cidr),
        ("OUTBOUND_IP_RANGES_EXCLUDE", &settings.service_exclude_cidr),
        ("OUTBOUND_PORTS_INCLUDE", &settings.outbound_ports),
        (
            "OUTBOUND_PORTS_EXCLUDE",
            &settings.local_outbound_ports_exclude,
        ),
        ("KUBE_VIRT_INTERFACES", &settings.kube_virt_interfaces),
        ("ENABLE_INBOUND_IPV6", &config.has_v6),
        ("DUAL_STACK", &options.is_dual_stack),
        ("DNS_CAPTURE", &config.dns.is_some()),
        ("DROP_INVALID", &config.drop_invalid),
        ("CAPTURE_ALL_DNS", &settings.capture_all_dns),
        ("DNS_SERVERS", &servers),
        ("NETWORK_NAMESPACE", &options.network_namespace),
        ("CNI_MODE", &options.cni_mode),
        ("EXCLUDE_INTERFACES", &settings.exclude_interfaces),
        ("RECONCILE", &options.reconcile),
        ("CLEANUP_ONLY", &options.cleanup_only),
        ("FORCE_APPLY", &options.force_apply),
        ("NATIVE_NFTABLES", &options.native_nftables),
        ("FORCE_IPTABLES_BINARY", &settings.force_iptables_binary),
        ("HOST_IPV4_LOOPBACK_CIDR", &config.loopback),
        ("IPTABLES_PROBE_PORT", &options.probe_port),
        ("PROBE_TIMEOUT", &timeout),
    ];
    let values = values.map(|(name, value)| format!("{name}={value}"));
    tracing::info!("Istio config: {}", values.join(" "));
}

fn list<T: Display>(items: &[T]) -> String {
    let items: Vec<_> = items.iter().map(T::to_string).collect();
    items.join(",")
}
