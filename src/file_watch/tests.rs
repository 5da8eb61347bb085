use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

use super::*;

async fn notices(watch: &mut FileWatch, path: &Path, what: &str) {
    let changed = tokio::time::timeout(Duration::from_secs(10), watch.changed()).await;
    let changed = changed.expect(what).expect("is read");
    let expected = Changed::Paths(BTreeSet::from([path.to_owned()]));
    assert_eq!(changed, expected, "{what}");
    // More of the same may come.
    while let Ok(more) = tokio::time::timeout(Duration::from_millis(1), watch.changed()).await {
        assert_eq!(more.expect("is read"), expected);
    }
    watch.watch(path).expect("is watched");
}

#[tokio::test]
async fn notices_every_way_to_change_a_plain_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("cert.pem");
    let mut watch = FileWatch::new().unwrap();
    watch.watch(&path).unwrap();
    fs::write(&path, "one").unwrap();
    notices(&mut watch, &path, "that it is made").await;
    fs::write(&path, "two").unwrap();
    notices(&mut watch, &path, "that it is written").await;
    let draft = directory.path().join("draft");
    fs::write(&draft, "three").unwrap();
    fs::rename(draft, &path).unwrap();
    notices(&mut watch, &path, "that it is renamed over").await;
    fs::remove_file(&path).unwrap();
    notices(&mut watch, &path, "that it is removed").await;
    fs::write(directory.path().join("other"), "").unwrap();
    let silence = tokio::time::timeout(Duration::from_millis(20), watch.changed());
    assert!(
        silence.await.is_err(),
        "another file is no business of ours"
    );
}

#[tokio::test]
async fn notices_rotations_as_the_kubelet_makes_them_again_and_again() {
    let directory = tempfile::tempdir().unwrap();
    let mount = directory.path().join("mount");
    fs::create_dir_all(mount.join("..0")).unwrap();
    fs::write(mount.join("..0/cert.pem"), "0").unwrap();
    symlink("..0", mount.join("..data")).unwrap();
    symlink("..data/cert.pem", mount.join("cert.pem")).unwrap();
    // Some drivers have a link to the link, elsewhere.
    let path = directory.path().join("cert.pem");
    symlink(mount.join("cert.pem"), &path).unwrap();
    let mut watch = FileWatch::new().unwrap();
    watch.watch(&path).unwrap();
    for turn in 1..5 {
        let (old, new) = (format!("..{}", turn - 1), format!("..{turn}"));
        fs::create_dir(mount.join(&new)).unwrap();
        fs::write(mount.join(&new).join("cert.pem"), turn.to_string()).unwrap();
        symlink(&new, mount.join("..tmp")).unwrap();
        fs::rename(mount.join("..tmp"), mount.join("..data")).unwrap();
        notices(&mut watch, &path, &new).await;
        fs::remove_dir_all(mount.join(old)).unwrap();
    }
    assert!(watch.directories.len() <= 3, "{:?}", watch.directories);
    watch.unwatch(&path);
    assert!(watch.directories.is_empty() && watch.by_descriptor.is_empty());
}

#[tokio::test]
async fn notices_a_file_whose_directories_are_made_later() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a/b/cert.pem");
    let mut watch = FileWatch::new().unwrap();
    watch.watch(&path).unwrap();
    fs::create_dir(directory.path().join("a")).unwrap();
    notices(&mut watch, &path, "the first").await;
    fs::create_dir(directory.path().join("a/b")).unwrap();
    notices(&mut watch, &path, "the second").await;
    fs::write(&path, "").unwrap();
    notices(&mut watch, &path, "the file").await;
    fs::remove_dir_all(directory.path().join("a")).unwrap();
    notices(&mut watch, &path, "the end").await;
}

#[tokio::test]
async fn what_happens_between_a_walk_and_its_end_is_not_missed() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let mut watch = FileWatch::new().unwrap();
    watch.watch(&path("known")).unwrap();
    for (name, what) in [("a", "known directory"), ("new/b", "unknown directory")] {
        fs::create_dir_all(path("new")).unwrap();
        let walked = watch.walker().walk(&path(name));
        fs::write(path(name), "").unwrap();
        fs::write(path("known"), name).unwrap();
        notices(&mut watch, &path("known"), "the event behind").await;
        let mut changed = BTreeSet::new();
        watch.take(walked, &mut changed).unwrap();
        assert!(changed.contains(&path(name)), "{what}");
        // The next walk begins after it.
        let walked = watch.walker().walk(&path(name));
        let mut changed = BTreeSet::new();
        watch.take(walked, &mut changed).unwrap();
        assert!(changed.is_empty(), "{what}: {changed:?}");
    }
}

#[tokio::test]
async fn what_another_path_passes_as_well_is_not_missed_either() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    for version in ["v1", "v2"] {
        fs::create_dir(path(version)).unwrap();
        for name in ["known", "other"] {
            fs::write(path(version).join(name), version).unwrap();
        }
    }
    symlink("v1", path("current")).unwrap();
    let mut watch = FileWatch::new().unwrap();
    watch.watch(&path("current/known")).unwrap();
    let walked = watch.walker().walk(&path("current/other"));
    symlink("v2", path("next")).unwrap();
    fs::rename(path("next"), path("current")).unwrap();
    notices(&mut watch, &path("current/known"), "the other path").await;
    let mut changed = BTreeSet::new();
    watch.take(walked, &mut changed).unwrap();
    assert!(changed.contains(&path("current/other")), "{changed:?}");
}

#[tokio::test]
async fn after_more_events_than_the_kernel_holds_all_is_watched_anew() {
    let directory = tempfile::tempdir().unwrap();
    let [one, other] = ["one", "other"].map(|name| directory.path().join(name));
    let mut watch = FileWatch::new().unwrap();
    watch.watch(&one).unwrap();
    let most = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
    let walked = watch.walker().walk(&one);
    // Two that follow each other and are the same count once.
    for _ in 0..most.trim().parse::<usize>().unwrap() {
        for path in [&one, &other] {
            let file = fs::File::create(path).unwrap();
            drop(file);
        }
    }
    assert_eq!(watch.changed().await.unwrap(), Changed::Anything);
    let mut changed = BTreeSet::new();
    watch.take(walked, &mut changed).unwrap();
    assert!(changed.contains(&one), "the walk was of the old queue");
    watch.watch(&one).unwrap();
    fs::write(&one, "again").unwrap();
    notices(&mut watch, &one, "a change afterwards").await;
}

#[tokio::test]
async fn links_in_a_circle_are_watched_and_do_no_harm() {
    let directory = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| directory.path().join(name));
    symlink(&b, &a).unwrap();
    symlink(&a, &b).unwrap();
    let mut watch = FileWatch::new().unwrap();
    watch.watch(&a).unwrap();
    fs::remove_file(&b).unwrap();
    notices(&mut watch, &a, "the end of the circle").await;
}
