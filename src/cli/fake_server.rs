//! An HTTP server for tests, which sends the next of its responses on each connection.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// Returns the URL of the server, and a future that serves and returns the requests after the last response.
pub(super) async fn serve(
    answers: Vec<&'static str>,
) -> (String, impl Future<Output = Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}/", listener.local_addr().expect("an address"));
    let server = async move {
        let mut requests = Vec::new();
        for answer in answers {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut request = [0; 4096];
            let length = stream.read(&mut request).await.expect("a request");
            stream.write_all(answer.as_bytes()).await.expect("answered");
            requests.push(String::from_utf8_lossy(&request[..length]).into_owned());
        }
        requests
    };
    (url, server)
}
