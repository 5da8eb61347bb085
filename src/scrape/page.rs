//! Writes the page while the scraper reads it: the agent's own metrics, then the sources in turn.

use bytes::Bytes;
use tokio::sync::mpsc::Sender;
use tokio::time::{Instant, timeout_at};

use super::format::Format;
use super::lines::{Hidden, Lines};
use super::metrics::Metrics;
use super::output::Output;
use super::seen::Seen;
use super::source::{Origin, Source};
use crate::clock::after;
use crate::duration::scaled;
use crate::lifecycle::BoxError;
use crate::metrics::Registry;
use crate::problem::codes;

pub(super) struct Page {
    pub registry: Registry,
    pub metrics: Metrics,
    /// Families of Envoy's that are left out.
    pub hidden: Vec<Hidden>,
    pub has_one_target: bool,
    pub format: Format,
    pub deadline: Instant,
    pub seen: Seen,
    pub output: Output,
}

impl Page {
    /// Sends the page in chunks. An error aborts the response. A chunk that cannot be sent is ignored: the
    /// response was dropped then, and this future with it.
    pub(super) async fn write(
        mut self,
        sources: Vec<Source>,
        chunks: Sender<Bytes>,
    ) -> Result<(), BoxError> {
        self.seen.begin(sources.is_empty());
        let agent = self.registry.render();
        let mut lines = Lines::new(Format::Text, self.format, Vec::new());
        lines.push(agent.as_bytes(), &mut self.seen, &mut self.output);
        let mut sources = sources.into_iter();
        while let Some(source) = sources.next() {
            self.write_source(source, sources.len(), &chunks).await?;
        }
        if self.format == Format::OpenMetrics {
            self.output.write(b"# EOF\n");
        }
        let _ = chunks.send(self.output.finish()?).await;
        Ok(())
    }

    /// Writes a source, in an equal share of the time that is left for it and `others`.
    async fn write_source(
        &mut self,
        mut source: Source,
        others: usize,
        chunks: &Sender<Bytes>,
    ) -> Result<(), BoxError> {
        self.seen.begin(others == 0);
        let left = self.deadline.duration_since(Instant::now());
        let until = after(scaled(left, 1.0 / (others + 1) as f64));
        let mut is_late = timeout_at(until, source.read_head()).await.is_err();
        let hidden = match source.origin {
            Origin::Envoy => self.hidden.clone(),
            Origin::Application => Vec::new(),
        };
        let mut lines = Lines::new(source.format(), self.format, hidden);
        while !is_late {
            if let Some(chunk) = self.output.take_ready() {
                let _ = chunks.send(chunk).await;
            }
            match timeout_at(until, source.chunk()).await {
                Ok(Some(chunk)) => lines.push(&chunk, &mut self.seen, &mut self.output),
                Ok(None) => break,
                Err(_) => is_late = true,
            }
            // A page that always has more is never late by the timer alone.
            is_late |= Instant::now() >= until;
        }
        if is_late {
            source.fail(codes::SCRAPE_LATE, "timed out");
        }
        lines.finish(source.failure.is_none(), &mut self.seen, &mut self.output);
        let origin = [source.origin.name()];
        self.metrics.duplicates.with(origin).add(lines.duplicates);
        self.metrics.malformed.with(origin).add(lines.malformed);
        // One of several targets may lack its end, as with pilot-agent.
        let needs_end = self.has_one_target && source.format() == Format::OpenMetrics;
        if source.failure.is_none() && needs_end && !lines.has_ended {
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
