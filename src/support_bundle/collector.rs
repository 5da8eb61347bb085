//! Reads what a bundle is made of, each within its time and size.

use std::cell::RefCell;
use std::fs;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use bytes::{Buf, Bytes};
use futures_util::future::join_all;
use http::{Request, StatusCode};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::Sources;
use super::archive::{Compressor, File};
use super::redact::Form::{self, Json, Lines, OwnJson};
use super::redact::{self, Secrets};
use crate::capture::program;
use crate::http_client::{self, Body, Client, http_url};
use crate::lifecycle::with_causes;
use crate::regular_file::{self, MAX_SETTINGS};

/// How long the collection takes at most, and how long it waits at once.
pub(super) const LIMIT: Duration = Duration::from_secs(20);
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
pub(super) const MAX_FILE: usize = 128 << 20;
/// How many chunks of a page wait for being read.
const CHUNKS: usize = 4;

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
pub(super) struct Collector {
    pub(super) secrets: Arc<Secrets>,
    pub(super) until: Instant,
    /// What the files may take together, compressed.
    pub(super) room: Arc<AtomicUsize>,
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
    #[error(
        "this user is refused; ISTIO_AGENT_DEBUG_USERS admits users besides root and the agent's own"
    )]
    Forbidden,
    #[error("it has more than {} MiB", MAX_FILE >> 20)]
    TooLarge,
    #[error("the bundle has no room left for it")]
    Full,
    #[error("it is no JSON")]
    NotJson(#[from] io::Error),
}

impl Error {
    /// Whether the next request would have the same end.
    fn is_lasting(&self) -> bool {
        matches!(self, Self::Late | Self::Http(_))
    }
}

/// A page that arrives, for the thread that reads it. An empty chunk ends it; without that it was cut off.
struct Chunks {
    from: mpsc::Receiver<Bytes>,
    chunk: Option<Bytes>,
}

impl Read for Chunks {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let chunk = match &mut self.chunk {
            Some(chunk) if chunk.is_empty() => return Ok(0),
            chunk => chunk.take().or_else(|| self.from.blocking_recv()),
        };
        let mut chunk = chunk.ok_or(io::ErrorKind::UnexpectedEof)?;
        let length = chunk.len().min(buffer.len());
        chunk.copy_to_slice(&mut buffer[..length]);
        self.chunk = (length == 0 || !chunk.is_empty()).then_some(chunk);
        Ok(length)
    }
}

impl Collector {
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
            match self.fetch(port, *page).await {
                // An agent that answers no DNS has no name table.
                Err(Error::Status(StatusCode::NOT_FOUND)) if page.1 == "/debug/ndsz" => {}
                Err(error) => {
                    let why = with_causes(&error);
                    self.problem(page.0, &why);
                    lost = error.is_lasting().then_some((page.0, why));
                }
                Ok(()) => {}
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
            let read = regular_file::read_aside(path.clone(), MAX_SETTINGS);
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
        let mut request = Request::new(Bytes::new());
        *request.uri_mut() = http_url(&format!("http://localhost:{port}{path}"))?;
        let client = Client::default();
        let answer = self.in_time(client.send(request)).await??;
        match answer.status() {
            StatusCode::OK => {}
            StatusCode::FORBIDDEN if path.starts_with("/debug/") => return Err(Error::Forbidden),
            other => return Err(Error::Status(other)),
        }
        let (to, from) = mpsc::channel(CHUNKS);
        let (secrets, room) = (self.secrets.clone(), self.room.clone());
        let copied = tokio::task::spawn_blocking(move || {
            compress(&secrets, form, &mut Chunks { from, chunk: None }, room)
        });
        let read = self.read(answer.into_body(), to).await;
        let (file, copied) = copied.await.map_err(io::Error::other)?;
        self.add(name, file);
        read.and(copied)
    }

    /// Passes the body on, unless what takes it has ended.
    async fn read(&self, mut body: Body, to: mpsc::Sender<Bytes>) -> Result<(), Error> {
        let mut size = 0;
        while let Some(chunk) = self.in_time(body.chunk()).await? {
            let chunk = chunk?;
            size += chunk.len();
            if size > MAX_FILE {
                return Err(Error::TooLarge);
            }
            if !chunk.is_empty() && self.in_time(to.send(chunk)).await?.is_err() {
                return Ok(());
            }
        }
        let _ = self.in_time(to.send(Bytes::new())).await?;
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

    pub(super) fn text(&self, name: &str, form: Form, text: &str) {
        let room = self.room.clone();
        let (file, copied) = compress(&self.secrets, form, &mut text.as_bytes(), room);
        self.add(name, file);
        if let Err(error) = copied {
            self.problem(name, with_causes(&error));
        }
    }

    fn add(&self, name: &str, file: Compressor) {
        match file.finish(name.to_owned()) {
            Ok(file) => self.files.borrow_mut().push(file),
            Err(error) => self.problem(name, error),
        }
    }

    fn problem(&self, name: &str, why: impl std::fmt::Display) {
        self.problems.borrow_mut().push(format!("{name}: {why}"));
    }
}

/// Compresses a page without its secrets, up to where that fails.
fn compress(
    secrets: &Secrets,
    form: Form,
    from: &mut dyn Read,
    room: Arc<AtomicUsize>,
) -> (Compressor, Result<(), Error>) {
    let mut to = BufWriter::new(Compressor::new(room));
    let copied = redact::copy(secrets, form, from, &mut to);
    // Also what came before an error.
    let copied = copied.and(to.flush());
    let (file, _) = to.into_parts();
    match file.is_full() {
        true => (file, Err(Error::Full)),
        false => (file, copied.map_err(Error::NotJson)),
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
