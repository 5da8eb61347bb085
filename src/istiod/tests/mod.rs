mod hosts;
mod tls;

use std::net::SocketAddr;
use std::time::Duration;

use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::fake::{self, Authority, Clients, Fake, Files, HELD, NAME, encrypted, plaintext, run};
use crate::metrics::Registry;
use crate::net::dial::proxy::Proxy;
use crate::problem::Code;

use super::{Body, Config, Connection, Istiod, Limits, Security, token};

fn short(config: &mut Config) {
    config.limits.total = Duration::from_millis(200);
    config.limits.per_address = Duration::from_millis(100);
}

/// Dials, and checks that the dial fails with this code and that the problem contains these words.
async fn assert_dial_fails(config: Config, code: Code, words: &str) {
    let (istiod, _tasks) = run(config);
    let problem = istiod.try_connection().await.unwrap_err();
    assert_eq!(problem.code, code, "{problem}");
    assert!(problem.to_string().contains(words), "{words:?}: {problem}");
    let status = istiod.status().last_error;
    assert_eq!(status.map(|failure| failure.problem), Some(problem));
}

async fn unused_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap()
}

async fn wait_until_disconnected(istiod: &Istiod) {
    let mut watch = istiod.shared.connected.subscribe();
    watch.wait_for(Option::is_none).await.unwrap();
}

async fn wait_for_connect_and_disconnect(istiod: &Istiod) {
    let mut watch = istiod.shared.connected.subscribe();
    watch.wait_for(Option::is_some).await.unwrap();
    watch.wait_for(Option::is_none).await.unwrap();
}

async fn hold(istiod: &Istiod, connection: &mut Connection) -> hyper::body::Incoming {
    let response = connection.send(istiod.request(HELD, Body::empty())).await;
    response.unwrap().into_body()
}

#[tokio::test]
async fn one_dial_serves_many_calls_and_without_calls_there_is_none() {
    let authority = Authority::new("root");
    let fake = Fake::start(Some(fake::server_tls(&authority, NAME, Clients::Optional))).await;
    let files = Files::new();
    let roots = files.write("root.pem", &authority.pem());
    let (istiod, _tasks) = run(encrypted(fake.address, &roots));
    let mut calls = JoinSet::new();
    for once in [false, true].repeat(10) {
        let istiod = istiod.clone();
        calls.spawn(async move {
            if once {
                istiod.try_connection().await.is_ok()
            } else {
                istiod.connection().await.is_ok()
            }
        });
    }
    assert!(calls.join_all().await.into_iter().all(|ok| ok));
    assert_eq!(fake.seen().connections, [false]);
    let connection = istiod.connection().await.unwrap();
    let tls = connection.about().tls.clone().unwrap();
    assert_eq!(tls.version.as_deref(), Some("TLSv1_3"));
    assert_eq!(tls.key_exchange.as_deref(), Some("X25519MLKEM768"));
    fake.close();
    wait_until_disconnected(&istiod).await;
    assert_eq!(fake.seen().connections.len(), 1);
}

#[tokio::test]
async fn the_status_shows_the_connection_and_the_dials() {
    let authority = Authority::new("root");
    let fake = Fake::start(Some(fake::server_tls(&authority, NAME, Clients::Optional))).await;
    let files = Files::new();
    let roots = files.write("root.pem", "no certificate");
    let registry = Registry::default();
    let config = encrypted(fake.address, &roots);
    let (istiod, run) = super::new(config, &registry, CancellationToken::new());
    let _tasks = JoinSet::from_iter([run]);
    assert_eq!(registry.render(), "");
    let error = istiod.try_connection().await.unwrap_err();
    let status = istiod.status();
    assert_eq!((status.connected, status.dials), (None, 1));
    let shown = serde_json::to_value(status.last_error.unwrap()).unwrap();
    assert_eq!(shown["code"], "ISTIOD_ROOTS_UNUSABLE");
    assert_eq!(shown["error"], error.to_string());
    let page = registry.render();
    assert!(page.ends_with("\nistio_agent_istiod_connection_failures 1\n"));
    files.write("root.pem", &authority.pem());
    istiod.connection().await.unwrap();
    let status = istiod.status();
    assert_eq!((status.dials, status.address), (2, fake.address.to_string()));
    let connected = status.connected.unwrap();
    assert_eq!(connected.peer, fake.address.to_string());
    let tls = connected.tls.unwrap();
    assert_eq!(tls.version.as_deref(), Some("TLSv1_3"));
    assert_eq!(tls.key_exchange.as_deref(), Some("X25519MLKEM768"));
    assert!(tls.cipher.unwrap().starts_with("TLS13_AES"));
}

