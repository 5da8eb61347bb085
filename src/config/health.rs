//! Configures the workload's health checks, from ProxyConfig's `readinessProbe`.
//!
//! If the probe has no kind, pilot-agent exits at its first check; this agent reports a configuration
//! problem. Other values that can never work cause a warning, because they only keep the workload unhealthy.

use std::time::Duration;

use ::http::{HeaderMap, HeaderName, HeaderValue, header};

use super::Loader;
use crate::health::{Check, Config};
use crate::probe::{self, Kind, Probe};
use crate::proxy_config::{HttpHeader, readiness_probe as given};

const MEMBER: &str = "readinessProbe";
const USER_AGENT: HeaderValue = HeaderValue::from_static("istio-probe/1.0");

impl Loader<'_> {
    /// None without a `readinessProbe`.
    pub(super) fn health(&mut self) -> Option<Config> {
        let given = self.proxy_config.readiness_probe.clone()?;
        let timeout = self.seconds("timeoutSeconds", given.timeout_seconds, 1);
        Some(Config {
            initial_delay: self.seconds("initialDelaySeconds", given.initial_delay_seconds, 0),
            period: self.seconds("periodSeconds", given.period_seconds, 10),
            successes: self.number("successThreshold", given.success_threshold, 1),
            failures: self.number("failureThreshold", given.failure_threshold, 1),
            check: self.check(given.check, timeout)?,
            probes: probe::Config {
                source: self.probe_source(),
                offers_http2: false,
                keeps_connections: false,
            },
        })
    }

    fn check(&mut self, given: Option<given::Check>, timeout: Duration) -> Option<Check> {
        let (host, port, kind, headers) = match given {
            Some(given::Check::HttpGet(http)) => {
                let headers = self.headers(http.http_headers);
                let port = self.port("httpGet", http.port);
                let kind = Kind::Http {
                    is_https: http.scheme.eq_ignore_ascii_case("https"),
                    path: if http.path.is_empty() { "/".to_owned() } else { http.path },
                };
                (http.host, port, kind, headers)
            }
            Some(given::Check::TcpSocket(tcp)) => {
                (tcp.host, self.port("tcpSocket", tcp.port), Kind::Tcp, HeaderMap::new())
            }
            Some(given::Check::Grpc(grpc)) => {
                let port = self.port("grpc", grpc.port);
                let kind = Kind::Grpc { service: grpc.service };
                (String::new(), port, kind, self.headers(Vec::new()))
            }
            Some(given::Check::Exec(exec)) if !exec.command.is_empty() => {
                return Some(Check::Exec(exec.command, timeout));
            }
            _ => {
                let expected = "httpGet, tcpSocket, grpc, or exec with a command";
                self.problem(MEMBER, "no check", expected);
                return None;
            }
        };
        let probe = Probe {
            host: if host.is_empty() { self.application() } else { host },
            port,
            kind,
            timeout,
        };
        Some(Check::Probe(probe, headers))
    }

    fn port(&mut self, kind: &str, given: u32) -> u16 {
        let port = u16::try_from(given).unwrap_or_default();
        if port == 0 {
            let subject = format!("{MEMBER}.{kind}.port");
            self.warn(subject, given, "a port from 1 to 65535", "the workload stays unhealthy");
        }
        port
    }

    /// Returns the headers that can be sent. Adds the user agent of probes if none is given.
    fn headers(&mut self, given: Vec<HttpHeader>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for HttpHeader { name, value } in given {
            if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), value.parse()) {
                headers.append(name, value);
            } else {
                let subject = format!("{MEMBER}.httpGet.httpHeaders");
                self.warn(subject, name, "a header that HTTP allows", "the header is not sent");
            }
        }
        headers.entry(header::USER_AGENT).or_insert(USER_AGENT);
        headers
    }

    fn seconds(&mut self, member: &str, given: i32, default: u32) -> Duration {
        Duration::from_secs(self.number(member, given, default).into())
    }

    /// Reads a number. Zero is the default, like a missing member.
    fn number(&mut self, member: &str, given: i32, default: u32) -> u32 {
        match u32::try_from(given) {
            Ok(0) => default,
            Ok(given) => given,
            Err(_) => {
                let subject = format!("{MEMBER}.{member}");
                self.warn(subject, given, "a positive number", format!("{default} is used"));
                default
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::machine;

    fn config(proxy_config: &'static str) -> Config {
        let machine = machine(&[("PROXY_CONFIG", proxy_config)]);
        machine.config().health.expect("health checks")
    }

    #[test]
    fn a_readiness_probe_has_the_defaults_of_pilot_agent() {
        let found = config("readinessProbe: {tcpSocket: {port: 8080}}");
        let times = (found.initial_delay, found.period);
        assert_eq!(times, (Duration::ZERO, Duration::from_secs(10)));
        assert_eq!((found.successes, found.failures), (1, 1));
        let expected = Probe {
            host: "10.0.0.9".to_owned(),
            port: 8080,
            kind: Kind::Tcp,
            timeout: Duration::from_secs(1),
        };
        assert_eq!(found.check, Check::Probe(expected, HeaderMap::new()));
    }

    #[test]
    fn each_kind_of_readiness_probe_becomes_its_check() {
        let user_agent = [(header::USER_AGENT, USER_AGENT)].into_iter().collect::<HeaderMap>();
        let mut headers = user_agent.clone();
        headers.insert("x-a", HeaderValue::from_static("1"));
        let probe = |host: &str, kind| Probe {
            host: host.to_owned(),
            port: 80,
            kind,
            timeout: Duration::from_secs(3),
        };
        let http = |is_https, path: &str| Kind::Http { is_https, path: path.to_owned() };
        for (given, expected) in [
            (
                "readinessProbe: {timeoutSeconds: 3, httpGet: {port: 80}}",
                Check::Probe(probe("10.0.0.9", http(false, "/")), user_agent.clone()),
            ),
            (
                "readinessProbe: {timeoutSeconds: 3, httpGet: {port: 80, host: a.test, scheme: HTTPS, path: /x?y, httpHeaders: [{name: x-a, value: '1'}]}}",
                Check::Probe(probe("a.test", http(true, "/x?y")), headers),
            ),
            (
                "readinessProbe: {timeoutSeconds: 3, grpc: {port: 80, service: s}}",
                Check::Probe(probe("10.0.0.9", Kind::Grpc { service: "s".to_owned() }), user_agent),
            ),
            (
                "readinessProbe: {timeoutSeconds: 3, exec: {command: [/bin/test, -e, /x]}}",
                Check::Exec(
                    ["/bin/test", "-e", "/x"].map(str::to_owned).into(),
                    Duration::from_secs(3),
                ),
            ),
        ] {
            let found = config(given);
            assert_eq!(found.check, expected, "{given}");
        }
    }

    #[test]
    fn a_probe_without_kind_is_a_problem_and_a_failing_one_warns() {
        for (probe, subject) in [
            ("readinessProbe: {}", "readinessProbe"),
            ("readinessProbe: {exec: {}}", "readinessProbe"),
            (
                "readinessProbe: {tcpSocket: {port: http}}",
                "readinessProbe.tcpSocket.port of PROXY_CONFIG line 1",
            ),
        ] {
            let found = machine(&[("PROXY_CONFIG", probe)]).subjects();
            assert!(found.iter().any(|found| found == subject), "{probe}: {found:?}");
        }
        for (probe, subject) in [
            ("readinessProbe: {tcpSocket: {port: 1}, grpc: {port: 1}}", "PROXY_CONFIG line 1"),
            ("readinessProbe: {tcpSocket: {port: 0}}", "readinessProbe.tcpSocket.port"),
            ("readinessProbe: {grpc: {port: 65536}}", "readinessProbe.grpc.port"),
            (
                "readinessProbe: {periodSeconds: -1, tcpSocket: {port: 1}}",
                "readinessProbe.periodSeconds",
            ),
            (
                "readinessProbe: {httpGet: {port: 1, httpHeaders: [{name: 'a b', value: x}]}}",
                "readinessProbe.httpGet.httpHeaders",
            ),
        ] {
            let config = machine(&[("PROXY_CONFIG", probe)]).config();
            let mut subjects = config.warnings.iter().map(|one| one.subject.as_str());
            assert!(subjects.any(|found| found == subject), "{:?}", config.warnings);
            assert!(config.health.is_some_and(|health| !health.period.is_zero()));
        }
    }
}
