//! The local control plane's own program: what it says of bad input, and how it ends.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::support::child::{Child, binary};

const GOOD: &str = "
- '@type': type.googleapis.com/envoy.config.cluster.v3.Cluster
  name: cart
";
const BROKEN: &str = "
- '@type': type.googleapis.com/envoy.config.cluster.v3.Cluster
  name: [cart
";

fn start(directory: &TempDir, arguments: &[&str]) -> Child {
    let built = option_env!("CARGO_BIN_EXE_local-istiod");
    let mut command = Command::new(binary("LOCAL_ISTIOD_BIN", built));
    command.args(arguments).current_dir(directory.path());
    Child::start(command, directory.path().join("log"))
}

fn write(directory: &TempDir, text: &str) {
    let folder = directory.path().join("resources");
    std::fs::create_dir_all(&folder).unwrap();
    let draft = directory.path().join("draft");
    std::fs::write(&draft, text).unwrap();
    std::fs::rename(draft, folder.join("mesh.yaml")).unwrap();
}

#[tokio::test]
async fn a_syntax_error_is_told_with_file_and_line_and_mended_without_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    write(&directory, GOOD);
    let istiod = start(&directory, &["--resources", "resources"]);
    istiod.logs("local-istiod listening on 127.0.0.1:").await;
    write(&directory, BROKEN);
    istiod
        .logs("resources/mesh.yaml: line 3: unclosed bracket")
        .await;
    write(
        &directory,
        &format!("{GOOD}{}", GOOD.replace("cart", "other-cart")),
    );
    istiod.logs("resources loaded: 2").await;
    istiod.terminate();
    let (code, log) = istiod.ends().await;
    assert_eq!(code, 0, "{log}");
}

#[tokio::test]
async fn what_keeps_it_from_starting_is_told_in_a_sentence() {
    let directory = tempfile::tempdir().unwrap();
    write(&directory, BROKEN);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let in_use = format!("cannot listen on {address}: Address already in use");
    for (arguments, sentence) in [
        (["--listen", &address], in_use.as_str()),
        (
            ["--resources", "nowhere"],
            "cannot read nowhere: No such file or directory",
        ),
        (["--resources", "resources"], "resources/mesh.yaml: line "),
        (["--state", "log"], "log"),
        (
            ["--identity", "cart"],
            "expected <namespace>/<service account>",
        ),
    ] {
        let (code, log) = start(&directory, &arguments).ends().await;
        assert!(code > 0, "{arguments:?}: {code}");
        assert!(log.contains(sentence), "{arguments:?}: {log}");
        assert!(!log.contains('{'), "printed for debugging: {log}");
    }
    assert!(!Path::new("nowhere").exists());
}
