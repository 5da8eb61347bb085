//! Finds out whether istiod's stream still works while its connection lives: responses or requests may be lost on it.
//!
//! A subscription without an answer, or a stream without bytes, is a suspicion: istiod is asked for a debug page on the
//! stream. Without the id of a proxy, the page is one sentence. It is not acknowledged, because istiod ends the stream
//! then. istiod handles the requests of a stream in order, so its answer also shows which of them it does not answer.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use tonic::Code;

use super::request::{Request, encode_subscription};
use super::response::Received;
use super::stream::short_type;
use super::wire::NameDigest;
use super::{CLUSTER, ENDPOINTS, EXTENSION, LISTENER, Protocol, ROUTES, SECRET};
use crate::problem::{self, Problem};
use crate::runtime::clock::later;
use crate::runtime::duration::scaled;

/// The type of istiod's debug pages, and a page that workloads may ask for.
pub(super) const DEBUG: &str = "istio.io/debug";
const PAGE: &str = "ndsz";

/// The types whose subscriptions istiod answers. It may ignore others, such as trust bundles.
const TYPES: [&str; 6] = [CLUSTER, ENDPOINTS, EXTENSION, LISTENER, ROUTES, SECRET];

/// The mean time without bytes after which istiod is asked; a quarter of it until it has answered.
const QUIET: Duration = Duration::from_secs(300);
const UNANSWERED: Duration = Duration::from_secs(30);
/// The time without bytes after which an answer is missing, and the limit if bytes of other responses come.
const MAX_SILENCE: Duration = Duration::from_secs(10);
const MAX_WAIT: Duration = Duration::from_secs(60);
/// A later check does not count: the agent did not run.
const MAX_LATENESS: Duration = Duration::from_millis(500);
pub(super) const NEW_STREAM_INTERVAL: Duration = Duration::from_secs(3600);

/// The most requests that are followed, names that are remembered as late, and names in a problem.
const MAX_REQUESTS: usize = 1024;
const MAX_LATE: usize = 16 << 10;
const MAX_SHOWN: usize = 10;

/// What the streams of an agent share.
#[derive(Debug, Default)]
pub(super) struct History {
    /// Addresses of control planes that have ended a stream on which they were asked.
    pub(super) refusing: HashSet<String>,
    /// The time at which a stream was last ended because of a problem.
    pub(super) replaced: Option<Instant>,
    /// How often a name was late. The first time its subscription is renewed, the second time there is a new problem.
    late: HashMap<(&'static str, NameDigest), u32>,
}

/// The names in a request that istiod has not answered.
#[derive(Debug)]
struct Awaited {
    type_url: &'static str,
    /// None once it has been renewed in vain.
    since: Option<Instant>,
    /// True if any response of the type is an answer: Envoy asks for all resources, or has a version of each.
    is_whole: bool,
    names: HashMap<NameDigest, String>,
}

/// The state of a stream that istiod may be asked on.
#[derive(Debug)]
pub(super) struct Liveness {
    /// The time of the last bytes, or at which an answer was missing.
    heard: Instant,
    quiet: Duration,
    question: Question,
    /// The time of the last question, or of the beginning.
    asked: Instant,
    has_answered: bool,
    /// The oldest first.
    awaited: Vec<Awaited>,
    /// Requests for this stream only.
    pub(super) requests: Vec<Bytes>,
    /// How [`Liveness::problem`] has changed since this was taken.
    pub(super) news: Option<News>,
}

#[derive(Debug, PartialEq, Eq)]
enum Question {
    /// None was asked, or the last one was answered.
    None,
    Pending,
    /// The last one had no answer in time.
    Unanswered,
}

/// A change of [`Liveness::problem`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum News {
    /// It may have ended, or have other names.
    Change,
    /// There is one, and there was none.
    Problem,
}

