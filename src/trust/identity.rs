//! SPIFFE identities in Istio's form: `spiffe://<trust domain>/ns/<namespace>/sa/<account>`.
//!
//! Namespace and account are not checked further: as with pilot-agent, the certificate authority decides.

use std::fmt;

/// The SPIFFE identity of a workload, in its three parts.
///
/// Source: SPIFFE ID specification, section 2, and Istio's convention for the path.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SpiffeId {
    pub trust_domain: String,
    pub namespace: String,
    pub service_account: String,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_printed_as_istios_spiffe_uri() {
        let id = SpiffeId::new("cluster.local", "shop", "cart");
        assert_eq!(id.to_string(), "spiffe://cluster.local/ns/shop/sa/cart");
    }
}
