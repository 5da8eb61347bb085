//! Reads what a bundle is made of, each within its time and size.

use std::cell::{Cell, RefCell};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request, StatusCode};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use super::Sources;
use super::archive::{Compressor, File, Full};
use super::redact::Form::{self, Json, Lines, OwnJson};
use super::redact::{NotJson, Redactor, Secrets};
use crate::capture::program;
use crate::http_client::{self, Client, http_url};
use crate::lifecycle::with_causes;
use crate::regular_file;

/// How long the collection takes at most, and how long it waits at once.
pub(super) const LIMIT: Duration = Duration::from_secs(20);
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
pub(super) const LARGEST_FILE: u64 = 128 << 20;
const LARGEST_BOOTSTRAP: u64 = 4 << 20;

/// Name of the file, path of the page.
pub(super) type Page = (&'static str, &'static str, Form);

const OF_AGENT: [Page; 4] = [
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
pub(super) struct Collector<'a> {
    pub(super) secrets: &'a Secrets,
    pub(super) until: Instant,
    /// What the files may take together, compressed.
    pub(super) room: &'a Cell<usize>,
    pub(super) files: RefCell<Vec<File>>,
    pub(super) problems: RefCell<Vec<String>>,
}

/// A file that is being collected.
struct Part<'a> {
    redactor: Redactor<'a>,
    compressor: Compressor<'a>,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("it did not answer within {PATIENCE:?}, or within {LIMIT:?} for all")]
    Late,
    #[error(transparent)]
    Http(#[from] http_client::Error),
    #[error("the answer is {0}")]
    Status(StatusCode),
    #[error(
        "this user is refused; ISTIO_AGENT_DEBUG_USERS admits users besides root and the agent's own"
    )]
    Forbidden,
    #[error(transparent)]
    NotJson(#[from] NotJson),
    #[error(transparent)]
    Full(#[from] Full),
}

impl Error {
    /// Whether the next request would have the same end.
    fn is_lasting(&self) -> bool {
        matches!(self, Self::Late | Self::Http(_))
    }
}

impl Part<'_> {
    fn push(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let pushed = self.redactor.push(bytes);
        self.write()?;
        Ok(pushed?)
    }

    fn finish(&mut self) -> Result<(), Error> {
        let finished = self.redactor.finish();
        self.write()?;
        Ok(finished?)
    }

    fn write(&mut self) -> Result<(), Full> {
        let written = self.compressor.write(&self.redactor.out);
        self.redactor.out.clear();
        written
    }
}

impl<'a> Collector<'a> {
    pub(super) async fn agent(&self, sources: &Sources) {
        const NAME: &str = "config.json";
        let config = match sources.status_port {
            None => Err("the agent has no status port".to_owned()),
            Some(port) => {
                let fetched = self.fetch(port, (NAME, "/debug/config", OwnJson)).await;
                fetched.map_err(|error| with_causes(&error))
            }
        };
        if let Err(why) = config {
            self.problem(NAME, format!("of this command, not of the agent: {why}"));
            self.text(NAME, OwnJson, &format!("{:#}", sources.config));
        }
        if let Some(port) = sources.status_port {
            self.pages(port, &OF_AGENT).await;
        }
    }

    pub(super) async fn doctor(&self, doctor: impl Future<Output = (String, Value)>) {
        match self.in_time(doctor).await {
            Ok((text, json)) => {
                self.text("doctor.txt", Lines, &text);
                self.text("doctor.json", OwnJson, &format!("{json:#}"));
            }
            Err(error) => self.problem("doctor.txt", error),
        }
    }

    /// Fetches pages one after the other: Envoy makes one at a time.
    pub(super) async fn pages(&self, port: u16, pages: &[Page]) {
        let mut lost = None;
        for page in pages {
            if let Some((first, why)) = &lost {
                self.problem(page.0, format!("not requested after {first}: {why}"));
                continue;
            }
            if let Err(error) = self.fetch(port, *page).await {
                let why = with_causes(&error);
                self.problem(page.0, &why);
                lost = error.is_lasting().then_some((page.0, why));
            }
        }
    }

    pub(super) async fn machine(&self, sources: &Sources) {
        let kernel = async { regular_file::read_aside("/proc/version".into(), 1 << 10).await };
        let envoy = [&sources.envoy, "--version"];
        let (rules, envoy, kernel, ()) = tokio::join!(
            join_all(CAPTURE.map(|command| self.output(command))),
            self.output(&envoy),
            self.in_time(kernel),
            self.bootstraps(sources),
        );
        self.text("capture.txt", Lines, &rules.concat());
        let kernel = kernel.map_err(|error| error.to_string());
        let kernel = kernel.and_then(|read| read.map_err(|error| error.to_string()));
        let kernel = kernel.map_or_else(|why| why, |read| String::from_utf8_lossy(&read).into());
        let version = &sources.version;
        let text = format!("agent: {version}\nkernel: {}\n{envoy}", kernel.trim());
        self.text("versions.txt", Lines, &text);
    }

