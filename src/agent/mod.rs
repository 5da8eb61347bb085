//! The hall: builds every room, runs them side by side, and brings them down.
//!
//! [`Agent::build`] binds the sockets and makes the rooms, so a socket that cannot be had ends the
//! agent before Envoy exists. [`Agent::run`] starts Envoy and waits for its end. The sockets outlive
//! Envoy, which asks for its configuration until it has drained.
//!
//! The only place where rooms meet that may not see each other.

mod envoy_user;
mod google_token;
mod nds;
mod pcds;
pub mod reload;
mod renewal;
mod resource;
mod sds_socket;
mod secrets;

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{oneshot, watch};

use crate::bootstrap::{self, Written, platform};
use crate::cli::version;
use crate::clock::Clock;
use crate::config::{Config, Unusable};
use crate::envoy::reaper::Children;
use crate::envoy::{self, Exit};
use crate::exit_code::ExitCode;
use crate::istiod::{self, Istiod};
use crate::lifecycle::{
    self, BoxError, CancellationToken, Ended, Stop, StopRequest, Tasks, Urgency, with_causes,
};
use crate::metrics::{self, Registry};
use crate::scrape::Scrape;
use crate::status::startup::{Milestone, Milestones};
use crate::unix_socket::{self, BindError};
use crate::xds::intercept::{Interceptor, Interceptors};
use crate::xds::observe::Observer;
use crate::xds::server::Discovery;
use crate::{dns, status, xds};
use nds::Nds;
use pcds::Pcds;
use reload::{Inputs, Load};
use sds_socket::{Detected, SdsOwner};

