//! Collects the data for a bug report in one `.tar.gz`: the doctor's report, configuration, bootstrap,
//! pages of Envoy and of the agent, the rules of traffic capture, versions.
//!
//! A running agent and Envoy are not necessary. `errors.txt` names the parts that cannot be read, with the
//! reason; large or slow parts are cut off. Everything passes [`filter`] and is compressed at once, so
//! memory does not grow with Envoy's configuration: at most 16 MiB of a file are stored. `left_out.json` has
//! the number of members and lines that the filter left out. The collection takes at most 20 s, and up to 10 s
//! more at its start if files hang.

mod filter;

use std::cell::RefCell;
use std::fs;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use futures_util::future::join_all;
use futures_util::stream;
use http::{Request, Response, StatusCode};
use serde_json::{Value, json};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};
use tokio_util::io::{StreamReader, SyncIoBridge};

use crate::files::regular_file::{self, MAX_SETTINGS};
use crate::net::http_client::{Body, Client};
use crate::problem::{Code, Problem};
use crate::program;
use crate::proxy_config::ProxyConfig;
use crate::report::Report;
use crate::runtime::lifecycle::with_causes;
use filter::Form::{self, Json, Lines};
use filter::{is_name, lines, report};

/// The time limit of the collection.
const LIMIT: Duration = Duration::from_secs(20);
/// The time limit of one step: a file, a command, or a part of a page.
pub(crate) const STEP_LIMIT: Duration = Duration::from_secs(5);
/// The largest compressed file, in bytes.
const MAX_COMPRESSED: usize = 16 << 20;

/// The name of the file, the path of the page, and its form.
type Page = (&'static str, &'static str, Form);

const CONFIG: &str = "config.json";
const AGENT_PAGES: [Page; 5] = [
    (CONFIG, "/debug/config", Json("Configuration")),
    ("agent/overview.json", "/debug/overview", Json("Overview")),
    ("agent/log.txt", "/debug/log", Lines(lines::log)),
    ("agent/ndsz.json", "/debug/ndsz", Json("NameTable")),
    ("agent/metrics.txt", "/metrics/agent", Lines(lines::metric)),
];
/// The pages of Envoy, the largest one last. `config_dump` is without endpoints, which `clusters` has: with them
/// it takes twice the memory of Envoy.
const ENVOY_PAGES: [Page; 7] = [
    ("envoy/server_info.json", "/server_info", Json("ServerInfo")),
    ("envoy/memory.json", "/memory", Json("Memory")),
    ("envoy/certs.json", "/certs", Json("Certificates")),
    ("envoy/listeners.json", "/listeners?format=json", Json("Listeners")),
    ("envoy/clusters.json", "/clusters?format=json", Json("Clusters")),
    // As text, because histograms in JSON are several times as large.
    ("envoy/stats.txt", "/stats", Lines(lines::statistic)),
    ("envoy/config_dump.json", "/config_dump", Json("ConfigDump")),
];
/// The commands that print the rules of traffic capture.
const CAPTURE: &str =
    "iptables-save;ip6tables-save;iptables-legacy-save;ip6tables-legacy-save;nft -j list ruleset";

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
    until: Instant,
    files: RefCell<Vec<File>>,
    problems: RefCell<Vec<Problem>>,
}

/// A file that is compressed while it is written. Bytes beyond [`MAX_COMPRESSED`] are dropped.
struct File {
    name: String,
    content: GzEncoder<Vec<u8>>,
    /// The number of bytes before compression.
    length: u64,
    /// The members or lines that the filter left out.
    left_out: u64,
}

/// Collects everything. `doctor` makes the doctor's report, and has its own time limit.
pub async fn collect(
    sources: &Sources,
    doctor: impl Future<Output = Result<Report, Problem>>,
) -> Bundle {
    let bundle = Bundle {
        until: crate::runtime::clock::after(LIMIT),
        files: RefCell::default(),
        problems: RefCell::default(),
    };
    // The doctor runs before the large pages, because Envoy makes its pages one after the other.
    match doctor.await {
        Ok(found) => bundle.doctor(found),
        Err(Problem { code, .. }) => bundle.problem(code, "doctor", code.cause()),
    }
    tokio::join!(bundle.agent(sources), bundle.envoy(sources), bundle.machine(sources),);
    let problems = bundle.problems.take();
    if !problems.is_empty() {
        let problems: Vec<_> = problems.iter().map(ToString::to_string).collect();
        bundle.own("errors.txt", &problems.join("\n"), 0);
    }
    let counts: Value =
        bundle.files.borrow().iter().map(|it| (it.name.clone(), it.left_out)).collect();
    bundle.own("left_out.json", &format!("{counts:#}"), 0);
    bundle
}

impl Bundle {
    fn doctor(&self, found: Report) {
        let mut left_out = 0;
        let found = report::reduced(found, &mut left_out);
        self.own("doctor.txt", &found.text(true, usize::MAX), left_out);
        self.own("doctor.json", &format!("{:#}", json!(found)), left_out);
    }

