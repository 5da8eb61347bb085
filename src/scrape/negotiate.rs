//! Chooses headers and query of the requests to Envoy and to the application, and reads the codings of pages.
//!
//! The members of the scraper's `Accept` that are for text, OpenMetrics or delimited protobuf are passed on unchanged.

use http::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue};
use percent_encoding::percent_decode_str;

use super::format::{Format, OPEN_METRICS, is_protobuf, media_type, parameter};

/// The scraper's timeout, in seconds.
pub(super) const TIMEOUT_HEADER: HeaderName =
    HeaderName::from_static("x-prometheus-scrape-timeout-seconds");

/// The ids of the agents that a scrape has passed. Each agent adds its own.
pub(super) const SCRAPED_BY_HEADER: HeaderName =
    HeaderName::from_static("x-istio-agent-scraped-by");

const TEXT: &str = "text/plain;version=0.0.4";
/// The replacement of `*/*`, which has the lowest weight of the members that scrapers send.
const ANY: &str = "text/plain;version=0.0.4;q=0.1";

/// Makes the headers of the agent's request to a source. Only these headers of the scraper's request are passed on:
/// others, such as credentials, are for the agent alone. `strictest` is the strictest format that the source can
/// write.
pub(super) fn source_headers(
    strictest: Format,
    headers: &HeaderMap,
    id: &HeaderValue,
) -> HeaderMap {
    let mut passed = HeaderMap::new();
    for name in [USER_AGENT, TIMEOUT_HEADER] {
        if let Some(value) = headers.get(&name) {
            passed.insert(name, value.clone());
        }
    }
    // Two agents that scrape each other are a loop, too.
    for agent in headers.get_all(SCRAPED_BY_HEADER).iter().chain([id]) {
        passed.append(SCRAPED_BY_HEADER, agent.clone());
    }
    if let Ok(accept) = HeaderValue::from_str(&accept_header(strictest, headers)) {
        passed.insert(ACCEPT, accept);
    }
    passed.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    passed
}

/// Returns the value of `Accept`: the scraper's members for formats that the source can write and the agent can
/// join, or text if there is none.
fn accept_header(strictest: Format, headers: &HeaderMap) -> String {
    let is_strict = strictest == Format::OpenMetrics;
    let passed = list(headers, ACCEPT).filter_map(|member| match &*media_type(member) {
        "text/*" | "text/plain" => Some(member),
        "*" | "*/*" => Some(ANY),
        OPEN_METRICS if is_strict => Some(member),
        "application/*" if is_strict => Some("application/openmetrics-text;version=0.0.1"),
        _ if is_protobuf(member) => Some(member),
        _ => None,
    });
    let passed = passed.collect::<Vec<_>>().join(",");
    if passed.is_empty() { TEXT.to_owned() } else { passed }
}

/// Returns true if the scraper reads protobuf.
pub(super) fn accepts_protobuf(headers: &HeaderMap) -> bool {
    list(headers, ACCEPT).any(|member| is_protobuf(member) && weight(member) > 0.0)
}

/// Returns true if Envoy answers in protobuf: the scraper reads it, and no text has a higher weight.
fn prefers_protobuf(headers: &HeaderMap) -> bool {
    let mut protobuf = 0.0f32;
    let mut text = 0.0f32;
    for member in list(headers, ACCEPT) {
        if is_protobuf(member) {
            protobuf = protobuf.max(weight(member));
        } else if media_type(member).starts_with("text/") {
            text = text.max(weight(member));
        }
    }
    protobuf > 0.0 && protobuf >= text
}

/// Returns the weight of a member of `Accept`.
fn weight(member: &str) -> f32 {
    parameter(member, "q").and_then(|weight| weight.parse().ok()).unwrap_or(1.0)
}

/// Returns the scraper's query for Envoy, with its question mark. Leaves out the member that requests native
/// histograms if Envoy answers in text: it would answer 400, because it has them in protobuf only.
pub(super) fn envoy_query(query: &str, headers: &HeaderMap) -> String {
    const NATIVE: &str = "histogram_buckets=prometheusnative";
    let mut forwarded: Vec<_> = query.split('&').collect();
    if !prefers_protobuf(headers) {
        forwarded.retain(|member| percent_decode_str(member).ne(NATIVE.bytes()));
    }
    format!("?{}", forwarded.join("&"))
}

pub(super) fn accepts_gzip(headers: &HeaderMap) -> bool {
    list(headers, ACCEPT_ENCODING)
        .any(|member| media_type(member) == "gzip" && !member.ends_with("q=0"))
}

