//! Merges the trust anchors of the workload, as PEM, and holds the trust bundle of the mesh (PCDS).
//!
//! Merged roots have one form, each certificate once and in one order: bundles that differ only in
//! order are equal, and are not pushed to Envoy again.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use bytes::Bytes;
use tokio::sync::watch;

use super::x509;
use crate::problem::{Code, Problem};
use crate::trust::pem;

/// Trust anchors as PEM; there is at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots(Bytes);

impl Roots {
    /// Merges the certificates of all texts. Returns None if there is none.
    pub(super) fn merged<'a>(texts: impl IntoIterator<Item = &'a [u8]>) -> Option<Self> {
        let merged = merge(texts);
        if merged.is_empty() { None } else { Some(Self(merged.into())) }
    }

    /// Reads the certificates of a file, byte for byte unless Envoy cannot read it. Returns how many broken
    /// ones are left out, too.
    pub(super) fn from_file(pem: &[u8]) -> (Option<Self>, usize) {
        let certificates = Vec::from_iter(x509::certificates(pem));
        let broken = certificates.iter().filter(|der| der.is_none()).count();
        let mut roots = Vec::from_iter(certificates.into_iter().flatten());
        if roots.is_empty() {
            return (None, broken);
        }
        let is_in_order = !put_usable_first(&mut roots);
        if is_in_order && pem::plain_blocks(pem) == Some(roots.len()) {
            return (Some(Self(Bytes::copy_from_slice(pem))), broken);
        }
        (Some(Self(x509::to_pem(&roots).into())), broken)
    }

    pub(super) fn union(&self, others: &Self) -> Self {
        Self(merge([&*self.0, &*others.0]).into())
    }

    pub fn pem(&self) -> &Bytes {
        &self.0
    }

    #[cfg(test)]
    pub(crate) fn unchecked(text: &'static str) -> Self {
        Self(Bytes::from_static(text.as_bytes()))
    }
}

/// The latest trust bundle of the mesh. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct MeshBundle(watch::Sender<Bundle>);

#[derive(Debug, Default)]
pub(super) struct Bundle {
    /// PEM as istiod sent it. A change of this text alone renews certificates, as with pilot-agent: Istio's
    /// rotation of roots adds a copy of a root to the bundle for this purpose.
    pem: String,
    pub(super) roots: Option<Roots>,
}

impl MeshBundle {
    /// Replaces the bundle by another, PEM; an empty text removes it. Returns true if it differs.
    pub(super) fn replace(&self, bundle: &str) -> Result<bool, Problem> {
        let roots = Roots::merged([bundle.as_bytes()]);
        if roots.is_none() && !bundle.trim().is_empty() {
            let found = x509::Error::NoCertificate(bundle.len());
            let code = Code::MeshBundleInvalid;
            return Err(Problem::new(code, "trust bundle of the mesh", found));
        }
        Ok(self.0.send_if_modified(|mesh| {
            let changed = mesh.pem != bundle;
            *mesh = Bundle { pem: bundle.to_owned(), roots };
            changed
        }))
    }

    pub(super) fn latest(&self) -> Option<Roots> {
        self.0.borrow().roots.clone()
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Bundle> {
        self.0.subscribe()
    }
}

/// Merges the certificates of all texts into one PEM text, each once and in order. Broken ones are left
/// out, because Envoy rejects the whole bundle for one broken certificate.
fn merge<'a>(texts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut ders = BTreeSet::new();
    for text in texts {
        for der in x509::certificates(text) {
            match der {
                Some(der) => drop(ders.insert(der)),
                None => warn_left_out("a broken root certificate"),
            }
        }
        pem::left_over(text).into_iter().for_each(warn_left_out);
    }
    let mut ders = Vec::from_iter(ders);
    put_usable_first(&mut ders);
    x509::to_pem(&ders).trim_end().to_owned()
}

fn warn_left_out(found: &str) {
    let problem = Problem::new(Code::CertificatesLeftOut, "root certificates", found);
    tracing::warn!(target: "cache", "{problem}");
}

