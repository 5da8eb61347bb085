//! Tests the SDS socket: odd requests, the order of responses, permitted users, and options of secrets.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use envoy_types::pb::envoy::config::core::v3::data_source::Specifier;
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::private_key_provider::ConfigType;
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::{Secret, secret};
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use envoy_types::pb::google::rpc;
use local_istiod::LocalIstiod;
use prost::Message;
use rcgen::{CertificateParams, KeyPair};
use serde_json::json;
use tonic::Code;

use crate::support::envoy::Envoy;
use crate::support::http::ask;
use crate::support::place::Place;
use crate::support::process::Process;
use crate::support::{
    SECRET, STREAM_SECRETS, ask_for_secrets, local_istiod, next_response, request,
};

async fn start() -> (LocalIstiod, Place, Process) {
    let istiod = local_istiod().await;
    let place = Place::with_envoy(&istiod);
    let agent = place.start().await;
    (istiod, place, agent)
}

fn answer(names: &[&str], nonce: &str) -> DiscoveryRequest {
    DiscoveryRequest { response_nonce: nonce.into(), ..request(SECRET, names) }
}

/// Returns the secret names and the nonce of the next response.
async fn next_names(envoy: &mut Envoy) -> (Vec<String>, String) {
    let response = next_response(envoy).await;
    assert_eq!(response.type_url, SECRET);
    let secrets = response.resources.iter();
    let names = secrets.map(|any| Secret::decode(&*any.value).unwrap().name);
    (names.collect(), response.nonce)
}

#[tokio::test]
async fn only_requests_for_new_names_are_answered() {
    let (_istiod, place, agent) = start().await;
    let mut envoy = ask_for_secrets(&place, &["default"]).await;
    let (names, first) = next_names(&mut envoy).await;
    assert_eq!(names, ["default"]);
    envoy.send(&answer(&["default"], &first));
    envoy.send(&answer(&["default", "ROOTCA"], &first));
    let (names, second) = next_names(&mut envoy).await;
    assert_eq!(names, ["ROOTCA"], "an acknowledgement was answered");
    envoy.send(&answer(&["default", "ROOTCA"], &first)); // A stale nonce.
    envoy.send(&answer(&["default"], &second)); // Fewer names.
    envoy.send(&answer(&[], &second)); // No names.
    let refusal = DiscoveryRequest {
        error_detail: Some(rpc::Status {
            code: 13,
            message: "bad secret".into(),
            ..Default::default()
        }),
        ..answer(&["default"], &second)
    };
    envoy.send(&refusal);
    envoy.send(&answer(&["ROOTCA", "default"], ""));
    let (mut names, third) = next_names(&mut envoy).await;
    names.sort();
    assert_eq!(names, ["ROOTCA", "default"]);
    agent.logs("bad secret").await;
    // A new stream may send the nonce of an older stream that is still open.
    let mut another = Envoy::open_path(&place.sds_socket(), STREAM_SECRETS).await;
    another.send(&answer(&["default"], &third));
    assert_eq!(next_names(&mut another).await.0, ["default"]);
}

#[tokio::test]
async fn invalid_first_requests_end_their_stream_with_a_reason_or_are_skipped() {
    let (_istiod, place, _agent) = start().await;
    let long = "x".repeat(1 << 20);
    for name in ["", "default ", "file-cert:/etc/passwd", &long] {
        let status = ask_for_secrets(&place, &[name]).await.end().await;
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().starts_with("unknown secret name"));
        assert!(status.message().len() < 1000);
    }
    let without_node = DiscoveryRequest { node: None, ..request(SECRET, &["default"]) };
    let envoy = Envoy::open_path(&place.sds_socket(), STREAM_SECRETS).await;
    envoy.send(&without_node);
    let status = envoy.end().await;
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(status.message(), "missing node information");

    let refusal = DiscoveryRequest {
        error_detail: Some(rpc::Status::default()),
        ..answer(&["default"], "never sent")
    };
    for first in [refusal, request(SECRET, &[])] {
        let mut envoy = Envoy::open_path(&place.sds_socket(), STREAM_SECRETS).await;
        envoy.send(&first);
        envoy.send(&request(SECRET, &["ROOTCA"]));
        assert_eq!(next_names(&mut envoy).await.0, ["ROOTCA"]);
    }
}

