//! What a family is: its name and type, the samples it owns, and its head in either format.
//!
//! A family takes the form of the page it goes to when its type is known. Names of samples never
//! change, as they are what people's queries ask for; where a format wants another name for a type,
//! the type is what gives way.
//!
//! Does not hold samples.

use super::line::{Format, Sample, is_plain};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Unknown,
    Counter,
    Gauge,
    Histogram,
    Summary,
    GaugeHistogram,
    Info,
    StateSet,
}

/// A family as it is on the page.
#[derive(Clone, Debug)]
pub(super) struct Family {
    /// As its source calls it.
    pub base: String,
    pub name: String,
    /// None where no type was said.
    pub kind: Option<Kind>,
    help: Option<String>,
    unit: Option<String>,
}

const SUFFIXES: [&str; 8] = [
    "_bucket", "_sum", "_count", "_total", "_created", "_info", "_gcount", "_gsum",
];

impl Kind {
    pub(super) fn parse(text: &str, format: Format) -> Option<Self> {
        Some(match text {
            "counter" => Self::Counter,
            "gauge" => Self::Gauge,
            "histogram" => Self::Histogram,
            "summary" => Self::Summary,
            "untyped" | "unknown" => Self::Unknown,
            "gaugehistogram" if format == Format::OpenMetrics => Self::GaugeHistogram,
            "info" if format == Format::OpenMetrics => Self::Info,
            "stateset" if format == Format::OpenMetrics => Self::StateSet,
            _ => return None,
        })
    }

    /// What the names of a family's samples end in.
    fn suffixes(self, format: Format) -> &'static [&'static str] {
        let is_text = format == Format::Text;
        match self {
            Self::Counter if !is_text => &["_total", "_created"],
            Self::Histogram if is_text => &["_bucket", "_sum", "_count"],
            Self::Histogram => &["_bucket", "_sum", "_count", "_created"],
            Self::Summary if is_text => &["", "_sum", "_count"],
            Self::Summary => &["", "_sum", "_count", "_created"],
            Self::GaugeHistogram => &["_bucket", "_gsum", "_gcount"],
            Self::Info => &["_info"],
            _ => &[""],
        }
    }

    fn word(self, format: Format) -> &'static str {
        match self {
            Self::Unknown if format == Format::Text => "untyped",
            Self::Unknown => "unknown",
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
            Self::Summary => "summary",
            Self::GaugeHistogram => "gaugehistogram",
            Self::Info => "info",
            Self::StateSet => "stateset",
        }
    }

    /// The label that tells samples of one group apart.
    pub(super) fn inner_label(self) -> Option<&'static str> {
        match self {
            Self::Histogram | Self::GaugeHistogram => Some("le"),
            Self::Summary => Some("quantile"),
            _ => None,
        }
    }
}

impl Family {
    pub(super) fn new(base: &str) -> Self {
        Self {
            base: base.to_owned(),
            name: base.to_owned(),
            kind: None,
            help: None,
            unit: None,
        }
    }

    /// Takes the type a source of one format gives to a page of another.
    pub(super) fn set_kind(&mut self, kind: Kind, from: Format, to: Format) {
        let (name, kind) = match (kind, from, to) {
            (Kind::Counter, Format::Text, Format::OpenMetrics) => {
                match self.base.strip_suffix("_total") {
                    Some(name) if !name.is_empty() => (name.to_owned(), Kind::Counter),
                    _ => (self.base.clone(), Kind::Unknown),
                }
            }
            (Kind::Counter, Format::OpenMetrics, Format::Text) => {
                (format!("{}_total", self.base), Kind::Counter)
            }
            (Kind::Info, _, Format::Text) => (format!("{}_info", self.base), Kind::Gauge),
            (Kind::StateSet, _, Format::Text) => (self.base.clone(), Kind::Gauge),
            // Its samples stand for themselves.
            (Kind::GaugeHistogram, _, Format::Text) => (self.base.clone(), Kind::Unknown),
            (kind, ..) => (self.base.clone(), kind),
        };
        self.name = name;
        self.kind = Some(kind);
    }

