use std::convert::Infallible;

use futures_util::FutureExt;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use super::*;

/// Recordings of clients that open two discovery streams on `unix:///etc/istio/proxy/XDS`, each with two messages. Each
/// recording has the name of the client, the authority that [`Reader`] outputs, and the bytes that the client sends.
const RECORDED: [(&str, &str, &[u8]); 3] = [
    ("grpcio 1.85.1", "localhost", include_bytes!("recorded/grpcio")),
    ("grpc-go 1.75.0", "localhost", include_bytes!("recorded/grpc-go")),
    ("grpc-java 1.75.0", "localhost", include_bytes!("recorded/grpc-java")),
];

/// A reader of bytes that returns at most this number of them at once.
struct Chunks<'a>(&'a [u8], usize);

impl AsyncRead for Chunks<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let size = self.1.min(self.0.len()).min(buffer.remaining());
        let (chunk, rest) = self.0.split_at(size);
        buffer.put_slice(chunk);
        self.0 = rest;
        Poll::Ready(Ok(()))
    }
}

/// Reads `bytes` through [`Reader`], in chunks of this size. Returns the output, and its length or an error.
fn read_through(bytes: &[u8], chunk: usize) -> (Vec<u8>, Result<usize, String>) {
    let mut output = Vec::new();
    let mut reader = Reader::new(Chunks(bytes, chunk));
    let read = reader.read_to_end(&mut output).now_or_never();
    let end = read.expect("memory does not wait");
    (output, end.map_err(|error| error.to_string()))
}

fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
}

fn connection(frames: &[Vec<u8>]) -> Vec<u8> {
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frames.concat().as_slice()].concat()
}

/// Encodes an authority as a literal that is added to the dynamic table of headers.
fn authority(value: &str) -> Vec<u8> {
    [&[0x41, value.len() as u8], value.as_bytes()].concat()
}

/// Decodes the header blocks in the output of [`Reader`]. Returns the flags and the fields of each, as text.
fn header_blocks(output: &[u8]) -> Vec<(u8, String)> {
    let mut decoder = Decoder::new();
    let mut rest = &output[PREFACE..];
    let mut blocks = Vec::new();
    while let Some((head, after)) = rest.split_first_chunk::<HEAD>() {
        let size = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let payload = &after[..size];
        rest = &after[size..];
        if head[3] == HEADERS {
            let fields = decoder.decode(payload).unwrap();
            let text = |part: Vec<u8>| String::from_utf8(part).unwrap();
            let fields =
                fields.into_iter().map(|(name, value)| [text(name), text(value)].join("="));
            blocks.push((head[4], fields.collect::<Vec<_>>().join(" ")));
        }
    }
    blocks
}

/// Returns the requests that a server of hyper gets through [`Reader`]: authority, path, and the body up to the second
/// message.
async fn requests(bytes: &[u8], chunk: usize) -> Vec<(String, String, Vec<u8>)> {
    let (mut client, server) = tokio::io::duplex(1 << 16);
    let (read, write) = tokio::io::split(server);
    let (sender, mut receiver) = mpsc::unbounded_channel();
    let service = service_fn(move |request: http::Request<Incoming>| {
        let sender = sender.clone();
        async move {
            let (head, mut body) = request.into_parts();
            let mut bytes = Vec::new();
            while !bytes.ends_with(b"second") {
                let frame = body.frame().await.unwrap().unwrap();
                bytes.extend_from_slice(&frame.into_data().unwrap());
            }
            let authority = head.uri.authority().unwrap().to_string();
            let _ = sender.send((authority, head.uri.path().to_owned(), bytes));
            Ok::<_, Infallible>(http::Response::new(Full::<&[u8]>::default()))
        }
    });
    let io = TokioIo::new(tokio::io::join(Reader::new(read), write));
    let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    let serving = server.serve_connection(io, service);
    let sending = async {
        for chunk in bytes.chunks(chunk) {
            client.write_all(chunk).await.unwrap();
        }
        let two = [receiver.recv().await, receiver.recv().await];
        two.map(|request| request.expect("a request"))
    };
    tokio::select! {
        ended = serving => panic!("the connection ended: {ended:?}"),
        requests = sending => requests.into(),
    }
}

