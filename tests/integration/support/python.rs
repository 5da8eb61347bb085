//! Python packages from PyPI that tests need, installed below the target directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// Returns the folder with the package that the file `requirements` names, and installs it on first use. If that fails,
/// returns None, with which the test must be skipped, or panics if the variable is set.
pub fn package(requirements: &str, variable: &str) -> Option<PathBuf> {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = INSTALLING.lock();
    let requirements = Path::new(env!("CARGO_MANIFEST_DIR")).join(requirements);
    let wanted = fs::read_to_string(&requirements).expect("requirements");
    let wanted = wanted.trim();
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = target.join(wanted);
    // A package that is only partly installed must not be used, so the folder gets its name after the installation.
    let draft = target.join(format!("{wanted}-{}", std::process::id()));
    let is_there = folder.is_dir()
        || Command::new("python3")
            .env("PIP_ROOT_USER_ACTION", "ignore")
            .args(["-m", "pip", "install", "--quiet", "--target"])
            .arg(&draft)
            .arg("--requirement")
            .arg(&requirements)
            .status()
            .is_ok_and(|status| status.success() && fs::rename(&draft, &folder).is_ok());
    if !is_there {
        let sentence = format!("There is no Python with pip to fetch {wanted}.");
        assert!(std::env::var_os(variable).is_none(), "{sentence}");
        eprintln!("{sentence} This test is not run.");
    }
    is_there.then_some(folder)
}
