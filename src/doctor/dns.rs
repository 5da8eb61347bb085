//! The name table and the resolvers.

use super::Subject;
use super::report::Check;

pub(super) async fn checks(subject: Subject<'_>) -> Vec<Check> {
    if subject.config.dns.is_none() {
        return vec![Check::skipped(
            "DNS",
            "the agent answers no DNS (ISTIO_META_DNS_CAPTURE)",
        )];
    }
    let Some(dns) = subject.running.and_then(|running| running.dns.as_ref()) else {
        return vec![Check::skipped(
            "name table",
            "known to a running agent only",
        )];
    };
    vec![match *dns.ready().borrow() {
        true => Check::ok("name table", "received"),
        false => Check::error("name table", "not received from istiod yet"),
    }]
}
