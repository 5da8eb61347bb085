//! Tests that certificates are renewed when they become due, or expire, because the wall clock is set.
//!
//! All programs of a machine share its clock, so the test starts itself again on its own kernel, User Mode Linux
//! (Debian's package `user-mode-linux`), which can read the machine's files and cannot change them. Without this
//! kernel, the test reports this and is not run; if `CLOCK_TESTS` is set, it fails.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};

use crate::support::place::{Place, TOKEN};
use crate::support::{PATIENCE, ask_for_secrets, local_istiod, next_response, restarted};

const TEST: &str = "conformance::wall_clock::a_clock_that_is_set_renews_what_is_due_within_5_s";
const INSIDE: &str = "ISTIO_AGENT_TEST_INSIDE";
const KERNEL: &str = "/usr/bin/linux.uml";

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;
const RENEWAL_LIMIT: Duration = Duration::from_secs(5);

#[tokio::test]
async fn a_clock_that_is_set_renews_what_is_due_within_5_s() {
    if !is_on_own_kernel() {
        return;
    }
    let istiod = restarted(local_istiod().await, |options| {
        options.max_cert_ttl = Duration::from_secs(5400);
    })
    .await;
    let place = Place::with_envoy(&istiod);
    let token = istiod.mint_token("default", "bench", Duration::from_secs(86_400)).unwrap();
    place.write(TOKEN, token);
    // A machine without a clock battery starts with a time before its certificates are valid.
    set_by(-DAY);
    let agent = place.start().await;
    let mut envoy = ask_for_secrets(&place, &["default"]).await;
    agent.logs("ISTIOD_CERTIFICATE_NOT_YET_VALID").await;
    let mut served = Vec::new();
    for (what, by) in [("true again", DAY), ("due", HOUR), ("over", 2 * HOUR)] {
        set_by(by);
        let next = tokio::time::timeout(RENEWAL_LIMIT, next_response(&mut envoy));
        let next = next.await.unwrap_or_else(|_| panic!("{what}, not renewed"));
        assert!(next.resources != served, "{what}: the same was pushed twice");
        served = next.resources;
    }
    assert_eq!(istiod.certificates_signed(), 3);
}

fn set_by(seconds: i64) {
    assert!(is_user_mode(), "the clock of a machine is not ours to set");
    let now = clock_gettime(ClockId::Realtime);
    let then = Timespec { tv_sec: now.tv_sec + seconds, ..now };
    clock_settime(ClockId::Realtime, then).unwrap();
}

fn is_user_mode() -> bool {
    std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("User Mode Linux"))
}

/// Returns true if the test runs on its own kernel. Otherwise, runs the test there, and fails if it fails there.
fn is_on_own_kernel() -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let folder = tempfile::tempdir().unwrap();
    let said = run_inside(folder.path());
    eprintln!("{said}");
    if said.contains("running 1 test") {
        assert!(said.contains("1 passed"), "{TEST} fails inside");
    } else {
        let sentence = format!("A clock of its own takes {KERNEL}, and the right to run it.");
        assert!(std::env::var_os("CLOCK_TESTS").is_none(), "{sentence}");
        eprintln!("{sentence} This test is not run.");
    }
    false
}

/// Starts the kernel, which runs nothing but this test, and returns the output of both.
fn run_inside(folder: &Path) -> String {
    let init = folder.join("init");
    let test = std::env::current_exe().unwrap();
    let agent = std::env::var("AGENT_BIN");
    let script = format!(
        "#!/bin/sh\n\
         mount -t proc proc /proc && ip link set lo up\n\
         mkdir -p /dev/shm && mount -t tmpfs tmpfs /dev/shm && export TMPDIR=/dev/shm\n\
         {} {INSIDE}=1 '{}' --exact {TEST} --nocapture 2>&1\n\
         poweroff -f\n",
        agent.map_or_else(|_| String::new(), |agent| format!("AGENT_BIN='{agent}'")),
        test.display(),
    );
    std::fs::write(&init, script).unwrap();
    std::fs::set_permissions(&init, Permissions::from_mode(0o755)).unwrap();
    let output = Command::new("timeout")
        .arg((2 * PATIENCE.as_secs()).to_string())
        .args([KERNEL, "root=/dev/root", "rootfstype=hostfs", "rootflags=/"])
        .args(["ro", "mem=512M", "quiet", "con=null", "con0=null,fd:1"])
        .arg(format!("init={}", init.display()))
        // The kernel has a socket in its home directory.
        .env("HOME", folder)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&said).into_owned()
}
