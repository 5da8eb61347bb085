//! Traffic capture: from the settings of `istio-iptables` to the rules that send a pod's traffic to
//! Envoy.
//!
//! [`config::Config::check`] reads the settings, [`rules::Rules::new`] builds the rules of both address
//! families as one ordered model, and [`iptables`] renders them. Nothing here reads the machine's state:
//! callers pass what they found in [`config::Host`]. [`validation`] tries with a connection whether
//! traffic is captured.

pub mod cidr;
pub mod config;
pub mod iptables;
pub mod layout;
pub mod rules;
pub mod validation;