#[tokio::test]
async fn a_closed_connection_is_dialed_again() {
    let fake = Fake::start(None).await;
    let (istiod, _tasks) = run(plaintext(fake.address));
    for dials in 1..4 {
        let mut connection = istiod.connection().await.unwrap();
        assert_eq!(fake.seen().connections.len(), dials);
        fake.close();
        wait_until_disconnected(&istiod).await;
        let request = istiod.request("/any", Body::empty());
        assert!(connection.send(request).await.is_err());
    }
}

#[tokio::test]
async fn connections_that_break_at_once_are_not_dialed_without_a_pause() {
    let fake = Fake::start(None).await;
    let mut config = plaintext(fake.address);
    config.limits.least_between = Duration::from_millis(100);
    let (istiod, _tasks) = run(config);
    let started = Instant::now();
    for _ in 0..5 {
        drop(istiod.connection().await.unwrap());
        fake.close();
        wait_until_disconnected(&istiod).await;
    }
    assert!(started.elapsed() >= Duration::from_millis(400));
}

/// Uses paused time, which passes between dials only, because each dial is refused at once.
#[tokio::test(start_paused = true)]
async fn a_fleet_spreads_its_dials_to_one_per_agent_and_second() {
    const AGENTS: usize = 200;
    const STEP: Duration = Duration::from_millis(50);
    const SECONDS: usize = 60;
    let mut config = plaintext(unused_address().await);
    config.limits = Limits::default();
    let (mut agents, mut tasks) = (Vec::new(), JoinSet::new());
    for _ in 0..AGENTS {
        let (istiod, own) = run(config.clone());
        agents.push((istiod.clone(), 0, None));
        tasks.spawn(async move {
            let _ = (istiod.connection().await, own); // The call waits until the test ends.
        });
    }
    let (started, mut per_second) = (Instant::now(), [0; SECONDS]);
    while started.elapsed() < Duration::from_secs(SECONDS as u64) {
        let now = Instant::now();
        for (istiod, before, last) in &mut agents {
            let dials = istiod.status().dials;
            assert!(dials - *before <= 1);
            if dials > std::mem::replace(before, dials) {
                let gap = last.replace(now).map(|last| now - last);
                assert!(gap.is_none_or(|gap| gap + STEP > Duration::from_secs(1)), "{gap:?}");
                assert!(gap.is_none_or(|gap| gap <= Duration::from_secs(2) + STEP), "{gap:?}");
                per_second[started.elapsed().as_secs() as usize] += 1;
            }
        }
        tokio::time::sleep(STEP).await;
    }
    // At the longest wait, the mean time between two dials of an agent is 1.5 s.
    let late = &per_second[20..];
    let even = AGENTS * 2 / 3;
    assert!(late.iter().all(|dials| (even / 2..even * 3 / 2).contains(dials)), "{late:?}");
}

/// Returns the dials of an agent in an outage of a minute, and the mean and longest time from its end to the next
/// dial, if a wait adds up to `max_wait`.
async fn dials_in_an_outage(max_wait: Duration) -> (f64, Duration, Duration) {
    const AGENTS: u32 = 200;
    const OUTAGE: Duration = Duration::from_secs(60);
    let mut config = plaintext(unused_address().await);
    config.limits = Limits { max_wait, ..Limits::default() };
    let (mut agents, mut tasks) = (Vec::new(), JoinSet::new());
    for _ in 0..AGENTS {
        let (istiod, own) = run(config.clone());
        agents.push(istiod.clone());
        tasks.spawn(async move {
            let _ = (istiod.connection().await, own); // The call waits until the test ends.
        });
    }
    tokio::time::sleep(OUTAGE).await;
    let before = Vec::from_iter(agents.iter().map(|istiod| istiod.status().dials));
    let (end, mut returns) = (Instant::now(), vec![None; agents.len()]);
    while returns.contains(&None) {
        tokio::time::sleep(Duration::from_millis(50)).await;
        for ((istiod, dials), found) in agents.iter().zip(&before).zip(&mut returns) {
            if istiod.status().dials > *dials {
                found.get_or_insert(end.elapsed());
            }
        }
    }
    let returns = Vec::from_iter(returns.into_iter().flatten());
    let dials = before.iter().sum::<u64>() as f64 / f64::from(AGENTS);
    (dials, returns.iter().sum::<Duration>() / AGENTS, returns.into_iter().max().unwrap())
}

