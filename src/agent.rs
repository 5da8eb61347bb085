//! The hall: builds every room, runs them side by side, and brings them down.
//!
//! [`Agent::build`] binds the sockets and makes the rooms, so a socket that cannot be had ends the
//! agent before Envoy exists. [`Agent::run`] starts Envoy and waits for its end. The sockets outlive
//! Envoy, which asks for its configuration until it has drained.
//!
//! The only place where rooms meet that may not see each other.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::path::Path;
use std::pin::pin;
use std::time::{Duration, SystemTime};

use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::bootstrap::{self, platform};
use crate::ca::csr::KeyType;
use crate::ca::istio::IstioCa;
use crate::clock::Clock;
use crate::config::{Config, KeyChoice};
use crate::envoy::handle::{Envoy, Order, Report, State};
use crate::envoy::{self, Exit, admin::Admin};
use crate::exit_code::ExitCode;
use crate::istiod::{self, Istiod};
use crate::lifecycle::{self, Asked, BoxError, CancellationToken, Ended, Stop, Tasks, Urgency};
use crate::metrics::Registry;
use crate::unix_socket::{self, BindError};
use crate::xds::intercept::Interceptors;
use crate::xds::server::Discovery;
use crate::{sds, secrets, status, xds};

/// How long the rooms may take to end once Envoy is gone.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// How long one certificate request may take, connecting included.
const SIGNING_LIMIT: Duration = Duration::from_secs(10);

/// The name of the workload socket that the agent serves itself when nobody else does.
const OWN_SOCKET: &str = "socket";

/// Why the agent cannot start, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("agent configured for non-default SDS socket path: {0} but no socket found")]
    NoWorkloadSocket(String),
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error(transparent)]
    Status(#[from] status::Error),
    #[error("the {name} ended, which it must not while the agent runs")]
    Ended {
        name: &'static str,
        #[source]
        source: Option<BoxError>,
    },
}

impl Error {
    fn of(ended: Ended) -> Self {
        Self::Ended {
            name: ended.name,
            source: ended.result.err(),
        }
    }
}

/// Runs the agent until Envoy has ended, or until it is asked to stop.
pub async fn run(config: Config) -> Result<ExitCode, BoxError> {
    let started = Instant::now();
    let stop = Stop::new();
    let signals = lifecycle::signals(stop.clone())?;
    let agent = Agent::build(config, started, &stop)?;
    tokio::select! {
        code = agent.run(stop) => code,
        never = signals => match never {},
    }
}

/// Everything the agent consists of, built and bound.
#[derive(Debug)]
struct Agent {
    config: Config,
    tasks: Tasks,
    shutdown: CancellationToken,
    /// The rooms that stay until the others are gone.
    last_tasks: Tasks,
    last_shutdown: CancellationToken,
    /// Where Envoy's runner reports to, and has its orders from.
    envoy: EnvoyRunner,
    metrics: Registry,
}

impl Agent {
    fn build(config: Config, started: Instant, stop: &Stop) -> Result<Self, Error> {
        let (envoy, runner) = envoy_handle(config.envoy.as_ref());
        let mut agent = Self {
            config,
            tasks: Tasks::new(),
            shutdown: CancellationToken::new(),
            last_tasks: Tasks::new(),
            last_shutdown: CancellationToken::new(),
            envoy: runner,
            metrics: Registry::default(),
        };
        agent.status(envoy, started, stop)?;
        let istiod = agent.istiod("connection to istiod", agent.config.istiod.clone());
        agent.secrets(&istiod)?;
        agent.discovery(istiod)?;
        Ok(agent)
    }

    /// Serves the status port, unless it is switched off.
    fn status(&mut self, envoy: Option<Envoy>, started: Instant, stop: &Stop) -> Result<(), Error> {
        let Some(config) = self.config.status.clone() else {
            return Ok(());
        };
        let sources = status::Sources {
            started,
            stop: stop.clone(),
            dns_ready: None,
            metrics: self.metrics.clone(),
            scrape: status::own_metrics(self.metrics.clone()),
            drain_plan: drain_plan(self.config.envoy.as_ref()),
            debug: envoy.iter().map(envoy_page).collect(),
            envoy,
        };
        let serving = status::new(config, sources, self.last_shutdown.clone())?;
        self.last_tasks.spawn("status port", async move {
            serving.await;
            Ok::<(), BoxError>(())
        });
        Ok(())
    }

