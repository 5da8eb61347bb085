//! Who wants which format: what is asked of Envoy and of the application, and what the answer is.
//!
//! The scraper's wishes are passed on as far as they are for text or OpenMetrics, in the order of
//! its preference, which counts down again from the number that is left. Protobuf is never asked for:
//! pages of it cannot be joined.

use std::collections::BTreeMap;

use http::header::{ACCEPT, ACCEPT_ENCODING, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue};

use super::lines::Format;
use super::source::Origin;

/// How long a scrape may take, in seconds.
pub(super) const TIMEOUT: HeaderName =
    HeaderName::from_static("x-prometheus-scrape-timeout-seconds");

const TEXT: &str = "text/plain;version=0.0.4";
/// Most wishes passed on: their order fits two digits.
const MOST: usize = 99;

/// What the page says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentType {
    Text,
    OpenMetrics0,
    OpenMetrics1,
}

impl ContentType {
    /// What an application says its page is.
    pub(super) fn of(header: Option<&HeaderValue>) -> Self {
        let text = header.and_then(|header| header.to_str().ok());
        let Some(entry) = text.and_then(Entry::parse) else {
            return Self::Text;
        };
        match (entry.kind.as_str(), entry.parameter("version")) {
            ("application/openmetrics-text", Some("1.0.0")) => Self::OpenMetrics1,
            ("application/openmetrics-text", Some("0.0.1") | None) => Self::OpenMetrics0,
            _ => Self::Text,
        }
    }

    pub(super) fn header(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics0 => "application/openmetrics-text; version=0.0.1; charset=utf-8",
            Self::OpenMetrics1 => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        })
    }

    pub(super) fn format(self) -> Format {
        match self {
            Self::Text => Format::Text,
            _ => Format::OpenMetrics,
        }
    }
}

/// The headers of a request: nothing that was meant for us alone. Envoy speaks text only.
pub(super) fn for_source(origin: Origin, headers: &HeaderMap) -> HeaderMap {
    let accept = accept(headers, |kind| match (kind, origin) {
        ("*" | "*/*", _) => Some(TEXT),
        ("text/*" | "text/plain", _) => Some(""),
        ("application/openmetrics-text", Origin::Application) => Some(""),
        ("application/*", Origin::Application) => {
            Some("application/openmetrics-text;version=0.0.1")
        }
        _ => None,
    });
    let mut passed = HeaderMap::new();
    for name in [USER_AGENT, TIMEOUT] {
        if let Some(value) = headers.get(&name) {
            passed.insert(name, value.clone());
        }
    }
    if let Ok(accept) = HeaderValue::from_str(&accept) {
        passed.insert(ACCEPT, accept);
    }
    passed.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    passed
}

/// Whether the scraper accepts gzip.
pub(super) fn takes_gzip(headers: &HeaderMap) -> bool {
    let entries = entries(headers, ACCEPT_ENCODING);
    entries.iter().any(|entry| entry.kind == "gzip")
}

/// A member of a list such as `Accept`.
#[derive(Clone)]
struct Entry {
    kind: String,
    parameters: BTreeMap<String, String>,
}

/// `stands_for` says of a media type what it stands for, of those that may pass: nothing is itself.
fn accept(headers: &HeaderMap, stands_for: impl Fn(&str) -> Option<&'static str>) -> String {
    let mut passed: Vec<Entry> = Vec::new();
    for entry in entries(headers, ACCEPT) {
        let entry = match stands_for(&entry.kind) {
            Some("") => entry,
            Some(other) => match Entry::parse(other) {
                Some(other) if !passed.iter().any(|one| one.is_same(&other)) => other,
                _ => continue,
            },
            None => continue,
        };
        passed.push(entry);
    }
    passed.truncate(MOST);
    let width = if passed.len() > 9 { 2 } else { 1 };
    let count = passed.len();
    let written = passed.into_iter().enumerate().map(|(index, mut entry)| {
        let quality = format!("0.{:0width$}", count - index);
        entry.parameters.insert("q".to_owned(), quality);
        entry.text()
    });
    let list = written.collect::<Vec<_>>().join(",");
    if list.is_empty() {
        TEXT.to_owned()
    } else {
        list
    }
}

/// The members of a header that are wanted at all, the most wanted first.
fn entries(headers: &HeaderMap, name: HeaderName) -> Vec<Entry> {
    let values = headers.get_all(name).into_iter();
    let texts: Vec<_> = values.filter_map(|value| value.to_str().ok()).collect();
    let members = texts.iter().flat_map(|text| text.split(','));
    let mut entries: Vec<_> = members
        .filter_map(Entry::parse)
        .filter(|entry| entry.quality() > 0.0)
        .collect();
    entries.sort_by(|a, b| b.quality().total_cmp(&a.quality()));
    entries
}

