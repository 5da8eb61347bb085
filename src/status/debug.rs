//! A look inside: JSON pages, and one of everything for people, each made when somebody asks.
//!
//! What takes part in readiness is known here, and given to the page of everything.
//!
//! Does not know what is on them.

use std::fmt;
use std::sync::Arc;

use serde_json::Value;

/// A page under `/debug/`, for callers on this machine.
pub struct Page {
    pub path: &'static str,
    /// None while there is nothing to show.
    pub content: Arc<dyn Fn() -> Option<Value> + Send + Sync>,
}

/// Everything at one glance.
pub trait Glance: Send + Sync {
    fn json(&self, ready: Ready) -> Value;

    /// The same as a page of HTML.
    fn html(&self, ready: Ready) -> String;
}

/// Whether the pod can take traffic, or what is missing.
pub type Ready = Result<(), String>;

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.path)
    }
}
