//! Wires the agent: builds all modules, runs them concurrently, and stops them.
//!
//! [`run`] binds the sockets first, so an agent that cannot bind one exits before Envoy starts. [`Agent::run`] starts
//! Envoy and waits for its end. The sockets outlive Envoy, which fetches its configuration until it has drained.
//!
//! Modules that must not use each other are connected only here.

mod discovery;
mod dns;
mod envoy_user;
mod google_token;
mod handover;
mod interceptors;
mod process;
mod reload;
mod sds_socket;
mod secrets;
mod status_pages;

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::FutureExt;
use serde_json::Value;
use tokio::time::{sleep, timeout};

use crate::bootstrap::{self, platform};
use crate::config::{Config, Unusable};
use crate::envoy::admin::Address;
use crate::envoy::handle::Envoy;
use crate::envoy::hot_restart::watch::restart_on_change;
use crate::envoy::{self, Exit};
use crate::istiod::{self, Istiod};
use crate::metrics::{self, Registry};
use crate::net::unix_socket;
use crate::problem::{Code, Problem};
use crate::runtime::clock::Clock;
use crate::runtime::exit_code::ExitCode;
use crate::runtime::lifecycle::{
    self, BoxError, CancellationToken, Ended, QUIT, Stop, StopAccepting, Tasks, Urgency,
    with_causes,
};
use crate::scrape::Scrape;
use crate::standby::{Pair, exec, gate};
use crate::status::startup::{self, Milestones};
use crate::version;
use crate::wasm::Wasm;
use crate::xds::ledger::Ledger;
use crate::{doctor, scope, sds, standby, status};
use handover::ports::Ports;
use handover::{Holder, Successor};
use reload::Inputs;
pub use reload::Settings;
use sds_socket::Detected;

/// The time limit for the exit of an Envoy whose agent was killed. An Envoy that was taking over waits 10 s for an
/// answer of its parent if that has exited.
const FORMER_ENVOY_LIMIT: Duration = Duration::from_secs(15);
/// The time between two attempts to connect to that Envoy.
const PAUSE: Duration = Duration::from_millis(10);
/// The time limit for the end of all tasks once Envoy has exited.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// Runs the agent until Envoy has exited, or until a stop request. `settings` reads the configuration again. Does not
/// return if this process becomes `pilot-agent standby`: after a handover to the other agent, or a failed takeover.
pub async fn run(
    mut config: Config,
    settings: Settings,
    pair: Option<Pair>,
) -> Result<ExitCode, BoxError> {
    let milestones = Milestones::start();
    if !config.may_dump_core {
        process::disable_core_dumps();
    }
    process::raise_file_limit();
    let stop = Stop::new();
    let mut signals = pin!(lifecycle::signals(stop.clone())?);
    let built = async {
        let ports = Ports::default();
        let serves = pair.as_ref().is_none_or(Pair::has_lock);
        if serves {
            // The ports are bound first, because the next steps may take a while. They are served once all modules
            // are built.
            ports.bind(&config)?;
        }
        if let (Some(pair), Some(stored)) = (&pair, &mut config.last_known_good) {
            let (own, former) = pair.volume_directories();
            stored.continue_in(&own, former);
        }
        let mut detected = sds_socket::detect(&config).await?;
        if detected.serves_workload && !config.authority_problems.is_empty() {
            return Err(Unusable(config.authority_problems).into());
        }
        let listener = detected.bind(&config)?;
        detected.add_to(&mut config.bootstrap, &config.sds_socket);
        let agent =
            Agent::build(config, (ports, listener), detected, settings, milestones, &stop, pair)?;
        if serves {
            handover::link(&agent.config)?;
        }
        Ok::<_, BoxError>(agent)
    };
    let running = async {
        let agent = tokio::select! {
            built = built => built?,
            () = stop.first_request() => return Ok((Ok(ExitCode::Success), None)),
        };
        Ok::<_, BoxError>(agent.run(stop.clone()).await)
    };
    let (code, pair) = tokio::select! {
        ended = running => ended?,
        never = &mut signals => match never {},
    };
    if pair.is_none() {
        return code;
    }
    if lifecycle::handle_last_signals(signals, &stop).await? {
        return code;
    }
    Err(exec::standby().into())
}

/// Runs Envoy, from the first poll until Envoy has exited.
type Supervisor = Pin<Box<dyn Future<Output = Result<Exit, BoxError>> + Send>>;

