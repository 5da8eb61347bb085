//! The resources that discovery serves, by folder, type and name. They are read again when a file
//! changes.
//!
//! Every node gets the resources in `common`, the resources next to the folders, and the resources in
//! the folders named after the node. If the folder cannot be read, the resources that were read before
//! stay in force.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;

use super::event::{Event, Events};
use super::resource::{self, Resource, ResourceError};

const COMMON: &str = "common";
const POLL: Duration = Duration::from_millis(200);

/// Resources by type URL and name.
pub(super) type Resources = BTreeMap<String, BTreeMap<String, Arc<Resource>>>;

/// All resources, by folder.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    folders: BTreeMap<String, Resources>,
}

/// The reason why a folder is not a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error("cannot read {path}: {source}", path = .path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{path}: {source}", path = .path.display())]
    Resource { path: PathBuf, source: ResourceError },
    #[error("{path}: {type_url} {name:?} is there twice", path = .path.display())]
    Twice { path: PathBuf, type_url: String, name: String },
    #[error("reading was interrupted")]
    Interrupted,
}

impl Snapshot {
    /// Adds or replaces a resource, and returns the replaced one. Every node gets the folder `common`.
    pub fn insert(&mut self, folder: &str, resource: Resource) -> Option<Arc<Resource>> {
        let folder = self.folders.entry(folder.to_owned()).or_default();
        let of_type = folder.entry(resource.any.type_url.clone()).or_default();
        of_type.insert(resource.name.clone(), Arc::new(resource))
    }

    /// Returns the resources of a node with these names. If several folders have the same resource, the
    /// folder of the last name takes precedence.
    pub(super) fn of_node<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Resources {
        let mut all = Resources::new();
        for name in std::iter::once(COMMON).chain(names) {
            for (type_url, resources) in self.folders.get(name).into_iter().flatten() {
                let of_type = all.entry(type_url.clone()).or_default();
                of_type.extend(resources.clone());
            }
        }
        all
    }

    fn len(&self) -> usize {
        let types = self.folders.values().flat_map(BTreeMap::values);
        types.map(BTreeMap::len).sum()
    }
}

/// Reads `folder` now, and again whenever a file in it has changed, for as long as the returned future
/// runs.
pub async fn follow(
    folder: PathBuf,
    events: Events,
) -> Result<(watch::Receiver<Arc<Snapshot>>, impl Future<Output = ()> + Send), SnapshotError> {
    let files = blocking(&folder, list).await?;
    let snapshot = load(&folder, &files, &events).await?;
    let (sender, receiver) = watch::channel(Arc::new(snapshot));
    Ok((receiver, poll(folder, events, files, sender)))
}

async fn poll(
    folder: PathBuf,
    events: Events,
    mut read: Files,
    sender: watch::Sender<Arc<Snapshot>>,
) {
    let mut last = read.clone();
    let mut reported = None;
    loop {
        tokio::time::sleep(POLL).await;
        let outcome = match blocking(&folder, list).await {
            // Unchanged, or still being written: an editor may truncate a file before it fills it.
            Ok(files) if files == read || files != last => {
                last = files;
                continue;
            }
            Ok(files) => {
                read = files;
                load(&folder, &read, &events).await
            }
            Err(error) => Err(error),
        };
        match outcome {
            Ok(snapshot) => {
                reported = None;
                sender.send_replace(Arc::new(snapshot));
            }
            Err(error) => {
                // A reason is reported once, not with every poll.
                let reason = error.to_string();
                if reported.replace(reason.clone()).as_ref() != Some(&reason) {
                    let folder = folder.clone();
                    events.report(Event::LoadFailed { folder, reason });
                }
            }
        }
    }
}

/// The files of a folder with their times and sizes. If any of them changes, the snapshot has changed.
type Files = Vec<(PathBuf, SystemTime, u64)>;

async fn load(folder: &Path, files: &Files, events: &Events) -> Result<Snapshot, SnapshotError> {
    let files = files.clone();
    let snapshot = blocking(folder, move |folder| read(folder, &files)).await?;
    let resources = snapshot.len();
    events.report(Event::Loaded { resources });
    Ok(snapshot)
}

async fn blocking<T: Send + 'static>(
    folder: &Path,
    work: impl FnOnce(&Path) -> Result<T, SnapshotError> + Send + 'static,
) -> Result<T, SnapshotError> {
    let folder = folder.to_owned();
    let working = tokio::task::spawn_blocking(move || work(&folder));
    working.await.unwrap_or(Err(SnapshotError::Interrupted))
}

