//! What the supervisor does in each step of the shutdown.

use std::time::Duration;

use tokio::task::JoinSet;

use super::super::active::{Active, Counting};
use super::super::admin::DrainCall;
use super::super::machine::Event;
use super::super::shutdown::{Drain, PlannedStep, Step};
use super::Supervisor;

/// How often connections and requests are counted.
const PERIOD: Duration = Duration::from_secs(1);
/// The same when the listeners are closed.
const LAST_PERIOD: Duration = Duration::from_millis(100);
/// Half the time for quitting is for the answer, the rest for the end that follows it.
const QUIT_CALL: f64 = 0.5;

impl Supervisor {
    /// Begins a step. Its calls end with [`Event::Done`] when the next one can begin early.
    pub(super) fn begin(&mut self, PlannedStep { waits_for, at_most }: PlannedStep) {
        // The call that drains Envoy, or closes its listeners, may still be on its way.
        if ![Step::DrainTime, Step::LongRequests].contains(&waits_for) {
            self.current.calls = JoinSet::new();
        }
        match waits_for {
            Step::DrainCall => {
                tracing::info!("Agent draining Proxy for termination");
                self.call_drain(DrainCall::Graceful);
            }
            Step::DrainTime => {
                let whole = self.config.limits.drain.at_most();
                tracing::info!("Graceful termination period is {whole:?}, starting...");
            }
            Step::Connections => {
                tracing::info!(
                    "waiting for the end of Envoy's active connections, {at_most:?} at most"
                );
                let until_none = self.until_none(Active::Connections, PERIOD);
                self.call(waits_for, async move {
                    tokio::time::sleep(PERIOD).await;
                    until_none.await;
                });
            }
            Step::LastRequests => {
                tracing::info!(
                    "closing Envoy's listeners; requests under way have {at_most:?} to end"
                );
                let last_requests = self.last_requests();
                self.call(waits_for, last_requests);
            }
            Step::LongRequests => {
                tracing::info!("the drain is over; requests still under way have {at_most:?} more");
                let until_none = self.until_none(Active::Requests, PERIOD);
                self.call(waits_for, until_none);
            }
            Step::Quit => {
                tracing::info!("Asking Envoy to quit");
                let limit = crate::duration::scaled(at_most, QUIT_CALL);
                let admin = self.admin.within(limit);
                self.call(waits_for, async move { admin.quit().await });
            }
            Step::Termination => {
                tracing::info!("Terminating Envoy");
                if let Some(envoy) = &self.current.instance {
                    envoy.process.terminate();
                }
            }
            Step::Kill => {
                tracing::warn!("Killing Envoy, which did not end in time or is to end at once");
                if let Some(envoy) = &self.current.instance {
                    envoy.process.kill();
                }
            }
        }
    }

    /// Has Envoy drain, and answers the order for that, if there is one.
    pub(in crate::envoy) fn call_drain(&mut self, how: DrainCall) {
        self.counters.drains.inc();
        let (admin, inbound_only) = (self.admin, self.config.drain_inbound_only);
        let order = self.drain_order.take();
        self.call(Step::DrainCall, async move {
            admin.drain(how, inbound_only).await;
            if let Some(order) = order {
                let _ = order.send(()); // Its sender may have left.
            }
        });
    }

    /// Closes Envoy's listeners and waits for the requests under way.
    fn last_requests(&self) -> impl Future<Output = ()> + Send + use<> {
        let (admin, inbound_only) = (self.admin, self.config.drain_inbound_only);
        let is_timed = matches!(self.config.limits.drain, Drain::For(_));
        let until_none = self.until_none(Active::Connections, LAST_PERIOD);
        async move {
            admin.drain(DrainCall::Close, inbound_only).await;
            if is_timed {
                // The workload may call out until a timed drain is over.
                return std::future::pending().await;
            }
            tokio::time::sleep(LAST_PERIOD).await;
            until_none.await;
        }
    }

    fn call(&mut self, step: Step, call: impl Future<Output = ()> + Send + 'static) {
        self.current.calls.spawn(async move {
            call.await;
            Event::Done(step)
        });
    }

    /// Counts until none is left, and publishes the counts.
    fn until_none(
        &self,
        active: Active,
        period: Duration,
    ) -> impl Future<Output = ()> + Send + use<> {
        let (admin, publish) = (self.admin, self.publish.clone());
        let counting = Counting {
            active,
            period,
            inbound_only: self.config.drain_inbound_only,
            internal_ports: self.config.internal_ports.clone(),
        };
        let report = move |count| {
            publish.send_modify(|report| {
                if let Some(ending) = &mut report.ending {
                    ending.connections = Some(count);
                }
            });
        };
        counting.until_none(admin, report)
    }
}
