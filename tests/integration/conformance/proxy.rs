//! istiod behind an HTTP proxy: the real tinyproxy.
//!
//! Without the program the tests say so and are not run, except under `PROXY_TESTS`, where they fail.

use std::net::Ipv4Addr;
use std::process::{Child, Command};

use local_istiod::{LocalIstiod, Options};

use crate::support::place::Place;
use crate::support::{
    answered, ask_for_clusters, ask_for_secrets, free_port, next_response, restarted,
};

/// A tinyproxy that wants a password; it ends with the test.
pub struct Tinyproxy {
    child: Child,
    pub port: u16,
    log: tempfile::NamedTempFile,
}

impl Tinyproxy {
    pub fn start() -> Option<Self> {
        let port = free_port();
        let log = tempfile::NamedTempFile::new().unwrap();
        let settings = format!(
            "Port {port}\nListen 127.0.0.1\nBasicAuth agent hush\nLogLevel Connect\nLogFile \"{}\"\n",
            log.path().display()
        );
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), settings).unwrap();
        let started = Command::new("tinyproxy")
            .arg("-d")
            .arg("-c")
            .arg(file.path())
            .spawn();
        let Ok(mut child) = started else {
            let sentence = "There is no tinyproxy.";
            assert!(std::env::var_os("PROXY_TESTS").is_none(), "{sentence}");
            eprintln!("{sentence} This test is not run.");
            return None;
        };
        while std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            assert!(child.try_wait().unwrap().is_none(), "tinyproxy ended");
        }
        Some(Self { child, port, log })
    }

    /// How many connections it has led to that port.
    pub fn tunnels(&self, port: u16) -> usize {
        self.requests(&format!("CONNECT 0.0.0.0:{port} "))
    }

    /// How many requests it got that begin so.
    pub fn requests(&self, line: &str) -> usize {
        let log = std::fs::read_to_string(self.log.path()).unwrap();
        log.matches(line).count()
    }
}

impl Drop for Tinyproxy {
    fn drop(&mut self) {
        let _ = self.child.kill(); // It may have ended by itself.
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn certificates_and_discovery_go_through_a_proxy_also_after_a_restart_of_istiod() {
    let Some(proxy) = Tinyproxy::start() else {
        return;
    };
    // Loopback addresses are reached without a proxy; this one reaches the same machine.
    let mut istiod = LocalIstiod::start(Options {
        listen: (Ipv4Addr::UNSPECIFIED, 0).into(),
        extra_names: vec![Ipv4Addr::UNSPECIFIED.to_string()],
        ..Options::default()
    })
    .await
    .unwrap();
    let port = istiod.address.port();
    let place = Place::with_envoy(&istiod);
    let wrong = format!("http://agent:wrong@127.0.0.1:{}", proxy.port);
    let place = place.set("HTTPS_PROXY", &wrong);
    let agent = place.start().await;
    agent.logs("401 Unauthorized").await;
    drop(agent);
    assert_eq!(istiod.connections(), []);
    let right = format!("http://agent:%68ush@127.0.0.1:{}", proxy.port);
    let place = place.set("HTTPS_PROXY", &right);
    let agent = place.start().await;
    let mut secrets = ask_for_secrets(&place, &["default"]).await;
    next_response(&mut secrets).await;
    let mut envoy = ask_for_clusters(&place).await;
    answered(&mut envoy, &mut istiod).await;
    istiod = restarted(istiod, |_| {}).await;
    // The proxy may close the tunnel late.
    agent.logs("disconnected from XDS server").await;
    let mut envoy = ask_for_clusters(&place).await;
    answered(&mut envoy, &mut istiod).await;
    assert!(proxy.tunnels(port) >= 2);
    assert!(!agent.log().contains("hush"), "{}", agent.log());
    drop(agent);
    // An exception: no proxy is needed.
    let before = proxy.tunnels(port);
    let place = place.set("NO_PROXY", "0.0.0.0/8");
    let _agent = place.start().await;
    let mut envoy = ask_for_clusters(&place).await;
    answered(&mut envoy, &mut istiod).await;
    assert_eq!(proxy.tunnels(port), before);
}
