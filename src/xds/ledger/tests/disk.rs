//! Tests the task that writes, on disks that fail, and files that others may have changed.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::process::Command;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::geteuid;

use super::*;

/// A file system in memory, which only root can mount.
struct Mount(tempfile::TempDir);

impl Mount {
    fn new(options: &str) -> Option<Self> {
        let mount = Self(tempfile::tempdir().unwrap());
        mount.mount(options).then_some(mount)
    }

    fn mount(&self, options: &str) -> bool {
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", options, "tmpfs"]);
        command.arg(self.0.path()).status().unwrap().success()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).output(); // It may not be mounted.
    }
}

/// A ledger with its task.
struct Agent {
    pod: Pod,
    shutdown: CancellationToken,
    writing: tokio::task::JoinHandle<()>,
}

impl Agent {
    async fn start(config: Config) -> Self {
        let shutdown = CancellationToken::new();
        let parent = config.volume.clone().unwrap().directory;
        let (ledger, writing) = Ledger::new(config, None, &Registry::default(), shutdown.clone());
        let writing = tokio::spawn(writing);
        let recorder = Recorder::new(ledger.envoy_cache(1, Protocol::Delta), 1);
        let pod = Pod { ledger, writer: Writer::new(parent), pid: 1, streams: 1, recorder };
        let agent = Self { pod, shutdown, writing };
        // The task reads the file.
        tokio::time::sleep(Duration::from_secs(1)).await;
        agent
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.writing.await.unwrap();
    }
}

