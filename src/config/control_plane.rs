//! Configures the connections to istiod, for discovery and for certificates.
//!
//! Both share one connection unless their configuration differs. Certificate files are read at each
//! dial; here the agent only checks that they exist.

use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderName, HeaderValue};

use super::environment::{self as variables, Environment, Variable};
use super::pod::NodeType;
use super::{HOST_PORT, Loader, below};
use crate::istiod::{Config, Keepalive, Limits, Security, tls, token};
use crate::net::address;
use crate::net::dial::proxy::{Proxies, Proxy};
use crate::problem::{Code, Problem};
use crate::trust::compliance::Policy;
use crate::trust::trust_anchors::SystemRoots;
use crate::xds::ledger;

/// The minimum interval of keepalive pings in gRPC clients; servers treat more pings as an attack.
const MIN_INTERVAL: Duration = Duration::from_secs(10);
const MIN_TIMEOUT: Duration = Duration::from_secs(1);

const TOKEN: &str = "./var/run/secrets/tokens/istio-token";
const ISTIOD_ROOT: &str = "./var/run/secrets/istio/root-cert.pem";
/// The source of that root in a pod.
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

impl Loader<'_> {
    /// Configures the connection for discovery, and the one for certificates if there is one and it differs.
    ///
    /// If another process `may_serve` the workload's secrets, problems of the latter are reported apart, because
    /// the agent may not use it.
    pub(super) fn control_plane(
        &mut self,
        has_authority: bool,
        may_serve: bool,
    ) -> (Config, Option<Config>) {
        let address = self.proxy_config.discovery_address.clone();
        let security = if self.proxy_config.is_plaintext() {
            Security::Plaintext
        } else {
            let is_mounted = below(self.root, MOUNTED_ROOT).is_file();
            // Node metadata names the files for istiod only if the workload's certificates are files too.
            let named = self.metadata_path("ISTIO_META_TLS_CLIENT_ROOT_CERT");
            let metadata_root = named.filter(|it| !has_authority && !it.as_os_str().is_empty());
            let roots = self.roots(&variables::XDS_ROOT_CA, is_mounted, metadata_root);
            let mut tls = self.tls(roots, &address, true);
            if !has_authority {
                tls.client = tls.client.or_else(|| self.metadata_client());
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
            fallbacks: Vec::new(),
        };
        let discovery = self.with_fallbacks(discovery, true);
        if !has_authority {
            return (discovery, None);
        }
        let before = self.notes.problems.len();
        let authority = self.authority(&discovery);
        if may_serve {
            self.authority_problems = self.notes.problems.split_off(before);
        }
        let is_same = discovery.address == authority.address
            && discovery.security == authority.security
            && discovery.metadata == authority.metadata;
        (discovery, if is_same { None } else { Some(authority) })
    }

    /// Configures the storage of the last known good configuration; None if it is not stored.
    ///
    /// Clusters on demand need it in memory, even if nothing is stored.
    pub(super) fn last_known_good(&mut self) -> Option<ledger::Config> {
        let volume = self.volume(&variables::ISTIO_AGENT_KEEP_CONFIG);
        let on_demand = self.on_demand();
        if !on_demand && volume.is_none() {
            return None;
        }
        Some(ledger::Config {
            volume,
            former: None,
            own: None,
            max_bytes: self.get(&variables::ISTIO_AGENT_KEEP_CONFIG_MAX_BYTES),
            max_age: self.get(&variables::ISTIO_AGENT_KEEP_CONFIG_MAX_AGE),
            after: self.get(&variables::ISTIO_AGENT_KEEP_CONFIG_AFTER),
            on_nack: self.get(&variables::ISTIO_AGENT_KEEP_CONFIG_ON_NACK),
            on_demand,
        })
    }

    /// Returns true if Envoy gets clusters on demand. Warns if it cannot, although the operator wants it.
    fn on_demand(&mut self) -> bool {
        let variable = &variables::ISTIO_AGENT_ON_DEMAND_CLUSTERS;
        let obstacle = match self.flags.kind {
            _ if !self.get(variable) => return false,
            _ if self.get(&variables::DISABLE_ENVOY) => {
                "this agent does not run Envoy (DISABLE_ENVOY=true)".to_owned()
            }
            NodeType::Sidecar if self.get(&variables::ISTIO_DELTA_XDS) => return true,
            NodeType::Sidecar => "Envoy does not use delta xDS (ISTIO_DELTA_XDS=false)".to_owned(),
            kind => format!("the proxy is a {kind}, and not a sidecar"),
        };
        self.notes.warnings.push(Problem::new(Code::OnDemandOff, variable.row.name, obstacle));
        false
    }

    /// Configures the connection to the certificate authority, which may be the one for discovery.
    fn authority(&mut self, discovery: &Config) -> Config {
        let (address, setting, is_given) = match self.get(&variables::CA_ADDR) {
            Some(address) => (address, "CA_ADDR", true),
            None => (discovery.address.clone(), discovery.setting, false),
        };
        // The validation of ProxyConfig reports the address for discovery.
        if is_given && address::split(&address).is_none() {
            self.problem("CA_ADDR", &address, HOST_PORT);
        }
        let security = if address.ends_with(":15010") {
            Security::Plaintext
        } else {
            let is_mounted = self.get(&variables::PILOT_CERT_PROVIDER) == "custom";
            let roots = self.roots(&variables::CA_ROOT_CA, is_mounted, None);
            Security::Tls(self.tls(roots, &address, !is_given))
        };
        let config = Config {
            proxy: self.proxy(&address),
            address,
            security,
            setting,
            metadata: self.metadata("CA_HEADER_"),
            fallbacks: Vec::new(),
            ..discovery.clone()
        };
        if config.address == discovery.address {
            self.with_fallbacks(config, !is_given)
        } else {
            config
        }
    }

    /// Adds the other control planes of `DISCOVERY_ADDRESS`, which are used while this one fails.
    fn with_fallbacks(&self, mut config: Config, override_name: bool) -> Config {
        let addresses = self.get(&variables::DISCOVERY_ADDRESS);
        if !addresses.is_empty() {
            config.setting = variables::DISCOVERY_ADDRESS.row.name;
        }
        let mut fallbacks = Vec::new();
        for address in addresses.into_iter().skip(1) {
            let mut fallback = config.clone();
            fallback.proxy = self.proxy(&address);
            if let Security::Tls(tls) = &mut fallback.security {
                tls.server_name = self.server_name(&address, override_name);
            }
            fallback.address = address;
            fallbacks.push(fallback);
        }
        config.fallbacks = fallbacks;
        config
    }

    /// Returns the HTTP proxy for an address, if any.
    fn proxy(&self, address: &str) -> Option<Proxy> {
        let (host, port) = address::split(address)?;
        self.proxies.find(true, host, port).cloned()
    }

    /// Returns the token that the agent writes itself, if any.
    pub(super) fn google_token(&mut self) -> Option<GoogleToken> {
        let kind = self.get(&variables::CREDENTIAL_FETCHER_TYPE);
        if !["", "JWT", "Mock", "GoogleComputeEngine"].contains(&&*kind) {
            self.problem("CREDENTIAL_FETCHER_TYPE", &kind, "JWT, GoogleComputeEngine or Mock");
        }
        if kind != "GoogleComputeEngine" {
            return None;
        }
        Some(GoogleToken { audience: self.get(&variables::TRUST_DOMAIN), path: TOKEN.into() })
    }

    fn at_least(&mut self, variable: &Variable<Duration>, min: Duration) -> Duration {
        let found = self.get(variable);
        self.limited(variable.row.name, found, found.max(min), format!("at least {min:?}"))
    }

    /// Returns the headers of each call: the cluster, and one for each variable with this prefix.
    fn metadata(&mut self, prefix: &str) -> Vec<(HeaderName, HeaderValue)> {
        let cluster = self.get(&variables::ISTIO_META_CLUSTER_ID);
        let mut metadata = Vec::new();
        let given = self.env.with_prefix(prefix);
        for (name, value) in [("clusterid", &*cluster)].into_iter().chain(given) {
            // `HeaderName` folds to lower case, as HTTP/2 requires.
            if let (Ok(name), Ok(mut value)) = (name.parse::<HeaderName>(), value.parse()) {
                // A header may be a credential, which is not printed.
                HeaderValue::set_sensitive(&mut value, name != "clusterid");
                metadata.push((name, value));
            } else {
                self.problem(format!("{prefix}{name}"), "(not shown)", "a header's name and value");
            }
        }
        metadata
    }

    fn tls(&self, roots: tls::Roots, address: &str, override_name: bool) -> tls::Config {
        let directory = self.get(&variables::PROV_CERT);
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

    /// Returns the name that istiod's certificate must contain. `ISTIOD_SAN` may override it.
    fn server_name(&self, address: &str, override_name: bool) -> String {
        let host = address::split(address).map_or(address, |(host, _)| host);
        match self.get(&variables::ISTIOD_SAN) {
            Some(name) if override_name => name,
            _ if host.contains("localhost") => ISTIOD_NAME.to_owned(),
            _ => host.to_owned(),
        }
    }

    /// Returns the client certificate for istiod in the node metadata of a workload with mounted certificates.
    fn metadata_client(&self) -> Option<tls::ClientCertificate> {
        Some(tls::ClientCertificate {
            chain: self.metadata_path("ISTIO_META_TLS_CLIENT_CERT_CHAIN")?,
            key: self.metadata_path("ISTIO_META_TLS_CLIENT_KEY")?,
        })
    }

    /// Returns a path that `proxyMetadata` sets.
    fn metadata_path(&self, name: &str) -> Option<PathBuf> {
        self.proxy_config.metadata(name).map(PathBuf::from)
    }

    /// Returns the first of: the variable, the mounted root, the root next to the client certificate, the
    /// root in the node metadata, istiod's root.
    fn roots(
        &mut self,
        variable: &Variable<Option<String>>,
        is_mounted: bool,
        metadata_root: Option<PathBuf>,
    ) -> tls::Roots {
        let name = variable.row.name;
        let client = self.get(&variables::PROV_CERT);
        match (self.get(variable).as_deref(), client, metadata_root) {
            (Some("SYSTEM"), ..) => tls::Roots::System(self.system_roots()),
            (Some(file), ..) => self.root_file(name, file.into(), true),
            _ if is_mounted => self.root_file("PILOT_CERT_PROVIDER", MOUNTED_ROOT.into(), true),
            (_, Some(client), _) => {
                // Discovery reads the file when it dials. The authority reports it if it is needed.
                let is_needed = name != variables::XDS_ROOT_CA.row.name;
                self.root_file("PROV_CERT", client.join("root-cert.pem"), is_needed)
            }
            (.., Some(file)) => self.root_file("TLS_CLIENT_ROOT_CERT", file, true),
            _ if self.get(&variables::PILOT_CERT_PROVIDER) == "none" => {
                let expected = format!("another provider, or {name}, as roots are needed");
                self.problem("PILOT_CERT_PROVIDER", "none", expected);
                tls::Roots::System(self.system_roots())
            }
            _ => self.root_file(CONFIG_MAP, ISTIOD_ROOT.into(), true),
        }
    }

    /// Returns the trust anchors of the operating system.
    pub(super) fn system_roots(&self) -> SystemRoots {
        SystemRoots::new(&self.get(&variables::SSL_CERT_FILE), &self.get(&variables::SSL_CERT_DIR))
    }

    /// Returns a file of roots, which must exist now if `is_needed`.
    fn root_file(&mut self, name: &str, file: PathBuf, is_needed: bool) -> tls::Roots {
        if !below(self.root, &file).is_file() {
            let subject = format!("root file for istiod ({name})");
            let path = file.display().to_string();
            let expected = "an existing file of root certificates";
            let problem = Problem::value(Code::FileMissing, subject, &path, expected);
            if is_needed {
                self.notes.add(problem);
            } else {
                let consequence = "istiod cannot be verified until the file exists";
                self.notes.warnings.push(problem.consequence(consequence));
            }
        }
        tls::Roots::File(file)
    }
}

/// Reads the compliance policy, and warns if this build cannot meet it.
pub(super) fn compliance(env: &Environment, warnings: &mut Vec<Problem>) -> Policy {
    let policy = env.get(&variables::COMPLIANCE_POLICY);
    if policy.lacks_module() {
        let name = variables::COMPLIANCE_POLICY.row.name;
        let found = env.text(name).unwrap_or_default();
        let consequence = "TLS is restricted, but its cryptographic module is not a validated one";
        warnings.push(Problem::replaced(name, found, "a build with FIPS=1", consequence));
    }
    policy
}

/// Reads the HTTP proxies of the environment, and warns of those that cannot be used.
pub(super) fn proxies(env: &Environment, warnings: &mut Vec<Problem>) -> Proxies {
    Proxies {
        http: proxy(&variables::HTTP_PROXY, env, warnings),
        https: proxy(&variables::HTTPS_PROXY, env, warnings),
        excluded: either_case(env, &variables::NO_PROXY).unwrap_or_default().to_owned(),
    }
}

fn proxy(
    variable: &Variable<String>,
    env: &Environment,
    warnings: &mut Vec<Problem>,
) -> Option<Proxy> {
    let proxy = Proxy::parse(either_case(env, variable)?);
    if proxy.is_none() {
        let name = variable.row.name;
        let expected = "http://host:port";
        warnings.push(Problem::replaced(name, "(not shown)", expected, "no proxy is used"));
    }
    proxy
}

/// Reads a variable in upper case, else in lower case. Empty values do not count.
fn either_case<'a>(env: &'a Environment, variable: &Variable<String>) -> Option<&'a str> {
    let lower = variable.row.name.to_ascii_lowercase();
    let names = [variable.row.name, &lower].into_iter();
    names.filter_map(|name| env.text(name)).find(|text| !text.is_empty())
}
