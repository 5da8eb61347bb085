//! Tests the parsing of image names.

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
        ("registry:5000/b:V_1.0-x", Some(("registry:5000", "b", "V_1.0-x"))),
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
        let found = found.as_ref().map(|r| (&*r.registry, &*r.repository, &*r.version));
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
