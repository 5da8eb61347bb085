//! Tests `OUTPUT_CERTS`: the files in the directory, also without Envoy, and their use as a client certificate.

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use rcgen::{CertificateParams, KeyPair};
use tonic::Status;

use crate::support::place::{Place, TOKEN};
use crate::support::{local_istiod, restarted, until};

const NAMES: [&str; 3] = ["key.pem", "cert-chain.pem", "root-cert.pem"];

fn files(place: &Place) -> Option<[String; 3]> {
    let read = |name: &str| std::fs::read_to_string(place.path("certs").join(name)).ok();
    let [Some(key), Some(chain), Some(roots)] = NAMES.map(read) else {
        return None;
    };
    Some([key, chain, roots])
}

#[tokio::test]
async fn rotations_are_written_without_envoy_with_mode_0600_or_0644_in_kubernetes() {
    let istiod = restarted(local_istiod().await, |options| {
        options.max_cert_ttl = Duration::from_secs(4);
    })
    .await;
    for (in_kubernetes, mode) in [("", 0o600), ("10.0.0.1", 0o644)] {
        let place = Place::of(&istiod)
            .set("DISABLE_ENVOY", "true")
            .set("OUTPUT_CERTS", "./certs")
            .set("KUBERNETES_SERVICE_HOST", in_kubernetes);
        std::fs::create_dir(place.path("certs")).unwrap();
        let _agent = place.start_only();
        until("the files", || files(&place).is_some()).await;
        let first = files(&place).unwrap();
        assert!(first[0].starts_with("-----BEGIN EC PRIVATE KEY-----"));
        for name in NAMES {
            let found = place.path("certs").join(name).metadata().unwrap().mode();
            assert_eq!(found & 0o777, mode, "{name}");
        }
        let renewed = || files(&place).is_some_and(|now| now[0] != first[0] && now[1] != first[1]);
        until("a rotation", renewed).await;
    }
}

#[tokio::test]
async fn secrets_from_files_are_written_too_and_each_rotation_of_them() {
    let istiod = local_istiod().await;
    let place =
        Place::with_envoy(&istiod).set("FILE_MOUNTED_CERTS", "true").set("OUTPUT_CERTS", "./certs");
    std::fs::create_dir(place.path("certs")).unwrap();
    let mount = || {
        let key = KeyPair::generate().unwrap();
        let chain = CertificateParams::default().self_signed(&key).unwrap();
        let mounted = [key.serialize_pem(), chain.pem(), chain.pem()];
        for (name, content) in NAMES.into_iter().zip(&mounted) {
            place.write(&format!("etc/certs/{name}"), content);
        }
        // White space may differ, because the agent takes only the certificates from the file of roots.
        mounted.map(|pem| pem.trim().replace('\r', ""))
    };
    let written = || files(&place).map(|files| files.map(|pem| pem.trim().replace('\r', "")));
    let first = mount();
    let _agent = place.start_only();
    until("the files", || written().as_ref() == Some(&first)).await;
    let second = mount();
    until("the rotation", || written().as_ref() == Some(&second)).await;
    assert_eq!(istiod.certificates_signed(), 0);
}

#[tokio::test]
async fn certificates_are_not_written_to_the_directory_that_secrets_are_read_from() {
    let istiod = local_istiod().await;
    let place =
        Place::of(&istiod).set("FILE_MOUNTED_CERTS", "true").set("OUTPUT_CERTS", "etc/certs/");
    for name in NAMES {
        place.write(&format!("etc/certs/{name}"), istiod.root_pem());
    }
    let agent = place.start().await;
    agent.logs("OUTPUT_CERTS: secrets are read from etc/certs").await;
    for name in NAMES {
        let found = std::fs::read_to_string(place.path("etc/certs").join(name)).unwrap();
        assert_eq!(found, istiod.root_pem(), "{name}");
    }
}

#[tokio::test]
async fn the_next_agent_uses_the_written_certificate_as_its_client_certificate() {
    let istiod = local_istiod().await;
    let place = Place::of(&istiod)
        .set("DISABLE_ENVOY", "true")
        .set("OUTPUT_CERTS", "./certs")
        .set("PROV_CERT", "./certs")
        .set("PKCS8_KEY", "true");
    place.write("certs/root-cert.pem", istiod.root_pem());
    let agent = place.start_only();
    agent.logs("using token instead").await;
    until("the files", || files(&place).is_some()).await;
    agent.terminate();
    assert_eq!(agent.ends().await.0, 0);
    let first = files(&place).unwrap();
    assert!(first[0].starts_with("-----BEGIN PRIVATE KEY-----"));

    place.write(TOKEN, "no token at all");
    let agent = place.start_only();
    until("another certificate", || files(&place).is_some_and(|now| now[0] != first[0])).await;
    assert!(!agent.log().contains("using token instead"));
}

#[tokio::test]
async fn a_cached_certificate_is_served_while_the_authority_is_down() {
    let istiod = local_istiod().await;
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let place = Place::of(&istiod)
        .set("DISABLE_ENVOY", "true")
        .set("OUTPUT_CERTS", "./certs")
        .set("ISTIO_AGENT_KEEP_CERTS", memory.path().to_str().unwrap());
    std::fs::create_dir(place.path("certs")).unwrap();
    let agent = place.start_only();
    until("the files", || files(&place).is_some()).await;
    let kept = memory.path().join("istio-agent/workload.json");
    until("the copy", || kept.exists()).await;
    agent.terminate();
    agent.ends().await;
    let first = files(&place).unwrap();
    std::fs::remove_dir_all(place.path("certs")).unwrap();
    std::fs::create_dir(place.path("certs")).unwrap();

    istiod.refuse_certificates(Some(Status::unavailable("maintenance")));
    let agent = place.start_only();
    agent.logs("using the cached workload certificate").await;
    until("the files", || files(&place).is_some()).await;
    assert_eq!(files(&place).unwrap(), first);
}
