//! Defines the exposition formats that pages have, and their content types.

use http::HeaderValue;

pub(super) const OPEN_METRICS: &str = "application/openmetrics-text";
pub(super) const PROTOBUF: &str = "application/vnd.google.protobuf";
/// The content type of a merged page in text.
pub(super) const TEXT_PAGE: &str = "text/plain; version=0.0.4; charset=utf-8";
const OPEN_METRICS_0: &str = "application/openmetrics-text; version=0.0.1; charset=utf-8";
const OPEN_METRICS_1: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The content type of a page in protobuf.
pub(super) const PROTOBUF_PAGE: &str =
    "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited";

/// The stricter text format is the greater one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Format {
    #[default]
    Text,
    OpenMetrics,
    Protobuf,
}

impl Format {
    /// Returns the format of a page with one of the content types above.
    pub(super) fn from_content_type(content_type: &str) -> Self {
        match content_type {
            TEXT_PAGE => Self::Text,
            PROTOBUF_PAGE => Self::Protobuf,
            _ => Self::OpenMetrics,
        }
    }

    /// Returns the name by which scrapes are counted.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::OpenMetrics => "openmetrics",
            Self::Protobuf => "proto",
        }
    }
}

/// Returns the one of the content types above that a page's `Content-Type` stands for.
pub(super) fn content_type(header: Option<&HeaderValue>) -> &'static str {
    let text = header.and_then(|header| header.to_str().ok()).unwrap_or_default();
    if is_protobuf(text) && parameter(text, "encoding").is_some() {
        PROTOBUF_PAGE
    } else if media_type(text) != OPEN_METRICS {
        TEXT_PAGE
    } else if text.contains("1.0.0") {
        OPEN_METRICS_1
    } else if text.contains("0.0.1") || !text.contains("version") {
        OPEN_METRICS_0
    } else {
        TEXT_PAGE
    }
}

/// Returns true for the media type of delimited messages `MetricFamily`, or one that does not say what its messages
/// are.
pub(super) fn is_protobuf(member: &str) -> bool {
    media_type(member) == PROTOBUF
        && matches!(parameter(member, "proto"), None | Some("io.prometheus.client.MetricFamily"))
        && matches!(parameter(member, "encoding"), None | Some("delimited"))
}

/// Returns a parameter of a media type, without its quotes.
pub(super) fn parameter<'m>(member: &'m str, name: &str) -> Option<&'m str> {
    let (_, value) = member
        .split(';')
        .skip(1)
        .filter_map(|parameter| parameter.split_once('='))
        .find(|(found, _)| found.trim().eq_ignore_ascii_case(name))?;
    Some(value.trim().trim_matches('"'))
}

/// Strips the parameters from a media type, or from another member of a header that is a list.
pub(super) fn media_type(member: &str) -> String {
    member.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_what_its_header_says_and_text_otherwise() {
        for (header, expected) in [
            (None, TEXT_PAGE),
            (Some("application/openmetrics-text"), OPEN_METRICS_0),
            (Some("application/openmetrics-text; version=0.0.1"), OPEN_METRICS_0),
            (
                Some("Application/OpenMetrics-Text; charset=utf-8; version=\"1.0.0\""),
                OPEN_METRICS_1,
            ),
            (Some("application/openmetrics-text; version=2"), TEXT_PAGE),
            (Some("text/plain; version=0.0.4"), TEXT_PAGE),
            (Some("text/html"), TEXT_PAGE),
            (Some(""), TEXT_PAGE),
            (Some(PROTOBUF_PAGE), PROTOBUF_PAGE),
            (Some("Application/vnd.google.protobuf;Encoding=\"delimited\""), PROTOBUF_PAGE),
            (Some("application/vnd.google.protobuf"), TEXT_PAGE),
            (Some("application/vnd.google.protobuf; encoding=text"), TEXT_PAGE),
            (Some("application/vnd.google.protobuf; proto=x; encoding=delimited"), TEXT_PAGE),
        ] {
            let value = header.map(|header| header.parse().expect("a value"));
            assert_eq!(content_type(value.as_ref()), expected, "{header:?}");
        }
    }
}