#[tokio::test]
async fn the_workloads_key_is_served_only_under_the_name_default() {
    let (_istiod, place, _agent) = start().await;
    let odd = [
        "Default",
        "DEFAULT",
        "default ",
        " default",
        "default\0",
        "./default",
        "default/",
        "rootca",
        "ROOTCA,default",
        "default,ROOTCA",
        "file-root:",
        "file-cert:default",
        "kubernetes://default",
        "invalid://",
        "istio://default",
        "spiffe://cluster.local/ns/default/sa/bench",
        "*",
    ];
    for name in odd {
        let status = ask_for_secrets(&place, &[name]).await.end().await;
        assert_eq!(status.code(), Code::InvalidArgument, "{name:?}");
    }
    let mut many: Vec<&str> = odd.to_vec();
    many.push("ROOTCA");
    let mut envoy = ask_for_secrets(&place, &many).await;
    let response = next_response(&mut envoy).await;
    assert_eq!(response.resources.len(), 1);
    let text = String::from_utf8_lossy(&response.resources[0].value);
    assert!(!text.contains("PRIVATE KEY"), "ROOTCA came with a key");
}

#[tokio::test]
async fn too_many_names_and_too_large_requests_end_their_stream() {
    let (_istiod, place, _agent) = start().await;
    let names: Vec<String> = (0..10_001).map(|i| format!("name {i}")).collect();
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    let status = ask_for_secrets(&place, &names).await.end().await;
    assert_eq!(status.code(), Code::ResourceExhausted);
    names.truncate(9_999);
    names.push("default");
    let mut envoy = ask_for_secrets(&place, &names).await;
    assert_eq!(next_names(&mut envoy).await.0, ["default"]);
    let large = "x".repeat(5 << 20);
    let status = ask_for_secrets(&place, &[&large]).await.end().await;
    assert_eq!(status.code(), Code::OutOfRange, "{}", status.message());
}

#[tokio::test]
async fn other_methods_are_not_implemented() {
    let (_istiod, place, _agent) = start().await;
    let service = "/envoy.service.secret.v3.SecretDiscoveryService";
    let envoy = Envoy::open_path(&place.sds_socket(), &format!("{service}/Other")).await;
    assert_eq!(envoy.end().await.code(), Code::Unimplemented);
}

#[tokio::test]
async fn text_from_envoy_cannot_forge_a_log_line() {
    let (_istiod, place, agent) = start().await;
    let forged = "x\nforged\r\x1b[2Jforged\u{2028}forged";
    let mut envoy = ask_for_secrets(&place, &["default", forged]).await;
    let (_, nonce) = next_names(&mut envoy).await;
    envoy.send(&DiscoveryRequest {
        error_detail: Some(rpc::Status { message: forged.into(), ..Default::default() }),
        ..answer(&["default"], &nonce)
    });
    agent.logs("ACK ERROR").await;
    let log = agent.log();
    let whole = log.lines().filter(|line| line.contains("forged"));
    assert_eq!(whole.clone().count(), 2, "each is logged once, on one line");
    for line in whole {
        assert!(line.starts_with("20") && !line.contains(['\r', '\x1b', '\u{2028}']));
    }
}