fn list(folder: &Path) -> Result<Files, SnapshotError> {
    let mut files = Vec::new();
    for entry in entries(folder)? {
        if entry.is_dir() {
            for path in entries(&entry)? {
                add_file(path, &mut files)?;
            }
        } else {
            add_file(entry, &mut files)?;
        }
    }
    files.sort();
    Ok(files)
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, SnapshotError> {
    let entries = fs::read_dir(folder).map_err(unreadable(folder))?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    paths.collect::<Result<_, _>>().map_err(unreadable(folder))
}

fn add_file(path: PathBuf, files: &mut Files) -> Result<(), SnapshotError> {
    let extension = path.extension().and_then(|extension| extension.to_str());
    if matches!(extension, Some("yaml" | "yml" | "json")) {
        let metadata = fs::metadata(&path).map_err(unreadable(&path))?;
        let changed = metadata.modified().map_err(unreadable(&path))?;
        files.push((path, changed, metadata.len()));
    }
    Ok(())
}

fn read(folder: &Path, files: &Files) -> Result<Snapshot, SnapshotError> {
    let mut snapshot = Snapshot::default();
    for (path, ..) in files {
        let text = fs::read_to_string(path).map_err(unreadable(path))?;
        let resources = resource::parse(&text)
            .map_err(|source| SnapshotError::Resource { path: path.clone(), source })?;
        let name = path.parent().filter(|parent| *parent != folder);
        let node = name.and_then(Path::file_name).and_then(OsStr::to_str);
        for resource in resources {
            if let Some(twice) = snapshot.insert(node.unwrap_or(COMMON), resource) {
                return Err(SnapshotError::Twice {
                    path: path.clone(),
                    type_url: twice.any.type_url.clone(),
                    name: twice.name.clone(),
                });
            }
        }
    }
    Ok(snapshot)
}

fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> SnapshotError {
    move |source| SnapshotError::Io { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";

    fn cluster(name: &str, timeout: u32) -> String {
        format!("{{\"@type\": {CLUSTER}, name: {name}, connect_timeout: {timeout}s}}")
    }

    #[tokio::test]
    async fn a_node_gets_the_common_resources_and_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("cart");
        fs::create_dir(&own).unwrap();
        fs::write(folder.path().join("a.yaml"), cluster("a", 1)).unwrap();
        fs::write(own.join("b.yaml"), cluster("b", 1)).unwrap();
        fs::write(own.join("note.txt"), "no resource").unwrap();
        let (snapshots, _) = follow(folder.path().into(), Events::default()).await.unwrap();
        let snapshot = snapshots.borrow().clone();
        let names =
            |node| -> Vec<_> { snapshot.of_node([node])[CLUSTER].keys().cloned().collect() };
        assert_eq!(names("cart"), ["a", "b"]);
        assert_eq!(names("other"), ["a"]);
    }

    #[tokio::test(start_paused = true)]
    async fn keeps_the_last_good_resources_and_names_file_and_line() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.yaml");
        fs::write(&file, cluster("a", 1)).unwrap();
        let (sender, mut events) = mpsc::unbounded_channel();
        let (mut snapshots, polling) =
            follow(folder.path().into(), Events::to(sender)).await.unwrap();
        let script = async {
            assert_eq!(events.recv().await, Some(Event::Loaded { resources: 1 }));
            fs::write(&file, "\n\nname: [").unwrap();
            let Some(Event::LoadFailed { reason, .. }) = events.recv().await else {
                panic!("expected a failure");
            };
            assert!(reason.contains("a.yaml: line 3"), "{reason}");
            assert!(!snapshots.has_changed().unwrap());
            // A half-written file, which an editor leaves for a moment, is not loaded.
            fs::write(&file, "").unwrap();
            tokio::time::sleep(POLL / 2).await;
            fs::write(&file, cluster("other", 30)).unwrap();
            snapshots.changed().await.unwrap();
            let now = snapshots.borrow().of_node([]);
            assert!(now[CLUSTER].contains_key("other"));
        };
        tokio::select! {
            () = polling => {}
            () = script => {}
        }
    }

    #[tokio::test]
    async fn refuses_two_resources_of_one_name_and_a_missing_folder() {
        let folder = tempfile::tempdir().unwrap();
        for file in ["a.yaml", "b.yaml"] {
            fs::write(folder.path().join(file), cluster("same", 1)).unwrap();
        }
        let twice = follow(folder.path().into(), Events::default()).await;
        assert!(matches!(twice.map(|_| ()), Err(SnapshotError::Twice { .. })));
        let missing = follow(folder.path().join("none"), Events::default()).await;
        assert!(matches!(missing.map(|_| ()), Err(SnapshotError::Io { .. })));
    }
}
