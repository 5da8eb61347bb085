//! Reads single settings and items of lists, and collects what is wrong with them.

use super::{Binaries, Mode};
use crate::address::Cidr;
use crate::capture::rules::{Id, Ports};
use crate::problem::Diagnostics;

/// The kernel's limit, without the final zero byte.
const LONGEST_INTERFACE: usize = 15;
/// Longest name of a user or group.
const LONGEST_NAME: usize = 255;
const LOOPBACK: Cidr = Cidr::v4(127, 0, 0, 1, 32);

/// The reader, with the problems found so far. A value with a problem is replaced by any other.
#[derive(Debug, Default)]
pub(super) struct Items(pub(super) Diagnostics);

impl Items {
    fn each<T>(
        &mut self,
        subject: &str,
        list: &str,
        expected: &str,
        read: impl Fn(&str) -> Option<T>,
    ) -> Vec<T> {
        let items = list
            .split(',')
            .map(str::trim)
            .filter(|item| !item.is_empty());
        let mut found = Vec::new();
        for item in items {
            match read(item) {
                Some(value) => found.push(value),
                None => self
                    .0
                    .problem(format!("an item of {subject}"), item, expected),
            }
        }
        found
    }

    pub(super) fn port(&mut self, subject: &str, text: &str) -> u16 {
        let port = number(text).and_then(|port| u16::try_from(port).ok());
        port.filter(|port| *port != 0).unwrap_or_else(|| {
            self.0.problem(subject, text, "a port from 1 to 65535");
            0
        })
    }

    pub(super) fn ports(&mut self, subject: &str, list: &str) -> Vec<Ports> {
        let expected = "a port from 0 to 65535 or a range such as 8000:9000";
        self.each(subject, list, expected, ports)
    }

    pub(super) fn number(&mut self, subject: &str, text: &str) -> u32 {
        number(text).filter(|found| *found != 0).unwrap_or_else(|| {
            let expected = "a decimal number from 1 to 4294967295";
            self.0.problem(subject, text, expected);
            0
        })
    }

    pub(super) fn ids(&mut self, subject: &str, list: &str) -> Vec<Id> {
        let expected = "a number from 0 to 4294967294, a range such as 1000-2000, or a name";
        self.each(subject, list, expected, id)
    }

    pub(super) fn interfaces(&mut self, subject: &str, list: &str) -> Vec<String> {
        let expected = "the name of a network interface";
        self.each(subject, list, expected, |item| {
            is_interface(item).then(|| item.to_owned())
        })
    }

    pub(super) fn ranges(&mut self, subject: &str, list: &str) -> Vec<Cidr> {
        let expected = "a range of addresses such as 10.0.0.0/8 or 2001:db8::/32";
        self.each(subject, list, expected, Cidr::parse)
    }

    pub(super) fn loopback(&mut self, text: &str) -> Cidr {
        let is_loopback = |range: &Cidr| {
            range.address.is_ipv4() && range.address.is_loopback() && range.prefix >= 8
        };
        Cidr::parse(text).filter(is_loopback).unwrap_or_else(|| {
            let subject = "ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR";
            let expected = "a range within 127.0.0.0/8";
            self.0.problem(subject, text, expected);
            LOOPBACK
        })
    }

    pub(super) fn mode(&mut self, text: &str) -> Mode {
        match text {
            "TPROXY" => return Mode::Tproxy,
            "" | "REDIRECT" => {}
            _ => {
                let expected = "REDIRECT or TPROXY; it is taken as REDIRECT";
                self.0
                    .warn("--istio-inbound-interception-mode", text, expected);
            }
        }
        Mode::Redirect
    }

    pub(super) fn binaries(&mut self, text: &str) -> Binaries {
        match text {
            "" => Binaries::Detected,
            "legacy" => Binaries::Legacy,
            "nft" => Binaries::Nft,
            _ => {
                let expected = "legacy, nft or nothing";
                self.0.problem("--force-iptables-binary", text, expected);
                Binaries::Detected
            }
        }
    }
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
    item.len() <= LONGEST_INTERFACE
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
    let is_name =
        item.len() <= LONGEST_NAME && !item.starts_with('-') && item.bytes().all(is_of_name);
    is_name.then(|| Id::Name(item.to_owned()))
}
