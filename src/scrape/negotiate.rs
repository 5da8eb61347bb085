//! Which format is asked of Envoy and of the application, and which format and coding the answer has.
//!
//! The members of the scraper's `Accept` that are for text or OpenMetrics are passed on as they came.
//! Protobuf is never asked for: pages of it cannot be joined.

use http::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue};

use super::lines::Format;
use super::source::Origin;

/// How long a scrape may take, in seconds.
pub(super) const TIMEOUT: HeaderName =
    HeaderName::from_static("x-prometheus-scrape-timeout-seconds");

/// The agents that a scrape has passed. Each adds its own value.
pub(super) const SCRAPED_BY: HeaderName = HeaderName::from_static("x-istio-agent-scraped-by");

const OPEN_METRICS: &str = "application/openmetrics-text";
const TEXT: &str = "text/plain;version=0.0.4";
/// What `*/*` becomes, which has the lowest weight of those that scrapers send.
const ANY: &str = "text/plain;version=0.0.4;q=0.1";

/// What the page says it is.
pub(super) const TEXT_PAGE: &str = "text/plain; version=0.0.4; charset=utf-8";
const OPEN_METRICS_0: &str = "application/openmetrics-text; version=0.0.1; charset=utf-8";
const OPEN_METRICS_1: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What an application says its page is, in one of these ways.
pub(super) fn content_type(header: Option<&HeaderValue>) -> &'static str {
    let text = header.and_then(|header| header.to_str().ok());
    let text = text.unwrap_or_default();
    if kind(text) != OPEN_METRICS {
        TEXT_PAGE
    } else if text.contains("1.0.0") {
        OPEN_METRICS_1
    } else if text.contains("0.0.1") || !text.contains("version") {
        OPEN_METRICS_0
    } else {
        TEXT_PAGE
    }
}

impl Format {
    /// The format of a page that says so.
    pub(super) fn of(content_type: &str) -> Self {
        match content_type {
            TEXT_PAGE => Self::Text,
            _ => Self::OpenMetrics,
        }
    }
}

/// The headers of a request of the agent `own`: nothing that was meant for us alone.
pub(super) fn for_source(origin: Origin, headers: &HeaderMap, own: &HeaderValue) -> HeaderMap {
    let mut passed = HeaderMap::new();
    for name in [USER_AGENT, TIMEOUT] {
        if let Some(value) = headers.get(&name) {
            passed.insert(name, value.clone());
        }
    }
    // Two agents that scrape each other are a loop, too.
    for agent in headers.get_all(SCRAPED_BY).iter().chain([own]) {
        passed.append(SCRAPED_BY, agent.clone());
    }
    if let Ok(accept) = HeaderValue::from_str(&accept(origin, headers)) {
        passed.insert(ACCEPT, accept);
    }
    passed.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    passed
}

/// What of `Accept` is passed on. Envoy speaks text only.
fn accept(origin: Origin, headers: &HeaderMap) -> String {
    let is_application = origin == Origin::Application;
    let passed = members(headers, ACCEPT).filter_map(|member| match &*kind(member) {
        "text/*" | "text/plain" => Some(member),
        "*" | "*/*" => Some(ANY),
        OPEN_METRICS if is_application => Some(member),
        "application/*" if is_application => Some("application/openmetrics-text;version=0.0.1"),
        _ => None,
    });
    let passed = passed.collect::<Vec<_>>();
    match &passed[..] {
        [] => TEXT.to_owned(),
        passed => passed.join(","),
    }
}

/// Whether the scraper accepts gzip.
pub(super) fn takes_gzip(headers: &HeaderMap) -> bool {
    let mut members = members(headers, ACCEPT_ENCODING);
    members.any(|member| kind(member) == "gzip" && !member.ends_with("q=0"))
}

/// Whether a page is in gzip. The error is another coding. Other words are ignored, as some servers name
/// media types and character sets here.
pub(super) fn is_gzip(headers: &HeaderMap) -> Result<bool, String> {
    let mut is_gzip = false;
    for coding in members(headers, CONTENT_ENCODING).map(kind) {
        match &*coding {
            "gzip" | "x-gzip" => is_gzip = true,
            "br" | "compress" | "deflate" | "x-compress" | "zstd" => return Err(coding),
            _ => {}
        }
    }
    Ok(is_gzip)
}

