//! Writes the page when the scraper takes more of it: the agent's own metrics, and the sources as
//! their turns come.

use std::future::poll_fn;
use std::io::{self, Write};
use std::sync::Arc;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use tokio::time::{Instant, timeout_at};

use super::Inner;
use super::lines::{Format, Lines};
use super::seen::Seen;
use super::source::{self, Failure, Origin, Source};
use crate::clock::after;
use crate::duration::scaled;
use crate::lifecycle::BoxError;

/// How much is written together before it is sent.
const CHUNK: usize = 32 << 10;

pub(super) struct Page {
    scrape: Arc<Inner>,
    format: Format,
    deadline: Instant,
    /// The sources whose turn is still to come.
    sources: Vec<Source>,
    turn: Option<Turn>,
    seen: Seen,
    output: Output,
}

/// The source that is written.
struct Turn {
    source: Source,
    until: Instant,
    /// Whether all of it was there at the beginning.
    is_small: bool,
    /// None before the first chunk.
    lines: Option<Lines>,
}

impl Page {
    pub(super) fn new(
        scrape: Arc<Inner>,
        sources: Vec<Source>,
        format: Format,
        deadline: Instant,
        mut output: Output,
    ) -> Self {
        let mut seen = Seen::default();
        seen.begin(sources.is_empty());
        let own = scrape.registry.render();
        Lines::new(Format::Text, format, Vec::new(), false).push(
            own.as_bytes(),
            &mut seen,
            &mut output,
        );
        Self {
            scrape,
            format,
            deadline,
            sources,
            turn: None,
            seen,
            output,
        }
    }

    /// The next chunk of the page; None is its end. An error aborts the response.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, BoxError> {
        loop {
            if let Some(chunk) = self.output.take_ready() {
                return Ok(Some(chunk));
            }
            if self.output.has_ended {
                return Ok(None);
            }
            match self.turn.take() {
                Some(turn) => self.pass(turn).await?,
                None => self.begin()?,
            }
        }
    }

    /// Begins the turn of a source, or ends the page after the last one.
    fn begin(&mut self) -> Result<(), BoxError> {
        if self.sources.is_empty() {
            if self.format == Format::OpenMetrics {
                self.output.write(b"# EOF\n");
            }
            return Ok(self.output.finish()?);
        }
        let source = self.sources.remove(0);
        let is_last = self.sources.is_empty();
        self.seen.begin(is_last);
        // Nothing that others wait for takes all of their time.
        let now = Instant::now();
        let until = match is_last {
            true => self.deadline,
            false => after(scaled(self.deadline.duration_since(now), 0.5)),
        };
        self.turn = Some(Turn {
            until,
            is_small: source.has_ended(),
            source,
            lines: None,
        });
        Ok(())
    }

    /// Writes the next chunk of a source, while the others are set aside.
    async fn pass(&mut self, mut turn: Turn) -> Result<(), BoxError> {
        let source = &mut turn.source;
        let others = &mut self.sources;
        let chunk = poll_fn(|context| {
            source::set_all_aside(others, context);
            source.poll_chunk(context)
        });
        match timeout_at(turn.until, chunk).await {
            Ok(Some(chunk)) => {
                let lines = turn.lines.get_or_insert_with(|| {
                    let hidden = match source.origin {
                        Origin::Envoy => self.scrape.config.hidden.clone(),
                        Origin::Application => Vec::new(),
                    };
                    Lines::new(source.format(), self.format, hidden, turn.is_small)
                });
                lines.push(&chunk, &mut self.seen, &mut self.output);
                // A page that always has more is never late by the timer alone.
                if Instant::now() < turn.until {
                    self.turn = Some(turn);
                    return Ok(());
                }
                source.fail(Failure::Late);
            }
            Ok(None) => {}
            Err(_) => source.fail(Failure::Late),
        }
        self.end(turn)
    }

    fn end(&mut self, turn: Turn) -> Result<(), BoxError> {
        let Turn {
            mut source, lines, ..
        } = turn;
        let mut has_end = false;
        if let Some(mut lines) = lines {
            lines.finish(source.failure.is_none(), &mut self.seen, &mut self.output);
            let counts = &self.scrape.counts;
            let origin = source.origin.name();
            counts.duplicates.with([origin]).add(lines.duplicates);
            counts.malformed.with([origin]).add(lines.malformed);
            has_end = lines.has_ended;
        }
        if source.failure.is_none() && source.format() == Format::OpenMetrics && !has_end {
            source.fail(Failure::NoEnd);
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
