use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

use super::*;

fn directories(watch: &FileWatch) -> usize {
    watch.watched.lock().directories.len()
}

async fn assert_change_is_reported(watch: &FileWatch, path: &Path, what: &str) {
    let changed = tokio::time::timeout(Duration::from_secs(10), watch.changed()).await;
    let changed = changed.expect(what).expect("is read");
    let expected = BTreeSet::from([path.to_owned()]);
    assert_eq!(changed, expected, "{what}");
    // The same change may be reported more than once.
    while let Ok(more) = tokio::time::timeout(Duration::from_millis(1), watch.changed()).await {
        assert_eq!(more.expect("is read"), expected);
    }
    watch.watch(path).expect("is watched");
}

#[tokio::test]
async fn notices_every_way_to_change_a_plain_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("cert.pem");
    let watch = FileWatch::new().unwrap();
    watch.watch(&path).unwrap();
    fs::write(&path, "one").unwrap();
    assert_change_is_reported(&watch, &path, "that it is made").await;
    fs::write(&path, "two").unwrap();
    assert_change_is_reported(&watch, &path, "that it is written").await;
    let draft = directory.path().join("draft");
    fs::write(&draft, "three").unwrap();
    fs::rename(draft, &path).unwrap();
    assert_change_is_reported(&watch, &path, "that it is renamed over").await;
    fs::remove_file(&path).unwrap();
    assert_change_is_reported(&watch, &path, "that it is removed").await;
    fs::write(directory.path().join("other"), "").unwrap();
    let silence = tokio::time::timeout(Duration::from_millis(20), watch.changed());
    assert!(silence.await.is_err(), "another file is not reported");
}

#[tokio::test]
async fn notices_rotations_as_the_kubelet_makes_them_again_and_again() {
    let directory = tempfile::tempdir().unwrap();
    let mount = directory.path().join("mount");
    fs::create_dir_all(mount.join("..0")).unwrap();
    fs::write(mount.join("..0/cert.pem"), "0").unwrap();
    symlink("..0", mount.join("..data")).unwrap();
    symlink("..data/cert.pem", mount.join("cert.pem")).unwrap();
    // Some volume drivers have another link to this link, in another directory.
    let path = directory.path().join("cert.pem");
    symlink(mount.join("cert.pem"), &path).unwrap();
    let watch = FileWatch::new().unwrap();
    watch.watch(&path).unwrap();
    for turn in 1..5 {
        let (old, new) = (format!("..{}", turn - 1), format!("..{turn}"));
        fs::create_dir(mount.join(&new)).unwrap();
        fs::write(mount.join(&new).join("cert.pem"), turn.to_string()).unwrap();
        symlink(&new, mount.join("..tmp")).unwrap();
        fs::rename(mount.join("..tmp"), mount.join("..data")).unwrap();
        assert_change_is_reported(&watch, &path, &new).await;
        fs::remove_dir_all(mount.join(old)).unwrap();
    }
    assert!(directories(&watch) <= 3);
    watch.unwatch(&path);
    assert!(directories(&watch) == 0);
}

#[tokio::test]
async fn notices_a_file_whose_directories_are_made_later() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a/b/cert.pem");
    let watch = FileWatch::new().unwrap();
    watch.watch(&path).unwrap();
    fs::create_dir(directory.path().join("a")).unwrap();
    assert_change_is_reported(&watch, &path, "the first").await;
    fs::create_dir(directory.path().join("a/b")).unwrap();
    assert_change_is_reported(&watch, &path, "the second").await;
    fs::write(&path, "").unwrap();
    assert_change_is_reported(&watch, &path, "the file").await;
    fs::remove_dir_all(directory.path().join("a")).unwrap();
    assert_change_is_reported(&watch, &path, "the end").await;
}