/// Prints the trade that `benches/README.md` describes.
#[tokio::test(start_paused = true)]
async fn a_longer_wait_between_dials_saves_dials_and_delays_the_return() {
    let (mut last_dials, mut last_mean) = (f64::MAX, Duration::ZERO);
    for seconds in [1, 2, 4, 8] {
        let (dials, mean, longest) = dials_in_an_outage(Duration::from_secs(seconds)).await;
        println!("up to {seconds} s: {dials:.1} dials in 60 s, back after {mean:?}, {longest:?}");
        assert!(dials < last_dials && mean > last_mean, "{seconds}: {dials}, {mean:?}");
        let limit = Duration::from_secs(1 + seconds) + Duration::from_millis(50);
        assert!(longest <= limit, "{seconds}: {longest:?}");
        (last_dials, last_mean) = (dials, mean);
    }
}

#[tokio::test]
async fn after_goaway_new_calls_use_another_connection_and_open_streams_finish() {
    let fake = Fake::start(None).await;
    let (istiod, _tasks) = run(plaintext(fake.address));
    let mut old = istiod.connection().await.unwrap();
    let mut stream = hold(&istiod, &mut old).await;
    fake.go_away();
    wait_until_disconnected(&istiod).await;
    let new = istiod.connection().await.unwrap();
    assert_eq!(fake.seen().connections.len(), 2);
    drop(old);
    fake.say("still here");
    let data = stream.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(data, "still here");
    drop(new);
}

#[tokio::test]
async fn one_call_gets_the_error_of_a_refused_dial_and_another_waits() {
    let address = unused_address().await;
    let (istiod, _tasks) = run(plaintext(address));
    let problem = istiod.try_connection().await.unwrap_err();
    assert_eq!(problem.code, Code::IstiodConnectionRefused);
    let found = format!("cannot connect to {address}: Connection refused");
    assert!(problem.found.starts_with(&found), "{problem}");
    let waiting = {
        let istiod = istiod.clone();
        async move { istiod.connection().await }
    };
    let (connection, _fake) = tokio::join!(waiting, async {
        istiod.try_connection().await.unwrap_err();
        Fake::at(address, None).await
    });
    assert_eq!(connection.unwrap().about().peer, address.to_string());
}

#[tokio::test]
async fn errors_for_an_unreachable_address_or_proxy_name_its_setting() {
    let address = unused_address().await;
    let mut authority = plaintext(address);
    authority.setting = "CA_ADDR";
    let subject = format!("istiod at {address} (CA_ADDR): ");
    assert_dial_fails(authority.clone(), Code::IstiodConnectionRefused, &subject).await;
    authority.address = "istiod".to_owned();
    assert_dial_fails(authority.clone(), Code::IstiodAddressInvalid, "host:port").await;
    authority.address = "istiod.invalid:15012".to_owned();
    assert_dial_fails(authority.clone(), Code::IstiodNameNotResolved, "/etc/resolv.conf").await;
    authority.proxy = Proxy::parse(&address.to_string());
    let found = format!("by the proxy {address} (HTTPS_PROXY): cannot connect to");
    let code = Code::IstiodProxyUnreachable;
    assert_dial_fails(authority.clone(), code, &found).await;
    assert_dial_fails(authority, code, "correct `HTTPS_PROXY`").await;
}

#[tokio::test]
async fn a_silent_peer_times_out() {
    // The kernel completes TCP handshakes, although the test accepts no connection.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let files = Files::new();
    let roots = files.write("root.pem", &Authority::new("root").pem());
    let mut config = encrypted(address, &roots);
    short(&mut config);
    let (silent, unreachable) = (Code::IstiodTimeout, Code::IstiodProxyUnreachable);
    assert_dial_fails(config, silent, "timed out after 200 ms in the TLS handshake").await;
    let mut config = plaintext(address);
    short(&mut config);
    assert_dial_fails(config, silent, "timed out after 200 ms waiting for HTTP/2").await;
    let mut config = plaintext("istiod.test:15012");
    config.proxy = Proxy::parse(&address.to_string());
    short(&mut config);
    assert_dial_fails(config, unreachable, "timed out after 200 ms waiting for the proxy").await;
}