/// The parts of the agent, built and bound.
struct Agent {
    config: Config,
    /// The inputs of Envoys. None if the agent does not run Envoy.
    inputs: Option<Arc<Inputs>>,
    supervisor: Option<Supervisor>,
    /// The ledger, once it exists. Clusters that a bootstrap names are noted in it.
    ledger: Arc<OnceLock<Ledger>>,
    pair: Option<Pair>,
    /// The takeover from an agent in another container. None if this agent serves from its start.
    successor: Option<Successor>,
    ports: Ports,
    metrics: Registry,
    tasks: Tasks,
    stop_accepting: StopAccepting,
    shutdown: CancellationToken,
}

impl Agent {
    /// Builds all modules and spawns their tasks. Envoy starts in [`Agent::run`]. Fails if a socket cannot be bound, or
    /// the configuration cannot be used.
    fn build(
        config: Config,
        (ports, listener): (Ports, Option<unix_socket::Listener>),
        detected: Detected,
        settings: Settings,
        milestones: Milestones,
        stop: &Stop,
        pair: Option<Pair>,
    ) -> Result<Self, BoxError> {
        // The agent without its modules.
        let serves_workload = detected.serves_workload;
        let version = config.bootstrap.node.metadata.get("ISTIO_VERSION").and_then(Value::as_str);
        let istio_version = version.unwrap_or_default().to_owned();
        let inputs = if config.envoy.is_some() {
            Some(Arc::new(Inputs::new(config.clone(), settings.load, detected)))
        } else {
            None
        };
        let mut agent = Self {
            inputs,
            config,
            supervisor: None,
            ledger: Arc::default(),
            pair,
            successor: None,
            ports,
            metrics: Registry::default(),
            tasks: Tasks::default(),
            stop_accepting: StopAccepting::default(),
            shutdown: CancellationToken::new(),
        };

        // Metrics of the process.
        version::publish(&agent.metrics, &istio_version);
        metrics::process::publish(&agent.metrics);

        // Envoy and DNS, which do not need istiod.
        let envoy = agent.envoy(stop)?;
        let (dns, forwarder) = agent.dns()?.unzip();

        // The connection to istiod, and the secrets that are signed through it.
        agent.google_token();
        let istiod = agent.istiod("connection to istiod", agent.config.istiod.clone());
        let rejections = sds::Rejections::default();
        let (secrets, files, pcds) =
            agent.secrets(&istiod, serves_workload, listener, rejections.clone());

        // Discovery, with the consumers of responses and the source of health reports.
        let health = agent.health(envoy.as_ref(), stop)?;
        let wasm = agent.wasm();
        let interceptors = interceptors::new(dns.clone(), pcds, wasm.clone());
        let discovery = agent.discovery(&istiod, envoy.as_ref(), interceptors, health.as_ref())?;

        // Handovers, and reports about this agent.
        agent.prepare_handovers(envoy.as_ref(), stop)?;
        milestones.mark(startup::SOCKETS_BOUND);
        agent.report_to_systemd(&milestones, stop);

        // The status port, which shows all of them.
        if let Some(config) = agent.config.status.clone() {
            let running = doctor::Running {
                envoy: envoy.clone(),
                istiod: istiod.clone(),
                secrets: secrets.clone(),
                files,
                rejections: rejections.clone(),
                serves_secrets: serves_workload,
                discovery: discovery.clone(),
                dns: dns.clone(),
                forwarder,
                wasm: wasm.clone(),
                pair: agent.pair.clone(),
            };

            let scope = scope::Sources {
                node: agent.config.bootstrap.node.clone(),
                envoy: envoy.clone(),
                dns: dns.clone(),
                discovery: discovery.clone(),
            };

            let sources = status::Sources {
                node: agent.config.bootstrap.node.id.clone(),
                istio_version,
                milestones,
                stop: stop.clone(),
                hand_over: handover::on_request(agent.pair.clone()),
                envoy,
                istiod,
                secrets,
                rejections,
                discovery,
                dns,
                health,
                wasm,
                metrics: agent.metrics.clone(),
                scrape: agent.scrape(),
                doctor: status_pages::doctor(agent.config.clone(), running),
                pages: BTreeMap::from([
                    ("/debug/scope", status_pages::scope(scope)),
                    ("/debug/config", status_pages::config(settings.report)),
                    ("/debug/standby", handover::page(agent.pair.clone())),
                ]),
            };

            let listener = agent.ports.clone().status(config.port);
            let stop_accepting = agent.stop_accepting.clone();
            let shutdown = agent.shutdown.clone();
            let serving = status::new(config, listener, sources, stop_accepting, shutdown)?;
            agent.spawn("status port", serving);
        }
        Ok(agent)
    }

