//! The hall: builds every room, runs them side by side, and brings them down.
//!
//! [`Agent::build`] binds the sockets and makes the rooms; nothing runs yet, so a socket that cannot
//! be had ends the agent before Envoy exists. [`Agent::run`] starts them and waits for Envoy's end.
//! The sockets outlive Envoy, which asks for its configuration until it has drained.
//!
//! The only place where rooms meet that may not see each other.

use std::time::Duration;

use crate::bootstrap;
use crate::cli::ExitCode;
use crate::config::Config;
use crate::envoy::{self, Exit};
use crate::istiod::{self, Istiod};
use crate::lifecycle::{self, BoxError, CancellationToken, Tasks};
use crate::unix_socket::{self, Listener};
use crate::xds;
use crate::xds::intercept::Interceptors;
use crate::xds::server::Discovery;

/// How long the rooms may take to end once Envoy is gone.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// Everything the agent consists of, built and bound.
#[derive(Debug)]
pub struct Agent {
    config: Config,
    tasks: Tasks,
    shutdown: CancellationToken,
}

/// Runs the agent until Envoy has ended, or until it is asked to stop.
pub async fn run(config: Config) -> Result<ExitCode, BoxError> {
    Agent::build(config)?.run().await
}

impl Agent {
    fn build(config: Config) -> Result<Self, BoxError> {
        let mut agent = Self {
            config,
            tasks: Tasks::new(),
            shutdown: CancellationToken::new(),
        };
        let istiod = agent.istiod(agent.config.istiod.clone());
        agent.discovery(istiod)?;
        Ok(agent)
    }

    fn istiod(&mut self, config: istiod::Config) -> Istiod {
        let (istiod, connection) = istiod::new(config, self.shutdown.clone());
        self.tasks.spawn("connection to istiod", async move {
            connection.await;
            Ok::<(), BoxError>(())
        });
        istiod
    }

    fn discovery(&mut self, istiod: Istiod) -> Result<(), unix_socket::BindError> {
        let config = xds::Config {
            socket: self.config.xds_socket.clone(),
            max_request_bytes: self.config.max_request_bytes,
            cluster_id: "".to_owned(),
        };
        let listener: Listener = unix_socket::bind(&config.socket)?;
        let discovery = Discovery::new(config, istiod, Interceptors::default(), self.shutdown.clone());
        self.tasks.spawn("discovery service", async move {
            discovery.serve(listener).await;
            Ok::<(), BoxError>(())
        });
        Ok(())
    }

    async fn run(mut self) -> Result<ExitCode, BoxError> {
        let (urgency, signals) = lifecycle::signals()?;
        let code = self.envoy(urgency, signals).await?;
        self.shutdown.cancel();
        self.tasks.drain(STOP_LIMIT).await;
        Ok(code)
    }
    async fn envoy(&mut self, urgency: tokio::sync::watch::Receiver<lifecycle::Urgency>, watching: impl Future<Output=()>) -> Result<ExitCode, BoxError> {
        let Some(envoy) = self.config.envoy.clone() else {
            let mut urgency = urgency;
            tokio::select! { _ = urgency.changed() => {}, () = watching => {} };
            return Ok(ExitCode::Success);
        };
        let _written = bootstrap::write(&self.config.bootstrap)?;
        let exit = tokio::select! {
            exit = envoy::run(envoy, urgency) => exit?,
            () = watching => Exit::Requested,
        };
        Ok(match exit {
            Exit::Requested => ExitCode::Success,
            Exit::ByItself(ended) => ExitCode::of_envoy(ended.code()),
        })
    }
}