    /// Leaves the name a counter of text would have in OpenMetrics, where that is taken: as a family of
    /// unknown type it goes by the name of its samples. False if it does already.
    pub(super) fn give_way(&mut self, to: Format) -> bool {
        let is_elsewhere = to == Format::OpenMetrics && self.name != self.base;
        if is_elsewhere {
            self.name.clone_from(&self.base);
            self.kind = Some(Kind::Unknown);
        }
        is_elsewhere
    }

    pub(super) fn set_help(&mut self, text: &str, from: Format, to: Format) {
        if self.help.is_none() && !text.is_empty() {
            self.help = Some(help(text, from, to));
        }
    }

    pub(super) fn set_unit(&mut self, unit: &str) {
        if self.unit.is_none() && !unit.is_empty() && !unit.contains([' ', '\t']) {
            self.unit = Some(unit.to_owned());
        }
    }

    pub(super) fn owns(&self, sample: &str, to: Format) -> bool {
        let Some(suffix) = sample.strip_prefix(self.name.as_str()) else {
            return false;
        };
        let suffixes = self.kind.unwrap_or(Kind::Unknown).suffixes(to);
        match suffix.is_empty() {
            // Most samples are called like their family, and every call counts.
            true => suffixes.iter().any(|known| known.is_empty()),
            false => suffixes.contains(&suffix),
        }
    }

    /// Whether a sample only says when another was created, on a page that has no place for it.
    pub(super) fn has_no_place_for(&self, sample: &str, from: Format, to: Format) -> bool {
        let is_created = sample.strip_prefix(self.base.as_str()) == Some("_created");
        let counts = matches!(
            self.kind,
            Some(Kind::Counter | Kind::Histogram | Kind::Summary)
        );
        from != to && to == Format::Text && is_created && counts
    }

    /// Every name that nobody else may have on the page.
    pub(super) fn names(&self, to: Format) -> impl Iterator<Item = String> + '_ {
        let suffixes = self.kind.unwrap_or(Kind::Unknown).suffixes(to);
        let own = (!suffixes.contains(&"")).then(|| self.name.clone());
        own.into_iter().chain(
            suffixes
                .iter()
                .map(|suffix| format!("{}{suffix}", self.name)),
        )
    }

    pub(super) fn write_head(&self, to: Format, out: &mut Vec<u8>) {
        let mut line = |keyword: &str, text: &str| {
            let quote = if is_plain(&self.name) { "" } else { "\"" };
            for part in [
                "# ", keyword, " ", quote, &self.name, quote, " ", text, "\n",
            ] {
                out.extend_from_slice(part.as_bytes());
            }
        };
        if let Some(help) = &self.help {
            line("HELP", help);
        }
        if let Some(kind) = self.kind {
            line("TYPE", kind.word(to));
        }
        if let Some(unit) = self.unit.as_deref().filter(|unit| self.may_have(unit, to)) {
            line("UNIT", unit);
        }
    }

    fn may_have(&self, unit: &str, to: Format) -> bool {
        let is_end = self
            .name
            .strip_suffix(unit)
            .is_some_and(|rest| rest.ends_with('_'));
        to == Format::OpenMetrics
            && is_end
            && !matches!(self.kind, Some(Kind::Info | Kind::StateSet))
    }

    /// Memory beside the samples.
    pub(super) fn size(&self) -> usize {
        const OVERHEAD: usize = 256;
        let texts = self.help.iter().chain(&self.unit).map(String::len);
        OVERHEAD + 4 * self.base.len() + texts.sum::<usize>()
    }

    /// Whether the page may show exemplars of a sample.
    fn shows_exemplars(&self, sample: &str, to: Format) -> bool {
        to == Format::OpenMetrics
            && match self.kind {
                Some(Kind::Counter) => sample.ends_with("_total"),
                Some(Kind::Histogram | Kind::GaugeHistogram) => sample.ends_with("_bucket"),
                _ => false,
            }
    }

    /// Writes a sample of a page of one format as one of another.
    pub(super) fn write(&self, sample: &Sample<'_>, from: Format, to: Format, out: &mut Vec<u8>) {
        let mut put = |text: &str| out.extend_from_slice(text.as_bytes());
        let braced = !sample.labels.is_empty();
        if is_plain(sample.name) {
            put(sample.name);
            if braced {
                put("{");
            }
        } else {
            put("{\"");
            put(sample.name);
            put(if braced { "\"," } else { "\"" });
        }
        put(&sample.labels);
        if braced || !is_plain(sample.name) {
            put("}");
        }
        put(" ");
        put(sample.value);
        if let Some(time) = sample.time.and_then(|time| converted(time, from, to)) {
            put(" ");
            put(&time);
        }
        let shown = self.shows_exemplars(sample.name, to);
        if let Some(exemplar) = sample.exemplar.filter(|_| shown) {
            put(" # ");
            put(exemplar);
        }
        put("\n");
    }
}