    /// Prepares Envoy's supervisor, and the watch for changes that hot restart Envoy.
    fn envoy(&mut self, stop: &Stop) -> io::Result<Option<Envoy>> {
        let (Some(mut config), Some(inputs)) = (self.config.envoy.clone(), self.inputs.clone())
        else {
            return Ok(None);
        };
        if self.pair.is_some() {
            config.shared_directory = standby::DIRECTORY.into();
        }
        let ledger = self.ledger.clone();
        let prepare = Arc::new(move |epoch| {
            let prepared = inputs.prepare(epoch)?;
            if let Some(ledger) = ledger.get() {
                ledger.note_bootstrap(&prepared.command.bootstrap);
            }
            Ok(prepared)
        });
        let is_replaced = config.hot_restart.is_some();
        let (envoy, supervisor) = envoy::new(config, prepare, stop, &self.metrics);
        self.supervisor = Some(Box::pin(supervisor));
        if is_replaced {
            let changes = restart_on_change(envoy.clone(), &self.config.inputs)?;
            self.spawn_until_shutdown("watch for changes", changes);
        }
        Ok(Some(envoy))
    }

    /// Prepares handovers to the agent in the other container, and the takeover from it if that agent serves.
    fn prepare_handovers(&mut self, envoy: Option<&Envoy>, stop: &Stop) -> Result<(), Problem> {
        let (Some(pair), Some(envoy), Some(config), Some(inputs)) =
            (self.pair.clone(), envoy, &self.config.envoy, &self.inputs)
        else {
            return Ok(());
        };
        let holder = Holder {
            pair,
            envoy: envoy.clone(),
            program: config.command.binary.clone(),
            ports: self.ports.clone(),
            stop_accepting: self.stop_accepting.clone(),
            stop: stop.clone(),
            results: self.metrics.counters(
                "istio_agent_handovers_total",
                "Handovers to the agent in the other container, by result.",
                &["result"],
            ),
        };
        if !holder.pair.has_lock() {
            let gate = CancellationToken::new();
            let listener =
                unix_socket::bind(&handover::gate_socket(&self.config))?.for_own_user()?;
            self.successor = Some(Successor {
                holder: holder.clone(),
                inputs: inputs.clone(),
                config: self.config.clone(),
                gate: gate.clone(),
            });
            self.spawn("gate", gate::serve(listener, gate, self.shutdown.clone()));
        }
        self.spawn_until_shutdown("handover", holder.serve());
        Ok(())
    }

    /// Spawns the task that fetches Wasm modules, unless Envoy is configured to fetch them.
    fn wasm(&mut self) -> Option<Wasm> {
        let Some(config) = self.config.wasm.clone() else {
            tracing::warn!(
                target: "wasm",
                "ISTIO_AGENT_ENABLE_WASM_REMOTE_LOAD_CONVERSION is false: ECDS is forwarded unchanged. Envoy \
                 cannot fetch the modules of WasmPlugins, and its configuration dump shows pull secrets"
            );
            return None;
        };
        let (wasm, fetches) = Wasm::new(config, &self.metrics);
        self.spawn_until_shutdown("Wasm modules", fetches);
        Some(wasm)
    }

    /// Returns the function that answers requests for merged metrics.
    fn scrape(&self) -> status::Scrape {
        let scrape = Scrape::new(self.config.scrape.clone(), self.metrics.clone());
        Arc::new(move |request| {
            let scrape = scrape.clone();
            Box::pin(async move { scrape.page(request).await })
        })
    }

    /// Spawns the task that renews the token for istiod, if Google's metadata service issues it.
    fn google_token(&mut self) {
        if let Some(token) = self.config.google_token.clone() {
            let fetching =
                google_token::keep_fresh(token, self.config.platform.clone(), Clock::system());
            self.spawn_until_shutdown("token fetcher", async move { match fetching.await {} });
        }
    }

    fn istiod(&mut self, name: &'static str, config: istiod::Config) -> Istiod {
        let (istiod, connection) = istiod::new(config, &self.metrics, self.shutdown.clone());
        self.spawn(name, connection);
        istiod
    }

