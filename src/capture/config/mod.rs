//! Reads the settings of traffic capture, which are texts of flags and variables, into checked types.
//!
//! [`Config::check`] is the entry. Every item ends up in the input of a program that runs as root, so each
//! is checked completely. Items of lists may have blanks around them; empty items are left out.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::RangeInclusive;

use clap::Args;

use crate::net::address::Cidr;
use crate::problem::{Code, Diagnostics, Problem};

/// User of the proxy, if neither the settings nor the machine name one.
const PROXY_UID: u32 = 1337;

/// Settings as texts; lists are separated by commas. They are flags of `istio-iptables`.
#[derive(Args, Clone, Debug)]
pub struct Settings {
    /// Port that outbound TCP connections are redirected to.
    #[arg(short = 'p', long, value_name = "PORT", default_value = "15001")]
    pub envoy_port: String,
    /// Port that inbound TCP connections are redirected to.
    #[arg(short = 'z', long, value_name = "PORT", default_value = "15006")]
    pub inbound_capture_port: String,
    /// HBONE port, which is not redirected.
    #[arg(short = 'e', long, value_name = "PORT", default_value = "15008")]
    pub inbound_tunnel_port: String,
    /// Users whose traffic is not captured. If empty, the user of --envoy-user, or 1337 if it does not exist.
    #[arg(short = 'u', long, value_name = "USERS", default_value_t)]
    pub proxy_uid: String,
    /// Groups whose traffic is not captured. If empty, the value of --proxy-uid.
    #[arg(short = 'g', long, value_name = "GROUPS", default_value_t)]
    pub proxy_gid: String,
    /// How inbound connections reach Envoy: REDIRECT or TPROXY.
    #[arg(short = 'm', long, value_name = "MODE", default_value_t)]
    pub istio_inbound_interception_mode: String,
    /// Inbound ports to capture: a list, or * for all. If empty, none.
    #[arg(short = 'b', long, value_name = "PORTS", default_value_t)]
    pub istio_inbound_ports: String,
    /// Inbound ports to exclude if --istio-inbound-ports is *.
    #[arg(short = 'd', long, value_name = "PORTS", default_value_t)]
    pub istio_local_exclude_ports: String,
    /// Network interfaces whose traffic is not captured.
    #[arg(short = 'c', long, value_name = "NAMES", default_value_t)]
    pub istio_exclude_interfaces: String,
    /// Outbound IP ranges to capture: a list, or * for all. If empty, none.
    #[arg(short = 'i', long, value_name = "RANGES", default_value_t)]
    pub istio_service_cidr: String,
    /// Outbound IP ranges to exclude.
    #[arg(short = 'x', long, value_name = "RANGES", default_value_t)]
    pub istio_service_exclude_cidr: String,
    /// Outbound TCP ports to capture for every address.
    #[arg(short = 'q', long, value_name = "PORTS", default_value_t)]
    pub istio_outbound_ports: String,
    /// Outbound ports to exclude.
    #[arg(short = 'o', long, value_name = "PORTS", default_value_t)]
    pub istio_local_outbound_ports_exclude: String,
    /// Network interfaces of virtual machines, whose inbound traffic is treated as outbound.
    #[arg(short = 'k', long, value_name = "NAMES", default_value_t)]
    pub kube_virt_interfaces: String,
    /// Mark of inbound packets in mode TPROXY.
    #[arg(short = 't', long, value_name = "NUMBER", default_value = "1337")]
    pub istio_inbound_tproxy_mark: String,
    /// Routing table of marked packets in mode TPROXY.
    #[arg(short = 'r', long, value_name = "NUMBER", default_value = "133")]
    pub istio_inbound_tproxy_route_table: String,
    /// Captures DNS queries to the servers in /etc/resolv.conf.
    #[arg(long)]
    pub redirect_dns: bool,
    /// Captures DNS queries to every server; needs --redirect-dns.
    #[arg(long)]
    pub capture_all_dns: bool,
    /// Drops packets that conntrack marks as invalid.
    #[arg(long)]
    pub drop_invalid: bool,
    /// Lets only root and the users of --proxy-uid connect to Envoy's admin port over loopback.
    #[arg(long)]
    pub protect_admin: bool,
    /// Variant of iptables: legacy or nft. If empty, it is detected.
    #[arg(long, value_name = "KIND", default_value_t)]
    pub force_iptables_binary: String,
    /// IPv4 loopback range.
    #[arg(long, default_value = "127.0.0.1/32")]
    pub istio_outbound_ipv4_loopback_cidr: String,
    /// Groups whose outbound traffic is captured: a list, or * for all.
    #[arg(long, default_value = "*")]
    pub istio_outbound_owner_groups: String,
    /// Groups to exclude if --istio-outbound-owner-groups is *.
    #[arg(long, default_value_t)]
    pub istio_outbound_owner_groups_exclude: String,
}

