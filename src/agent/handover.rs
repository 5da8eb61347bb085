//! Passes the pod on to an agent in another container, whose Envoy takes over from this one's by hot restart, and takes
//! it over from such an agent.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::Supervisor;
use super::ports::{Give, Ports};
use crate::config::Config;
use crate::envoy::Exit;
use crate::envoy::handle::{Envoy, Order, State};
use crate::envoy::hot_restart::{Adopted, Lent, validate};
use crate::envoy::inspect::Serving;
use crate::envoy::launch::Prepared;
use crate::lifecycle::{BoxError, Retirement, Stop, Urgency};
use crate::metrics::{Counters, Registry};
use crate::problem::{Problem, codes};
use crate::standby::channel::{Channel, Message};
use crate::standby::{Standby, socket, told_by};
use crate::unix_socket;
use crate::xds::last_known_good::LastKnownGood;

/// How long a successor may take until its Envoy serves.
const READY: Duration = Duration::from_secs(60);
/// How long the other agent may take for one answer.
const ANSWER: Duration = Duration::from_secs(15);
/// How often a successor looks at its Envoy.
const LOOKS: Duration = Duration::from_millis(100);
/// The standby, a successor, and what is about to be refused.
const MAX_CONNECTIONS: usize = 4;
/// The cause of a stop after a handover that failed.
pub(super) const FAILED: &str = "the handover failed";

/// The agent that serves.
#[derive(Clone)]
pub(super) struct Holder {
    pub(super) standby: Standby,
    pub(super) envoy: Envoy,
    pub(super) program: PathBuf,
    pub(super) kept: Option<LastKnownGood>,
    pub(super) retirement: Retirement,
    pub(super) stop: Stop,
    pub(super) results: Counters<1>,
}

pub(super) fn results(registry: &Registry) -> Counters<1> {
    registry.counters(
        "istio_agent_handovers_total",
        "Handovers to the agent in the other container, by how they went.",
        &["result"],
    )
}

