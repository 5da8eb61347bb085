//! Tests the trust bundle of the mesh: it is requested only if configured, is added to the roots, and is refused if
//! broken.

use std::sync::Arc;

use istio_agent::xds::Protocol;
use local_istiod::{LocalIstiod, Options, Resource, Snapshot};
use prost::Message;
use rcgen::{CertificateParams, KeyPair};
use tokio::sync::watch;

use crate::support::envoy::Envoy;
use crate::support::place::Place;
use crate::support::{LISTENER, options, request, until};

const PROXY_CONFIG: &str = "type.googleapis.com/istio.mesh.v1alpha1.ProxyConfig";

/// The message `istio.mesh.v1alpha1.ProxyConfig`, with the field for trust anchors only.
#[derive(Clone, PartialEq, Message)]
struct ProxyConfig {
    #[prost(string, repeated, tag = "34")]
    ca_certificates_pem: Vec<String>,
}

fn snapshot(bundle: &str) -> Arc<Snapshot> {
    let config = ProxyConfig { ca_certificates_pem: vec![bundle.to_owned()] };
    let resource = Resource::new("", PROXY_CONFIG, config.encode_to_vec());
    let mut snapshot = Snapshot::default();
    snapshot.insert("common", resource);
    Arc::new(snapshot)
}

fn root() -> String {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::default();
    params.self_signed(&key).unwrap().pem()
}

#[tokio::test]
async fn the_mesh_trust_bundle_is_added_to_the_roots_only_if_configured() {
    for (wanted, from_files) in [(true, false), (true, true), (false, false)] {
        let bundles = watch::Sender::new(snapshot(&root()));
        let istiod =
            LocalIstiod::start(Options { snapshots: Some(bundles.subscribe()), ..options() })
                .await
                .unwrap();
        let place = Place::of(&istiod)
            .set("OUTPUT_CERTS", "./certs")
            .set("PROXY_CONFIG_XDS_AGENT", &wanted.to_string());
        std::fs::create_dir(place.path("certs")).unwrap();
        if from_files {
            let key = KeyPair::generate().unwrap();
            let chain = CertificateParams::default().self_signed(&key).unwrap().pem();
            let mounted = "var/run/secrets/workload-spiffe-credentials";
            place.write(&format!("{mounted}/key.pem"), key.serialize_pem());
            place.write(&format!("{mounted}/cert-chain.pem"), &chain);
            place.write(&format!("{mounted}/root-cert.pem"), &chain);
        }
        let agent = place.start().await;
        let roots = || {
            let text = std::fs::read_to_string(place.path("certs/root-cert.pem"));
            text.map_or(0, |text| text.matches("BEGIN CERTIFICATE").count())
        };
        let envoy = Envoy::open(&place.xds_socket(), Protocol::Sotw).await;
        envoy.send(&request(LISTENER, &[]));
        let expected = if wanted { 2 } else { 1 };
        until("the roots", || roots() == expected).await;
        if wanted {
            bundles.send_replace(snapshot("no PEM"));
            agent.logs("[RESPONSE_REFUSED]").await;
            assert_eq!(roots(), 2);
            bundles.send_replace(snapshot(&format!("{}{}", root(), root())));
            until("three roots", || roots() == 3).await;
        }
    }
}
