use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::Acceptor;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::{TLS12, TLS13};
use rustls::{RootCertStore, SupportedProtocolVersion};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server;

use super::super::fake::{Authority, Clients, NAME, server_tls};
use super::*;

type Client = TlsStream<DuplexStream>;
type Server = server::TlsStream<DuplexStream>;

fn client_tls(
    authority: &Authority,
    version: &'static SupportedProtocolVersion,
) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let root = CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap();
    roots.add(root).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_protocol_versions(&[version]).unwrap();
    let mut tls = builder.with_root_certificates(roots).with_no_client_auth();
    tls.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(tls)
}

/// Both sides of a handshake over a pipe that holds `room` bytes.
async fn shaken(
    room: usize,
    version: &'static SupportedProtocolVersion,
) -> (io::Result<Client>, io::Result<Server>) {
    let authority = Authority::new("root");
    let (near, far) = duplex(room);
    let acceptor = TlsAcceptor::from(Arc::new(server_tls(&authority, NAME, Clients::Optional)));
    let name = ServerName::try_from(NAME).unwrap();
    let connecting = TlsStream::connect(client_tls(&authority, version), name, near);
    tokio::join!(connecting, acceptor.accept(far))
}

async fn connected(room: usize, version: &'static SupportedProtocolVersion) -> (Client, Server) {
    let (client, server) = shaken(room, version).await;
    (client.unwrap(), server.unwrap())
}

fn bytes(count: u32) -> Vec<u8> {
    (0..count).map(|n| (n % 251) as u8).collect()
}

/// Reads to the end, into room of ever other sizes.
async fn read_all(from: &mut (impl AsyncRead + Unpin)) -> (Vec<u8>, io::Result<()>) {
    let mut got = Vec::new();
    let mut rooms = [1, 9, 8192, 16_393, 40_000].into_iter().cycle();
    loop {
        let mut piece = vec![0; rooms.next().unwrap()];
        match from.read(&mut piece).await {
            Ok(0) => return (got, Ok(())),
            Ok(read) => got.extend_from_slice(&piece[..read]),
            Err(error) => return (got, Err(error)),
        }
    }
}

#[tokio::test]
async fn every_byte_comes_through_in_both_directions_whatever_the_pieces() {
    for version in [&TLS12, &TLS13] {
        for room in [1_000, 70_000, 1 << 20] {
            let (client, server) = connected(room, version).await;
            let (mut near_read, mut near_write) = tokio::io::split(client);
            let (mut far_read, mut far_write) = tokio::io::split(server);
            let sent = bytes(400_000);
            let near_writing = async {
                for piece in sent.chunks(33_333) {
                    near_write.write_all(piece).await.unwrap();
                }
                near_write.shutdown().await.unwrap();
            };
            let far_writing = async {
                for piece in sent.chunks(12_345) {
                    far_write.write_all(piece).await.unwrap();
                    far_write.flush().await.unwrap();
                }
                far_write.shutdown().await.unwrap();
            };
            let ((), (), near, far) = tokio::join!(
                near_writing,
                far_writing,
                read_all(&mut near_read),
                read_all(&mut far_read)
            );
            for (got, end) in [near, far] {
                assert!(end.is_ok() && got == sent, "{version:?}, {room}: {end:?}");
            }
        }
    }
}

#[tokio::test]
async fn what_was_agreed_can_be_told() {
    let (client, _server) = connected(1_000, &TLS13).await;
    let session = client.session();
    assert_eq!(session.alpn_protocol(), Some(&b"h2"[..]));
    assert_eq!(session.protocol_version(), Some(TLS13.version));
}

#[tokio::test]
async fn keys_may_change_in_between() {
    let (mut client, mut server) = connected(1 << 20, &TLS13).await;
    for round in 0..3 {
        server.get_mut().1.refresh_traffic_keys().unwrap();
        server.write_all(&bytes(50_000)).await.unwrap();
        server.flush().await.unwrap();
        let mut got = vec![0; 50_000];
        client.read_exact(&mut got).await.unwrap();
        assert!(got == bytes(50_000), "round {round}");
        client.write_all(b"thanks").await.unwrap();
        client.flush().await.unwrap();
        let mut thanks = [0; 6];
        server.read_exact(&mut thanks).await.unwrap();
    }
}

