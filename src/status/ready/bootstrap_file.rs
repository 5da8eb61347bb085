//! Checks that the bootstrap of gRPC applications exists, and the certificate files it names.
//!
//! The bootstrap is read until it could be read once; the certificate files must exist at each check.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;

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
        let files = OnceLock::new();
        Self { path, files }
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let files = match self.files.get() {
            Some(files) => files,
            None => {
                let files = certificate_files(&self.path)?;
                self.files.get_or_init(|| files)
            }
        };
        if let Some(path) = files.iter().find(|path| !path.exists()) {
            return Err(format!("{} does not exist", path.display()));
        }
        Ok(())
    }
}

fn certificate_files(path: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |error: io::Error| format!("failed loading {}: {error}", path.display());
    let text = regular_file::read(path, MAX_SETTINGS).map_err(failed)?;
    let document: Value = serde_json::from_slice(&text).map_err(|error| failed(error.into()))?;
    let members = document["certificate_providers"].as_object();
    let providers = members.into_iter().flat_map(|members| members.values());
    let watchers = providers.filter(|provider| provider["plugin_name"] == "file_watcher");
    let configs = watchers.map(|watcher| &watcher["config"]);
    let files = configs.flat_map(|config| FILES.map(|name| config[name].as_str()));
    Ok(files.flatten().map(PathBuf::from).collect())
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
        let missing = file.check().expect_err("no file");
        assert!(missing.starts_with(&unreadable), "{missing}");
        std::fs::write(&path, "{").expect("written");
        let missing = file.check().expect_err("no JSON");
        assert!(missing.starts_with(&unreadable), "{missing}");

        let names = FILES.map(|name| directory.path().join(name));
        let mut config = serde_json::Map::new();
        for (member, path) in FILES.iter().zip(&names) {
            config.insert((*member).to_owned(), json!(path));
        }
        let provider = json!({ "plugin_name": "file_watcher", "config": config });
        let document = json!({ "certificate_providers": { "default": provider } });
        std::fs::write(&path, document.to_string()).expect("written");
        let missing = |path: &Path| Err(format!("{} does not exist", path.display()));
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
