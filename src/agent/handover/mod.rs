//! Hands the pod over to an agent in another container, whose Envoy takes over from this agent's Envoy by hot restart,
//! and takes the pod over from such an agent.

pub(super) mod ports;

use std::future::ready;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::json;
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::Supervisor;
use super::reload::Inputs;
use crate::config::Config;
use crate::envoy::Exit;
use crate::envoy::handle::{Envoy, Order, State};
use crate::envoy::hot_restart::validate;
use crate::envoy::inspect::{ServingResources, check_takeover};
use crate::metrics::Counters;
use crate::net::unix_socket;
use crate::problem::{Code, Problem};
use crate::runtime::lifecycle::{BoxError, CancellationToken, Stop, StopAccepting, Urgency};
use crate::standby::channel::{ANSWER_LIMIT, Channel, Hello, Message};
use crate::standby::{Handover, Pair, Waiting, gate, socket};
use crate::status::{HandOver, Page};
use ports::Ports;

/// The time that a successor waits for this agent's Envoy, if that is starting; less than [`ANSWER_LIMIT`].
const START_LIMIT: Duration = Duration::from_secs(10);
/// The time limit until the Envoy of a successor is able to serve.
const READY_LIMIT: Duration = Duration::from_secs(60);
/// The time between two checks of a successor's Envoy.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Connections of the standby, a successor, and agents that are about to be rejected.
const MAX_CONNECTIONS: usize = 4;
/// The cause of a stop after a handover that failed.
pub(super) const FAILED: &str = "the handover failed";

/// The result of a handover.
enum Outcome {
    /// The other agent serves.
    PassedOn,
    /// The other agent got the sockets, and has not confirmed that it serves, for this reason.
    Unconfirmed(String),
    /// This agent still has the pod, for this reason, and has lent only the base ID.
    StillOurs(String),
}

/// The agent that serves.
#[derive(Clone)]
pub(super) struct Holder {
    pub(super) pair: Pair,
    pub(super) envoy: Envoy,
    pub(super) program: PathBuf,
    pub(super) ports: Ports,
    pub(super) stop_accepting: StopAccepting,
    pub(super) stop: Stop,
    pub(super) results: Counters<1>,
}

