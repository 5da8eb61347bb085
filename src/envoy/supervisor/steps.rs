//! The steps of the way down that talk to Envoy, each a call that runs beside the waiting.
//!
//! A step drops the call of the step before, but for an order, whose giver waits.
//!
//! Does not signal Envoy.

use std::time::Duration;

use tokio::task::JoinSet;

use super::super::connections::Look;
use super::super::machine::{Drain, Event};
use super::super::{calls, connections, requests};
use super::Supervisor;

/// Half the time for quitting is for the answer, the rest for the end that follows it.
const QUIT_CALL: u32 = 2;

impl Supervisor {
    /// Has Envoy drain and stay; answers the order when Envoy has been told.
    pub(super) fn tell(&mut self) {
        self.counters.drains.inc();
        let (admin, inbound_only) = (self.admin, self.config.drain_inbound_only);
        let order = self.order.take();
        self.calls.spawn(async move {
            calls::drain(admin, inbound_only, true).await;
            if let Some(order) = order {
                let _ = order.send(()); // Who gave the order may have left.
            }
            Event::Answered
        });
    }

    pub(super) fn announce(&mut self) {
        tracing::info!("Agent draining Proxy for termination");
        self.counters.drains.inc();
        let (admin, inbound_only) = (self.admin, self.config.drain_inbound_only);
        self.calls = JoinSet::new();
        self.calls.spawn(async move {
            calls::drain(admin, inbound_only, false).await;
            Event::Answered
        });
    }

    pub(super) fn count(&mut self, at_most: Duration) {
        tracing::info!("waiting for the end of Envoy's active connections, {at_most:?} at most");
        let until_idle = self.until_idle(connections::PERIOD);
        self.calls = JoinSet::new();
        self.calls.spawn(until_idle);
    }

    /// Waits for the end of the last connection.
    fn until_idle(&self, period: Duration) -> impl Future<Output = Event> + Send + use<> {
        let internal_ports = self.config.internal_ports.clone();
        let look = Look {
            path: connections::PATH,
            what: "active connections",
            period,
        };
        let gone = self.gone(look, move |text| connections::sum(text, &internal_ports));
        async move {
            tokio::time::sleep(period).await;
            gone.await
        }
    }

    /// Waits until none is left of what is counted, and tells everybody how many there are.
    fn gone<C>(&self, look: Look, count: C) -> impl Future<Output = Event> + Send + use<C>
    where
        C: Fn(&str) -> Option<u64> + Send,
    {
        let (admin, publish) = (self.admin, self.publish.clone());
        async move {
            let counted = |active| {
                publish.send_modify(|report| {
                    if let Some(ending) = &mut report.ending {
                        ending.connections = Some(active);
                    }
                });
            };
            connections::gone(admin, look, count, counted).await;
            Event::Idle
        }
    }

    pub(super) fn close(&mut self, at_most: Duration) {
        tracing::info!("closing Envoy's listeners; requests under way have {at_most:?} to end");
        let (admin, inbound_only) = (self.admin, self.config.drain_inbound_only);
        // Who drains for a time may call out until that is over.
        let ends_early = matches!(self.config.limits.drain, Drain::UntilIdle { .. });
        let until_idle = self.until_idle(connections::LAST_PERIOD);
        self.calls = JoinSet::new();
        self.calls.spawn(async move {
            calls::close(admin, inbound_only).await;
            match ends_early {
                true => until_idle.await,
                false => Event::Answered,
            }
        });
    }

    pub(super) fn outlast(&mut self, at_most: Duration) {
        tracing::info!("the drain is over; requests still under way have {at_most:?} more");
        let inbound_only = self.config.drain_inbound_only;
        let internal_ports = self.config.internal_ports.clone();
        let look = Look {
            path: requests::PATH,
            what: "requests under way",
            period: connections::PERIOD,
        };
        let gone = self.gone(look, move |text| {
            Some(requests::under_way(text, inbound_only, &internal_ports))
        });
        // The call that closes the listeners may still be on its way.
        self.calls.spawn(gone);
    }

    pub(super) fn quit(&mut self, wait: Duration) {
        tracing::info!("Asking Envoy to quit");
        let admin = self.admin.within(wait / QUIT_CALL);
        self.calls = JoinSet::new();
        self.calls.spawn(calls::quit(admin));
    }
}
