//! Completes short names: the pod's namespace, its domain, and its first search domain.

/// The domains that complete names in this pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SearchDomains {
    pub(super) namespace: String,
    /// The domain without the namespace that it begins with: `svc.cluster.local`. If it is empty, names have
    /// no short forms.
    pub(super) domain: String,
    /// A dot and the first label of the domain, lower case: `.svc` by default.
    pub(super) svc_label: String,
    /// The first search domain, lower case, without a dot at its end. Empty if there is none.
    pub(super) search: String,
}

impl SearchDomains {
    /// Prepares the domains. `domain` is the proxy's (`--domain`), `search` the list of resolv.conf, of which only the first
    /// counts: clients try the others themselves.
    pub fn new(namespace: &str, domain: &str, search: &[String]) -> Self {
        let domain = match domain.split_once('.').unwrap_or((domain, "")) {
            (first, rest) if first == namespace => rest,
            _ => domain,
        };
        let label = domain.split('.').next().unwrap_or_default();
        let first_search = search.first().map_or("", String::as_str);
        Self {
            namespace: namespace.to_owned(),
            domain: domain.to_owned(),
            svc_label: format!(".{}", label.to_ascii_lowercase()),
            search: first_search.trim_end_matches('.').to_ascii_lowercase(),
        }
    }

    /// Returns `name` as it was before the client appended the search domain. A name that ends in the
    /// search domain is complete, so clients append nothing to it; `None` if nothing was appended.
    pub(super) fn without_search_domain<'a>(&self, name: &'a [u8]) -> Option<&'a [u8]> {
        let search = self.search.as_bytes();
        let base = name.strip_suffix(search)?.strip_suffix(b".")?;
        // A bare star is not a name. Every name ends in an empty search domain.
        let is_name = !base.is_empty() && base != b"*";
        if is_name && !base.ends_with(search) { Some(base) } else { None }
    }

    /// Returns `name.namespace` of `name.namespace.svc`; `None` if the name does not end in this label.
    pub(super) fn without_svc_label<'a>(&self, name: &'a [u8]) -> Option<&'a [u8]> {
        let base = name.strip_suffix(self.svc_label.as_bytes())?;
        if self.svc_label == "." || base.is_empty() { None } else { Some(base) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_domain_loses_the_namespace_it_begins_with() {
        for (namespace, domain, expected, label) in [
            ("ns1", "ns1.svc.cluster.local", "svc.cluster.local", ".svc"),
            ("ns2", "ns1.svc.cluster.local", "ns1.svc.cluster.local", ".ns1"),
            ("ns1", "ns1", "", "."),
            ("", ".svc.cluster.local", "svc.cluster.local", ".svc"),
            ("ns1", "", "", "."),
        ] {
            let domains = SearchDomains::new(namespace, domain, &[]);
            assert_eq!(domains.domain, expected, "{domain}");
            assert_eq!(domains.svc_label, label, "{domain}");
        }
    }

    #[test]
    fn only_the_first_search_domain_is_cut_off_and_only_once() {
        let search = ["NS1.svc.cluster.local.", "svc.cluster.local"].map(str::to_owned);
        let domains = SearchDomains::new("ns1", "", &search);
        for (name, base) in [
            ("a.b.ns1.svc.cluster.local", Some("a.b")),
            ("a.svc.cluster.local", None),
            ("ns1.svc.cluster.local", None),
            ("a.ns1.svc.cluster.local.ns1.svc.cluster.local", None),
            ("xns1.svc.cluster.local.ns1.svc.cluster.local", None),
            ("a", None),
        ] {
            assert_eq!(
                domains.without_search_domain(name.as_bytes()),
                base.map(str::as_bytes),
                "{name}"
            );
        }
    }
}