#[tokio::test]
async fn requests_of_every_client_arrive_with_an_authority_in_any_chunks() {
    for (client, authority, bytes) in RECORDED {
        for chunk in [1, 10, 100, bytes.len()] {
            let mut requests = requests(bytes, chunk).await;
            requests.sort();
            let service = "/envoy.service.discovery.v3.AggregatedDiscoveryService";
            let expected = ["Delta", "Stream"].map(|method| {
                let path = format!("{service}/{method}AggregatedResources");
                let body = b"\0\0\0\0\x05first\0\0\0\0\x06second".to_vec();
                (authority.to_owned(), path, body)
            });
            assert_eq!(requests, expected, "{client}, {chunk} bytes at a time");
        }
    }
}

#[test]
fn requests_with_a_valid_or_no_authority_pass_unchanged() {
    let bad = frame(HEADERS, END_HEADERS, 3, &authority("a/path"));
    let recorded = RECORDED[1].2.to_vec();
    let mut cases = vec![recorded];
    for payload in [authority("localhost"), authority("[::1]:80"), vec![0x83]] {
        let first = frame(HEADERS, END_HEADERS, 1, &payload);
        cases.push(connection(&[first, bad.clone()]));
    }
    // The reader passes blocks that it cannot decode unchanged, because h2 refuses them.
    for first in [
        frame(HEADERS, END_HEADERS, 1, &[0xff]),
        frame(HEADERS, END_HEADERS | PADDED, 1, &[9, 0x83]),
        frame(HEADERS, END_HEADERS | PRIORITY, 1, &[0; 4]),
        // Sets the size of the dynamic table to 4097 bytes, which exceeds the default limit of 4096.
        frame(HEADERS, END_HEADERS, 1, &[0x3f, 0xe2, 0x1f, 0x83]),
        [frame(HEADERS, 0, 1, &[0x83]), frame(0, 0, 1, &[])].concat(),
        [frame(HEADERS, 0, 1, &[0x83]), frame(CONTINUATION, 0, 3, &[])].concat(),
        frame(HEADERS, END_HEADERS, 1, &[0x83; MAX_BLOCK]),
        // Small when encoded, but larger than `MAX_BLOCK` when decoded.
        frame(HEADERS, END_HEADERS, 1, &[0x83; MAX_BLOCK / 32]),
    ] {
        cases.push(connection(&[first, bad.clone()]));
    }
    cases.push(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec());
    for bytes in cases {
        for chunk in [1, bytes.len()] {
            assert!(read_through(&bytes, chunk) == (bytes.clone(), Ok(bytes.len())), "{bytes:?}");
        }
    }
}

#[test]
fn header_blocks_are_replaced_once_an_authority_is_not_valid() {
    // The method POST, and an authority that becomes entry 62 of the dynamic table. 0xbe refers to this entry.
    let path = [&[0x83][..], &authority("a%2Fpath")].concat();
    let padded = [&[2, 0, 0, 0, 0, 7][..], &path, &[0, 0]].concat();
    let data = frame(0, 0, 1, b"data");
    let continued = |stream, payload: &[u8]| {
        let (one, two) = payload.split_at(3);
        let first = frame(HEADERS, END_STREAM, stream, one);
        [first, frame(CONTINUATION, END_HEADERS, stream, two)].concat()
    };
    let replaced = ":method=POST :authority=localhost";
    for (first, flags) in [
        (frame(HEADERS, END_HEADERS, 1, &path), END_HEADERS),
        (frame(HEADERS, END_HEADERS | PADDED | PRIORITY, 1, &padded), END_HEADERS),
        (continued(1, &path), END_HEADERS | END_STREAM),
    ] {
        let frames = [
            frame(4, 0, 0, &[]),
            first,
            data.clone(),
            frame(HEADERS, END_HEADERS, 3, &[0x83, 0xbe]),
            // Sets the size of the dynamic table to zero and then to 4096 bytes.
            frame(HEADERS, END_HEADERS, 5, &[&[0x20, 0x3f, 0xe1, 0x1f][..], &path].concat()),
            frame(HEADERS, END_HEADERS, 7, &[0xbe, 0xbe]),
            frame(HEADERS, END_HEADERS, 9, &authority("valid")),
            frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\0\x01x\x01y"),
        ];
        let bytes = connection(&frames);
        for chunk in [1, bytes.len()] {
            let (output, end) = read_through(&bytes, chunk);
            assert_eq!(end, Ok(output.len()));
            let expected = [
                (flags, replaced),
                (END_HEADERS, replaced),
                (END_HEADERS, replaced),
                // The client has sent two authorities; h2 refuses them.
                (END_HEADERS, ":authority=localhost :authority=localhost"),
                (END_HEADERS, ":authority=valid"),
                (END_HEADERS | END_STREAM, "x=y"),
            ];
            let expected = expected.map(|(flags, fields)| (flags, fields.to_owned()));
            assert_eq!(header_blocks(&output), expected);
            assert!(output.windows(data.len()).any(|part| part == data), "no data");
        }
    }
}

