//! The agent's relay in a process of its own. It treats its client as an Envoy and stores the
//! configuration in memory, in the way that a pod does.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use istio_agent::files::volume::Volume;
use istio_agent::istiod::{self, Keepalive, Limits, Security, tls, token};
use istio_agent::metrics::Registry;
use istio_agent::net::unix_socket;
use istio_agent::runtime::lifecycle::CancellationToken;
use istio_agent::trust::compliance::Policy;
use istio_agent::xds::interceptor::Interceptors;
use istio_agent::xds::ledger::{self, Ledger};
use istio_agent::xds::server::{Config, Discovery, Upstream};

use super::peer::NAME;

pub async fn relay(socket: &Path, address: &str, root_pem: &str) {
    // The caller removes the directory.
    let directory = socket.parent().expect("a directory");
    let root = directory.join("kept-root.pem");
    std::fs::write(&root, root_pem).expect("a file");
    let (registry, shutdown) = (Registry::default(), CancellationToken::new());
    let config = istiod::Config {
        address: address.to_owned(),
        setting: "discoveryAddress",
        identity: istio_agent::trust::identity::SpiffeId::new("cluster.local", "default", "bench"),
        fallbacks: Vec::new(),
        proxy: None,
        security: Security::Tls(tls::Config {
            server_name: NAME.to_owned(),
            roots: tls::Roots::File(root),
            client: None,
            policy: Policy::None,
        }),
        token: token::Source::Mock,
        metadata: Vec::new(),
        keepalive: Keepalive {
            interval: Duration::from_secs(30),
            timeout: Duration::from_secs(10),
        },
        limits: Limits::default(),
    };
    let (istiod, connection) = istiod::new(config, &registry, shutdown.clone());
    let (ledger, writing) = Ledger::new(
        ledger::Config {
            volume: Some(Volume::named(directory)),
            former: None,
            own: None,
            max_bytes: 1 << 30,
            max_age: Duration::from_secs(3600),
            after: Duration::from_secs(3600),
            on_nack: true,
            on_demand: false,
        },
        None,
        &registry,
        shutdown.clone(),
    );
    tokio::spawn(writing);
    let config = Config {
        max_request_bytes: 1 << 20,
        cluster_id: String::new(),
        ledger: Some(ledger),
        upstream: Upstream { envoy: istiod.clone(), other_clients: istiod },
        is_own_envoy: Arc::new(|_| true),
        interceptors: Interceptors::default(),
        health: None,
        shutdown,
    };
    let discovery = Discovery::new(config, &registry);
    let listener = unix_socket::replace(socket).expect("a free path");
    tokio::join!(connection, discovery.serve(listener));
}
