//! Tests the program: its messages about bad input, and its exit.

#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::disallowed_methods)]

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

const GOOD: &str = "
- '@type': type.googleapis.com/envoy.config.cluster.v3.Cluster
  name: cart
";
const BROKEN: &str = "
- '@type': type.googleapis.com/envoy.config.cluster.v3.Cluster
  name: [cart
";

/// A running program with its output in a file. Dropping it kills it.
struct Program {
    process: Child,
    directory: TempDir,
}

impl Program {
    fn start(directory: TempDir, arguments: &[&str]) -> Self {
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_local-istiod"))
            .args(arguments)
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Self { process, directory }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    fn logs(&self, text: &str) {
        let found = (0..2000).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            self.log().contains(text)
        });
        assert!(found, "no {text:?} in {}", self.log());
    }

    fn ends(&mut self) -> (Option<i32>, String) {
        (self.process.wait().unwrap().code(), self.log())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill(); // The process may have ended already.
        let _ = self.process.wait();
    }
}

fn write(directory: &Path, text: &str) {
    let folder = directory.join("resources");
    std::fs::create_dir_all(&folder).unwrap();
    // A draft is renamed, so that the program never reads a half-written file.
    let draft = directory.join("draft");
    std::fs::write(&draft, text).unwrap();
    std::fs::rename(draft, folder.join("mesh.yaml")).unwrap();
}

fn with_resources(text: &str) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), text);
    directory
}

#[test]
fn a_syntax_error_is_reported_with_line_and_corrected_without_restart() {
    let mut istiod = Program::start(with_resources(GOOD), &["--resources", "resources"]);
    istiod.logs("local-istiod listening on 127.0.0.1:");
    write(istiod.directory.path(), BROKEN);
    istiod.logs("resources/mesh.yaml: line 3: unclosed bracket");
    let two = format!("{GOOD}{}", GOOD.replace("cart", "other-cart"));
    write(istiod.directory.path(), &two);
    istiod.logs("resources loaded: 2");
    let pid = istiod.process.id().to_string();
    let killed = Command::new("kill").arg(pid).status().unwrap();
    assert!(killed.success());
    let (code, log) = istiod.ends();
    assert_eq!(code, Some(0), "{log}");
}

#[test]
fn startup_errors_are_reported_in_one_sentence() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let in_use = format!("cannot listen on {address}: Address already in use");
    for (arguments, sentence) in [
        (["--listen", &address], in_use.as_str()),
        (["--resources", "nowhere"], "cannot read nowhere: No such file or directory"),
        (["--resources", "resources"], "resources/mesh.yaml: line "),
        (["--state", "log"], "log"),
        (["--identity", "cart"], "expected <namespace>/<service account>"),
    ] {
        let (code, log) = Program::start(with_resources(BROKEN), &arguments).ends();
        assert!(code > Some(0), "{arguments:?}: {code:?}");
        assert!(log.contains(sentence), "{arguments:?}: {log}");
        assert!(!log.contains('{'), "printed for debugging: {log}");
    }
}