impl Holder {
    /// Accepts connections of the other agent once this agent serves. Never ends.
    pub(super) async fn serve(self) {
        self.ports.wait().await;
        let listener = match self.pair.listen() {
            Ok(listener) => listener,
            Err(error) => {
                let problem = Problem::new(Code::StandbyUnusable, "handover socket", error);
                tracing::error!("{}", problem.consequence("no handover is possible"));
                return std::future::pending().await;
            }
        };
        let hello = Arc::new(self.pair.hello(&self.program).await);
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                    Ok((stream, _)) => {
                        let connection = self.clone().serve_connection(stream, hello.clone());
                        connections.spawn(async move {
                            if let Err(error) = connection.await {
                                tracing::debug!("the connection of the other container ended: {error}");
                            }
                        });
                    }
                    Err(error) => {
                        tracing::warn!("cannot accept the agent of the other container: {error}");
                        sleep(CHECK_INTERVAL).await;
                    }
                },
                Some(_) = connections.join_next() => {}
            }
        }
    }

    /// Serves one connection of the other agent, which is shown as waiting until it begins a handover with
    /// [`Message::Begin`]; the handover is counted and shown as the last one.
    ///
    /// If a handover is requested from this side, tells the other agent to take over, which ends the connection: that
    /// agent becomes `pilot-agent proxy`, and connects again with `Begin`.
    async fn serve_connection(self, stream: UnixStream, hello: Arc<Hello>) -> Result<(), BoxError> {
        let mut channel = Channel::accepted(stream)?;
        let mut handover_requests = self.pair.handover_requests();
        let other = channel.greet(&hello).await?;
        let blocker = other.takeover_blocker(&hello);
        let waiting = Arc::new(Waiting {
            name: other.name.clone(),
            build: other.build.clone(),
            takeover_blocker: blocker.clone(),
            is_checked: other.self_check.is_some(),
        });
        self.pair.change(|state| state.waiting.push(waiting.clone()));
        let message = tokio::select! {
            message = channel.receive() => Some(message),
            _ = handover_requests.changed() => None,
        };
        self.pair.change(|state| {
            state.waiting.retain(|it| !Arc::ptr_eq(it, &waiting));
            state.last_waiting_ended = Some(Instant::now());
        });
        let Some(message) = message else {
            return Ok(channel.send(&Message::TakeOver).await?);
        };
        if message? != Message::Begin {
            return Err("expected the beginning of a handover".into());
        }
        tracing::info!("handing over to container {} ({})", other.name, other.build);
        let outcome = match blocker {
            Some(why) => Outcome::StillOurs(why),
            None => match self.hand_over(&mut channel).await {
                Ok(outcome) => outcome,
                Err(why) => Outcome::StillOurs(why.to_string()),
            },
        };
        let failed = match &outcome {
            Outcome::PassedOn => None,
            Outcome::Unconfirmed(why) | Outcome::StillOurs(why) => Some(why.clone()),
        };
        let result = failed.as_ref().map_or("succeeded", |_| "failed");
        self.results.with([result]).inc();
        self.pair.change(|state| {
            state.last = Some(Handover {
                to: other.name.clone(),
                build: other.build,
                at: SystemTime::now(),
                failed,
            });
        });
        match outcome {
            Outcome::StillOurs(why) => self.reclaim_base_id(channel, &other.name, why).await,
            // Even without a confirmation, this agent cannot serve again.
            Outcome::PassedOn | Outcome::Unconfirmed(_) => {
                self.wait_for_own_envoy_exit(channel).await;
            }
        }
        Ok(())
    }

    /// Lets the other agent start its Envoy, and passes the pod on once that Envoy is able to serve. After an error, this
    /// agent still has the pod, and the caller continues to serve.
    async fn hand_over(&self, channel: &mut Channel) -> Result<Outcome, BoxError> {
        // If both containers are replaced at once, the second one asks while Envoy starts in the first one. Without this
        // wait, `lend` would refuse, and the second one would not ask again, because it has recorded its build.
        let mut report = self.envoy.report();
        let _ = timeout(START_LIMIT, report.wait_for(|now| now.state > State::Starting)).await;
        // Envoy's admin port is closed if the Envoy of an earlier successor took it and failed.
        let serving = ServingResources::read(&self.envoy.admin())
            .await
            .inspect_err(|why| {
                tracing::warn!("handing over without a comparison of listeners and secrets: {why}");
            })
            .ok();
        let restart_epoch = self.envoy.report().borrow().restart_epoch();
        // Envoy reports its number of workers, which `lend` does not know if none is configured.
        let workers = self.envoy.admin().workers(restart_epoch).await;
        let mut takeover = self.envoy.lend().await.map_err(|error| error.to_string())?;
        takeover.workers = workers.or(takeover.workers);
        self.until_ready(channel, &Message::Go(takeover, serving)).await?;
        Ok(self.pass_on(channel).await?)
    }

    /// Continues to serve after a failed handover: tells the other agent why, and takes the base id back once the other
    /// Envoy has exited.
    async fn reclaim_base_id(&self, mut channel: Channel, other: &str, why: String) {
        let subject = format!("handover to container {other}");
        tracing::error!("{}", Problem::new(Code::HandoverFailed, subject, &why));
        // The other agent may have exited.
        let _ = channel.send(&Message::Refused(why)).await;
        // The connection ends once the Envoy of the other agent has exited.
        let _ = timeout(ANSWER_LIMIT, async { while channel.receive().await.is_ok() {} }).await;
        self.envoy.order(Order::Reclaim).await;
    }

    /// Sends `go`, which lets the other agent start its Envoy, and waits until that Envoy is able to serve.
    async fn until_ready(&self, channel: &mut Channel, go: &Message) -> Result<(), BoxError> {
        let pid = self.envoy.report().borrow().pid;
        let mut report = self.envoy.report();
        let message = async {
            channel.send(go).await?;
            channel.receive().await
        };
        // The other agent reports its own timeout first.
        let limit = READY_LIMIT.saturating_add(ANSWER_LIMIT);
        tokio::select! {
            message = timeout(limit, message) => match message {
                Ok(Ok(Message::Ready)) => Ok(()),
                Ok(Ok(Message::Refused(why))) => Err(why.into()),
                Ok(Ok(other)) => Err(other.unexpected().into()),
                Ok(Err(_)) => Err("it has exited".into()),
                Err(_) => Err(format!("it is not ready after {limit:?}").into()),
            },
            _ = report.wait_for(|now| now.pid != pid) => Err("this container's Envoy has exited".into()),
            () = self.stop.first_request() => Err("this container must stop".into()),
        }
    }

    /// Stops accepting, passes the sockets and the lock on, and leaves Envoy to its successor. Fails only
    /// before anything has changed. Stops this agent if the other one does not confirm that it serves.
    async fn pass_on(&self, channel: &mut Channel) -> io::Result<Outcome> {
        let mut descriptors = self.ports.duplicate().await?;
        descriptors.push(self.pair.duplicate_lock()?);
        self.stop_accepting.begin().await;
        let outcome = match commit(channel, &descriptors).await {
            Ok(()) => {
                tracing::info!(
                    "the other container serves; this one waits for the end of its Envoy"
                );
                Outcome::PassedOn
            }
            Err(error) => {
                // This agent has stopped accepting. It exits, and the next process that gets the lock serves.
                tracing::error!("the other agent did not confirm that it serves: {error}");
                self.stop.request(Urgency::Kill, FAILED);
                Outcome::Unconfirmed(error.to_string())
            }
        };
        self.pair.leave_lock();
        self.envoy.order(Order::Supersede).await;
        Ok(outcome)
    }

    /// Holds the connection until this agent's Envoy has exited; its end informs the successor. If the successor exits
    /// first, stops Envoy at once.
    async fn wait_for_own_envoy_exit(&self, mut channel: Channel) {
        let mut report = self.envoy.report();
        let mut ended = pin!(report.wait_for(|now| now.state == State::Exited));
        tokio::select! {
            _ = &mut ended => return,
            _ = channel.receive() => {}
        }
        tracing::error!("the agent of the other container has exited");
        self.stop.request(Urgency::Kill, FAILED);
        let _ = ended.await;
    }
}

