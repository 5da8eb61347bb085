//! The name of an image: `registry/repository[:tag][@digest]`.

use percent_encoding::percent_decode_str;

pub(crate) const DOCKER_HUB: &str = "index.docker.io";

/// An image in a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    /// Host and port.
    pub(super) registry: String,
    pub(super) repository: String,
    /// A tag, or `sha256:` and a digest, as manifests are requested.
    pub(super) version: String,
}

impl Reference {
    /// Reads authority and path of an `oci` URL.
    pub(crate) fn parse(authority: &str, path: &str) -> Result<Self, String> {
        let path = percent_decode_str(path).decode_utf8_lossy();
        let name = format!("{authority}{path}");
        let (rest, digest) = match name.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest)),
            None => (name.as_str(), None),
        };
        // A colon before the last slash is that of a port.
        let (rest, tag) = match rest.rsplit_once(':') {
            Some((rest, tag)) if !tag.contains('/') && rest.contains('/') => (rest, tag),
            _ => (rest, "latest"),
        };
        let (registry, repository) = match rest.split_once('/') {
            Some(("docker.io", repository)) => (DOCKER_HUB, repository),
            Some((first, _)) if !first.contains(['.', ':']) && first != "localhost" => {
                (DOCKER_HUB, rest)
            }
            Some(found) => found,
            None => (DOCKER_HUB, rest),
        };
        let is_official = registry == DOCKER_HUB && !repository.contains('/');
        let owner = if is_official { "library/" } else { "" };
        let is_letter = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        let is_name = |part: &str| part.chars().all(is_letter) && part.contains(|c| c != '.');
        let is_part =
            |part: &str| is_name(part) && !part.contains(|c: char| c.is_ascii_uppercase());
        let is_valid = repository.split('/').all(is_part) && is_name(tag);
        if !is_valid || digest.is_some_and(|digest| sha256(digest).is_none()) {
            let expected = "expected registry/repository[:tag][@sha256:digest]";
            return Err(format!("could not parse reference {name:?}: {expected}"));
        }
        Ok(Self {
            registry: registry.to_owned(),
            repository: format!("{owner}{repository}"),
            version: digest.unwrap_or(tag).to_owned(),
        })
    }

    /// The digest, if the image is named by it.
    pub(crate) fn digest(&self) -> Option<&str> {
        sha256(&self.version)
    }

    /// The same for all versions of an image.
    pub(crate) fn module_name(&self) -> String {
        format!("oci://{}/{}", self.registry, self.repository)
    }
}

/// The hexadecimal digits of a digest.
pub(super) fn sha256(digest: &str) -> Option<&str> {
    let digits = digest.strip_prefix("sha256:")?;
    let is_digit = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    (digits.len() == 64 && digits.chars().all(is_digit)).then_some(digits)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_read_as_by_docker() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        for (name, expected) in [
            ("ghcr.io/a/b", Some(("ghcr.io", "a/b", "latest"))),
            ("ghcr.io/a/b:v1", Some(("ghcr.io", "a/b", "v1"))),
            ("localhost/b:v1", Some(("localhost", "b", "v1"))),
            ("registry:5000/b", Some(("registry:5000", "b", "latest"))),
            (
                "registry:5000/b:V_1.0-x",
                Some(("registry:5000", "b", "V_1.0-x")),
            ),
            ("docker.io/b", Some((DOCKER_HUB, "library/b", "latest"))),
            ("docker.io/a/b:v1", Some((DOCKER_HUB, "a/b", "v1"))),
            ("a/b", Some((DOCKER_HUB, "a/b", "latest"))),
            ("r.io/a%2Fb", Some(("r.io", "a/b", "latest"))),
            (&format!("r.io/b:v1@{digest}"), Some(("r.io", "b", &digest))),
            (&format!("r.io/b@{}", &digest[..70]), None),
            ("r.io/b@md5:00", None),
            ("r.io/B", None),
            ("r.io/", None),
            ("r.io/a//b", None),
            ("r.io/../b", None),
            ("r.io/a%2F..%2Fb", None),
            ("r.io/b:", None),
            ("r.io/b:v%2F1", None),
            ("r.io/b:..", None),
            ("r.io/a%0Ab", None),
        ] {
            let (authority, path) = name.split_at(name.find('/').expect("a path"));
            let found = Reference::parse(authority, path).ok();
            let found = found
                .as_ref()
                .map(|r| (&*r.registry, &*r.repository, &*r.version));
            assert_eq!(found, expected, "{name}");
        }
    }

    proptest! {
        #[test]
        fn any_name_is_refused_or_stays_below_its_registry(
            authority in "[a-z.:]{0,8}",
            path in "(/|%2F|%2e|%00|[.:@?#A-Za-z0-9_ \u{e9}]){0,20}|(/[a-z.]{1,3}){1,5}(:[a-z.]{0,3})?",
        ) {
            if let Ok(found) = Reference::parse(&authority, &path) {
                let path = format!("{}/{}", found.repository, found.version);
                let is_safe = |part: &str| !part.trim_matches('.').is_empty();
                prop_assert!(path.split('/').all(is_safe), "{}", path);
                let is_letter = |c: char| c.is_ascii_alphanumeric() || "-._/:".contains(c);
                prop_assert!(path.chars().all(is_letter), "{}", path);
            }
        }
    }
}
