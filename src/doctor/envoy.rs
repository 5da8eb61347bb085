//! Envoy: process, admin port, listeners, NACKs.

use super::Subject;
use super::report::Check;

pub(super) async fn checks(_: Subject<'_>) -> Vec<Check> {
    Vec::new()
}
