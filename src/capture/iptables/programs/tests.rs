//! Tests which programs are selected, and the errors of programs that misbehave.

use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

/// Creates a directory with programs, given by their names and link targets. `NAME-restore` is a link to the
/// target, or a plain file if the target is empty; `NAME-save` prints `saved`.
fn directory(programs: &[(&str, &str)], saved: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for (name, target) in programs {
        let at = directory.path();
        let path = at.join(format!("{name}-save"));
        fs::write(&path, format!("#!/bin/sh\nprintf '{saved}'\n")).expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
        let path = at.join(format!("{name}-restore"));
        match *target {
            "" => fs::write(&path, "").expect("a file"),
            target => {
                fs::write(at.join(target), "").expect("a file");
                symlink(at.join(target), &path).expect("a link");
            }
        }
    }
    directory
}

#[tokio::test]
async fn legacy_iptables_is_chosen_if_it_has_rules_else_nft() {
    const LISTED: &str = "*nat\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n";
    const RULES: &str = "*nat\n:OUTPUT ACCEPT [0:0]\n[1:60] -A OUTPUT -j RETURN\nCOMMIT\n";
    let debian = [
        ("iptables", "xtables-nft-multi"),
        ("iptables-nft", "xtables-nft-multi"),
        ("iptables-legacy", "xtables-legacy-multi"),
    ];
    let plain = [("iptables", "")];
    let only_legacy = [("iptables-legacy", "")];
    let (none, some) = (Some(false), Some(true));
    let (detected, legacy, nft) = (None, Some(Kind::Legacy), Some(Kind::Nft));
    for (programs, kind, tables, has_nft, expected) in [
        (&debian[..], detected, "", none, "-nft -legacy"),
        (&debian, detected, RULES, some, "-legacy -nft"),
        (&debian, detected, LISTED, none, "-nft -legacy"),
        (&debian, detected, "", None, "-legacy -nft"),
        (&debian, legacy, "", some, "-legacy"),
        (&debian, nft, RULES, none, "-nft"),
        (&debian[..1], detected, "", none, ""),
        (&debian[..1], legacy, "", none, "none"),
        (&plain, detected, RULES, some, ""),
        (&plain, nft, "", none, "none"),
        (&only_legacy, detected, "", none, "-legacy"),
        (&[], detected, "", none, "none"),
    ] {
        let has_legacy = !tables.is_empty();
        let directory = directory(programs, tables);
        let at = directory.path().display();
        let kernel = Kernel { legacy: has_legacy, nft: has_nft, has_istio: false };
        let path = format!("/nowhere::{at}");
        let found = Programs::find(Family::V4, kind, &path, kernel).await;
        let found = found.expect("programs");
        let names = found.iter().map(|found| found.name.clone());
        let expected = expected.split(' ').filter(|suffix| *suffix != "none");
        let expected = expected.map(|suffix| format!("{at}/iptables{suffix}"));
        assert_eq!(names.collect::<Vec<_>>(), expected.collect::<Vec<_>>(), "{kind:?} {kernel:?}");
    }
}

#[tokio::test]
async fn programs_that_misbehave_are_named_with_what_they_did() {
    for (script, expected) in [
        ("exit 0", "cannot be run"),
        ("#!/bin/sh\necho garbage", "output of `-save` is \"garbage\", expected rules"),
        ("#!/bin/sh\necho '*nat'", "output of `-save` is \"*nat\", expected rules"),
        (
            "#!/bin/sh\necho 'iptables: no memory' >&2; exit 4",
            "`-save --counters`: failed (exit status: 4): iptables: no memory",
        ),
        ("#!/bin/sh\nkill -9 $$", "`-save --counters`: failed (signal: 9 (SIGKILL)): "),
        ("#!/bin/sh\nexec sleep 1000", "did not end within 40 s"),
    ] {
        let directory = tempfile::tempdir().expect("a directory");
        let name = directory.path().join("iptables").display().to_string();
        let path = format!("{name}-save");
        fs::write(&path, script).expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
        let programs = Programs { kind: None, name: name.clone(), saved: String::new() };
        // With paused time, the limit of 40 s passes at once.
        if script.contains("sleep") {
            tokio::time::pause();
        }
        let text = programs.save().await;
        let outcome = text.and_then(|text| programs.parse(&text).map(drop));
        let error = outcome.expect_err(script).to_string();
        let error = error.replace(&name, "");
        assert!(error.contains(expected), "{script}: {error}");
    }
}