/// Sends the other agent the descriptors. Fails unless it confirms that it serves.
async fn commit(channel: &mut Channel, descriptors: &[OwnedFd]) -> Result<(), BoxError> {
    channel.send_with(&Message::Commit, descriptors).await?;
    match channel.receive_answer().await? {
        Message::Done => Ok(()),
        other => Err(other.unexpected().into()),
    }
}

/// The Envoy from which a successor's Envoy takes over.
struct Parent {
    /// The restart epoch of the successor's Envoy.
    restart_epoch: u32,
    /// The listeners and secrets of this Envoy, if they are known.
    serving: Option<ServingResources>,
}

/// The agent that takes over.
pub(super) struct Successor {
    /// The state for a later handover, in which this agent is the one that serves.
    pub(super) holder: Holder,
    pub(super) inputs: Arc<Inputs>,
    pub(super) config: Config,
    /// Lets Envoy serve.
    pub(super) gate: CancellationToken,
}

impl Successor {
    /// Starts Envoy as the hot-restart successor of the serving agent's Envoy, and runs it until its end.
    pub(super) async fn run(self, mut supervisor: Supervisor) -> Result<Exit, BoxError> {
        let begun = tokio::select! {
            begun = self.begin() => begun,
            () = self.holder.stop.first_request() => return Ok(Exit::Requested),
        };
        let (channel, parent) = begun.inspect_err(|why| {
            tracing::error!("{}", Problem::new(Code::HandoverFailed, "this container", why));
        })?;
        let pair = self.holder.pair.clone();
        let mut taking_over = pin!(self.take_over(channel, parent));
        let exit = tokio::select! {
            () = &mut taking_over => return supervisor.await,
            exit = &mut supervisor => exit,
        };
        if !pair.has_lock() {
            // Gives the takeover time to send the reason to the other agent.
            let _ = timeout(CHECK_INTERVAL, taking_over).await;
        }
        exit
    }

    /// Validates the bootstrap with Envoy, and asks the agent that serves for a handover. Prepares the inputs of this
    /// agent's first Envoy for it. Returns the connection, and the Envoy to take over from.
    async fn begin(&self) -> Result<(Channel, Parent), BoxError> {
        let (command, limit) = self
            .config
            .envoy
            .as_ref()
            .and_then(|it| Some((&it.command, it.hot_restart?.check)))
            .ok_or("the agent runs no Envoy")?;
        let inputs = self.inputs.clone();
        let prepared = tokio::task::spawn_blocking(move || inputs.prepare(0)).await??;
        timeout(limit, validate(Arc::new(prepared), 0)).await??;
        let gate = gate_socket(&self.config);
        let override_json = gate::add_to(command.override_json.as_deref(), &gate)?;
        let hello = self.holder.pair.hello(&command.binary).await;
        let mut channel = timeout(ANSWER_LIMIT, Channel::connect(&socket())).await??;
        channel.greet(&hello).await?;
        channel.send(&Message::Begin).await?;
        match channel.receive_answer().await? {
            Message::Go(takeover, serving) => {
                let restart_epoch = takeover.restart_epoch;
                self.inputs.adopt(takeover, override_json);
                Ok((channel, Parent { restart_epoch, serving }))
            }
            other => Err(other.unexpected().into()),
        }
    }

