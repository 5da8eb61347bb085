//! Tests watches that the kernel refuses, and files that are read without a watch.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::files::file_watch::FileWatch;

/// Returns the secrets of `directory`. The test itself starts the watcher of `table`.
fn files_in(directory: &TempDir, table: Arc<Table>) -> Files {
    Files {
        config: Arc::new(Config {
            workload: None,
            system_roots: directory.path().join("system.pem"),
            debounce: Duration::ZERO,
        }),
        table,
        mesh: MeshBundle::default(),
        merged: Arc::default(),
        existed: [false; 2],
        own: Vec::new(),
    }
}

fn watcher(table: &Arc<Table>, open: fn() -> io::Result<FileWatch>) -> Watcher {
    let registry = Registry::default();
    let mut watcher = Watcher::new(table.clone(), Clock::system(), Duration::ZERO, &registry);
    watcher.open = open;
    watcher
}

fn refused() -> io::Result<FileWatch> {
    Err(io::Error::other("refused by the test"))
}

#[tokio::test(start_paused = true)]
async fn an_unwatchable_path_is_counted_once_and_read_again() {
    let fixture = empty();
    fixture.write("file", "no directory");
    let name = fixture.root("file/root.pem");
    let mut subscription = fixture.want(&[&name]);
    wait_for_problem(&mut subscription, &name).await;
    let failures = "istio_agent_num_file_watcher_failures_total 1\n";
    assert!(fixture.registry.render().contains(failures));
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(fixture.registry.render().contains(failures));
    fs::remove_file(fixture.path("file")).unwrap();
    fs::create_dir(fixture.path("file")).unwrap();
    write(&fixture.directory.path().join("file"), "root.pem", &generated().0);
    let before = tokio::time::Instant::now();
    wait_for_state(&mut subscription, &name, is_available).await;
    assert!(before.elapsed() <= Duration::from_secs(6));
}

#[tokio::test(start_paused = true)]
async fn optional_files_are_read_periodically_without_a_watch() {
    let directory = tempfile::tempdir().unwrap();
    let table = Arc::new(Table::default());
    let watcher = watcher(&table, refused);
    let files = files_in(&directory, table);
    let path = directory.path().join("system.pem");
    let _own = watcher.pin(Source::Roots(path), true);
    let mut tasks = JoinSet::new();
    let name = Name::SystemRoots;
    let mut subscription = Subscription::new(None, &files);
    subscription.want(BTreeSet::from([name.clone()]));
    tasks.spawn(watcher.run());
    wait_for_problem(&mut subscription, &name).await;
    write(directory.path(), "system.pem", &generated().0);
    wait_for_state(&mut subscription, &name, is_available).await;
}

#[tokio::test(start_paused = true)]
async fn a_watch_the_kernel_refuses_is_tried_again() {
    static REFUSED: AtomicBool = AtomicBool::new(false);
    let refused_once = || {
        if REFUSED.swap(true, Ordering::Relaxed) { FileWatch::new() } else { refused() }
    };
    let watcher = Arc::new(watcher(&Arc::default(), refused_once));
    let mut tasks = JoinSet::new();
    let running = watcher.clone();
    tasks.spawn(async move { running.watch_files().await });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(REFUSED.load(Ordering::Relaxed) && !watcher.is_watching());
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(watcher.is_watching());
}

#[tokio::test]
async fn the_files_in_use_are_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let files = files_in(&directory, Arc::default());
    let many = (0..table::MAX_SOURCES).map(|n| Name::FileRoot(n.to_string()));
    let mut greedy = Subscription::new(None, &files);
    greedy.want(many.collect());
    let mut late = Subscription::new(None, &files);
    late.want(BTreeSet::from([Name::SystemRoots]));
    let problem = wait_for_problem(&mut late, &Name::SystemRoots).await;
    assert_eq!(problem.code, Code::SecretFilesTooMany);
    assert!(problem.found.contains("10000 secrets are read"), "{problem}");
}

#[tokio::test(start_paused = true)]
async fn changes_missed_by_inotify_are_read_and_unused_files_forgotten() {
    let table = Arc::new(Table::default());
    let watcher = watcher(&table, refused);
    let directory = tempfile::tempdir().unwrap();
    let files = files_in(&directory, table.clone());
    let mut tasks = JoinSet::new();
    tasks.spawn(watcher.run());
    let mut subscription = Subscription::new(None, &files);
    subscription.want(BTreeSet::from([Name::SystemRoots]));
    let name = Name::SystemRoots;
    wait_for_problem(&mut subscription, &name).await;
    write(directory.path(), "system.pem", &generated().0);
    wait_for_state(&mut subscription, &name, is_available).await;
    tokio::time::sleep(Duration::from_secs(300)).await;
    drop(subscription);
    assert_eq!(table.entries().len(), 1);
    let before = tokio::time::Instant::now();
    while !table.entries().is_empty() {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let minute = Duration::from_secs(60);
    let took = before.elapsed();
    assert!((minute..=2 * minute + Duration::from_secs(2)).contains(&took), "{took:?}");
}
