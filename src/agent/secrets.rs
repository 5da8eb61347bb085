//! Builds what keeps secrets and serves them.
//!
//! Which parts there are depends on where secrets come from: an authority, files, or somebody else.
//!
//! Does not find out who serves the workload's socket.

use std::time::Duration;

use super::secret_sockets::{self, Server};
use super::{Agent, Error};
use crate::bootstrap;
use crate::ca::csr::KeyType;
use crate::ca::istio::IstioCa;
use crate::clock::Clock;
use crate::config::KeyChoice;
use crate::istiod::Istiod;
use crate::secrets::name::Name;
use crate::secrets::{self, Secrets};
use crate::unix_socket::access::Access;
use crate::{sds, unix_socket};

/// How long one certificate request may take, connecting included.
const SIGNING_LIMIT: Duration = Duration::from_secs(10);

impl Agent {
    /// Keeps secrets fresh and serves them: all of them, or those from files if somebody else
    /// serves the workload's.
    pub(super) fn secrets(
        &mut self,
        istiod: &Istiod,
        server: Server,
    ) -> Result<Option<Secrets>, Error> {
        let mut config = self.config.secret_sources.files.clone();
        let mut socket = self.config.sds_socket.clone();
        if let Server::Other { is_healthy } = server {
            config.workload = None;
            let watching = secret_sockets::watch_over(socket, is_healthy, &self.metrics);
            self.spawn_until_shutdown("watch over the server of secrets", watching);
            socket = bootstrap::FILES_SOCKET.into();
        }
        // Without Envoy nobody asks, and the socket is not there.
        let serves = self.config.envoy.is_some();
        let listener = serves.then(|| unix_socket::bind(&socket)).transpose()?;
        let (files, keeping) = secrets::files::new(config, Clock::system(), &self.metrics);
        self.spawn_until_shutdown("keeper of secrets from files", keeping);
        let serves_workload = server == Server::Agent;
        // Files that are there have taken the authority's place.
        let signs = serves_workload
            && self.config.secret_sources.has_authority()
            && !(files.have(&Name::Default) && files.have(&Name::RootCa));
        let secrets = signs.then(|| self.signed_secrets(istiod));
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
        Ok(secrets)
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

    /// The secrets an authority signs.
    fn signed_secrets(&mut self, istiod: &Istiod) -> Secrets {
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
        let (secrets, renewal) = secrets::new(config, authority, Clock::system(), &self.metrics);
        self.spawn_until_shutdown("certificate renewal", renewal);
        secrets
    }
}

fn key_type(key: KeyChoice) -> KeyType {
    match key {
        KeyChoice::EcdsaP256 => KeyType::P256,
        KeyChoice::EcdsaP384 => KeyType::P384,
        KeyChoice::Rsa { bits } => KeyType::Rsa(bits),
    }
}
