//! The page encoded piece by piece on its way to the scraper.
//!
//! Gzip is one stream. What its encoder needs is there only while its page is on its way.
//!
//! Does not decide which encoding it is.

use std::io::{self, Write};

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;

use super::negotiate::Encoding;

pub(super) enum Encoder {
    Identity,
    Gzip(Option<GzEncoder<Vec<u8>>>),
}

impl Encoder {
    pub(super) fn new(encoding: Encoding) -> Self {
        match encoding {
            Encoding::Identity => Self::Identity,
            Encoding::Gzip => Self::Gzip(Some(GzEncoder::new(Vec::new(), Compression::fast()))),
        }
    }

    /// What of the encoded page is ready; it may be empty.
    pub(super) fn piece(&mut self, data: Bytes) -> io::Result<Bytes> {
        match self {
            Self::Identity => Ok(data),
            Self::Gzip(None) => Ok(Bytes::new()),
            Self::Gzip(Some(encoder)) => {
                encoder.write_all(&data)?;
                Ok(std::mem::take(encoder.get_mut()).into())
            }
        }
    }

    pub(super) fn finish(&mut self) -> io::Result<Bytes> {
        match self {
            Self::Gzip(encoder) => match encoder.take() {
                Some(encoder) => Ok(encoder.finish()?.into()),
                None => Ok(Bytes::new()),
            },
            Self::Identity => Ok(Bytes::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn encoded(encoding: Encoding, pieces: &[&'static [u8]]) -> Vec<u8> {
        let mut encoder = Encoder::new(encoding);
        let mut out = Vec::new();
        for piece in pieces {
            let piece = Bytes::from_static(piece);
            out.extend_from_slice(&encoder.piece(piece).expect("encoded"));
        }
        out.extend_from_slice(&encoder.finish().expect("finished"));
        out
    }

    #[test]
    fn pieces_come_out_as_they_went_in() {
        let pieces: [&[u8]; 3] = [b"a 1\n", &[b'x'; 100_000], b"b 2\n"];
        let whole = pieces.concat();
        assert_eq!(encoded(Encoding::Identity, &pieces), whole);
        let gzip = encoded(Encoding::Gzip, &pieces);
        let mut read = Vec::new();
        flate2::read::GzDecoder::new(&gzip[..])
            .read_to_end(&mut read)
            .expect("gzip");
        assert!(read == whole && gzip.len() < 1000);
    }
}