#[tokio::test]
async fn slices_that_are_written_together_come_together() {
    let (mut client, mut server) = connected(1 << 20, &TLS13).await;
    assert!(client.is_write_vectored());
    let slices = [IoSlice::new(b"one "), IoSlice::new(b"record")];
    assert_eq!(client.write_vectored(&slices).await.unwrap(), 10);
    client.flush().await.unwrap();
    let mut got = [0; 64];
    let read = server.read(&mut got).await.unwrap();
    assert_eq!(&got[..read], b"one record");
}

#[tokio::test]
async fn an_end_is_told_from_a_cut() {
    for (ends, kind) in [(true, None), (false, Some(io::ErrorKind::UnexpectedEof))] {
        let (mut client, mut server) = connected(1 << 20, &TLS13).await;
        server.write_all(&bytes(30_000)).await.unwrap();
        server.flush().await.unwrap();
        if ends {
            server.shutdown().await.unwrap();
        }
        drop(server);
        let (got, end) = read_all(&mut client).await;
        assert!(got == bytes(30_000));
        assert_eq!(end.err().map(|error| error.kind()), kind);
        // It does not become another one later.
        let again = client.read(&mut [0; 8]).await;
        assert_eq!(again.err().map(|error| error.kind()), kind);
    }
}

#[tokio::test]
async fn garbage_ends_it_and_the_peer_is_told() {
    let (mut client, mut server) = connected(1 << 20, &TLS13).await;
    let (raw, _) = server.get_mut();
    raw.write_all(&[0x17, 3, 3, 0, 40]).await.unwrap();
    raw.write_all(&[7; 40]).await.unwrap();
    let error = client.read(&mut [0; 8]).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    assert_eq!(error.to_string(), "cannot decrypt peer's message");
    let error = client.write(b"more").await.unwrap_err();
    assert_eq!(error.to_string(), "cannot decrypt peer's message");
    let error = server.read(&mut [0; 8]).await.unwrap_err();
    assert_eq!(error.to_string(), "received fatal alert: BadRecordMac");
}

/// Passes on what the server sends, one byte of it changed.
async fn relay_changed(mut from: DuplexStream, mut to: DuplexStream, at: usize) {
    let (mut sent, mut back) = (0, [0; 4096]);
    let mut forth = [0; 4096];
    loop {
        tokio::select! {
            read = from.read(&mut forth) => {
                let bytes = &mut forth[..read.unwrap()];
                if let Some(byte) = at.checked_sub(sent).and_then(|at| bytes.get_mut(at)) {
                    *byte ^= 0x55;
                }
                sent += bytes.len();
                if bytes.is_empty() || to.write_all(bytes).await.is_err() {
                    return;
                }
            }
            read = to.read(&mut back) => {
                let read = read.unwrap();
                if read == 0 || from.write_all(&back[..read]).await.is_err() {
                    return;
                }
            }
        }
    }
}

#[tokio::test]
async fn a_changed_byte_ends_it_wherever_it_is() {
    let authority = Authority::new("root");
    let served = Arc::new(server_tls(&authority, NAME, Clients::Optional));
    for (version, step) in [(&TLS12, 13), (&TLS13, 17)] {
        let config = client_tls(&authority, version);
        for at in (0..4_000).step_by(step) {
            let (near, there) = duplex(1 << 16);
            let (here, far) = duplex(1 << 16);
            let client = async {
                let name = ServerName::try_from(NAME).unwrap();
                let mut client = TlsStream::connect(config.clone(), name, near).await?;
                match read_all(&mut client).await {
                    (got, Ok(())) => Ok(got),
                    (_, Err(error)) => Err(error),
                }
            };
            let server = async {
                let mut server = TlsAcceptor::from(served.clone()).accept(far).await?;
                server.write_all(&bytes(3_000)).await?;
                server.shutdown().await
            };
            let (got, _, ()) = tokio::join!(client, server, relay_changed(here, there, at));
            if let Ok(got) = got {
                assert!(got == bytes(3_000), "{version:?}: byte {at} has an effect");
            }
        }
    }
}

