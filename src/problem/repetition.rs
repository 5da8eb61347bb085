//! Limits the log lines of consecutive failures.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::Problem;
use crate::runtime::duration::rounded;

/// The time after which a lasting problem is logged again. It is logged again each time the duration has doubled.
const FIRST_INTERVAL: Duration = Duration::from_secs(60);

/// Consecutive failures by code: their beginning, the duration after which the next line is due, and their count.
#[derive(Debug, Default)]
pub struct Repetition(BTreeMap<&'static str, (Instant, Duration, u64)>);

impl Repetition {
    /// Counts a failure. If it is to be logged, returns the suffix of its text: empty the first time, and then with
    /// count and duration.
    pub fn failed(&mut self, problem: &Problem) -> Option<String> {
        let new = || (Instant::now(), Duration::ZERO, 0);
        let (began, due, count) = self.0.entry(problem.code.name()).or_insert_with(new);
        *count += 1;
        let lasted = began.elapsed();
        if lasted < *due {
            return None;
        }
        *due = lasted.saturating_mul(2).max(FIRST_INTERVAL);
        Some(match count {
            1 => String::new(),
            _ => format!(" (failure {count} in {})", rounded(lasted)),
        })
    }

    /// Ends the failures. Returns their count and duration if there were any.
    pub fn end(&mut self) -> Option<String> {
        let ended = std::mem::take(&mut self.0);
        let began = ended.values().map(|(began, ..)| *began).min()?;
        let count: u64 = ended.values().map(|(.., count)| count).sum();
        let lasted = rounded(began.elapsed());
        Some(format!("failures: {count} in {lasted}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Code;

    #[tokio::test(start_paused = true)]
    async fn a_problem_is_logged_at_start_growing_intervals_and_end() {
        let mut failures = Repetition::default();
        let problem = |code| Problem::new(code, "istiod", "found");
        let (refused, silent) = (Code::IstiodConnectionRefused, Code::IstiodTimeout);
        let mut logged = Vec::new();
        for second in 0..=600 {
            // Causes that alternate do not count as new causes.
            let code = if second % 2 == 0 { refused } else { silent };
            logged.extend(failures.failed(&problem(code)).map(|text| (second, text)));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let seconds: Vec<_> = logged.iter().map(|(second, _)| *second).collect();
        assert_eq!(seconds, [0, 1, 60, 61, 120, 121, 240, 241, 480, 481]);
        assert_eq!(logged[0].1, "");
        assert_eq!(logged[2].1, " (failure 31 in 1 min)");
        assert_eq!(failures.end().as_deref(), Some("failures: 601 in 10 min 1 s"));
        assert_eq!(failures.end(), None);
        assert_eq!(failures.failed(&problem(refused)).as_deref(), Some(""));
    }
}
