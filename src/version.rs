//! The version of this build, and the version of Istio it tells istiod.

use std::io::ErrorKind;
use std::path::Path;

use crate::metrics::{Kind, Registry};
use crate::problem::{Problem, codes};
use crate::regular_file;

/// The release of Istio that this agent follows. istiod is told this version if the image names none.
const FOLLOWED: &str = "1.31.0";

/// The file beside the binary with the version of Istio whose Envoy the image has. The build of the
/// image writes it.
const OF_IMAGE: &str = "pilot-agent.istio-version";
const MAX_LENGTH: u64 = 64;

pub const AGENT_VERSION: &str = match cfg!(feature = "fips") {
    true => concat!(env!("CARGO_PKG_VERSION"), "-fips"),
    false => env!("CARGO_PKG_VERSION"),
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

/// The version of Istio by which istiod decides what Envoy understands: that of the image, or else of
/// the release this agent follows.
pub fn istio() -> Result<String, Problem> {
    match std::env::current_exe() {
        Ok(program) => beside(&program),
        Err(_) => Ok(FOLLOWED.to_owned()),
    }
}

fn beside(program: &Path) -> Result<String, Problem> {
    let path = program.with_file_name(OF_IMAGE);
    let unusable = |found: String| {
        let expected = format!("a version such as {FOLLOWED}, or no such file");
        Problem::value(codes::FILE_INVALID, path.display(), &found, expected)
    };
    let content = match regular_file::read(&path, MAX_LENGTH) {
        Ok(content) => content,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(FOLLOWED.to_owned()),
        Err(error) => return Err(unusable(error.to_string())),
    };
    let text = String::from_utf8_lossy(&content);
    let version = text.trim();
    let is_part = |c: char| c.is_ascii_alphanumeric() || ".-+_".contains(c);
    match !version.is_empty() && version.chars().all(is_part) {
        true => Ok(version.to_owned()),
        false => Err(unusable(version.to_owned())),
    }
}

/// Records the build as a metric. `istio` is the version told to istiod.
pub fn publish(registry: &Registry, istio: &str) {
    const LABELS: &[&str] = &["version", "istio_version", "revision", "status"];
    let help = "What this agent was built from; always 1.";
    let (name, istio) = ("istio_agent_build_info", istio.to_owned());
    registry.computed(name, help, Kind::Gauge, LABELS, move |series| {
        series(&[AGENT_VERSION, &istio, REVISION, STATUS], 1.0);
    });
}

/// All of it in one line. `istio` is the version told to istiod.
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
        assert!(
            page.contains(&format!("istio_agent_build_info{{{labels},")),
            "{page}"
        );
        assert!(page.ends_with("} 1\n"), "{page}");
    }

    #[test]
    fn the_version_of_istio_comes_from_the_file_beside_the_binary() {
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("pilot-agent");
        assert_eq!(beside(&program), Ok(FOLLOWED.to_owned()));
        for (content, expected) in [
            ("1.28.3\n", Ok("1.28.3")),
            ("1.30-alpha.3f0c+x_y", Ok("1.30-alpha.3f0c+x_y")),
            ("\n", Err("")),
            ("1.28 .3", Err("1.28 .3")),
            ("client version: 1.28.3\n", Err("client version: 1.28.3")),
            (&"1".repeat(65), Err("more than 64 bytes")),
        ] {
            std::fs::write(folder.path().join(OF_IMAGE), content).expect("written");
            let found = beside(&program).map_err(|problem| problem.found);
            let expected = expected
                .map(str::to_owned)
                .map_err(|found| format!("{found:?}"));
            assert_eq!(found, expected, "{content:?}");
        }
    }
}
