//! Escapes the paths of requests that come from annotations, probes and redirects.
//!
//! Source: RFC 3986, section 3.3.

/// Percent-encodes the characters that a request path must not contain, as Go does.
pub(crate) fn escaped(path: &str) -> String {
    let mut text = String::with_capacity(path.len());
    let mut is_query = false;
    for byte in path.bytes() {
        is_query |= byte == b'?';
        let stays = byte.is_ascii_alphanumeric()
            || b"-._~!$&'()*+,;=:@/?#[]%".contains(&byte)
            || is_query && byte.is_ascii_graphic() && !b"\"<>".contains(&byte);
        if stays {
            text.push(byte.into());
        } else {
            text += &format!("%{byte:02X}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_a_path_must_not_contain_are_escaped() {
        for (path, expected) in [
            ("/a b", "/a%20b"),
            ("/<{\"|^`\\é>", "/%3C%7B%22%7C%5E%60%5C%C3%A9%3E"),
            ("/a%20b/[c]?d={e|f} <#g", "/a%20b/[c]?d={e|f}%20%3C#g"),
            ("-._~!$&'()*+,;=:@/?", "-._~!$&'()*+,;=:@/?"),
        ] {
            assert_eq!(escaped(path), expected);
        }
        let all: String = (0..=255_u8).map(char::from).collect();
        for path in [format!("/{all}"), format!("/?{all}")] {
            let parsed = escaped(&path).parse::<::http::uri::PathAndQuery>();
            assert!(parsed.is_ok(), "{parsed:?}");
        }
    }
}
