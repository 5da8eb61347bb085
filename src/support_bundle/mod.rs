//! Collects the data for a bug report in one `.tar.gz`: the doctor's report, configuration, bootstrap,
//! pages of Envoy and of the agent, the rules of traffic capture, versions.
//!
//! A running agent and Envoy are not necessary. `errors.txt` names the parts that cannot be read, with the
//! reason; large or slow parts are cut off. Everything passes [`redact`] and is compressed at once, so
//! memory does not grow with Envoy's configuration: at most 16 MiB of a file are stored. The collection takes
//! at most 20 s, and up to 10 s more at its start if files hang.

mod redact;

use std::cell::RefCell;
use std::fs;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use crc32fast::Hasher;
use flate2::Compression;
use flate2::write::DeflateEncoder;
use futures_util::future::join_all;
use futures_util::stream;
use http::{Request, Response, StatusCode};
use percent_encoding::percent_decode_str;
use serde_json::Value;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};
use tokio_util::io::{StreamReader, SyncIoBridge};

use crate::config::environment::{self, Environment};
use crate::files::regular_file::{self, MAX_SETTINGS};
use crate::net::http_client::{Body, Client};
use crate::problem::{Code, Problem, codes};
use crate::program;
use crate::proxy_config::ProxyConfig;
use crate::runtime::lifecycle::with_causes;
use redact::Form::{self, Json, Lines, OwnJson};
pub use redact::Secrets;

/// The time limit of the collection.
const LIMIT: Duration = Duration::from_secs(20);
/// The time limit of one step: a file, a command, or a part of a page.
pub(crate) const STEP_LIMIT: Duration = Duration::from_secs(5);
/// The largest compressed file, in bytes.
const MAX_COMPRESSED: usize = 16 << 20;
/// The largest token, in bytes. A header of HTTP cannot be larger.
const MAX_TOKEN: u64 = 64 << 10;

/// The name of the file, the path of the page, and its form.
type Page = (&'static str, &'static str, Form);

