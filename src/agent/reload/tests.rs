//! Tests the inputs of Envoy, which are read again before a restart. The configuration is in a temporary directory.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::Mutex;

use tempfile::TempDir;

use super::*;
use crate::agent::sds_socket::detect;
use crate::cli::{self, Command as Typed};
use crate::config;

/// A directory with the files of the agent, and the current environment variables.
struct Place {
    root: TempDir,
    environment: Arc<Mutex<Vec<(&'static str, String)>>>,
}

impl Place {
    fn new() -> Self {
        let root = tempfile::tempdir().expect("a directory");
        let roots = root.path().join("var/run/secrets/istio");
        fs::create_dir_all(&roots).expect("made");
        fs::write(roots.join("root-cert.pem"), "").expect("written");
        fs::write(root.path().join("envoy"), "1").expect("written");
        let place = Self { root, environment: Arc::default() };
        place.set("ISTIO_AGENT_HOT_RESTART", "true");
        place.set("INSTANCE_IP", "10.0.0.9");
        place.proxy_config("");
        place
    }

    fn set(&self, name: &'static str, value: &str) {
        let mut environment = self.environment.lock().expect("no panic");
        environment.retain(|(found, _)| *found != name);
        environment.push((name, value.to_owned()));
    }

    fn proxy_config(&self, more: &str) {
        let path = |name: &str| self.root.path().join(name).display().to_string();
        let (directory, envoy) = (path("proxy"), path("envoy"));
        let text = format!("{{configPath: {directory}, binaryPath: {envoy}{more}}}");
        self.set("PROXY_CONFIG", &text);
    }

    fn load(&self) -> Load {
        let typed = cli::parse(["pilot-agent", "proxy"].map(str::to_owned));
        let typed = typed.expect("flags").cli;
        let Some(Typed::Proxy(flags)) = typed.command else {
            panic!("no proxy");
        };
        let (environment, root) = (Arc::clone(&self.environment), self.root.path().to_owned());
        Arc::new(move || {
            let variables = environment.lock().expect("no panic").clone();
            let environment = variables.into_iter().collect();
            config::load(&flags, &typed.log, &environment, &root)
        })
    }

