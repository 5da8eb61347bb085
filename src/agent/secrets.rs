//! Builds what keeps secrets, serves and writes them.
//!
//! Which parts there are depends on where secrets come from: an authority, files, or somebody else.
//!
//! Does not find out who serves the workload's socket.

use super::pcds::Pcds;
use super::sds_socket::{self, SdsOwner};
use super::{Agent, Error};
use crate::bootstrap;
use crate::clock::Clock;
use crate::istiod::Istiod;
use crate::secrets::files::Files;
use crate::secrets::name::Name;
use crate::secrets::{self, Secrets, output};
use crate::unix_socket::access::Access;
use crate::{sds, unix_socket};

impl Agent {
    /// Keeps secrets fresh, serves and writes them: all of them, or those from files if somebody
    /// else serves the workload's. Returns who takes roots of the mesh, if they are wanted.
    pub(super) fn secrets(
        &mut self,
        istiod: &Istiod,
        owner: SdsOwner,
    ) -> Result<(Option<Secrets>, Option<Pcds>), Error> {
        let mut config = self.config.secret_sources.files.clone();
        let mut socket = self.config.sds_socket.clone();
        if let SdsOwner::Other { is_healthy } = owner {
            config.workload = None;
            let watching = sds_socket::watch_health(socket, is_healthy, &self.metrics);
            self.spawn_until_shutdown("watch over the server of secrets", watching);
            socket = bootstrap::FILES_SOCKET.into();
        }
        // Without Envoy nobody asks, and the socket is not there.
        let serves = self.config.envoy.is_some();
        let listener = serves.then(|| unix_socket::bind(&socket)).transpose()?;
        let (files, keeping) = secrets::files::new(config, Clock::system(), &self.metrics);
        self.spawn_until_shutdown("keeper of secrets from files", keeping);
        let serves_workload = owner == SdsOwner::Agent;
        // Files that are there have taken the authority's place.
        let signs = serves_workload
            && self.config.secret_sources.has_authority()
            && !(files.have(&Name::Default) && files.have(&Name::RootCa));
        let secrets = signs.then(|| self.renewal(istiod));
        if serves_workload {
            self.output(secrets.clone(), &files);
        }
        let wants_roots = serves_workload && self.config.secrets.mesh_roots;
        let pcds = wants_roots.then(|| Pcds::new(secrets.clone(), files.clone()));
        if let Some(listener) = listener {
            let sources = sds::Sources {
                secrets: secrets.clone(),
                files,
                serves_workload,
                style: self.config.secret_sources.style.clone(),
            };
            let listener = listener.guarded(self.access());
            let serving = sds::serve(listener, sources, &self.metrics, self.shutdown.clone());
            self.spawn("secret discovery service", serving);
        }
        Ok((secrets, pcds))
    }

    /// Writes what is served to a directory, if that is asked for.
    fn output(&mut self, secrets: Option<Secrets>, files: &Files) {
        let Some(config) = self.config.secrets.output.clone() else {
            return;
        };
        if files.are_in(&config.directory) {
            let directory = config.directory.display();
            tracing::warn!("nothing is written to {directory}: secrets are read from there");
            return;
        }
        let writing = output::run(config, secrets, files.clone());
        self.spawn_until_shutdown("certificate output", writing);
    }

    /// Who may ask for secrets.
    fn access(&self) -> Access {
        let users = self.config.secret_sources.users.clone();
        users.map_or_else(Access::default, |users| {
            let refusals = self.metrics.counter(
                "istio_agent_sds_refused_connections_total",
                "Number of connections to the secret socket by users who may not",
            );
            Access::only(users, refusals)
        })
    }
}