#[tokio::test]
async fn a_handshake_of_many_records_is_taken() {
    let authority = Authority::new("root");
    let mut served = server_tls(&authority, NAME, Clients::Optional);
    // What a peer sends in its certificate message is what it is told to.
    let pair = authority.issue(NAME);
    let leaf = CertificateDer::from_pem_slice(pair.chain.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
    let key = any_supported_type(&key).unwrap();
    let mut chain = vec![leaf];
    chain.extend(
        (0..90)
            .map(|_| authority.issue(NAME).chain)
            .map(|pem| CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()),
    );
    served.cert_resolver = Arc::new(SingleCertAndKey::from(CertifiedKey::new(chain, key)));
    let acceptor = TlsAcceptor::from(Arc::new(served));
    for version in [&TLS12, &TLS13] {
        let (near, far) = duplex(5_000);
        let name = ServerName::try_from(NAME).unwrap();
        let connecting = TlsStream::connect(client_tls(&authority, version), name, near);
        let (client, server) = tokio::join!(connecting, acceptor.accept(far));
        assert_eq!(
            (
                client.err().map(|e| e.to_string()),
                server.err().map(|e| e.to_string())
            ),
            (None, None)
        );
    }
}

#[tokio::test]
async fn a_peer_nobody_vouches_for_is_refused_and_told() {
    let (near, far) = duplex(1 << 20);
    let served = server_tls(&Authority::new("other"), NAME, Clients::Optional);
    let acceptor = TlsAcceptor::from(Arc::new(served));
    let config = client_tls(&Authority::new("root"), &TLS13);
    let connecting = TlsStream::connect(config, ServerName::try_from(NAME).unwrap(), near);
    let (client, server) = tokio::join!(connecting, acceptor.accept(far));
    let error = client.err().unwrap();
    assert_eq!(error.to_string(), "invalid peer certificate: UnknownIssuer");
    let error = server.err().unwrap();
    assert_eq!(error.to_string(), "received fatal alert: UnknownCA");
}

#[tokio::test]
async fn a_peer_that_leaves_or_refuses_during_the_handshake_is_an_error() {
    let config = client_tls(&Authority::new("root"), &TLS13);
    let name = ServerName::try_from(NAME).unwrap();
    let (near, far) = duplex(1 << 20);
    drop(far);
    assert!(
        TlsStream::connect(config.clone(), name.clone(), near)
            .await
            .is_err()
    );
    let (near, mut far) = duplex(1 << 20);
    let leaves = async {
        // Its first message, and nothing in return.
        let mut acceptor = Acceptor::default();
        let mut hello = vec![0; 4096];
        while acceptor.accept().is_ok_and(|accepted| accepted.is_none()) {
            let read = far.read(&mut hello).await.unwrap();
            acceptor.read_tls(&mut &hello[..read]).unwrap();
        }
        drop(far);
    };
    let (client, ()) = tokio::join!(TlsStream::connect(config, name, near), leaves);
    let error = client.err().unwrap();
    assert_eq!(error.to_string(), "it closed the connection");
}

#[tokio::test]
async fn a_peer_that_takes_nothing_is_not_written_to_without_end() {
    let (mut client, _server) = connected(1_000, &TLS13).await;
    let mut written = 0;
    let mut context = Context::from_waker(std::task::Waker::noop());
    let piece = bytes(10_000);
    while let Poll::Ready(taken) = Pin::new(&mut client).poll_write(&mut context, &piece) {
        written += taken.unwrap();
        assert!(written < 10 * MOST_UNSENT, "{written} bytes are taken");
    }
    assert!(client.unsent.len() < MOST_UNSENT + 2 * PIECE);
}

#[tokio::test]
async fn a_connection_at_rest_has_no_buffers() {
    let (mut client, mut server) = connected(1 << 20, &TLS13).await;
    server.write_all(&bytes(300_000)).await.unwrap();
    server.flush().await.unwrap();
    let mut got = vec![0; 7];
    let mut at_once = 0;
    for _ in 0..300_000 / 7 {
        client.read_exact(&mut got).await.unwrap();
        at_once = at_once.max(client.received.len());
    }
    assert!(at_once > 4 * RECORD, "{at_once} bytes are read at once");
    client.write_all(b"thanks").await.unwrap();
    client.flush().await.unwrap();
    let mut last = [0; 300_000 % 7];
    client.read_exact(&mut last).await.unwrap();
    let mut context = Context::from_waker(std::task::Waker::noop());
    let mut nothing = [0; 8];
    let mut nothing = ReadBuf::new(&mut nothing);
    assert!(
        Pin::new(&mut client)
            .poll_read(&mut context, &mut nothing)
            .is_pending()
    );
    let buffers = [&client.received, &client.plain, &client.unsent];
    assert_eq!(buffers.map(|buffer| buffer.capacity()), [0, 0, 0]);
}