    async fn inputs(&self) -> Inputs {
        let load = self.load();
        let mut config = load().expect("a good configuration");
        let detected = detect(&config).await.expect("detected");
        detected.add_to(&mut config.bootstrap, &config.sds_socket);
        Inputs::new(config, load, detected)
    }
}

#[tokio::test]
async fn without_hot_restart_there_is_no_epoch_and_custom_bootstraps_stay_unread() {
    let place = Place::new();
    place.set("ISTIO_AGENT_HOT_RESTART", "false");
    let prepared = place.inputs().await.prepare(0).expect("prepared");
    let file = place.root.path().join("proxy/envoy-rev.json");
    assert!(prepared.command.bootstrap == file && file.exists());
    drop(prepared);
    assert!(!file.exists());
    let custom = place.root.path().join("custom.json");
    fs::write(&custom, "{}").expect("written");
    place.proxy_config(&format!(", customConfigFile: {}", custom.display()));
    let inputs = place.inputs().await;
    fs::remove_file(&custom).expect("removed");
    inputs.prepare(0).expect("prepared");
}

#[tokio::test]
async fn each_epoch_has_its_bootstrap_file_and_a_digest_that_shows_changes() {
    let place = Place::new();
    let inputs = place.inputs().await;
    let first = inputs.prepare(0).expect("prepared");
    let same = inputs.prepare(1).expect("prepared");
    assert_eq!(first.digest, same.digest);
    for (prepared, name) in [(&first, "envoy-rev0.json"), (&same, "envoy-rev1.json")] {
        assert_eq!(prepared.command.bootstrap, place.root.path().join("proxy").join(name));
        assert!(prepared.command.bootstrap.exists());
    }
    let file = same.command.bootstrap.clone();
    drop(same);
    assert!(!file.exists() && first.command.bootstrap.exists());
    place.set("ISTIO_META_COLOUR", "red");
    let bootstrap = inputs.prepare(1).expect("prepared").digest;
    place.proxy_config(", concurrency: 7");
    let command = inputs.prepare(1).expect("prepared").digest;
    fs::write(place.root.path().join("envoy"), "another").expect("written");
    let program = inputs.prepare(1).expect("prepared").digest;
    let digests = [&first.digest, &bootstrap, &command, &program];
    for (at, digest) in digests.iter().enumerate() {
        assert!(!digests[..at].contains(digest), "{at}");
    }
}

#[tokio::test]
async fn annotations_and_labels_change_another_digest_and_calls_share_no_file() {
    let place = Place::new();
    let info = place.root.path().join("etc/istio/pod");
    fs::create_dir_all(&info).expect("made");
    let write = |name: &str, text: &str| fs::write(info.join(name), text).expect("written");
    write("annotations", "a=\"b\"");
    write("labels", "app=\"cart\"");
    let inputs = place.inputs().await;
    let prepare = || inputs.prepare(1).expect("prepared");
    let before = prepare();
    let mut digests = vec![before.metadata_digest];
    for (name, text) in [
        ("annotations", "a=\"b\"\ncni.projectcalico.org/podIP=\"10.3.3.3/32\""),
        ("labels", "app=\"cart\"\ntier=\"back\""),
        ("annotations", ""),
    ] {
        write(name, text);
        let next = prepare();
        assert_eq!(next.digest, before.digest, "{text}");
        assert!(!digests.contains(&next.metadata_digest), "{text}");
        assert!(next.command.bootstrap != before.command.bootstrap);
        assert!(next.command.bootstrap.exists() && before.command.bootstrap.exists());
        digests.push(next.metadata_digest);
    }
    for (name, text) in [
        // These determine the cluster, the locality, statistics and ProxyConfig.
        ("labels", "app=\"other\""),
        ("labels", "app=\"cart\"\ntopology.istio.io/locality=\"r/z\""),
        ("annotations", "sidecar.istio.io/statsInclusionPrefixes=\"http\""),
        ("annotations", "proxy.istio.io/config=\"concurrency: 3\""),
    ] {
        write("labels", "app=\"cart\"");
        write("annotations", "");
        write(name, text);
        assert_ne!(prepare().digest, before.digest, "{text}");
    }
}

#[tokio::test]
async fn a_restart_refuses_changed_ports_and_inputs_that_have_become_invalid() {
    let place = Place::new();
    let over = place.root.path().join("override.json");
    fs::write(&over, "{}").expect("written");
    place.set("ISTIO_BOOTSTRAP_OVERRIDE", &over.display().to_string());
    let inputs = place.inputs().await;
    let refused = |inputs: &Inputs| {
        let error = inputs.prepare(1).expect_err("refused");
        error.to_string()
    };
    place.proxy_config(", proxyAdminPort: 15999");
    let expected = "proxyAdminPort cannot change while the agent runs";
    assert_eq!(refused(&inputs), expected);
    place.proxy_config(", statusPort: 15998");
    let expected = "statusPort cannot change while the agent runs";
    assert_eq!(refused(&inputs), expected);
    place.proxy_config(", concurrency: -1");
    assert!(refused(&inputs).starts_with("the configuration cannot be used: "));
    place.proxy_config("");
    fs::write(&over, "{").expect("written");
    let worse = refused(&inputs);
    let subject = format!("{} (ISTIO_BOOTSTRAP_OVERRIDE): line 1: ", over.display());
    assert!(worse.contains(&subject), "{worse}");
    assert!(worse.starts_with("could be used when the agent started, "), "{worse}");
    fs::write(&over, "{}").expect("written");
    inputs.prepare(1).expect("good again");
    // An invalid line among the labels costs one label; the restart is not refused.
    let labels = place.root.path().join("etc/istio/pod/labels");
    fs::create_dir_all(labels.parent().expect("a parent")).expect("made");
    fs::write(&labels, "app=\"cart\"\nodd=odd\n").expect("written");
    inputs.prepare(1).expect("good but for a line");
    fs::remove_file(&labels).expect("removed");
    fs::create_dir(&labels).expect("made");
    assert!(refused(&inputs).contains("labels: "), "no file");
}

#[tokio::test]
async fn each_envoy_uses_the_same_sds_server() {
    let place = Place::new();
    place.set("ISTIO_AGENT_EXTERNAL_SDS", "wait");
    let inputs = place.inputs().await;
    let (first, next) = (inputs.prepare(0), inputs.prepare(1));
    let (first, next) = (first.expect("prepared"), next.expect("prepared"));
    let text = fs::read_to_string(&first.command.bootstrap).expect("written");
    assert!(text.contains("file-credential"), "{text}");
    assert_eq!(first.digest, next.digest);
}

#[tokio::test]
async fn the_bootstrap_belongs_to_the_user_of_its_envoy() {
    if !rustix::process::getuid().is_root() {
        eprintln!("Only root gives files away: this test is not run.");
        return;
    }
    let place = Place::new();
    let mut inputs = place.inputs().await;
    let envoy = inputs.first.envoy.as_mut().expect("an Envoy");
    envoy.command.user = Some(1337);
    let prepared = inputs.prepare(0).expect("prepared");
    let file = fs::metadata(&prepared.command.bootstrap).expect("written");
    assert_eq!(file.uid(), 1337);
}

#[tokio::test]
async fn a_custom_bootstrap_is_used_in_place_and_not_deleted() {
    let place = Place::new();
    let custom = place.root.path().join("custom.json");
    fs::write(&custom, "{}").expect("written");
    place.proxy_config(&format!(", customConfigFile: {}", custom.display()));
    let inputs = place.inputs().await;
    let first = inputs.prepare(0).expect("prepared");
    assert_eq!(first.command.bootstrap, custom);
    fs::write(&custom, "{ }").expect("written");
    assert_ne!(inputs.prepare(1).expect("prepared").digest, first.digest);
    drop(first);
    assert!(custom.exists());
    fs::remove_file(&custom).expect("removed");
    let error = inputs.prepare(1).expect_err("gone").to_string();
    assert!(error.contains("custom.json"), "{error}");
}
