//! The flags of `istio-iptables` with the variables behind them.
//!
//! A flag comes from the command line, else from its variable: the flag's name in capitals, with `_` for
//! `-`. Three have a second variable, which is stronger. A variable that does not parse is ignored.

use std::time::Duration;

use super::flags::IptablesFlags;
use crate::capture::config::Settings;
use crate::capture::program::PATH;
use crate::config::environment::{Environment, Value};

/// The flags, with the variables behind them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resolver<'a> {
    pub(super) flags: &'a IptablesFlags,
    pub(super) environment: &'a Environment,
}

/// What to do with the rules.
#[derive(Clone, Debug)]
pub(super) struct Options {
    pub(super) is_dual_stack: bool,
    /// The user whose number is the proxy's if none is given.
    pub(super) envoy_user: String,
    pub(super) dry_run: bool,
    /// Where a dry run writes its text as well.
    pub(super) dry_run_file: Option<String>,
    pub(super) skip_rule_apply: bool,
    pub(super) run_validation: bool,
    pub(super) probe_port: u16,
    pub(super) probe_timeout: Duration,
    pub(super) reconcile: bool,
    pub(super) cleanup_only: bool,
    pub(super) force_apply: bool,
    pub(super) native_nftables: bool,
    /// Where programs are.
    pub(super) path: String,
    /// Without effect, as is the next.
    pub(super) network_namespace: String,
    pub(super) cni_mode: bool,
}

impl Resolver<'_> {
    /// The flag, or else the variable, or else the default.
    fn text(&self, flag: &Option<String>, variable: &str, default: &str) -> String {
        let variable = || self.environment.text(variable).map(str::to_owned);
        flag.clone()
            .or_else(variable)
            .unwrap_or_else(|| default.to_owned())
    }

    /// The flag, or else the first variable that parses.
    fn is(&self, flag: Option<bool>, variables: &[&str]) -> bool {
        let parsed = |name: &&str| bool::parse(self.environment.text(name)?);
        flag.or_else(|| variables.iter().find_map(parsed))
            .unwrap_or_default()
    }

    /// The flag, or else the variable if it parses, or else the default.
    fn value<T: Value>(&self, flag: Option<T>, variable: &str, default: T) -> T {
        let variable = || T::parse(self.environment.text(variable)?);
        flag.or_else(variable).unwrap_or(default)
    }

    pub(super) fn settings(&self) -> Settings {
        let flags = self.flags;
        let text = |flag, variable, default| self.text(flag, variable, default);
        let list = |flag, variable| text(flag, variable, "");
        let dns = ["ISTIO_META_DNS_CAPTURE", "REDIRECT_DNS"];
        Settings {
            // pilot-agent reads no variable for it.
            envoy_port: flags
                .envoy_port
                .clone()
                .unwrap_or_else(|| "15001".to_owned()),
            inbound_capture_port: text(
                &flags.inbound_capture_port,
                "INBOUND_CAPTURE_PORT",
                "15006",
            ),
            inbound_tunnel_port: text(&flags.inbound_tunnel_port, "INBOUND_TUNNEL_PORT", "15008"),
            proxy_uid: list(&flags.proxy_uid, "PROXY_UID"),
            proxy_gid: list(&flags.proxy_gid, "PROXY_GID"),
            interception_mode: list(
                &flags.istio_inbound_interception_mode,
                "ISTIO_INBOUND_INTERCEPTION_MODE",
            ),
            inbound_ports: list(&flags.istio_inbound_ports, "ISTIO_INBOUND_PORTS"),
            local_exclude_ports: list(
                &flags.istio_local_exclude_ports,
                "ISTIO_LOCAL_EXCLUDE_PORTS",
            ),
            exclude_interfaces: list(&flags.istio_exclude_interfaces, "ISTIO_EXCLUDE_INTERFACES"),
            service_cidr: list(&flags.istio_service_cidr, "ISTIO_SERVICE_CIDR"),
            service_exclude_cidr: list(
                &flags.istio_service_exclude_cidr,
                "ISTIO_SERVICE_EXCLUDE_CIDR",
            ),
            outbound_ports: list(&flags.istio_outbound_ports, "ISTIO_OUTBOUND_PORTS"),
            local_outbound_ports_exclude: list(
                &flags.istio_local_outbound_ports_exclude,
                "ISTIO_LOCAL_OUTBOUND_PORTS_EXCLUDE",
            ),
            kube_virt_interfaces: list(&flags.kube_virt_interfaces, "KUBE_VIRT_INTERFACES"),
            tproxy_mark: text(
                &flags.istio_inbound_tproxy_mark,
                "ISTIO_INBOUND_TPROXY_MARK",
                "1337",
            ),
            tproxy_route_table: text(
                &flags.istio_inbound_tproxy_route_table,
                "ISTIO_INBOUND_TPROXY_ROUTE_TABLE",
                "133",
            ),
            redirect_dns: self.is(flags.redirect_dns, &dns),
            capture_all_dns: self.is(flags.capture_all_dns, &["CAPTURE_ALL_DNS"]),
            drop_invalid: self.is(flags.drop_invalid, &["INVALID_DROP", "DROP_INVALID"]),
            protect_admin: self.is(flags.protect_admin, &["ISTIO_AGENT_PROTECT_ADMIN"]),
            force_iptables_binary: list(&flags.force_iptables_binary, "FORCE_IPTABLES_BINARY"),
            loopback_cidr: text(&None, "ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR", "127.0.0.1/32"),
            owner_groups: text(&None, "ISTIO_OUTBOUND_OWNER_GROUPS", "*"),
            owner_groups_exclude: text(&None, "ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE", ""),
        }
    }

    pub(super) fn options(&self) -> Options {
        let flags = self.flags;
        let path = self.environment.text("DRY_RUN_FILE_PATH");
        let path = path.filter(|path| !path.is_empty());
        Options {
            is_dual_stack: self.is(flags.dual_stack, &["ISTIO_DUAL_STACK", "DUAL_STACK"]),
            envoy_user: self.text(&None, "ENVOY_USER", "istio-proxy"),
            dry_run: self.is(flags.dry_run, &["DRY_RUN"]),
            dry_run_file: path.map(str::to_owned),
            skip_rule_apply: self.is(flags.skip_rule_apply, &["SKIP_RULE_APPLY"]),
            run_validation: self.is(flags.run_validation, &["RUN_VALIDATION"]),
            probe_port: self.value(flags.iptables_probe_port, "IPTABLES_PROBE_PORT", 15002),
            probe_timeout: self.value(flags.probe_timeout, "PROBE_TIMEOUT", Duration::from_secs(5)),
            reconcile: self.is(flags.reconcile, &["RECONCILE"]),
            cleanup_only: self.is(flags.cleanup_only, &["CLEANUP_ONLY"]),
            force_apply: self.is(flags.force_apply, &["FORCE_APPLY"]),
            path: self.text(&None, "PATH", PATH),
            native_nftables: self.is(flags.native_nftables, &["NATIVE_NFTABLES"]),
            network_namespace: self.text(&flags.network_namespace, "NETWORK_NAMESPACE", ""),
            cni_mode: self.is(flags.cni_mode, &["CNI_MODE"]),
        }
    }
}
