//! SPIFFE identities in Istio's form. The parser is independent of the agent's, because it is used to
//! test the agent.

use std::fmt;
use std::str::FromStr;

/// The identity `spiffe://<trust domain>/ns/<namespace>/sa/<service account>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpiffeId {
    pub trust_domain: String,
    pub namespace: String,
    pub service_account: String,
}

/// A URI that is not an identity in Istio's form.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is not spiffe://<trust domain>/ns/<namespace>/sa/<service account>")]
pub struct InvalidSpiffeId(String);

impl fmt::Display for SpiffeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { trust_domain, namespace, service_account } = self;
        write!(f, "spiffe://{trust_domain}/ns/{namespace}/sa/{service_account}")
    }
}

impl FromStr for SpiffeId {
    type Err = InvalidSpiffeId;

    fn from_str(uri: &str) -> Result<Self, Self::Err> {
        let path = uri.strip_prefix("spiffe://").unwrap_or_default();
        let parts: Vec<_> = path.split('/').collect();
        match parts[..] {
            [trust_domain, "ns", namespace, "sa", service_account] if !parts.contains(&"") => {
                Ok(Self {
                    trust_domain: trust_domain.to_owned(),
                    namespace: namespace.to_owned(),
                    service_account: service_account.to_owned(),
                })
            }
            _ => Err(InvalidSpiffeId(uri.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_istios_form_is_an_identity() {
        let uri = "spiffe://cluster.local/ns/shop/sa/cart";
        assert_eq!(uri.parse::<SpiffeId>().unwrap().to_string(), uri);
        for other in ["", "spiffe:///ns/a/sa/b", "spiffe://td/ns//sa/b", "spiffe://td/ns/a/sa/b/c"]
        {
            assert!(other.parse::<SpiffeId>().is_err(), "{other:?}");
        }
    }
}
