//! Traffic capture: from the settings of `istio-iptables` to the rules that send a pod's traffic to
//! Envoy.
//!
//! [`config::Config::check`] reads the settings, [`rules::Rules::new`] builds the rules of both address
//! families as one ordered model. [`iptables`] and [`nftables`] render, apply and read them, under the
//! [`lock`] of the network namespace; [`routes`] adds the routes that they need. [`packet`] simulates the
//! rules, and [`explain`] describes the result in words. [`verify`] compares the rules of a machine with
//! the model. [`bypass`] finds connections that do not get to
//! Envoy, whatever the settings. [`validation`] opens a connection to check that traffic is captured. The configuration
//! depends only on the settings and on what callers found on the machine ([`config::Host`]).

pub mod bypass;
pub mod config;
pub mod explain;
pub mod iptables;
pub mod layout;
pub mod lock;
pub mod nftables;
pub mod packet;
pub mod routes;
pub mod rules;
pub mod validation;
pub mod verify;

use std::io;

use crate::problem::{Code, Problem};

/// Returns a problem with this code, or with the code of a missing capability if that is the error.
pub fn problem(mut code: Code, subject: impl ToString, error: io::Error) -> Problem {
    if error.kind() == io::ErrorKind::PermissionDenied {
        code = Code::CapturePermission;
    }
    Problem::new(code, subject, error)
}

#[cfg(test)]
mod differential_tests;
