//! Tests that the readers of untrusted bytes neither panic nor read past their input, whatever the bytes are.
//!
//! `PROPTEST_CASES` sets the number of inputs that are tried for each property.

use std::sync::LazyLock;

use bytes::Bytes;
use istio_agent::cli::{self, Command};
use istio_agent::config;
use istio_agent::config::environment::Environment;
use istio_agent::problem::Problem;
use istio_agent::secrets::certificate::Workload;
use istio_agent::xds::Protocol;
use istio_agent::xds::interceptor::Interceptors;
use istio_agent::xds::request::RequestReader;
use istio_agent::xds::response::ResponseReader;
use proptest::prelude::*;
use rcgen::{CertificateParams, KeyPair};
use zeroize::Zeroizing;

/// A key and a self-signed certificate for it.
static PAIR: LazyLock<(String, String)> = LazyLock::new(|| {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::default().self_signed(&key).unwrap();
    (key.serialize_pem(), certificate.pem())
});

fn protocol() -> impl Strategy<Value = Protocol> {
    prop_oneof![Just(Protocol::Sotw), Just(Protocol::Delta)]
}

/// Generates gRPC frames, some of them with a wrong length, and noise between them.
fn almost_frames() -> impl Strategy<Value = Vec<u8>> {
    let frame = (any::<bool>(), prop::collection::vec(any::<u8>(), 0..40), 0u32..60).prop_map(
        |(honest, message, lie)| {
            let length = if honest { message.len() as u32 } else { lie };
            [&[0], &length.to_be_bytes()[..], &message].concat()
        },
    );
    let noise = prop::collection::vec(any::<u8>(), 0..40);
    prop::collection::vec(prop_oneof![4 => frame, 1 => noise], 0..6).prop_map(|all| all.concat())
}

fn workload(chain: &[String]) -> bool {
    let key = Zeroizing::new(PAIR.0.clone());
    Workload::new(chain, key).is_ok()
}

/// Generates text that is a ProxyConfig or nearly one.
fn almost_yaml() -> impl Strategy<Value = String> {
    let name = prop_oneof![
        Just("drainDuration"),
        Just("proxyAdminPort"),
        Just("discoveryAddress"),
        Just("concurrency"),
        Just("proxyMetadata"),
        Just("binaryPath"),
        Just("configPath"),
        Just("controlPlaneAuthPolicy"),
        Just("statusPort"),
        Just("drain_duration"),
        Just("<<"),
    ];
    let value = prop_oneof![
        "[0-9a-z.:\"'\\-]{0,12}",
        Just("{a: b}".to_owned()),
        Just("[1, [2]]".to_owned()),
        Just("{a: {b: [".to_owned()),
        Just("&x {y: *x}".to_owned()),
        Just("!!binary =".to_owned()),
        Just("1e999".to_owned()),
        Just("99999999999999999999".to_owned()),
        Just("-1".to_owned()),
        Just("~".to_owned()),
        Just("|\n  text\n".to_owned()),
        ".{0,10}",
    ];
    prop::collection::vec((name, value), 0..6).prop_map(|members| {
        let lines = members.iter().map(|(name, value)| format!("{name}: {value}\n"));
        lines.collect()
    })
}

/// Loads a configuration with this `PROXY_CONFIG` in a directory that does not exist.
fn load(text: &str) -> Result<(), Vec<Problem>> {
    let typed = cli::parse(["pilot-agent", "proxy"].map(str::to_owned)).unwrap().cli;
    let Some(Command::Proxy(flags)) = typed.command else {
        panic!("the command is proxy");
    };
    let environment: Environment = [("PROXY_CONFIG", text)].into_iter().collect();
    config::load(&flags, &typed.log, &environment, "/nowhere".as_ref()).map(drop)
}

proptest! {
    #[test]
    fn requests_come_out_as_they_went_in_or_are_refused(
        protocol in protocol(), bytes in almost_frames(), cut in 1usize..20
    ) {
        let mut reader = RequestReader::new(protocol, 50);
        let (mut passed, mut refused) = (Vec::new(), false);
        for chunk in bytes.chunks(cut) {
            let fed = reader.feed(Bytes::copy_from_slice(chunk), |request| {
                passed.extend_from_slice(&request.frame);
            });
            refused = fed.is_err();
            if refused {
                break;
            }
        }
        prop_assert!(bytes.starts_with(&passed));
        if !refused && reader.finish().is_ok() {
            prop_assert_eq!(passed, bytes);
        }
    }

    #[test]
    fn responses_of_any_bytes_pass_or_are_refused(
        protocol in protocol(), bytes in almost_frames(), cut in 1usize..20
    ) {
        let mut reader = ResponseReader::new(protocol, Interceptors::default());
        let mut outputs = 0;
        for chunk in bytes.chunks(cut) {
            if reader.feed(Bytes::copy_from_slice(chunk), |_| outputs += 1).is_err() {
                break;
            }
        }
        prop_assert!(outputs <= bytes.len() + 1);
    }

    #[test]
    fn an_answer_with_a_changed_byte_is_taken_or_refused(
        at: prop::sample::Index, byte: u8, element in 0usize..2
    ) {
        let mut text = PAIR.1.clone().into_bytes();
        let at = at.index(text.len());
        text[at] = byte;
        let changed = String::from_utf8_lossy(&text).into_owned();
        let mut chain = vec![PAIR.1.clone(), PAIR.1.clone()];
        prop_assert!(workload(&chain));
        chain[element] = changed;
        workload(&chain);
    }

    #[test]
    fn arbitrary_der_is_refused_as_a_certificate(
        der in prop::collection::vec(any::<u8>(), 0..300), cut: prop::sample::Index
    ) {
        let wrap = |der: &[u8]| {
            let text = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, der);
            format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
        };
        prop_assert!(!workload(&[wrap(&der), PAIR.1.clone()]));
        let mut cut_off = PAIR.1.clone();
        cut_off.truncate(cut.index(cut_off.len() - 2));
        prop_assert!(!workload(&[cut_off, PAIR.1.clone()]));
    }

    #[test]
    fn any_text_is_a_proxy_config_or_a_problem(
        text in prop_oneof![almost_yaml(), ".{0,200}", "[\\[{\\]}:,&*!|>'\"#%@ \n-]{0,200}"]
    ) {
        // The directory has no root certificates, so there is at least one problem, unless `controlPlaneAuthPolicy`
        // is NONE.
        let refused = load(&text);
        prop_assert!(refused.is_err_and(|p| !p.is_empty()) || text.contains("NONE"));
    }
}
