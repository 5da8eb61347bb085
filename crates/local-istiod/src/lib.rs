//! A small control plane for demos, development and tests: certificates and discovery behind TLS.
//!
//! It responds in the way that istiod does, with istiod's status codes, on one port. A test either
//! scripts discovery streams itself ([`LocalIstiod::streams`]) or lets the control plane serve them from
//! a snapshot of Envoy resources. In a snapshot, the endpoint `workload-group:<namespace>/<name>` stands
//! for the machines that have registered.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::disallowed_methods,
    reason = "a development tool"
)]

mod authority;
mod caller;
mod certificates;
mod csr;
mod discovery;
mod event;
mod identity;
mod keys;
mod located;
mod resource;
mod server;
mod snapshot;
mod stream;
mod token;

/// Messages and stubs of istiod's certificate service, generated from `proto/`.
#[allow(
    missing_debug_implementations,
    unreachable_pub,
    unused_qualifications,
    clippy::unwrap_used,
    clippy::wildcard_imports
)]
mod proto {
    tonic::include_proto!("istio.v1.auth");
}

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use authority::AuthorityError;
pub use event::{Event, Events};
pub use identity::SpiffeId;
pub use keys::{Keys, KeysError, write_private};
pub use resource::{Resource, ResourceError};
pub use server::TlsError;
pub use snapshot::{Snapshot, SnapshotError, follow};
pub use stream::{Gone, Overload, Stream, Variant};
pub use token::{Claims, TokenKeyError};

use crate::proto::istio_certificate_service_server::IstioCertificateServiceServer;
use authority::Authority;
use caller::Authenticator;
use certificates::{Certificates, Script};
use server::{Peers, Services, Tls};
use stream::Acceptor;

/// The name in istiod's certificate in a cluster, and the names of this machine.
const NAMES: [&str; 3] = ["istiod.istio-system.svc", "localhost", "127.0.0.1"];

/// The number of accepted streams that may wait until the test takes them.
const WAITING_STREAMS: usize = 64;

/// The time that a stop waits for connections to end by themselves.
const STOP_LIMIT: Duration = Duration::from_millis(500);

/// The options of a control plane. The default suits a test: any port, new keys, TLS, scripted streams.
#[derive(Clone, Debug)]
pub struct Options {
    pub listen: SocketAddr,
    pub security: Security,
    pub trust_domain: String,
    /// Names and addresses in the serving certificate, in addition to the names of istiod and of this
    /// machine.
    pub extra_names: Vec<String>,
    /// The maximum lifetime of certificates. Longer requested lifetimes are shortened to it.
    pub max_cert_ttl: Duration,
    /// The time by which the clock for issuing certificates is ahead.
    pub clock_ahead: Duration,
    /// The keys to use. If None, new keys are generated.
    pub keys: Option<Keys>,
    /// The snapshots that discovery serves. If None, streams are scripted.
    pub snapshots: Option<watch::Receiver<Arc<Snapshot>>>,
    pub events: Events,
    /// A channel that gets a copy of each request that is read from a discovery stream.
    pub requests: Option<mpsc::UnboundedSender<Bytes>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Security {
    Tls,
    /// Plaintext, like istiod's port 15010: discovery without authentication, and no certificates.
    Plaintext,
}

/// A running control plane. Dropping it has the same effect as [`LocalIstiod::kill`].
#[derive(Debug)]
pub struct LocalIstiod {
    pub address: SocketAddr,
    /// The accepted discovery streams, if streams are scripted.
    pub streams: mpsc::Receiver<Stream>,
    options: Options,
    keys: Keys,
    authority: Arc<Authority>,
    script: watch::Sender<Script>,
    overload: watch::Sender<Option<Overload>>,
    peers: Arc<Peers>,
    stopping: CancellationToken,
    tasks: JoinSet<()>,
}

/// The reason why a control plane did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot listen on {address}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("no keys")]
    Keys(#[from] KeysError),
    #[error("no TLS")]
    Tls(#[from] TlsError),
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            security: Security::Tls,
            trust_domain: "cluster.local".to_owned(),
            extra_names: Vec::new(),
            max_cert_ttl: Duration::from_secs(90 * 24 * 3600),
            clock_ahead: Duration::ZERO,
            keys: None,
            snapshots: None,
            events: Events::default(),
            requests: None,
        }
    }
}

impl LocalIstiod {
    /// Starts a control plane, and returns once it listens.
    pub async fn start(options: Options) -> Result<Self, StartError> {
        let keys = match &options.keys {
            Some(keys) => keys.clone(),
            None => Keys::generate(&options.trust_domain)?,
        };
        let (listener, address) = listen(options.listen).await?;
        let authority = Arc::new(Authority::new(
            keys.roots.clone(),
            options.trust_domain.clone(),
            options.max_cert_ttl,
            options.clock_ahead,
        ));
        let tls = tls(&options, &authority)?;
        let (script, scripted) = watch::channel(None);
        let (overload, overloaded) = watch::channel(None);
        let (accepted, mut streams) = mpsc::channel(WAITING_STREAMS);
        let (stopping, peers) = (CancellationToken::new(), Arc::new(Peers::default()));
        let services =
            services(&options, &keys, &authority, scripted, overloaded, accepted, &stopping);
        let mut tasks = JoinSet::new();
        let accepting = server::serve(listener, tls, services, peers.clone(), stopping.clone());
        tasks.spawn(accepting);
        if let Some(snapshots) = options.snapshots.clone() {
            let served = std::mem::replace(&mut streams, mpsc::channel(1).1);
            tasks.spawn(discovery::serve(served, snapshots, options.events.clone()));
        }
        Ok(Self {
            address,
            streams,
            options,
            keys,
            authority,
            script,
            overload,
            peers,
            stopping,
            tasks,
        })
    }