/// How long the rooms may take to end once Envoy is gone.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// Why the agent cannot start, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("agent configured for non-default SDS socket path: {0} but no socket found")]
    NoWorkloadSocket(String),
    #[error("failed to check SDS socket: existing SDS socket could not be removed: {path}")]
    DeadSocket {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error(transparent)]
    Status(#[from] status::Error),
    #[error(transparent)]
    Dns(#[from] dns::Error),
    #[error("cannot start the thread of the DNS server")]
    DnsThread(#[source] io::Error),
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
///
/// `load` reads the configuration anew, for the Envoy that is to follow the first.
pub async fn run(mut config: Config, load: Load) -> Result<ExitCode, BoxError> {
    let milestones = Milestones::start();
    keep_keys_out_of_dumps(&config);
    raise_limit_of_files();
    let stop = Stop::new();
    let signals = lifecycle::signals(stop.clone())?;
    let running = async {
        // Before anything else, some of which takes a while; what it shows comes with the rooms.
        let port = config
            .status
            .as_ref()
            .map(|config| status::bind(config.port));
        let port = port.transpose().map_err(status::Error::from)?;
        let detected = sds_socket::detect(&config).await?;
        if detected.owner == SdsOwner::Agent && !config.authority_problems.is_empty() {
            return Err(Unusable(config.authority_problems).into());
        }
        detected.add_to(&mut config.bootstrap.node);
        let agent = Agent::build(config, port, detected, load, milestones, &stop)?;
        agent.run(stop).await
    };
    tokio::select! {
        code = running => code,
        never = signals => match never {},
    }
}

/// Envoy from its start to its end; it starts when this is polled.
type EnvoyLife = Pin<Box<dyn Future<Output = Result<Exit, envoy::Error>> + Send>>;

/// Everything the agent consists of, built and bound.
struct Agent {
    config: Config,
    /// What Envoys start from, when one is to follow the other.
    inputs: Option<Arc<Inputs>>,
    /// Runs Envoy, from its start to its end.
    envoy_life: Option<EnvoyLife>,
    /// What the agent counts about itself.
    metrics: Registry,
    tasks: Tasks,
    shutdown: CancellationToken,
    /// The rooms that stay until the others are gone.
    last_tasks: Tasks,
    last_shutdown: CancellationToken,
}

impl Agent {
    fn build(
        config: Config,
        port: Option<status::Listener>,
        detected: Detected,
        load: Load,
        milestones: Milestones,
        stop: &Stop,
    ) -> Result<Self, BoxError> {
        let metrics = registry();
        let owner = detected.owner;
        let inputs = Inputs::of(&config, load, detected).map(Arc::new);
        let envoy = config.envoy.clone();
        let envoy = envoy.map(|config| {
            let inputs = inputs
                .clone()
                .map(|inputs| inputs as Arc<dyn envoy::hot_restart::Inputs>);
            envoy::new(config, inputs, stop, &metrics)
        });
        let (envoy, envoy_life) = match envoy {
            Some((handle, life)) => (Some(handle), Some(Box::pin(life) as EnvoyLife)),
            None => (None, None),
        };
        let mut agent = Self {
            config,
            inputs,
            envoy_life,
            metrics,
            tasks: Tasks::new(),
            shutdown: CancellationToken::new(),
            last_tasks: Tasks::new(),
            last_shutdown: CancellationToken::new(),
        };
        if let (Some(_), Some(envoy)) = (&agent.inputs, envoy.clone()) {
            let changes = reload::changes(envoy, &agent.config.inputs)?;
            agent.spawn_until_shutdown("watch for changes", changes);
        }
        let dns = agent.dns()?;
        agent.token();
        let istiod = agent.istiod("connection to istiod", agent.config.istiod.clone());
        let (secrets, pcds) = agent.secrets(&istiod, owner)?;
        let discovery = agent.discovery(istiod.clone(), pcds, dns.clone())?;
        milestones.mark(Milestone::SocketsBound);
        if let Some(port) = port {
            agent.status(
                port,
                status::Sources {
                    node: agent.config.bootstrap.node.id.clone(),
                    milestones,
                    stop: stop.clone(),
                    envoy,
                    istiod,
                    secrets,
                    discovery,
                    dns,
                    metrics: agent.metrics.clone(),
                    scrape: agent.scrape(),
                },
            )?;
        }
        Ok(agent)
    }

    fn status(&mut self, port: status::Listener, sources: status::Sources) -> Result<(), Error> {
        let Some(config) = self.config.status.clone() else {
            return Ok(());
        };
        let serving = status::new(config, port, sources, self.last_shutdown.clone())?;
        self.last_tasks.spawn("status port", async move {
            serving.await;
            Ok::<(), BoxError>(())
        });
        Ok(())
    }

    /// Answers requests for merged metrics.
    fn scrape(&self) -> status::Scrape {
        let scrape = Scrape::new(self.config.scrape.clone(), self.metrics.clone());
        Arc::new(move |request| {
            let scrape = scrape.clone();
            Box::pin(async move { scrape.page(request).await })
        })
    }

    /// Fetches what istiod knows the agent by, for discovery as for certificates.
    fn token(&mut self) {
        if let Some(token) = self.config.google_token.clone() {
            let platform = self.config.platform.clone();
            let fetching = google_token::keep_fresh(token, platform, Clock::system());
            self.spawn_until_shutdown("token fetcher", async move { match fetching.await {} });
        }
    }

    fn istiod(&mut self, name: &'static str, config: istiod::Config) -> Istiod {
        let (istiod, connection) = istiod::new(config, &self.metrics, self.shutdown.clone());
        self.spawn(name, connection);
        istiod
    }

    /// Answers DNS on a thread of its own, so that nothing else the agent does delays an answer.
    fn dns(&mut self) -> Result<Option<dns::Dns>, Error> {
        let Some(config) = self.config.dns.clone() else {
            return Ok(None);
        };
        let forwarder = dns::forward::Forwarder::new(config.forwarder, &self.metrics);
        let shutdown = self.shutdown.clone();
        let (dns, serving) = dns::new(config.server, forwarder, &self.metrics, shutdown)?;
        let (done, ended) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(Error::DnsThread)?;
        let serve = move || {
            // The agent waits for it, unless it was cut off.
            let _ = done.send(runtime.block_on(serving));
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("dns".to_owned());
        // Its end is heard over the channel, and a panic is an end of that.
        thread.spawn(serve).map_err(Error::DnsThread)?;
        self.tasks.spawn("DNS server", async move {
            ended.await.map_err(BoxError::from)?.map_err(BoxError::from)
        });
        Ok(Some(dns))
    }

    fn discovery(
        &mut self,
        istiod: Istiod,
        pcds: Option<Pcds>,
        dns: Option<dns::Dns>,
    ) -> Result<Observer, Error> {
        let config = xds::Config {
            socket: self.config.xds_socket.clone(),
            max_request_bytes: self.config.max_request_bytes,
            cluster_id: self.config.cluster_id.clone(),
        };
        let listener = unix_socket::bind(&config.socket)?;
        let mut interceptors: Vec<Box<dyn Interceptor>> = Vec::new();
        if let Some(dns) = dns {
            interceptors.push(Box::new(Nds::new(dns)));
        }
        if let Some(pcds) = pcds {
            interceptors.push(Box::new(pcds));
        }
        let interceptors = Interceptors::new(interceptors);
        let registry = &self.metrics;
        let shutdown = self.shutdown.clone();
        let discovery = Discovery::new(config, istiod, interceptors, registry, shutdown);
        let observer = discovery.observer();
        self.spawn("discovery service", discovery.serve(listener));
        Ok(observer)
    }

    async fn run(mut self, stop: Stop) -> Result<ExitCode, BoxError> {
        let life = self.envoy_life.take();
        let (config, inputs) = (self.config.clone(), self.inputs.clone());
        let mut envoy = pin!(envoy_until_its_end(config, inputs, life, stop.requested()));
        let mut broken = None;
        let mut result = loop {
            tokio::select! {
                code = &mut envoy => break code,
                ended = either(&mut self.tasks, &mut self.last_tasks), if broken.is_none() => {
                    let broken = broken.insert(Error::of(ended));
                    tracing::error!("{}; draining Envoy and stopping", with_causes(broken));
                    stop.request(Urgency::Drain, "a part of the agent ended");
                }
            }
        };
        if let Some(broken) = broken {
            if let Err(error) = &result {
                tracing::error!("{}", with_causes(error.as_ref()));
            }
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
    inputs: Option<Arc<Inputs>>,
    envoy: Option<EnvoyLife>,
    mut asked: watch::Receiver<StopRequest>,
) -> Result<ExitCode, BoxError> {
    config.bootstrap.node.platform = platform::discover(&config.platform).await;
    if let Some(grpc) = &config.grpc {
        bootstrap::grpc::write(grpc, &config.bootstrap.node)?;
    }
    let writes_by_itself = inputs.is_some();
    if let Some(inputs) = inputs {
        // Where this is does not change.
        inputs.set_platform(config.bootstrap.node.platform.clone());
    }
    let Some(envoy) = envoy else {
        let asked = asked.wait_for(|asked| asked.urgency != Urgency::Run);
        tokio::select! {
            // An error is the end of the watch, which is an end as well.
            _ = asked => return Ok(ExitCode::Success),
            never = envoy::reaper::reap(Children::default()) => match never {},
        }
    };
    let ours = !config.has_custom_bootstrap && !writes_by_itself;
    let written = ours.then(|| bootstrap::write(&config.bootstrap));
    let written = written.transpose()?;
    let files = written.as_ref().map_or(&[][..], Written::files);
    if let Some(user) = config.envoy.as_ref().and_then(|envoy| envoy.command.user) {
        let directories = [config.xds_socket.parent(), config.sds_socket.parent()];
        envoy_user::admit(user, files, directories);
    }
    Ok(match envoy.await? {
        Exit::Requested => ExitCode::Success,
        Exit::ByItself(ended) => ExitCode::of_envoy(ended.code()),
    })
}

/// Private keys are in our memory. Envoy's own dumps are not concerned: a new program starts anew.
fn keep_keys_out_of_dumps(config: &Config) {
    if config.may_dump_core {
        return;
    }
    let barred = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    if let Err(error) = barred {
        tracing::warn!("core dumps cannot be barred: {error}; one would hold private keys");
    }
}

/// Opens as many files as the machine allows, as programs in Go do: the lower limit is for programs
/// of old that cannot count further. Envoy inherits it.
fn raise_limit_of_files() {
    let limit = getrlimit(Resource::Nofile);
    let current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current, ..limit }) {
        tracing::warn!(
            "the limit of open files stays at {:?}: {error}",
            limit.current
        );
    }
}

/// What the agent counts about itself, with what it is and what the kernel knows of it.
fn registry() -> Registry {
    let registry = Registry::default();
    version::publish(&registry);
    metrics::process::publish(&registry);
    registry
}

/// The next room of either set that ends.
async fn either(tasks: &mut Tasks, last: &mut Tasks) -> Ended {
    tokio::select! {
        ended = tasks.next_ended() => ended,
        ended = last.next_ended() => ended,
    }
}
