//! Tests the collection of a support bundle from servers that send arbitrary, late or no responses, and the size limits
//! of files.

use flate2::read::MultiGzDecoder;
use serde_json::json;
use std::collections::BTreeMap;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::*;
use crate::report::{Check, Group, PodState};

const STATISTICS: Form = Lines(lines::statistic);
const HEAD: &str = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n";

fn bundle(limit: Duration) -> Bundle {
    Bundle {
        until: Instant::now() + limit,
        files: RefCell::default(),
        problems: RefCell::default(),
    }
}

/// Starts a server that calls `serve` for each connection, with the requested path.
async fn server<F: Future<Output = ()> + Send + 'static>(
    serve: fn(TcpStream, String) -> F,
) -> (u16, JoinSet<()>) {
    let listener = TcpListener::bind("localhost:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut open = JoinSet::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            open.spawn(async move {
                let mut request = [0; 1000];
                let length = stream.read(&mut request).await.unwrap_or_default();
                let request = String::from_utf8_lossy(&request[..length]).into_owned();
                let path = request.split(' ').nth(1).unwrap_or_default();
                serve(stream, path.to_owned()).await;
            });
        }
    });
    (port, tasks)
}

/// Returns the content of each file by its name, as `tar` would unpack them.
fn unpacked(bundle: Bundle) -> BTreeMap<String, String> {
    let mut archive = Vec::new();
    bundle.write(&mut archive).expect("written");
    let mut archive = tar::Archive::new(MultiGzDecoder::new(archive.as_slice()));
    let files = archive.entries().expect("an archive").map(|entry| {
        let mut entry = entry.expect("an entry");
        let path = entry.path().expect("a path").display().to_string();
        let name = path.strip_prefix("support-bundle/").expect("the folder");
        let mut content = String::new();
        entry.read_to_string(&mut content).expect("text");
        (name.to_owned(), content)
    });
    files.collect()
}

#[tokio::test(start_paused = true)]
async fn a_hung_envoy_costs_one_wait_and_is_named() {
    let (port, _server) = server(|stream, _| async move {
        std::future::pending::<()>().await;
        drop(stream);
    })
    .await;
    let bundle = bundle(LIMIT);
    let start = Instant::now();
    bundle.pages(port, &ENVOY_PAGES).await;
    assert_eq!(start.elapsed().as_secs(), STEP_LIMIT.as_secs());
    let problems = bundle.problems.take();
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert_eq!(problems[0].subject, "envoy/server_info.json");
    assert_eq!(problems[0].code, Code::BundlePortSilent);
    assert!(problems[0].found.starts_with("no answer within 5 s"));
    assert!(unpacked(bundle).is_empty());
}

#[tokio::test]
async fn answers_of_any_kind_leave_a_file_or_a_problem() {
    let (port, _server) = server(|mut stream, path| async move {
        let answer = match path.as_str() {
            "/good" => format!("{HEAD}{{\"token\": \"hush\", \"allocated\": \"7\"}}"),
            "/missing" | "/debug/ndsz" => {
                "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_owned()
            }
            "/text" => format!("{HEAD}{{\"allocated\": 1, no JSON here: hush"),
            "/cut" => "HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\na: 1\nhalf".to_owned(),
            _ => "nonsense\r\n\r\n".to_owned(),
        };
        // The client may have closed the connection.
        let _ = stream.write_all(answer.as_bytes()).await;
    })
    .await;
    let bundle = bundle(LIMIT);
    let pages = [
        ("good", "/good", Json("Memory")),
        ("missing", "/missing", Json("Memory")),
        // An agent without DNS has no name table and responds with 404, which is not a problem.
        ("agent/ndsz.json", "/debug/ndsz", Json("NameTable")),
        ("text", "/text", Json("Memory")),
        ("cut", "/cut", STATISTICS),
        ("after", "/text", STATISTICS),
    ];
    bundle.pages(port, &pages).await;
    let problems = bundle.problems.take();
    let found = problems.iter().map(|it| (it.code, it.subject.as_str()));
    let expected = [
        (Code::BundlePageMissing, "missing"),
        (Code::BundlePartCut, "text"),
        (Code::BundlePartCut, "cut"),
    ];
    assert_eq!(Vec::from_iter(found), expected);
    let files = unpacked(bundle);
    let expected = [
        ("after", ""),
        ("cut", "a: 1\n"),
        ("good", "{\n \"allocated\": \"7\"\n}"),
        ("text", "{\n \"allocated\": 1"),
    ];
    let expected = expected.map(|(name, text)| (name.to_owned(), text.to_owned()));
    assert_eq!(files, expected.into());
}

#[tokio::test]
async fn an_answer_without_end_is_cut_off_when_the_time_is_over() {
    let (port, _server) = server(|mut stream, _| async move {
        let lines = format!("{HEAD}{}", "a: 1\n".repeat(1000));
        while stream.write_all(lines.as_bytes()).await.is_ok() {}
    })
    .await;
    let bundle = bundle(Duration::from_millis(200));
    bundle.pages(port, &[("endless", "/", STATISTICS)]).await;
    let problems = bundle.problems.take();
    assert_eq!(problems[0].code, Code::BundlePartCut);
    let text = &unpacked(bundle)["endless"];
    assert!(text.starts_with("a: 1\n") && text.ends_with("a: 1\n"));
}

