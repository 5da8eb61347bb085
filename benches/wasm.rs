//! Measures the cost of fetching a Wasm module of 100 MB, compared with `curl`. `benches/README.md`
//! explains the table.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::arithmetic_side_effects,
    clippy::disallowed_methods,
    clippy::disallowed_types
)]

mod support;

use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use aws_lc_rs::digest::{SHA256, digest};
use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3 as core;
use envoy_types::pb::envoy::extensions::filters::http::wasm::v3::Wasm;
use envoy_types::pb::envoy::extensions::wasm::v3 as plugin;
use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use envoy_types::pb::google::protobuf;
use flate2::Compression;
use flate2::write::GzEncoder;
use local_istiod::{LocalIstiod, Options, Stream};
use prost::Message;
use serde_json::json;
use support::table::Table;
use support::{Process, block_on, channel, connect, median, write};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_stream::StreamExt;
use tonic::Streaming;

const TYPE_URL: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";
const SIZE: usize = 100_000_000;
const ROUNDS: usize = 5;

/// The content of the servers: the module on its own, and an image that contains the module.
struct Content {
    module: Bytes,
    layer: Bytes,
    manifest: Bytes,
}

fn main() {
    let content = Arc::new(content());
    let plain = serve(content.clone(), None);
    let tls = serve(content, Some(acceptor()));
    let files = tempfile::tempdir().expect("a directory");
    let output = files.path().join("module");
    let output = output.display();
    let mut table =
        Table::new(&["100 MB", "agent s", "curl -o s", "curl | sha256sum s", "of curl", "peak MB"]);
    for (what, url, path, unpack) in [
        ("http", format!("http://{plain}/module"), None, ""),
        ("https", format!("https://{tls}/module"), None, ""),
        (
            "image, tar.gz",
            format!("oci://{tls}/image:tag"),
            Some(format!("https://{tls}/v2/image/blobs/layer")),
            "| gunzip ",
        ),
    ] {
        let direct = path.as_deref().unwrap_or(&url);
        let (mut agent, mut curl, mut hashed) = (Vec::new(), Vec::new(), Vec::new());
        let mut peaks = Vec::new();
        // All commands take turns, so that they meet the same noise of the machine.
        for _ in 0..ROUNDS {
            let (seconds, peak) = block_on(fetch(&url));
            agent.push(seconds);
            peaks.push(peak);
            curl.push(shell(&format!("curl -sSfk -o {output} {direct}")));
            hashed.push(shell(&format!("curl -sSfk {direct} {unpack}| sha256sum")));
        }
        let (agent, curl) = (median(agent), median(curl));
        table.row([
            what.to_owned(),
            format!("{agent:.2}"),
            format!("{curl:.2}"),
            format!("{:.2}", median(hashed)),
            format!("{:.1}", agent / curl),
            format!("{:.1}", median(peaks)),
        ]);
    }
    table.print();
}

/// Returns the time until a new agent has responded with the module, in seconds, and the growth of the
/// agent's memory up to its peak, in MB.
async fn fetch(url: &str) -> (f64, f64) {
    let istiod = LocalIstiod::start(Options::default()).await;
    let mut istiod = istiod.expect("a control plane");
    let hour = std::time::Duration::from_secs(3600);
    let token = istiod.mint_token("default", "bench", hour);
    let directory = tempfile::tempdir().expect("a directory");
    let token = token.expect("a token");
    write(directory.path(), "var/run/secrets/tokens/istio-token", &token);
    let address = format!("localhost:{}", istiod.address.port());
    let insecure = [("WASM_INSECURE_REGISTRIES", "*".to_owned())];
    let agent = Process::relay_with(directory.path(), &address, &istiod.root_pem(), &insecure);
    let socket = directory.path().join("etc/istio/proxy/XDS");
    connect(&socket).await;
    let request = DiscoveryRequest {
        type_url: TYPE_URL.to_owned(),
        resource_names: vec!["plugin".to_owned()],
        ..Default::default()
    };
    let requests = tokio_stream::once(request).chain(tokio_stream::pending());
    let mut client = AggregatedDiscoveryServiceClient::new(channel(&socket).await);
    let (responses, stream) =
        tokio::join!(client.stream_aggregated_resources(requests), istiod.streams.recv());
    let mut responses = responses.expect("a stream").into_inner();
    let stream = stream.expect("a stream");
    // A small first module, so that work that the agent does only once, for example reading root
    // certificates, is not measured. The image has no small variant.
    let first = url.replace("/module", "/small");
    if first != url {
        answer(&stream, &mut responses, &first).await;
    }
    agent.reset_peak();
    let before = agent.memory("VmRSS");
    let start = Instant::now();
    answer(&stream, &mut responses, url).await;
    let seconds = start.elapsed().as_secs_f64();
    let grown = agent.memory("VmHWM").saturating_sub(before);
    (seconds, grown as f64 / 1e3)
}

