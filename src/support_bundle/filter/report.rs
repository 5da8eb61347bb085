//! Leaves out of the doctor's report what other processes may have written.

use super::is_name;
use crate::problem::{Code, sentence};
use crate::report::Report;

/// The codes of findings that the agent composes of names, addresses, numbers, times and its own words. Others quote
/// Envoy, istiod, the application, a program, a rule of others, or the value of a setting.
const OWN: &str = "
APPLICATION_PORT_CLOSED BOOTSTRAP_HOST_UNRESOLVED BOOTSTRAP_MEMBER_IGNORED CAPTURE_RULES_MISSING
CERTIFICATE_CHAIN_REJECTED CERTIFICATE_EXPIRED CERTIFICATE_EXPIRES_SOON CERTIFICATE_NOT_ISSUED
CERTIFICATE_NOT_YET_VALID CHECKS_LATE CIRCUIT_BREAKER_OPEN CLOCKS_DIFFER CLUSTER_WARMING
DIRECTORY_FORBIDDEN DIRECTORY_READ_ONLY DISCOVERY_STALLED DISK_FULL DNS_NAME_TABLE_MISSING
DNS_NOT_CAPTURED DNS_PORT_TAKEN DNS_RESOLVER_MISSING DNS_RESOLVER_REFUSES DNS_RESOLVER_SILENT
DNS_RESOLVER_UNREACHABLE DNS_SERVER_SILENT ENVOY_HANGS ENVOY_MISSING ENVOY_NOT_EXECUTABLE
ENVOY_STOPPING HANDSHAKES_FAILED INBOUND_NOT_MATCHED ISTIOD_CERTIFICATE_EXPIRED
ISTIOD_CERTIFICATE_NAME ISTIOD_CERTIFICATE_NOT_YET_VALID ISTIOD_CERTIFICATE_UNTRUSTED
ISTIOD_CONNECTION_LOST ISTIOD_CONNECTION_REFUSED ISTIOD_NAME_NOT_RESOLVED ISTIOD_NOT_REACHABLE
ISTIOD_NOT_TLS ISTIOD_NO_ROUTE ISTIOD_TIMEOUT ISTIOD_TLS_REFUSED ISTIOD_TOKEN_EXPIRED
ISTIOD_TOKEN_MISSING KEPT_CONFIG_UNWRITABLE LISTENERS_MISSING LISTENER_WARMING LOG_SILENT
MEMORY_USED_UP NO_HEALTHY_ENDPOINT OUTPUT_CERTS_UNWRITABLE PEER_CERTIFICATE_REFUSED PEER_EXPECTS_TLS
PEER_IN_PLAIN_TEXT PEER_REFUSES_HANDSHAKE PORTS_USED_UP RBAC_DENIED REQUESTS_FAIL
REVOCATION_LIST_EMPTY REVOCATION_LIST_UNUSABLE ROOTS_EXPIRED SECRET_AWAITED SECRET_FILE_MISSING
SOCKET_DIRECTORY SOCKET_HANGS SOCKET_NOT_SERVED SOCKET_TAKEN STANDBY_ABSENT STATUS_PORT_TAKEN
SUBSCRIPTION_UNANSWERED UPSTREAM_UNREACHABLE";

/// The groups whose passed or skipped checks quote answers of the application, its paths, or programs.
const QUOTING: [&str; 2] = ["capture", "probes"];

/// Replaces the texts of findings with other codes by the texts of the codes. Adds their number.
pub(crate) fn reduced(mut report: Report, left_out: &mut u64) -> Report {
    for group in &mut report.groups {
        for check in &mut group.checks {
            let is_own = match &*check.code {
                "" => !QUOTING.contains(&&*group.name),
                code => OWN.split_whitespace().any(|own| own == code),
            };
            if is_own {
                continue;
            }
            *left_out += 1;
            let code = Code::named(&check.code);
            check.found = code.map_or("left out", Code::cause).to_owned();
            check.consequence = code.map_or("", Code::consequence).to_owned();
            check.remedy = code.map_or("", Code::remedy).to_owned();
            check.expected.clear();
            check.name = Some(&check.name).filter(|it| is_name(it)).cloned().unwrap_or_default();
        }
    }
    if let Some(first) = report.findings().first() {
        let state = report.verdict.split(": ").next().unwrap_or_default();
        let text = sentence(&first.name, &first.found, &first.expected, ["", ""], &first.code);
        report.verdict = format!("{state}: {text}");
        report.remedy.clone_from(&first.remedy);
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_listed_code_exists() {
        for name in OWN.split_whitespace() {
            assert!(Code::named(name).is_some(), "{name}");
        }
    }
}