#[tokio::test]
async fn a_large_page_is_complete() {
    let (port, _server) = server(|mut stream, _| async move {
        let lines = format!("a: {}\n", "1".repeat((64 << 10) - 4)).repeat(64);
        let _ = stream.write_all(HEAD.as_bytes()).await;
        for _ in 0..32 {
            let _ = stream.write_all(lines.as_bytes()).await;
        }
    })
    .await;
    let bundle = bundle(Duration::from_secs(600));
    bundle.pages(port, &[("large", "/", STATISTICS)]).await;
    assert_eq!(bundle.problems.take(), []);
    assert_eq!(unpacked(bundle)["large"].len(), 128 << 20);
}

#[test]
fn a_full_file_takes_no_more() {
    let mut noise = File::new(&"n".repeat(200));
    let mut random = [0; 1 << 16];
    for _ in 0..(MAX_COMPRESSED >> 16) + 100 {
        random.fill_with(|| fastrand::u8(..));
        noise.write_all(&random).expect("taken or left out");
    }
    assert!(noise.is_full());
    let bundle = bundle(LIMIT);
    bundle.files.borrow_mut().push(noise);
    let mut archive = Vec::new();
    bundle.write(&mut archive).expect("written");
    assert!((MAX_COMPRESSED..MAX_COMPRESSED + (1 << 20)).contains(&archive.len()));
    let mut archive = tar::Archive::new(MultiGzDecoder::new(archive.as_slice()));
    let mut entries = archive.entries().expect("an archive");
    let entry = entries.next().expect("a file").expect("a file");
    let name = format!("support-bundle/{}", "n".repeat(200));
    assert_eq!(entry.path().expect("a path"), Path::new(&name));
    assert!(entry.size() > MAX_COMPRESSED as u64);
}

#[tokio::test]
async fn without_agent_and_envoy_there_is_a_bundle_of_the_rest() {
    let directory = tempfile::tempdir().expect("a directory");
    let write = |name: &str, text: &str| {
        fs::write(directory.path().join(name), text).expect("written");
    };
    write("envoy-rev.json", r#"{"node": {"id": "a"}}"#);
    write("envoy-rev1.json", "{{");
    write("other.json", "{}");
    fs::create_dir(directory.path().join("istio-standby")).expect("a directory");
    write("istio-standby/envoy-rev0.json", r#"{"node": {"id": "b"}}"#);
    write(
        "custom.yaml",
        "static_resources:\n  secrets:\n  - password:\n      inline_string: |\n        hush\n",
    );
    // Nothing listens on these two ports, so they refuse connections.
    let sources = Sources {
        version: "1.2.3".to_owned(),
        admin_socket: None,
        proxy_config: ProxyConfig {
            status_port: 1,
            proxy_admin_port: 2,
            binary_path: "no-such-envoy".to_owned(),
            config_path: directory.path().display().to_string(),
            custom_config_file: directory.path().join("custom.yaml").display().to_string(),
            ..ProxyConfig::default()
        },
        config: json!({ "flags": {} }),
    };
    let text = "inline_string \"hush\"";
    let refused = Problem::new(Code::ResourceRefused, "NACK of Listener", text);
    let checks = vec![Check::from(&refused), Check::ok("process", "pid 7")];
    let report = Report::new("node".to_owned(), vec![Group::new("Envoy", checks)]);
    let doctor = async { Ok(report.judged(&PodState::NotReady, None)) };
    let start = Instant::now();
    let bundle = collect(&sources, doctor).await;
    assert!(start.elapsed() < LIMIT);
    let files = unpacked(bundle);
    let verdict =
        "not ready: NACK of Listener: Envoy refused resources of istiod [RESOURCE_REFUSED]";
    assert!(files["doctor.txt"].starts_with(verdict), "{}", files["doctor.txt"]);
    assert!(files["doctor.txt"].contains("process: pid 7"), "{}", files["doctor.txt"]);
    assert!(files["doctor.json"].contains("\"code\": \"RESOURCE_REFUSED\""));
    let left_out: Value = serde_json::from_str(&files["left_out.json"]).expect("JSON");
    assert_eq!(left_out["doctor.json"], 1);
    assert_eq!(left_out["bootstrap/custom.yaml"], 1);
    let expected: Value = serde_json::from_str(&files["config.json"]).expect("JSON");
    assert_eq!(expected, sources.config);
    assert!(files["bootstrap/envoy-rev.json"].contains("\"id\": \"a\""));
    assert!(files["bootstrap/istio-standby/envoy-rev0.json"].contains("\"id\": \"b\""));
    assert_eq!(files["bootstrap/custom.yaml"], "{\n \"static_resources\": {}\n}");
    assert!(files.values().all(|text| !text.contains("hush")), "{files:?}");
    assert!(files["versions.txt"].contains("agent: 1.2.3\nkernel: "));
    assert!(files["capture.txt"].contains("$ nft -j list ruleset\n"));
    for missing in [
        "config.json: cannot connect to 127.0.0.1:1: ",
        "[BUNDLE_CONFIG_OF_COMMAND]",
        "envoy/server_info.json: ",
        "bootstrap/envoy-rev1.json: the file is neither YAML nor JSON",
    ] {
        assert!(files["errors.txt"].contains(missing), "{missing}: {files:?}");
    }
    assert!(!files.contains_key("bootstrap/other.json"));
}
