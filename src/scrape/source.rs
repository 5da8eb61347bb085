//! One page to merge, from the question to the end of its body.
//!
//! A source is asked when it is made and heard when somebody polls it. Its body is read against a
//! deadline, each piece as it comes, even where pieces never stop coming.
//!
//! Does not decide what a failure leads to.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use tokio::time::{Instant, timeout_at};

use super::counts::Origin;
use super::fetch::{Answer, Error, Pool};
use super::merge::LineTooLong;
use super::negotiate::ContentType;
use crate::lifecycle::with_causes;

/// Why a source is not on the page, or not all of it.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Fetch(#[from] Error),
    #[error("the page was not there in time")]
    Late,
    #[error("the page was cut off")]
    Line(#[from] LineTooLong),
    #[error("the page was cut off after {0} bytes, the most that is read")]
    TooLarge(u64),
    #[error("the page has no # EOF at its end")]
    NoEnd,
}

pub(super) type Asking = Pin<Box<dyn Future<Output = Result<Answer, Error>> + Send>>;

pub(super) struct Source {
    pub origin: Origin,
    /// Where the page is, for people.
    address: String,
    state: State,
}

enum State {
    Asking(Asking),
    Answered(Box<Answer>),
    Failed(Failure),
    /// Its failure has been told.
    Over,
}

impl Source {
    /// The query of the path is not told, as it may hold what is for the target alone.
    pub(super) fn new(origin: Origin, port: u16, path: &str, asking: Asking) -> Self {
        let path = path.split_once('?').map_or(path, |(path, _)| path);
        Self {
            origin,
            address: format!("localhost:{port}{path}"),
            state: State::Asking(asking),
        }
    }

    /// What a failure means, with all that has led to it.
    pub(super) fn explain(&self, failure: &Failure) -> String {
        let (origin, address) = (self.origin.name(), &self.address);
        let why = with_causes(failure);
        format!("failed scraping {origin} metrics from {address}: {why}")
    }

    /// The type of the page, once its head is there.
    pub(super) fn content_type(&self) -> Option<ContentType> {
        match &self.state {
            State::Answered(answer) => Some(ContentType::of(answer.header(CONTENT_TYPE))),
            _ => None,
        }
    }

    /// Whether the head is still to come.
    pub(super) fn is_late(&self) -> bool {
        matches!(self.state, State::Asking(_))
    }

    /// What went wrong, told once.
    pub(super) fn failure(&mut self) -> Option<Failure> {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Failed(failure) => Some(failure),
            other => {
                self.state = other;
                None
            }
        }
    }

    pub(super) fn poll_head(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let State::Asking(asking) = &mut self.state else {
            return Poll::Ready(());
        };
        match asking.as_mut().poll(context) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Ok(answer)) => self.state = State::Answered(Box::new(answer)),
            Poll::Ready(Err(error)) => self.state = State::Failed(error.into()),
        }
        Poll::Ready(())
    }

    /// Waits for the head.
    pub(super) async fn head(&mut self, until: Instant) {
        let head = poll_fn(|context| self.poll_head(context));
        if timeout_at(until, head).await.is_err() {
            self.state = State::Failed(Failure::Late);
        }
    }

    /// The next piece of the body. None is its end.
    pub(super) async fn piece(&mut self, until: Instant) -> Result<Option<Bytes>, Failure> {
        let State::Answered(answer) = &mut self.state else {
            return Ok(None);
        };
        // A body that is always there would never be late by the timer alone.
        if Instant::now() >= until {
            return Err(Failure::Late);
        }
        match timeout_at(until, answer.piece()).await {
            Err(_) => Err(Failure::Late),
            Ok(piece) => {
                // A page that is all there must not hold up everybody else.
                tokio::task::yield_now().await;
                Ok(piece.transpose()?)
            }
        }
    }

    /// Leaves the connection to the next scrape.
    pub(super) fn leave(self, pool: &Pool) {
        if let State::Answered(answer) = self.state {
            pool.keep(*answer);
        }
    }
}

/// Polls all for their heads; ready when all are there.
pub(super) fn poll_heads(sources: &mut [Source], context: &mut Context<'_>) -> Poll<()> {
    let waiting = sources
        .iter_mut()
        .filter_map(|source| source.poll_head(context).is_pending().then_some(()));
    match waiting.count() {
        0 => Poll::Ready(()),
        _ => Poll::Pending,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_failure_is_told_with_its_target_and_all_of_its_causes() {
        let connect = Error::Connect {
            authority: "localhost:8080".to_owned(),
            source: io::Error::other("refused"),
        };
        for (origin, path, failure, expected) in [
            (
                Origin::Application,
                "/m?token=x",
                Failure::Late,
                "failed scraping application metrics from localhost:8080/m: \
                 the page was not there in time",
            ),
            (
                Origin::Envoy,
                "/stats/prometheus",
                connect.into(),
                "failed scraping envoy metrics from localhost:8080/stats/prometheus: \
                 cannot connect to localhost:8080: refused",
            ),
        ] {
            let source = Source::new(origin, 8080, path, Box::pin(std::future::pending()));
            assert_eq!(source.explain(&failure), expected);
        }
    }
}
