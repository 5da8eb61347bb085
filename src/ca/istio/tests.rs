use std::time::Duration;

use tokio::net::TcpListener;
use tonic::Code;

use super::IstioCa;
use crate::ca::{Ca, SignError};
use crate::istiod::fake::{self, Answer, Authority, Clients, ENDLESS, Fake, Files, plaintext, run};
use crate::istiod::{Body, Istiod, Security, tls};

/// The number of bytes that istiod may send on a stream before they are read.
const WINDOW: usize = 2 << 20;

const DAY: Duration = Duration::from_secs(24 * 3600);

fn ca(istiod: &Istiod, deadline: Duration) -> IstioCa {
    IstioCa::new(istiod.clone(), String::new(), deadline)
}

fn found(result: Result<Vec<String>, SignError>) -> (Code, String) {
    let error = result.unwrap_err();
    (error.code, error.message)
}

#[tokio::test]
async fn sends_the_csr_and_returns_the_chain_unchanged() {
    let fake = Fake::start(None).await;
    let (istiod, _tasks) = run(plaintext(fake.address));
    fake.answers(vec![Answer::Chain(vec!["leaf", "between", "roots"]); 2]);
    for signer in ["", "example.com/signer"] {
        let ca = IstioCa::new(istiod.clone(), signer.to_owned(), DAY);
        let chain = ca.sign("csr", DAY).await.unwrap();
        assert_eq!(chain, ["leaf", "between", "roots"]);
        let request = fake.seen().signing.pop().unwrap();
        assert_eq!(request.csr, "csr");
        assert_eq!(request.validity_duration, 86_400);
        let fields = request.metadata.unwrap().fields;
        let value = prost_types::value::Kind::StringValue(signer.to_owned());
        assert_eq!(fields["CertSigner"].kind, Some(value));
        assert_eq!(fields.len(), 1);
    }
    let seen = fake.seen();
    assert_eq!(seen.connections.len(), 1);
    let path = "/istio.v1.auth.IstioCertificateService/CreateCertificate";
    assert_eq!(seen.requests[0].uri.path(), path);
    assert!(seen.requests[0].headers.contains_key("grpc-timeout"));
}

#[tokio::test]
async fn a_refusal_keeps_its_code_and_message_and_the_connection_stays_open() {
    let fake = Fake::start(None).await;
    let (istiod, _tasks) = run(plaintext(fake.address));
    let ca = ca(&istiod, DAY);
    for code in 1..=16 {
        let code = Code::from(code);
        fake.answers([Answer::Refusal(code, "CSR signing error (why)")]);
        let expected = (code, "CSR signing error (why)".to_owned());
        assert_eq!(found(ca.sign("csr", DAY).await), expected);
    }
    assert_eq!(fake.seen().connections.len(), 1);
}

/// OUT_OF_RANGE does not make the agent switch the type of its key.
#[tokio::test]
async fn an_answer_that_is_too_large_is_out_of_range() {
    let fake = Fake::start(None).await;
    let (istiod, _tasks) = run(plaintext(fake.address));
    fake.answers([Answer::Chain(vec!["x".repeat(5 << 20).leak()])]);
    let (code, text) = found(ca(&istiod, DAY).sign("csr", DAY).await);
    assert_eq!(code, Code::OutOfRange, "{text}");
}

#[tokio::test]
async fn a_refusal_with_a_long_text_keeps_its_code_and_the_connection() {
    let fake = Fake::start(None).await;
    let (istiod, _tasks) = run(plaintext(fake.address));
    let text = "why ".repeat(25_000);
    for _ in 0..2 {
        fake.answers([Answer::Refusal(Code::PermissionDenied, text.clone().leak())]);
        let expected = (Code::PermissionDenied, text[..1024].to_owned());
        assert_eq!(found(ca(&istiod, DAY).sign("csr", DAY).await), expected);
    }
    assert_eq!(fake.seen().connections.len(), 1);
}

#[tokio::test]
async fn a_request_to_a_silent_authority_fails_and_the_next_one_redials() {
    let fake = Fake::start(None).await;
    let (istiod, _tasks) = run(plaintext(fake.address));
    fake.answers([Answer::Never, Answer::Chain(vec!["leaf", "root"])]);
    let hasty = ca(&istiod, Duration::from_millis(100));
    let (code, message) = found(hasty.sign("csr", DAY).await);
    assert_eq!(code, Code::DeadlineExceeded);
    assert_eq!(message, "no answer within 100 ms");
    assert!(ca(&istiod, DAY).sign("csr", DAY).await.is_ok());
    assert_eq!(fake.seen().connections.len(), 2);
}