impl Liveness {
    pub(super) fn new() -> Self {
        Self {
            heard: Instant::now(),
            quiet: scaled(QUIET, 0.8 + 0.4 * fastrand::f64()),
            question: Question::None,
            asked: Instant::now(),
            has_answered: false,
            awaited: Vec::new(),
            requests: Vec::new(),
            news: None,
        }
    }

    /// Notes that istiod has sent bytes. Returns true if the names in responses matter.
    pub(super) fn note_bytes(&mut self) -> bool {
        self.heard = Instant::now();
        self.awaited.iter().any(|it| !it.is_whole)
    }

    /// Takes a frame that is sent to istiod, and awaits an answer for the names in it.
    pub(super) fn note_request(&mut self, frame: &Bytes) {
        let Ok(request) = Request::decode(Protocol::Delta, frame.clone()) else { return };
        let Some(type_url) = TYPES.into_iter().find(|url| *url == request.type_url) else { return };
        let Ok(it) = request.subscription() else { return };
        let ended = it.unsubscribed.iter().map(|name| NameDigest::of(name)).collect();
        self.end(type_url, &ended, None);
        let initial = it.initial_names();
        let mut names = it.names;
        // istiod sends all clusters and listeners, so that only the wildcard is awaited.
        let has_wildcard = [CLUSTER, LISTENER].contains(&type_url);
        if has_wildcard && names.is_empty() && ended.is_empty() && request.nonce.is_empty() {
            names.push(Bytes::from_static(b"*"));
        }
        names.retain(|name| !has_wildcard || **name == *b"*");
        let text = |name: &Bytes| String::from_utf8_lossy(name).into_owned();
        let names = names.iter().map(|name| (NameDigest::of(name), text(name)));
        let (known, new) = names.partition(|(name, _)| initial.contains(name));
        for (names, is_whole) in [(known, true), (new, has_wildcard)] {
            let names: HashMap<_, _> = names;
            if !names.is_empty() && self.awaited.len() < MAX_REQUESTS {
                let since = Some(Instant::now());
                self.awaited.push(Awaited { type_url, since, is_whole, names });
            }
        }
    }

    /// Takes a response.
    pub(super) fn note_response(&mut self, received: &Received, history: &mut History) {
        self.end(&received.type_url, &received.names, Some(history));
    }

    /// Ends the wait for names of a type: those in a response, or those that Envoy unsubscribes from.
    fn end(
        &mut self,
        type_url: &str,
        names: &HashSet<NameDigest>,
        mut answered: Option<&mut History>,
    ) {
        for it in self.awaited.iter_mut().filter(|it| it.type_url == type_url) {
            let is_whole = it.is_whole && answered.is_some();
            for (name, _) in it.names.extract_if(|name, _| is_whole || names.contains(name)) {
                if let Some(history) = &mut answered {
                    history.late.remove(&(it.type_url, name));
                }
                if it.since.is_none() {
                    self.news.get_or_insert(News::Change);
                }
            }
        }
        self.awaited.retain(|it| !it.names.is_empty());
    }

    /// Returns when [`Liveness::check`] is due. Time in which the agent does not read, because Envoy or an interceptor is
    /// slow, does not count: the time of an open question moves on.
    pub(super) fn due(&mut self, reads: bool) -> Option<Instant> {
        if !reads {
            if self.question == Question::Pending {
                self.asked = Instant::now();
            }
            return None;
        }
        let quiet = scaled(self.quiet, if self.has_answered { 1.0 } else { 0.25 });
        let quiet = later(self.heard, quiet);
        match self.question {
            // A stream on which istiod has never answered is not judged.
            Question::Pending if !self.has_answered => None,
            Question::Pending => {
                let silent = later(self.asked.max(self.heard), MAX_SILENCE);
                Some(silent.min(later(self.asked, MAX_WAIT)))
            }
            Question::Unanswered => Some(quiet),
            Question::None => match self.awaited.iter().find_map(|it| it.since) {
                // Names that come one after another cause at most one question in [`UNANSWERED`].
                Some(since) => Some(quiet.min(later(since.max(self.asked), UNANSWERED))),
                None => Some(quiet),
            },
        }
    }

