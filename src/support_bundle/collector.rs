//! Reads what a bundle is made of, each within its time and size.

use std::cell::RefCell;
use std::fs;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::stream;
use http::{Request, StatusCode};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};
use tokio_util::io::{StreamReader, SyncIoBridge};

use super::Sources;
use super::archive::{File, MAX_COMPRESSED};
use super::redact::Form::{self, Json, Lines, OwnJson};
use super::redact::{self, Secrets};
use crate::capture::program;
use crate::http_client::{self, Client, http_url};
use crate::lifecycle::with_causes;
use crate::regular_file::{self, MAX_SETTINGS};

/// How long the collection takes at most, and how long it waits at once.
pub(super) const LIMIT: Duration = Duration::from_secs(20);
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Name of the file, path of the page.
pub(super) type Page = (&'static str, &'static str, Form);

const CONFIG: &str = "config.json";
const OF_AGENT: [Page; 5] = [
    (CONFIG, "/debug/config", OwnJson),
    ("agent/overview.json", "/debug/overview", OwnJson),
    ("agent/log.txt", "/debug/log", Lines),
    ("agent/ndsz.json", "/debug/ndsz", OwnJson),
    ("agent/metrics.txt", "/metrics/agent", Lines),
];
/// The largest last. Endpoints are in `clusters`; with them `config_dump` takes twice the memory of
/// Envoy.
pub(super) const OF_ENVOY: [Page; 5] = [
    ("envoy/server_info.json", "/server_info", Json),
    ("envoy/listeners.txt", "/listeners", Lines),
    ("envoy/clusters.txt", "/clusters", Lines),
    ("envoy/stats.txt", "/stats", Lines),
    ("envoy/config_dump.json", "/config_dump", Json),
];
const CAPTURE: [&[&str]; 5] = [
    &["iptables-save"],
    &["ip6tables-save"],
    &["iptables-legacy-save"],
    &["ip6tables-legacy-save"],
    &["nft", "list", "ruleset"],
];

