//! Determines the version of this build ([`AGENT_VERSION`]), and the version of Istio that is sent to istiod
//! ([`istio`]).

use std::path::Path;

use crate::files::regular_file::{self, if_exists};
use crate::metrics::{Kind, Registry};
use crate::problem::{Code, Problem};

/// The release of Istio that this agent follows. It is sent to istiod if the image does not name a version.
const FOLLOWED: &str = "1.31.0";

/// The file next to the binary with the version of Istio whose Envoy the image contains. The build of the
/// image writes it.
const IMAGE_VERSION_FILE: &str = "pilot-agent.istio-version";
const MAX_LENGTH: u64 = 64;

pub const AGENT_VERSION: &str = if cfg!(feature = "fips") {
    concat!(env!("CARGO_PKG_VERSION"), "-fips")
} else {
    env!("CARGO_PKG_VERSION")
};

pub const REVISION: &str = match option_env!("ISTIO_AGENT_REVISION") {
    Some(revision) => revision,
    None => "unknown",
};

/// `Clean` or `Modified`, given at build time.
pub const STATUS: &str = match option_env!("ISTIO_AGENT_STATUS") {
    Some(status) => status,
    None => "unknown",
};

/// Returns the version of Istio from which istiod decides what Envoy supports: the version of the image or, if the
/// image does not name one, the release that this agent follows.
pub fn istio() -> Result<String, Problem> {
    match std::env::current_exe() {
        Ok(program) => image_version(&program),
        Err(_) => Ok(FOLLOWED.to_owned()),
    }
}

fn image_version(program: &Path) -> Result<String, Problem> {
    let path = program.with_file_name(IMAGE_VERSION_FILE);
    let found = match if_exists(regular_file::read(&path, MAX_LENGTH)) {
        Ok(None) => return Ok(FOLLOWED.to_owned()),
        Ok(Some(content)) => {
            let version = String::from_utf8_lossy(&content).trim().to_owned();
            let is_valid = |c: char| c.is_ascii_alphanumeric() || ".-+_".contains(c);
            if !version.is_empty() && version.chars().all(is_valid) {
                return Ok(version);
            }
            version
        }
        Err(error) => error.to_string(),
    };
    let expected = format!("a version such as {FOLLOWED}, or no such file");
    Err(Problem::value(Code::FileInvalid, path.display(), &found, expected))
}

/// Records the build as a metric. `istio` is the version that is sent to istiod.
pub fn publish(registry: &Registry, istio: &str) {
    const LABELS: &[&str] = &["version", "istio_version", "revision", "status"];
    let help = "What this agent was built from; always 1.";
    let istio = istio.to_owned();
    registry.computed("istio_agent_build_info", help, Kind::Gauge, LABELS, move |series| {
        series(&[AGENT_VERSION, &istio, REVISION, STATUS], 1.0);
    });
}

/// Formats all versions in one line. `istio` is the version that is sent to istiod.
pub fn full(istio: &str) -> String {
    format!("{istio}-{REVISION}-{STATUS} (istio-agent {AGENT_VERSION})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_build_is_a_metric() {
        let registry = Registry::default();
        publish(&registry, "1.28.3");
        let page = registry.render();
        let labels = format!("version=\"{AGENT_VERSION}\",istio_version=\"1.28.3\"");
        assert!(page.contains(&format!("istio_agent_build_info{{{labels},")), "{page}");
        assert!(page.ends_with("} 1\n"), "{page}");
    }

    #[test]
    fn the_version_of_istio_comes_from_the_file_next_to_the_binary() {
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("pilot-agent");
        assert_eq!(image_version(&program), Ok(FOLLOWED.to_owned()));
        for (content, expected) in [
            ("1.28.3\n", Ok("1.28.3")),
            ("1.30-alpha.3f0c+x_y", Ok("1.30-alpha.3f0c+x_y")),
            ("\n", Err("")),
            ("1.28 .3", Err("1.28 .3")),
            ("client version: 1.28.3\n", Err("client version: 1.28.3")),
            (&"1".repeat(65), Err("more than 64 bytes")),
        ] {
            std::fs::write(folder.path().join(IMAGE_VERSION_FILE), content).expect("written");
            let found = image_version(&program).map_err(|problem| problem.found);
            let expected = expected.map(str::to_owned).map_err(|found| format!("{found:?}"));
            assert_eq!(found, expected, "{content:?}");
        }
    }
}
