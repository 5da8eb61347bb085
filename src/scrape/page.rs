//! Writes the page as the scraper takes it: the agent's own metrics, and the sources as their turns come.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, Write};
use std::sync::Arc;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use tokio::sync::mpsc::Sender;
use tokio::time::{Instant, timeout_at};

use super::Inner;
use super::lines::{Format, Lines};
use super::seen::Seen;
use super::source::{self, Origin, Source};
use crate::clock::after;
use crate::duration::scaled;
use crate::lifecycle::BoxError;
use crate::problem::codes;

/// How much is written together before it is sent.
const CHUNK: usize = 32 << 10;

pub(super) struct Page {
    pub scrape: Arc<Inner>,
    pub format: Format,
    pub deadline: Instant,
    /// The sources whose turn is still to come.
    pub sources: VecDeque<Source>,
    pub seen: Seen,
    pub output: Output,
}

impl Page {
    /// Sends the page in chunks. An error aborts the response.
    pub(super) async fn write(
        mut self,
        chunks: Sender<Result<Bytes, BoxError>>,
    ) -> Result<(), BoxError> {
        self.seen.begin(self.sources.is_empty());
        let own = self.scrape.registry.render();
        let mut lines = Lines::new(Format::Text, self.format, Vec::new());
        lines.push(own.as_bytes(), &mut self.seen, &mut self.output);
        while !self.sources.is_empty() {
            let next = source::settled(&mut self.sources, false);
            let next = timeout_at(self.deadline, next).await.ok().flatten();
            // Where none has settled in time, the first one is late.
            if let Some(source) = self.sources.remove(next.unwrap_or(0)) {
                self.pass(source, &chunks).await?;
            }
        }
        if self.format == Format::OpenMetrics {
            self.output.write(b"# EOF\n");
        }
        self.output.finish()?;
        self.send(&chunks).await;
        Ok(())
    }

    async fn send(&mut self, chunks: &Sender<Result<Bytes, BoxError>>) {
        while let Some(chunk) = self.output.take_ready() {
            // Who receives chunks also polls this.
            let _ = chunks.send(Ok(chunk)).await;
        }
    }

    /// Writes a source, while the others are set aside.
    async fn pass(
        &mut self,
        mut source: Source,
        chunks: &Sender<Result<Bytes, BoxError>>,
    ) -> Result<(), BoxError> {
        let is_last = self.sources.is_empty();
        self.seen.begin(is_last);
        // Nothing that others wait for takes all of their time.
        let until = match is_last {
            true => self.deadline,
            false => after(scaled(self.deadline.duration_since(Instant::now()), 0.5)),
        };
        let mut lines = None;
        loop {
            self.send(chunks).await;
            let others = &mut self.sources;
            let chunk = poll_fn(|context| {
                others.iter_mut().for_each(|other| other.set_aside(context));
                source.poll_chunk(context)
            });
            let chunk = match timeout_at(until, chunk).await {
                Ok(Some(chunk)) => chunk,
                Ok(None) => break,
                Err(_) => {
                    source.fail(codes::SCRAPE_LATE, "timed out");
                    break;
                }
            };
            let lines = lines.get_or_insert_with(|| {
                let hidden = match source.origin {
                    Origin::Envoy => self.scrape.config.hidden.clone(),
                    Origin::Application => Vec::new(),
                };
                Lines::new(source.format(), self.format, hidden)
            });
            lines.push(&chunk, &mut self.seen, &mut self.output);
            // A page that always has more is never late by the timer alone.
            if Instant::now() >= until {
                source.fail(codes::SCRAPE_LATE, "timed out");
                break;
            }
        }
        let mut has_end = false;
        if let Some(mut lines) = lines {
            lines.finish(source.failure.is_none(), &mut self.seen, &mut self.output);
            let counts = &self.scrape.counts;
            let origin = source.origin.name();
            counts.duplicates.with([origin]).add(lines.duplicates);
            counts.malformed.with([origin]).add(lines.malformed);
            has_end = lines.has_ended;
        }
        // One of several targets is read like text, which has no end.
        let is_alone = self.scrape.config.targets.len() == 1;
        let lacks_end = source.format() == Format::OpenMetrics && !has_end;
        if source.failure.is_none() && lacks_end && is_alone {
            source.fail(codes::SCRAPE_PAGE_INVALID, "no # EOF at the end");
        }
        self.scrape.report(&source);
        match source.failure.is_some() && source.content_type.is_some() {
            true if self.format == Format::OpenMetrics => Err("a source broke off".into()),
            _ => Ok(()),
        }
    }
}

/// What is written of the page, in the encoding of the response.
#[derive(Default)]
pub(super) struct Output {
    gzip: Option<GzEncoder<Vec<u8>>>,
    plain: Vec<u8>,
    has_ended: bool,
}

impl Output {
    pub(super) fn new(is_gzip: bool) -> Self {
        Self {
            gzip: is_gzip.then(|| GzEncoder::new(Vec::new(), Compression::fast())),
            ..Self::default()
        }
    }

    pub(super) fn write(&mut self, lines: &[u8]) {
        match &mut self.gzip {
            // A vector takes everything.
            Some(gzip) => drop(gzip.write_all(lines)),
            None => self.plain.extend_from_slice(lines),
        }
    }

    /// Ends the page: the rest is ready as well.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        if let Some(gzip) = self.gzip.take() {
            self.plain = gzip.finish()?;
        }
        self.has_ended = true;
        Ok(())
    }

    /// Takes the next chunk that is ready to be sent. None after the end of a page is its end.
    pub(super) fn take_ready(&mut self) -> Option<Bytes> {
        let written = match &mut self.gzip {
            Some(gzip) => gzip.get_mut(),
            None => &mut self.plain,
        };
        let is_ready = written.len() >= CHUNK || self.has_ended && !written.is_empty();
        is_ready.then(|| std::mem::take(written).into())
    }
}
