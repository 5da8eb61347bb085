//! The configuration of traffic capture: texts of flags and variables become checked types.
//!
//! Every item ends up in the input of a program that runs as root, so each has to be exactly what it
//! claims to be. Items of lists may have blanks around them; empty items are left out.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use clap::Args;

use crate::address::Cidr;
use crate::problem::{Diagnostics, Problem, codes};

const PROXY_UID: &str = "1337";

/// The name of a setting with its text.
macro_rules! of {
    ($settings:ident.$name:ident) => {
        (stringify!($name), $settings.$name.as_str())
    };
}

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

/// What the machine says.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// Whether there are rules for IPv6.
    pub has_v6: bool,
    /// The servers of `resolv.conf`.
    pub nameservers: Vec<IpAddr>,
    /// The number of Envoy's user, if that user exists.
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

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    User(Id),
    Group(Id),
}

impl From<u32> for Id {
    fn from(number: u32) -> Self {
        Self::Numbers(number..=number)
    }
}

impl Id {
    /// Whether a single user or group is among these.
    pub(in crate::capture) fn includes(&self, one: &Self) -> bool {
        match (self, one) {
            (Self::Numbers(numbers), Self::Numbers(one)) => numbers.contains(one.start()),
            _ => self == one,
        }
    }
}

/// A single number, or the first and the last of a range.
pub(in crate::capture) fn range<T: fmt::Display + PartialEq>(
    numbers: &RangeInclusive<T>,
    separator: char,
) -> String {
    let (first, last) = (numbers.start(), numbers.end());
    match first == last {
        true => first.to_string(),
        false => format!("{first}{separator}{last}"),
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

/// How inbound connections reach Envoy. Outbound ones are always redirected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Redirect,
    /// Keeps the client's address.
    Tproxy,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InboundPorts {
    None,
    AllBut(Vec<Ports>),
    Only(Vec<Ports>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutboundRanges {
    All,
    Only(Vec<Cidr>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnerGroups {
    AllBut(Vec<Id>),
    Only(Vec<Id>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DnsCapture {
    /// Port 53 of any server.
    All,
    /// Port 53 of these servers; not empty.
    Servers(Vec<IpAddr>),
}

/// The kinds of iptables, which do not see each other's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Legacy,
    Nft,
}

/// A checked configuration: what the settings of these names say.
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
    pub inbound: InboundPorts,
    pub exclude_interfaces: Vec<String>,
    pub virtual_interfaces: Vec<String>,
    pub include_ranges: OutboundRanges,
    pub exclude_ranges: Vec<Cidr>,
    pub include_outbound_ports: Vec<Ports>,
    pub exclude_outbound_ports: Vec<Ports>,
    pub owner_groups: OwnerGroups,
    pub dns: Option<DnsCapture>,
    pub drop_invalid: bool,
    pub protect_admin: bool,
    pub loopback: Cidr,
    pub tproxy_mark: u32,
    pub tproxy_route_table: u32,
    /// The kind of iptables to use; None is detected.
    pub kind: Option<Kind>,
}

/// All problems of a configuration.
#[derive(Debug, thiserror::Error)]
#[error("traffic capture cannot be configured: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
pub struct Invalid(pub Vec<Problem>);

impl Config {
    /// Reads the settings. Returns what is left out or taken for something else as well.
    pub fn check(settings: &Settings, host: &Host) -> Result<(Self, Vec<Problem>), Invalid> {
        let mut items = SettingsParser::default();
        let config = Self::read(settings, host, &mut items);
        let Diagnostics { problems, warnings } = items.0;
        if problems.is_empty() {
            Ok((config, warnings))
        } else {
            Err(Invalid(problems))
        }
    }

    /// The configuration; only of use if no problem was found.
    fn read(settings: &Settings, host: &Host, items: &mut SettingsParser) -> Self {
        let uid = match settings.proxy_uid.as_str() {
            "" => host
                .envoy_uid
                .map_or_else(|| PROXY_UID.to_owned(), |uid| uid.to_string()),
            given => given.to_owned(),
        };
        let gid = match settings.proxy_gid.as_str() {
            "" => &uid,
            given => given,
        };
        Self {
            has_v6: host.has_v6,
            mode: items.mode(of!(settings.istio_inbound_interception_mode)),
            outbound_port: items.number(of!(settings.envoy_port), u16::MAX),
            inbound_port: items.number(of!(settings.inbound_capture_port), u16::MAX),
            tunnel_port: items.number(of!(settings.inbound_tunnel_port), u16::MAX),
            uids: items.ids(("proxy_uid", &uid)),
            gids: items.ids(("proxy_gid", gid)),
            inbound: match settings.istio_inbound_ports.as_str() {
                "" => InboundPorts::None,
                "*" => InboundPorts::AllBut(items.ports(of!(settings.istio_local_exclude_ports))),
                _ => InboundPorts::Only(items.ports(of!(settings.istio_inbound_ports))),
            },
            exclude_interfaces: items.interfaces(of!(settings.istio_exclude_interfaces)),
            virtual_interfaces: items.interfaces(of!(settings.kube_virt_interfaces)),
            include_ranges: match settings.istio_service_cidr.as_str() {
                "*" => OutboundRanges::All,
                _ => OutboundRanges::Only(items.ranges(of!(settings.istio_service_cidr))),
            },
            exclude_ranges: items.ranges(of!(settings.istio_service_exclude_cidr)),
            include_outbound_ports: items.ports(of!(settings.istio_outbound_ports)),
            exclude_outbound_ports: items.ports(of!(settings.istio_local_outbound_ports_exclude)),
            owner_groups: match settings.istio_outbound_owner_groups.as_str() {
                "*" => {
                    let excluded = of!(settings.istio_outbound_owner_groups_exclude);
                    OwnerGroups::AllBut(items.ids(excluded))
                }
                _ => OwnerGroups::Only(items.ids(of!(settings.istio_outbound_owner_groups))),
            },
            dns: dns(settings, host, items),
            drop_invalid: settings.drop_invalid,
            protect_admin: settings.protect_admin,
            loopback: items.loopback(of!(settings.istio_outbound_ipv4_loopback_cidr)),
            tproxy_mark: items.number(of!(settings.istio_inbound_tproxy_mark), u32::MAX),
            tproxy_route_table: items
                .number(of!(settings.istio_inbound_tproxy_route_table), u32::MAX),
            kind: items.kind(of!(settings.force_iptables_binary)),
        }
    }

    /// The users and groups of the proxy.
    pub fn proxies(&self) -> impl Iterator<Item = Owner> {
        let users = self.uids.iter().cloned().map(Owner::User);
        users.chain(self.gids.iter().cloned().map(Owner::Group))
    }

    /// Whether a captured range has a loopback address.
    pub fn includes_loopback(&self) -> bool {
        match &self.include_ranges {
            OutboundRanges::All => false,
            OutboundRanges::Only(ranges) => ranges.iter().any(|range| range.address.is_loopback()),
        }
    }
}

fn dns(settings: &Settings, host: &Host, items: &mut SettingsParser) -> Option<DnsCapture> {
    match (settings.redirect_dns, settings.capture_all_dns) {
        (false, _) => None,
        (true, true) => Some(DnsCapture::All),
        (true, false) if host.nameservers.is_empty() => {
            let expected = "a server in resolv.conf, or --capture-all-dns";
            let code = codes::CAPTURE_OPTION_REPLACED;
            let problem = Problem::value(code, flag("redirect_dns"), "true", expected);
            let problem = problem.consequence("DNS is not captured");
            items.0.warnings.push(problem);
            None
        }
        (true, false) => Some(DnsCapture::Servers(host.nameservers.clone())),
    }
}

/// The kernel's limit, without the final zero byte.
const MAX_INTERFACE: usize = 15;
/// Longest name of a user or group.
const MAX_NAME: usize = 255;

/// The name of a setting and its text.
type Setting<'a> = (&'a str, &'a str);

/// The reader, with the problems found so far. A value with a problem is replaced by any other.
#[derive(Debug, Default)]
struct SettingsParser(Diagnostics);

impl SettingsParser {
    fn problem(&mut self, (name, found): Setting<'_>, expected: impl Into<Cow<'static, str>>) {
        let code = codes::CAPTURE_OPTION_INVALID;
        self.0
            .add(Problem::value(code, flag(name), found, expected));
    }

    fn each<T>(
        &mut self,
        (name, list): Setting<'_>,
        expected: &'static str,
        read: impl Fn(&str) -> Option<T>,
    ) -> Vec<T> {
        let items = list.split(',').map(str::trim);
        let mut found = Vec::new();
        for item in items.filter(|item| !item.is_empty()) {
            match read(item) {
                Some(value) => found.push(value),
                None => {
                    let subject = format!("an item of {}", flag(name));
                    let code = codes::CAPTURE_OPTION_INVALID;
                    self.0.add(Problem::value(code, subject, item, expected));
                }
            }
        }
        found
    }

    fn number<T>(&mut self, setting: Setting<'_>, max: T) -> T
    where
        T: TryFrom<u32> + Default + fmt::Display,
    {
        let text = setting.1;
        let digits = text.strip_prefix("0x").or(text.strip_prefix("0X"));
        let found = digits.map_or_else(|| number(text), |it| u32::from_str_radix(it, 16).ok());
        found
            .filter(|found| *found != 0)
            .and_then(|found| found.try_into().ok())
            .unwrap_or_else(|| {
                self.problem(setting, format!("a number from 1 to {max}"));
                T::default()
            })
    }

    fn ports(&mut self, list: Setting<'_>) -> Vec<Ports> {
        let expected = "a port from 0 to 65535 or a range such as 8000:9000";
        self.each(list, expected, ports)
    }

    fn ids(&mut self, list: Setting<'_>) -> Vec<Id> {
        let expected = "a number from 0 to 4294967294, a range such as 1000-2000, or a name";
        self.each(list, expected, id)
    }

    fn interfaces(&mut self, list: Setting<'_>) -> Vec<String> {
        let name = |item: &str| is_interface(item).then(|| item.to_owned());
        self.each(list, "the name of a network interface", name)
    }

    fn ranges(&mut self, list: Setting<'_>) -> Vec<Cidr> {
        let expected = "a range of addresses such as 10.0.0.0/8 or 2001:db8::/32";
        self.each(list, expected, Cidr::parse)
    }

    fn loopback(&mut self, setting: Setting<'_>) -> Cidr {
        let is_loopback = |range: &Cidr| {
            range.address.is_ipv4() && range.address.is_loopback() && range.prefix >= 8
        };
        let range = Cidr::parse(setting.1).filter(is_loopback);
        range.unwrap_or_else(|| {
            self.problem(setting, "a range within 127.0.0.0/8");
            Cidr::v4(127, 0, 0, 1, 32)
        })
    }

    fn mode(&mut self, setting: Setting<'_>) -> Mode {
        match setting.1 {
            "TPROXY" => return Mode::Tproxy,
            "" | "REDIRECT" => {}
            found => {
                let (code, subject) = (codes::CAPTURE_MODE_UNKNOWN, flag(setting.0));
                let problem = Problem::value(code, subject, found, "REDIRECT or TPROXY");
                self.0.warnings.push(problem);
            }
        }
        Mode::Redirect
    }

    fn kind(&mut self, setting: Setting<'_>) -> Option<Kind> {
        match setting.1 {
            "legacy" => return Some(Kind::Legacy),
            "nft" => return Some(Kind::Nft),
            "" => {}
            _ => self.problem(setting, "legacy, nft or nothing"),
        }
        None
    }
}

/// The flag of a setting.
fn flag(name: &str) -> String {
    format!("--{}", name.replace('_', "-"))
}

/// A decimal number without a sign.
fn number(text: &str) -> Option<u32> {
    let is_digits = text.bytes().all(|byte| byte.is_ascii_digit());
    is_digits.then(|| text.parse().ok())?
}

/// A port, or a range with `:` or `-`. Ranges begin at port 1: iptables prints no match for 0:65535.
fn ports(item: &str) -> Option<Ports> {
    let port = |text: &str| u16::try_from(number(text)?).ok();
    let Some((first, last)) = item.split_once([':', '-']) else {
        return port(item).map(|port| port..=port);
    };
    let ports = port(first)?.max(1)..=port(last)?;
    (!ports.is_empty()).then_some(ports)
}

pub(in crate::capture) fn is_interface(item: &str) -> bool {
    item.len() <= MAX_INTERFACE
        && !item.starts_with(['-', '!'])
        && item.bytes().all(|byte| byte.is_ascii_graphic())
        && !item.contains(['/', '"', '\'', '\\'])
}

/// A number, a range with `-`, or a name of a user or group; not empty.
pub(in crate::capture) fn id(item: &str) -> Option<Id> {
    if item.starts_with(|first: char| first.is_ascii_digit()) {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let numbers = number(first)?..=number(last)?;
        // The largest stands for no user.
        let is_of_users = !numbers.is_empty() && *numbers.end() < u32::MAX;
        return is_of_users.then_some(Id::Numbers(numbers));
    }
    let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-$@".contains(&byte);
    let is_name = item.len() <= MAX_NAME && !item.starts_with('-') && item.bytes().all(is_of_name);
    is_name.then(|| Id::Name(item.to_owned()))
}

#[cfg(test)]
pub(in crate::capture) mod tests;
