//! Queries in flight: the same question is asked once for all clients that wait for it.
//!
//! The first client's task asks; if it goes away before there is an answer, the next one asks in its
//! place. So a query that comes back to us waits for itself, and does not multiply; one that comes
//! twice under ids of ours is in a forwarding loop, and is refused. The number of waiting clients is
//! bounded.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::OnceCell;

use super::message::{Query, Reply};
use crate::dns::Transport;

/// Clients that may wait for an answer at one time.
const MAX_WAITING: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct InFlight(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    waiting: usize,
    queries: HashMap<Vec<u8>, Arc<SharedQuery>>,
}

/// One question and its answer to be.
#[derive(Debug, Default)]
pub(super) struct SharedQuery {
    sent: Mutex<Sent>,
    pub(super) answer: OnceCell<Option<Reply>>,
}

/// How a question was sent, to know it when it comes back.
#[derive(Debug, Default)]
struct Sent {
    /// Ids and lengths.
    messages: Vec<(u16, usize)>,
    /// How many came in that look like ours.
    returned: u32,
}

/// The place of one client that waits.
#[derive(Debug)]
pub(super) struct QuerySlot<'a> {
    in_flight: &'a InFlight,
    key: Vec<u8>,
    pub(super) query: Arc<SharedQuery>,
}

/// Why a query is not forwarded: the label that is counted, and a text.
pub(super) type Refused = (&'static str, &'static str);

const FULL: Refused = ("full", "too many queries are waiting for an answer");
const FORWARDING_LOOP: Refused = ("circle", "DNS forwarding loop");

impl InFlight {
    /// Takes a slot for a query that is to be forwarded over `transport`.
    pub(super) fn join(
        &self,
        query: &Query,
        transport: Transport,
    ) -> Result<QuerySlot<'_>, Refused> {
        let key = query.key(transport);
        let mut state = self.0.lock();
        let found = state.queries.get(&key);
        if found.is_some_and(|found| found.is_looping(query.id(), query.len())) {
            return Err(FORWARDING_LOOP);
        }
        if state.waiting >= MAX_WAITING {
            return Err(FULL);
        }
        state.waiting += 1;
        let query = state.queries.entry(key.clone()).or_default().clone();
        Ok(QuerySlot {
            in_flight: self,
            key,
            query,
        })
    }
}

impl SharedQuery {
    /// Remembers how the question was sent.
    pub(super) fn sent_as(&self, id: u16, length: usize) {
        self.sent.lock().messages.push((id, length));
    }

    /// Whether a query came in as it was sent. By chance, it is a client's.
    pub(super) fn has_returned(&self) -> bool {
        self.sent.lock().returned > 0
    }

    /// One match may be chance: many clients ask for one name, each with an id of its choice.
    fn is_looping(&self, id: u16, length: usize) -> bool {
        let mut sent = self.sent.lock();
        let is_ours = sent.messages.contains(&(id, length));
        sent.returned += u32::from(is_ours);
        is_ours && sent.returned > 1
    }
}

impl Drop for QuerySlot<'_> {
    fn drop(&mut self) {
        let mut state = self.in_flight.0.lock();
        state.waiting -= 1;
        let is_ours = |found: &Arc<SharedQuery>| Arc::ptr_eq(found, &self.query);
        // Two: the one in the map and ours.
        let is_over = self.query.answer.initialized() || Arc::strong_count(&self.query) == 2;
        if is_over && state.queries.get(&self.key).is_some_and(is_ours) {
            state.queries.remove(&self.key);
        }
    }
}