#[tokio::test]
async fn several_addresses_are_tried_although_one_is_silent() {
    // On most machines, localhost has an address of each family; on others, only one address is tried.
    let fake = Fake::start(None).await;
    let silent = TcpListener::bind(("::1", fake.address.port())).await;
    let mut config = plaintext(format!("localhost:{}", fake.address.port()));
    config.limits.per_address = Duration::from_millis(100);
    for _ in 0..4 {
        let (istiod, _tasks) = run(config.clone());
        let connection = istiod.try_connection().await.unwrap();
        assert_eq!(connection.about().peer, fake.address.to_string());
    }
    drop(silent);
}

/// Sends `bytes` on every connection, and closes it.
async fn send_and_close(listener: TcpListener, bytes: &'static [u8]) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let mut heard = [0; 4096];
        let _ = stream.read(&mut heard).await; // The request does not matter.
        let _ = stream.write_all(bytes).await; // The peer may have closed the connection.
    }
}

#[tokio::test]
async fn the_error_quotes_a_peer_that_does_not_speak_http2() {
    let files = Files::new();
    let roots = files.write("root.pem", &Authority::new("root").pem());
    let http = b"HTTP/1.1 400 Bad Request\r\n\r\n";
    // A fatal TLS alert: handshake_failure.
    let alert = &[0x15, 3, 3, 0, 2, 2, 40];
    let (refused, other) = (Code::IstiodTlsRefused, Code::IstiodNotGrpc);
    let lost = Code::IstiodConnectionLost;
    let table: [(bool, &[u8], _, &str); 7] = [
        (false, http, other, "it answered \"HTTP/1.1 \" instead of HTTP/2"),
        (false, b"hm", other, "it closed the connection"),
        (false, b"", lost, "did not start HTTP/2: it closed the connection"),
        // SETTINGS, GOAWAY
        (
            false,
            b"\0\0\0\x04\0\0\0\0\0\0\0\x0b\x07\0\0\0\0\0\0\0\0\0\0\0\0\x0bbye",
            lost,
            "it sent GOAWAY ENHANCE_YOUR_CALM \"bye\"",
        ),
        (true, http, Code::IstiodNotTls, "it answered without TLS"),
        (true, alert, refused, "received fatal alert"),
        (true, b"", refused, "it closed the connection"),
    ];
    for (tls, bytes, code, expected) in table {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(send_and_close(listener, bytes));
        let config = if tls { encrypted(address, &roots) } else { plaintext(address) };
        assert_dial_fails(config, code, expected).await;
    }
}

#[tokio::test]
async fn a_reset_before_http2_is_not_taken_for_another_protocol() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = plaintext(listener.local_addr().unwrap());
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let stream = stream.into_std().unwrap();
            rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
        }
    });
    assert_dial_fails(config, Code::IstiodConnectionLost, "a load balancer").await;
}

#[tokio::test]
async fn the_reason_in_a_goaway_is_the_last_error_with_its_remedy() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (istiod, _tasks) = run(plaintext(listener.local_addr().unwrap()));
    let (connected, accepted) = tokio::join!(istiod.connection(), async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
        stream.write_all(&settings).await.unwrap();
        stream
    });
    let (connection, mut stream) = (connected.unwrap(), accepted);
    let go_away = b"\0\0\x16\x07\0\0\0\0\0\0\0\0\0\0\0\0\x0btoo_many_pings";
    stream.write_all(go_away).await.unwrap();
    drop((stream, connection));
    let problem = loop {
        if let Some(failure) = istiod.status().last_error {
            break failure.problem;
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(problem.code, Code::IstiodUnavailable);
    let found = "it ended the connection with GOAWAY ENHANCE_YOUR_CALM \"too_many_pings\"";
    assert_eq!(problem.found, found);
    assert!(problem.remedy.contains("GRPC_KEEPALIVE_INTERVAL"), "{problem}");
}

#[tokio::test]
async fn a_silent_connection_is_closed_after_the_keepalive_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut config = plaintext(listener.local_addr().unwrap());
    config.keepalive.interval = Duration::from_millis(20);
    config.keepalive.timeout = Duration::from_millis(20);
    let (istiod, _tasks) = run(config);
    let ((), ()) = tokio::join!(
        async {
            let (mut stream, _) = listener.accept().await.unwrap();
            // An empty SETTINGS frame, after which HTTP/2 is ready.
            let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
            stream.write_all(&settings).await.unwrap();
            wait_for_connect_and_disconnect(&istiod).await;
        },
        async {
            let mut connection = istiod.connection().await.unwrap();
            let request = istiod.request("/any", Body::empty());
            let error = connection.send(request).await.unwrap_err();
            assert!(error.is_timeout() || error.is_canceled(), "{error:?}");
        }
    );
}

