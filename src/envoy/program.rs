//! Tells why the kernel does not run Envoy's program.

use std::io;
use std::path::Path;

use crate::problem::{Problem, codes};

/// The problem of a program that the kernel did not run.
pub(crate) fn problem(program: &Path, error: &io::Error) -> Problem {
    let (code, found) = match error.kind() {
        io::ErrorKind::NotFound if program.exists() => (
            codes::ENVOY_LOADER_MISSING,
            "the loader or interpreter that it names does not exist".to_owned(),
        ),
        io::ErrorKind::NotFound => (codes::ENVOY_MISSING, "there is no such program".to_owned()),
        _ => (
            codes::ENVOY_NOT_EXECUTABLE,
            format!("cannot run it: {error}"),
        ),
    };
    Problem::new(
        code,
        format!("Envoy's program {}", program.display()),
        found,
    )
}
