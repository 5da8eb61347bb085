//! The events of the control plane, each with a text of one line for a person who watches it.
//!
//! Without a sender, events are dropped.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc;

use super::stream::Variant;
use crate::identity::SpiffeId;

/// An event of the control plane. Its text is stable, because scripts search for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A certificate was issued.
    Issued {
        identity: SpiffeId,
        lifetime: Duration,
    },
    /// A certificate request was refused.
    Refused {
        peer: SocketAddr,
        reason: String,
    },
    /// A stream was opened, by an Envoy or by an agent for its Envoy, and has named its node.
    Opened {
        node: String,
        variant: Variant,
    },
    Closed {
        node: String,
        reason: String,
    },
    Pushed {
        node: String,
        type_url: String,
        version: String,
        resources: usize,
        removed: usize,
    },
    Acked {
        node: String,
        type_url: String,
        version: String,
    },
    Nacked {
        node: String,
        type_url: String,
        version: String,
        error: String,
    },
    /// An ACK or NACK of a push that a later push has replaced.
    Stale {
        node: String,
        type_url: String,
        nonce: String,
    },
    /// A machine joined its WorkloadGroup.
    Registered {
        node: String,
        group: String,
        address: String,
    },
    /// A report of the workload's health.
    Health {
        node: String,
        healthy: bool,
    },
    /// The resource folder was read.
    Loaded {
        resources: usize,
    },
    /// The resource folder cannot be used. The resources that were read before stay in force.
    LoadFailed {
        folder: PathBuf,
        reason: String,
    },
    /// A connection failed before or during HTTP/2.
    ConnectionFailed {
        peer: SocketAddr,
        reason: String,
    },
}

/// The receiver of events. By default there is none, and events are dropped.
#[derive(Clone, Debug, Default)]
pub struct Events(Option<mpsc::UnboundedSender<Event>>);

impl Events {
    pub fn to(sender: mpsc::UnboundedSender<Event>) -> Self {
        Self(Some(sender))
    }

    pub(super) fn report(&self, event: Event) {
        if let Some(sender) = &self.0 {
            let _ = sender.send(event); // The receiver may have been dropped.
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Issued { identity, lifetime } => {
                write!(f, "certificate issued to {identity} for {} s", lifetime.as_secs())
            }
            Self::Refused { peer, reason } => {
                write!(f, "certificate refused to {peer}: {reason}")
            }
            Self::Opened { node, variant } => write!(f, "stream opened by {node} ({variant})"),
            Self::Closed { node, reason } => write!(f, "stream closed of {node}: {reason}"),
            Self::Pushed { node, type_url, version, resources, removed } => write!(
                f,
                "PUSH {} {version} to {node}: {resources} resources, {removed} removed",
                short(type_url)
            ),
            Self::Acked { node, type_url, version } => {
                write!(f, "ACK {} {version} from {node}", short(type_url))
            }
            Self::Nacked { node, type_url, version, error } => {
                write!(f, "NACK {} {version} from {node}: {}", short(type_url), one_line(error))
            }
            Self::Stale { node, type_url, nonce } => {
                write!(f, "stale nonce {nonce} for {} from {node}, ignored", short(type_url))
            }
            Self::Registered { node, group, address } => {
                write!(f, "machine {address} of {node} registered in {group}")
            }
            Self::Health { node, healthy } => {
                let state = if *healthy { "healthy" } else { "unhealthy" };
                write!(f, "workload of {node} is {state}")
            }
            Self::Loaded { resources } => write!(f, "resources loaded: {resources}"),
            Self::LoadFailed { folder, reason } => write!(
                f,
                "resources of {} not loaded, the last good ones stay: {reason}",
                folder.display()
            ),
            Self::ConnectionFailed { peer, reason } => {
                write!(f, "connection of {peer} failed: {reason}")
            }
        }
    }
}

/// Returns the message name without its package, which is the common name of the type.
fn short(type_url: &str) -> &str {
    type_url.rsplit(['.', '/']).next().unwrap_or(type_url)
}

/// Joins the lines of a text, because Envoy's errors contain entire messages as text.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_is_one_line() {
        let event = Event::Nacked {
            node: "cart.shop".to_owned(),
            type_url: "a.Listener".to_owned(),
            version: "7".to_owned(),
            error: "bad:\n  rds {\n}\n".to_owned(),
        };
        assert_eq!(event.to_string(), "NACK Listener 7 from cart.shop: bad: rds { }");
    }

    #[test]
    fn lines_name_types_by_their_last_part() {
        let event = Event::Acked {
            node: "cart.shop".to_owned(),
            type_url: "type.googleapis.com/envoy.config.cluster.v3.Cluster".to_owned(),
            version: "7".to_owned(),
        };
        assert_eq!(event.to_string(), "ACK Cluster 7 from cart.shop");
    }
}
