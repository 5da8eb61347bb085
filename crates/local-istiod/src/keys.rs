//! The keys that must outlive a control plane, so that its workloads trust the next one: the root and
//! the token key.
//!
//! From one start to the next, the keys are stored in memory or in a folder with private files.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::authority::{AuthorityError, Root};
use super::token::{TokenKey, TokenKeyError};

const ROOT: &str = "root-cert.pem";
const ROOT_KEY: &str = "root-key.pem";
const TOKEN_KEY: &str = "token-key.der";

/// The roots, the oldest first, and the key that signs tokens.
#[derive(Clone, Debug)]
pub struct Keys {
    pub(super) roots: Vec<Arc<Root>>,
    pub(super) tokens: Arc<TokenKey>,
}

/// The reason why no keys are available.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error("cannot use the root")]
    Root(#[from] AuthorityError),
    #[error(transparent)]
    Token(#[from] TokenKeyError),
    #[error("cannot use {path}", path = .path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl Keys {
    pub fn generate(trust_domain: &str) -> Result<Self, KeysError> {
        Ok(Self {
            roots: vec![Arc::new(Root::generate(trust_domain)?)],
            tokens: Arc::new(TokenKey::generate()?),
        })
    }

    /// Loads the keys in `folder`. If the folder has no keys, generates and stores them there.
    pub fn load_or_generate(folder: &Path, trust_domain: &str) -> Result<Self, KeysError> {
        let root = folder.join(ROOT);
        if root.try_exists().map_err(failed(&root))? {
            return Self::load(folder);
        }
        let keys = Self::generate(trust_domain)?;
        keys.save(folder)?;
        Ok(keys)
    }

    fn load(folder: &Path) -> Result<Self, KeysError> {
        let text = |name| {
            let path = folder.join(name);
            fs::read_to_string(&path).map_err(failed(&path))
        };
        let root = Root::from_pem(&text(ROOT)?, &text(ROOT_KEY)?)?;
        let tokens = folder.join(TOKEN_KEY);
        let tokens = fs::read(&tokens).map_err(failed(&tokens))?;
        Ok(Self { roots: vec![Arc::new(root)], tokens: Arc::new(TokenKey::from_pkcs8(&tokens)?) })
    }

    /// Writes the keys, and the certificate last: if the certificate exists, the keys exist.
    fn save(&self, folder: &Path) -> Result<(), KeysError> {
        fs::create_dir_all(folder).map_err(failed(folder))?;
        write_private(&folder.join(TOKEN_KEY), &self.tokens.to_pkcs8()?)?;
        for root in &self.roots {
            write_private(&folder.join(ROOT_KEY), root.key_pem().as_bytes())?;
            write_private(&folder.join(ROOT), root.pem().as_bytes())?;
        }
        Ok(())
    }
}

/// Writes a file that only its owner may read.
pub fn write_private(path: &Path, content: &[u8]) -> Result<(), KeysError> {
    fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| file.write_all(content))
        .map_err(failed(path))
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> KeysError {
    move |source| KeysError::Io { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_keeps_root_and_token_key_over_restarts() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let first = Keys::load_or_generate(&state, "cluster.local").unwrap();
        let second = Keys::load_or_generate(&state, "cluster.local").unwrap();
        assert_eq!(first.roots[0].pem(), second.roots[0].pem());
        let key = first.tokens.to_pkcs8().unwrap();
        assert_eq!(key, second.tokens.to_pkcs8().unwrap());
    }

    #[test]
    fn a_folder_with_half_of_the_keys_is_a_named_error() {
        let folder = tempfile::tempdir().unwrap();
        Keys::load_or_generate(folder.path(), "cluster.local").unwrap();
        fs::remove_file(folder.path().join(TOKEN_KEY)).unwrap();
        let error = Keys::load_or_generate(folder.path(), "cluster.local").unwrap_err();
        assert!(error.to_string().contains(TOKEN_KEY), "{error}");
    }
}
