//! Queries under way: the same question is asked once, whoever waits for it.
//!
//! The first to come asks; if it goes away before there is an answer, the next one asks in its
//! place. So a query that comes back to us waits for itself, and does not multiply; one that comes
//! twice under ids of ours has gone in a circle, and is told. The number of those who wait is
//! bounded.
//!
//! Does not ask anybody itself.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::OnceCell;

use super::reply::Reply;

#[derive(Debug)]
pub(super) struct InFlight {
    limit: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    waiting: usize,
    flights: HashMap<Vec<u8>, Arc<Flight>>,
}

/// One question and its answer to be.
#[derive(Debug, Default)]
pub(super) struct Flight {
    sent: Mutex<Sent>,
    pub(super) outcome: OnceCell<Option<Reply>>,
}

/// How a question left us, to know it when it comes back.
#[derive(Debug, Default)]
struct Sent {
    /// Ids and lengths.
    messages: Vec<(u16, usize)>,
    /// How many came in that look like ours.
    returned: u32,
}

/// The place of one who waits.
#[derive(Debug)]
pub(super) struct Seat<'a> {
    in_flight: &'a InFlight,
    key: Vec<u8>,
    flight: Arc<Flight>,
    pub(super) is_first: bool,
}

/// Why there is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    #[error("too many queries wait for an answer")]
    Full,
    #[error("a query of our own came back to us")]
    Circle,
}

impl Refused {
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Circle => "circle",
        }
    }
}

impl InFlight {
    pub(super) fn new(limit: usize) -> Self {
        let state = Mutex::default();
        Self { limit, state }
    }

    /// The query came with this id and length.
    pub(super) fn join(&self, key: Vec<u8>, id: u16, length: usize) -> Result<Seat<'_>, Refused> {
        let mut state = self.lock();
        if let Some(flight) = state.flights.get(&key)
            && flight.is_circling(id, length)
        {
            return Err(Refused::Circle);
        }
        if state.waiting >= self.limit {
            return Err(Refused::Full);
        }
        state.waiting += 1;
        let is_first = !state.flights.contains_key(&key);
        let flight = state.flights.entry(key.clone()).or_default().clone();
        Ok(Seat {
            in_flight: self,
            key,
            flight,
            is_first,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Flight {
    /// Remembers how the question was sent.
    pub(super) fn sent_as(&self, id: u16, length: usize) {
        self.sent().messages.push((id, length));
    }

    /// One match may be chance: many clients ask for one name, each with an id of its choice.
    fn is_circling(&self, id: u16, length: usize) -> bool {
        let mut sent = self.sent();
        let is_ours = sent.messages.contains(&(id, length));
        sent.returned += u32::from(is_ours);
        is_ours && sent.returned > 1
    }

    fn sent(&self) -> MutexGuard<'_, Sent> {
        self.sent.lock()
    }
}

impl Seat<'_> {
    pub(super) fn flight(&self) -> &Flight {
        &self.flight
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let mut state = self.in_flight.lock();
        state.waiting -= 1;
        let is_ours = |found: &Arc<Flight>| Arc::ptr_eq(found, &self.flight);
        // Two: the one in the map and ours.
        let is_over = self.flight.outcome.initialized() || Arc::strong_count(&self.flight) == 2;
        if is_over && state.flights.get(&self.key).is_some_and(is_ours) {
            state.flights.remove(&self.key);
        }
    }
}
