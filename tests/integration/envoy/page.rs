//! Tests the overview page in a browser. The screenshots stay in `target/tmp/debug-page`.
//!
//! `CHROMIUM_BIN` or `PATH` gives the path of Chromium. Without Chromium the test prints that and is skipped; if the
//! variable `PAGE_TESTS` is set it fails.

use std::path::{Path, PathBuf};
use std::process::Command;

use http::Method;
use rustix::process::Signal;
use serde_json::Value;

use crate::envoy::lifecycle::wait_until_agent_sees_envoy_running;
use crate::support::control_plane::ControlPlane;
use crate::support::http::Backend;
use crate::support::pod::{Pod, Settings};
use crate::support::process::Process;
use crate::support::programs::{chromium_binary, envoy_binary};
use crate::support::resources::{cluster, endpoints, listener, routes};
use crate::support::{eventually, free_port};

/// The width and the height of a phone.
const PHONE: &str = "390,844";
const PHONE_WIDTH: u32 = 390;
/// The width of a phone, and a height at which the entire page fits.
const PHONE_FULL_PAGE: &str = "390,2600";
/// The width and the height of a browser window on a desktop.
const DESK: &str = "1280,1100";

/// The name of a listener that would run as a script if the page did not escape it.
const HOSTILE: &str = "<script>document.title='run'</script><img src=x>";

const SECTIONS: [&str; 6] = [
    "Envoy",
    "Connection to istiod",
    "Certificates",
    "Start-up",
    "Discovery (xDS)",
    "Recent warnings",
];

/// A browser without a screen, for the overview page of one agent.
struct Browser {
    binary: PathBuf,
    profile: tempfile::TempDir,
    url: String,
}

impl Browser {
    fn at(binary: PathBuf, port: u16) -> Self {
        Self {
            binary,
            profile: tempfile::tempdir().unwrap(),
            url: format!("http://127.0.0.1:{port}/debug/"),
        }
    }

    /// Runs the browser with these options on a page, and returns its output.
    async fn look(&self, options: &[String], url: &str) -> String {
        let mut command = Command::new(&self.binary);
        // The sandbox does not start as root, and small containers have little shared memory.
        command
            .args(["--headless", "--no-sandbox", "--disable-dev-shm-usage"])
            .args(["--disable-gpu", "--hide-scrollbars", "--no-first-run"])
            .arg(format!("--user-data-dir={}", self.profile.path().display()))
            .args(options)
            .arg(url);
        let mut process = Process::start(&mut command, &self.profile.path().join("browser.log"));
        let status = process.end().await;
        let log = process.log();
        assert!(status.success(), "{status}: {log}");
        log
    }

    /// Returns the width that a document needs in a frame of a phone's width. The frame has no content security policy,
    /// so the page around it can measure the width.
    async fn width_on_a_phone(&self, document: &str) -> u32 {
        let page = self.profile.path().join("phone.html");
        let document = document.replace('&', "&amp;").replace('"', "&quot;");
        let frame = format!(
            "<!DOCTYPE html><iframe style=\"width:{PHONE_WIDTH}px;height:800px;border:0\" \
             srcdoc=\"{document}\"></iframe><script>onload = () => document.title = 'width ' + \
             document.querySelector('iframe').contentDocument.documentElement.scrollWidth</script>"
        );
        std::fs::write(&page, frame).unwrap();
        let url = format!("file://{}", page.display());
        let log = self.look(&["--dump-dom".to_owned()], &url).await;
        let width = log.split_once("<title>width ").expect(&log).1;
        width.split('<').next().unwrap().parse().unwrap()
    }

    /// Returns the page as the browser has parsed it.
    async fn document(&self) -> String {
        let log = self.look(&["--dump-dom".to_owned()], &self.url).await;
        let start = log.find("<!DOCTYPE html>").expect(&log);
        log[start..].to_owned()
    }

    async fn screenshot(&self, name: &str, size: &str) {
        self.screenshot_in(name, size, "light").await;
    }

    async fn screenshot_in(&self, name: &str, size: &str, scheme: &str) {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("debug-page");
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join(format!("{name}.png"));
        let _ = std::fs::remove_file(&file); // It may not exist.
        let options = [
            format!("--window-size={size}"),
            format!(
                "--blink-settings=preferredColorScheme={}",
                match scheme {
                    "dark" => 0,
                    _ => 1,
                }
            ),
            format!("--screenshot={}", file.display()),
        ];
        self.look(&options, &self.url).await;
        let image = std::fs::read(&file).unwrap();
        assert!(image.starts_with(b"\x89PNG"), "{}", file.display());
    }
}