/// Properties of the machine that the configuration depends on.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// True if there are rules for IPv6.
    pub has_v6: bool,
    /// DNS servers of `resolv.conf`.
    pub nameservers: Vec<IpAddr>,
    /// Number of Envoy's user, if that user exists.
    pub envoy_uid: Option<u32>,
}

/// Consecutive ports, or a single one.
pub type Ports = RangeInclusive<u16>;

/// Users or groups: consecutive numbers, or a name that the rule's loader resolves.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Id {
    Numbers(RangeInclusive<u32>),
    Name(String),
}

impl From<u32> for Id {
    fn from(number: u32) -> Self {
        Self::Numbers(number..=number)
    }
}

impl Id {
    /// Returns true if a single user or group is among these.
    pub(in crate::capture) fn includes(&self, single: &Self) -> bool {
        match (self, single) {
            (Self::Numbers(numbers), Self::Numbers(single)) => numbers.contains(single.start()),
            _ => self == single,
        }
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Numbers(numbers) => f.write_str(&range(numbers, '-')),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// Formats a single number, or the first and the last of a range.
pub(in crate::capture) fn range<T: fmt::Display + PartialEq>(
    numbers: &RangeInclusive<T>,
    separator: char,
) -> String {
    match (numbers.start(), numbers.end()) {
        (first, last) if first == last => first.to_string(),
        (first, last) => format!("{first}{separator}{last}"),
    }
}

/// Interception mode: selects how inbound connections reach Envoy. Outbound ones are always redirected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Redirect,
    /// Keeps the client's address.
    Tproxy,
}

/// The items that a list selects. `*` selects all but the items of another list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection<T> {
    AllBut(Vec<T>),
    Only(Vec<T>),
}

/// The kinds of iptables, which do not see each other's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Legacy,
    Nft,
}

/// A checked configuration, made from the settings of the same names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub has_v6: bool,
    pub mode: Mode,
    pub outbound_port: u16,
    pub inbound_port: u16,
    /// Port of HBONE, which REDIRECT leaves alone.
    pub tunnel_port: u16,
    pub uids: Vec<Id>,
    pub gids: Vec<Id>,
    pub inbound: Selection<Ports>,
    pub exclude_interfaces: Vec<String>,
    pub virtual_interfaces: Vec<String>,
    /// None is every address.
    pub include_ranges: Option<Vec<Cidr>>,
    pub exclude_ranges: Vec<Cidr>,
    pub include_outbound_ports: Vec<Ports>,
    pub exclude_outbound_ports: Vec<Ports>,
    pub owner_groups: Selection<Id>,
    /// Servers whose port 53 is captured. None is every server.
    pub dns: Vec<Option<Cidr>>,
    pub drop_invalid: bool,
    pub protect_admin: bool,
    pub loopback: Cidr,
    pub tproxy_mark: u32,
    pub tproxy_route_table: u32,
    /// The kind of iptables to use; None is detected.
    pub kind: Option<Kind>,
}

/// The problems of a configuration.
#[derive(Debug, thiserror::Error)]
#[error("traffic capture cannot be configured: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
pub struct Invalid(pub Vec<Problem>);

