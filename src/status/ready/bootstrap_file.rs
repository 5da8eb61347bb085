//! Checks that the bootstrap of gRPC applications exists, and the certificate files it names.
//!
//! The bootstrap is read until it could be read once; the certificate files must exist at each check.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;

use super::NotReady;
use crate::files::regular_file::{self, MAX_SETTINGS};

/// Members of a `file_watcher` certificate provider.
const FILES: [&str; 3] = ["certificate_file", "private_key_file", "ca_certificate_file"];

pub(super) struct BootstrapFile {
    path: PathBuf,
    /// The certificate files, once the bootstrap was read.
    files: OnceLock<Vec<PathBuf>>,
}

impl BootstrapFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, files: OnceLock::new() }
    }

    pub(super) fn check(&self) -> Result<(), NotReady> {
        let files = match self.files.get() {
            Some(files) => files,
            None => {
                let files = certificate_files(&self.path).map_err(|error| NotReady::Bootstrap {
                    path: self.path.clone(),
                    why: error.to_string(),
                })?;
                self.files.get_or_init(|| files)
            }
        };
        match files.iter().find(|path| !path.exists()) {
            Some(path) => Err(NotReady::NoFile(path.clone())),
            None => Ok(()),
        }
    }
}

fn certificate_files(path: &Path) -> io::Result<Vec<PathBuf>> {
    let document: Value = serde_json::from_slice(&regular_file::read(path, MAX_SETTINGS)?)?;
    let providers = document["certificate_providers"].as_object();
    Ok(providers
        .into_iter()
        .flat_map(|providers| providers.values())
        .filter(|provider| provider["plugin_name"] == "file_watcher")
        .flat_map(|watcher| FILES.map(|name| watcher["config"][name].as_str()))
        .flatten()
        .map(PathBuf::from)
        .collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_bootstrap_must_exist_once_and_the_certificate_files_always() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("bootstrap.json");
        let file = BootstrapFile::new(path.clone());
        let unreadable = format!("failed loading {}: ", path.display());
        let missing = file.check().expect_err("no file").to_string();
        assert!(missing.starts_with(&unreadable), "{missing}");
        std::fs::write(&path, "{").expect("written");
        let missing = file.check().expect_err("no JSON").to_string();
        assert!(missing.starts_with(&unreadable), "{missing}");

        let names = FILES.map(|name| directory.path().join(name));
        let mut config = serde_json::Map::new();
        for (member, path) in FILES.iter().zip(&names) {
            config.insert((*member).to_owned(), json!(path));
        }
        let provider = json!({ "plugin_name": "file_watcher", "config": config });
        let document = json!({ "certificate_providers": { "default": provider } });
        std::fs::write(&path, document.to_string()).expect("written");
        let missing = |path: &Path| Err(NotReady::NoFile(path.to_owned()));
        for name in &names {
            assert_eq!(file.check(), missing(name));
            std::fs::write(name, "").expect("written");
        }
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(file.check(), Ok(()));
        std::fs::remove_file(&names[1]).expect("removed");
        assert_eq!(file.check(), missing(&names[1]));
    }

    #[test]
    fn a_bootstrap_without_certificate_files_suffices() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("bootstrap.json");
        std::fs::write(&path, "{}").expect("written");
        assert_eq!(BootstrapFile::new(path).check(), Ok(()));
    }
}
