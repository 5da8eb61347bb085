//! Failures of a connection to istiod in an operator's words.

use std::io::ErrorKind;
use std::time::{Duration, SystemTime};

use rustls::{CertificateError, Error as TlsError};
use tonic::{Code, Status};

use super::certificates::Facts;
use super::report::{Check, Level};
use crate::dial;
use crate::istiod::probe::unverified_certificate;
use crate::istiod::{Cause, Config, Security};
use crate::trust_anchors::Roots;

const RUNNING: &str =
    "is istiod ready, and is it its port? kubectl get pods,endpoints -n istio-system";
const POLICY: &str = "a NetworkPolicy, a firewall or a security group may drop packets to it";
const RENEWED: &str = "renew istiod's certificate, or the authority's that signed it";
const LOG: &str = "istiod logs why: kubectl logs -n istio-system deployment/istiod";

/// `limit` is for a second handshake, which shows the certificate that was refused.
pub(super) async fn explain(
    what: String,
    config: &Config,
    cause: &Cause,
    limit: Duration,
) -> Check {
    let text = cause.to_string();
    let check = Check::error(what.as_str(), &text);
    match cause {
        Cause::Connect(dial::Error::Connect { source, .. }) => match source.kind() {
            ErrorKind::ConnectionRefused => check.expected("a listener").remedy(RUNNING),
            ErrorKind::NetworkUnreachable | ErrorKind::AddrNotAvailable => Check::error(
                what,
                format!("{text}: this machine has no route of that family"),
            )
            .remedy("the pod needs an address of that family, or the name others"),
            _ => check.remedy(POLICY),
        },
        Cause::TimedOut { doing, .. } if doing.starts_with("connecting") => {
            check.expected("a connection").remedy(POLICY)
        }
        Cause::TimedOut { .. } => check.expected("an answer").remedy(RUNNING),
        Cause::Proxy { .. } => check.expected("a tunnel").remedy(
            "allow it in the proxy, or name istiod in NO_PROXY so that it is dialed directly",
        ),
        Cause::Handshake { source, name, .. } => {
            let Some(error) = source.get_ref().and_then(|e| e.downcast_ref::<TlsError>()) else {
                return check.remedy(RUNNING);
            };
            let shown = match error {
                TlsError::InvalidCertificate(_) => unverified_certificate(config, limit).await,
                _ => None,
            };
            let shown = shown.and_then(|der| Facts::read(&der));
            explain_tls(check, config, error, name, shown.as_ref())
        }
        Cause::Alpn { .. } | Cause::NotHttp2 { .. } => {
            let remedy = "it is not istiod's gRPC port (15012, or 15010 in plaintext): look at \
                          discoveryAddress, and at load balancers between, which must pass HTTP/2";
            check.expected("HTTP/2").remedy(remedy)
        }
        Cause::Tls(_) | Cause::Address { .. } | Cause::Connect(_) | Cause::Stopping => check,
    }
}

/// Whether this machine cannot reach addresses of that family.
pub(super) fn is_without_route(cause: &Cause) -> bool {
    let kinds = [ErrorKind::NetworkUnreachable, ErrorKind::AddrNotAvailable];
    match cause {
        Cause::Connect(dial::Error::Connect { source, .. }) => kinds.contains(&source.kind()),
        _ => false,
    }
}

fn explain_tls(
    check: Check,
    config: &Config,
    error: &TlsError,
    name: &str,
    shown: Option<&Facts>,
) -> Check {
    let certificate = |found: String| Check {
        found,
        ..check.clone()
    };
    let roots = match &config.security {
        Security::Tls(tls) => match &tls.roots {
            Roots::File(path) => path.display().to_string(),
            Roots::System(_) => "the system's".to_owned(),
        },
        Security::Plaintext => String::new(),
    };
    match (error, shown) {
        (TlsError::InvalidCertificate(refused), Some(shown)) => match refused {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => certificate(format!(
                "its certificate ({shown}) was issued by {:?}, which none of the roots in {roots} has signed",
                shown.issuer
            ))
            .expected("a certificate of this mesh")
            .remedy(
                "compare the roots with the config map istio-ca-root-cert of istiod's cluster, and \
                 whether discoveryAddress leads to another mesh",
            ),
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                certificate(format!("its certificate is for {shown}")).expected(name).remedy(
                    "set discoveryAddress to one of these names, or ISTIOD_SAN to the name expected",
                )
            }
            CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. } => {
                let life = shown.life(&check.name, RENEWED, SystemTime::now());
                match life.level {
                    Level::Error => life,
                    // It is another one of the chain, or a root.
                    _ => check.remedy(RENEWED),
                }
            }
            _ => check,
        },
        (TlsError::InvalidMessage(_), _) => {
            let remedy = "it is not istiod's TLS port (15012); for plaintext (15010) set \
                          controlPlaneAuthPolicy: NONE";
            certificate(format!("it does not speak TLS: {error}")).expected("TLS").remedy(remedy)
        }
        (TlsError::AlertReceived(_), _) => check.expected("a handshake").remedy(LOG),
        _ => check.remedy(RUNNING),
    }
}

/// The answer to a discovery request, and whether istiod accepted the token if it said so.
pub(super) fn explain_status(what: String, status: &Status) -> (Check, Option<bool>) {
    let found = format!("{:?}: {}", status.code(), status.message());
    let check = Check::error(what, found).expected("a response");
    match status.code() {
        Code::Unauthenticated => {
            let remedy = "istiod does not accept the token: its API server may be another one, or \
                          not reachable; ";
            (check.remedy(format!("{remedy}{LOG}")), Some(false))
        }
        Code::PermissionDenied => {
            let remedy = "POD_NAMESPACE and SERVICE_ACCOUNT must be those of the token; ";
            (check.remedy(format!("{remedy}{LOG}")), None)
        }
        _ => (check.remedy(LOG), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_that_has_expired_is_an_error_although_its_leaf_has_not() {
        let now = SystemTime::now();
        let day = Duration::from_secs(86_400);
        let leaf = Facts {
            subject: "CN=istiod".to_owned(),
            issuer: "CN=intermediate".to_owned(),
            names: vec!["istiod.istio-system.svc".to_owned()],
            not_before: now - day,
            not_after: now + day,
        };
        let config = crate::istiod::fake::plaintext("127.0.0.1:1");
        let failed = Check::error("connection", "invalid peer certificate: Expired");
        let error = TlsError::InvalidCertificate(CertificateError::Expired);
        let check = explain_tls(failed, &config, &error, "istiod", Some(&leaf));
        assert_eq!(check.level, Level::Error, "{check}");
        assert!(check.remedy.contains("authority"), "{check}");
    }
}
