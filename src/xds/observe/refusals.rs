//! The problems of responses that Envoy has refused.

use super::Snapshot;
use crate::port;
use crate::problem::{Problem, codes};

impl Snapshot {
    /// The types whose last response was refused, with Envoy's reason, which names the resources.
    pub fn refusals(&self) -> Vec<Problem> {
        let refused = self.types.iter().filter(|(_, it)| it.is_refused());
        let problems = refused.filter_map(|(url, of_type)| {
            let name = url.rsplit(['.', '/']).next()?;
            let nack = of_type.last_nack.as_ref()?;
            let last = of_type.last_response.as_ref();
            let version = last.map_or("", |last| &last.version);
            let found = format!("version {version} at {}: {}", nack.at, nack.reason);
            let (code, subject) = match port::taken(&nack.reason) {
                Some(port) => (codes::PORT_TAKEN, format!("port {port}")),
                None => (codes::RESOURCE_REFUSED, format!("NACK of {name}")),
            };
            Some(Problem::new(code, subject, port::explained(found)))
        });
        problems.collect()
    }
}