/// The coding of a page.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Coding {
    Plain,
    Gzip,
    /// A coding that the agent cannot decode.
    Other(String),
}

/// Reads the coding of a page. Other words are ignored, because some servers name media types and character sets in
/// this header.
pub(super) fn coding(headers: &HeaderMap) -> Coding {
    let mut found = Coding::Plain;
    for coding in list(headers, CONTENT_ENCODING).map(media_type) {
        match &*coding {
            "gzip" | "x-gzip" => found = Coding::Gzip,
            "br" | "compress" | "deflate" | "x-compress" | "zstd" => return Coding::Other(coding),
            _ => {}
        }
    }
    found
}

/// Lists the members of a header.
fn list(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &str> {
    headers
        .get_all(name)
        .into_iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|text| text.split(','))
        .map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: HeaderName, value: Option<&str>) -> HeaderMap {
        let value = value.map(|value| (name, value.parse().expect("a value")));
        value.into_iter().collect()
    }

    #[test]
    fn envoy_is_not_asked_for_histograms_that_text_does_not_have() {
        for (query, expected) in [
            ("usedonly&filter=a%20b", "?usedonly&filter=a%20b"),
            ("histogram_buckets=prometheusnative", "?"),
            ("a&histogram%5fbuckets=prometheusnativ%65&b=c", "?a&b=c"),
            ("histogram_buckets=summary&x", "?histogram_buckets=summary&x"),
            ("x=histogram_buckets=prometheusnative", "?x=histogram_buckets=prometheusnative"),
        ] {
            assert_eq!(envoy_query(query, &HeaderMap::new()), expected);
        }
        let protobuf = "application/vnd.google.protobuf;encoding=delimited";
        for (accept, expected) in [
            (protobuf.to_owned(), "?histogram_buckets=prometheusnative"),
            (format!("{protobuf};q=0.5,text/plain;q=0.5"), "?histogram_buckets=prometheusnative"),
            (format!("{protobuf};q=0.4,text/plain;q=0.5"), "?"),
            (format!("{protobuf};q=0"), "?"),
            ("application/vnd.google.protobuf;encoding=text".to_owned(), "?"),
        ] {
            let headers = headers(ACCEPT, Some(&accept));
            assert_eq!(envoy_query("histogram_buckets=prometheusnative", &headers), expected);
        }
    }

    #[test]
    fn a_source_is_asked_only_for_formats_that_can_be_joined() {
        const PROTOBUF: &str = "application/vnd.google.protobuf;encoding=delimited;q=0.6";
        const OM: &str = "application/openmetrics-text";
        for (accept, envoy, application) in [
            (None, TEXT, TEXT),
            (Some(""), TEXT, TEXT),
            (Some(";;,"), TEXT, TEXT),
            (Some("*/*"), ANY, ANY),
            (Some("*"), ANY, ANY),
            (Some("application/*"), TEXT, "application/openmetrics-text;version=0.0.1"),
            (Some("application/vnd.google.protobuf;proto=x;q=0.9"), TEXT, TEXT),
            (Some("application/vnd.google.protobuf;encoding=compact-text"), TEXT, TEXT),
            (Some(PROTOBUF), PROTOBUF, PROTOBUF),
            (Some("Text/*"), "Text/*", "Text/*"),
            (
                Some(
                    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                     application/vnd.google.protobuf;proto=x;q=0.55,text/plain;version=0.0.4;q=0.4,*/*;q=0.2",
                ),
                "text/plain;version=0.0.4;q=0.4,text/plain;version=0.0.4;q=0.1",
                "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                 text/plain;version=0.0.4;q=0.4,text/plain;version=0.0.4;q=0.1",
            ),
            (Some(OM), TEXT, OM),
        ] {
            let (headers, id) = (headers(ACCEPT, accept), HeaderValue::from(1));
            for (strictest, expected) in [(Format::Text, envoy), (Format::OpenMetrics, application)]
            {
                let passed = source_headers(strictest, &headers, &id);
                assert_eq!(passed[ACCEPT], expected, "{accept:?}");
            }
        }
    }

    #[test]
    fn only_known_content_encodings_of_a_page_are_considered() {
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
            let expected = match expected {
                Ok(false) => Coding::Plain,
                Ok(true) => Coding::Gzip,
                Err(other) => Coding::Other(str::to_owned(other)),
            };
            assert_eq!(coding(&headers), expected, "{headers:?}");
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
            assert_eq!(accepts_gzip(&headers), expected, "{accept:?}");
        }
    }
}
