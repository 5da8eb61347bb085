//! Time, tasks, signals, and the end of the process.

pub mod backoff;
pub(crate) mod blocking;
pub mod clock;
pub mod duration;
pub mod exit_code;
pub mod lifecycle;
pub mod systemd;
pub(crate) mod usage;
