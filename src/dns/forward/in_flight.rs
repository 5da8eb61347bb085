//! Shares queries in flight: equal questions are forwarded once, and all their clients wait for the
//! reply.
//!
//! The first client's task forwards; if it is dropped before there is a reply, the next one takes over.
//! So a query that comes back to this agent waits for itself and does not multiply. One that comes back
//! twice under an id that this agent sent is in a forwarding loop and is refused. The number of waiting
//! clients is bounded.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::OnceCell;

use super::message::{Query, Reply};
use crate::dns::Transport;

/// Clients that may wait at the same time.
const MAX_WAITING: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct InFlight(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    waiting: usize,
    queries: HashMap<Vec<u8>, Arc<InFlightQuery>>,
}

/// A question, and its reply once that has arrived.
#[derive(Debug, Default)]
pub(super) struct InFlightQuery {
    sent: Mutex<SentMessages>,
    pub(super) answer: OnceCell<Option<Reply>>,
}

/// The messages of a question that were sent, to recognise them when they come back.
#[derive(Debug, Default)]
struct SentMessages {
    ids_and_lengths: Vec<(u16, usize)>,
    /// Number of received queries that look like one of them.
    returned: u32,
}

/// The place of one waiting client. Dropping it frees the place.
#[derive(Debug)]
pub(super) struct QuerySlot<'a> {
    in_flight: &'a InFlight,
    key: Vec<u8>,
    pub(super) query: Arc<InFlightQuery>,
}

/// The reason why a query is not forwarded.
#[derive(Clone, Copy, Debug)]
pub(super) struct NotForwarded {
    /// The label of the metric.
    pub(super) label: &'static str,
    pub(super) reason: &'static str,
}

const FULL: NotForwarded =
    NotForwarded { label: "full", reason: "too many queries are waiting for an answer" };
const FORWARDING_LOOP: NotForwarded = NotForwarded {
    // This label of the metric means a loop.
    label: "circle",
    reason: "DNS forwarding loop",
};

impl InFlight {
    /// Takes a slot for a query that shall be forwarded over `transport`. Fails if the query is in a forwarding
    /// loop, or if too many clients are waiting.
    pub(super) fn join(
        &self,
        query: &Query,
        transport: Transport,
    ) -> Result<QuerySlot<'_>, NotForwarded> {
        let key = query.key(transport);
        let mut state = self.0.lock();
        let same = state.queries.get(&key);
        if same.is_some_and(|same| same.detect_loop(query.id(), query.len())) {
            return Err(FORWARDING_LOOP);
        }
        if state.waiting >= MAX_WAITING {
            return Err(FULL);
        }
        state.waiting += 1;
        let query = state.queries.entry(key.clone()).or_default().clone();
        Ok(QuerySlot { in_flight: self, key, query })
    }
}

impl InFlightQuery {
    /// Remembers a message that is sent with this question, to recognise it if it comes back.
    pub(super) fn remember_for_loop_detection(&self, id: u16, length: usize) {
        self.sent.lock().ids_and_lengths.push((id, length));
    }

    /// Returns true if a query was received that looks like a sent one. Rarely it is a client's, by chance.
    pub(super) fn has_returned(&self) -> bool {
        self.sent.lock().returned > 0
    }

    /// Counts a received query that looks like a sent one. Returns true for the second: one match may be
    /// chance, because many clients ask for the same name, each with an id of its choice.
    fn detect_loop(&self, id: u16, length: usize) -> bool {
        let mut sent = self.sent.lock();
        let is_ours = sent.ids_and_lengths.contains(&(id, length));
        sent.returned += u32::from(is_ours);
        is_ours && sent.returned > 1
    }
}

impl Drop for QuerySlot<'_> {
    fn drop(&mut self) {
        let mut state = self.in_flight.0.lock();
        state.waiting -= 1;
        // Without other clients there are two references: the map's and this one.
        let is_over = self.query.answer.initialized() || Arc::strong_count(&self.query) == 2;
        let entered = state.queries.get(&self.key);
        if is_over && entered.is_some_and(|entered| Arc::ptr_eq(entered, &self.query)) {
            state.queries.remove(&self.key);
        }
    }
}
