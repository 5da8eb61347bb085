//! Builds the secret cache with its renewal, SDS and the certificate output.
//!
//! The source of secrets decides which of them exist: an authority, files, or another process.

use std::time::Duration;

use super::Agent;
use super::interceptors::Pcds;
use crate::ca::istio::IstioCa;
use crate::istiod::Istiod;
use crate::net::unix_socket::Listener;
use crate::net::unix_socket::access::Access;
use crate::runtime::clock::Clock;
use crate::sds;
use crate::secrets::files::Files;
use crate::secrets::name::Name;
use crate::secrets::{self, Secrets, output};

/// The time limit of the connection to istiod and of its first response to a CSR.
const SIGNING_LIMIT: Duration = Duration::from_secs(10);

impl Agent {
    /// Serves all secrets on `listener`, or only those from files if another process owns the workload
    /// socket.
    pub(super) fn secrets(
        &mut self,
        istiod: &Istiod,
        serves_workload: bool,
        listener: Option<Listener>,
        rejections: sds::Rejections,
    ) -> (Option<Secrets>, Files, Option<Pcds>) {
        let mut config = self.config.secret_sources.files.clone();
        if !serves_workload {
            config.workload = None;
        }
        let (files, keeping) = secrets::files::new(config, Clock::system(), &self.metrics);
        self.spawn_until_shutdown("secrets from files", keeping);
        // Certificate files that exist are used instead of the authority.
        let signs = serves_workload
            && self.config.secret_sources.has_authority()
            && !(files.have(&Name::Default) && files.have(&Name::RootCa));
        let secrets = signs.then(|| self.renewal(istiod));
        if serves_workload && let Some(config) = self.config.secrets.output.clone() {
            let writing = output::run(config, secrets.clone(), files.clone());
            self.spawn_while_accepting("certificate output", writing);
        }
        let wants_roots = serves_workload && self.config.secrets.mesh_roots;
        let pcds = wants_roots.then(|| Pcds { secrets: secrets.clone(), files: files.clone() });
        if let Some(listener) = listener {
            let sources = sds::Sources {
                secrets: secrets.clone(),
                files: files.clone(),
                serves_workload,
                options: self.config.secret_sources.options.clone(),
                rejections,
            };
            let listener = listener.with_access(self.access());
            let serving = sds::serve(listener, sources, &self.metrics, self.shutdown.clone());
            self.spawn("secret discovery service", serving);
        }
        (secrets, files, pcds)
    }

    /// Spawns the task that has certificates signed and renewed.
    fn renewal(&mut self, istiod: &Istiod) -> Secrets {
        let authority = match self.config.ca_istiod.clone() {
            Some(config) => self.istiod("connection to the certificate authority", config),
            None => istiod.clone(),
        };
        let config = self.config.secrets.clone();
        let authority = IstioCa::new(authority, config.cert_signer, SIGNING_LIMIT);
        let (secrets, renewal) =
            secrets::new(config.renewal, authority, Clock::system(), &self.metrics);
        self.spawn_while_accepting("certificate renewal", renewal);
        secrets
    }

    /// Returns the check of the users that may connect to the SDS socket, or None if all may.
    fn access(&self) -> Option<Access> {
        let users = self.config.secret_sources.users.as_ref()?;
        let refusals = self.metrics.counter(
            "istio_agent_sds_refused_connections_total",
            "Number of connections to the secret socket by users without permission",
        );
        Some(Access::only(users, refusals))
    }
}