    /// Runs until Envoy has exited. Also returns the pair if this process is to wait as standby again.
    async fn run(mut self, stop: Stop) -> (Result<ExitCode, BoxError>, Option<Pair>) {
        let mut tasks = std::mem::take(&mut self.tasks);
        let shutdown = self.shutdown.clone();
        let pair = self.pair.clone();
        let mut envoy = pin!(self.run_envoy(stop.clone()));
        let mut broken = None;
        let mut result = loop {
            tokio::select! {
                code = &mut envoy => break code,
                ended = tasks.next_ended(), if broken.is_none() => {
                    let broken = broken.insert(unexpected_end(ended));
                    tracing::error!("{broken}");
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
        shutdown.cancel();
        let aborted = tasks.drain(STOP_LIMIT).await;
        if aborted > 0 {
            tracing::warn!("{aborted} tasks did not end within {STOP_LIMIT:?} and were aborted");
        }
        let cause = stop.requested().borrow().cause;
        if cause.is_some_and(|cause| cause != handover::FAILED) {
            return (result, None);
        }
        (result, pair.filter(|pair| !pair.has_lock()))
    }

    /// Asks the cloud's metadata service for the platform, and runs Envoy. Without Envoy, waits for a stop request.
    async fn run_envoy(mut self, stop: Stop) -> Result<ExitCode, BoxError> {
        let config = &mut self.config;
        tokio::select! {
            found = platform::discover(&config.platform) => config.bootstrap.node.platform = found,
            () = stop.first_request() => {}
        }
        if let Some(grpc) = &config.grpc {
            bootstrap::grpc::write(grpc, &config.bootstrap.node)?;
        }
        let (Some(inputs), Some(supervisor)) = (self.inputs, self.supervisor) else {
            stop.first_request().await;
            return Ok(ExitCode::Success);
        };
        inputs.set_platform(config.bootstrap.node.platform.clone());
        if let Some(user) = config.envoy.as_ref().and_then(|envoy| envoy.command.user) {
            envoy_user::admit(user, &[config.xds_socket.parent(), config.sds_socket.parent()]);
        }
        let exit = match self.successor {
            Some(successor) => successor.run(supervisor).await?,
            None => {
                if let (Some(_), Some(envoy)) = (&self.pair, &config.envoy) {
                    tokio::select! {
                        () = until_free(&envoy.admin.address) => {}
                        () = stop.first_request() => {}
                    }
                }
                supervisor.await?
            }
        };
        let (code, is_final) = match exit {
            Exit::Requested => {
                tracing::info!("Agent has successfully terminated");
                (ExitCode::Success, stop.requested().borrow().cause == Some(QUIT))
            }
            Exit::Superseded => (ExitCode::Success, false),
            Exit::ByItself(ended) => (ExitCode::Envoy(ended.code()), ended.code() == 0),
        };
        if is_final && let Some(pair) = self.pair {
            pair.record_end();
        }
        Ok(code)
    }

    /// Spawns a task. Its end before the shutdown is a defect, unless another agent serves: tasks that have ended then
    /// may have been its only users.
    fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        // Boxed, because a future is about twice as large as the future that it awaits.
        let task = Box::pin(task);
        let stop_accepting = self.stop_accepting.clone();
        let shutdown = self.shutdown.clone();
        self.tasks.spawn(name, async move {
            task.await;
            if stop_accepting.has_begun() {
                shutdown.cancelled().await;
            }
            Ok::<(), BoxError>(())
        });
    }

    /// Spawns a task that does not end by itself. It is dropped once another agent serves.
    fn spawn_while_accepting(
        &mut self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let stop_accepting = self.stop_accepting.clone();
        let task = Box::pin(task);
        self.spawn_until_shutdown(name, async move {
            tokio::select! {
                () = task => {}
                () = stop_accepting.wait_for_begin() => std::future::pending().await,
            }
        });
    }

    /// Spawns a task that does not end by itself. It is dropped at the shutdown.
    fn spawn_until_shutdown(
        &mut self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        self.spawn(name, self.shutdown.clone().run_until_cancelled_owned(Box::pin(task)).map(drop));
    }
}

/// Waits for the exit of the Envoy whose agent was killed. The kernel kills it, which takes a moment.
async fn until_free(address: &Address) {
    let free = async {
        while address.is_taken().await {
            sleep(PAUSE).await;
        }
    };
    // If the address is still taken after that time, Envoy reports it.
    let _ = timeout(FORMER_ENVOY_LIMIT, free).await;
}

/// Returns the problem of a task that ended by itself.
fn unexpected_end(ended: Ended) -> Problem {
    let found = match ended.result {
        Ok(()) => "exited unexpectedly".to_owned(),
        Err(error) => format!("exited unexpectedly: {}", with_causes(error.as_ref())),
    };
    Problem::new(Code::TaskExited, format!("task {}", ended.name), found)
}