    async fn agent(&self, sources: &Sources) {
        if let Some(port) = sources.proxy_config.agent_port() {
            self.pages(port, &AGENT_PAGES).await;
        }
        if !self.files.borrow().iter().any(|file| file.name == CONFIG) {
            let found = "the agent did not answer";
            self.problem(Code::BundleConfigOfCommand, CONFIG, found);
            self.text(CONFIG, Json("Configuration"), &sources.config.to_string());
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
                    self.problem(Code::BundlePageMissing, name, found);
                }
                Err(error) => {
                    let found = with_causes(&error);
                    return self.problem(Code::BundlePortSilent, name, found);
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
        let written = spawn_blocking(move || File::write_from(name, form, page)).await;
        match written {
            Ok(written) => self.add(written),
            Err(panic) => self.problem(Code::BundlePageMissing, name, panic),
        }
    }

    async fn machine(&self, sources: &Sources) {
        let (rules, envoy, ()) = tokio::join!(
            join_all(CAPTURE.split(';').map(output)),
            program::run(&sources.proxy_config.binary_path, &["--version"], "", STEP_LIMIT),
            self.bootstraps(&sources.proxy_config),
        );
        let (mut text, mut left_out) = (String::new(), 0);
        for (line, printed) in rules {
            let rules = printed.map(|printed| lines::rules(line, &printed, &mut left_out));
            text += &format!("$ {line}\n{}\n", rules.unwrap_or_else(failure));
        }
        self.own("capture.txt", &text, left_out);
        let kernel = regular_file::read_kernel("/proc/sys/kernel/osrelease").unwrap_or_default();
        // The line is `envoy version: COMMIT/VERSION/…`.
        let envoy = envoy.unwrap_or_else(|problem| failure(problem).into());
        let envoy = String::from_utf8_lossy(&envoy);
        let envoy = envoy.trim().rsplit(' ').next().filter(|it| is_name(it)).unwrap_or_default();
        let (agent, kernel) = (&sources.version, kernel.trim());
        let text = format!("agent: {agent}\nkernel: {kernel}\nEnvoy: {envoy}\n");
        self.own("versions.txt", &text, 0);
    }

    /// Adds the bootstraps that the agent writes, one for each epoch of Envoy, and the operator's, which may be YAML.
    /// If two containers run the agent, each has a directory of its own.
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
            self.problem(Code::BundleBootstrapMissing, "bootstrap", found);
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
                Ok(mut document) => {
                    // The type comes first, as the filter expects it.
                    document.sort_all_objects();
                    self.text(&name, Json("Bootstrap"), &document.to_string());
                }
                Err(error) => self.problem(Code::BundleBootstrapUnreadable, &name, error),
            }
        }
    }

    fn text(&self, name: &str, form: Form, text: &str) {
        self.add(File::write_from(name, form, text.as_bytes()));
    }

    /// Adds a text of this agent, of which this number of parts was left out before.
    fn own(&self, name: &str, text: &str, left_out: u64) {
        let mut file = File::new(name);
        file.left_out = left_out;
        let written = file.write_all(text.as_bytes());
        self.add((file, written));
    }

    fn add(&self, (file, copied): (File, io::Result<()>)) {
        if let Err(error) = copied {
            self.problem(Code::BundlePartCut, &file.name, with_causes(&error));
        }
        self.files.borrow_mut().push(file);
    }

    fn problem(&self, code: Code, name: &str, found: impl ToString) {
        let problem = Problem::new(code, name, found);
        tracing::warn!("{problem}");
        self.problems.borrow_mut().push(problem);
    }

    /// Writes the archive as consecutive gzip members, because to compress large files again would take seconds.
    pub fn write(self, out: &mut impl Write) -> io::Result<()> {
        const BLOCK: u64 = 512;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut files = self.files.into_inner();
        files.sort_by(|one, other| one.name.cmp(&other.name));
        let mut padding = 0;
        for file in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(file.length);
            header.set_mode(0o600);
            header.set_mtime(now.as_ref().map_or(0, |now| now.as_secs()));
            // The padding of the file before comes first.
            let mut entry = tar::Builder::new(vec![0; padding]);
            let path = format!("support-bundle/{}", file.name);
            entry.append_data(&mut header, path, io::empty())?;
            out.write_all(&compressed(entry.get_ref())?)?;
            padding = (file.length.next_multiple_of(BLOCK) - file.length) as usize;
            out.write_all(&file.content.finish()?)?;
        }
        // Two empty blocks end the archive.
        out.write_all(&compressed(&vec![0; padding + 2 * BLOCK as usize])?)?;
        out.flush()
    }
}

fn compressed(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut member = GzEncoder::new(Vec::new(), Compression::fast());
    member.write_all(bytes)?;
    member.finish()
}

impl File {
    fn new(name: &str) -> Self {
        let content = GzEncoder::new(Vec::new(), Compression::fast());
        Self { name: name.to_owned(), content, length: 0, left_out: 0 }
    }

    /// Writes the kept part of a page. Also returns the part that was written before an error.
    fn write_from(name: &str, form: Form, from: impl Read) -> (Self, io::Result<()>) {
        let (mut to, mut left_out) = (BufWriter::new(Self::new(name)), 0);
        // After an error, the bytes before it are flushed, too.
        let copied = form.copy(from, &mut to, &mut left_out).and(to.flush());
        let (mut file, _) = to.into_parts();
        file.left_out = left_out;
        if file.is_full() {
            let problem = format!("more than {} MiB compressed", MAX_COMPRESSED >> 20);
            return (file, Err(io::Error::other(problem)));
        }
        (file, copied)
    }

    fn is_full(&self) -> bool {
        self.content.get_ref().len() >= MAX_COMPRESSED
    }
}

impl Write for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.is_full() {
            self.content.write_all(bytes)?;
            self.length += bytes.len() as u64;
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

async fn output(line: &str) -> (&str, Result<Vec<u8>, Problem>) {
    let words = Vec::from_iter(line.split(' '));
    (line, program::run(words[0], &words[1..], "", STEP_LIMIT).await)
}

/// Describes a program that failed, without its own message.
fn failure(Problem { code, .. }: Problem) -> String {
    format!("{} [{}]\n", code.cause(), code.name())
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
