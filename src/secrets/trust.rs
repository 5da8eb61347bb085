//! Whom to believe: the authority's roots and those of the mesh, merged.
//!
//! The authority's come with each certificate, the mesh's by discovery whenever they change. A
//! bundle is kept in one form, each certificate once and in the order of their text, so that
//! bundles that differ in order only are equal and nobody is bothered with them.
//!
//! Does not publish, nor judge who may be believed: both sources are istiod.

use std::collections::{BTreeSet, HashSet};

use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tokio::sync::watch;

use super::certificate::{Roots, is_certificate};

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

/// The trust bundle of the mesh that was taken last. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Mesh(watch::Sender<Option<Roots>>);

/// A bundle of roots without any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the trust bundle of the mesh holds no certificate in {bytes} bytes, expected PEM")]
pub struct BundleError {
    bytes: usize,
}

impl Mesh {
    /// Takes a bundle, PEM, in place of the last; an empty one is none. Whether it is another.
    pub(super) fn take(&self, bundle: &str) -> Result<bool, BundleError> {
        let roots = Roots::new(bundle);
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

    pub(super) fn watch(&self) -> watch::Receiver<Option<Roots>> {
        self.0.subscribe()
    }
}

/// Both sources as they are now.
#[derive(Debug)]
pub(super) struct Trust {
    authority: Mutex<Option<Roots>>,
    mesh: watch::Receiver<Option<Roots>>,
}

impl Trust {
    pub(super) fn new(mesh: watch::Receiver<Option<Roots>>) -> Self {
        let authority = Mutex::default();
        Self { authority, mesh }
    }

    /// The authority has sent these.
    pub(super) fn learn(&self, roots: &Roots) {
        let mut authority = self.authority.lock();
        *authority = Some(roots.clone());
    }

    /// All roots. Nothing before the authority has spoken: the mesh's alone would have Envoy refuse
    /// its own peers.
    pub(super) fn merged(&self) -> Option<Roots> {
        let authority = self.authority.lock();
        let authority = authority.clone()?;
        Some(match &*self.mesh.borrow() {
            Some(mesh) => authority.with(mesh),
            None => authority,
        })
    }

    /// Waits for another bundle of the mesh than those this handle has returned for.
    pub(super) fn mesh(&self) -> watch::Receiver<Option<Roots>> {
        self.mesh.clone()
    }
}

/// The certificates of all texts, each once, in order. What is none is left out: one broken
/// certificate would have Envoy refuse the others with it.
pub(super) fn merge<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let (mut known, mut blocks) = (HashSet::new(), BTreeSet::new());
    for block in texts.into_iter().flat_map(blocks_of) {
        match CertificateDer::from_pem_slice(block.as_bytes()) {
            Ok(der) if is_certificate(&der) => {
                if known.insert(der) {
                    blocks.insert(block);
                }
            }
            _ => tracing::warn!(target: "cache", "a broken root certificate is left out"),
        }
    }
    Vec::from_iter(blocks).join("\n")
}

/// Whatever stands between the lines of a certificate, those included.
fn blocks_of(text: &str) -> Vec<String> {
    let starts = text.split(BEGIN).skip(1);
    let whole = starts.map(|rest| match rest.split_once(END) {
        Some((body, _)) => format!("{BEGIN}{body}{END}"),
        None => format!("{BEGIN}{rest}"),
    });
    whole.map(|block| block.replace('\r', "")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let merged = merge([a.as_str(), b.as_str()]);
        let both = format!("# a comment\n{b}\n\n{a}{b}").replace('\n', "\r\n");
        for texts in [
            vec![b.as_str(), a.as_str()],
            vec![both.as_str()],
            vec![merged.as_str(), "", a.as_str()],
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
        assert_eq!(merge([broken.as_str()]), good.trim().replace('\r', ""));
        assert_eq!(merge(["", "no PEM", BEGIN]), "");
    }
}