/// Runs a command as another user, and returns its output. Prints the reason and returns None if this is not
/// possible.
fn as_user(user: u32, command: &mut Command) -> Option<String> {
    let output = command.uid(user).gid(user).current_dir("/").output();
    match output {
        Ok(output) if output.status.success() => {
            Some(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Ok(output) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            eprintln!("{command:?} cannot be run as user {user}: {error}. This is not tested.");
            None
        }
    }
}

/// A Perl program that greets an HTTP/2 server, and prints how many bytes of its first frame header arrive: 9 or 0.
const GREETED: &str = r#"
    use IO::Socket::UNIX;
    $SIG{PIPE} = "IGNORE";
    my $socket = IO::Socket::UNIX->new(Peer => $ARGV[0]) or die "cannot connect: $!";
    syswrite($socket, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
    my $read = sysread($socket, my $greeting, 9);
    print defined $read ? $read : 0;
"#;

#[tokio::test]
async fn users_without_permission_are_disconnected_counted_and_logged_once() {
    let istiod = local_istiod().await;
    for (setting, user, expected) in
        [("1337", 1337, "9"), ("1337", 4711, "0"), ("4711", 4711, "9"), ("any", 4711, "9")]
    {
        let place = Place::with_envoy(&istiod).set("ISTIO_AGENT_SDS_USERS", setting);
        let socket = place.sds_socket();
        let directories = socket.strip_prefix(place.path("")).unwrap().ancestors().skip(1);
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        for directory in directories {
            let all = Permissions::from_mode(0o755);
            std::fs::set_permissions(place.path(directory), all).unwrap();
        }
        let agent = place.start().await;
        for _ in 0..2 {
            let mut perl = Command::new("perl");
            perl.args(["-e", GREETED]).arg(&socket);
            let Some(greeted) = as_user(user, &mut perl) else {
                return;
            };
            assert_eq!(greeted, expected, "user {user}, setting {setting:?}");
        }
        let is_refused = expected == "0";
        let logged = agent.log().matches("refused user 4711").count();
        assert_eq!(logged, usize::from(is_refused));
        let page = ask(place.status_port(), "GET /metrics").await.body;
        let counted = page.contains("istio_agent_sds_refused_connections_total 2\n");
        assert_eq!(counted, is_refused, "{page}");
        // The user of this test, which is the agent's, is served with every setting.
        let mut envoy = ask_for_secrets(&place, &["default"]).await;
        assert_eq!(next_names(&mut envoy).await.0, ["default"]);
    }
}

/// Requests a secret by its name, and returns it.
async fn secret(place: &Place, name: &str) -> secret::Type {
    let mut envoy = ask_for_secrets(place, &[name]).await;
    let response = next_response(&mut envoy).await;
    let secret = Secret::decode(&*response.resources[0].value).unwrap();
    secret.r#type.unwrap()
}

#[tokio::test]
async fn the_revocation_list_goes_with_the_workloads_roots_where_it_exists() {
    const LIST: &str = "/var/run/secrets/istio/crl/ca-crl.pem";
    // The path of the list is the same for all agents of a machine, so only this agent sees the list: in its own
    // mount namespace.
    let starting = format!(
        "mount -t tmpfs tmpfs /var/run && mkdir -p $(dirname {LIST}) && echo a list > {LIST} && \
         exec \"$0\" \"$@\""
    );
    let alone = ["unshare", "--mount", "sh", "-c"];
    let trial = Command::new(alone[0]).args(&alone[1..]).args([&starting, "true"]).output();
    if !trial.is_ok_and(|trial| trial.status.success()) {
        eprintln!("A file system of its own cannot be had here. This is not tested.");
        return;
    }
    let istiod = local_istiod().await;
    for (enabled, exists) in [("true", true), ("false", true), ("true", false)] {
        let mut place = Place::with_envoy(&istiod).set("PILOT_ENABLE_CA_CRL", enabled);
        if exists {
            place = place.started_by(&[&alone[..], &[&starting]].concat());
        }
        place.write("other.pem", istiod.root_pem());
        let _agent = place.start().await;
        for (name, expected) in
            [("ROOTCA", enabled == "true" && exists), ("file-root:other.pem", false)]
        {
            let secret::Type::ValidationContext(context) = secret(&place, name).await else {
                panic!("no roots");
            };
            let list = context.crl.and_then(|list| list.specifier);
            let named = Specifier::Filename(LIST.to_owned());
            assert_eq!(list, expected.then_some(named), "{name} {enabled} {exists}");
        }
    }
}

#[tokio::test]
async fn a_provider_of_private_keys_is_handed_each_key_as_configured() {
    let istiod = local_istiod().await;
    for (kind, fallback) in [("cryptomb", true), ("qat", false)] {
        let method = json!({ "pollDelay": "10.020s", "fallback": fallback });
        let place = Place::with_envoy(&istiod).proxy("privateKeyProvider", json!({ kind: method }));
        let key = KeyPair::generate().unwrap();
        let chain = CertificateParams::default().self_signed(&key).unwrap();
        place.write("chain.pem", chain.pem());
        place.write("key.pem", key.serialize_pem());
        let _agent = place.start().await;
        for name in ["default", "file-cert:chain.pem~key.pem"] {
            let secret::Type::TlsCertificate(pair) = secret(&place, name).await else {
                panic!("no key");
            };
            assert!(pair.certificate_chain.is_some() && pair.private_key.is_none());
            let provider = pair.private_key_provider.unwrap();
            assert_eq!(provider.provider_name, kind);
            assert_eq!(provider.fallback, fallback, "{kind}");
            let Some(ConfigType::TypedConfig(config)) = provider.config_type else {
                panic!("no configuration");
            };
            let message = match kind {
                "qat" => "QatPrivateKeyMethodConfig",
                _ => "CryptoMbPrivateKeyMethodConfig",
            };
            let package = "envoy.extensions.private_key_providers";
            let expected = format!("type.googleapis.com/{package}.{kind}.v3alpha.{message}");
            assert_eq!(config.type_url, expected);
            assert!(String::from_utf8_lossy(&config.value).contains("PRIVATE KEY"));
            // The delay is field 2 of the message: 10 s and 20,000,000 ns.
            let delay = [0x12, 7, 8, 10, 0x10, 0x80, 0xda, 0xc4, 9];
            assert!(config.value.ends_with(&delay), "{kind}");
        }
    }
}
