//! Copies the configuration that another container of the pod has stored.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use tokio::task::spawn_blocking;

use super::file::{Index, file_name, open, temporary};
use super::{Config, DIRECTORY, TYPES};
use crate::files::directory::Directory;
use crate::files::regular_file::if_exists;

impl Config {
    /// Makes `own` the directory of stored configuration, and copies the configuration in the directory `former` into
    /// it. Both are directories of the volume. A failed copy is logged.
    pub async fn continue_in(&mut self, own: &str, former: Option<String>) {
        let (parent, max_bytes) = (self.volume.directory.clone(), self.max_bytes);
        self.volume.directory.push(own);
        let (name, path) = (own.to_owned(), self.volume.directory.clone());
        let copied = spawn_blocking(move || {
            Directory::private(&parent, &name, true)?;
            match former {
                Some(former) => copy(&parent.join(former), &path, max_bytes),
                None => Ok(()),
            }
        });
        let copied = copied.await.map_err(io::Error::other).and_then(|done| done);
        if let Err(error) = if_exists(copied) {
            let path = self.volume.directory.display();
            tracing::warn!(
                "configuration stored by the other container is not used: {path}: {error}"
            );
        }
    }
}

/// Replaces the files below `to` by copies of those below `from`. Fails if a reader would not use them, or if they have
/// more than `max_bytes`. Another container may write the files meanwhile, which appends to them or replaces them.
pub(super) fn copy(from: &Path, to: &Path, max_bytes: u64) -> io::Result<()> {
    let from = Directory::private(from, DIRECTORY, false)?;
    let to = Directory::private(to, DIRECTORY, true)?;
    let (mut found, mut size) = (BTreeMap::new(), 0_u64);
    for type_url in TYPES {
        if let Some((file, header)) = open(&from, type_url)? {
            size = size.saturating_add(header.size());
            found.insert(type_url, (file, header));
        }
    }
    if size > max_bytes {
        let found = format!("{size} bytes, expected at most {max_bytes}");
        return Err(io::Error::other(found));
    }
    for (type_url, (file, header)) in &found {
        let copy = to.create_file(&temporary(file_name(type_url)))?;
        Index::read(header.clone(), file.try_clone()?)?.copy_to(&copy)?;
    }
    for type_url in TYPES {
        let name = file_name(type_url);
        to.remove_file(name)?;
        if found.contains_key(type_url) {
            to.rename(&temporary(name), name)?;
        }
    }
    Ok(())
}
