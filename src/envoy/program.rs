//! Explains why the kernel does not run Envoy's program, before or after an attempt.

use std::io::{self, Read};
use std::path::Path;

use rustix::fs::Access;
use rustix::io::Errno;

use crate::files::regular_file;
use crate::problem::{Code, Problem};

/// Fails like the kernel if it cannot run the program. For a program of another architecture the standard library would
/// not fail: it calls execvp(3), which runs such a file as a script of `/bin/sh`. A name without a slash, which is
/// looked up in `PATH`, is not checked.
pub(crate) fn check_runnable(program: &Path) -> io::Result<()> {
    if !program.as_os_str().as_encoded_bytes().contains(&b'/') {
        return Ok(());
    }
    rustix::fs::access(program, Access::EXEC_OK)?;
    let (Ok(agent), Ok(found)) = (header("/proc/self/exe".as_ref()), header(program)) else {
        return Ok(()); // The kernel also runs a file that this process may not read.
    };
    // The first 6 bytes end with class and byte order, the last 2 are the machine, as in elf(5).
    let is_native = agent.get(..6) == found.get(..6) && agent.get(18..) == found.get(18..);
    if !is_native && !found.starts_with(b"#!") {
        return Err(Errno::NOEXEC.into());
    }
    Ok(())
}

fn header(program: &Path) -> io::Result<Vec<u8>> {
    let mut header = Vec::new();
    regular_file::open(program)?.take(20).read_to_end(&mut header)?;
    Ok(header)
}

pub(crate) fn problem(program: &Path, error: &io::Error) -> Problem {
    let (code, found) = match error.kind() {
        io::ErrorKind::NotFound if program.exists() => (
            Code::EnvoyLoaderMissing,
            "the loader or interpreter that it names does not exist".to_owned(),
        ),
        io::ErrorKind::NotFound => (Code::EnvoyMissing, "there is no such program".to_owned()),
        _ if Errno::from_io_error(error) == Some(Errno::NOEXEC) => (
            Code::EnvoyWrongArchitecture,
            format!("it is not a program for {}", std::env::consts::ARCH),
        ),
        _ => (Code::EnvoyNotExecutable, format!("cannot run it: {error}")),
    };
    Problem::new(code, format!("Envoy's program {}", program.display()), found)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn each_reason_why_envoy_cannot_run_has_its_problem_code() {
        let directory = tempfile::tempdir().unwrap();
        let own = fs::read("/proc/self/exe").unwrap();
        // An ELF file for another architecture: machine 42 is SuperH.
        let foreign = [&own[..18], &[42, 0], &own[20..64]].concat();
        for (name, content, mode, code) in [
            ("missing", None, 0o755, Some(Code::EnvoyMissing)),
            ("plain", Some(&b"x"[..]), 0o644, Some(Code::EnvoyNotExecutable)),
            ("foreign", Some(&foreign), 0o755, Some(Code::EnvoyWrongArchitecture)),
            ("text", Some(b"exit 0\n"), 0o755, Some(Code::EnvoyWrongArchitecture)),
            ("empty", Some(b""), 0o755, Some(Code::EnvoyWrongArchitecture)),
            ("script", Some(b"#!/bin/sh\n"), 0o755, None),
            ("native", Some(&own[..64]), 0o755, None),
        ] {
            let path = directory.path().join(name);
            if let Some(content) = content {
                fs::write(&path, content).unwrap();
                fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            }
            let found = check_runnable(&path).err().map(|error| problem(&path, &error).code);
            assert_eq!(found, code, "{name}");
        }
        assert!(check_runnable(Path::new("found-in-path")).is_ok());
    }
}
