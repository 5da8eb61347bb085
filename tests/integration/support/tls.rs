//! A workload of the mesh that connects to Envoy with mutual TLS.

use std::sync::Arc;

use istio_agent::ca::Ca;
use istio_agent::ca::csr;
use istio_agent::ca::istio::IstioCa;
use istio_agent::ca::key::KeyType;
use istio_agent::istiod::{self, Istiod};
use istio_agent::metrics::Registry;
use istio_agent::runtime::lifecycle::CancellationToken;
use istio_agent::trust::identity::SpiffeId;
use local_istiod::{Keys, LocalIstiod, Options};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

use super::bench::istiod_config;
use super::control_plane::{ACCOUNT, NAMESPACE};
use super::http::{Attempt, connect, exchange};
use super::{PATIENCE, local};

/// The lifetime of the client's token and certificate, which must not expire during a test.
const LONG: std::time::Duration = std::time::Duration::from_secs(3600);

/// A connection to a control plane like the agent's.
pub struct Connection {
    pub istiod: Istiod,
    _open: JoinSet<()>,
    _directory: TempDir,
}

impl Connection {
    pub fn to(control_plane: &LocalIstiod) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = |name| directory.path().join(name);
        std::fs::write(file("root.pem"), control_plane.root_pem()).unwrap();
        let token = control_plane.mint_token(NAMESPACE, ACCOUNT, LONG).unwrap();
        std::fs::write(file("token"), token).unwrap();
        let config = istiod_config(directory.path(), &control_plane.address.to_string());
        let (istiod, open) = istiod::new(config, &Registry::default(), CancellationToken::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(open);
        Self { istiod, _open: tasks, _directory: directory }
    }

    pub fn authority(&self) -> IstioCa {
        IstioCa::new(self.istiod.clone(), String::new(), PATIENCE)
    }
}

/// Returns the settings of a client in the mesh of these keys. Its certificate does not expire during the test.
pub async fn client(keys: &Keys) -> Arc<ClientConfig> {
    // The certificate comes from a second control plane with the same keys, because that of the test may issue
    // short-lived certificates or none.
    let options = Options { keys: Some(keys.clone()), ..Options::default() };
    let authority = LocalIstiod::start(options).await.unwrap();
    let connection = Connection::to(&authority);
    let identity = SpiffeId::new("cluster.local", NAMESPACE, ACCOUNT);
    let request = csr::generate(KeyType::P256, Default::default(), &identity).unwrap();
    let signed = connection.authority().sign(&request.csr_pem, LONG).await;
    let leaf = CertificateDer::from_pem_slice(signed.unwrap()[0].as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(request.key_pem.as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(MeshCertVerifier {
            roots: roots(&authority.root_pem()),
            provider,
        }))
        .with_client_auth_cert(vec![leaf], key)
        .unwrap();
    // In a resumed session Envoy would not send its certificate.
    config.resumption = Resumption::disabled();
    Arc::new(config)
}

fn roots(pem: &str) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        roots.add(root.unwrap()).unwrap();
    }
    roots
}

/// A full handshake with mutual TLS and a request each time. The response shows that Envoy has accepted the client's
/// certificate. Successes are counted by the serial number of Envoy's certificate.
pub struct Handshake {
    pub port: u16,
    pub client: Arc<ClientConfig>,
}

impl Attempt for Handshake {
    async fn attempt(&mut self) -> Result<String, String> {
        let stream = connect(self.port).await?;
        let name = ServerName::from(local(self.port).ip());
        let connector = TlsConnector::from(Arc::clone(&self.client));
        let connected = connector.connect(name, stream).await;
        let mut stream = connected.map_err(|error| format!("handshake: {error}"))?;
        exchange(&mut stream).await?;
        let chain = stream.get_ref().1.peer_certificates();
        let leaf = chain.and_then(<[_]>::first).ok_or("no certificate")?;
        serial(leaf)
    }
}

fn serial(leaf: &CertificateDer<'_>) -> Result<String, String> {
    let parsed = x509_parser::parse_x509_certificate(leaf).map_err(|error| error.to_string())?;
    Ok(parsed.1.raw_serial_as_string())
}

/// A verifier that accepts certificates that chain to the roots and are valid now. It does not compare the name,
/// because certificates in a mesh do not have names of hosts.
#[derive(Debug)]
struct MeshCertVerifier {
    roots: RootCertStore,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for MeshCertVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let algorithms = self.provider.signature_verification_algorithms.all;
        let leaf = ParsedCertificate::try_from(leaf)?;
        verify_server_cert_signed_by_trust_anchor(
            &leaf,
            &self.roots,
            intermediates,
            now,
            algorithms,
        )?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, leaf, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, leaf, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
