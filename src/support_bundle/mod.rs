//! Collects what a report of a problem needs into one `.tar.gz`: the doctor's answer, configuration,
//! bootstrap, pages of Envoy and of the agent, the rules of capture, versions.
//!
//! It works with a running agent and Envoy or without. What cannot be read is named in `errors.txt`, with
//! the reason; what is too large or takes too long is cut off. Everything passes [`redact`], compressed
//! at once, so that memory does not grow with what Envoy has: 128 MiB of a file and 16 MiB of the bundle
//! are read and kept at most. It takes 20 s at most, until it is written.

mod archive;
mod redact;

use std::cell::{Cell, RefCell};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request, StatusCode};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use crate::capture::program;
use crate::config::environment::{self, Environment};
use crate::dial::proxy::Proxy;
use crate::http_client::{self, Client, http_url};
use crate::lifecycle::with_causes;
use crate::regular_file;
use archive::{Compressor, File, Full};
use redact::Form::{self, Json, Lines, OwnJson};
pub use redact::Secrets;
use redact::{NotJson, Redactor};

/// How long the collection takes at most, and how long it waits at once.
const LIMIT: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_secs(5);
const LARGEST_FILE: u64 = 128 << 20;
const LARGEST_BUNDLE: usize = 16 << 20;
const LARGEST_BOOTSTRAP: u64 = 4 << 20;
const LARGEST_TOKEN: u64 = 1 << 20;
const FOLDER: &str = "support-bundle";

/// Name of the file, path of the page.
type Page = (&'static str, &'static str, Form);

const OF_AGENT: [Page; 10] = [
    ("agent/overview.json", "/debug/overview", OwnJson),
    ("agent/log.txt", "/debug/log", Lines),
    ("agent/envoy.json", "/debug/envoy", OwnJson),
    ("agent/istiod.json", "/debug/istiod", OwnJson),
    ("agent/certs.json", "/debug/certs", OwnJson),
    ("agent/xdsz.json", "/debug/xdsz", OwnJson),
    ("agent/ndsz.json", "/debug/ndsz", OwnJson),
    ("agent/wasm.json", "/debug/wasm", OwnJson),
    ("agent/health.json", "/debug/health", OwnJson),
    ("agent/metrics.txt", "/metrics/agent", Lines),
];
/// The largest last. Endpoints are in `clusters`; with them `config_dump` takes twice the memory of
/// Envoy.
const OF_ENVOY: [Page; 5] = [
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

/// Where things are.
#[derive(Debug)]
pub struct Sources {
    /// The agent's version.
    pub version: String,
    /// None if the agent serves no port.
    pub status_port: Option<u16>,
    pub admin_port: u16,
    /// Envoy's program.
    pub envoy: String,
    /// The directory of Envoy's bootstraps, and one of the operator's.
    pub bootstraps: PathBuf,
    pub custom_bootstrap: Option<PathBuf>,
    /// The effective configuration, for when there is no agent to ask.
    pub config: Value,
}

/// What was collected.
#[allow(missing_debug_implementations)]
pub struct Bundle {
    files: Vec<File>,
    /// What is missing or cut off, and why.
    pub problems: Vec<String>,
}

/// Values of the environment that are secret: headers for istiod, passwords of proxies, and what is named
/// so. With the content of the token's file.
pub async fn known_secrets(env: &Environment, token: Option<PathBuf>) -> Secrets {
    let mut known = Vec::new();
    for (name, value) in env.with_prefix("") {
        let is_setting = environment::rows().any(|row| row.name == name);
        if !is_setting && redact::is_secret(name.as_bytes()) {
            known.push(value.to_owned());
        }
        if let Some((user, _)) = value.rsplit_once('@')
            && let Some(proxy) = Proxy::parse(value)
            && let Some(header) = proxy.authorization
        {
            let basic = header
                .to_str()
                .unwrap_or_default()
                .trim_start_matches("Basic ");
            let decoded = BASE64_STANDARD.decode(basic).unwrap_or_default();
            let decoded = String::from_utf8_lossy(&decoded);
            let passwords = [user, &decoded].map(|user| user.rsplit_once(':'));
            let passwords = passwords.into_iter().flatten();
            known.extend(passwords.map(|(_, password)| password.to_owned()));
            known.push(basic.to_owned());
        }
    }
    if let Some(path) = token
        && let Ok(Ok(token)) =
            tokio::time::timeout(PATIENCE, regular_file::read_aside(path, LARGEST_TOKEN)).await
    {
        known.push(String::from_utf8_lossy(&token).into_owned());
    }
    Secrets::new(known)
}

/// Collects everything. `doctor` gives its answer as text and as JSON.
pub async fn collect(
    sources: &Sources,
    secrets: &Secrets,
    doctor: impl Future<Output = (String, Value)>,
) -> Bundle {
    let room = Cell::new(LARGEST_BUNDLE);
    let collector = Collector {
        secrets,
        until: Instant::now() + LIMIT,
        room: &room,
        files: RefCell::default(),
        problems: RefCell::default(),
    };
    tokio::join!(
        collector.agent(sources),
        collector.pages(sources.admin_port, &OF_ENVOY),
        collector.machine(sources),
        collector.doctor(doctor),
    );
    let problems = collector.problems.take();
    if !problems.is_empty() {
        collector.text("errors.txt", Lines, &problems.join("\n"));
    }
    let mut files = collector.files.take();
    files.sort_by(|one, other| one.name.cmp(&other.name));
    Bundle { files, problems }
}

impl Bundle {
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        archive::write(FOLDER, &self.files, out)
    }
}

struct Collector<'a> {
    secrets: &'a Secrets,
    until: Instant,
    room: &'a Cell<usize>,
    files: RefCell<Vec<File>>,
    problems: RefCell<Vec<String>>,
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
    async fn agent(&self, sources: &Sources) {
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

    async fn doctor(&self, doctor: impl Future<Output = (String, Value)>) {
        match self.in_time(doctor).await {
            Ok((text, json)) => {
                self.text("doctor.txt", Lines, &text);
                self.text("doctor.json", OwnJson, &format!("{json:#}"));
            }
            Err(error) => self.problem("doctor.txt", error),
        }
    }

    /// Fetches pages one after the other: Envoy makes one at a time.
    async fn pages(&self, port: u16, pages: &[Page]) {
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

    async fn machine(&self, sources: &Sources) {
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
        if answer.status() != StatusCode::OK {
            return Err(Error::Status(answer.status()));
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
        let until = self.until.min(now + PATIENCE);
        timeout_at(until, future).await.map_err(|_| Error::Late)
    }

    fn part(&self, form: Form) -> Part<'a> {
        Part {
            redactor: Redactor::new(self.secrets, form),
            compressor: Compressor::new(LARGEST_FILE, self.room),
        }
    }

    fn text(&self, name: &str, form: Form, text: &str) {
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

#[cfg(test)]
mod tests;
