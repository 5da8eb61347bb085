//! The relay in the test's process, with a control plane upstream and a scripted Envoy downstream.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use istio_agent::istiod::{self, Istiod, Keepalive, Security, tls, token};
use istio_agent::metrics::Registry;
use istio_agent::net::unix_socket;
use istio_agent::runtime::lifecycle::{CancellationToken, Tasks};
use istio_agent::xds::Protocol;
use istio_agent::xds::interceptor::Interceptors;
use istio_agent::xds::observe::Observer;
use istio_agent::xds::server::{Config, Discovery, Upstream};
use local_istiod::{Keys, LocalIstiod, Options, Stream};
use tempfile::TempDir;
use tokio::sync::watch;

use super::envoy::Envoy;
use super::{PATIENCE, soon};

/// A relay with a control plane upstream. [`Bench::envoy`] opens streams of an Envoy downstream.
pub struct Bench {
    pub directory: TempDir,
    pub control_plane: LocalIstiod,
    pub istiod: Istiod,
    pub registry: Registry,
    pub observer: Observer,
    /// True if the relay takes the test's process for an Envoy of the agent.
    pub is_envoy: Arc<AtomicBool>,
    /// The workload's health, which streams report to istiod: None until it is known, an error if it is unhealthy.
    pub health: watch::Sender<Option<Result<(), String>>>,
    tasks: Tasks,
    shutdown: CancellationToken,
}

impl Bench {
    pub async fn start() -> Self {
        Self::with(Interceptors::default(), 200 << 20).await
    }

    pub async fn with(interceptors: Interceptors, max_request_bytes: usize) -> Self {
        let control_plane = LocalIstiod::start(Options::default()).await.unwrap();
        let addresses = [control_plane.address.to_string()];
        Self::of(control_plane, &addresses, interceptors, max_request_bytes)
    }

    /// Starts a relay with two control planes: the first is at this address, the second is the bench's own.
    pub async fn behind(first: SocketAddr) -> Self {
        let control_plane = LocalIstiod::start(Options::default()).await.unwrap();
        let addresses = [first, control_plane.address].map(|address| address.to_string());
        Self::of(control_plane, &addresses, Interceptors::default(), 200 << 20)
    }

    /// Starts a relay with two control planes that have the same root certificate, and returns the second one, too.
    pub async fn with_second() -> (Self, LocalIstiod) {
        let options =
            Options { keys: Some(Keys::generate("cluster.local").unwrap()), ..Options::default() };
        let first = LocalIstiod::start(options.clone()).await.unwrap();
        let second = LocalIstiod::start(options).await.unwrap();
        let addresses = [first.address, second.address].map(|address| address.to_string());
        (Self::of(first, &addresses, Interceptors::default(), 200 << 20), second)
    }

    fn of(
        control_plane: LocalIstiod,
        addresses: &[String],
        interceptors: Interceptors,
        max_request_bytes: usize,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        std::fs::write(path.join("root.pem"), control_plane.root_pem()).unwrap();
        let mut tasks = Tasks::default();
        let shutdown = CancellationToken::new();
        let registry = Registry::default();
        let mut configs = addresses.iter().map(|address| istiod_config(path, address));
        let first = configs.next().unwrap();
        let config = istiod::Config { fallbacks: configs.collect(), ..first };
        let (istiod, connection) = istiod::new(config, &registry, shutdown.clone());
        tasks.spawn("istiod", async move {
            connection.await;
            Ok::<(), std::io::Error>(())
        });
        let listener = unix_socket::bind(&path.join("XDS")).unwrap();
        let is_envoy = Arc::new(AtomicBool::new(true));
        let counts = is_envoy.clone();
        let health = watch::Sender::new(None);
        let config = Config {
            max_request_bytes,
            cluster_id: "Kubernetes".into(),
            ledger: None,
            upstream: Upstream { envoy: istiod.clone(), other_clients: istiod.clone() },
            is_own_envoy: Arc::new(move |_| counts.load(Ordering::Relaxed)),
            interceptors,
            health: Some(health.subscribe()),
            shutdown: shutdown.clone(),
        };
        let discovery = Discovery::new(config, &registry);
        let observer = discovery.observer();
        tasks.spawn("xds", async move {
            discovery.serve(listener).await;
            Ok::<(), std::io::Error>(())
        });
        let bench = Self {
            directory,
            control_plane,
            istiod,
            registry,
            observer,
            is_envoy,
            health,
            tasks,
            shutdown,
        };
        bench.write_token("default", "bench");
        bench
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("XDS")
    }

    pub fn write_token(&self, namespace: &str, account: &str) {
        let ttl = Duration::from_secs(3600);
        let token = self.control_plane.mint_token(namespace, account, ttl).unwrap();
        std::fs::write(self.directory.path().join("token"), token).unwrap();
    }

    /// Opens a stream as Envoy does.
    pub async fn envoy(&self, protocol: Protocol) -> Envoy {
        Envoy::open(&self.socket(), protocol).await
    }

    /// Waits until the control plane accepts a stream, and returns this stream.
    pub async fn accepted(&mut self) -> Stream {
        soon(self.control_plane.streams.recv()).await.expect("a stream")
    }

    /// Stops the relay, and asserts that no task and no socket is left.
    pub async fn finish(mut self) {
        self.shutdown.cancel();
        assert_eq!(self.tasks.drain(PATIENCE).await, 0, "tasks that did not end");
        assert!(!self.socket().exists(), "the socket is left");
    }
}

/// Returns the settings of a connection to a control plane whose root certificate and token are in `directory`.
pub fn istiod_config(directory: &Path, address: &str) -> istiod::Config {
    istiod::Config {
        address: address.to_owned(),
        security: Security::Tls(tls::Config {
            server_name: "istiod.istio-system.svc".into(),
            roots: tls::Roots::File(directory.join("root.pem")),
            client: None,
            policy: istio_agent::trust::compliance::Policy::None,
        }),
        token: token::Source::File(directory.join("token")),
        metadata: vec![(
            http::HeaderName::from_static("clusterid"),
            http::HeaderValue::from_static("Kubernetes"),
        )],
        keepalive: Keepalive {
            interval: Duration::from_secs(30),
            timeout: Duration::from_secs(10),
        },
        proxy: None,
        limits: istiod::Limits::default(),
        setting: "discoveryAddress",
        identity: istio_agent::trust::identity::SpiffeId::new("cluster.local", "default", "bench"),
        fallbacks: Vec::new(),
    }
}
