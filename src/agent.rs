//! The hall: builds every room, runs them side by side, and brings them down.
//!
//! [`Agent::build`] binds the sockets and makes the rooms, so a socket that cannot be had ends the
//! agent before Envoy exists. [`Agent::run`] starts Envoy and waits for its end. The sockets outlive
//! Envoy, which asks for its configuration until it has drained.
//!
//! The only place where rooms meet that may not see each other.

use std::future::Future;
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::bootstrap::{self, platform};
use crate::ca::csr::KeyType;
use crate::ca::istio::IstioCa;
use crate::clock::Clock;
use crate::config::{Config, KeyChoice};
use crate::envoy::orphans::Own;
use crate::envoy::{self, Exit};
use crate::exit_code::ExitCode;
use crate::istiod::{self, Istiod};
use crate::lifecycle::{self, Asked, BoxError, CancellationToken, Ended, Stop, Tasks, Urgency};
use crate::metrics::Registry;
use crate::reload::{self, Inputs, Load};
use crate::unix_socket::{self, BindError};
use crate::xds::intercept::Interceptors;
use crate::xds::server::Discovery;
use crate::{sds, secrets, xds};

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
pub async fn run(config: Config, load: Load) -> Result<ExitCode, BoxError> {
    let stop = Stop::new();
    let signals = lifecycle::signals(stop.clone())?;
    let agent = Agent::build(config, load, &stop)?;
    tokio::select! {
        code = agent.run(stop) => code,
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
    tasks: Tasks,
    shutdown: CancellationToken,
}

impl Agent {
    fn build(config: Config, load: Load, stop: &Stop) -> Result<Self, BoxError> {
        let metrics = Registry::default();
        let inputs = Inputs::of(&config, load).map(Arc::new);
        let envoy = config.envoy.clone();
        let envoy = envoy.map(|config| {
            let inputs = inputs
                .clone()
                .map(|inputs| inputs as Arc<dyn envoy::epochs::Inputs>);
            envoy::new(config, inputs, stop, &metrics)
        });
        // The status port will take the handle, too.
        let (envoy, envoy_life) = match envoy {
            Some((handle, life)) => (Some(handle), Some(Box::pin(life) as EnvoyLife)),
            None => (None, None),
        };
        let mut agent = Self {
            config,
            inputs,
            envoy_life,
            tasks: Tasks::new(),
            shutdown: CancellationToken::new(),
        };
        if let (Some(_), Some(envoy)) = (&agent.inputs, envoy) {
            let changes = reload::changes(envoy, &agent.config.inputs)?;
            agent.spawn_until_shutdown("watch for changes", changes);
        }
        let istiod = agent.istiod("connection to istiod", agent.config.istiod.clone());
        agent.secrets(&istiod)?;
        agent.discovery(istiod)?;
        Ok(agent)
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
        let life = self.envoy_life.take();
        let (config, inputs) = (self.config.clone(), self.inputs.clone());
        let mut envoy = pin!(envoy_until_its_end(config, inputs, life, stop.asked()));
        let mut broken = None;
        let mut result = loop {
            tokio::select! {
                code = &mut envoy => break code,
                ended = self.tasks.next_ended(), if broken.is_none() => {
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
    mut asked: watch::Receiver<Asked>,
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
            never = envoy::orphans::reap(Own::default()) => match never {},
        }
    };
    let ours = !config.has_custom_bootstrap && !writes_by_itself;
    let written = ours.then(|| bootstrap::write(&config.bootstrap));
    let _written = written.transpose()?;
    Ok(match envoy.await? {
        Exit::Requested => ExitCode::Success,
        Exit::ByItself(ended) => ExitCode::of_envoy(ended.code()),
    })
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
