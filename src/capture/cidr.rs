//! Ranges of addresses, as they are spelled: bits behind the prefix are kept.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::rules::Family;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    pub address: IpAddr,
    /// Length of the prefix, in bits.
    pub prefix: u8,
}

impl Cidr {
    pub const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Self {
        Self {
            address: IpAddr::V4(Ipv4Addr::new(a, b, c, d)),
            prefix,
        }
    }

    /// A single IPv6 address below 2^16.
    pub const fn low_v6(last: u16) -> Self {
        Self {
            address: IpAddr::V6(Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0, last)),
            prefix: 128,
        }
    }

    pub fn family(&self) -> Family {
        match self.address {
            IpAddr::V4(_) => Family::V4,
            IpAddr::V6(_) => Family::V6,
        }
    }

    /// The range with all bits behind the prefix zero.
    pub fn masked(&self) -> Self {
        let address = match self.address {
            IpAddr::V4(address) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix));
                Ipv4Addr::from_bits(address.to_bits() & mask.unwrap_or(0)).into()
            }
            IpAddr::V6(address) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.prefix));
                Ipv6Addr::from_bits(address.to_bits() & mask.unwrap_or(0)).into()
            }
        };
        Self {
            address,
            prefix: self.prefix,
        }
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        let prefix = self.prefix;
        let range = Self { address, prefix };
        self.address.is_ipv4() == address.is_ipv4() && range.masked() == self.masked()
    }

    /// Reads `address/prefix`. A bare address is none, nor is a prefix with a sign or leading zeros.
    pub fn parse(text: &str) -> Option<Self> {
        let (address, digits) = text.split_once('/')?;
        let address: IpAddr = address.parse().ok()?;
        let prefix: u8 = digits.parse().ok()?;
        let longest = if address.is_ipv4() { 32 } else { 128 };
        (prefix <= longest && digits == prefix.to_string()).then_some(Self { address, prefix })
    }
}

/// The range of this address alone.
impl From<IpAddr> for Cidr {
    fn from(address: IpAddr) -> Self {
        let prefix = if address.is_ipv4() { 32 } else { 128 };
        Self { address, prefix }
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_clears_the_bits_behind_the_prefix() {
        for (text, masked) in [
            ("10.1.2.3/8", "10.0.0.0/8"),
            ("10.1.2.3/0", "0.0.0.0/0"),
            ("10.1.2.3/32", "10.1.2.3/32"),
            ("2001:db8::1/32", "2001:db8::/32"),
            ("::1/0", "::/0"),
            ("::1/128", "::1/128"),
        ] {
            let range = Cidr::parse(text).expect(text);
            assert_eq!(range.masked().to_string(), masked);
        }
    }

    #[test]
    fn host_bits_are_kept_and_malformed_ranges_are_none() {
        for text in ["10.1.2.3/8", "0.0.0.0/0", "::1/128", "2001:db8::1/32"] {
            assert_eq!(
                Cidr::parse(text).map(|cidr| cidr.to_string()).as_deref(),
                Some(text)
            );
        }
        for text in [
            "",
            "10.0.0.0",
            "10.0.0.0/",
            "10.0.0.0/33",
            "10.0.0.0/08",
            "10.0.0.0/+8",
            "10.0.0/8",
            "010.0.0.0/8",
            "::1/129",
            "fe80::1%eth0/64",
            "*",
            "10.0.0.0/8/8",
            "10.0.0.0/8 ",
        ] {
            assert_eq!(Cidr::parse(text), None, "{text}");
        }
    }
}
