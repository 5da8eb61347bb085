//! The HTTP proxies of the environment.

use super::environment::{self as variables, Environment, Variable};
use crate::dial::proxy::{Proxies, Proxy};
use crate::problem::Problem;

/// Reads the proxies, and warns of those that cannot be used.
pub(super) fn read(env: &Environment, warnings: &mut Vec<Problem>) -> Proxies {
    let mut proxy = |variable: &Variable<String>| {
        let proxy = Proxy::parse(&of_either_case(env, variable)?);
        if proxy.is_none() {
            let expected = "http://host:port; no proxy is used";
            warnings.push(Problem::new(variable.name, "(not shown)", expected));
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

#[cfg(test)]
mod tests {
    use crate::config::tests::machine;

    #[test]
    fn proxies_are_read_in_either_case_for_istiod_and_for_modules() {
        let config = machine(&[
            ("http_proxy", "plain:1"),
            ("HTTPS_PROXY", ""),
            ("https_proxy", "http://u:p@tls:2"),
            ("HTTP_PROXY", "upper:3"),
            ("no_proxy", "direct.test"),
        ])
        .config();
        let fetch = config.wasm.expect("enabled").fetch;
        let found = |has_tls, host| {
            let proxy = fetch.proxies.find(has_tls, host, 1);
            proxy.map(|proxy| proxy.host.clone())
        };
        assert_eq!(found(false, "a.test").as_deref(), Some("upper"));
        assert_eq!(found(true, "a.test").as_deref(), Some("tls"));
        assert_eq!(found(true, "direct.test"), None);
        assert_eq!(config.istiod.proxy.map(|proxy| proxy.port), Some(2));
    }

    #[test]
    fn a_proxy_that_cannot_be_used_is_a_warning_without_its_text() {
        let config = machine(&[("HTTPS_PROXY", "socks5://u:hush@proxy:1")]).config();
        let warnings = config.warnings.iter();
        let texts: Vec<_> = warnings.map(ToString::to_string).collect();
        let about = texts.iter().filter(|text| text.contains("HTTPS_PROXY"));
        assert_eq!(about.count(), 1, "{texts:?}");
        assert!(!texts.concat().contains("hush"), "{texts:?}");
        assert!(config.istiod.proxy.is_none());
    }
}