/// Swaps certificates with the same name and key: valid ones go first, then those that expire last. Envoy
/// uses the first of them, even if it has expired. Returns true if any were swapped.
fn put_usable_first(roots: &mut [Vec<u8>]) -> bool {
    let mut ranks: Vec<_> =
        roots.iter().map(|der| x509::holder_and_rank(der).unwrap_or_default()).collect();
    let mut swapped = false;
    for place in 0..roots.len() {
        let same_holder = (place..roots.len()).filter(|other| ranks[*other].0 == ranks[place].0);
        let best = same_holder.min_by_key(|other| Reverse(ranks[*other].1)).unwrap_or(place);
        swapped |= best != place;
        roots.swap(place, best);
        ranks.swap(place, best);
    }
    swapped
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
    const END: &str = "-----END CERTIFICATE-----";

    fn root() -> String {
        let key = KeyPair::generate().unwrap();
        CertificateParams::default().self_signed(&key).unwrap().pem()
    }

    #[test]
    fn order_line_ends_and_repetition_make_no_difference() {
        let (a, b) = (root(), root());
        let merged = merge([a.as_bytes(), b.as_bytes()]);
        let both = format!("# a comment\n{b}\n\n{a}{b}").replace('\n', "\r\n");
        for texts in [
            vec![b.as_bytes(), a.as_bytes()],
            vec![both.as_bytes()],
            vec![merged.as_bytes(), b"", a.as_bytes()],
        ] {
            assert_eq!(merge(texts), merged);
        }
        assert_eq!(merged.matches(BEGIN).count(), 2);
        assert!(!merged.ends_with('\n'));
    }

    /// Returns several certificates of one root key, each valid from the first to the second of its years.
    fn issues(years: &[(i32, i32)]) -> Vec<String> {
        let key = KeyPair::generate().unwrap();
        let issue = |(begin, end): &(i32, i32)| {
            let mut params = CertificateParams::default();
            params.not_before = rcgen::date_time_ymd(*begin, 1, 1);
            params.not_after = rcgen::date_time_ymd(*end, 1, 1);
            params.self_signed(&key).unwrap().pem()
        };
        years.iter().map(issue).collect()
    }

    #[test]
    fn the_longest_valid_issue_of_a_root_comes_first() {
        let issues = issues(&[(2000, 2020), (2000, 2090), (2080, 2100), (2000, 2060)]);
        let [expired, last, future, short] = &issues[..] else {
            panic!("four");
        };
        let sorted = [last, short, future, expired];
        let other = root();
        let mut reversed = issues.clone();
        reversed.reverse();
        for order in [&issues, &reversed] {
            let file = format!("{}{other}{}", order[..2].concat(), order[2..].concat());
            let (roots, broken) = Roots::from_file(file.as_bytes());
            let expected = format!("{last}{short}{other}{future}{expired}");
            assert_eq!((roots.unwrap().pem(), broken), (&expected.into(), 0));
            let merged = merge([order.concat().as_bytes()]);
            let places = sorted.map(|root| merged.find(root.trim()).expect("is there"));
            assert!(places.is_sorted(), "{places:?}");
        }
    }

    #[test]
    fn a_file_of_roots_in_order_is_served_byte_for_byte() {
        let [first, second] = &issues(&[(2000, 2090), (2000, 2060)])[..] else {
            panic!("two");
        };
        let (a, b) = (root(), root());
        let file = format!("# roots\n{b}\r\n{first}{a}\n{second}{a}# end");
        let (roots, broken) = Roots::from_file(file.as_bytes());
        assert_eq!((roots.unwrap().pem(), broken), (&file.into(), 0));
    }

    #[test]
    fn invalid_blocks_are_omitted_and_valid_roots_are_kept() {
        let good = root();
        let cut = root().replace(END, "");
        let broken = format!("{BEGIN}\nAAAA\n{END}\n{BEGIN}\n!!\n{END}\n{good}{cut}");
        assert_eq!(merge([broken.as_bytes()]), good.trim().replace('\r', ""));
        assert_eq!(merge([&b""[..], b"no PEM", BEGIN.as_bytes()]), "");
    }
}
