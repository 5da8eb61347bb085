//! The connections to istiod, for discovery and for certificates.
//!
//! Both share one connection unless their configuration differs. Certificate files are read at each
//! dial; here they are only looked for.

use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use indexmap::IndexSet;

use super::environment::{self as variables, Environment, Variable};
use super::{Loader, below, entries};
use crate::address;
use crate::compliance::Policy;
use crate::dial::proxy::{Proxies, Proxy};
use crate::istiod::{Config, Keepalive, Limits, Security, tls, token};
use crate::problem::{Problem, codes};
use crate::trust_anchors::SystemRoots;
use crate::xds::last_known_good;

/// The shortest interval of pings gRPC clients use; servers treat more pings as an attack.
const MIN_INTERVAL: Duration = Duration::from_secs(10);
const MIN_TIMEOUT: Duration = Duration::from_secs(1);

const TOKEN: &str = "./var/run/secrets/tokens/istio-token";
const ISTIOD_ROOT: &str = "./var/run/secrets/istio/root-cert.pem";
/// Where a pod has that root from.
const CONFIG_MAP: &str = "ConfigMap istio-ca-root-cert";
const MOUNTED_ROOT: &str = "./etc/certs/root-cert.pem";

/// The name in istiod's certificate when istiod is dialled as localhost.
pub(super) const ISTIOD_NAME: &str = "istiod.istio-system.svc";

/// The identity token that Google's metadata service issues, written to a file.
#[derive(Clone, Debug)]
pub struct GoogleToken {
    pub audience: String,
    pub path: PathBuf,
}

/// The addresses of `DISCOVERY_ADDRESS`, each once.
pub(super) fn addresses(text: &str) -> Vec<String> {
    let addresses: IndexSet<_> = entries(text).map(str::to_owned).collect();
    addresses.into_iter().collect()
}

