//! Configures the download and the cache of Wasm modules.

use std::path::PathBuf;

use super::environment::{self as variables, Value, Variable};
use super::{IGNORED, Loader};
use crate::net::address::Cidr;
use crate::wasm::{Config, FetchConfig};

/// The directory of modules, as in pilot-agent: the volume `istio-data` of the pod.
const DIRECTORY: &str = "./var/lib/istio/data";

impl Loader<'_> {
    /// None if Envoy fetches modules itself.
    pub(super) fn wasm(&mut self) -> Option<Config> {
        if !self.get(&variables::ISTIO_AGENT_ENABLE_WASM_REMOTE_LOAD_CONVERSION) {
            return None;
        }
        // Envoy may have another working directory, so the path must be absolute.
        let relative = self.root.join(DIRECTORY);
        let directory = std::path::absolute(&relative).unwrap_or(relative);
        Some(Config {
            directory: directory.components().collect(),
            fetch: FetchConfig {
                insecure: self.get(&variables::WASM_INSECURE_REGISTRIES),
                blocked: self.blocked_networks(),
                proxies: self.proxies.clone(),
                request_limit: self.positive(&variables::WASM_HTTP_REQUEST_TIMEOUT),
                attempts: self.positive(&variables::WASM_HTTP_REQUEST_MAX_RETRIES),
                max_bytes: self.positive(&variables::ISTIO_WASM_MAX_BINARY_SIZE_BYTES),
                credentials: self.registry_credentials(),
                roots: self.system_roots(),
            },
            expiry: self.positive(&variables::WASM_MODULE_EXPIRY),
            purge_interval: self.positive(&variables::WASM_PURGE_INTERVAL),
            max_cache_bytes: self.get(&variables::ISTIO_AGENT_WASM_CACHE_MAX_BYTES),
            requires_digest: self.get(&variables::ISTIO_AGENT_WASM_REQUIRE_DIGEST),
            allowed: self.get(&variables::ISTIO_AGENT_WASM_ALLOWED_REGISTRIES),
        })
    }

    /// Returns the variable's value. Its default replaces zero, as in pilot-agent.
    fn positive<T: Value + Default + PartialEq>(&self, variable: &Variable<T>) -> T {
        let value = self.get(variable);
        if value == T::default() { T::parse(variable.row.default).unwrap_or(value) } else { value }
    }

    fn blocked_networks(&mut self) -> Vec<Cidr> {
        let variable = variables::BLOCKED_CIDRS_IN_WASM_FETCH;
        let networks = self.get(&variable).into_iter().filter_map(|entry| {
            let network = Cidr::parse(&entry);
            if network.is_none() {
                self.warn(variable.row.name, entry, "networks such as 10.0.0.0/8", IGNORED);
            }
            network
        });
        networks.collect()
    }

    /// Lists the files with registry credentials, by precedence.
    fn registry_credentials(&self) -> Vec<PathBuf> {
        let docker = self.get(&variables::DOCKER_CONFIG);
        let docker = docker.or(self.get(&variables::HOME).map(|home| home.join(".docker")));
        let docker = docker.map(|directory| directory.join("config.json"));
        let runtime = self.get(&variables::XDG_RUNTIME_DIR);
        let runtime = runtime.map(|directory| directory.join("containers/auth.json"));
        [docker, self.get(&variables::REGISTRY_AUTH_FILE), runtime].into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::tests::machine;

    #[test]
    fn zeros_are_defaults_and_lists_are_read_leniently() {
        let config = machine(&[
            ("WASM_HTTP_REQUEST_TIMEOUT", "0s"),
            ("WASM_HTTP_REQUEST_MAX_RETRIES", "0"),
            ("WASM_INSECURE_REGISTRIES", "localhost:5000, registry,"),
            ("BLOCKED_CIDRS_IN_WASM_FETCH", "10.0.0.0/8, 10.0.0.0/99"),
            ("HOME", "/home/u"),
            ("XDG_RUNTIME_DIR", "/run/u"),
        ])
        .config();
        let wasm = config.wasm.expect("enabled");
        assert_eq!((wasm.fetch.request_limit, wasm.fetch.attempts), (Duration::from_secs(15), 5));
        assert_eq!(wasm.fetch.insecure, ["localhost:5000", "registry"]);
        assert_eq!(wasm.fetch.blocked, [Cidr::parse("10.0.0.0/8").expect("a network")]);
        let files = ["/home/u/.docker/config.json", "/run/u/containers/auth.json"];
        assert_eq!(wasm.fetch.credentials, files.map(PathBuf::from));
        assert!(wasm.directory.is_absolute() && wasm.directory.ends_with("var/lib/istio/data"));
        let warned = |name| config.warnings.iter().any(|warning| warning.subject == name);
        assert!(warned("BLOCKED_CIDRS_IN_WASM_FETCH"));
    }

    #[test]
    fn envoy_may_be_left_to_fetch_modules() {
        let name = "ISTIO_AGENT_ENABLE_WASM_REMOTE_LOAD_CONVERSION";
        assert!(machine(&[(name, "false")]).config().wasm.is_none());
    }
}