/// Watches the path before each read, while another thread replaces the link all the time.
#[tokio::test]
async fn no_change_of_a_link_is_missed_while_its_path_is_watched() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    for turn in 0..20 {
        fs::create_dir(path(&format!("v{turn}"))).unwrap();
        fs::write(path(&format!("v{turn}")).join("file"), turn.to_string()).unwrap();
    }
    symlink("v0", path("current")).unwrap();
    let watch = std::sync::Arc::new(FileWatch::new().unwrap());
    let (watching, followed) = (watch.clone(), path("current/file"));
    let read = move || {
        watching.watch(&followed).unwrap();
        fs::read_to_string(&followed).unwrap()
    };
    let mut last = read();
    let (next, current) = (path("next"), path("current"));
    let rotating = std::thread::spawn(move || {
        for turn in 1..20 {
            symlink(format!("v{turn}"), &next).unwrap();
            fs::rename(&next, &current).unwrap();
        }
    });
    while last != "19" {
        let changed = tokio::time::timeout(Duration::from_secs(10), watch.changed());
        changed.await.expect("no change is missed").expect("is read");
        last = read();
    }
    rotating.join().unwrap();
    // The file of the last version is watched, too: once no change is pending, a write to it is
    // noticed.
    while tokio::time::timeout(Duration::from_millis(1), watch.changed()).await.is_ok() {
        read();
    }
    fs::write(path("v19/file"), "written").unwrap();
    assert_change_is_reported(&watch, &path("current/file"), "a write behind the last link").await;
}

#[tokio::test]
async fn paths_watched_and_unwatched_by_several_threads_stay_watched() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let watch = FileWatch::new().unwrap();
    std::thread::scope(|threads| {
        for name in ["a", "b", "c"] {
            let (watch, path) = (&watch, path(name));
            threads.spawn(move || {
                for _ in 0..200 {
                    watch.unwatch(&path);
                    watch.watch(&path).unwrap();
                }
            });
        }
    });
    // No file has been written, but a watch that has ended is reported as a change; its path is watched
    // again.
    while let Ok(changed) = tokio::time::timeout(Duration::from_millis(1), watch.changed()).await {
        let paths = changed.expect("is read");
        paths.iter().for_each(|path| watch.watch(path).unwrap());
    }
    for name in ["a", "b", "c"] {
        fs::write(path(name), "").unwrap();
        assert_change_is_reported(&watch, &path(name), name).await;
    }
}

#[tokio::test]
async fn after_an_inotify_queue_overflow_every_file_counts_as_changed() {
    let directory = tempfile::tempdir().unwrap();
    let [one, other] = ["one", "other"].map(|name| directory.path().join(name));
    let watch = FileWatch::new().unwrap();
    watch.watch(&one).unwrap();
    let most = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
    // The kernel merges consecutive events that are equal, so the events of two files alternate.
    for _ in 0..most.trim().parse::<usize>().unwrap() {
        for path in [&one, &other] {
            let file = fs::File::create(path).unwrap();
            drop(file);
        }
    }
    assert_eq!(watch.changed().await.unwrap(), [one.clone()].into());
    watch.watch(&one).unwrap();
    fs::write(&one, "again").unwrap();
    assert_change_is_reported(&watch, &one, "a change afterwards").await;
}

#[tokio::test]
async fn links_in_a_circle_are_watched_and_do_no_harm() {
    let directory = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| directory.path().join(name));
    symlink(&b, &a).unwrap();
    symlink(&a, &b).unwrap();
    let watch = FileWatch::new().unwrap();
    watch.watch(&a).unwrap();
    fs::remove_file(&b).unwrap();
    assert_change_is_reported(&watch, &a, "the end of the circle").await;
}

#[test]
fn the_walk_visits_symbolic_links_and_their_targets_and_no_plain_directories() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    fs::create_dir_all(root.join("plain/..1")).unwrap();
    fs::write(root.join("plain/..1/key"), "").unwrap();
    symlink("..1", root.join("plain/..data")).unwrap();
    symlink("..data/key", root.join("plain/key")).unwrap();
    symlink("plain/../plain/key", root.join("alias")).unwrap();
    let visited = |path: &str| {
        let mut visited = Vec::new();
        walk(&root.join(path), |directory, name| {
            let path = directory.join(name);
            visited.push(path.strip_prefix(&root).unwrap().to_owned());
        });
        visited
    };
    let expected = ["alias", "plain/key", "plain/..data", "plain/..1/key"];
    assert_eq!(visited("alias"), expected.map(PathBuf::from));
    assert_eq!(visited("plain/..1/key"), [PathBuf::from("plain/..1/key")]);
    assert_eq!(visited("plain/none/key"), [PathBuf::from("plain/none")]);
}
