//! Reads PEM, and writes it as Envoy reads it.
//!
//! A block is cut at its BEGIN and END, wherever they are: files that were joined without a line feed,
//! indented ones, and lines that end in CR alone are read. Envoy (BoringSSL) reads none of these, and
//! refuses a whole text for one block that it cannot read.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use memchr::memmem;
use rustls::pki_types::pem::{Error, PemObject, SectionKind};
use zeroize::Zeroizing;

const BEGIN: &[u8] = b"-----BEGIN ";
const END: &[u8] = b"-----END ";
const DASHES: &[u8] = b"-----";

/// The length of a line of base64 (RFC 7468, section 2).
const COLUMNS: usize = 64;

/// The longest line that BoringSSL reads as a whole. It may take the last part of a longer one for the end of
/// headers.
const MAX_LINE: usize = 252;

/// The label of a block, and its base64; None without an END.
type Block<'a> = (&'a str, Option<&'a [u8]>);

/// Returns the items of one kind, such as certificates. An error stands for a broken item.
pub(crate) fn items<T: PemObject>(pem: &[u8]) -> impl Iterator<Item = Result<T, Error>> {
    blocks(pem).filter_map(item)
}

pub(crate) fn first<T: PemObject>(pem: &[u8]) -> Result<T, Error> {
    items(pem).next().unwrap_or(Err(Error::NoItemsFound))
}

/// Returns the text unchanged if Envoy can read it. Otherwise rewrites its valid items of one kind.
pub(crate) fn readable<T: PemObject>(pem: Zeroizing<Vec<u8>>) -> Zeroizing<Vec<u8>> {
    if plain_blocks(&pem).is_some() {
        return pem;
    }
    let texts = Vec::from_iter(blocks(&pem).filter_map(|block| {
        let (kind, der) = item::<(SectionKind, Vec<u8>)>(block)?.ok()?;
        let der = Zeroizing::new(der);
        T::from_pem(kind, Vec::new()).map(|_| encode(block.0, &der))
    }));
    Zeroizing::new(Vec::from_iter(texts.iter().map(|text| text.as_bytes())).concat())
}

/// Returns the number of blocks if Envoy can read each of them: BEGIN, END and the base64 have lines of their own.
pub(crate) fn plain_blocks(pem: &[u8]) -> Option<usize> {
    let mut inside = false;
    let mut count = 0;
    let are_plain = pem.split(|byte| *byte == b'\n').all(|line| {
        let text = line.trim_ascii_end();
        let label = text.strip_prefix(if inside { END } else { BEGIN });
        match label.and_then(|label| label.strip_suffix(DASHES)) {
            Some(label) if !label.contains(&b'-') => {
                count += usize::from(inside);
                inside = !inside;
                true
            }
            _ if !inside => memmem::find(text, BEGIN).is_none(),
            _ if text.is_empty() || text.len() % 4 > 0 || line.len() > MAX_LINE => false,
            _ => text.iter().all(|byte| byte.is_ascii_alphanumeric() || b"+/=".contains(byte)),
        }
    });
    if are_plain && !inside { Some(count) } else { None }
}

/// Describes text that is neither a block nor a comment. It is not quoted, because it may be a part of a key.
pub(crate) fn left_over(pem: &[u8]) -> Option<&'static str> {
    let whole = blocks(pem).filter(|(_, base64)| base64.is_some()).count();
    let marks = [BEGIN, END].map(|mark| memmem::find_iter(pem, mark).count());
    match std::str::from_utf8(pem) {
        _ if marks != [whole; 2] => Some("an incomplete PEM block, expected complete ones"),
        Ok(text) if !text.contains(|c: char| c.is_control() && !c.is_whitespace()) => None,
        _ => Some("bytes that are not text, expected PEM and comments"),
    }
}

/// Writes a block. The capacity is enough from the start: a text that grows leaves copies of the key behind.
pub(crate) fn encode(label: &str, der: &[u8]) -> Zeroizing<String> {
    let base64 = Zeroizing::new(BASE64_STANDARD.encode(der));
    let capacity = base64.len() + base64.len().div_ceil(COLUMNS) + 2 * label.len() + 40;
    let mut pem = Zeroizing::new(String::with_capacity(capacity));
    pem.extend(["-----BEGIN ", label, "-----\n"]);
    let mut rest = base64.as_str();
    while !rest.is_empty() {
        let (line, more) = rest.split_at(rest.len().min(COLUMNS));
        pem.extend([line, "\n"]);
        rest = more;
    }
    pem.extend(["-----END ", label, "-----\n"]);
    pem
}