impl Config {
    /// Reads the settings. Also returns warnings on values that are left out or replaced.
    pub fn check(settings: &Settings, host: &Host) -> Result<(Self, Vec<Problem>), Invalid> {
        macro_rules! setting {
            ($name:ident) => {
                (stringify!($name), settings.$name.as_str())
            };
        }
        let default_uid = host.envoy_uid.unwrap_or(PROXY_UID).to_string();
        let uid = match settings.proxy_uid.as_str() {
            "" => default_uid.as_str(),
            given => given,
        };
        let gid = match settings.proxy_gid.as_str() {
            "" => uid,
            given => given,
        };
        let mut parser = SettingsParser::default();
        // Only valid if the parser finds no problem.
        let config = Self {
            has_v6: host.has_v6,
            mode: parser.mode(setting!(istio_inbound_interception_mode)),
            outbound_port: parser.number(setting!(envoy_port), u16::MAX),
            inbound_port: parser.number(setting!(inbound_capture_port), u16::MAX),
            tunnel_port: parser.number(setting!(inbound_tunnel_port), u16::MAX),
            uids: parser.ids(("proxy_uid", uid)),
            gids: parser.ids(("proxy_gid", gid)),
            inbound: match settings.istio_inbound_ports.as_str() {
                "*" => Selection::AllBut(parser.ports(setting!(istio_local_exclude_ports))),
                _ => Selection::Only(parser.ports(setting!(istio_inbound_ports))),
            },
            exclude_interfaces: parser.interfaces(setting!(istio_exclude_interfaces)),
            virtual_interfaces: parser.interfaces(setting!(kube_virt_interfaces)),
            include_ranges: (settings.istio_service_cidr != "*")
                .then(|| parser.ranges(setting!(istio_service_cidr))),
            exclude_ranges: parser.ranges(setting!(istio_service_exclude_cidr)),
            include_outbound_ports: parser.ports(setting!(istio_outbound_ports)),
            exclude_outbound_ports: parser.ports(setting!(istio_local_outbound_ports_exclude)),
            owner_groups: match settings.istio_outbound_owner_groups.as_str() {
                "*" => Selection::AllBut(parser.ids(setting!(istio_outbound_owner_groups_exclude))),
                _ => Selection::Only(parser.ids(setting!(istio_outbound_owner_groups))),
            },
            dns: parser.dns(settings, host),
            drop_invalid: settings.drop_invalid,
            protect_admin: settings.protect_admin,
            loopback: parser.loopback(setting!(istio_outbound_ipv4_loopback_cidr)),
            tproxy_mark: parser.number(setting!(istio_inbound_tproxy_mark), u32::MAX),
            tproxy_route_table: parser.number(setting!(istio_inbound_tproxy_route_table), u32::MAX),
            kind: parser.kind(setting!(force_iptables_binary)),
        };
        let Diagnostics { problems, warnings } = parser.0;
        if !problems.is_empty() {
            return Err(Invalid(problems));
        }
        Ok((config, warnings))
    }

    /// Returns true if inbound connections are captured.
    pub fn captures_inbound(&self) -> bool {
        self.inbound != Selection::Only(Vec::new())
    }

    /// Returns true if a captured range has a loopback address.
    pub fn includes_loopback(&self) -> bool {
        self.include_ranges.iter().flatten().any(|range| range.address.is_loopback())
    }
}

/// The kernel's limit, without the final zero byte.
const MAX_INTERFACE: usize = 15;
/// The maximum length of the name of a user or group.
const MAX_NAME: usize = 255;

/// The name of a setting and its text.
type Setting<'a> = (&'a str, &'a str);

/// Reads settings and collects the problems found so far. A value with a problem is replaced by an
/// arbitrary one.
#[derive(Debug, Default)]
struct SettingsParser(Diagnostics);

impl SettingsParser {
    fn problem(&mut self, subject: String, found: &str, expected: impl Into<Cow<'static, str>>) {
        self.0.add(Problem::value(Code::CaptureOptionInvalid, subject, found, expected));
    }

    fn list<T>(
        &mut self,
        (name, list): Setting<'_>,
        expected: &'static str,
        read: impl Fn(&str) -> Option<T>,
    ) -> Vec<T> {
        let items = list.split(',').map(str::trim);
        let mut values = Vec::new();
        for item in items.filter(|item| !item.is_empty()) {
            match read(item) {
                Some(value) => values.push(value),
                None => self.problem(format!("an item of {}", flag(name)), item, expected),
            }
        }
        values
    }

