//! Runs the interceptors of a stream: one response of a type at a time, in the order of arrival, unless a
//! newer response replaces the one that is being handled.

use futures_util::future::select_all;

use super::Protocol;
use super::interceptor::{Intercepting, Outcome, SecondOutcome};
use super::response::Captured;
use super::stream::StreamState;

/// The responses that interceptors are handling, one of a type at most, with their outcomes.
#[derive(Default)]
pub(super) struct RunningInterceptors(Vec<(Captured, Intercepting)>);

impl RunningInterceptors {
    /// Starts the interceptors for which a response waits, if they are idle or replace the one they handle. Other
    /// responses stay in `captured`.
    pub(super) fn start(&mut self, state: &mut StreamState, protocol: Protocol) {
        for mut response in std::mem::take(&mut state.captured) {
            let index = response.interceptor;
            let interceptor = state.interceptors.get(index);
            if let Some(older) = self.0.iter().position(|(it, _)| it.interceptor == index) {
                let message = &self.0[older].0.message;
                let merged = interceptor.merge(protocol, message, &response.message);
                let Some(merged) = merged else {
                    state.captured.push_back(response);
                    continue;
                };
                response.message = merged;
                drop(self.0.swap_remove(older));
            }
            let outcome = interceptor.intercept(protocol, response.message.clone());
            self.0.push((response, outcome));
        }
    }

    /// Waits for the next outcome. Returns None if no interceptor runs. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<(Captured, Outcome)> {
        if self.0.is_empty() {
            return None;
        }
        let (outcome, index, _) = select_all(self.0.iter_mut().map(|(_, outcome)| outcome)).await;
        let (response, _) = self.0.swap_remove(index);
        Some((response, outcome))
    }

    /// Runs the second outcome of a response.
    pub(super) fn follow_with(&mut self, mut response: Captured, second: SecondOutcome) {
        response.message = second.rest;
        self.0.push((response, second.outcome));
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use bytes::Bytes;

    use super::*;
    use crate::metrics::Registry;
    use crate::xds::interceptor::{Interceptor, Interceptors};
    use crate::xds::observe::Observer;
    use crate::xds::response::{Consumer, Received};

    /// An interceptor that forwards messages at once; messages that begin with `slow` never get an outcome. If it
    /// merges messages, it joins them with `+`.
    struct Scripted {
        merges: bool,
    }

    impl Interceptor for Scripted {
        fn type_url(&self) -> &str {
            "type"
        }
        fn subscribes(&self) -> bool {
            false
        }
        fn intercept(&self, _: Protocol, message: Bytes) -> Intercepting {
            if message.starts_with(b"slow") {
                Box::pin(pending())
            } else {
                Box::pin(ready(Outcome::Forward(message, None)))
            }
        }
        fn merge(&self, _: Protocol, older: &Bytes, newer: &Bytes) -> Option<Bytes> {
            let joined = [newer.clone(), Bytes::from_static(b"+"), older.clone()];
            self.merges.then(|| joined.concat().into())
        }
    }

    fn state(merges: bool) -> StreamState {
        let interceptors = Interceptors::new(vec![Box::new(Scripted { merges })]);
        let observer = Observer::new(&Registry::default(), None);
        StreamState::new(1, Protocol::Delta, interceptors, observer, 1000, None)
    }

    fn captured(message: &'static str) -> Captured {
        Captured {
            interceptor: 0,
            received: Received {
                type_url: "type".to_owned(),
                version: String::new(),
                nonce: message.to_owned(),
                resources: 1,
                removed: 0,
                bytes: 1,
                consumer: Consumer::Agent,
                names: Default::default(),
            },
            message: Bytes::from_static(message.as_bytes()),
        }
    }

    /// Returns the nonce and the message of the next outcome.
    async fn next(interceptions: &mut RunningInterceptors) -> (String, Bytes) {
        let (response, outcome) = interceptions.next().await.expect("an outcome");
        match outcome {
            Outcome::Forward(message, _) => (response.received.nonce, message),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_newer_response_replaces_one_that_is_being_handled() {
        let (mut state, mut interceptions) = (state(true), RunningInterceptors::default());
        for message in ["slow", "slower", "newest"] {
            state.captured.push_back(captured(message));
            interceptions.start(&mut state, Protocol::Delta);
        }
        let (nonce, message) = next(&mut interceptions).await;
        assert_eq!((nonce.as_str(), &message[..]), ("newest", &b"newest+slower+slow"[..]));
        assert!(interceptions.next().await.is_none());
    }

    #[tokio::test]
    async fn a_newer_response_also_replaces_one_just_handled() {
        let (mut state, mut interceptions) = (state(true), RunningInterceptors::default());
        state.captured.push_back(captured("first"));
        interceptions.start(&mut state, Protocol::Delta);
        tokio::task::yield_now().await;
        state.captured.push_back(captured("second"));
        interceptions.start(&mut state, Protocol::Delta);
        let (nonce, message) = next(&mut interceptions).await;
        assert_eq!((nonce.as_str(), &message[..]), ("second", &b"second+first"[..]));
        assert!(interceptions.next().await.is_none());
    }

    #[tokio::test]
    async fn a_late_outcome_is_forwarded_unless_a_newer_response_comes() {
        let (mut state, mut interceptions) = (state(true), RunningInterceptors::default());
        let later = |outcome| SecondOutcome { outcome, rest: Bytes::from_static(b"rest") };
        let forwarded = Outcome::Forward(Bytes::from_static(b"later"), None);
        interceptions.follow_with(captured("first"), later(Box::pin(ready(forwarded))));
        assert_eq!(next(&mut interceptions).await.1, "later");
        interceptions.follow_with(captured("first"), later(Box::pin(pending())));
        state.captured.push_back(captured("second"));
        interceptions.start(&mut state, Protocol::Delta);
        assert_eq!(next(&mut interceptions).await.1, "second+rest");
        assert!(interceptions.next().await.is_none());
    }

    #[tokio::test]
    async fn responses_that_are_not_merged_are_handled_one_after_the_other() {
        let (mut state, mut interceptions) = (state(false), RunningInterceptors::default());
        for message in ["first", "second"] {
            state.captured.push_back(captured(message));
        }
        for message in ["first", "second"] {
            interceptions.start(&mut state, Protocol::Delta);
            assert_eq!(next(&mut interceptions).await.1, message);
        }
    }
}