    fn istiod(&mut self, name: &'static str, config: istiod::Config) -> Istiod {
        let (istiod, connection) = istiod::new(config, self.shutdown.clone());
        self.spawn(name, connection);
        istiod
    }

    /// Keeps certificates fresh and serves them, unless somebody else does.
    fn secrets(&mut self, istiod: &Istiod) -> Result<(), Error> {
        let socket = self.config.sds_socket.clone();
        if unix_socket::is_live(&socket) {
            tracing::info!(
                "Existing workload SDS socket found at {}. Default Istio SDS Server will only \
                 serve files",
                socket.display()
            );
            tracing::warn!("secrets from files are not served yet: Envoy gets all from there");
            return Ok(());
        }
        if !is_own(&socket) {
            return Err(Error::NoWorkloadSocket(socket.display().to_string()));
        }
        // Without Envoy nobody asks, and the socket is not there.
        let serves = self.config.envoy.is_some();
        let listener = serves.then(|| unix_socket::bind(&socket)).transpose()?;
        let authority = match self.config.ca_istiod.clone() {
            Some(config) => self.istiod("connection to the certificate authority", config),
            None => istiod.clone(),
        };
        let parameters = &self.config.secrets;
        let signer = parameters.cert_signer.clone().unwrap_or_default();
        let authority = IstioCa::new(authority, signer, SIGNING_LIMIT);
        let config = secrets::Config {
            identity: parameters.identity.clone(),
            key_type: key_type(parameters.key),
            ttl: parameters.ttl,
            grace_ratio: parameters.grace_ratio,
            grace_jitter: parameters.grace_jitter,
            least_pause: secrets::LEAST_PAUSE,
        };
        let (secrets, renewal) = secrets::new(config, authority, Clock::system());
        self.spawn_until_shutdown("certificate renewal", renewal);
        if let Some(listener) = listener {
            let serving = sds::serve(listener, secrets, self.shutdown.clone());
            self.spawn("secret discovery service", serving);
        }
        Ok(())
    }

    fn discovery(&mut self, istiod: Istiod) -> Result<(), Error> {
        let config = xds::Config {
            socket: self.config.xds_socket.clone(),
            max_request_bytes: self.config.max_request_bytes,
            cluster_id: self.config.cluster_id.clone(),
        };
        let listener = unix_socket::bind(&config.socket)?;
        let interceptors = Interceptors::default();
        let discovery = Discovery::new(config, istiod, interceptors, self.shutdown.clone());
        self.spawn("discovery service", discovery.serve(listener));
        Ok(())
    }

    async fn run(mut self, stop: Stop) -> Result<ExitCode, BoxError> {
        let config = self.config.clone();
        let mut envoy = pin!(envoy_until_its_end(config, stop.asked(), self.envoy));
        let mut broken = None;
        let mut result = loop {
            tokio::select! {
                code = &mut envoy => break code,
                ended = either(&mut self.tasks, &mut self.last_tasks), if broken.is_none() => {
                    tracing::error!("the {} ended; draining Envoy and stopping", ended.name);
                    broken = Some(Error::of(ended));
                    stop.ask(Urgency::Drain, "a part of the agent ended");
                }
            }
        };
        if let Some(broken) = broken {
            result = Err(broken.into());
        }
        self.shutdown.cancel();
        let aborted = self.tasks.drain(STOP_LIMIT).await;
        if aborted > 0 {
            tracing::warn!("{aborted} tasks did not end within {STOP_LIMIT:?} and were cut off");
        }
        self.last_shutdown.cancel();
        if self.last_tasks.drain(STOP_LIMIT).await > 0 {
            tracing::warn!("the status port did not close within {STOP_LIMIT:?}");
        }
        result
    }

    fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(name, async move {
            task.await;
            Ok::<(), BoxError>(())
        });
    }

    /// Spawns a task that would never end by itself.
    fn spawn_until_shutdown(
        &mut self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let shutdown = self.shutdown.clone();
        self.spawn(name, async move {
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = task => {}
            }
        });
    }
}

