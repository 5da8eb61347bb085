//! Runs the DNS server.

use std::io;

use tokio::sync::oneshot;

use super::Agent;
use crate::dns::forward::Forwarder;
use crate::dns::{self, Dns};
use crate::runtime::lifecycle::BoxError;

impl Agent {
    /// Answers DNS on its own thread, so that no other work delays an answer.
    pub(super) fn dns(&mut self) -> Result<Option<(Dns, Forwarder)>, BoxError> {
        let Some(config) = self.config.dns.clone() else { return Ok(None) };
        let forwarder = Forwarder::new(config.forwarder, &self.metrics);
        let (dns, serving) = dns::new(
            config.server,
            self.ports.clone().dns(),
            forwarder.clone(),
            &self.metrics,
            self.stop_accepting.clone(),
            self.shutdown.clone(),
        );
        let (done, ended) = oneshot::channel();
        let failed =
            |error: io::Error| format!("cannot start the thread of the DNS server: {error}");
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let thread = std::thread::Builder::new().name("dns".to_owned());
        // The channel reports the end of the thread; a panic closes the channel.
        thread
            .spawn(move || {
                // The receiver is dropped if the shutdown took too long.
                let _ = done.send(runtime.block_on(serving));
                runtime.shutdown_background();
            })
            .map_err(failed)?;
        self.tasks.spawn("DNS server", async move { ended.await? });
        Ok(Some((dns, forwarder)))
    }
}
