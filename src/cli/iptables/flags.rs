//! The flags of `istio-iptables`, as given on the command line.

use std::time::Duration;

use clap::{ArgAction, Args};

use crate::capture::explain::Flow;
use crate::config::environment::Value;
use crate::config::flags::truth;
use crate::duration;

/// The flags as given on the command line.
#[derive(Args, Clone, Debug, Default)]
pub struct IptablesFlags {
    /// Words, which pilot-agent ignores too.
    #[arg(hide = true)]
    ignored: Vec<String>,
    /// Port that outbound TCP connections are redirected to (15001).
    #[arg(short = 'p', long, value_name = "PORT")]
    pub envoy_port: Option<String>,
    /// Port that inbound TCP connections are redirected to (15006).
    #[arg(short = 'z', long, value_name = "PORT")]
    pub inbound_capture_port: Option<String>,
    /// Port of HBONE, which is not redirected (15008).
    #[arg(short = 'e', long, value_name = "PORT")]
    pub inbound_tunnel_port: Option<String>,
    /// Users whose traffic is not captured; empty is that of ENVOY_USER, or else 1337.
    #[arg(short = 'u', long, value_name = "USERS")]
    pub proxy_uid: Option<String>,
    /// Groups whose traffic is not captured; empty is the value of --proxy-uid.
    #[arg(short = 'g', long, value_name = "GROUPS")]
    pub proxy_gid: Option<String>,
    /// How inbound connections reach Envoy: REDIRECT or TPROXY.
    #[arg(short = 'm', long, value_name = "MODE")]
    pub istio_inbound_interception_mode: Option<String>,
    /// Inbound ports to capture: a list, or * for all; empty is none.
    #[arg(short = 'b', long, value_name = "PORTS")]
    pub istio_inbound_ports: Option<String>,
    /// Inbound ports not to capture when all are.
    #[arg(short = 'd', long, value_name = "PORTS")]
    pub istio_local_exclude_ports: Option<String>,
    /// Network interfaces whose traffic is not captured.
    #[arg(short = 'c', long, value_name = "NAMES")]
    pub istio_exclude_interfaces: Option<String>,
    /// Outbound ranges to capture: a list, or * for all; empty is none.
    #[arg(short = 'i', long, value_name = "RANGES")]
    pub istio_service_cidr: Option<String>,
    /// Outbound ranges not to capture.
    #[arg(short = 'x', long, value_name = "RANGES")]
    pub istio_service_exclude_cidr: Option<String>,
    /// Outbound TCP ports to capture, whatever the address.
    #[arg(short = 'q', long, value_name = "PORTS")]
    pub istio_outbound_ports: Option<String>,
    /// Outbound ports not to capture.
    #[arg(short = 'o', long, value_name = "PORTS")]
    pub istio_local_outbound_ports_exclude: Option<String>,
    /// Interfaces of virtual machines, whose traffic to the pod is outbound.
    #[arg(short = 'k', long, value_name = "NAMES")]
    pub kube_virt_interfaces: Option<String>,
    /// Mark of inbound packets in mode TPROXY (1337).
    #[arg(short = 't', long, value_name = "NUMBER")]
    pub istio_inbound_tproxy_mark: Option<String>,
    /// Routing table of marked packets in mode TPROXY (133).
    #[arg(short = 'r', long, value_name = "NUMBER")]
    pub istio_inbound_tproxy_route_table: Option<String>,
    /// Prints the rules and changes nothing.
    #[arg(short = 'n', long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, action = ArgAction::Set)]
    pub dry_run: Option<bool>,
    /// Port that --run-validation connects to (15002).
    #[arg(long, value_name = "PORT")]
    pub iptables_probe_port: Option<u16>,
    /// Time limit of --run-validation (5s).
    #[arg(long, value_name = "DURATION", value_parser = time)]
    pub probe_timeout: Option<Duration>,
    /// Checks the configuration and sets up nothing.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, action = ArgAction::Set)]
    pub skip_rule_apply: Option<bool>,
    /// Checks with a connection that traffic is captured; to be run as --proxy-uid. Exits with 126 if not.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, action = ArgAction::Set)]
    pub run_validation: Option<bool>,
    /// Captures DNS to the servers of /etc/resolv.conf.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, action = ArgAction::Set)]
    pub redirect_dns: Option<bool>,
    /// Captures DNS to any server, with --redirect-dns.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, action = ArgAction::Set)]
    pub capture_all_dns: Option<bool>,
    /// Drops packets that conntrack calls invalid.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, action = ArgAction::Set)]
    pub drop_invalid: Option<bool>,
    /// Lets only root and the users of --proxy-uid connect to Envoy's admin port over loopback.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, action = ArgAction::Set)]
    pub protect_admin: Option<bool>,
    /// Looks past the first address of the pod for one of IPv6.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, action = ArgAction::Set)]
    pub dual_stack: Option<bool>,
    /// Without effect: only the CNI plugin, another program, enters namespaces.
    #[arg(long, value_name = "PATH")]
    pub network_namespace: Option<String>,
    /// Without effect: only for the CNI plugin, another program.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, action = ArgAction::Set)]
    pub cni_mode: Option<bool>,
    /// Without effect: rules that differ are always replaced.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, action = ArgAction::Set)]
    pub reconcile: Option<bool>,
    /// Removes the rules and sets up none.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, action = ArgAction::Set)]
    pub cleanup_only: Option<bool>,
    /// Sets up rules even if they seem to be in place.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, action = ArgAction::Set)]
    pub force_apply: Option<bool>,
    /// Uses nftables instead of iptables.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, action = ArgAction::Set)]
    pub native_nftables: Option<bool>,
    /// Says what happens to a flow and why, and changes nothing. A flow is
    /// out,PROTOCOL,USER[/GROUP],[SOURCE,]ADDRESS:PORT[,INTERFACE] or
    /// in,PROTOCOL,[SOURCE,][ADDRESS:]PORT[,INTERFACE]: out,tcp,1337,10.0.0.5:443.
    #[arg(long, value_name = "FLOW")]
    pub explain: Option<Flow>,
    /// Says how the live rules differ from these arguments' rules, and changes nothing. The exit code is 3
    /// if traffic may not be captured.
    #[arg(long)]
    pub verify: bool,
    /// Kind of iptables: legacy or nft; empty is detected.
    #[arg(long, value_name = "KIND")]
    pub force_iptables_binary: Option<String>,
}

impl IptablesFlags {
    /// These flags with `--cleanup-only`.
    pub fn clean(mut self) -> Self {
        self.cleanup_only = Some(true);
        self
    }
}

fn time(text: &str) -> Result<Duration, String> {
    duration::parse(text).ok_or_else(|| format!("expected {}", Duration::EXPECTED))
}