const CONFIG: &str = "config.json";
const AGENT_PAGES: [Page; 5] = [
    (CONFIG, "/debug/config", OwnJson),
    ("agent/overview.json", "/debug/overview", OwnJson),
    ("agent/log.txt", "/debug/log", Lines),
    ("agent/ndsz.json", "/debug/ndsz", OwnJson),
    ("agent/metrics.txt", "/metrics/agent", Lines),
];
/// The pages of Envoy, the largest one last. `config_dump` is without endpoints, which `clusters` has: with them
/// it takes twice the memory of Envoy.
const ENVOY_PAGES: [Page; 5] = [
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

#[derive(Debug)]
pub struct Sources {
    /// The agent's version.
    pub version: String,
    /// The source of ports, bootstrap paths and Envoy's path.
    pub proxy_config: ProxyConfig,
    /// The socket of Envoy's admin interface. None for a port.
    pub admin_socket: Option<PathBuf>,
    /// The effective configuration, which is stored if no agent answers.
    pub config: Value,
}

/// The collected files and problems.
#[allow(missing_debug_implementations)]
pub struct Bundle {
    secrets: Arc<Secrets>,
    until: Instant,
    files: RefCell<Vec<File>>,
    problems: RefCell<Vec<Problem>>,
}

/// A file that is compressed while it is written. Bytes beyond [`MAX_COMPRESSED`] are dropped.
struct File {
    name: String,
    content: Compressed,
}

/// A part of a gzip stream.
struct Compressed {
    deflate: DeflateEncoder<Vec<u8>>,
    checksum: Hasher,
}

/// Collects known secrets: variables with the name of a secret, passwords in URLs, and the content of the token's
/// file.
pub async fn known_secrets(
    env: &Environment,
    token: Option<PathBuf>,
) -> Result<Secrets, regex::Error> {
    let mut known = Vec::new();
    for (name, value) in env.with_prefix("") {
        let is_setting = environment::rows().any(|row| row.name == name);
        if !is_setting && redact::is_secret(name.as_bytes()) {
            known.push(value.to_owned());
        }
        if let Some((user, _)) = value.rsplit_once('@')
            && let Some((_, password)) = user.rsplit_once(':')
        {
            known.push(password.to_owned());
            known.push(percent_decode_str(password).decode_utf8_lossy().into());
        }
    }
    if let Some(path) = token
        && let Ok(Ok(token)) =
            timeout(STEP_LIMIT, regular_file::read_blocking(path, MAX_TOKEN)).await
    {
        known.push(String::from_utf8_lossy(&token).into_owned());
    }
    Secrets::new(known)
}

/// Collects everything. `doctor` returns its report as text and as JSON, and has its own time limit.
pub async fn collect(
    sources: &Sources,
    secrets: Secrets,
    doctor: impl Future<Output = (String, Value)>,
) -> Bundle {
    let bundle = Bundle {
        secrets: Arc::new(secrets),
        until: crate::runtime::clock::after(LIMIT),
        files: RefCell::default(),
        problems: RefCell::default(),
    };
    // The doctor runs before the large pages, because Envoy makes its pages one after the other.
    let (text, json) = doctor.await;
    bundle.text("doctor.txt", Lines, &text);
    bundle.text("doctor.json", OwnJson, &format!("{json:#}"));
    tokio::join!(bundle.agent(sources), bundle.envoy(sources), bundle.machine(sources),);
    let problems = bundle.problems.take();
    if !problems.is_empty() {
        let problems: Vec<_> = problems.iter().map(ToString::to_string).collect();
        bundle.text("errors.txt", Lines, &problems.join("\n"));
    }
    bundle
}

impl Bundle {
    async fn agent(&self, sources: &Sources) {
        if let Some(port) = sources.proxy_config.agent_port() {
            self.pages(port, &AGENT_PAGES).await;
        }
        if !self.files.borrow().iter().any(|file| file.name == CONFIG) {
            let found = "the agent did not answer";
            self.problem(codes::BUNDLE_CONFIG_OF_COMMAND, CONFIG, found);
            self.text(CONFIG, OwnJson, &format!("{:#}", sources.config));
        }
    }

    async fn envoy(&self, sources: &Sources) {
        match &sources.admin_socket {
            Some(path) => {
                self.pages_of(&Client::of_socket(path), "localhost", &ENVOY_PAGES).await;
            }
            None => self.pages(sources.proxy_config.admin_port(), &ENVOY_PAGES).await,
        }
    }

    async fn pages(&self, port: u16, pages: &[Page]) {
        self.pages_of(&Client::default(), &format!("localhost:{port}"), pages).await;
    }

    /// Fetches pages one after the other, because Envoy makes one at a time. Ends after the first page without an
    /// answer.
    async fn pages_of(&self, client: &Client, server: &str, pages: &[Page]) {
        for &(name, path, form) in pages {
            match self.request(client, &format!("http://{server}{path}")).await {
                Ok(answer) if answer.status() == StatusCode::OK => {
                    self.page(name, form, answer.into_body()).await;
                }
                // An agent without a DNS server does not have a name table.
                Ok(answer) if answer.status() == StatusCode::NOT_FOUND && path == "/debug/ndsz" => {
                }
                Ok(answer) => {
                    let found = format!("the answer is {}", answer.status());
                    self.problem(codes::BUNDLE_PAGE_MISSING, name, found);
                }
                Err(error) => {
                    let found = with_causes(&error);
                    return self.problem(codes::BUNDLE_PORT_SILENT, name, found);
                }
            }
        }
    }

    async fn request(&self, client: &Client, url: &str) -> io::Result<Response<Body>> {
        let built = Request::get(url).body(Bytes::new());
        let request = built.map_err(io::Error::other)?;
        let answer = in_time(self.until, client.send(request)).await?;
        answer.map_err(io::Error::other)
    }

    async fn page(&self, name: &'static str, form: Form, body: Body) {
        let until = self.until;
        let chunks = stream::unfold(body, move |mut body| async move {
            let chunk = in_time(until, body.chunk()).await.transpose()?;
            Some((chunk.and_then(|it| it.map_err(io::Error::other)), body))
        });
        let page = SyncIoBridge::new(StreamReader::new(Box::pin(chunks)));
        let secrets = self.secrets.clone();
        let written = spawn_blocking(move || File::write_from(name, &secrets, form, page)).await;
        match written {
            Ok(written) => self.add(written),
            Err(panic) => self.problem(codes::BUNDLE_PAGE_MISSING, name, panic),
        }
    }

    async fn machine(&self, sources: &Sources) {
        let envoy = [&*sources.proxy_config.binary_path, "--version"];
        let (rules, envoy, ()) = tokio::join!(
            join_all(CAPTURE.map(output)),
            output(&envoy),
            self.bootstraps(&sources.proxy_config),
        );
        self.text("capture.txt", Lines, &rules.concat());
        let kernel = regular_file::read_kernel("/proc/version").unwrap_or_default();
        let version = &sources.version;
        let text = format!("agent: {version}\nkernel: {}\n{envoy}", kernel.trim());
        self.text("versions.txt", Lines, &text);
    }

    /// Adds the bootstraps that the agent writes, one for each epoch of Envoy, and the operator's, which may be YAML.
    /// With a standby, each container has a directory of its own.
    async fn bootstraps(&self, config: &ProxyConfig) {
        let directory = PathBuf::from(&config.config_path);
        let root = directory.clone();
        let listed = spawn_blocking(move || {
            let (directories, mut files): (Vec<_>, Vec<_>) =
                entries(&root).into_iter().partition(|path| path.is_dir());
            files.extend(directories.iter().flat_map(|directory| entries(directory)));
            files.retain(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with("envoy-rev") && name.ends_with(".json")
            });
            files
        });
        let listed = in_time(self.until, listed).await.ok();
        let mut paths = listed.and_then(Result::ok).unwrap_or_default();
        let custom = Some(&config.custom_config_file).filter(|path| !path.is_empty());
        paths.extend(custom.map(Into::into));
        if paths.is_empty() {
            let found = format!("no file envoy-rev*.json in {}", config.config_path);
            self.problem(codes::BUNDLE_BOOTSTRAP_MISSING, "bootstrap", found);
        }
        for path in paths {
            let file_name = path.file_name().unwrap_or_default();
            let shown = path.strip_prefix(&directory).unwrap_or(file_name.as_ref());
            let name = format!("bootstrap/{}", shown.display());
            let reading = regular_file::read_blocking(path, MAX_SETTINGS);
            let read = in_time(self.until, reading).await.and_then(|read| read);
            let parsed = read.and_then(|text| {
                let invalid = |_| io::Error::other("the file is neither YAML nor JSON");
                serde_saphyr::from_slice::<Value>(&text).map_err(invalid)
            });
            match parsed {
                Ok(document) => self.text(&name, Json, &format!("{document:#}")),
                Err(error) => self.problem(codes::BUNDLE_BOOTSTRAP_UNREADABLE, &name, error),
            }
        }
    }

    fn text(&self, name: &str, form: Form, text: &str) {
        self.add(File::write_from(name, &self.secrets, form, text.as_bytes()));
    }

    fn add(&self, (file, copied): (File, io::Result<()>)) {
        if let Err(error) = copied {
            self.problem(codes::BUNDLE_PART_CUT, &file.name, with_causes(&error));
        }
        self.files.borrow_mut().push(file);
    }

    fn problem(&self, code: &'static Code, name: &str, found: impl ToString) {
        let problem = Problem::new(code, name, found);
        tracing::warn!("{problem}");
        self.problems.borrow_mut().push(problem);
    }

    /// Writes the archive. Its gzip stream joins what is compressed already: to compress large files again would take
    /// seconds. Source of the format: RFC 1951 and RFC 1952.
    pub fn write(self, out: &mut impl Write) -> io::Result<()> {
        const BLOCK: usize = 512;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut files = self.files.into_inner();
        files.sort_by(|one, other| one.name.cmp(&other.name));
        let (mut parts, mut padding) = (Vec::new(), 0);
        for file in files {
            let size = file.content.length();
            let mut header = tar::Header::new_gnu();
            header.set_size(size);
            header.set_mode(0o600);
            header.set_mtime(now.as_ref().map_or(0, |now| now.as_secs()));
            // The padding of the file before comes first.
            let mut entry = tar::Builder::new(vec![0; padding]);
            let path = format!("support-bundle/{}", file.name);
            entry.append_data(&mut header, path, io::empty())?;
            parts.extend([Compressed::of(entry.get_ref())?, file.content]);
            padding = (size.next_multiple_of(BLOCK as u64) - size) as usize;
        }
        // Two empty blocks end the archive.
        parts.push(Compressed::of(&vec![0; padding + 2 * BLOCK])?);
        // The method deflate, no flags, no time, and an unknown system.
        out.write_all(&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255])?;
        let (mut checksum, mut length) = (Hasher::new(), 0);
        for part in parts {
            checksum.combine(&part.checksum);
            length += part.length();
            part.write_to(out)?;
        }
        // An empty block that is marked as the last one ends the stream.
        out.write_all(&[3, 0])?;
        out.write_all(&checksum.finalize().to_le_bytes())?;
        // The length modulo 2^32.
        out.write_all(&(length as u32).to_le_bytes())?;
        out.flush()
    }
}

