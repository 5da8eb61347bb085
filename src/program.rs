//! Runs helper programs, with limits of time and output. [`run`] returns the standard output and fails with the
//! message of the program; [`run_with_stderr`] returns both outputs and the status.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::process::{Output, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;
use tokio::time::timeout;

use crate::problem::{Code, Problem};

/// Directories of programs if PATH is not set.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Largest output of a program, in bytes.
const MAX_OUTPUT: u64 = 64 << 20;
/// The longest part of a program's message in an error, in characters.
const MAX_MESSAGE: usize = 2000;

/// Runs a program with this input and returns its standard output. A status other than 0 is an error. A
/// program that exceeds the time limit is killed.
pub async fn run(
    program: &str,
    arguments: &[&str],
    input: &str,
    limit: Duration,
) -> Result<Vec<u8>, Problem> {
    let done = run_with_stderr(program, arguments, input, limit).await;
    done.and_then(printed).map_err(|error| {
        let command = [&[program], arguments].concat().join(" ");
        let code = match error.kind() {
            io::ErrorKind::NotFound => Code::CaptureProgramMissing,
            _ => Code::CaptureProgramFailed,
        };
        Problem::new(code, format!("`{command}`"), error)
    })
}

/// Runs a program with this input, and returns its outputs and its status. A program that takes too long is killed.
pub async fn run_with_stderr(
    program: impl AsRef<OsStr>,
    arguments: &[&str],
    input: &str,
    limit: Duration,
) -> io::Result<Output> {
    timeout(limit, execute(program.as_ref(), arguments, input)).await.unwrap_or_else(|_| {
        Err(io::Error::other(format!("did not end within {} s", limit.as_secs())))
    })
}

async fn execute(program: &OsStr, arguments: &[&str], input: &str) -> io::Result<Output> {
    let mut child = Command::new(program)
        .args(arguments)
        .env("LC_ALL", "C")
        .stdin(memory_file(input)?)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| io::Error::new(error.kind(), format!("cannot be run: {error}")))?;
    let (stdout, stderr) = tokio::try_join!(read(child.stdout.take()), read(child.stderr.take()))?;
    Ok(Output { status: child.wait().await?, stdout, stderr })
}

/// Returns what a program printed, or fails with its message.
fn printed(output: Output) -> io::Result<Vec<u8>> {
    let status = output.status;
    if status.success() {
        return Ok(output.stdout);
    }
    let message = String::from_utf8_lossy(&output.stderr);
    let message: String = message.trim().chars().take(MAX_MESSAGE).collect();
    Err(io::Error::other(format!("failed ({status}): {message}")))
}

/// Writes the input to a file in memory. A pipe would end early if the agent is killed, and the program would
/// treat the first part as the complete input.
fn memory_file(input: &str) -> io::Result<Stdio> {
    let mut file: File = rustix::fs::memfd_create("input", rustix::fs::MemfdFlags::CLOEXEC)?.into();
    file.write_all(input.as_bytes())?;
    file.rewind()?;
    Ok(file.into())
}

async fn read(pipe: Option<impl AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    if let Some(pipe) = pipe
        && pipe.take(MAX_OUTPUT + 1).read_to_end(&mut text).await? as u64 > MAX_OUTPUT
    {
        return Err(io::Error::other(format!("printed more than {MAX_OUTPUT} bytes")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn sh(script: &str, input: &str, limit: Duration) -> Result<String, String> {
        match run("sh", &["-c", script], input, limit).await {
            Ok(text) => Ok(String::from_utf8(text).expect("text")),
            Err(problem) => Err(problem.found),
        }
    }

    #[tokio::test]
    async fn a_program_gets_its_whole_input_and_returns_what_it_printed() {
        let input = "line\n".repeat(100_000);
        let limit = Duration::from_secs(60);
        assert_eq!(sh("cat", &input, limit).await, Ok(input.clone()));
        // A program may exit without reading its input.
        assert_eq!(sh("echo done", &input, limit).await, Ok("done\n".to_owned()));
    }

    #[tokio::test]
    async fn errors_contain_the_cause() {
        let limit = Duration::from_secs(60);
        let error = sh("echo why >&2; exit 3", "", limit).await;
        assert_eq!(error, Err("failed (exit status: 3): why".to_owned()));
        let error = sh("yes | head -c 70000000", "", limit).await;
        assert_eq!(error, Err("printed more than 67108864 bytes".to_owned()));
        let late = sh("exec sleep 1000", "", Duration::from_millis(50)).await;
        assert_eq!(late, Err("did not end within 0 s".to_owned()));
        let missing = run("no-such-program", &["-x"], "", limit).await;
        let missing = missing.expect_err("an error");
        assert_eq!(missing.code, Code::CaptureProgramMissing);
        let expected = "cannot be run: No such file or directory (os error 2)";
        assert_eq!((&*missing.subject, &*missing.found), ("`no-such-program -x`", expected));
    }
}