#[test]
fn a_long_header_value_is_complete_after_a_replacement() {
    let long = "v".repeat(16_000);
    let mut payload = authority("a/path");
    payload.extend_from_slice(b"\0\x01x");
    let mut value = BytesMut::new();
    put_string(long.as_bytes(), &mut value);
    payload.extend_from_slice(&value);
    let bytes = connection(&[frame(HEADERS, END_HEADERS, 1, &payload)]);
    let (output, _) = read_through(&bytes, bytes.len());
    let expected = format!(":authority=localhost x={long}");
    assert_eq!(header_blocks(&output), [(END_HEADERS, expected)]);
}

#[test]
fn a_malformed_header_block_after_a_replacement_ends_the_connection() {
    let bad = frame(HEADERS, END_HEADERS, 1, &authority("a/path"));
    for (next, problem) in [
        (frame(HEADERS, END_HEADERS, 3, &[0xff]), "cannot be decoded"),
        (frame(HEADERS, END_HEADERS | PADDED, 3, &[9, 0x83]), "shorter than their padding"),
        (
            [frame(HEADERS, 0, 3, &[0x83]), frame(0, 0, 3, &[])].concat(),
            "a frame of type 0 within a header block",
        ),
        (frame(HEADERS, END_HEADERS, 3, &[0x83; MAX_BLOCK]), "a header block of more than"),
        (frame(HEADERS, END_HEADERS, 3, &[0x83; 512]), "bytes of headers, expected 16384"),
    ] {
        let bytes = connection(&[bad.clone(), next]);
        let end = read_through(&bytes, bytes.len()).1.unwrap_err();
        assert!(end.contains(problem), "{end}");
    }
}

/// [`Decoder`] would build the table of the code for each coded string.
#[test]
fn no_huffman_coded_string_reaches_the_decoder() {
    // "a" is 00011, filled up with ones.
    for (coded, plain) in
        [(&[0x01, 0x80][..], &[0x01, 0x00][..]), (&[0x01, 0x81, 0x1f], b"\x01\x01a")]
    {
        let found = without_huffman(&mut HuffmanDecoder::new(), &coded.repeat(8000));
        assert_eq!(found.expect("a valid block"), plain.repeat(8000));
    }
}

/// Generates connections with arbitrary frames. Many of them are header blocks that can be decoded.
fn frames() -> impl Strategy<Value = Vec<u8>> {
    let literals = prop::collection::vec(any::<u8>(), 0..40)
        .prop_map(|value| [&[0x41, value.len() as u8][..], &value].concat());
    let payload = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..60),
        prop::collection::vec(literals, 0..4).prop_map(|all| all.concat()),
    ];
    let kind = prop_oneof![Just(HEADERS), Just(CONTINUATION), 0..12_u8];
    let flags = prop_oneof![Just(END_HEADERS), any::<u8>()];
    let frame = (kind, flags, 0..4_u8, payload)
        .prop_map(|(kind, flags, stream, payload)| frame(kind, flags, stream, &payload));
    prop::collection::vec(frame, 0..20).prop_map(|frames| connection(&frames))
}

proptest! {
    // Each reader builds a decoding table, which takes long without optimization.
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_frames_pass_or_end_the_connection_in_any_chunks(
        bytes in prop_oneof![
            frames(),
            (0..RECORDED.len(), any::<prop::sample::Index>(), any::<u8>()).prop_map(
                |(client, place, byte)| {
                    let mut bytes = RECORDED[client].2.to_vec();
                    *place.get_mut(&mut bytes) = byte;
                    bytes
                },
            ),
        ],
        chunk in 1..100_usize,
    ) {
        let (whole, end) = read_through(&bytes, bytes.len());
        // A reference of one byte to the header table may become a complete field. The fields have at most 64 bytes.
        prop_assert!(whole.len() <= bytes.len() * 64);
        let (output, same_end) = read_through(&bytes, chunk);
        prop_assert_eq!(&end, &same_end);
        if end.is_ok() {
            prop_assert_eq!(whole, output);
        }
    }
}
