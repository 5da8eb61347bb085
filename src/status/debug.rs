//! A look inside: JSON pages, each made when somebody asks.
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

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.path)
    }
}