/// Names a family may have that owns the sample.
pub(super) fn bases(sample: &str) -> impl Iterator<Item = &str> {
    SUFFIXES
        .iter()
        .filter_map(|suffix| sample.strip_suffix(suffix))
}

/// Milliseconds in one format are seconds in the other.
fn converted(time: &str, from: Format, to: Format) -> Option<std::borrow::Cow<'_, str>> {
    match (from, to) {
        (Format::Text, Format::OpenMetrics) => {
            let milliseconds: i64 = time.parse().ok()?;
            let sign = if milliseconds < 0 { "-" } else { "" };
            let size = milliseconds.unsigned_abs();
            Some(format!("{sign}{}.{:03}", size / 1000, size % 1000).into())
        }
        (Format::OpenMetrics, Format::Text) => {
            let seconds: f64 = time.parse().ok()?;
            Some(format!("{:.0}", seconds * 1000.0).into())
        }
        _ => Some(time.into()),
    }
}

/// Escapes as the page's format has them; a backslash that escapes nothing stands for itself.
fn help(text: &str, from: Format, to: Format) -> String {
    let mut out = String::with_capacity(text.len());
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '\\' => {
                let next = characters.next_if(|next| {
                    matches!(next, '\\' | 'n') || *next == '"' && from == Format::OpenMetrics
                });
                match next {
                    Some('"') => put_quote(&mut out, to),
                    Some(next) => out.extend(['\\', next]),
                    None => out.push_str("\\\\"),
                }
            }
            '"' => put_quote(&mut out, to),
            other => out.push(other),
        }
    }
    out
}

fn put_quote(out: &mut String, to: Format) {
    out.push_str(if to == Format::OpenMetrics {
        "\\\""
    } else {
        "\""
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_gives_way_before_the_name_of_a_sample_does() {
        use Format::{OpenMetrics as Om, Text};
        for (base, kind, from, to, name, expected) in [
            ("a_total", Kind::Counter, Text, Om, "a", Kind::Counter),
            ("a", Kind::Counter, Text, Om, "a", Kind::Unknown),
            ("_total", Kind::Counter, Text, Om, "_total", Kind::Unknown),
            ("a", Kind::Counter, Om, Text, "a_total", Kind::Counter),
            ("a", Kind::Info, Om, Text, "a_info", Kind::Gauge),
            ("a", Kind::StateSet, Om, Text, "a", Kind::Gauge),
            ("a", Kind::Histogram, Om, Text, "a", Kind::Histogram),
            ("a", Kind::Counter, Om, Om, "a", Kind::Counter),
        ] {
            let mut family = Family::new(base);
            family.set_kind(kind, from, to);
            assert_eq!((family.name.as_str(), family.kind), (name, Some(expected)));
        }
    }

    #[test]
    fn times_are_milliseconds_in_text_and_seconds_in_openmetrics() {
        use Format::{OpenMetrics as Om, Text};
        for (time, from, to, expected) in [
            ("1500", Text, Om, "1.500"),
            ("-1", Text, Om, "-0.001"),
            ("1.5", Om, Text, "1500"),
            ("1e3", Om, Text, "1000000"),
            ("1e3", Om, Om, "1e3"),
        ] {
            assert_eq!(converted(time, from, to).as_deref(), Some(expected));
        }
    }

    #[test]
    fn help_is_escaped_as_the_page_has_it() {
        use Format::{OpenMetrics as Om, Text};
        for (text, from, to, expected) in [
            (r#"a "b" \n"#, Text, Om, r#"a \"b\" \n"#),
            (r#"a \"b\""#, Om, Text, r#"a "b""#),
            (r"C:\dir\\x", Text, Text, r"C:\\dir\\x"),
            (r"end\", Text, Om, r"end\\"),
        ] {
            assert_eq!(help(text, from, to), expected);
        }
    }
}
