//! What an operator wants to know of a certificate.

use std::fmt;
use std::time::SystemTime;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use x509_parser::prelude::{GeneralName, X509Certificate};

use super::report::Check;
use crate::clock::rfc3339;
use crate::duration::{approximate, scaled};
use crate::secrets::system_time;

/// The part of its life a certificate that is renewed in time never gets to.
const LAST_TENTH: f64 = 0.1;

const MOST_NAMES: usize = 8;

const CLOCK: &str = "compare the clock of this machine (date -u) with that of others";

pub(super) struct Facts {
    pub(super) subject: String,
    pub(super) issuer: String,
    /// Subject alternative names: DNS, IP and URI.
    pub(super) names: Vec<String>,
    pub(super) not_before: SystemTime,
    pub(super) not_after: SystemTime,
}

impl Facts {
    pub(super) fn read(der: &[u8]) -> Option<Self> {
        let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
        let validity = certificate.validity();
        Some(Self {
            subject: certificate.subject().to_string(),
            issuer: certificate.issuer().to_string(),
            names: names(&certificate),
            not_before: system_time(validity.not_before.timestamp()),
            not_after: system_time(validity.not_after.timestamp()),
        })
    }

    /// The certificates of a PEM file; broken ones are left out.
    pub(super) fn of_pem(pem: &[u8]) -> Vec<Self> {
        let certificates = CertificateDer::pem_slice_iter(pem).flatten();
        certificates.filter_map(|der| Self::read(&der)).collect()
    }

    /// Whether it is valid now; `what` it is, and `remedy` if it has expired.
    pub(super) fn life(&self, what: &str, remedy: &str, now: SystemTime) -> Check {
        let ends = format!("{self}, valid until {}", rfc3339(self.not_after));
        if now < self.not_before {
            let begins = rfc3339(self.not_before);
            let found = format!("{self} is valid from {begins}, it is {} here", rfc3339(now));
            return Check::error(what, found)
                .expected("a clock that agrees with the authority's")
                .remedy(CLOCK);
        }
        let Ok(left) = self.not_after.duration_since(now) else {
            let found = format!(
                "{self} expired at {}, it is {} here",
                rfc3339(self.not_after),
                rfc3339(now)
            );
            return Check::error(what, found).remedy(format!("{remedy}; {CLOCK}"));
        };
        let whole = self.not_after.duration_since(self.not_before);
        match left < scaled(whole.unwrap_or_default(), LAST_TENTH) {
            true => {
                let left = approximate(left.as_secs_f64());
                Check::warning(what, format!("{ends}, which is in {left}")).remedy(remedy)
            }
            false => Check::ok(what, ends),
        }
    }
}

impl fmt::Display for Facts {
    /// By its names, or its subject where it has none.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.names.is_empty() {
            true => f.write_str(&self.subject),
            false => {
                let shown = self.names.iter().take(MOST_NAMES).map(String::as_str);
                f.write_str(&shown.collect::<Vec<_>>().join(", "))?;
                match self.names.len().saturating_sub(MOST_NAMES) {
                    0 => Ok(()),
                    more => write!(f, " and {more} more"),
                }
            }
        }
    }
}

fn names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let names = certificate.subject_alternative_name().ok().flatten();
    let names = names.map(|names| names.value.general_names.as_slice());
    let text = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) | GeneralName::URI(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match bytes.len() {
            4 => Some(std::net::Ipv4Addr::from(<[u8; 4]>::try_from(*bytes).ok()?).to_string()),
            _ => Some(std::net::Ipv6Addr::from(<[u8; 16]>::try_from(*bytes).ok()?).to_string()),
        },
        _ => None,
    };
    names.unwrap_or_default().iter().filter_map(text).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use rcgen::{CertificateParams, KeyPair};

    use super::*;
    use crate::doctor::report::Level;

    fn certificate() -> Vec<u8> {
        let mut params = CertificateParams::new(["a.test".to_owned(), "::1".to_owned()]).unwrap();
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        params.not_after = rcgen::date_time_ymd(2030, 1, 1);
        let signed = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        signed.der().to_vec()
    }

    #[test]
    fn the_life_of_a_certificate_is_compared_with_the_clock() {
        let facts = Facts::read(&certificate()).unwrap();
        assert_eq!(facts.to_string(), "a.test, ::1");
        let day = |days: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(days * 86_400);
        for (now, level, words) in [
            (day(18_000), Level::Error, "valid from 2020-01-01"),
            (day(18_300), Level::Ok, "valid until 2030-01-01"),
            (day(21_900), Level::Warning, "which is in 15 d"),
            (day(22_000), Level::Error, "expired at 2030-01-01"),
        ] {
            let check = facts.life("it", "renew it", now);
            assert_eq!(check.level, level, "{check}");
            assert!(check.found.contains(words), "{check}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_certificate_or_none(at in any::<usize>(), byte in any::<u8>()) {
            let mut der = certificate();
            let at = at % der.len();
            der[at] = byte;
            if let Some(facts) = Facts::read(&der) {
                facts.life("it", "renew it", SystemTime::UNIX_EPOCH);
            }
        }
    }
}
