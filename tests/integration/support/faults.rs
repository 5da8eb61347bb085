//! Faults that `pilot-agent doctor` has to name: rows of tables, all judged alike.

use std::any::Any;
use std::process::Command;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::Instant;

use super::eventually;
use super::place::Place;
use super::pod::Pod;

/// How long the doctor may take.
const LIMIT: Duration = Duration::from_secs(3);

/// As many doctors at once as a small machine has processors, so that they do not wait for each other.
static TURNS: Semaphore = Semaphore::const_new(2);

/// What a doctor examines.
pub trait Patient: 'static {
    /// A command of the agent with the agent's settings.
    fn command(&self) -> Command;
}

impl Patient for Place {
    fn command(&self) -> Command {
        Place::command(self)
    }
}

impl Patient for Pod {
    fn command(&self) -> Command {
        self.command_as_agent()
    }
}

/// What a report has to say: the code; the words of the first line for the cause and the setting or object;
/// the words of the second line for a command or a value that cures it.
pub type Says<'a> = (&'static str, &'a [&'a str], &'a [&'a str]);

/// A fault, and what the doctor has to say.
pub struct Fault {
    command: Command,
    lines: [Vec<String>; 2],
    exit: i32,
    /// Whether it is the doctor who is asked; else the first error of a command has to say all.
    is_report: bool,
    /// What lives until the report is there, such as a control plane.
    kept: Vec<Box<dyn Any>>,
}

/// The rows of a table, made and examined side by side.
#[derive(Default)]
pub struct Faults(JoinSet<()>, LocalSet);

impl Fault {
    /// One that is an error. The patient lives until the report is there.
    pub fn new(patient: impl Patient, (code, cause, cure): Says<'_>) -> Self {
        Self {
            command: patient.command(),
            lines: [
                all(&[cause, &[&format!("[{code}]")]]),
                all(&[cure, &["what to do: "]]),
            ],
            exit: 2,
            is_report: true,
            kept: vec![Box::new(patient)],
        }
    }

    /// One that another command of the agent reports as it fails.
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
        // An agent ends before its directory.
        self.kept.insert(0, Box::new(kept));
        self
    }

    /// One that is a warning.
    pub fn warns(self) -> Self {
        Self { exit: 1, ..self }
    }

    /// One that is told, although nothing is wrong with the pod.
    pub fn noted(self) -> Self {
        Self { exit: 0, ..self }
    }

    pub async fn judge(self, name: &str) {
        let mut command = tokio::process::Command::from(self.command);
        command.args(self.is_report.then_some("doctor"));
        let output = eventually("a report of an agent that has started", async || {
            let _turn = TURNS.acquire().await;
            let began = Instant::now();
            let output = command.output().await.unwrap();
            let (took, text) = (began.elapsed(), String::from_utf8_lossy(&output.stdout));
            assert!(took < LIMIT, "{took:?}: {name}: {text}");
            // A pod with a warning is ready, once its agent has started.
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
                assert!(
                    line.contains(&words),
                    "{words:?} is not in {line:?}: {text}"
                );
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

    pub async fn are_named(self) {
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