    /// What a program prints, or why it does not, under its command.
    async fn output(&self, command: &[&str]) -> String {
        let (program, arguments) = (command[0], &command[1..]);
        let printed = match program::run(program, arguments, "", PATIENCE).await {
            Ok(printed) => String::from_utf8_lossy(&printed).into_owned(),
            Err(error) => error.to_string(),
        };
        format!("$ {}\n{}\n\n", command.join(" "), printed.trim())
    }

    async fn bootstraps(&self, sources: &Sources) {
        let directory = sources.bootstraps.clone();
        let listed = tokio::task::spawn_blocking(move || written_bootstraps(&directory));
        let written = match self.in_time(listed).await {
            Ok(Ok(Ok(written))) => written,
            _ => Vec::new(),
        };
        if written.is_empty() && sources.custom_bootstrap.is_none() {
            let directory = sources.bootstraps.display();
            self.problem(
                "bootstrap",
                format!("{directory} has none that can be read"),
            );
        }
        for path in sources.custom_bootstrap.iter().chain(&written) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let name = format!("bootstrap/{name}");
            let read = regular_file::read_aside(path.clone(), LARGEST_BOOTSTRAP);
            match self.in_time(read).await {
                // Those of the operator may be YAML.
                Ok(Ok(text)) => match serde_saphyr::from_slice::<Value>(&text) {
                    Ok(document) => self.text(&name, Json, &format!("{document:#}")),
                    Err(_) => self.problem(&name, "it is neither YAML nor JSON"),
                },
                Ok(Err(error)) => self.problem(&name, error),
                Err(error) => self.problem(&name, error),
            }
        }
    }

    async fn fetch(&self, port: u16, (name, path, form): Page) -> Result<(), Error> {
        let mut part = self.part(form);
        let read = self.read(port, path, &mut part).await;
        let read = read.and_then(|()| part.finish());
        if read.is_ok() || part.compressor.has_content() {
            self.add(name, part);
        }
        read
    }

    async fn read(&self, port: u16, path: &str, part: &mut Part<'_>) -> Result<(), Error> {
        let mut request = Request::new(Bytes::new());
        *request.uri_mut() = http_url(&format!("http://localhost:{port}{path}"))?;
        let client = Client::default();
        let answer = self.in_time(client.send(request)).await??;
        match answer.status() {
            StatusCode::OK => {}
            StatusCode::FORBIDDEN if path.starts_with("/debug/") => return Err(Error::Forbidden),
            other => return Err(Error::Status(other)),
        }
        let mut body = answer.into_body();
        while let Some(chunk) = self.in_time(body.chunk()).await? {
            part.push(&chunk?)?;
        }
        Ok(())
    }

    /// What is ready at once does not count as late, unless the time for all is over.
    async fn in_time<T>(&self, future: impl Future<Output = T>) -> Result<T, Error> {
        let now = Instant::now();
        if now >= self.until {
            return Err(Error::Late);
        }
        let until = self.until.min(crate::clock::later(now, PATIENCE));
        timeout_at(until, future).await.map_err(|_| Error::Late)
    }

    fn part(&self, form: Form) -> Part<'a> {
        Part {
            redactor: Redactor::new(self.secrets, form),
            compressor: Compressor::new(LARGEST_FILE, self.room),
        }
    }

    pub(super) fn text(&self, name: &str, form: Form, text: &str) {
        let mut part = self.part(form);
        let pushed = part.push(text.as_bytes()).and_then(|()| part.finish());
        self.add(name, part);
        if let Err(error) = pushed {
            self.problem(name, error);
        }
    }

    fn add(&self, name: &str, part: Part<'_>) {
        match part.compressor.finish(name.to_owned()) {
            Ok(file) => self.files.borrow_mut().push(file),
            Err(error) => self.problem(name, error),
        }
    }

    fn problem(&self, name: &str, why: impl std::fmt::Display) {
        self.problems.borrow_mut().push(format!("{name}: {why}"));
    }
}

/// Those the agent writes, one for each epoch of Envoy.
fn written_bootstraps(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("envoy-rev") && name.ends_with(".json") {
            found.push(directory.join(&*name));
        }
    }
    Ok(found)
}