    fn number<T>(&mut self, (name, text): Setting<'_>, max: T) -> T
    where
        T: TryFrom<u32> + Default + fmt::Display,
    {
        let hex = text.strip_prefix("0x").or(text.strip_prefix("0X"));
        hex.map_or_else(|| number(text), |it| u32::from_str_radix(it, 16).ok())
            .filter(|number| *number != 0)
            .and_then(|number| number.try_into().ok())
            .unwrap_or_else(|| {
                self.problem(flag(name), text, format!("a number from 1 to {max}"));
                T::default()
            })
    }

    fn ports(&mut self, list: Setting<'_>) -> Vec<Ports> {
        self.list(list, "a port from 0 to 65535 or a range such as 8000:9000", ports)
    }

    fn ids(&mut self, list: Setting<'_>) -> Vec<Id> {
        self.list(list, "a number from 0 to 4294967294, a range such as 1000-2000, or a name", id)
    }

    fn interfaces(&mut self, list: Setting<'_>) -> Vec<String> {
        self.list(list, "the name of a network interface", |item| {
            if is_interface(item) { Some(item.to_owned()) } else { None }
        })
    }

    fn ranges(&mut self, list: Setting<'_>) -> Vec<Cidr> {
        self.list(list, "a range of addresses such as 10.0.0.0/8 or 2001:db8::/32", Cidr::parse)
    }

    fn loopback(&mut self, (name, text): Setting<'_>) -> Cidr {
        Cidr::parse(text)
            .filter(|range| matches!(range.address, IpAddr::V4(v4) if v4.is_loopback()))
            .filter(|range| range.prefix >= 8)
            .unwrap_or_else(|| {
                self.problem(flag(name), text, "a range within 127.0.0.0/8");
                Cidr::single(Ipv4Addr::LOCALHOST.into())
            })
    }

    fn mode(&mut self, (name, text): Setting<'_>) -> Mode {
        match text {
            "TPROXY" => return Mode::Tproxy,
            "" | "REDIRECT" => {}
            found => {
                let code = Code::CaptureModeUnknown;
                self.0.warnings.push(Problem::value(code, flag(name), found, "REDIRECT or TPROXY"));
            }
        }
        Mode::Redirect
    }

    fn dns(&mut self, settings: &Settings, host: &Host) -> Vec<Option<Cidr>> {
        if !settings.redirect_dns {
            return Vec::new();
        }
        if settings.capture_all_dns {
            return vec![None];
        }
        if host.nameservers.is_empty() {
            let expected = "a server in resolv.conf, or --capture-all-dns";
            let code = Code::CaptureOptionReplaced;
            let problem = Problem::value(code, flag("redirect_dns"), "true", expected);
            self.0.warnings.push(problem.consequence("DNS is not captured"));
        }
        host.nameservers.iter().map(|server| Some(Cidr::single(*server))).collect()
    }

    fn kind(&mut self, (name, text): Setting<'_>) -> Option<Kind> {
        match text {
            "legacy" => return Some(Kind::Legacy),
            "nft" => return Some(Kind::Nft),
            "" => {}
            _ => self.problem(flag(name), text, "legacy, nft or nothing"),
        }
        None
    }
}

/// The flag of a setting.
fn flag(name: &str) -> String {
    format!("--{}", name.replace('_', "-"))
}

/// Parses a decimal number without a sign.
fn number(text: &str) -> Option<u32> {
    if text.starts_with('+') { None } else { text.parse().ok() }
}

/// Parses a port, or a range with `:` or `-`. Ranges begin at port 1, because iptables does not print a
/// match for 0:65535.
fn ports(item: &str) -> Option<Ports> {
    let ports = match item.split_once([':', '-']) {
        Some((first, last)) => port(first)?.max(1)..=port(last)?,
        None => port(item).map(|port| port..=port)?,
    };
    if ports.is_empty() { None } else { Some(ports) }
}

fn port(text: &str) -> Option<u16> {
    number(text)?.try_into().ok()
}

/// Returns true for what may be the name of a network interface, or a prefix with `+`.
pub(in crate::capture) fn is_interface(item: &str) -> bool {
    item.len() <= MAX_INTERFACE
        && !item.starts_with(['-', '!'])
        && item.bytes().all(|byte| byte.is_ascii_graphic())
        && !item.contains(['/', '"', '\'', '\\'])
}

/// Parses a number, a range with `-`, or the name of a user or group. A range is not empty.
pub(in crate::capture) fn id(item: &str) -> Option<Id> {
    if item.starts_with(|first: char| first.is_ascii_digit()) {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let numbers = number(first)?..=number(last)?;
        // The largest number means "no user".
        let is_valid = !numbers.is_empty() && *numbers.end() < u32::MAX;
        return if is_valid { Some(Id::Numbers(numbers)) } else { None };
    }
    let is_name = item.len() <= MAX_NAME
        && !item.starts_with('-')
        && item.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-$@".contains(&byte));
    if is_name { Some(Id::Name(item.to_owned())) } else { None }
}

#[cfg(test)]
pub(in crate::capture) mod tests;
