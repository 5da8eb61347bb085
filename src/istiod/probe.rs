//! Opens a separate connection to a control plane, without retries, for the doctor.

use std::time::Duration;

use super::Config;
use super::connection::Connection;
use super::dial::dial;
use crate::dial::Dialer;
use crate::duration::scaled;
use crate::executor::ConnectionTasks;
use crate::problem::Problem;

/// A separate connection. It is closed when this is dropped.
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
        driver.run(|| {}).await; // Calls on the connection fail with the reason.
    });
    Ok(Probe {
        connection,
        _tasks: tasks,
    })
}