    /// Takes over once Envoy is able to serve, and informs Envoy's supervisor when its parent has exited. If the
    /// takeover fails, tells the other agent why, and stops this one.
    async fn take_over(self, mut channel: Channel, parent: Parent) {
        let taken = async {
            self.until_ready(&mut channel, &parent).await?;
            self.serve(&mut channel).await
        };
        match taken.await {
            Ok(()) => {
                // The connection ends when the former agent exits.
                while channel.receive().await.is_ok() {}
                tracing::info!("the former Envoy has exited");
                self.holder.pair.change(|state| state.has_parent = false);
                self.holder.envoy.order(Order::ParentExited).await;
            }
            Err(error) => {
                let why = error.to_string();
                tracing::error!("{}", Problem::new(Code::HandoverFailed, "this container", &why));
                // The other agent may have exited.
                let _ = channel.send(&Message::Refused(why)).await;
                self.holder.stop.request(Urgency::Kill, FAILED);
            }
        }
    }

    /// Waits until only the listener of the [`gate`] keeps Envoy from serving.
    async fn until_ready(&self, channel: &mut Channel, parent: &Parent) -> Result<(), BoxError> {
        let mut why = String::new();
        let Parent { restart_epoch, serving } = parent;
        let ready = async {
            let admin = self.holder.envoy.admin();
            while let Err(missing) = check_takeover(&admin, *restart_epoch, serving.as_ref()).await
            {
                why = missing.to_string();
                sleep(CHECK_INTERVAL).await;
            }
        };
        let mut report = self.holder.envoy.report();
        tokio::select! {
            ready = timeout(READY_LIMIT, ready) => {
                Ok(ready.map_err(|_| format!("not ready after {READY_LIMIT:?}: {why}"))?)
            }
            _ = report.wait_for(|now| now.state == State::Exited) => {
                Err("its Envoy has exited before it served".into())
            }
            () = self.holder.stop.first_request() => {
                Err("this container must stop".into())
            }
            other = channel.receive() => Err(match other {
                Ok(Message::Refused(why)) => why.into(),
                Ok(other) => other.unexpected().into(),
                Err(_) => "the agent that served has exited".into(),
            }),
        }
    }

    /// Takes the sockets and the lock, lets Envoy serve, and confirms it to the other agent.
    async fn serve(&self, channel: &mut Channel) -> Result<(), BoxError> {
        channel.send(&Message::Ready).await?;
        let answer = channel.receive_answer().await?;
        if answer != Message::Commit {
            return Err(answer.unexpected().into());
        }
        let mut sockets = channel.take_descriptors();
        let lock = sockets.pop().ok_or("the agent that served did not pass on its lock")?;
        self.holder.pair.serve_with(lock)?;
        self.holder.pair.change(|state| state.has_parent = true);
        link(&self.config)?;
        self.holder.ports.set(sockets);
        self.gate.cancel();
        let mut report = self.holder.envoy.report();
        let live = report.wait_for(|now| now.state == State::Running);
        tokio::select! {
            live = timeout(ANSWER_LIMIT, live) => {
                live??;
                // The former agent may have been killed meanwhile. This one has the lock, and serves.
                let _ = channel.send(&Message::Done).await;
            }
            // It sends nothing more, so it has been killed. Envoy is not live before the supervisor knows.
            _ = channel.receive() => {}
        }
        Ok(())
    }
}

/// Returns the function that requests that the standby takes over.
pub(super) fn on_request(pair: Option<Pair>) -> HandOver {
    Arc::new(move || {
        let pair = pair.as_ref().ok_or("this pod has no standby")?;
        pair.request_handover().ok_or("no standby is connected")
    })
}

/// Shows which of the two containers serves.
pub(super) fn page(pair: Option<Pair>) -> Page {
    Arc::new(move || Box::pin(ready(json!(pair.as_ref().map(Pair::state)))))
}

/// Returns the path of the gate's socket, to which an Envoy that takes over connects.
pub(super) fn gate_socket(config: &Config) -> PathBuf {
    unix_socket::container_path(&config.bootstrap.xds_socket, "gate")
}

/// Links the well-known paths to the sockets of this container.
pub(super) fn link(config: &Config) -> Result<(), Problem> {
    let bootstrap = &config.bootstrap;
    unix_socket::link(&config.xds_socket, &bootstrap.xds_socket)?;
    unix_socket::link(&config.sds_socket, &bootstrap.sds_socket)
}
