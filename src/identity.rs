//! SPIFFE identities in Istio's form: `spiffe://<trust domain>/ns/<namespace>/sa/<account>`.
//!
//! Namespace and account are not checked further: as with pilot-agent, the certificate authority decides.

use std::fmt;

/// The SPIFFE identity of a workload, kept as its three parts.
///
/// Source: SPIFFE ID specification, section 2, and Istio's convention for the path.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SpiffeId {
    pub trust_domain: String,
    pub namespace: String,
    pub service_account: String,
}

/// Why a string is not an identity in Istio's form.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{found:?} is not of the form spiffe://<trust domain>/ns/<namespace>/sa/<service account>")]
pub struct InvalidSpiffeId {
    pub found: String,
}

impl SpiffeId {
    pub fn new(
        trust_domain: impl Into<String>,
        namespace: impl Into<String>,
        service_account: impl Into<String>,
    ) -> Self {
        Self {
            trust_domain: trust_domain.into(),
            namespace: namespace.into(),
            service_account: service_account.into(),
        }
    }
}

impl fmt::Display for SpiffeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "spiffe://{}/ns/{}/sa/{}",
            self.trust_domain, self.namespace, self.service_account
        )
    }
}

impl std::str::FromStr for SpiffeId {
    type Err = InvalidSpiffeId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidSpiffeId {
            found: text.to_owned(),
        };
        let path = text.strip_prefix("spiffe://").ok_or_else(invalid)?;
        let parts: Vec<_> = path.split('/').collect();
        match parts[..] {
            [domain, "ns", namespace, "sa", account]
                if ![domain, namespace, account].contains(&"") =>
            {
                Ok(Self::new(domain, namespace, account))
            }
            _ => Err(invalid()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_and_parses_istios_form() {
        let id = SpiffeId::new("cluster.local", "shop", "cart");
        assert_eq!(id.to_string(), "spiffe://cluster.local/ns/shop/sa/cart");
        assert_eq!(id.to_string().parse(), Ok(id));
    }

    #[test]
    fn refuses_every_other_form() {
        for text in [
            "",
            "cluster.local/ns/a/sa/b",
            "spiffe://",
            "spiffe:///ns/a/sa/b",
            "spiffe://td/ns/a/sa/",
            "spiffe://td/ns//sa/b",
            "spiffe://td/ns/a/sa/b/c",
            "spiffe://td/sa/b/ns/a",
        ] {
            assert!(text.parse::<SpiffeId>().is_err(), "{text:?}");
        }
    }
}