fn blocks(pem: &[u8]) -> impl Iterator<Item = Block<'_>> {
    memmem::find_iter(pem, BEGIN).filter_map(|start| {
        let text = &pem[start + BEGIN.len()..];
        let next = memmem::find(text, BEGIN);
        let (label, content) = cut(&text[..next.unwrap_or(text.len())], DASHES)?;
        let base64 = match cut(content, &[END, label].concat()) {
            Some((base64, rest)) if rest.starts_with(DASHES) => Some(base64),
            // An END may share its last dashes with the next BEGIN.
            Some((base64, [])) if next.is_some() => Some(base64),
            // A BEGIN without content does not count as a broken item.
            _ if content.trim_ascii().is_empty() => return None,
            _ => None,
        };
        Some((std::str::from_utf8(label).ok()?, base64))
    })
}

/// Decodes a block. Returns None if it is of another kind.
fn item<T: PemObject>((label, base64): Block<'_>) -> Option<Result<T, Error>> {
    let label = label.as_bytes();
    T::from_pem(SectionKind::try_from(label).ok()?, Vec::new())?;
    let Some(base64) = base64 else {
        let end_marker = label.to_vec();
        return Some(Err(Error::MissingSectionEnd { end_marker }));
    };
    let text = [BEGIN, label, b"-----\n", base64, b"\n", END, label, DASHES];
    Some(T::from_pem_slice(&Zeroizing::new(text.concat())))
}

