//! Tries a control plane beside the connection in use, without retries: for the doctor.

use std::time::Duration;

use super::Config;
use super::connection::Connection;
use super::dial::dial;
use crate::dial::Dialer;
use crate::duration::scaled;
use crate::executor::ConnectionTasks;
use crate::problem::Problem;

/// A connection of its own. It ends when this is dropped.
#[derive(Debug)]
pub struct Probe {
    pub connection: Connection,
    _tasks: ConnectionTasks,
}

/// Opens a connection as the agent does, but within `limit`.
pub async fn open(config: &Config, limit: Duration) -> Result<Probe, Problem> {
    let tasks = ConnectionTasks::default();
    let mut config = config.clone();
    (config.limits.total, config.limits.per_address) = (limit, scaled(limit, 0.5));
    let config = config.into();
    let dialed = dial(&config, &Dialer::default(), tasks.executor()).await;
    let (connection, driver) = dialed.map_err(|failure| failure.problem)?;
    tasks.executor().spawn(async move {
        driver.run(|| {}).await; // A call on it fails with the reason.
    });
    Ok(Probe {
        connection,
        _tasks: tasks,
    })
}