    /// Asks istiod, or notes that its answer is missing.
    pub(super) fn check(&mut self) {
        let lateness = self.due(true).map(|due| due.elapsed());
        let now = Instant::now();
        match self.question {
            Question::Pending if lateness < Some(MAX_LATENESS) => {
                self.heard = now;
                self.news = Some(News::Problem);
                self.question = Question::Unanswered;
            }
            Question::Pending => self.asked = now,
            Question::None | Question::Unanswered => {
                self.requests.push(encode_subscription(DEBUG, vec![PAGE.to_owned()], false));
                self.asked = now;
                self.question = Question::Pending;
            }
        }
    }

    /// Takes istiod's answer. Renews the subscriptions that istiod got at least [`UNANSWERED`] before the question and has
    /// not answered; they are awaited again when they are sent. Names that were late before are not renewed: they are a
    /// problem.
    pub(super) fn note_answer(&mut self, history: &mut History) {
        self.has_answered = true;
        self.news.get_or_insert(News::Change);
        let asked = self.asked;
        if std::mem::replace(&mut self.question, Question::None) != Question::Pending {
            return;
        }
        if history.late.len() > MAX_LATE {
            history.late.clear();
        }
        let had_problem = self.awaited.iter().any(|it| it.since.is_none());
        let is_late = |it: &mut Awaited| it.since.is_some_and(|it| later(it, UNANSWERED) <= asked);
        for mut it in self.awaited.extract_if(.., is_late).collect::<Vec<_>>() {
            let renewed = it.names.extract_if(|name, _| {
                let count = history.late.entry((it.type_url, *name)).or_default();
                *count = count.saturating_add(1);
                if *count == 2 && !had_problem {
                    self.news = Some(News::Problem);
                }
                *count == 1
            });
            let renewed: Vec<_> = renewed.map(|(_, name)| name).collect();
            // istiod ignores a subscription that it has already, except the wildcard, so it is ended first.
            if renewed != ["*"] && !renewed.is_empty() {
                self.requests.push(encode_subscription(it.type_url, renewed.clone(), true));
            }
            if !renewed.is_empty() {
                self.requests.push(encode_subscription(it.type_url, renewed, false));
            }
            self.awaited.push(Awaited { since: None, ..it });
        }
        self.awaited.retain(|it| !it.names.is_empty());
    }

    /// Returns true if istiod has ended the stream, with this code, probably because it was asked.
    pub(super) fn is_refused(&self, code: Code) -> bool {
        self.question == Question::Pending
            && !self.has_answered
            && match code {
                Code::Unavailable | Code::Cancelled | Code::DeadlineExceeded => false,
                Code::Ok => self.asked.elapsed() < MAX_SILENCE,
                _ => true,
            }
    }

    /// Describes what does not work.
    pub(super) fn problem(&self) -> Option<Problem> {
        let subject = "Envoy's stream to istiod";
        if self.question == Question::Unanswered {
            let found = "istiod no longer answers on it";
            return Some(Problem::new(problem::Code::DiscoveryStalled, subject, found));
        }
        let late = self.awaited.iter().filter(|it| it.since.is_none());
        let names =
            late.flat_map(|it| it.names.values().map(|name| (short_type(it.type_url), name)));
        let shown = names.clone().take(MAX_SHOWN).map(|(of, name)| format!("{of} {name}"));
        let shown = shown.collect::<Vec<_>>().join(", ");
        let found = format!("{} subscriptions are not answered: {shown}", names.count());
        (!shown.is_empty())
            .then(|| Problem::new(problem::Code::SubscriptionUnanswered, subject, found))
    }
}

#[cfg(test)]
mod tests;