/// The members of a header that is a list.
fn members(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &str> {
    let values = headers.get_all(name).into_iter();
    let texts = values.filter_map(|value| value.to_str().ok());
    texts.flat_map(|text| text.split(',')).map(str::trim)
}

/// What a member or a media type is without its parameters.
fn kind(member: &str) -> String {
    let kind = member.split(';').next().unwrap_or_default();
    kind.trim().to_ascii_lowercase()
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
            (None, TEXT, TEXT),
            (Some(""), TEXT, TEXT),
            (Some(";;,"), TEXT, TEXT),
            (Some("*/*"), ANY, ANY),
            (Some("*"), ANY, ANY),
            (
                Some("application/*"),
                TEXT,
                "application/openmetrics-text;version=0.0.1",
            ),
            (
                Some("application/vnd.google.protobuf;proto=x;q=0.9"),
                TEXT,
                TEXT,
            ),
            (Some("Text/*"), "Text/*", "Text/*"),
            (
                Some(
                    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                     application/vnd.google.protobuf;q=0.55,text/plain;version=0.0.4;q=0.4,*/*;q=0.2",
                ),
                "text/plain;version=0.0.4;q=0.4,text/plain;version=0.0.4;q=0.1",
                "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                 text/plain;version=0.0.4;q=0.4,text/plain;version=0.0.4;q=0.1",
            ),
            (Some(OM), TEXT, OM),
        ] {
            let (headers, own) = (headers(ACCEPT, accept), HeaderValue::from(1));
            assert_eq!(
                for_source(Origin::Envoy, &headers, &own)[ACCEPT],
                envoy,
                "{accept:?}"
            );
            assert_eq!(
                for_source(Origin::Application, &headers, &own)[ACCEPT],
                application,
                "{accept:?}"
            );
        }
    }

    #[test]
    fn a_page_is_what_its_header_says_and_text_otherwise() {
        for (header, expected) in [
            (None, TEXT_PAGE),
            (Some("application/openmetrics-text"), OPEN_METRICS_0),
            (
                Some("application/openmetrics-text; version=0.0.1"),
                OPEN_METRICS_0,
            ),
            (
                Some("Application/OpenMetrics-Text; charset=utf-8; version=\"1.0.0\""),
                OPEN_METRICS_1,
            ),
            (Some("application/openmetrics-text; version=2"), TEXT_PAGE),
            (Some("text/plain; version=0.0.4"), TEXT_PAGE),
            (Some("text/html"), TEXT_PAGE),
            (Some(""), TEXT_PAGE),
        ] {
            let value = header.map(|header| header.parse().expect("a value"));
            assert_eq!(content_type(value.as_ref()), expected, "{header:?}");
        }
    }

    #[test]
    fn only_real_codings_of_a_page_count() {
        for (values, expected) in [
            (&[][..], Ok(false)),
            (&["gzip"], Ok(true)),
            (&["X-GZip"], Ok(true)),
            (&["gzip", "gzip"], Ok(true)),
            (&["gzip, UTF-8"], Ok(true)),
            (&["identity", " utf-8 ,GZIP"], Ok(true)),
            (&[""], Ok(false)),
            (&[",,"], Ok(false)),
            (&["identity"], Ok(false)),
            (&["none"], Ok(false)),
            (&["chunked"], Ok(false)),
            (&["UTF-8"], Ok(false)),
            (&["text/plain; version=0.0.4"], Ok(false)),
            (&["deflate"], Err("deflate")),
            (&["BR"], Err("br")),
            (&["UTF-8, zstd"], Err("zstd")),
            (&["gzip", "Compress"], Err("compress")),
        ] {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(CONTENT_ENCODING, HeaderValue::from_static(value));
            }
            let expected = expected.map_err(str::to_owned);
            assert_eq!(is_gzip(&headers), expected, "{headers:?}");
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
