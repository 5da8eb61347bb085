//! Traffic capture: from the settings of `istio-iptables` to the rules that send a pod's traffic to
//! Envoy.
//!
//! [`config::Config::check`] reads the settings, [`rules::Rules::new`] builds the rules of both address
//! families as one ordered model. [`iptables`] and [`nftables`] render, apply and read them, under the
//! [`lock`] of the network namespace; [`routes`] adds what they need besides. [`packet`] simulates what
//! they do, and [`explain`] says it in words. [`validation`] tries with a connection whether traffic is
//! captured. The configuration is made of nothing but the settings and what callers found on the machine
//! ([`config::Host`]).

pub mod config;
pub mod explain;
pub mod iptables;
pub mod layout;
pub mod lock;
pub mod nftables;
pub mod packet;
pub mod program;
pub mod routes;
pub mod rules;
pub mod validation;
pub mod verify;

use std::io;

use crate::problem::{Code, Problem, codes};

/// A problem with this code, unless a capability is missing.
pub fn problem(code: &'static Code, subject: impl ToString, error: io::Error) -> Problem {
    let code = match error.kind() {
        io::ErrorKind::PermissionDenied => codes::CAPTURE_PERMISSION,
        _ => code,
    };
    Problem::new(code, subject, error)
}

#[cfg(test)]
mod differential_tests;