impl Compressed {
    fn new() -> Self {
        Self {
            deflate: DeflateEncoder::new(Vec::new(), Compression::fast()),
            checksum: Hasher::new(),
        }
    }

    fn of(bytes: &[u8]) -> io::Result<Self> {
        let mut part = Self::new();
        part.write_all(bytes)?;
        Ok(part)
    }

    /// Returns the number of bytes before compression.
    fn length(&self) -> u64 {
        self.deflate.total_in()
    }

    /// Writes the part without an end of the stream, at a full byte, so that another part can follow.
    fn write_to(mut self, out: &mut impl Write) -> io::Result<()> {
        self.deflate.flush()?;
        out.write_all(self.deflate.get_ref())
    }
}

impl Write for Compressed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.deflate.write_all(bytes)?;
        self.checksum.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl File {
    /// Writes a page without its secrets. Also returns the part that was written before an error.
    fn write_from(
        name: &str,
        secrets: &Secrets,
        form: Form,
        mut from: impl Read,
    ) -> (Self, io::Result<()>) {
        let mut to = BufWriter::new(Self { name: name.to_owned(), content: Compressed::new() });
        // After an error, the bytes before it are flushed, too.
        let copied = redact::copy(secrets, form, &mut from, &mut to).and(to.flush());
        let (file, _) = to.into_parts();
        if file.is_full() {
            let problem = format!("more than {} MiB compressed", MAX_COMPRESSED >> 20);
            return (file, Err(io::Error::other(problem)));
        }
        (file, copied)
    }

    fn is_full(&self) -> bool {
        self.content.deflate.get_ref().len() >= MAX_COMPRESSED
    }
}

impl Write for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.is_full() {
            self.content.write_all(bytes)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lists the files and directories in a directory; none if it cannot be read.
#[expect(clippy::disallowed_methods, reason = "the operator names the directory")]
fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// Returns a command with the output of the program, or with the error of running it.
async fn output(command: &[&str]) -> String {
    let printed = match program::run(command[0], &command[1..], "", STEP_LIMIT).await {
        Ok(printed) => String::from_utf8_lossy(&printed).into_owned(),
        Err(error) => error.to_string(),
    };
    format!("$ {}\n{}\n\n", command.join(" "), printed.trim())
}

/// Waits for a future for at most [`STEP_LIMIT`], until `until` at the latest. After that time even a future that is
/// ready is late.
async fn in_time<T>(until: Instant, future: impl Future<Output = T>) -> io::Result<T> {
    let late = || io::Error::other("no answer within 5 s, or 20 s in all");
    let remaining = until.saturating_duration_since(Instant::now());
    if remaining.is_zero() {
        return Err(late());
    }
    let output = timeout(remaining.min(STEP_LIMIT), future).await;
    output.map_err(|_| late())
}

#[cfg(test)]
mod tests;