impl Loader<'_> {
    /// The connection for discovery, and the one for certificates if there is one and it differs.
    ///
    /// Problems of the latter are kept apart if another process `may_serve` the workload's secrets,
    /// because it is not used then.
    pub(super) fn control_plane(
        &mut self,
        has_authority: bool,
        may_serve: bool,
    ) -> (Config, Option<Config>) {
        let address = self.proxy_config.discovery_address.clone();
        let security = if self.proxy_config.is_plaintext() {
            Security::Plaintext
        } else {
            let mounted = self.is_file(MOUNTED_ROOT);
            // A workload with certificates from files names the files of istiod's as well.
            let named = match has_authority {
                true => None,
                false => self.metadata_path("ISTIO_META_TLS_CLIENT_ROOT_CERT"),
            };
            let roots = self.roots(&variables::XDS_ROOT_CA, mounted, named);
            let mut tls = self.tls(roots, &address, true);
            if !has_authority && tls.client.is_none() {
                tls.client = self.mounted_client();
            }
            Security::Tls(tls)
        };
        let discovery = Config {
            proxy: self.proxy(&address),
            address,
            security,
            // The agent writes Google's token to the file.
            token: match self.get(&variables::CREDENTIAL_FETCHER_TYPE).as_str() {
                "Mock" => token::Source::Mock,
                _ => token::Source::File(TOKEN.into()),
            },
            metadata: self.metadata("XDS_HEADER_"),
            keepalive: Keepalive {
                interval: self.at_least(&variables::GRPC_KEEPALIVE_INTERVAL, MIN_INTERVAL),
                timeout: self.at_least(&variables::GRPC_KEEPALIVE_TIMEOUT, MIN_TIMEOUT),
            },
            limits: Limits::default(),
            setting: "discoveryAddress",
            identity: self.identity(),
            others: Vec::new(),
        };
        let discovery = self.with_others(discovery, true);
        if !has_authority {
            return (discovery, None);
        }
        let before = self.notes.problems.len();
        let certificates = self.certificates(&discovery);
        if may_serve {
            self.authority_problems = self.notes.problems.split_off(before);
        }
        let is_same = discovery.address == certificates.address
            && discovery.security == certificates.security
            && discovery.metadata == certificates.metadata;
        (discovery, (!is_same).then_some(certificates))
    }

    pub(super) fn kept(&mut self) -> Option<last_known_good::Config> {
        Some(last_known_good::Config {
            volume: self.volume(&variables::ISTIO_AGENT_KEEP_CONFIG)?,
            max_bytes: self
                .get(&variables::ISTIO_AGENT_KEEP_CONFIG_MAX_BYTES)
                .into(),
            max_age: self.get(&variables::ISTIO_AGENT_KEEP_CONFIG_MAX_AGE),
            after: self.get(&variables::ISTIO_AGENT_KEEP_CONFIG_AFTER),
            on_nack: self.get(&variables::ISTIO_AGENT_KEEP_CONFIG_ON_NACK),
        })
    }

    fn certificates(&mut self, discovery: &Config) -> Config {
        let given = self.text(&variables::CA_ADDR);
        let named = given.is_some();
        let address = given.unwrap_or_else(|| discovery.address.clone());
        // The validation reports an address of ProxyConfig.
        if named && address::split(&address).is_none() {
            self.problem("CA_ADDR", &address, "host:port with a port from 1 to 65535");
        }
        let security = if address.ends_with(":15010") {
            Security::Plaintext
        } else {
            let mounted = self.get(&variables::PILOT_CERT_PROVIDER) == "custom";
            let roots = self.roots(&variables::CA_ROOT_CA, mounted, None);
            Security::Tls(self.tls(roots, &address, !named))
        };
        let config = Config {
            proxy: self.proxy(&address),
            address,
            security,
            setting: if named { "CA_ADDR" } else { discovery.setting },
            metadata: self.metadata("CA_HEADER_"),
            others: Vec::new(),
            ..discovery.clone()
        };
        match config.address == discovery.address {
            true => self.with_others(config, !named),
            false => config,
        }
    }

    /// The connection, which goes to another control plane of `DISCOVERY_ADDRESS` while this one fails.
    fn with_others(&mut self, mut config: Config, override_name: bool) -> Config {
        let addresses = addresses(&self.get(&variables::DISCOVERY_ADDRESS));
        if !addresses.is_empty() {
            config.setting = variables::DISCOVERY_ADDRESS.name;
        }
        let others = addresses.into_iter().skip(1).map(|address| {
            let mut other = config.clone();
            other.proxy = self.proxy(&address);
            if let Security::Tls(tls) = &mut other.security {
                tls.server_name = self.server_name(&address, override_name);
            }
            other.address = address;
            other
        });
        let others = others.collect();
        Config { others, ..config }
    }

    /// The proxy that leads to an address, if any.
    fn proxy(&self, address: &str) -> Option<Proxy> {
        let (host, port) = address::split(address)?;
        self.proxies.find(true, host, port).cloned()
    }

    /// The token the agent has to write itself, if any.
    pub(super) fn google_token(&mut self) -> Option<GoogleToken> {
        let kind = self.get(&variables::CREDENTIAL_FETCHER_TYPE);
        if !["", "JWT", "Mock", "GoogleComputeEngine"].contains(&&*kind) {
            let expected = "JWT, GoogleComputeEngine or Mock";
            self.problem("CREDENTIAL_FETCHER_TYPE", &kind, expected);
        }
        (kind == "GoogleComputeEngine").then(|| GoogleToken {
            audience: self.get(&variables::TRUST_DOMAIN),
            path: TOKEN.into(),
        })
    }

    fn at_least(&mut self, variable: &Variable<Duration>, least: Duration) -> Duration {
        let found = self.get(variable);
        if found < least {
            let (found, least) = (format!("{found:?}"), format!("{least:?}"));
            let expected = format!("at least {least}");
            self.warn(variable.name, &found, expected, format!("{least} is used"));
        }
        found.max(least)
    }

    fn metadata(&mut self, prefix: &str) -> Vec<(HeaderName, HeaderValue)> {
        let cluster = self.get(&variables::ISTIO_META_CLUSTER_ID);
        let mut metadata = Vec::new();
        for (name, value) in [("clusterid", &*cluster)]
            .into_iter()
            .chain(self.env.with_prefix(prefix))
        {
            // `HeaderName` folds to lower case, as HTTP/2 requires.
            if let (Ok(name), Ok(mut value)) = (name.parse::<HeaderName>(), value.parse()) {
                // A header may be a credential, which is not printed.
                HeaderValue::set_sensitive(&mut value, name != "clusterid");
                metadata.push((name, value));
            } else {
                let subject = format!("{prefix}{name}");
                self.problem(&subject, "(not shown)", "a header's name and value");
            }
        }
        metadata
    }

    fn tls(&mut self, roots: tls::Roots, address: &str, override_name: bool) -> tls::Config {
        let directory = self.text(&variables::PROV_CERT).map(PathBuf::from);
        tls::Config {
            server_name: self.server_name(address, override_name),
            roots,
            client: directory.map(|directory| tls::ClientCertificate {
                chain: directory.join("cert-chain.pem"),
                key: directory.join("key.pem"),
            }),
            policy: self.policy,
        }
    }

    fn server_name(&mut self, address: &str, override_name: bool) -> String {
        let expected = self.text(&variables::ISTIOD_SAN);
        let host = address::split(address).map_or(address, |(host, _)| host);
        match (host, expected) {
            (_, Some(expected)) if override_name => expected,
            (host, _) if host.contains("localhost") => ISTIOD_NAME.to_owned(),
            (host, _) => host.to_owned(),
        }
    }

    /// The client certificate that workloads with mounted files name to istiod as well.
    fn mounted_client(&self) -> Option<tls::ClientCertificate> {
        Some(tls::ClientCertificate {
            chain: self.metadata_path("ISTIO_META_TLS_CLIENT_CERT_CHAIN")?,
            key: self.metadata_path("ISTIO_META_TLS_CLIENT_KEY")?,
        })
    }

    fn metadata_path(&self, name: &str) -> Option<PathBuf> {
        self.proxy_config.metadata(name).map(PathBuf::from)
    }

    /// The first that applies: the variable, a mounted root, the root beside a client certificate, the
    /// root `named` beside mounted certificates, istiod's own.
    fn roots(
        &mut self,
        variable: &Variable<String>,
        mounted: bool,
        named: Option<PathBuf>,
    ) -> tls::Roots {
        let name = variable.name;
        let client = self.text(&variables::PROV_CERT).map(PathBuf::from);
        let named = named.filter(|path| !path.as_os_str().is_empty());
        match (self.text(variable).as_deref(), client, named) {
            (Some("SYSTEM"), ..) => tls::Roots::System(self.system_roots()),
            (Some(file), ..) => self.root_file(name, file.into(), true),
            _ if mounted => self.root_file("PILOT_CERT_PROVIDER", MOUNTED_ROOT.into(), true),
            (_, Some(client), _) => {
                // Discovery reads it when it dials. The authority reports it if it is needed.
                let is_needed = name != variables::XDS_ROOT_CA.name;
                self.root_file("PROV_CERT", client.join("root-cert.pem"), is_needed)
            }
            (.., Some(named)) => self.root_file("TLS_CLIENT_ROOT_CERT", named, true),
            _ if self.get(&variables::PILOT_CERT_PROVIDER) == "none" => {
                let expected = format!("another provider, or {name}, as roots are needed");
                self.problem("PILOT_CERT_PROVIDER", "none", expected);
                tls::Roots::System(self.system_roots())
            }
            _ => self.root_file(CONFIG_MAP, ISTIOD_ROOT.into(), true),
        }
    }

    /// The trust anchors of the operating system.
    pub(super) fn system_roots(&mut self) -> SystemRoots {
        let file = self.get(&variables::SSL_CERT_FILE);
        SystemRoots::new(&file, &self.get(&variables::SSL_CERT_DIR))
    }

    /// A file of roots, which must exist now if `is_needed`.
    fn root_file(&mut self, name: &str, file: PathBuf, is_needed: bool) -> tls::Roots {
        let path = file.display().to_string();
        let subject = format!("root file for istiod ({name})");
        match self.is_file(&path) {
            true => {}
            false if is_needed => {
                let expected = "an existing file of root certificates";
                let problem = Problem::value(codes::FILE_MISSING, subject, &path, expected);
                self.notes.add(problem);
            }
            false => {
                let expected = "a file of root certificates";
                let problem = Problem::value(codes::FILE_MISSING, subject, &path, expected);
                let consequence = "istiod cannot be verified until the file exists";
                self.notes.warnings.push(problem.consequence(consequence));
            }
        }
        tls::Roots::File(file)
    }

    fn is_file(&self, path: &str) -> bool {
        below(self.root, path).is_file()
    }
}

