//! Decides whether Envoy's admin interface listens on a port of the pod, or on a Unix socket that only Envoy's user can
//! open.
//!
//! Two settings choose the socket. `ISTIO_ENVOY_ADMIN_TRANSPORT=UDS` is a contract of Istio that no release has yet
//! (istio/istio#61864). It also closes `/drain` and `/quitquitquit` of the status port, because its injector writes
//! another preStop hook. `ISTIO_AGENT_ADMIN_SOCKET` is this agent's own, and works in each pod whose bootstrap the agent
//! writes.

use std::path::{Path, PathBuf};

use super::environment::{self as variables, Environment};
use crate::problem::{Code, Problem};
use crate::proxy_config::ProxyConfig;

/// The values of `ISTIO_ENVOY_ADMIN_TRANSPORT`.
const PORT: &str = "TCP";
const SOCKET: &str = "UDS";
/// The path of the socket below `configPath`, for both settings.
const PATH: &str = "admin/admin.sock";

/// A socket that the operator wants, and that cannot be used.
#[derive(Debug)]
pub(super) enum Unusable {
    /// The agent does not start, because Istio does not inject such a pod.
    Refused(Problem),
    /// Envoy's admin interface listens on the port.
    Ignored(Problem),
}

/// Returns the path of the socket. None for a port.
pub(super) fn socket(config: &ProxyConfig, env: &Environment) -> Result<Option<PathBuf>, Unusable> {
    let path = Some(Path::new(&config.config_path).join(PATH));
    if is_istios(config, env).map_err(Unusable::Refused)? {
        return Ok(path);
    }
    let variable = &variables::ISTIO_AGENT_ADMIN_SOCKET;
    if !env.get(variable) || env.get(&variables::DISABLE_ENVOY) {
        return Ok(None);
    }
    if config.custom_config_file.is_empty() {
        return Ok(path);
    }
    Err(Unusable::Ignored(
        Problem::new(
            Code::AdminSocketUnsupported,
            variable.row.name,
            "customConfigFile has the address of the admin interface",
        )
        .consequence("the agent uses proxyAdminPort"),
    ))
}

/// Returns true if the contract of Istio holds. Fails if the pod does not meet its conditions.
pub(super) fn is_istios(config: &ProxyConfig, env: &Environment) -> Result<bool, Problem> {
    let code = Code::AdminSocketUnsupported;
    let variable = &variables::ISTIO_ENVOY_ADMIN_TRANSPORT;
    let name = variable.row.name;
    let value = env.get(variable);
    let bootstraps = [
        ("customConfigFile", !config.custom_config_file.is_empty()),
        ("ISTIO_BOOTSTRAP_OVERRIDE", env.is_set(&variables::ISTIO_BOOTSTRAP_OVERRIDE)),
    ];
    match value.trim() {
        _ if env.get(&variables::DISABLE_ENVOY) => Ok(false),
        text if text.is_empty() || text.eq_ignore_ascii_case(PORT) => Ok(false),
        _ if value != SOCKET => Err(Problem::value(code, name, &value, "TCP or UDS")),
        _ if !env.get(&variables::ISTIO_NATIVE_SIDECAR) => {
            Err(Problem::new(code, name, "UDS needs a native sidecar (ISTIO_NATIVE_SIDECAR=true)"))
        }
        _ => match bootstraps.iter().find(|(_, is_set)| *is_set) {
            Some((other, _)) => {
                Err(Problem::new(code, name, format!("UDS cannot be used with {other}")))
            }
            None => Ok(true),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::merged::Merged;

    #[test]
    fn the_socket_is_chosen_by_two_settings() {
        let (istios, native) =
            (("ISTIO_ENVOY_ADMIN_TRANSPORT", "UDS"), ("ISTIO_NATIVE_SIDECAR", "true"));
        let (own, off) = (("ISTIO_AGENT_ADMIN_SOCKET", "true"), ("DISABLE_ENVOY", "true"));
        let over = ("ISTIO_BOOTSTRAP_OVERRIDE", "/etc/own.json");
        let transport = |value| ("ISTIO_ENVOY_ADMIN_TRANSPORT", value);
        for (variables, custom, expected) in [
            (vec![], "", Ok(false)),
            (vec![transport("TCP"), native], "", Ok(false)),
            (vec![transport("tcp")], "", Ok(false)),
            (vec![transport("")], "", Ok(false)),
            (vec![istios, native], "", Ok(true)),
            (vec![istios, off], "", Ok(false)),
            (vec![istios], "", Err("native sidecar")),
            (vec![istios, ("ISTIO_NATIVE_SIDECAR", "false")], "", Err("native sidecar")),
            (vec![istios, native], "/own.json", Err("customConfigFile")),
            (vec![istios, native, over], "", Err("ISTIO_BOOTSTRAP_OVERRIDE")),
            (vec![transport(" uds"), native], "", Err("uds")),
            (vec![transport("unix"), native], "", Err("unix")),
            (vec![own], "", Ok(true)),
            (vec![own, over], "", Ok(true)),
            (vec![own, off], "", Ok(false)),
            (vec![own], "/own.json", Err("customConfigFile")),
        ] {
            let mut config = Merged::builtin().config;
            config.custom_config_file = custom.to_owned();
            let env: Environment = variables.iter().copied().collect();
            let found = socket(&config, &env);
            match expected {
                Ok(true) => {
                    let path = Path::new("./etc/istio/proxy/admin/admin.sock");
                    assert_eq!(found.expect("usable").as_deref(), Some(path), "{variables:?}");
                }
                Ok(false) => assert_eq!(found.expect("usable"), None, "{variables:?}"),
                Err(text) => {
                    let is_own = variables.contains(&own);
                    let problem = match found.expect_err("unusable") {
                        Unusable::Refused(problem) if !is_own => problem,
                        Unusable::Ignored(problem) if is_own => problem,
                        other => panic!("{other:?} for {variables:?}"),
                    };
                    assert!(problem.to_string().contains(text), "{problem} for {variables:?}");
                }
            }
        }
    }
}
