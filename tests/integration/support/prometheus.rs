//! The real Prometheus (Debian's package `prometheus`), which scrapes one port.

use std::collections::BTreeMap;
use std::process::Stdio;

use http::Method;
use serde::Deserialize;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use super::{free_port, pod};

pub struct Prometheus {
    port: u16,
    _process: Child,
    _folder: TempDir,
}

/// A series and its value, which is "histogram" for a native histogram.
pub type Samples = BTreeMap<BTreeMap<String, String>, String>;

impl Prometheus {
    /// Starts it with arguments and with further members of its scrape job. Returns None and reports it if there is no
    /// Prometheus; if `PROMETHEUS_TESTS` is set, that fails.
    pub fn scraping(port: u16, arguments: &[&str], job: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let config = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s}}\nscrape_configs:\n- job_name: pod\n  \
             metrics_path: /stats/prometheus\n  static_configs: [{{targets: [\"127.0.0.1:{port}\"]}}]\n{job}"
        );
        std::fs::write(folder.path().join("prometheus.yml"), config).unwrap();
        let port = free_port();
        let started = Command::new("prometheus")
            .current_dir(folder.path())
            .args(["--config.file=prometheus.yml", "--storage.tsdb.path=data"])
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .args(arguments)
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn();
        let Ok(process) = started else {
            let sentence = "There is no prometheus.";
            assert!(std::env::var_os("PROMETHEUS_TESTS").is_none(), "{sentence}");
            eprintln!("{sentence} This test is not run.");
            return None;
        };
        Some(Self { port, _process: process, _folder: folder })
    }

    /// Returns what it has of a selector now. Returns None if it has nothing, or does not answer.
    pub async fn query(&self, selector: &str) -> Option<Samples> {
        #[derive(Deserialize)]
        struct Answer {
            data: Data,
        }
        #[derive(Deserialize)]
        struct Data {
            result: Vec<Sample>,
        }
        #[derive(Deserialize)]
        struct Sample {
            metric: BTreeMap<String, String>,
            value: Option<(f64, String)>,
        }
        let selector =
            percent_encoding::utf8_percent_encode(selector, percent_encoding::NON_ALPHANUMERIC);
        let path = format!("/api/v1/query?query={selector}");
        // The client for Envoy's admin port fits here, too: both are HTTP on loopback.
        let answer = pod::admin(self.port).request(Method::GET, &path).await.ok()?;
        let answer: Answer = serde_json::from_slice(answer.body()).ok()?;
        let samples = answer.data.result.into_iter().map(|sample| {
            let value = sample.value.map_or_else(|| "histogram".to_owned(), |(_, value)| value);
            (sample.metric, value)
        });
        let samples: Samples = samples.collect();
        (!samples.is_empty()).then_some(samples)
    }
}