/// Collects files and problems.
pub(super) struct Collector {
    pub(super) secrets: Arc<Secrets>,
    pub(super) until: Instant,
    pub(super) files: RefCell<Vec<File>>,
    pub(super) problems: RefCell<Vec<String>>,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("it did not answer within {PATIENCE:?}, or within {LIMIT:?} for all")]
    Late,
    #[error(transparent)]
    Http(#[from] http_client::Error),
    #[error("the answer is {0}")]
    Status(StatusCode),
    #[error(transparent)]
    Content(#[from] io::Error),
}

impl Collector {
    pub(super) async fn agent(&self, sources: &Sources) {
        if let Some(port) = sources.proxy_config.agent_port() {
            self.pages(port, &OF_AGENT).await;
        }
        if !self.files.borrow().iter().any(|file| file.name == CONFIG) {
            self.problem(CONFIG, "of this command, not of the agent");
            self.text(CONFIG, OwnJson, &format!("{:#}", sources.config));
        }
    }

    /// Fetches pages one after the other, as Envoy makes one at a time; none after one without an answer.
    pub(super) async fn pages(&self, port: u16, pages: &[Page]) {
        for page in pages {
            match self.fetch(port, *page).await {
                // An agent that answers no DNS has no name table.
                Err(Error::Status(StatusCode::NOT_FOUND)) if page.1 == "/debug/ndsz" => {}
                Err(error @ (Error::Late | Error::Http(_))) => {
                    let why = with_causes(&error);
                    return self.problem(page.0, format!("{why}; no page after it is requested"));
                }
                Err(error) => self.problem(page.0, with_causes(&error)),
                Ok(()) => {}
            }
        }
    }

    pub(super) async fn machine(&self, sources: &Sources) {
        let envoy = [&*sources.proxy_config.binary_path, "--version"];
        let (rules, envoy, ()) = tokio::join!(
            join_all(CAPTURE.map(|command| self.output(command))),
            self.output(&envoy),
            self.bootstraps(sources),
        );
        self.text("capture.txt", Lines, &rules.concat());
        let kernel = fs::read_to_string("/proc/version").unwrap_or_default();
        let version = &sources.version;
        let text = format!("agent: {version}\nkernel: {}\n{envoy}", kernel.trim());
        self.text("versions.txt", Lines, &text);
    }

    /// What a program prints, or why it does not, under its command.
    async fn output(&self, command: &[&str]) -> String {
        let printed = match program::run(command[0], &command[1..], "", PATIENCE).await {
            Ok(printed) => String::from_utf8_lossy(&printed).into_owned(),
            Err(error) => error.to_string(),
        };
        format!("$ {}\n{}\n\n", command.join(" "), printed.trim())
    }

    /// Those the agent writes, one for each epoch of Envoy, and the operator's, which may be YAML.
    async fn bootstraps(&self, sources: &Sources) {
        let config = &sources.proxy_config;
        let directory = config.config_path.clone();
        let listed = tokio::task::spawn_blocking(move || {
            let entries = fs::read_dir(directory).into_iter().flatten().flatten();
            let paths = entries.map(|entry| entry.path());
            paths.filter(|path| is_bootstrap(path)).collect::<Vec<_>>()
        });
        let mut paths = match in_time(self.until, listed).await {
            Ok(Ok(written)) => written,
            _ => Vec::new(),
        };
        let custom = Some(&config.custom_config_file).filter(|path| !path.is_empty());
        paths.extend(custom.map(Into::into));
        if paths.is_empty() {
            let why = format!("{} has none that can be read", config.config_path);
            self.problem("bootstrap", why);
        }
        for path in paths {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let name = format!("bootstrap/{name}");
            let read = regular_file::read_blocking(path, MAX_SETTINGS);
            let read = in_time(self.until, read).await;
            match read.and_then(|read| read.map_err(Error::Content)) {
                Ok(text) => match serde_saphyr::from_slice::<Value>(&text) {
                    Ok(document) => self.text(&name, Json, &format!("{document:#}")),
                    Err(_) => self.problem(&name, "it is neither YAML nor JSON"),
                },
                Err(error) => self.problem(&name, error),
            }
        }
    }

    async fn fetch(&self, port: u16, (name, path, form): Page) -> Result<(), Error> {
        let mut request = Request::new(Bytes::new());
        *request.uri_mut() = http_url(&format!("http://localhost:{port}{path}"))?;
        let client = Client::default();
        let answer = in_time(self.until, client.send(request)).await??;
        if answer.status() != StatusCode::OK {
            return Err(Error::Status(answer.status()));
        }
        let until = self.until;
        let chunks = stream::unfold(answer.into_body(), move |mut body| async move {
            let chunk = match in_time(until, body.chunk()).await {
                Ok(chunk) => chunk?.map_err(io::Error::other),
                Err(late) => Err(io::Error::other(late)),
            };
            Some((chunk, body))
        });
        let page = SyncIoBridge::new(StreamReader::new(Box::pin(chunks)));
        let secrets = self.secrets.clone();
        let copying = tokio::task::spawn_blocking(move || compress(name, &secrets, form, page));
        let (file, copied) = copying.await.map_err(io::Error::other)?;
        self.files.borrow_mut().push(file);
        Ok(copied?)
    }

    pub(super) fn text(&self, name: &str, form: Form, text: &str) {
        let (file, copied) = compress(name, &self.secrets, form, text.as_bytes());
        self.files.borrow_mut().push(file);
        if let Err(error) = copied {
            self.problem(name, with_causes(&error));
        }
    }

    fn problem(&self, name: &str, why: impl std::fmt::Display) {
        self.problems.borrow_mut().push(format!("{name}: {why}"));
    }
}

/// What is ready at once does not count as late, unless the time for all is over.
async fn in_time<T>(until: Instant, future: impl Future<Output = T>) -> Result<T, Error> {
    let now = Instant::now();
    if now >= until {
        return Err(Error::Late);
    }
    let until = until.min(crate::clock::later(now, PATIENCE));
    timeout_at(until, future).await.map_err(|_| Error::Late)
}

/// Compresses a page without its secrets, up to where that fails.
fn compress(
    name: &str,
    secrets: &Secrets,
    form: Form,
    mut from: impl Read,
) -> (File, io::Result<()>) {
    let mut to = BufWriter::new(File::new(name));
    let copied = redact::copy(secrets, form, &mut from, &mut to);
    // Also what came before an error.
    let copied = copied.and(to.flush());
    let (file, _) = to.into_parts();
    let problem = format!("it has more than {} MiB compressed", MAX_COMPRESSED >> 20);
    match file.is_full() {
        true => (file, Err(io::Error::other(problem))),
        false => (file, copied),
    }
}

fn is_bootstrap(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with("envoy-rev") && name.ends_with(".json")
}