/// Writes the bootstrap and runs Envoy on it; without Envoy, waits to be asked to stop. The other
/// rooms are at work while the cloud is asked where this is.
async fn envoy_until_its_end(
    mut config: Config,
    mut asked: watch::Receiver<Asked>,
    mut runner: EnvoyRunner,
) -> Result<ExitCode, BoxError> {
    config.bootstrap.node.platform = platform::discover(&config.platform).await;
    if let Some(grpc) = &config.grpc {
        bootstrap::grpc::write(grpc, &config.bootstrap.node)?;
    }
    let Some(envoy) = config.envoy else {
        let asked = asked.wait_for(|asked| asked.urgency != Urgency::Run);
        tokio::select! {
            // An error is the end of the watch, which is an end as well.
            _ = asked => return Ok(ExitCode::Success),
            never = envoy::orphans::reap(None) => match never {},
        }
    };
    let ours = !config.has_custom_bootstrap;
    let written = ours.then(|| bootstrap::write(&config.bootstrap));
    let _written = written.transpose()?;
    let admin = Admin::new(envoy.admin_host, envoy.admin_port, envoy.drain_call);
    let inbound_only = envoy.drain_inbound_only;
    runner.is_started();
    let exit = tokio::select! {
        exit = envoy::run(envoy, asked) => exit,
        never = runner.obey(admin, inbound_only) => match never {},
    };
    runner.has_ended();
    Ok(match exit? {
        Exit::Requested => ExitCode::Success,
        Exit::ByItself(ended) => ExitCode::of_envoy(ended.code()),
    })
}

/// The end of Envoy's handle that belongs to whoever runs it.
#[derive(Debug)]
struct EnvoyRunner {
    report: watch::Sender<Report>,
    orders: mpsc::Receiver<Order>,
}

fn envoy_handle(config: Option<&envoy::Config>) -> (Option<Envoy>, EnvoyRunner) {
    let (report, reports) = watch::channel(Report::default());
    let (sender, orders) = mpsc::channel(1);
    let envoy = config.map(|config| {
        let admin = Admin::new(config.admin_host, config.admin_port, config.drain_call);
        Envoy::new(admin, reports, sender)
    });
    (envoy, EnvoyRunner { report, orders })
}

impl EnvoyRunner {
    fn is_started(&self) {
        self.report.send_modify(|report| {
            report.state = State::Starting;
            report.started = Some(SystemTime::now());
        });
    }

    fn has_ended(&self) {
        self.report
            .send_modify(|report| report.state = State::Exited);
    }

    /// Carries out orders.
    async fn obey(&mut self, admin: Admin, inbound_only: bool) -> Infallible {
        while let Some(Order::Drain(told)) = self.orders.recv().await {
            if let Err(error) = admin.drain_listeners(inbound_only).await {
                tracing::warn!("Envoy has not been told to drain: {error}");
            }
            let _ = told.send(()); // Whoever asked may have gone.
        }
        pending().await
    }
}

/// What `GET /drain` says of the end.
fn drain_plan(envoy: Option<&envoy::Config>) -> serde_json::Value {
    envoy.map_or(serde_json::Value::Null, |envoy| {
        json!({
            "inbound_only": envoy.drain_inbound_only,
            "drain_seconds": envoy.limits.drain.as_secs_f64(),
            "terminate_seconds": envoy.limits.terminate.as_secs_f64(),
            "kill_seconds": envoy.limits.kill.as_secs_f64(),
        })
    })
}

fn envoy_page(envoy: &Envoy) -> status::Page {
    let report = envoy.report();
    status::Page {
        path: "/debug/envoy",
        content: Box::new(move || json!(*report.borrow())),
    }
}

/// The next room of either set that ends.
async fn either(tasks: &mut Tasks, last: &mut Tasks) -> Ended {
    tokio::select! {
        ended = tasks.next_ended() => ended,
        ended = last.next_ended() => ended,
    }
}

fn is_own(socket: &Path) -> bool {
    socket.file_name().is_some_and(|name| name == OWN_SOCKET)
}

fn key_type(key: KeyChoice) -> KeyType {
    match key {
        KeyChoice::EcdsaP256 => KeyType::P256,
        KeyChoice::EcdsaP384 => KeyType::P384,
        KeyChoice::Rsa { bits } => KeyType::Rsa(bits),
    }
}