impl Holder {
    /// Serves the other agent from when it has the sockets that it passes on.
    pub(super) async fn serve(self, sockets: oneshot::Receiver<Vec<OwnedFd>>) {
        let listening = match sockets.await {
            Ok(sockets) => self.standby.listen().map(|it| (it, Arc::new(sockets))),
            // This agent never serves.
            Err(_) => return std::future::pending().await,
        };
        let (listener, sockets) = match listening {
            Ok(listening) => listening,
            Err(error) => {
                let problem = Problem::new(codes::STANDBY_UNUSABLE, "handover socket", error);
                tracing::error!("{}", problem.consequence("no handover is possible"));
                return std::future::pending().await;
            }
        };
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                    Ok((stream, _)) => {
                        let (holder, sockets) = (self.clone(), sockets.clone());
                        connections.spawn(async move {
                            let ended = match Channel::of(stream) {
                                Ok(channel) => holder.connection(channel, &sockets).await,
                                Err(error) => Err(error.into()),
                            };
                            if let Err(error) = ended {
                                tracing::debug!("the connection of the other container ended: {error}");
                            }
                        });
                    }
                    Err(error) => {
                        tracing::warn!("cannot accept the agent of the other container: {error}");
                        sleep(LOOKS).await;
                    }
                },
                Some(_) = connections.join_next() => {}
            }
        }
    }

    async fn connection(self, mut channel: Channel, sockets: &[OwnedFd]) -> Result<(), BoxError> {
        let mut orders = self.standby.orders();
        let other = timeout(ANSWER, channel.greet(&self.standby.hello())).await??;
        self.standby.set_waiting(Some(other.clone()));
        let ordered = async {
            // An error means that this agent ends.
            let _ = orders.changed().await;
        };
        let message = tokio::select! {
            message = channel.receive() => Some(message),
            () = ordered => None,
        };
        self.standby.set_waiting(None);
        let Some(message) = message else {
            return Ok(channel.send(&Message::TakeOver).await?);
        };
        let Message::Begin {
            hot_restart_version,
        } = message?
        else {
            return Err("expected the beginning of a handover".into());
        };
        tracing::info!("handing over to container {} ({})", other.name, other.build);
        let lent = self.lend(&hot_restart_version).await;
        let handed = match lent {
            Ok((lent, serving)) => {
                let handed = self.hand_over(&mut channel, lent, serving, sockets).await;
                if handed.is_err() {
                    self.envoy.order(Order::Reclaim).await;
                    if let Some(kept) = &self.kept {
                        kept.resume();
                    }
                }
                handed
            }
            Err(why) => Err(why),
        };
        if let Err(why) = handed {
            self.results.with(["failed"]).inc();
            let subject = format!("handover to container {}", other.name);
            tracing::error!("{}", Problem::new(codes::HANDOVER_FAILED, subject, &why));
            channel.send(&Message::Refused(why)).await?;
            return Ok(());
        }
        self.results.with(["succeeded"]).inc();
        self.follow(channel).await;
        Ok(())
    }

    /// Lets the other agent start its Envoy, if both Envoys understand each other.
    async fn lend(&self, hot_restart_version: &str) -> Result<(Lent, Serving), String> {
        let own = told_by(&self.program, "--hot-restart-version").await?;
        if own != hot_restart_version {
            return Err(format!(
                "its Envoy has the hot restart version {hot_restart_version}, expected {own}"
            ));
        }
        let serving = Serving::of(self.envoy.admin()).await?;
        let lent = self.envoy.lend().await?;
        if let Some(kept) = &self.kept
            && timeout(ANSWER, kept.release()).await.is_err()
        {
            tracing::warn!("the disk is too slow to write the stored configuration");
        }
        Ok((lent, serving))
    }

    /// Waits for the other Envoy, and passes the sockets and the lock on.
    async fn hand_over(
        &self,
        channel: &mut Channel,
        lent: Lent,
        serving: Serving,
        sockets: &[OwnedFd],
    ) -> Result<(), String> {
        let pid = self.envoy.report().borrow().pid;
        let mut report = self.envoy.report();
        let mut stop = self.stop.requested();
        let text = |error: io::Error| error.to_string();
        channel
            .send(&Message::Go(lent, serving))
            .await
            .map_err(text)?;
        let message = tokio::select! {
            message = timeout(READY.saturating_add(ANSWER), channel.receive()) => match message {
                Ok(message) => message.map_err(|_| "it has exited".to_owned())?,
                Err(_) => return Err(format!("it is not ready after {READY:?}")),
            },
            _ = report.wait_for(|now| now.pid != pid) => return Err("this container's Envoy has exited".to_owned()),
            _ = stop.wait_for(|stop| stop.urgency != Urgency::Run) => return Err("this container is to stop".to_owned()),
        };
        match message {
            Message::Ready => {}
            Message::Refused(why) => return Err(why),
            other => return Err(format!("unexpected message {other:?}")),
        }
        let mut given = Vec::new();
        for socket in sockets {
            given.push(socket.try_clone().map_err(text)?);
        }
        given.push(self.standby.duplicate_lock().map_err(text)?);
        self.retirement.begin().await;
        let passed = async {
            channel.send_with(&Message::Commit, &given).await?;
            match timeout(ANSWER, channel.receive()).await?? {
                Message::Done => Ok(()),
                other => Err(BoxError::from(format!("unexpected message {other:?}"))),
            }
        };
        if let Err(error) = passed.await {
            // This agent has stopped accepting. It exits, and the next process that gets the lock serves.
            tracing::error!("the other agent did not confirm that it serves: {error}");
            self.stop.request(Urgency::Kill, FAILED);
        }
        self.standby.leave_lock();
        self.envoy.order(Order::Supersede).await;
        Ok(())
    }

    /// Keeps the connection, whose end tells the successor that this Envoy has exited. If the successor exits first, the
    /// agent does not wait for its Envoy.
    async fn follow(&self, mut channel: Channel) {
        tracing::info!("the other container serves; this one waits for the end of its Envoy");
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

/// The agent that takes over.
pub(super) struct Successor {
    pub(super) standby: Standby,
    pub(super) stop: Stop,
    pub(super) give: Give,
    pub(super) config: Config,
}

impl Successor {
    /// Starts Envoy as the hot-restart successor of the serving agent's Envoy, and runs it until its end.
    pub(super) async fn run(
        self,
        prepare: impl FnOnce() -> Result<Option<Prepared>, BoxError> + Send + 'static,
        adopted: &Adopted,
        envoy: Envoy,
        mut supervisor: Supervisor,
    ) -> Result<Exit, BoxError> {
        let mut stop = self.stop.requested();
        let begun = tokio::select! {
            begun = self.begin(prepare) => begun,
            _ = stop.wait_for(|stop| stop.urgency != Urgency::Run) => return Ok(Exit::Requested),
        };
        let (channel, lent, serving) = begun.inspect_err(|why| {
            let problem = Problem::new(codes::HANDOVER_FAILED, "this container", why);
            tracing::error!("{problem}");
        })?;
        // It is set once.
        let _ = adopted.set(lent);
        let standby = self.standby.clone();
        let mut taking_over = pin!(self.take_over(channel, serving, envoy));
        let mut is_over = false;
        loop {
            tokio::select! {
                () = &mut taking_over, if !is_over => is_over = true,
                exit = &mut supervisor => {
                    if !is_over && !standby.has_lock() {
                        // Tells the other agent why.
                        let _ = timeout(LOOKS, taking_over).await;
                    }
                    return exit;
                }
            }
        }
    }

    /// Asks the agent that serves for its place, if Envoy can use its bootstrap.
    async fn begin(
        &self,
        prepare: impl FnOnce() -> Result<Option<Prepared>, BoxError> + Send + 'static,
    ) -> Result<(Channel, Lent, Serving), BoxError> {
        let envoy = self.config.envoy.as_ref();
        let (program, limit) = envoy
            .and_then(|it| Some((it.command.binary.clone(), it.hot_restart?.check)))
            .ok_or("the agent runs no Envoy")?;
        let prepared = tokio::task::spawn_blocking(prepare).await??;
        if let Some(prepared) = prepared {
            timeout(limit, validate(Arc::new(prepared), 0)).await??;
        }
        let hot_restart_version = told_by(&program, "--hot-restart-version").await?;
        let mut channel = timeout(ANSWER, Channel::connect(&socket())).await??;
        timeout(ANSWER, channel.greet(&self.standby.hello())).await??;
        let begin = Message::Begin {
            hot_restart_version,
        };
        channel.send(&begin).await?;
        match timeout(ANSWER, channel.receive()).await?? {
            Message::Go(lent, serving) => Ok((channel, lent, serving)),
            Message::Refused(why) => Err(why.into()),
            other => Err(format!("unexpected message {other:?}").into()),
        }
    }

    /// Takes over once Envoy serves, and tells Envoy's supervisor when its parent has ended.
    pub(super) async fn take_over(self, mut channel: Channel, serving: Serving, envoy: Envoy) {
        let stop = self.stop.clone();
        match self.until_it_serves(&mut channel, serving, &envoy).await {
            Ok(()) => {
                // Until the end of the former agent.
                while channel.receive().await.is_ok() {}
                tracing::info!("the former Envoy has exited");
                envoy.order(Order::ParentEnded).await;
            }
            Err(error) => {
                let why = error.to_string();
                let problem = Problem::new(codes::HANDOVER_FAILED, "this container", &why);
                tracing::error!("{problem}");
                // The other agent may have exited.
                let _ = channel.send(&Message::Refused(why)).await;
                stop.request(Urgency::Kill, FAILED);
            }
        }
    }

    async fn until_it_serves(
        self,
        channel: &mut Channel,
        serving: Serving,
        envoy: &Envoy,
    ) -> Result<(), BoxError> {
        let mut stop = self.stop.requested();
        let mut why = "Envoy is not live".to_owned();
        let ready = async {
            let mut report = envoy.report();
            // An error is the end of Envoy, which is noticed below.
            let _ = report.wait_for(|now| now.state == State::Running).await;
            while let Err(missing) = serving.is_reached_by(envoy.admin()).await {
                why = missing;
                sleep(LOOKS).await;
            }
        };
        let mut report = envoy.report();
        tokio::select! {
            ready = timeout(READY, ready) => {
                ready.map_err(|_| format!("not ready after {READY:?}: {why}"))?;
            }
            _ = report.wait_for(|now| now.state == State::Exited) => {
                return Err("its Envoy has exited before it served".into());
            }
            _ = stop.wait_for(|stop| stop.urgency != Urgency::Run) => {
                return Err("this container is to stop".into());
            }
            other = channel.receive() => return Err(match other {
                Ok(Message::Refused(why)) => why.into(),
                Ok(other) => format!("unexpected message {other:?}").into(),
                Err(_) => "the agent that served has exited".into(),
            }),
        }
        channel.send(&Message::Ready).await?;
        match timeout(ANSWER, channel.receive()).await?? {
            Message::Commit => {}
            Message::Refused(why) => return Err(why.into()),
            other => return Err(format!("unexpected message {other:?}").into()),
        }
        let mut sockets = channel.take_descriptors();
        let lock = sockets.pop().ok_or("the lock did not come")?;
        self.standby.serve_with(lock)?;
        channel.send(&Message::Done).await?;
        link(&self.config)?;
        self.give.give(Ports::inherited(&self.config, sockets)?)?;
        Ok(())
    }
}

/// Has the well-known paths lead to the sockets of this container.
pub(super) fn link(config: &Config) -> Result<(), Problem> {
    let bootstrap = &config.bootstrap;
    unix_socket::link(&config.xds_socket, &bootstrap.xds_socket)?;
    unix_socket::link(&config.sds_socket, &bootstrap.sds_socket)
}
