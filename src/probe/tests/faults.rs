//! Tests probes of applications that misbehave, and of addresses that cannot be probed.

use super::*;

#[tokio::test]
async fn redirects_in_a_loop_or_to_nowhere_are_errors() {
    let app = App::plain().await;
    for (path, expected) in [
        ("redirect-loop", "stopped after 10 redirects"),
        ("redirect-badly", "expected a path or a URL"),
    ] {
        let error = app.get(path).await.expect_err("an error").to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[tokio::test]
async fn applications_that_misbehave_are_errors_within_the_timeout() {
    let probe = |app: &App| Probe {
        timeout: Duration::from_millis(200),
        ..app.probe(Kind::Http { is_https: false, path: String::new() })
    };
    for (bytes, endless) in [
        (&b""[..], true),
        (b"", false),
        (b"x: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n", true),
        (b"HTTP/1.1 200 OK\r\nx: y\r\nx: ", true),
        (b"nonsense\r\n\r\n", false),
    ] {
        let app = match bytes {
            // This application neither reads nor writes.
            b"" if endless => {
                App::start(|stream, _| async move {
                    std::future::pending::<()>().await;
                    drop(stream);
                })
                .await
            }
            _ => App::raw(bytes, endless).await,
        };
        let (client, probe, headers) = (client(true, false), probe(&app), HeaderMap::new());
        let probing = client.probe(&probe, &headers);
        let outcome = tokio::time::timeout(Duration::from_secs(5), probing).await;
        assert!(outcome.expect("in time").is_err(), "{bytes:?}");
    }
    let stopped = App::plain().await;
    let probe = probe(&stopped);
    drop(stopped);
    let error = client(true, false).probe(&probe, &HeaderMap::new()).await;
    assert_eq!(error.unwrap_err().code, Code::ProbePortClosed);
}

#[tokio::test]
async fn probe_responses_that_only_go_accepts_are_accepted() {
    for answer in [
        "HTTP/1.0 202 Accepted\r\ncontent-length: 2\r\n\r\nOK",
        "HTTP/1.1 202\nfolded: a\n b\nspace : c\n\nOK",
    ] {
        let app = App::raw(answer.as_bytes(), false).await;
        let outcome = app.get("/").await.expect("an answer");
        assert_eq!((outcome.status.as_u16(), &*outcome.body), (202, &b"OK"[..]));
    }
}

#[tokio::test]
async fn the_status_is_used_even_if_the_body_is_incomplete_or_late() {
    for hangs in [false, true] {
        let app = App::start(move |mut stream, _| async move {
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).await;
            let bytes = b"HTTP/1.1 201 Created\r\ncontent-length: 9\r\n\r\nOK";
            let _ = stream.write_all(bytes).await;
            if hangs {
                std::future::pending::<()>().await;
            }
        })
        .await;
        let path = String::new();
        let is_https = false;
        let probe = Probe {
            timeout: Duration::from_millis(500),
            ..app.probe(Kind::Http { is_https, path })
        };
        let probed = client(true, true).probe(&probe, &HeaderMap::new()).await;
        let outcome = probed.expect("an answer");
        assert_eq!(outcome.status, StatusCode::CREATED, "{hangs}");
        assert_eq!(outcome.body, "OK", "{hangs}");
    }
}

#[tokio::test]
async fn an_endless_body_is_truncated() {
    let app = App::start(|mut stream, _| async move {
        let mut request = [0; 4096];
        let _ = stream.read(&mut request).await;
        let _ = stream.write_all(b"HTTP/1.1 503 No\r\n\r\n").await;
        while stream.write_all(&[b'x'; 4096]).await.is_ok() {}
    })
    .await;
    let outcome = app.get("/").await.expect("an answer");
    assert_eq!((outcome.status.as_u16(), outcome.body.len()), (503, 10_240));
}

#[tokio::test]
async fn hosts_of_the_other_family_and_foreign_source_addresses_are_errors() {
    let kind = Kind::Tcp;
    let app = App::plain().await;
    for (host, source, expected) in [
        ("::1", SOURCE, "::1 has no address of the family of the source address 127.0.0.6"),
        (
            "127.0.0.1",
            Ipv4Addr::new(192, 0, 2, 1).into(),
            "cannot bind the source address 192.0.2.1",
        ),
    ] {
        let client = Client::new(Config { source, offers_http2: true, keeps_connections: false });
        let probe = Probe { host: host.to_owned(), ..app.probe(kind.clone()) };
        let probing = client.expect("a client").probe(&probe, &HeaderMap::new()).await;
        let error = probing.expect_err("an error").to_string();
        assert!(error.contains(expected), "{error}");
    }
}
