//! Tests an istiod behind an HTTP proxy, the real tinyproxy.
//!
//! Without this program, the tests report this and are not run; if `PROXY_TESTS` is set, they fail.

use std::net::Ipv4Addr;
use std::process::{Child, Command};

use local_istiod::{LocalIstiod, Options};

use crate::support::place::Place;
use crate::support::{
    answered, ask_for_clusters, ask_for_secrets, free_port, next_response, restarted,
};

/// A tinyproxy that requires a password. It is killed when it is dropped.
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
        let started = Command::new("tinyproxy").arg("-d").arg("-c").arg(file.path()).spawn();
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

    /// Returns the number of CONNECT requests for this port.
    pub fn connect_requests(&self, port: u16) -> usize {
        self.requests(&format!("CONNECT 0.0.0.0:{port} "))
    }

    /// Returns the number of requests that begin with `line`.
    pub fn requests(&self, line: &str) -> usize {
        let log = std::fs::read_to_string(self.log.path()).unwrap();
        log.matches(line).count()
    }
}

impl Drop for Tinyproxy {
    fn drop(&mut self) {
        let _ = self.child.kill(); // The process may have ended by itself.
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn certificates_and_discovery_use_a_proxy_also_after_istiod_restarts() {
    let Some(proxy) = Tinyproxy::start() else {
        return;
    };
    // The agent uses no proxy for loopback addresses. 0.0.0.0 is not one of them, and reaches the same machine.
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
    let refused = proxy.connect_requests(port);
    let right = format!("http://agent:%68ush@127.0.0.1:{}", proxy.port);
    let place = place.set("HTTPS_PROXY", &right);
    let agent = place.start().await;
    let mut secrets = ask_for_secrets(&place, &["default"]).await;
    next_response(&mut secrets).await;
    let mut envoy = ask_for_clusters(&place).await;
    answered(&mut envoy, &mut istiod).await;
    istiod = restarted(istiod, |_| {}).await;
    // The proxy may close the old tunnel late, so the test waits until the agent notices the end.
    agent.logs("disconnected from XDS server").await;
    let mut envoy = ask_for_clusters(&place).await;
    answered(&mut envoy, &mut istiod).await;
    assert!(proxy.connect_requests(port) >= refused + 2);
    assert!(!agent.log().contains("hush"), "{}", agent.log());
    drop(agent);
    // `NO_PROXY` excludes the address of istiod, so the agent connects directly.
    let before = proxy.connect_requests(port);
    let place = place.set("NO_PROXY", "0.0.0.0/8");
    let _agent = place.start().await;
    let mut envoy = ask_for_clusters(&place).await;
    answered(&mut envoy, &mut istiod).await;
    assert_eq!(proxy.connect_requests(port), before);
}
