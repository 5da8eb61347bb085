//! Sends one query to one server, to learn whether it answers, or forwards back to this agent.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::timeout;

use super::Forwarder;
use super::message::Query;
use crate::dns::metrics::rcode_name;
use crate::dns::{Transport, wire};
use crate::problem::{Code, Problem};

/// Wait before the query is sent again, because packets get lost.
const TRY: Duration = Duration::from_millis(500);
const TRIES: u32 = 3;

/// The longest domain that leaves room for the label of a probe.
const MAX_DOMAIN: usize = 200;

impl Forwarder {
    /// Returns the response code of a server's answer. Fails if that is SERVFAIL or REFUSED, if the server does
    /// not answer, or if the query comes back to this agent. The query is for a random name, below `domain` if
    /// that is valid, so that this agent recognises the query if it comes back.
    pub async fn probe(&self, server: SocketAddr, domain: &str) -> Result<&'static str, Problem> {
        let subject = format!("resolver {server}");
        let unreachable = Code::DnsResolverUnreachable;
        let Some(query) = Query::parse(probe_query(domain).into()) else {
            return Err(Problem::new(unreachable, subject, "no question"));
        };
        let slot = match self.0.in_flight.join(&query, Transport::Udp) {
            Ok(slot) => slot,
            Err(refused) => return Err(Problem::new(unreachable, subject, refused.reason)),
        };
        for _ in 0..TRIES {
            let sent = self.0.upstream.exchange(&query, &slot.query, server, Transport::Udp);
            let received = timeout(TRY, sent).await;
            if slot.query.has_returned() {
                let found = "its queries come back to this agent";
                return Err(Problem::new(Code::DnsLoop, subject, found));
            }
            let rcode = match received {
                Ok(Ok(reply)) => rcode_name(reply.rcode().into()),
                Ok(Err(error)) => return Err(Problem::new(unreachable, subject, error)),
                Err(_) => continue,
            };
            if !["SERVFAIL", "REFUSED"].contains(&rcode) {
                return Ok(rcode);
            }
            let found = format!("answers {rcode}");
            return Err(Problem::new(Code::DnsResolverRefuses, subject, found));
        }
        let limit = TRY.saturating_mul(TRIES).as_secs_f64();
        let found = format!("no answer within {limit:.1} s");
        Err(Problem::new(Code::DnsResolverSilent, subject, found))
    }
}

/// Encodes a query for the addresses of a random name below `domain`, or below the root if `domain` is
/// not valid.
fn probe_query(domain: &str) -> Vec<u8> {
    let own = format!("istio-agent-{:016x}", fastrand::u64(..));
    let domain = domain.trim_end_matches('.');
    let mut labels = vec![own.as_str()];
    if domain.len() <= MAX_DOMAIN && domain.split('.').all(|it| (1..=63).contains(&it.len())) {
        labels.extend(domain.split('.'));
    }
    let mut bytes = vec![0, 0, wire::RD, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in labels {
        bytes.push(u8::try_from(label.len()).unwrap_or_default());
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    bytes.extend([wire::A, wire::IN].map(u16::to_be_bytes).concat());
    bytes
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::super::tests::upstream::unused_address;
    use super::super::tests::{Answer, Bench, Upstream};
    use super::*;

    async fn probed(server: SocketAddr) -> Result<&'static str, Problem> {
        let bench = Bench::new(&[]);
        bench.forwarder.probe(server, "a.test").await
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_says_what_a_server_answers_or_why_it_does_not() {
        let refuses = Code::DnsResolverRefuses;
        for (rcode, expected) in [(0, Ok("NOERROR")), (2, Err(refuses)), (3, Ok("NXDOMAIN"))] {
            let server = Upstream::answering(move |_| Answer::rcode(rcode)).await;
            assert_eq!(probed(server.address).await.map_err(|it| it.code), expected);
        }
        let silent = Upstream::silent().await;
        let late = probed(silent.address).await.expect_err("late");
        assert_eq!((late.code, &*late.found), (Code::DnsResolverSilent, "no answer within 1.5 s"));
        assert_eq!(silent.seen().len(), 3);
        let refused = probed(unused_address().await).await.expect_err("refused");
        assert_eq!(refused.code, Code::DnsResolverUnreachable);
    }

    proptest! {
        #[test]
        fn any_domain_makes_a_question(domain in "[a-z.]{0,80}|\\PC{0,80}|(a{1,70}\\.){0,9}") {
            let question = probe_query(&domain);
            prop_assert_eq!(wire::question_end(&question), Some(question.len()));
            prop_assert!(Query::parse(Bytes::from(question)).is_some());
        }
    }
}
