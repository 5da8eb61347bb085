//! Builds the discovery service and the health checks.

use std::sync::Arc;

use super::Agent;
use crate::envoy::handle::Envoy;
use crate::health::{self, Health};
use crate::istiod::Istiod;
use crate::net::unix_socket;
use crate::problem::Problem;
use crate::runtime::lifecycle::Stop;
use crate::xds::interceptor::Interceptors;
use crate::xds::ledger::Ledger;
use crate::xds::observe::Observer;
use crate::xds::server::{self, Discovery, Upstream};

impl Agent {
    /// Spawns the health checks of a workload on a virtual machine.
    pub(super) fn health(
        &mut self,
        envoy: Option<&Envoy>,
        stop: &Stop,
    ) -> Result<Option<Health>, rustls::Error> {
        let Some(config) = self.config.health.clone() else { return Ok(None) };
        let (health, checks) =
            health::new(config, envoy.map(Envoy::report), stop.requested(), &self.metrics)?;
        self.spawn_until_shutdown("health checks", checks);
        Ok(Some(health))
    }

    /// Relays discovery; without Envoy, all clients share the agent's connection to istiod.
    pub(super) fn discovery(
        &mut self,
        istiod: &Istiod,
        envoy: Option<&Envoy>,
        interceptors: Interceptors,
        health: Option<&Health>,
    ) -> Result<Observer, Problem> {
        let configured = self.config.last_known_good.clone();
        if envoy.is_none() && configured.is_some() {
            tracing::info!(
                "configuration is not stored, because this agent does not run Envoy (DISABLE_ENVOY)"
            );
        }
        let ledger = envoy.zip(configured).map(|(envoy, config)| {
            let (ledger, writing) =
                Ledger::new(config, Some(envoy.admin()), &self.metrics, self.shutdown.clone());
            self.spawn("stored configuration", writing);
            self.ledger.get_or_init(|| ledger).clone()
        });
        // gRPC applications share the directory, and may have created a file of this name.
        let listener = unix_socket::replace(&self.config.bootstrap.xds_socket)?;
        let other_clients = match envoy {
            Some(_) => {
                let name = "connection to istiod for clients other than Envoy";
                self.istiod(name, self.config.istiod.clone())
            }
            None => istiod.clone(),
        };
        let envoy = envoy.cloned();
        let config = server::Config {
            max_request_bytes: self.config.max_request_bytes,
            cluster_id: self.config.cluster_id.clone(),
            ledger,
            upstream: Upstream { envoy: istiod.clone(), other_clients },
            is_own_envoy: Arc::new(move |pid| envoy.as_ref().is_some_and(|it| it.has_started(pid))),
            interceptors,
            health: health.map(Health::verdict),
            shutdown: self.shutdown.clone(),
        };
        let discovery = Discovery::new(config, &self.metrics);
        let observer = discovery.observer();
        self.spawn("discovery service", discovery.serve(listener));
        Ok(observer)
    }
}