    /// Returns all root certificates as PEM, the newest first.
    pub fn root_pem(&self) -> String {
        self.authority.roots_pem()
    }

    /// Mints a token for an account, valid from now.
    pub fn mint_token(
        &self,
        namespace: &str,
        service_account: &str,
        ttl: Duration,
    ) -> Result<String, TokenKeyError> {
        let claims = Claims::of(namespace, service_account, SystemTime::now(), ttl);
        self.mint(&claims)
    }

    /// Mints a token with any claims, including claims that are refused.
    pub fn mint(&self, claims: &Claims) -> Result<String, TokenKeyError> {
        self.keys.tokens.mint(claims)
    }

    /// Adds a root that signs from now on; the older roots stay trusted.
    pub fn rotate_root(&self) -> Result<(), AuthorityError> {
        self.authority.rotate_root()
    }

    /// Refuses all certificate requests with a status. None makes the control plane sign
    /// requests again.
    pub fn refuse_certificates(&self, with: Option<tonic::Status>) {
        self.script.send_replace(with.map(Err));
    }

    /// Limits the discovery streams that are accepted from now on. None ends the overload.
    pub fn overload(&self, with: Option<Overload>) {
        self.overload.send_replace(with);
    }

    /// Responds to all certificate requests with these elements, whatever they are. None makes
    /// the control plane sign requests again.
    pub fn answer_certificates_with(&self, chain: Option<Vec<String>>) {
        self.script.send_replace(chain.map(Ok));
    }

    /// Sends these root certificates (PEM) with each certificate, in place of its own. None
    /// restores its own.
    pub fn publish_roots(&self, roots: Option<String>) {
        self.authority.publish(roots);
    }

    /// Returns the number of certificates signed since the start.
    pub fn certificates_signed(&self) -> u64 {
        self.authority.signed()
    }

    /// Returns the peers of all TCP connections accepted since the start.
    pub fn connections(&self) -> Vec<SocketAddr> {
        self.peers.all()
    }

    /// Ends streams with UNAVAILABLE and closes connections. Returns the options that start the same
    /// control plane again, with the same address and keys.
    pub async fn stop(mut self) -> Options {
        self.stopping.cancel();
        let ended = async { while self.tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(STOP_LIMIT, ended).await; // The kill below closes the rest.
        self.kill().await
    }

    /// Closes all connections at once, like a crash. Returns the options that start the same control
    /// plane again.
    pub async fn kill(mut self) -> Options {
        self.tasks.shutdown().await;
        let roots = self.authority.roots();
        Options { listen: self.address, keys: Some(Keys { roots, ..self.keys }), ..self.options }
    }
}

/// Binds an address, and returns the listener and the bound address. Retries for at most a second while
/// the address is in use: a child that was just forked may hold a former listener until it execs.
pub async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), StartError> {
    let failed = |source| StartError::Listen { address, source };
    let mut attempts = 0..20;
    let listener = loop {
        match TcpListener::bind(address).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && attempts.next().is_some() => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            bound => break bound.map_err(failed)?,
        }
    };
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

fn tls(options: &Options, authority: &Arc<Authority>) -> Result<Option<Arc<Tls>>, StartError> {
    if options.security == Security::Plaintext {
        return Ok(None);
    }
    let names = NAMES.map(str::to_owned).into_iter();
    let names: Vec<_> = names.chain(options.extra_names.iter().cloned()).collect();
    let (leaf, key) = authority.serving_certificate(&names).map_err(TlsError::Authority)?;
    Ok(Some(Arc::new(Tls { leaf, key, authority: Arc::clone(authority) })))
}

fn services(
    options: &Options,
    keys: &Keys,
    authority: &Arc<Authority>,
    script: watch::Receiver<Script>,
    overload: watch::Receiver<Option<Overload>>,
    accepted: mpsc::Sender<Stream>,
    stopping: &CancellationToken,
) -> Services {
    let authenticator = Authenticator {
        trust_domain: options.trust_domain.clone(),
        tokens: Arc::clone(&keys.tokens),
    };
    let secure = options.security == Security::Tls;
    let certificates = Certificates {
        authority: Arc::clone(authority),
        authenticator: secure.then(|| authenticator.clone()),
        script,
        events: options.events.clone(),
    };
    Services {
        discovery: Acceptor {
            authenticator: secure.then_some(authenticator),
            accepted,
            overload,
            next_stream: Arc::default(),
            stopping: stopping.clone(),
            events: options.events.clone(),
            requests: options.requests.clone(),
        },
        certificates: IstioCertificateServiceServer::new(certificates),
    }
}

#[cfg(test)]
mod tests;