#[tokio::test]
async fn each_miss_doubles_the_time_of_a_slow_authority_up_to_eightfold() {
    let fake = Fake::start(None).await;
    let (istiod, _tasks) = run(plaintext(fake.address));
    let hasty = ca(&istiod, Duration::from_millis(50));
    let mut limits = Vec::new();
    for answer in
        [vec![Answer::Never; 5], vec![Answer::Refusal(Code::Internal, "")], vec![Answer::Never]]
            .concat()
    {
        fake.answers([answer]);
        let message = loop {
            let (_, message) = found(hasty.sign("csr", DAY).await);
            // After a timeout, the call dials again. Pauses between dials may exceed the limit, which never
            // grows for the connection.
            if !message.starts_with("no connection") {
                break message;
            }
            assert!(message.ends_with("within 50 ms"), "{message}");
        };
        limits.extend(message.rsplit_once("within ").map(|(_, limit)| limit.to_owned()));
    }
    assert_eq!(
        limits,
        ["50 ms", "100 ms", "200 ms", "400 ms", "400 ms", "50 ms"],
        "an answer is one, a refusal too"
    );
}

#[tokio::test]
async fn a_failed_or_broken_connection_fails_one_request_and_not_the_next() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (istiod, _tasks) = run(plaintext(address));
    let hasty = ca(&istiod, Duration::from_millis(100));
    let (code, message) = found(hasty.sign("csr", DAY).await);
    assert_eq!(code, Code::DeadlineExceeded);
    assert!(message.starts_with("no connection within"), "{message}");

    let fake = Fake::start(None).await;
    let (istiod, _tasks) = run(plaintext(fake.address));
    let ca = ca(&istiod, DAY);
    fake.answers([Answer::Never, Answer::Chain(vec!["leaf", "root"])]);
    let (broken, ()) = tokio::join!(ca.sign("csr", DAY), async {
        while fake.seen().signing.is_empty() {
            tokio::task::yield_now().await;
        }
        fake.close();
    });
    let (code, message) = found(broken);
    assert_eq!(code, Code::Unavailable, "{message}");
    assert!(ca.sign("csr", DAY).await.is_ok());
}

#[tokio::test]
async fn a_refused_connection_is_unavailable_and_says_so() {
    let address = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap()
    };
    let (istiod, _tasks) = run(plaintext(address));
    let (code, message) = found(ca(&istiod, DAY).sign("csr", DAY).await);
    assert_eq!(code, Code::Unavailable);
    assert!(message.contains("Connection refused"), "{message}");
}

#[tokio::test]
async fn streams_of_two_envoys_that_read_nothing_do_not_hold_up_signing() {
    let fake = Fake::start(None).await;
    let (istiod, _tasks) = run(plaintext(fake.address));
    let mut connection = istiod.connection().await.unwrap();
    let mut stalled = Vec::new();
    for _ in 0..2 {
        let request = istiod.request(ENDLESS, Body::empty());
        stalled.push(connection.send(request).await.unwrap().into_body());
    }
    let (mut streamed, mut calls_when_full) = (0, 0);
    // The windows of both streams are full once the count of sent bytes stays the same during 50 calls.
    while calls_when_full < 50 {
        fake.answers([Answer::Chain(vec!["leaf", "root"])]);
        let ca = ca(&istiod, Duration::from_secs(10));
        ca.sign("csr", DAY).await.unwrap();
        let before = std::mem::replace(&mut streamed, fake.seen().streamed);
        calls_when_full = if before == streamed { calls_when_full + 1 } else { 0 };
    }
    let (window, buffered) = (2 * WINDOW, 2 << 20);
    assert!((window..window + buffered).contains(&streamed), "{streamed}");
    assert_eq!(fake.seen().connections.len(), 1);
    drop(stalled);
}

#[tokio::test]
async fn a_late_client_certificate_is_presented_after_istiod_answers_unauthenticated() {
    let authority = Authority::new("root");
    let tls = fake::server_tls(&authority, fake::NAME, Clients::Optional);
    let fake = Fake::start(Some(tls)).await;
    let files = Files::new();
    let mut config = fake::encrypted(fake.address, &files.write("root.pem", &authority.pem()));
    let [chain, key] = ["cert-chain.pem", "key.pem"].map(|name| {
        let path = files.write(name, "");
        std::fs::remove_file(&path).unwrap();
        path
    });
    if let Security::Tls(tls) = &mut config.security {
        tls.client = Some(tls::ClientCertificate { chain, key });
    }
    let (istiod, _tasks) = run(config);
    let ca = ca(&istiod, DAY);
    let refusal = || Answer::Refusal(Code::Unauthenticated, "request authenticate failure");
    fake.answers([Answer::Chain(vec!["leaf", "root"]), refusal()]);
    assert!(ca.sign("csr", DAY).await.is_ok());
    let pair = authority.issue("workload");
    files.write("cert-chain.pem", &pair.chain);
    files.write("key.pem", &pair.key);
    let (code, _) = found(ca.sign("csr", DAY).await);
    assert_eq!(code, Code::Unauthenticated);
    fake.answers([refusal(), refusal()]);
    for _ in 0..2 {
        assert!(ca.sign("csr", DAY).await.is_err());
    }
    // A connection with the client certificate is not replaced after UNAUTHENTICATED.
    assert_eq!(fake.seen().connections, [false, true]);
}
