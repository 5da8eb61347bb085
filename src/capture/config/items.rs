//! Reads single settings and items of lists, and collects what is wrong with them.

use std::fmt;

use super::{Kind, Mode};
use crate::address::Cidr;
use crate::capture::types::{Id, Ports};
use crate::problem::Diagnostics;

/// The kernel's limit, without the final zero byte.
const MAX_INTERFACE: usize = 15;
/// Longest name of a user or group.
const MAX_NAME: usize = 255;

/// The name of a setting and its text.
type Setting<'a> = (&'a str, &'a str);

/// The reader, with the problems found so far. A value with a problem is replaced by any other.
#[derive(Debug, Default)]
pub(super) struct SettingsParser(pub(super) Diagnostics);

impl SettingsParser {
    fn problem(&mut self, (name, found): Setting<'_>, expected: &str) {
        self.0.problem(flag(name), found, expected);
    }

    pub(super) fn warn(&mut self, (name, found): Setting<'_>, expected: &str) {
        self.0.warn(flag(name), found, expected);
    }

    fn each<T>(
        &mut self,
        (name, list): Setting<'_>,
        expected: &str,
        read: impl Fn(&str) -> Option<T>,
    ) -> Vec<T> {
        let items = list.split(',').map(str::trim);
        let mut found = Vec::new();
        for item in items.filter(|item| !item.is_empty()) {
            match read(item) {
                Some(value) => found.push(value),
                None => {
                    let subject = format!("an item of {}", flag(name));
                    self.0.problem(subject, item, expected);
                }
            }
        }
        found
    }

    pub(super) fn number<T>(&mut self, setting: Setting<'_>, max: T) -> T
    where
        T: TryFrom<u32> + Default + fmt::Display,
    {
        let found = number(setting.1).filter(|found| *found != 0);
        found
            .and_then(|found| found.try_into().ok())
            .unwrap_or_else(|| {
                self.problem(setting, &format!("a decimal number from 1 to {max}"));
                T::default()
            })
    }

    pub(super) fn ports(&mut self, list: Setting<'_>) -> Vec<Ports> {
        let expected = "a port from 0 to 65535 or a range such as 8000:9000";
        self.each(list, expected, ports)
    }

    pub(super) fn ids(&mut self, list: Setting<'_>) -> Vec<Id> {
        let expected = "a number from 0 to 4294967294, a range such as 1000-2000, or a name";
        self.each(list, expected, id)
    }

    pub(super) fn interfaces(&mut self, list: Setting<'_>) -> Vec<String> {
        let name = |item: &str| is_interface(item).then(|| item.to_owned());
        self.each(list, "the name of a network interface", name)
    }

    pub(super) fn ranges(&mut self, list: Setting<'_>) -> Vec<Cidr> {
        let expected = "a range of addresses such as 10.0.0.0/8 or 2001:db8::/32";
        self.each(list, expected, Cidr::parse)
    }

    pub(super) fn loopback(&mut self, setting: Setting<'_>) -> Cidr {
        let is_loopback = |range: &Cidr| {
            range.address.is_ipv4() && range.address.is_loopback() && range.prefix >= 8
        };
        let range = Cidr::parse(setting.1).filter(is_loopback);
        range.unwrap_or_else(|| {
            self.problem(setting, "a range within 127.0.0.0/8");
            Cidr::v4(127, 0, 0, 1, 32)
        })
    }

    pub(super) fn mode(&mut self, setting: Setting<'_>) -> Mode {
        match setting.1 {
            "TPROXY" => return Mode::Tproxy,
            "" | "REDIRECT" => {}
            _ => self.warn(setting, "REDIRECT or TPROXY; it is taken as REDIRECT"),
        }
        Mode::Redirect
    }

    pub(super) fn kind(&mut self, setting: Setting<'_>) -> Option<Kind> {
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
