//! The `istio-iptables` command: the rules that send a pod's traffic to Envoy.
//!
//! A flag comes from the command line, else from its variable: the flag's name in capitals, with `_` for
//! `-`. Three have a second variable, which is stronger. A variable that does not parse is ignored.
//!
//! Only `--dry-run` works so far, for iptables.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use clap::{ArgAction, Args};

use crate::capture::config::{Config, Host, Invalid, Settings};
use crate::capture::iptables;
use crate::capture::rules::Rules;
use crate::config::environment::{Environment, Value};
use crate::config::flags::truth;
use crate::dns::forward::resolv_conf::ResolvConf;
use crate::replace_file::replace_file;
use crate::{duration, regular_file};

const RESOLV_CONF: &str = "/etc/resolv.conf";
const PASSWD: &str = "/etc/passwd";
/// No list of users is this large.
const LARGEST_PASSWD: u64 = 16 << 20;

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
    /// Port that the validation connects to (15002).
    #[arg(long, value_name = "PORT")]
    pub iptables_probe_port: Option<u16>,
    /// Time limit of the validation (5s).
    #[arg(long, value_name = "DURATION", value_parser = time)]
    pub probe_timeout: Option<Duration>,
    /// Checks the configuration and sets up nothing.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, action = ArgAction::Set)]
    pub skip_rule_apply: Option<bool>,
    /// Checks with a connection that traffic is captured.
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
    /// Looks past the first address of the pod for one of IPv6.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, action = ArgAction::Set)]
    pub dual_stack: Option<bool>,
    /// File of the pod's network namespace, with --cni-mode.
    #[arg(long, value_name = "PATH")]
    pub network_namespace: Option<String>,
    /// Runs programs as the CNI plugin does.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, action = ArgAction::Set)]
    pub cni_mode: Option<bool>,
    /// Replaces rules that differ.
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
    /// Kind of iptables: legacy or nft; empty is detected.
    #[arg(long, value_name = "KIND")]
    pub force_iptables_binary: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Invalid(#[from] Invalid),
    #[error("no valid local IP address found")]
    NoAddress,
    #[error("cannot list the addresses of this machine")]
    Addresses(#[source] io::Error),
    #[error("failed to load {RESOLV_CONF}")]
    ResolvConf(#[source] io::Error),
    #[error(
        "istio-iptables can only print rules so far (--dry-run); {0} is not part of this agent yet: \
         let Istio's own image (istio/proxyv2) run it in the init container, or capture traffic with \
         the Istio CNI plugin"
    )]
    Missing(&'static str),
    #[error("cannot write {path:?}, which DRY_RUN_FILE_PATH names")]
    DryRunFile {
        path: String,
        #[source]
        source: io::Error,
    },
}

/// Carries the command out. Returns the text for standard output.
pub fn run(flags: &IptablesFlags, environment: &Environment) -> Result<String, Error> {
    let flags = Resolver { flags, environment };
    let settings = flags.settings();
    let host = flags.host(&settings)?;
    let (config, warnings) = Config::check(&settings, &host)?;
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    flags.refuse_missing()?;
    if flags.skips_rules() {
        return Ok(String::new());
    }
    let text = iptables::dry_run(&Rules::new(&config));
    if let Some(path) = environment
        .text("DRY_RUN_FILE_PATH")
        .filter(|path| !path.is_empty())
    {
        replace_file(Path::new(path), text.as_bytes(), 0o644).map_err(|source| {
            Error::DryRunFile {
                path: path.to_owned(),
                source,
            }
        })?;
    }
    Ok(text)
}

/// The flags, with the variables behind them.
struct Resolver<'a> {
    flags: &'a IptablesFlags,
    environment: &'a Environment,
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

    fn settings(&self) -> Settings {
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
            force_iptables_binary: list(&flags.force_iptables_binary, "FORCE_IPTABLES_BINARY"),
            loopback_cidr: text(&None, "ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR", "127.0.0.1/32"),
            owner_groups: text(&None, "ISTIO_OUTBOUND_OWNER_GROUPS", "*"),
            owner_groups_exclude: text(&None, "ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE", ""),
        }
    }

    fn host(&self, settings: &Settings) -> Result<Host, Error> {
        let is_dual_stack = self.is(self.flags.dual_stack, &["ISTIO_DUAL_STACK", "DUAL_STACK"]);
        let interfaces = if_addrs::get_if_addrs().map_err(Error::Addresses)?;
        let addresses = interfaces.iter().map(if_addrs::Interface::ip);
        let has_v6 = has_v6(addresses, is_dual_stack).ok_or(Error::NoAddress)?;
        let nameservers = match settings.redirect_dns && !settings.capture_all_dns {
            true => {
                ResolvConf::read(Path::new(RESOLV_CONF))
                    .map_err(Error::ResolvConf)?
                    .nameservers
            }
            false => Vec::new(),
        };
        let envoy_user = self.text(&None, "ENVOY_USER", "istio-proxy");
        let passwd = regular_file::read(Path::new(PASSWD), LARGEST_PASSWD);
        let passwd = passwd.unwrap_or_default();
        Ok(Host {
            has_v6,
            nameservers: nameservers.iter().map(SocketAddr::ip).collect(),
            envoy_uid: uid_of(&envoy_user, &String::from_utf8_lossy(&passwd)),
        })
    }

    fn skips_rules(&self) -> bool {
        self.is(self.flags.skip_rule_apply, &["SKIP_RULE_APPLY"])
    }

    fn refuse_missing(&self) -> Result<(), Error> {
        let flags = self.flags;
        let missing = if self.is(flags.run_validation, &["RUN_VALIDATION"]) {
            "--run-validation"
        } else if self.skips_rules() {
            return Ok(());
        } else if self.is(flags.native_nftables, &["NATIVE_NFTABLES"]) {
            "--native-nftables"
        } else if self.is(flags.cleanup_only, &["CLEANUP_ONLY"]) {
            "--cleanup-only"
        } else if !self.is(flags.dry_run, &["DRY_RUN"]) {
            "setting them up"
        } else {
            return Ok(());
        };
        Err(Error::Missing(missing))
    }
}

/// Whether the pod's address is of IPv6: the first one that reaches other hosts or, with dual stack, any.
/// None if there is no such address.
fn has_v6(addresses: impl Iterator<Item = IpAddr>, is_dual_stack: bool) -> Option<bool> {
    let is_local = |address: &IpAddr| match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.octets()[..3] == [224, 0, 0],
        IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.segments()[0] & 0xff0f == 0xff02,
    };
    let mut families = addresses
        .map(|address| address.to_canonical())
        .filter(|address| !address.is_loopback() && !is_local(address))
        .map(|address| address.is_ipv6());
    let first = families.next()?;
    Some(first || is_dual_stack && families.any(|is_v6| is_v6))
}

/// The number of a user in the text of `/etc/passwd`.
fn uid_of(user: &str, passwd: &str) -> Option<u32> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let is_named = fields.next() == Some(user);
        fields.nth(1).filter(|_| is_named)?.parse().ok()
    })
}

fn time(text: &str) -> Result<Duration, String> {
    duration::parse(text).ok_or_else(|| format!("expected {}", Duration::EXPECTED))
}

#[cfg(test)]
#[path = "iptables_tests.rs"]
mod tests;
