//! Writes the page while the scraper reads it: the agent's own metrics, then the sources in turn.

use std::collections::VecDeque;
use std::future::poll_fn;

use bytes::Bytes;
use tokio::sync::mpsc::Sender;
use tokio::time::{Instant, timeout_at};

use super::format::Format;
use super::lines::{Hidden, Lines};
use super::metrics::Metrics;
use super::output::Output;
use super::seen::Seen;
use super::source::{self, Origin, Source};
use crate::clock::after;
use crate::duration::scaled;
use crate::lifecycle::BoxError;
use crate::metrics::Registry;
use crate::problem::codes;

type Chunks = Sender<Result<Bytes, BoxError>>;

pub(super) struct Page {
    pub registry: Registry,
    pub metrics: Metrics,
    /// Families of Envoy's that are left out.
    pub hidden: Vec<Hidden>,
    pub has_one_target: bool,
    pub format: Format,
    pub deadline: Instant,
    /// The sources that are not written yet.
    pub sources: VecDeque<Source>,
    pub seen: Seen,
    pub output: Output,
}

impl Page {
    /// Sends the page in chunks. An error aborts the response.
    pub(super) async fn write(mut self, chunks: Chunks) -> Result<(), BoxError> {
        self.seen.begin(self.sources.is_empty());
        let agent = self.registry.render();
        let mut lines = Lines::new(Format::Text, self.format, Vec::new());
        lines.push(agent.as_bytes(), &mut self.seen, &mut self.output);
        while !self.sources.is_empty() {
            let settled = source::settled(&mut self.sources, false);
            let next = timeout_at(self.deadline, settled).await.ok().flatten();
            // If none has settled in time, the first one is late.
            if let Some(source) = self.sources.remove(next.unwrap_or(0)) {
                self.write_source(source, &chunks).await?;
            }
        }
        if self.format == Format::OpenMetrics {
            self.output.write(b"# EOF\n");
        }
        self.output.finish()?;
        self.send(&chunks).await;
        Ok(())
    }

    async fn send(&mut self, chunks: &Chunks) {
        while let Some(chunk) = self.output.take_ready() {
            // It fails only if the response was dropped, and this future with it.
            let _ = chunks.send(Ok(chunk)).await;
        }
    }

    /// Writes a source, while the others are set aside.
    async fn write_source(&mut self, mut source: Source, chunks: &Chunks) -> Result<(), BoxError> {
        let is_last = self.sources.is_empty();
        self.seen.begin(is_last);
        // A source that others wait for leaves them half of the time.
        let until = if is_last {
            self.deadline
        } else {
            after(scaled(self.deadline.duration_since(Instant::now()), 0.5))
        };
        // The format of the source is known with its first chunk.
        let mut lines = None;
        let is_late = loop {
            self.send(chunks).await;
            let others = &mut self.sources;
            let chunk = poll_fn(|context| {
                others.iter_mut().for_each(|other| other.set_aside(context));
                source.poll_chunk(context)
            });
            let Ok(chunk) = timeout_at(until, chunk).await else {
                break true;
            };
            let Some(chunk) = chunk else {
                break false;
            };
            let lines = lines.get_or_insert_with(|| {
                let hidden = match source.origin {
                    Origin::Envoy => self.hidden.clone(),
                    Origin::Application => Vec::new(),
                };
                Lines::new(source.format(), self.format, hidden)
            });
            lines.push(&chunk, &mut self.seen, &mut self.output);
            // A page that always has more is never late by the timer alone.
            if Instant::now() >= until {
                break true;
            }
        };
        if is_late {
            source.fail(codes::SCRAPE_LATE, "timed out");
        }
        let mut has_end = false;
        if let Some(mut lines) = lines {
            lines.finish(source.failure.is_none(), &mut self.seen, &mut self.output);
            let origin = [source.origin.name()];
            self.metrics.duplicates.with(origin).add(lines.duplicates);
            self.metrics.malformed.with(origin).add(lines.malformed);
            has_end = lines.has_ended;
        }
        // One of several targets is read like text, which has no end.
        let needs_end = self.has_one_target && source.format() == Format::OpenMetrics;
        if source.failure.is_none() && needs_end && !has_end {
            source.fail(codes::SCRAPE_PAGE_INVALID, "no # EOF at the end");
        }
        self.metrics.report(&source);
        let broke_off = source.failure.is_some() && source.content_type.is_some();
        if broke_off && self.format == Format::OpenMetrics {
            return Err("a source broke off".into());
        }
        Ok(())
    }
}