impl Entry {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(';').map(str::trim);
        let kind = parts.next()?.to_ascii_lowercase();
        let parameters = parts.filter_map(|part| {
            let (name, value) = part.split_once('=')?;
            let name = name.trim().to_ascii_lowercase();
            Some((name, value.trim().trim_matches('"').to_owned()))
        });
        let parameters = parameters.collect();
        (!kind.is_empty()).then_some(Self { kind, parameters })
    }

    fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.get(name).map(String::as_str)
    }

    /// How much the entry is wanted, from 0 to 1. What cannot be read is 1.
    fn quality(&self) -> f64 {
        let quality = self.parameter("q").and_then(|text| text.parse().ok());
        quality.filter(|q: &f64| q.is_finite()).unwrap_or(1.0)
    }

    fn is_same(&self, other: &Self) -> bool {
        self.kind == other.kind && self.parameter("version") == other.parameter("version")
    }

    fn text(&self) -> String {
        let mut text = self.kind.clone();
        for (name, value) in &self.parameters {
            text.extend([";", name, "=", value]);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: HeaderName, value: Option<&str>) -> HeaderMap {
        let value = value.map(|value| (name, value.parse().expect("a value")));
        value.into_iter().collect()
    }

    #[test]
    fn only_text_is_asked_of_envoy_and_only_text_and_openmetrics_of_the_application() {
        const OM: &str = "application/openmetrics-text";
        for (accept, envoy, application) in [
            (None, TEXT.to_owned(), TEXT.to_owned()),
            (Some(""), TEXT.into(), TEXT.into()),
            (Some(";;,"), TEXT.into(), TEXT.into()),
            (
                Some("*/*"),
                "text/plain;q=0.1;version=0.0.4".into(),
                "text/plain;q=0.1;version=0.0.4".into(),
            ),
            (
                Some("*"),
                "text/plain;q=0.1;version=0.0.4".into(),
                "text/plain;q=0.1;version=0.0.4".into(),
            ),
            (
                Some("application/*"),
                TEXT.into(),
                format!("{OM};q=0.1;version=0.0.1"),
            ),
            (
                Some("application/vnd.google.protobuf;proto=x;q=0.9"),
                TEXT.into(),
                TEXT.into(),
            ),
            (Some("text/*"), "text/*;q=0.1".into(), "text/*;q=0.1".into()),
            (
                Some(
                    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                     application/vnd.google.protobuf;q=0.55,text/plain;version=0.0.4;q=0.4,*/*;q=0.2",
                ),
                "text/plain;q=0.1;version=0.0.4".into(),
                format!(
                    "{OM};escaping=allow-utf-8;q=0.2;version=1.0.0,text/plain;q=0.1;version=0.0.4"
                ),
            ),
            (
                Some("text/plain;q=0.3, application/openmetrics-text;q=0.7"),
                "text/plain;q=0.1".into(),
                format!("{OM};q=0.2,text/plain;q=0.1"),
            ),
            (Some("text/plain;q=0"), TEXT.into(), TEXT.into()),
        ] {
            let headers = headers(ACCEPT, accept);
            assert_eq!(
                for_source(Origin::Envoy, &headers)[ACCEPT],
                envoy,
                "{accept:?}"
            );
            assert_eq!(
                for_source(Origin::Application, &headers)[ACCEPT],
                application,
                "{accept:?}"
            );
        }
    }

    #[test]
    fn ten_wishes_keep_their_order() {
        let wishes: Vec<_> = (0..10).map(|n| format!("text/plain;n={n}")).collect();
        let headers = headers(ACCEPT, Some(&wishes.join(",")));
        let asked = for_source(Origin::Envoy, &headers);
        let asked = asked[ACCEPT].to_str().expect("text");
        assert!(asked.starts_with("text/plain;n=0;q=0.10,text/plain;n=1;q=0.09,"));
        assert!(asked.ends_with(",text/plain;n=9;q=0.01"));
    }

    #[test]
    fn a_page_is_what_its_header_says_and_text_otherwise() {
        for (header, expected) in [
            (None, ContentType::Text),
            (
                Some("application/openmetrics-text"),
                ContentType::OpenMetrics0,
            ),
            (
                Some("application/openmetrics-text; version=0.0.1"),
                ContentType::OpenMetrics0,
            ),
            (
                Some("Application/OpenMetrics-Text; charset=utf-8; version=\"1.0.0\""),
                ContentType::OpenMetrics1,
            ),
            (
                Some("application/openmetrics-text; version=2"),
                ContentType::Text,
            ),
            (Some("text/plain; version=0.0.4"), ContentType::Text),
            (Some("text/html"), ContentType::Text),
            (Some(""), ContentType::Text),
        ] {
            let value = header.map(|header| header.parse().expect("a value"));
            assert_eq!(ContentType::of(value.as_ref()), expected, "{header:?}");
        }
    }

    #[test]
    fn a_scraper_that_takes_gzip_gets_it() {
        for (accept, expected) in [
            (None, false),
            (Some("gzip"), true),
            (Some("zstd"), false),
            (Some("gzip, zstd"), true),
            (Some("deflate, gzip;q=1.0, zstd;q=0.5"), true),
            (Some("br, lz4"), false),
            (Some("gzip;q=0"), false),
        ] {
            let headers = headers(ACCEPT_ENCODING, accept);
            assert_eq!(takes_gzip(&headers), expected, "{accept:?}");
        }
    }
}