async fn overview(pod: &Pod) -> Option<Value> {
    let answer = pod.status(Method::GET, "/debug/overview").await?;
    serde_json::from_str(&answer).ok()
}

async fn becomes(what: &str, pod: &Pod, is_so: impl Fn(&Value) -> bool) -> Value {
    eventually(what, async || overview(pod).await.filter(&is_so)).await
}

#[tokio::test]
async fn the_page_shows_a_healthy_pod_and_a_broken_one() {
    let Some(envoy) = envoy_binary() else { return };
    let Some(chromium) = chromium_binary() else {
        return;
    };
    let (backend, port) = (Backend::start().await, free_port());
    let resources = [
        cluster("books"),
        endpoints("books", &[backend.port]),
        listener("plain", port, "all"),
        routes("all", "books", "0"),
    ];
    let control_plane = ControlPlane::of(&resources).await;
    let settings =
        Settings { envoy: Some(&envoy), environment: &[("ISTIO_AGENT_ENVOY_RESTARTS", "1/1h")] };
    let pod = Pod::serving(settings, &control_plane).await;
    let seen = becomes("a pod that is ready", &pod, |seen| seen["ready"] == true).await;
    let milestones = seen["start_up"].as_array().unwrap();
    assert_eq!(milestones.len(), 4, "{milestones:?}");
    assert_eq!(milestones[3]["milestone"], "ready");

    let browser = Browser::at(chromium, pod.status_port);
    let document = browser.document().await;
    for section in SECTIONS {
        assert!(document.contains(&format!("<h2>{section}")), "{section}");
    }
    assert!(document.contains("<title>ready"), "{document}");
    assert!(document.contains("<summary>All checks</summary>"));
    assert_eq!(browser.width_on_a_phone(&document).await, PHONE_WIDTH);
    for tls in ["</small> TLSv1_3", "</small> X25519MLKEM768"] {
        assert!(document.contains(tls), "{tls}: {document}");
    }
    browser.screenshot("well-phone", PHONE).await;
    browser.screenshot("well-phone-whole", PHONE_FULL_PAGE).await;
    browser.screenshot("well-desk", DESK).await;

    wait_until_agent_sees_envoy_running(&pod).await;
    rustix::process::kill_process(pod.envoy_pid().unwrap(), Signal::SEGV).unwrap();
    becomes("another Envoy", &pod, |seen| seen["envoy"]["epoch"] == 1 && seen["ready"] == true)
        .await;
    // Envoy refuses a second listener at the address of the first, and its error contains the name of the second.
    let mut refused = resources.to_vec();
    refused.push(listener(HOSTILE, port, "all"));
    control_plane.set(&refused).await;
    becomes("a refusal", &pod, |seen| {
        let types = seen["discovery"]["types"].as_object().unwrap();
        types.values().any(|of_type| of_type["nacks"] == 1)
    })
    .await;
    let _dead = control_plane.kill().await;
    becomes("the loss of istiod", &pod, |seen| seen["istiod"]["connected"].is_null()).await;
    pod.status(Method::POST, "/drain").await.unwrap();
    becomes("a report of this state", &pod, |seen| {
        let report = seen["doctor"].to_string();
        report.contains("Connection refused") && report.contains("script")
    })
    .await;
    let document = browser.document().await;
    assert_eq!(browser.width_on_a_phone(&document).await, PHONE_WIDTH);
    for card in ["outage</b>", "not connected</b>", "rejected</b>", "<dt id=\"RESOURCE_REFUSED\">"]
    {
        assert!(document.contains(card), "{card}: {document}");
    }
    let (top, _) = document.split_once("<main>").unwrap();
    for expected in ["<title>ready, with ", "What to do: ", "Connection refused", "&lt;script&gt;"]
    {
        assert!(top.contains(expected), "{expected}: {document}");
    }
    for expected in ["signal 11", "All checks"] {
        assert!(document.contains(expected), "{expected}: {document}");
    }
    for markup in ["<script", "<img", "<title>run"] {
        assert!(!document.contains(markup), "{markup}: {document}");
    }
    browser.screenshot("troubled-phone", PHONE).await;
    browser.screenshot("troubled-phone-whole", PHONE_FULL_PAGE).await;
    browser.screenshot("troubled-desk", DESK).await;
    browser.screenshot_in("troubled-phone-dark", PHONE_FULL_PAGE, "dark").await;
    browser.screenshot_in("troubled-desk-dark", DESK, "dark").await;
    // A browser that requests the report of the doctor gets the page too.
    let doctor = format!("{}doctor", browser.url);
    let log = browser.look(&["--dump-dom".to_owned()], &doctor).await;
    assert!(log.contains("<title>ready, with "), "{log}");
}
