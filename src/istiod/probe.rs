//! Tries a control plane beside the connection in use, without retries: for the doctor.

use std::time::Duration;

use rustls::pki_types::{CertificateDer, ServerName};

use super::connection::Connection;
use super::dial::{Bound, Cause, dial, dial_with};
use super::{Config, Security, tls};
use crate::dial::Dialer;
use crate::executor::ConnectionTasks;
use crate::unverified_tls;

/// A connection of its own. It ends when this is dropped.
#[derive(Debug)]
pub struct Probe {
    pub connection: Connection,
    _tasks: ConnectionTasks,
}

/// Opens a connection as the agent does, but within `limit`.
pub async fn open(config: &Config, limit: Duration) -> Result<Probe, Cause> {
    let tasks = ConnectionTasks::default();
    let mut config = config.clone();
    (config.limits.total, config.limits.per_address) = (limit, limit);
    let config = config.into();
    let (connection, driver) = dial(&config, &Dialer::default(), tasks.executor()).await?;
    tasks.executor().spawn(async move {
        driver.run(|| {}).await; // A call on it fails with the reason.
    });
    Ok(Probe {
        connection,
        _tasks: tasks,
    })
}

/// The certificate a peer shows that failed verification. None if it shows none.
pub async fn unverified_certificate(
    config: &Config,
    limit: Duration,
) -> Option<CertificateDer<'static>> {
    let Security::Tls(tls) = &config.security else {
        return None;
    };
    let prepared = tls::Prepared {
        config: unverified_tls::config(true).ok()?,
        without_client: None,
        name: ServerName::try_from(tls.server_name.clone()).ok()?,
    };
    let tasks = ConnectionTasks::default();
    let dialer = Dialer::default();
    let bound = Bound::new(limit);
    let config = config.clone().into();
    let open = dial_with(&config, Some(prepared), &dialer, tasks.executor(), bound).await;
    let (connection, _) = open.ok()?;
    let tls = connection.about().tls.as_ref()?;
    tls.peer_certificate.clone()
}
