//! Tests the configuration of the workload's certificate and its authority.

use std::path::{Path, PathBuf};

use super::tests::machine;
use crate::ca::key::{Encoding, KeyType};
use crate::problem::Problem;

#[test]
fn a_grace_ratio_outside_0_to_1_is_clamped_with_a_warning() {
    for (ratio, used) in [("1.5", 1.0), ("-2", 0.0), ("0.25", 0.25)] {
        let config = machine(&[("SECRET_GRACE_PERIOD_RATIO", ratio)]).config();
        assert_eq!(config.secrets.renewal.grace_ratio, used);
        let warnings = config.warnings.iter().map(|w| w.subject.as_str());
        let is_warned = warnings.eq(["SECRET_GRACE_PERIOD_RATIO"]);
        assert_eq!(is_warned, used != 0.25, "{ratio}");
    }
}

#[test]
fn a_missing_root_is_one_problem_which_names_the_config_map() {
    let machine = machine(&[]);
    let root = machine.root.path().join("var/run/secrets/istio/root-cert.pem");
    std::fs::remove_file(root).expect("removed");
    let problems = machine.load("sidecar").expect_err("no root");
    let problems: Vec<_> = problems.iter().map(Problem::brief).collect();
    let expected = "root file for istiod (ConfigMap istio-ca-root-cert) is \
                    \"./var/run/secrets/istio/root-cert.pem\", expected an existing file of root \
                    certificates";
    assert_eq!(problems, [expected]);
}

#[test]
fn a_missing_root_for_discovery_only_is_a_warning() {
    let variables = [("PROV_CERT", "./prov")];
    // The connection to the authority needs this root as well, so that its absence is an error.
    let root = "root file for istiod (PROV_CERT)";
    assert_eq!(machine(&variables).subjects(), [root]);
    // Another process may serve the secrets: the problem of the authority is deferred, and discovery causes a
    // warning.
    let with_sds_socket = machine(&variables);
    with_sds_socket.file("var/run/secrets/workload-spiffe-uds/socket", "");
    let config = with_sds_socket.config();
    assert_eq!(config.authority_problems.len(), 1);
    let warnings: Vec<_> = config.warnings.iter().map(|w| w.subject.as_str()).collect();
    assert_eq!(warnings, [root]);
}

#[test]
fn keys_are_ecdsa_by_default_and_only_the_default_falls_back() {
    const QAT: (&str, &str) = ("PROXY_CONFIG", "{privateKeyProvider: {qat: {pollDelay: 2ms}}}");
    const ECDSA: (&str, &str) = ("ECC_SIGNATURE_ALGORITHM", "ECDSA");
    for (variables, key, falls_back) in [
        (&[][..], KeyType::P256, true),
        (&[("ECC_CURVE", "P384")], KeyType::P384, true),
        (&[("WORKLOAD_RSA_KEY_SIZE", "4096")], KeyType::Rsa(4096), false),
        (&[ECDSA, ("ECC_CURVE", "P384")], KeyType::P384, false),
        (&[ECDSA, ("WORKLOAD_RSA_KEY_SIZE", "2048")], KeyType::P256, false),
        (&[QAT], KeyType::Rsa(2048), false),
        (&[QAT, ("WORKLOAD_RSA_KEY_SIZE", "3072")], KeyType::Rsa(3072), false),
        (&[QAT, ECDSA], KeyType::P256, false),
    ] {
        let renewal = machine(variables).config().secrets.renewal;
        assert_eq!(renewal.key_type, key, "{variables:?}");
        assert_eq!(renewal.falls_back_to_rsa, falls_back, "{variables:?}");
    }
}

#[test]
fn any_rsa_size_from_2048_to_8192_is_accepted() {
    let machine_of = |bits| machine(&[("WORKLOAD_RSA_KEY_SIZE", bits)]);
    for (bits, warnings) in [("2048", 0), ("2049", 1), ("6144", 1), ("8192", 0)] {
        let config = machine_of(bits).config();
        assert_eq!(config.warnings.len(), warnings, "{bits}");
        let key_type = config.secrets.renewal.key_type;
        assert_eq!(key_type, KeyType::Rsa(bits.parse().unwrap()));
    }
    for bits in ["1024", "2047", "8193"] {
        assert_eq!(machine_of(bits).subjects(), ["WORKLOAD_RSA_KEY_SIZE"]);
    }
}

#[test]
fn certificates_are_kept_written_and_encoded_as_configured() {
    let config = machine(&[]).config();
    let secrets = &config.secrets;
    assert_eq!(secrets.renewal.encoding, Encoding::Traditional);
    assert!(secrets.output.is_none() && !secrets.mesh_roots);
    let volumes =
        [secrets.renewal.cache.clone(), config.last_known_good.clone().and_then(|it| it.volume)];
    let volumes = volumes.map(|volume| volume.expect("a default"));
    assert!(volumes.iter().all(|volume| volume.is_default));
    let directories = volumes.map(|volume| volume.directory);
    let defaults = ["./etc/istio/proxy", "./var/lib/istio/data"];
    assert_eq!(directories, defaults.map(PathBuf::from));
    let off = machine(&[("ISTIO_AGENT_KEEP_CERTS", ""), ("ISTIO_AGENT_KEEP_CONFIG", "")]);
    let off = off.config();
    assert!(off.last_known_good.is_none() && off.secrets.renewal.cache.is_none());
    for (value, is_on) in [("", true), ("true", true), ("false", false)] {
        let config = machine(&[("ISTIO_AGENT_KEEP_CONFIG_ON_NACK", value)]).config();
        let on_nack = config.last_known_good.map(|it| it.on_nack);
        assert_eq!(on_nack, Some(is_on), "{value}");
    }
    assert!(config.google_token.is_none() && !config.may_dump_core);
    for (in_kubernetes, readable_by_all) in [("", false), ("10.0.0.1", true)] {
        let config = machine(&[
            ("OUTPUT_CERTS", "./certs"),
            ("KUBERNETES_SERVICE_HOST", in_kubernetes),
            ("PKCS8_KEY", "true"),
            ("PROXY_CONFIG_XDS_AGENT", "true"),
            ("ISTIO_AGENT_KEEP_CERTS", "/run/keep"),
            ("CREDENTIAL_FETCHER_TYPE", "GoogleComputeEngine"),
            ("TRUST_DOMAIN", "td"),
        ])
        .config();
        let secrets = config.secrets;
        let output = secrets.output.expect("is asked for");
        assert_eq!(output.directory, Path::new("./certs"));
        assert_eq!(output.readable_by_all, readable_by_all);
        assert_eq!(secrets.renewal.encoding, Encoding::Pkcs8);
        let cache = secrets.renewal.cache.expect("is asked for");
        assert_eq!(cache.directory, Path::new("/run/keep"));
        assert!(!cache.is_default);
        assert!(secrets.mesh_roots);
        assert_eq!(config.google_token.expect("is asked for").audience, "td");
    }
}
