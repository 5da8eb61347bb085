//! Tables of faults, and a check that `pilot-agent doctor` names each of them.

use std::any::Any;
use std::process::Command;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::Instant;

use super::eventually;
use super::place::Place;
use super::pod::Pod;

/// The time that the doctor may take.
const LIMIT: Duration = Duration::from_secs(10);

/// The permits to run a doctor. Two run at once, so that they do not wait for each other on a machine of two cores.
static PERMITS: Semaphore = Semaphore::const_new(2);

/// An agent that a doctor examines.
pub trait Examined: 'static {
    /// Returns a command with the program and the settings of the agent.
    fn command(&self) -> Command;
}

impl Examined for Place {
    fn command(&self) -> Command {
        Place::command(self)
    }
}

impl Examined for Pod {
    fn command(&self) -> Command {
        self.command_as_agent()
    }
}

/// The expected report: the code; words of the first line, which name the cause and the setting or object;
/// words of the second line, which name the command or value that cures it.
pub type Says<'a> = (&'static str, &'a [&'a str], &'a [&'a str]);

/// A fault, and the expected report.
pub struct Fault {
    command: Command,
    lines: [Vec<String>; 2],
    exit: i32,
    /// True if the doctor reports the fault. Otherwise `command` fails, and the first line of its errors names the
    /// code, the cause and the cure.
    is_report: bool,
    /// Values that are dropped after the report, such as the patient and its control plane.
    kept: Vec<Box<dyn Any>>,
}

/// The rows of a table. They are prepared and examined concurrently.
#[derive(Default)]
pub struct Faults(JoinSet<()>, LocalSet);

impl Fault {
    /// Creates a fault that the doctor reports as an error. The patient is dropped after the report.
    pub fn new(patient: impl Examined, (code, cause, cure): Says<'_>) -> Self {
        Self {
            command: patient.command(),
            lines: [all(&[cause, &[&format!("[{code}]")]]), all(&[cure, &["what to do: "]])],
            exit: 2,
            is_report: true,
            kept: vec![Box::new(patient)],
        }
    }

    /// Creates a set-up that works: the doctor must find nothing.
    pub fn none(patient: impl Examined) -> Self {
        let lines = [all(&[&["ready: no problem found"]]), Vec::new()];
        Self { lines, exit: 0, ..Self::new(patient, ("", &[], &[])) }
    }

    /// Creates a fault with which another command of the agent fails and which this command reports.
    pub fn failing(command: Command, (code, cause, cure): Says<'_>) -> Self {
        Self {
            command,
            lines: [all(&[cause, cure, &[&format!("[{code}]")]]), Vec::new()],
            exit: 1,
            is_report: false,
            kept: Vec::new(),
        }
    }

    pub fn with(mut self, kept: impl Any) -> Self {
        // The values are dropped in order, and an agent must end before its directory is removed.
        self.kept.insert(0, Box::new(kept));
        self
    }

    /// Makes the fault a warning.
    pub fn warns(self) -> Self {
        Self { exit: 1, ..self }
    }

    /// Makes the fault a note: the report names it, but the doctor exits with 0.
    pub fn noted(self) -> Self {
        Self { exit: 0, ..self }
    }

    pub async fn judge(self, name: &str) {
        let mut command = tokio::process::Command::from(self.command);
        command.args(self.is_report.then_some("doctor"));
        let output = eventually("a report of an agent that has started", async || {
            let _turn = PERMITS.acquire().await;
            let began = Instant::now();
            let output = command.output().await.unwrap();
            let (took, text) = (began.elapsed(), String::from_utf8_lossy(&output.stdout));
            assert!(took < LIMIT, "{took:?}: {name}: {text}");
            // While the agent starts, the pod is not ready, and the doctor is asked again. A pod with a warning is
            // ready after that.
            let is_starting = self.exit != 2 && text.starts_with("not ready: ");
            (!is_starting).then_some(output)
        });
        let output = output.await;
        let [report, errors] =
            [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it));
        let text = format!("{name}: {report}{errors}");
        let shown = if self.is_report { &report } else { &errors };
        let lines = shown.lines().chain([""; 2]);
        for (line, words) in lines.zip(self.lines) {
            for words in words {
                assert!(line.contains(&words), "{words:?} is not in {line:?}: {text}");
            }
        }
        assert_eq!(output.status.code(), Some(self.exit), "{text}");
    }
}

fn all(words: &[&[&str]]) -> Vec<String> {
    words.concat().into_iter().map(str::to_owned).collect()
}

impl Faults {
    pub fn add(&mut self, name: &'static str, fault: impl Future<Output = Fault> + 'static) {
        let row = async { fault.await.judge(name).await };
        self.0.spawn_local_on(row, &self.1);
    }

    pub async fn assert_all_reported(self) {
        let Self(mut rows, threads) = self;
        let failed = threads.run_until(async {
            let mut failed = 0;
            while let Some(row) = rows.join_next().await {
                failed += usize::from(row.is_err());
            }
            failed
        });
        assert_eq!(failed.await, 0, "faults, see above");
    }
}