pub(super) fn compliance(env: &Environment, warnings: &mut Vec<Problem>) -> Policy {
    let name = env.get(&variables::COMPLIANCE_POLICY);
    let policy = Policy::parse(&name);
    let found = match policy {
        None => Some(("fips-140-2, fips-140-3 or pqc", "no policy is in force")),
        Some(policy) if policy.lacks_module() => Some((
            "a build with FIPS=1",
            "TLS is restricted, but its cryptographic module is not a validated one",
        )),
        Some(_) => None,
    };
    warnings.extend(found.map(|(expected, consequence)| {
        Problem::replaced("COMPLIANCE_POLICY", &name, expected, consequence)
    }));
    policy.unwrap_or_default()
}

/// Reads the HTTP proxies of the environment, and warns of those that cannot be used.
pub(super) fn proxies(env: &Environment, warnings: &mut Vec<Problem>) -> Proxies {
    let mut proxy = |variable: &Variable<String>| {
        let proxy = Proxy::parse(&of_either_case(env, variable)?);
        if proxy.is_none() {
            let (expected, used) = ("http://host:port", "no proxy is used");
            let (name, found) = (variable.name, "(not shown)");
            warnings.push(Problem::replaced(name, found, expected, used));
        }
        proxy
    };
    Proxies {
        http: proxy(&variables::HTTP_PROXY),
        https: proxy(&variables::HTTPS_PROXY),
        excluded: of_either_case(env, &variables::NO_PROXY).unwrap_or_default(),
    }
}

/// A variable that is also read by its name in lower case, unless it is empty.
fn of_either_case(env: &Environment, variable: &Variable<String>) -> Option<String> {
    let lower = variable.name.to_ascii_lowercase();
    let texts = [variable.name, &lower].map(|name| env.text(name));
    let mut texts = texts.into_iter().flatten();
    texts.find(|text| !text.is_empty()).map(str::to_owned)
}
