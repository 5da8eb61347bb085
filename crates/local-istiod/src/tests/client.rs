//! A client that connects in the way that an agent does: it has its own root certificates, uses HTTP/2
//! over TLS, and authenticates by a token or a certificate.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use hyper_util::rt::TokioIo;
use rcgen::{CertificateParams, DistinguishedName, KeyPair, SanType};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};

use super::{LocalIstiod, Security};
use crate::proto::IstioCertificateRequest;
use crate::proto::istio_certificate_service_client::IstioCertificateServiceClient;

/// A private key and the chain that was signed for it, as PEM.
pub(super) type Certificate = (String, Vec<String>);

pub(super) struct Client {
    channel: Channel,
    token: Option<String>,
}

impl Client {
    pub(super) async fn connect(
        istiod: &LocalIstiod,
        token: Option<String>,
        certificate: Option<Certificate>,
    ) -> Self {
        let tls = (istiod.options.security == Security::Tls)
            .then(|| Arc::new(config(&istiod.root_pem(), certificate)));
        let endpoint = Endpoint::from_shared(format!("http://{}", istiod.address)).unwrap();
        let connector = Connector(istiod.address, tls);
        let channel = endpoint.connect_with_connector(connector).await.unwrap();
        Self { channel, token }
    }

    /// Requests a certificate for `spiffe://cluster.local/ns/shop/sa/<account>`.
    pub(super) async fn certificate(
        &self,
        account: &str,
        seconds: i64,
    ) -> Result<Certificate, Status> {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        let uri = format!("spiffe://cluster.local/ns/shop/sa/{account}");
        params.subject_alt_names = vec![SanType::URI(uri.try_into().unwrap())];
        let request = IstioCertificateRequest {
            csr: params.serialize_request(&key).unwrap().pem().unwrap(),
            validity_duration: seconds,
            metadata: None,
        };
        let response = IstioCertificateServiceClient::new(self.channel.clone())
            .create_certificate(self.request(request))
            .await?;
        Ok((key.serialize_pem(), response.into_inner().cert_chain))
    }

    pub(super) fn state_of_the_world(
        &self,
        first: Vec<DiscoveryRequest>,
    ) -> (
        mpsc::UnboundedSender<DiscoveryRequest>,
        impl Future<Output = Result<Streaming<DiscoveryResponse>, Status>>,
    ) {
        let (sender, requests) = outbox(first);
        let mut client = self.discovery();
        let request = self.request(requests);
        let opening = async move {
            let response = client.stream_aggregated_resources(request).await?;
            Ok(response.into_inner())
        };
        (sender, opening)
    }

    pub(super) fn delta(
        &self,
        first: Vec<DeltaDiscoveryRequest>,
    ) -> (
        mpsc::UnboundedSender<DeltaDiscoveryRequest>,
        impl Future<Output = Result<Streaming<DeltaDiscoveryResponse>, Status>>,
    ) {
        let (sender, requests) = outbox(first);
        let mut client = self.discovery();
        let request = self.request(requests);
        let opening = async move {
            let response = client.delta_aggregated_resources(request).await?;
            Ok(response.into_inner())
        };
        (sender, opening)
    }

    fn discovery(&self) -> AggregatedDiscoveryServiceClient<Channel> {
        AggregatedDiscoveryServiceClient::new(self.channel.clone())
            .max_decoding_message_size(usize::MAX)
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(token) = &self.token {
            let bearer = format!("Bearer {token}").parse().unwrap();
            request.metadata_mut().insert("authorization", bearer);
        }
        request
    }
}

fn outbox<T>(first: Vec<T>) -> (mpsc::UnboundedSender<T>, UnboundedReceiverStream<T>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    for request in first {
        let _ = sender.send(request); // The receiver exists.
    }
    (sender, UnboundedReceiverStream::new(receiver))
}

fn config(roots_pem: &str, certificate: Option<Certificate>) -> rustls::ClientConfig {
    let mut roots = rustls::RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(roots_pem.as_bytes()) {
        roots.add(root.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match certificate {
        None => builder.with_no_client_auth(),
        Some((key, chain)) => {
            let leaf = CertificateDer::from_pem_slice(chain[0].as_bytes()).unwrap();
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
            builder.with_client_auth_cert(vec![leaf], key).unwrap()
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    config
}

#[derive(Clone)]
struct Connector(std::net::SocketAddr, Option<Arc<rustls::ClientConfig>>);

/// A connection with or without TLS.
trait Io: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin {}
impl<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin> Io for T {}

impl tonic::codegen::Service<http::Uri> for Connector {
    type Response = TokioIo<Box<dyn Io>>;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Uri) -> Self::Future {
        let Self(address, tls) = self.clone();
        Box::pin(async move {
            let stream = TcpStream::connect(address).await?;
            let Some(tls) = tls else {
                return Ok(TokioIo::new(Box::new(stream) as Box<dyn Io>));
            };
            let name = ServerName::try_from("istiod.istio-system.svc").unwrap();
            let stream = tokio_rustls::TlsConnector::from(tls).connect(name, stream).await?;
            Ok(TokioIo::new(Box::new(stream) as Box<dyn Io>))
        })
    }
}