async fn answer(stream: &Stream, responses: &mut Streaming<DiscoveryResponse>, url: &str) {
    stream.send(&response(url)).await.expect("sent");
    let converted = responses.next().await.expect("open").expect("a response");
    let value = String::from_utf8_lossy(&converted.resources[0].value).into_owned();
    assert!(value.contains("var/lib/istio/data"), "{value}");
}

fn response(url: &str) -> DiscoveryResponse {
    let uri = core::HttpUri {
        uri: url.to_owned(),
        timeout: Some(protobuf::Duration { seconds: 60, nanos: 0 }),
        ..Default::default()
    };
    let remote = core::RemoteDataSource { http_uri: Some(uri), ..Default::default() };
    let vm = plugin::VmConfig {
        code: Some(core::AsyncDataSource {
            specifier: Some(core::async_data_source::Specifier::Remote(remote)),
        }),
        ..Default::default()
    };
    let config = plugin::PluginConfig {
        vm: Some(plugin::plugin_config::Vm::VmConfig(vm)),
        ..Default::default()
    };
    let wasm = Wasm { config: Some(config) };
    let extension = core::TypedExtensionConfig {
        name: "plugin".to_owned(),
        typed_config: Some(protobuf::Any {
            type_url: "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm".to_owned(),
            value: wasm.encode_to_vec(),
        }),
    };
    DiscoveryResponse {
        resources: vec![protobuf::Any {
            type_url: TYPE_URL.to_owned(),
            value: extension.encode_to_vec(),
        }],
        type_url: TYPE_URL.to_owned(),
        nonce: "n".to_owned(),
        ..Default::default()
    }
}

fn shell(line: &str) -> f64 {
    let mut command = Command::new("sh");
    let start = Instant::now();
    let output = command.args(["-c", line]).output().expect("a shell");
    assert!(output.status.success(), "{line}: {output:?}");
    start.elapsed().as_secs_f64()
}

/// Makes a module and an image of it. Half of the module's bits are random, so that gzip compresses it
/// as much as real modules.
fn content() -> Content {
    let random = (8..SIZE).map(|_| fastrand::u8(..) & 0x55);
    let module: Vec<u8> = b"\0asm\x01\0\0\0".iter().copied().chain(random).collect();
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    let mut header = tar::Header::new_ustar();
    header.set_size(SIZE as u64);
    let appended = archive.append_data(&mut header, "plugin.wasm", &*module);
    appended.expect("memory");
    let layer = archive.into_inner().and_then(GzEncoder::finish);
    let layer = layer.expect("memory");
    let digest = digest(&SHA256, &layer);
    let digest: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let layers = [json!({
        "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
        "digest": format!("sha256:{digest}"),
        "size": layer.len(),
    })];
    let manifest = json!({ "schemaVersion": 2, "layers": layers }).to_string();
    Content { module: module.into(), layer: layer.into(), manifest: manifest.into() }
}

fn acceptor() -> TlsAcceptor {
    let own = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).expect("a key");
    let key = PrivateKeyDer::try_from(own.signing_key.serialize_der()).expect("a key");
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    let config = ServerConfig::builder_with_provider(Arc::new(provider))
        .with_safe_default_protocol_versions()
        .expect("TLS versions")
        .with_no_client_auth()
        .with_single_cert(vec![own.cert.der().clone()], key)
        .expect("a usable certificate");
    Arc::new(config).into()
}

/// Starts a server on a thread of its own, and returns its address.
fn serve(content: Arc<Content>, tls: Option<TlsAcceptor>) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("a socket");
    let address = listener.local_addr().expect("bound").to_string();
    std::thread::spawn(move || {
        block_on(async {
            let listener = TcpListener::from_std(listener).expect("a socket");
            while let Ok((stream, _)) = listener.accept().await {
                match &tls {
                    None => respond(stream, &content).await,
                    Some(tls) => {
                        if let Ok(stream) = tls.accept(stream).await {
                            respond(stream, &content).await;
                        }
                    }
                }
            }
        });
    });
    address
}

async fn respond(mut stream: impl AsyncRead + AsyncWrite + Unpin, content: &Content) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    let head = String::from_utf8_lossy(&head);
    let body = match head.split(' ').nth(1).unwrap_or_default() {
        path if path.contains("/manifests/") => &content.manifest,
        path if path.contains("/blobs/") => &content.layer,
        "/small" => &content.module.slice(..1000),
        "/module" => &content.module,
        _ => &Bytes::new(),
    };
    let length = body.len();
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
    // The client may have closed the connection.
    let _ = stream.write_all(head.as_bytes()).await;
    let _ = stream.write_all(body).await;
    let _ = stream.shutdown().await;
}