/// Splits a text at the first occurrence of `part`.
fn cut<'a>(text: &'a [u8], part: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let start = memmem::find(text, part)?;
    Some((&text[..start], &text[start + part.len()..]))
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};

    use super::*;

    fn certificate() -> String {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().self_signed(&key).unwrap();
        encode("CERTIFICATE", certificate.der()).to_string()
    }

    fn count(pem: &str) -> [usize; 2] {
        let items = Vec::from_iter(items::<CertificateDer>(pem.as_bytes()));
        let good = items.iter().filter(|item| item.is_ok()).count();
        [good, items.len() - good]
    }

    fn wrapped(pem: &str, columns: usize) -> String {
        let lines: Vec<_> = pem.lines().collect();
        let [begin, base64 @ .., end] = &lines[..] else {
            panic!("no block");
        };
        let base64 = base64.concat();
        let lines: Vec<_> = base64.as_bytes().chunks(columns).collect();
        let base64 = String::from_utf8(lines.join(&b'\n')).unwrap();
        format!("{begin}\n{base64}\n{end}\n")
    }

    /// The last column is true if Envoy 1.40 reads the form itself. The integration test
    /// `envoy_takes_certificates_keys_and_roots_in_every_form_that_is_read` serves such forms to Envoy.
    #[test]
    fn a_block_is_read_anywhere_and_plain_if_envoy_reads_it() {
        let (a, b, key) = (certificate(), certificate(), KeyPair::generate().unwrap());
        let (begin, end) = ("-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----");
        let indented: String = a.lines().map(|line| format!("  {line}\n")).collect();
        for (form, pem, expected, is_plain) in [
            ("two", format!("{a}{b}"), 2, true),
            ("joined", format!("{}{b}", a.trim()), 2, false),
            ("sharing dashes", format!("{}{b}", &a[..a.len() - 6]), 2, false),
            ("CR", format!("{a}{b}").replace('\n', "\r"), 2, false),
            ("CR CR LF", format!("{a}{b}").replace('\n', "\r\r\n"), 2, true),
            ("CRLF", format!("{a}{b}").replace('\n', "\r\n"), 2, true),
            ("byte order mark", format!("\u{feff}{a}{b}"), 2, false),
            ("byte order mark and comment", format!("\u{feff}# x\n{a}{b}"), 2, true),
            ("blank before BEGIN", format!(" {a}{b}"), 2, false),
            ("tab before BEGIN", format!("{a}\t{b}"), 2, false),
            ("text before BEGIN", format!("a: {a}{b}"), 2, false),
            ("indented", indented, 1, false),
            ("blank before END", a.replace(end, &format!(" {end}")), 1, false),
            ("text after END", a.replace(end, &format!("{end} x")), 1, false),
            ("blanks after lines", a.replace('\n', " \t\n"), 1, true),
            ("an empty line first", a.replace(begin, &format!("{begin}\n")), 1, false),
            ("an empty line", format!("{}\n\n{}", &a[..92], &a[93..]), 1, false),
            ("no last line feed", format!("{a}{}", b.trim()), 2, true),
            ("one line", a.replace('\n', " "), 1, false),
            ("76 columns", wrapped(&a, 76), 1, true),
            ("253 columns", wrapped(&a, 253), 1, false),
            ("long lines", wrapped(&a, 2000), 1, false),
            ("no padding", a.replace('=', ""), 1, a.replace('=', "") == a),
            ("comments", format!("subject=/CN=é\n{a}Bag Attributes\n    x: <>\n\n{b}"), 2, true),
            ("a key", format!("{a}{}{b}", key.serialize_pem()), 2, true),
            ("a key, joined", format!("{}{b}", key.serialize_pem().trim()), 1, false),
            (
                "parameters",
                format!(
                    "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n{a}"
                ),
                1,
                true,
            ),
            ("none", String::new(), 0, true),
            ("no PEM", "hello".to_owned(), 0, true),
        ] {
            assert_eq!(count(&pem), [expected, 0], "{form}");
            let rewritten = readable::<CertificateDer>(Zeroizing::new(pem.clone().into_bytes()));
            let text = std::str::from_utf8(&rewritten).unwrap();
            assert_eq!(text == pem, is_plain, "{form}: {text}");
            assert_eq!(count(text), [expected, 0], "{form}");
            assert_eq!(plain_blocks(pem.as_bytes()).is_some(), is_plain, "{form}");
            assert!(is_plain || plain_blocks(&rewritten) == Some(expected), "{form}");
            assert_eq!(left_over(pem.as_bytes()), None, "{form}");
        }
    }

    #[test]
    fn a_broken_pem_block_is_named_and_the_others_are_read() {
        let (a, b) = (certificate(), certificate());
        let (begin, end) = ("-----BEGIN CERTIFICATE-----\n", "-----END CERTIFICATE-----\n");
        let part = Some("an incomplete PEM block, expected complete ones");
        let binary = Some("bytes that are not text, expected PEM and comments");
        for (pem, expected, left) in [
            (format!("{a}{begin}MIIB\n"), [1, 1], part),
            (a[..a.len() - 3].to_owned(), [0, 1], part),
            (format!("{begin}MIIB\n{a}"), [1, 1], part),
            (format!("{begin}{a}"), [1, 0], part),
            (format!("{a}{begin}"), [1, 0], part),
            (format!("{end}{a}"), [1, 0], part),
            (format!("{}{end}{b}", &a[20..]), [1, 0], part),
            (format!("{a}{begin}!!\n{end}{b}"), [2, 1], None),
            (format!("{a}{begin}{end}{b}"), [3, 0], None),
            (format!("{a}-----BEGIN X-----\n!!\n{b}"), [2, 0], part),
            (format!("-----BEGIN X-----\n!!\n-----END Y-----\n{b}"), [1, 0], part),
            (format!("-----BEGIN CERTIFICATE----\nMIIB\n{end}{b}"), [1, 0], part),
            (format!("{a}\0"), [1, 0], binary),
            (format!("\u{1b}[0m{a}"), [1, 0], binary),
        ] {
            assert_eq!(count(&pem), expected, "{pem}");
            assert_eq!(left_over(pem.as_bytes()), left, "{pem}");
        }
        let latin = [b"\xff\xfe", a.as_bytes()].concat();
        assert_eq!(left_over(&latin), binary);
        assert_eq!(items::<CertificateDer>(&latin).count(), 1);
    }

    #[test]
    fn a_key_is_rewritten_under_its_label() {
        let key = KeyPair::generate().unwrap().serialize_pem();
        let certificate = certificate();
        for pem in [format!("{}{key}", certificate.trim()), key.replace('\n', "\r")] {
            assert_eq!(
                *readable::<PrivateKeyDer>(Zeroizing::new(pem.into_bytes())),
                key.replace('\r', "").as_bytes()
            );
        }
        assert_eq!(
            *readable::<PrivateKeyDer>(Zeroizing::new(key.clone().into_bytes())),
            key.as_bytes()
        );
    }
}