#[tokio::test]
async fn each_request_carries_the_configured_headers_and_the_current_token() {
    let fake = Fake::start(None).await;
    let files = Files::new();
    let mut config = plaintext(fake.address);
    config.token = token::Source::File(files.write("istio-token", ""));
    let header =
        |name, value| (http::HeaderName::from_static(name), http::HeaderValue::from_static(value));
    config.metadata = vec![
        header("clusterid", ""),
        header("x-team", "a"),
        header("x-team", "b"),
        header("te", "nonsense"),
    ];
    let (istiod, _tasks) = run(config);
    let mut connection = istiod.connection().await.unwrap();
    for token in ["", "one", "two\n"] {
        files.write("istio-token", token);
        let request = istiod.request("/nothing", Body::empty());
        connection.send(request).await.unwrap();
    }
    let seen = fake.seen();
    let tokens: Vec<_> = seen
        .requests
        .iter()
        .map(|parts| parts.headers.get("authorization").map(|v| v.as_bytes()))
        .collect();
    assert_eq!(tokens, [None, Some(&b"Bearer one"[..]), Some(b"Bearer two")]);
    let parts = &seen.requests[0];
    assert_eq!(parts.method, http::Method::POST);
    assert_eq!(parts.headers["te"], "trailers");
    assert_eq!(parts.headers["clusterid"], "");
    assert_eq!(parts.headers["content-type"], "application/grpc");
    assert_eq!(parts.headers.get_all("x-team").iter().count(), 2);
    let authority = parts.uri.authority().map(ToString::to_string);
    assert_eq!(authority, Some(fake.address.to_string()));
}

#[tokio::test]
async fn the_uri_names_the_server_with_tls_and_the_address_without() {
    let uri = |config| run(config).0.request("/a/B", Body::empty()).uri().to_string();
    let roots = std::path::Path::new("/none");
    assert_eq!(uri(plaintext("h:15010")), "http://h:15010/a/B");
    assert_eq!(uri(encrypted("h:1", roots)), format!("https://{NAME}/a/B"));
    let mut config = encrypted("h:1", roots);
    if let Security::Tls(tls) = &mut config.security {
        tls.server_name = "fd00::1".to_owned();
    }
    assert_eq!(uri(config), "https://[fd00::1]/a/B");
}

#[tokio::test]
async fn the_connection_task_ends_when_stopped_or_when_all_handles_are_dropped() {
    let fake = Fake::start(None).await;
    let stop = CancellationToken::new();
    let (istiod, run) = super::new(plaintext(fake.address), &Registry::default(), stop.clone());
    let ((), ()) = tokio::join!(run, async {
        istiod.connection().await.unwrap();
        stop.cancel();
    });
    for error in [istiod.connection().await, istiod.try_connection().await] {
        assert_eq!(error.unwrap_err().code, Code::AgentStopping);
    }

    let (istiod, run) =
        super::new(plaintext(fake.address), &Registry::default(), CancellationToken::new());
    let ((), ()) = tokio::join!(run, async move {
        istiod.connection().await.unwrap();
    });
}

#[tokio::test]
async fn debug_output_names_headers_and_keeps_their_values() {
    let mut config = plaintext("h:1");
    let secret = http::HeaderValue::from_static("s3cret");
    config.metadata = vec![(http::HeaderName::from_static("x-key"), secret)];
    let (istiod, _tasks) = run(config);
    let text = format!("{istiod:?}");
    assert!(text.contains("x-key") && !text.contains("s3cret"), "{text}");
}