#[tokio::test]
async fn changes_are_written_at_the_end_and_read_by_the_next_agent() {
    let parent = tempfile::tempdir().unwrap();
    let mut agent = Agent::start(config(parent.path())).await;
    agent.pod.accept_first(&resources(&[("a", "1")]));
    agent.stop().await;
    assert_eq!(in_file(parent.path()), resources(&[("a", "1")]));
    let agent = Agent::start(config(parent.path())).await;
    assert_eq!(agent.pod.stored(Type::CLUSTER), resources(&[("a", "1")]));
    assert!(agent.pod.ledger.snapshot().unwrap().contains_key(CLUSTER));
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn the_file_is_marked_current_each_hour_and_at_the_streams_end() {
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.accept_first(&resources(&[("a", "1")]));
    assert!(pod.write());
    let due = |pod: &Pod| pod.ledger.0.state.lock().write_due();
    let hour = Duration::from_secs(3600);
    assert_eq!(due(&pod), Some(tokio::time::Instant::now() + hour));
    advance(hour).await;
    assert!(pod.write());
    assert_eq!(due(&pod), Some(tokio::time::Instant::now() + hour));
    pod.recorder.stop();
    assert!(pod.write());
    assert_eq!(due(&pod), None);
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_costs_the_file_until_there_is_space() {
    let Some(mount) = Mount::new("size=2m") else {
        return;
    };
    let parent = mount.0.path();
    let large = || {
        let random = std::iter::repeat_with(|| fastrand::char(' '..'~'));
        resources(&[("a", &random.take(4 << 20).collect::<String>())])
    };
    let mut pod = Pod::start(parent);
    pod.accept_first(&large());
    let write = |pod: &mut Pod| {
        let mut state = pod.ledger.0.state.lock();
        let batch = state.take_batch(false).expect("a batch");
        let written = pod.writer.write(&batch).map(|length| (batch.record, length));
        state.conclude(written)
    };
    assert!(write(&mut pod).is_some());
    assert_eq!(fs::read_dir(parent.join(DIRECTORY)).unwrap().count(), 0);
    assert!(mount.mount("remount,size=100m"));
    assert!(write(&mut pod).is_none());
    assert_eq!(in_file(parent), pod.stored(Type::CLUSTER));
    drop(pod);
    // The file of an earlier agent stays on a disk that has become read-only.
    assert!(mount.mount("remount,ro"));
    let before = in_file(parent);
    let mut pod = Pod::start(parent);
    pod.accept_first(&resources(&[("a", "2")]));
    assert!(write(&mut pod).is_some());
    assert!(in_file(parent) == before);
}

#[tokio::test(start_paused = true)]
async fn files_that_other_users_can_write_and_links_are_not_used() {
    type Change = fn(&Path);
    let changes: [Change; 5] = [
        |file| mknodat(CWD, file, FileType::Fifo, Mode::RWXU, 0).unwrap(),
        |file| symlink("/etc/passwd", file).unwrap(),
        |file| fs::create_dir(file).unwrap(),
        |file| {
            fs::write(file, "forged").unwrap();
            fs::set_permissions(file, fs::Permissions::from_mode(0o644)).unwrap();
        },
        |file| {
            fs::write(file, "forged").unwrap();
            fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap();
            if geteuid().is_root() {
                chown(file, Some(12345), None).unwrap();
            }
        },
    ];
    for change in changes {
        let parent = tempfile::tempdir().unwrap();
        let mut pod = Pod::start(parent.path());
        pod.accept_first(&resources(&[("a", "1")]));
        assert!(pod.write());
        let path = parent.path().join(DIRECTORY).join(FILE);
        fs::remove_file(&path).unwrap();
        change(&path);
        assert!(file::read(parent.path(), u64::MAX).is_err());
        assert!(!Pod::start(parent.path()).ledger.0.state.lock().can_serve());
    }
}

#[tokio::test(start_paused = true)]
async fn a_container_continues_with_what_the_other_one_has_stored() {
    let volume = tempfile::tempdir().unwrap();
    let directory = |container: &str| volume.path().join(container);
    for container in ["own", "other"] {
        let mut config = config(volume.path());
        config.continue_in(container, None);
        let mut pod = Pod::with(config);
        pod.accept_first(&resources(&[("a", container)]));
        assert!(pod.write());
    }
    for (former, expected) in [(Some("other"), "other"), (Some("missing"), "own"), (None, "own")] {
        let mut config = config(volume.path());
        config.continue_in("own", former.map(str::to_owned));
        let pod = Pod::with(config);
        assert_eq!(pod.stored(Type::CLUSTER), resources(&[("a", expected)]), "{former:?}");
    }
    let mut config = config(volume.path());
    config.continue_in("own", Some("other".to_owned()));
    let mut pod = Pod::with(config);
    pod.accept_first(&resources(&[("a", "new")]));
    assert!(pod.write());
    assert_eq!(in_file(&directory("own")), resources(&[("a", "new")]));
    assert_eq!(in_file(&directory("other")), resources(&[("a", "other")]));
}

#[tokio::test(start_paused = true)]
async fn names_in_stored_files_are_never_used_as_paths() {
    let parent = tempfile::tempdir().unwrap();
    let outside = parent.path().join("outside");
    fs::write(&outside, "untouched").unwrap();
    let names = [outside.to_str().unwrap(), "../outside", "/dev/zero", "../.."];
    let mut pod = Pod::start(parent.path());
    let all = names.map(|name| (name, name));
    pod.accept_first(&resources(&all));
    assert!(pod.write());
    let pod = Pod::start(parent.path());
    assert_eq!(pod.stored(Type::CLUSTER), resources(&all));
    assert_eq!(fs::read_to_string(&outside).unwrap(), "untouched");
    let directory = fs::read_dir(parent.path().join(DIRECTORY)).unwrap();
    assert_eq!(directory.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_name_table_that_arrives_during_another_message_is_stored_as_well() {
    const TABLE: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";
    let table = Type::of(TABLE).unwrap();
    let parent = tempfile::tempdir().unwrap();
    let mut pod = Pod::start(parent.path());
    pod.subscribe_all();
    let clusters = resources(&[("a", "1"), ("b", "2")]);
    let response = Pod::response(Type::CLUSTER, "1", &clusters, &[]);
    for content in ["1", "2"] {
        let names = resources(&[(content, content)]);
        let message = Pod::response(table, "1", &names, &[]).slice(HEAD..);
        pod.recorder.begin_response(CLUSTER, (response.len() - HEAD) as u64);
        pod.recorder.record_bytes(&response.slice(..20));
        pod.recorder.record_message(&Pod::received(table, "1"), &message, true);
        pod.recorder.record_bytes(&response.slice(20..));
        pod.recorder.complete_response(&Pod::received(Type::CLUSTER, "1"), None);
        pod.ack(Type::CLUSTER, "1");
        assert_eq!(pod.stored(Type::CLUSTER), clusters);
        // A name table has all names.
        assert_eq!(pod.stored(table), names);
    }
}
