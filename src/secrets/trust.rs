//! Trust bundles: the mesh's, which comes by discovery (PCDS), and how bundles are merged.
//!
//! A bundle is kept in one form, each certificate once and in one order: bundles that differ only in
//! order are equal, and are not pushed to Envoy again.

use std::collections::BTreeSet;

use tokio::sync::watch;

use super::certificate::Roots;
use super::x509;
use crate::pem;

/// The latest trust bundle of the mesh. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct MeshBundle(watch::Sender<Option<Roots>>);

/// A trust bundle without a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the trust bundle of the mesh holds no certificate in {bytes} bytes, expected PEM")]
pub struct BundleError {
    bytes: usize,
}

impl MeshBundle {
    /// Replaces the bundle by another, PEM; an empty one is none. Returns whether it differs.
    pub(super) fn replace(&self, bundle: &str) -> Result<bool, BundleError> {
        let roots = Roots::merged([bundle.as_bytes()]);
        if roots.is_none() && !bundle.trim().is_empty() {
            let bytes = bundle.len();
            return Err(BundleError { bytes });
        }
        Ok(self.0.send_if_modified(|mesh| {
            let changed = *mesh != roots;
            *mesh = roots;
            changed
        }))
    }

    pub(super) fn latest(&self) -> Option<Roots> {
        self.0.borrow().clone()
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Option<Roots>> {
        self.0.subscribe()
    }
}

/// The certificates of all texts, each once, in order. Broken ones are left out, as one of them would
/// have Envoy refuse the others with it.
pub(super) fn merge<'a>(texts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut roots = BTreeSet::new();
    for text in texts {
        for root in x509::bundle(text) {
            match root {
                Some(der) => drop(roots.insert(der)),
                None => tracing::warn!(target: "cache", "a broken root certificate is left out"),
            }
        }
        if let Some(left_over) = pem::left_over(text) {
            tracing::warn!(target: "cache", "a bundle of roots holds {left_over}; it is ignored");
        }
    }
    x509::text(roots).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
    const END: &str = "-----END CERTIFICATE-----";
    use rcgen::{CertificateParams, KeyPair};

    fn root() -> String {
        let key = KeyPair::generate().unwrap();
        CertificateParams::default()
            .self_signed(&key)
            .unwrap()
            .pem()
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

    #[test]
    fn what_is_no_certificate_is_left_out_without_the_others() {
        let good = root();
        let cut = root().replace(END, "");
        let broken = format!("{BEGIN}\nAAAA\n{END}\n{BEGIN}\n!!\n{END}\n{good}{cut}");
        assert_eq!(merge([broken.as_bytes()]), good.trim().replace('\r', ""));
        assert_eq!(merge([&b""[..], b"no PEM", BEGIN.as_bytes()]), "");
    }
}
