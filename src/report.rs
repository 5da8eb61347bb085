//! Formats the findings of `doctor` and `preflight`: one line each, as text or as JSON.

use std::cmp::Reverse;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::logging::printable;
use crate::problem::{Code, Level, Problem, sentence};

/// The longest text of a check, in characters.
const MAX_TEXT: usize = 1000;

/// The indentation of the second and later lines of a finding.
const INDENT: &str = "           ";
const NEXT_STEPS: &str = "if requests fail, compare rq_error and cx_connect_fail per cluster (`pilot-agent request GET \
                          clusters`), and with Istio's stats filter istio_requests_total by response_flags (or an \
                          access log, if it is on)";

/// The results of all checks.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    pub node: String,
    /// The worst level of all checks.
    pub level: Level,
    /// The state of the pod and the first problem. Empty in reports of older agents.
    #[serde(default)]
    pub verdict: String,
    #[serde(default)]
    pub remedy: String,
    pub groups: Vec<Group>,
}

/// Checks of one subject. The groups are sorted by dependency.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Group {
    pub name: String,
    pub checks: Vec<Check>,
}

/// The result of one check, which is one line of text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Check {
    pub name: String,
    pub level: Level,
    /// The code of the problem. Empty if the check passed or was not made.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub code: String,
    pub found: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub expected: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub consequence: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

/// The state of a pod, for the verdict of a report.
#[derive(Clone, Debug)]
pub enum PodState {
    Ready,
    NotReady,
    /// Nothing is known, for this reason.
    Unknown(String),
}

impl fmt::Display for PodState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ready => "ready",
            Self::NotReady => "not ready",
            Self::Unknown(why) => why,
        })
    }
}

impl Group {
    pub(crate) fn new(name: &str, checks: Vec<Check>) -> Self {
        Self { name: name.to_owned(), checks }
    }
}

impl Check {
    pub fn ok(name: impl ToString, found: impl ToString) -> Self {
        Self::new(name, Level::Ok, found)
    }

    /// Describes a check that was not made.
    pub fn skipped(name: impl ToString, why: impl ToString) -> Self {
        Self::new(name, Level::Skipped, why)
    }

    pub fn new(name: impl ToString, level: Level, found: impl ToString) -> Self {
        Self {
            name: name.to_string(),
            level,
            // An error may quote a text of any length that another process has sent.
            found: found.to_string().chars().take(MAX_TEXT).collect(),
            ..Self::default()
        }
    }

    /// Reports a problem with this level instead of the one of its code.
    pub fn with_level(level: Level, problem: &Problem) -> Self {
        Self {
            code: problem.code.name().to_owned(),
            expected: problem.expected.to_string(),
            consequence: problem.consequence.to_string(),
            remedy: problem.remedy.to_string(),
            ..Self::new(&problem.subject, level, &problem.found)
        }
    }

    pub fn sentence(&self) -> String {
        self.line([&self.consequence, &self.remedy])
    }

    fn line(&self, follows: [&str; 2]) -> String {
        sentence(&self.name, &self.found, &self.expected, follows, &self.code)
    }

    /// Returns true if the other finding is only a consequence of this one.
    fn causes(&self, other: &Self) -> bool {
        Code::named(&self.code)
            .is_some_and(|code| code.hides().iter().any(|it| it.name() == other.code))
    }

    /// Counts the quotation marks: istiod and Envoy quote the names of objects.
    fn quotes(&self) -> usize {
        self.found.matches('"').count()
    }
}

/// Reports a problem with the level of its code.
impl From<&Problem> for Check {
    fn from(problem: &Problem) -> Self {
        Self::with_level(problem.code.level(), problem)
    }
}

impl Report {
    pub(crate) fn new(node: String, groups: Vec<Group>) -> Self {
        let groups = groups.into_iter().filter(|it| !it.checks.is_empty());
        let mut report = Self { node, groups: groups.collect(), ..Self::default() };
        report.level = report.checks().map(|it| it.level).max().unwrap_or_default();
        report
    }

    /// Adds verdict and remedy. The problem `unexplained` is added if no check is an error.
    #[must_use]
    pub fn judged(mut self, state: &PodState, unexplained: Option<&Problem>) -> Self {
        if let Some(problem) = unexplained
            && self.level < Level::Error
        {
            self.groups.push(Group::new("readiness", vec![Check::from(problem)]));
            self.level = Level::Error;
        }
        let findings = self.findings();
        // A problem that has to be solved in other pods may be the reason why requests fail.
        let note = self.checks().find(|it| it.level == Level::Ok && !it.code.is_empty());
        (self.verdict, self.remedy) = if let Some(first) = findings.first() {
            let name = first.level.name();
            let text = first.line(["", ""]);
            let worst = findings.iter().filter(|it| it.level == first.level);
            let count = match (state, worst.count()) {
                (PodState::Ready, 1) => format!(", with 1 {name}"),
                (PodState::Ready, worst) => format!(", with {worst} {name}s"),
                _ => String::new(),
            };
            (format!("{state}{count}: {text}"), first.remedy.clone())
        } else if let Some(note) = note {
            let text = note.line(["", ""]);
            (
                format!("{state}: no problem found in this pod; {text}"),
                format!("{}; otherwise {NEXT_STEPS}", note.remedy),
            )
        } else {
            (format!("{state}: no problem found"), NEXT_STEPS.to_owned())
        };
        self
    }

    fn checks(&self) -> impl Iterator<Item = &Check> {
        self.groups.iter().flat_map(|group| &group.checks)
    }

    /// Returns the errors, and then the warnings, without the consequences of others. Of those with the same code and
    /// name, the text that quotes most names is returned.
    pub fn findings(&self) -> Vec<Check> {
        let mut all: Vec<_> = self.checks().filter(|it| it.level > Level::Ok).collect();
        all.sort_by_key(|check| Reverse(check.level));
        let mut findings: Vec<Check> = Vec::new();
        for check in &all {
            if all.iter().take_while(|it| it.level >= check.level).any(|it| it.causes(check)) {
                continue;
            }
            let known = findings
                .iter_mut()
                .find(|it| !it.code.is_empty() && it.code == check.code && it.name == check.name);
            match known {
                None => findings.push(Check::clone(check)),
                Some(known) if check.quotes() > known.quotes() => {
                    *known = Check { level: known.level, ..Check::clone(check) };
                }
                Some(_) => {}
            }
        }
        findings
    }

    /// Formats verdict, remedy and findings, or `all` checks, in lines of at most `width` characters.
    pub fn text(&self, all: bool, width: usize) -> String {
        let findings = self.findings();
        let mut lines =
            vec![self.verdict.clone(), format!("what to do: {}", self.remedy), self.node.clone()];
        if all {
            for group in &self.groups {
                lines.push(group.name.clone());
                lines.extend(group.checks.iter().map(|check| format!("  {check}")));
            }
        } else {
            lines.extend(findings.iter().map(ToString::to_string));
        }
        let [errors, warnings] = [Level::Error, Level::Warning]
            .map(|level| findings.iter().filter(|it| it.level == level).count());
        let [passed, skipped] = [Level::Ok, Level::Skipped]
            .map(|level| self.checks().filter(|it| it.level == level).count());
        lines.push(format!(
            "errors: {errors}, warnings: {warnings}, passed: {passed}, skipped: {skipped}"
        ));
        // Without a configuration the node is unknown.
        lines.retain(|line| !line.is_empty());
        let lines: Vec<_> = lines.iter().map(|line| wrapped(line, width)).collect();
        lines.join("\n")
    }
}

/// Breaks a line at spaces, or inside a word that is too long, and indents the following lines.
fn wrapped(line: &str, width: usize) -> String {
    let mut text = String::new();
    let mut rest = printable(line);
    while let Some((end, _)) = rest.char_indices().nth(width) {
        let space = rest[..end].rfind(' ').filter(|at| *at > INDENT.len());
        let (line, more) = rest.split_at(space.unwrap_or(end));
        text += &format!("{}\n", line.trim_end());
        rest = format!("{INDENT}{}", more.trim_start());
    }
    text + &rest
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = self.level.name();
        // A certificate's name or a response may contain any characters.
        write!(f, "{level:<8} {}", printable(&self.sentence()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTH: usize = 120;

    fn report(checks: Vec<Check>) -> Report {
        let name = "istiod".to_owned();
        Report::new("node".to_owned(), vec![Group { name, checks }])
    }

    fn problem(code: Code, subject: &str, found: &str) -> Problem {
        Problem::new(code, subject, found).consequence("").remedy("mend it")
    }

    fn error(code: Code, subject: &str, found: &str) -> Check {
        Check::with_level(Level::Error, &problem(code, subject, found))
    }

    fn warning(code: Code, subject: &str, found: &str) -> Check {
        Check::with_level(Level::Warning, &problem(code, subject, found))
    }

    #[test]
    fn verdict_and_remedy_are_the_first_lines_and_passed_checks_are_counted() {
        let checks = vec![
            Check::skipped("a", "no agent"),
            Check::ok("b", "found"),
            warning(Code::LogSilent, "c", "none"),
            error(Code::AgentUnknown, "d\n", "a\u{1b}[2Jb\nc"),
        ];
        let found = report(checks).judged(&PodState::NotReady, None);
        assert_eq!(found.level, Level::Error);
        let begin =
            "not ready: d\\n: a\\u001b[2Jb\\nc [AGENT_UNKNOWN]\nwhat to do: mend it\nnode\n";
        let passed = "  skipped  a: no agent\n  ok       b: found\n";
        let warning = "warning  c: none; mend it [LOG_SILENT]\n";
        let error = "error    d\\n: a\\u001b[2Jb\\nc; mend it [AGENT_UNKNOWN]\n";
        let end = "errors: 1, warnings: 1, passed: 1, skipped: 1";
        let short = format!("{begin}{error}{warning}{end}");
        assert_eq!(found.text(false, usize::MAX), short);
        let long = format!("{begin}istiod\n{passed}  {warning}  {error}{end}");
        assert_eq!(found.text(true, usize::MAX), long);
    }

    #[test]
    fn the_verdict_is_the_state_with_the_first_of_the_worst_findings() {
        let (one, two) =
            (warning(Code::LogSilent, "a", "one"), warning(Code::LogSilent, "b", "two"));
        let three = error(Code::AgentUnknown, "c", "three");
        let missing = problem(Code::PodNotReady, "pod", "no listener");
        let ok = Check::ok("b", "found");
        for (checks, state, unexplained, verdict, level) in [
            (vec![], PodState::Ready, None, "ready: no problem found", Level::Skipped),
            (vec![ok], PodState::Ready, None, "ready: no problem found", Level::Ok),
            (
                vec![one.clone()],
                PodState::Ready,
                None,
                "ready, with 1 warning: a: one [LOG_SILENT]",
                Level::Warning,
            ),
            (
                vec![one.clone(), two.clone()],
                PodState::Ready,
                None,
                "ready, with 2 warnings: a: one [LOG_SILENT]",
                Level::Warning,
            ),
            (
                vec![one.clone(), three.clone()],
                PodState::Ready,
                None,
                "ready, with 1 error: c: three [AGENT_UNKNOWN]",
                Level::Error,
            ),
            (
                vec![one.clone(), three],
                PodState::NotReady,
                Some(&missing),
                "not ready: c: three [AGENT_UNKNOWN]",
                Level::Error,
            ),
            (
                vec![one],
                PodState::NotReady,
                Some(&missing),
                "not ready: pod: no listener [POD_NOT_READY]",
                Level::Error,
            ),
        ] {
            let found = report(checks).judged(&state, unexplained);
            assert_eq!((found.verdict.as_str(), found.level), (verdict, level));
            assert!(!found.remedy.is_empty());
        }
        let found = report(vec![]).judged(&PodState::Ready, None);
        for words in
            ["rq_error", "request GET clusters", "istio_requests_total", "access log, if it is on"]
        {
            assert!(found.remedy.contains(words), "{}", found.remedy);
        }
        let lines = found.text(false, WIDTH).lines().count();
        assert_eq!(lines, 5, "verdict, advice of two lines, node, counts: {}", found.remedy);
    }

    #[test]
    fn levels_and_findings_do_not_depend_on_texts() {
        let levels = |text: Option<&'static str>| {
            let check = |code: &Code| {
                let mut problem = Problem::new(*code, "subject", "found");
                if let Some(text) = text {
                    problem = problem.expected(text).consequence(text).remedy(text);
                    problem.found = text.to_owned();
                }
                Check::from(&problem)
            };
            let found = report(Code::ALL.iter().map(check).collect());
            let state = PodState::Unknown(text.unwrap_or("not known").to_owned());
            let found = found.judged(&state, None);
            let has_count = found.verdict.contains(", with ");
            let codes = found.findings().into_iter().map(|it| (it.level, it.code.clone()));
            (found.level, has_count, codes.collect::<Vec<_>>())
        };
        let usual = levels(None);
        assert_eq!(levels(Some("")), usual);
        assert_eq!(levels(Some("ready")), usual);
    }

    #[test]
    fn a_finding_is_listed_once_and_without_its_consequences() {
        let (cause, consequence) = (Code::CaptureRulesMissing, Code::DnsNotCaptured);
        let groups = [
            vec![warning(cause, "a", "1"), warning(consequence, "b", "2")],
            vec![error(cause, "a", "1"), error(cause, "c", "3")],
            vec![error(cause, "a", "1"), error(consequence, "b", "4")],
        ];
        let groups = groups.map(|checks| Group::new("group", checks)).into();
        let found = Report::new(String::new(), groups).judged(&PodState::NotReady, None);
        let findings = found.findings();
        let listed: Vec<_> = findings.iter().map(|it| (it.level, &*it.found)).collect();
        assert_eq!(listed, [(Level::Error, "1"), (Level::Error, "3")]);
        // The JSON contains all checks, also the consequences.
        let json = serde_json::to_value(&found).expect("JSON");
        assert_eq!(json["groups"][2]["checks"][1]["found"], "4");
        // A warning as the cause does not hide an error that follows from it.
        let checks = vec![warning(cause, "a", "1"), error(consequence, "b", "2")];
        assert_eq!(report(checks).findings().len(), 2);
    }

    #[test]
    fn consequences_are_not_listed_beside_their_causes() {
        const WAITS: &[&str] = &["SECRET_AWAITED", "LISTENER_WARMING", "CLUSTER_WARMING"];
        const OTHERS: &[&str] =
            &["RBAC_DENIED", "APPLICATION_PORT_CLOSED", "RESOURCE_REFUSED", "SECRET_FILE_MISSING"];
        let code = |name: &str| Code::named(name).expect("code");
        let listed = |cause: &str, other: &str| {
            let checks = [other, cause].map(|name| error(code(name), name, "found")).to_vec();
            let listed = report(checks).findings().into_iter().map(|it| it.code).rev();
            listed.collect::<Vec<_>>()
        };
        for (causes, consequences) in [
            (&["ISTIOD_TOKEN_MISSING"][..], &["ISTIOD_UNAUTHENTICATED"][..]),
            (&["DNS_RESOLVER_SILENT"], &["ISTIOD_NAME_NOT_RESOLVED"]),
            (&["ISTIOD_CONNECTION_REFUSED", "ISTIOD_NOT_REACHABLE"], &["ISTIOD_NO_ANSWER"]),
            (&["ISTIOD_NO_ANSWER", "SYSTEM_ROOTS_UNUSABLE", "TLS_UNUSABLE"], WAITS),
            (
                &["ISTIOD_NO_ANSWER", "CLIENT_CERTIFICATE_UNUSABLE", "GOOGLE_TOKEN_MISSING"],
                &["CERTIFICATE_NOT_ISSUED", "DNS_NAME_TABLE_MISSING", "LISTENERS_MISSING"],
            ),
            (&["SOCKET_TAKEN", "SOCKET_NOT_SERVED"], WAITS),
            (&["CERTIFICATE_EXPIRED", "SECRET_FILE_MISSING"], &["SECRET_AWAITED"]),
            (&["CERTIFICATE_EXPIRED", "ROOTS_EXPIRED"], &["HANDSHAKES_FAILED"]),
            (&["RESOURCE_REFUSED", "LISTENER_WARMING", "PORT_TAKEN"], &["READINESS_FAILED"]),
            (&["ENVOY_CRASHED"], &["DNS_NAME_TABLE_MISSING", "READINESS_FAILED"]),
            (&["ENVOY_STOPPING"], &["READINESS_FAILED", "PROBE_PORT_CLOSED", "STANDBY_ABSENT"]),
            (&["ENVOY_OUT_OF_MEMORY"], &["MEMORY_USED_UP"]),
            (&["FILES_USED_UP", "PORTS_USED_UP"], &["ENVOY_HANGS", "READINESS_FAILED"]),
            (&["DISK_FULL"], &["KEPT_CONFIG_UNWRITABLE", "HOT_RESTART_UNAVAILABLE"]),
        ] {
            for (cause, other) in
                causes.iter().flat_map(|it| consequences.iter().map(move |of| (it, of)))
            {
                assert_eq!(listed(cause, other), [*cause], "{other}");
                assert_eq!(listed(other, cause), [*cause], "{other}");
            }
        }
        // An independent finding stays.
        for (cause, other) in [
            ("ISTIOD_NO_ANSWER", "ISTIOD_TOKEN_MISSING"),
            ("SECRET_AWAITED", "LISTENER_WARMING"),
            ("SECRET_FILE_MISSING", "LISTENER_WARMING"),
            ("PROBE_PORT_CLOSED", "APPLICATION_PORT_CLOSED"),
            ("PROBE_PORT_CLOSED", "READINESS_FAILED"),
            ("CAPTURE_RULES_MISSING", "READINESS_FAILED"),
            ("MEMORY_USED_UP", "ENVOY_HANGS"),
        ] {
            assert_eq!(listed(cause, other).len(), 2, "{cause}, {other}");
        }
        for other in OTHERS {
            assert_eq!(listed("ISTIOD_NO_ANSWER", other).len(), 2, "{other}");
        }
    }

    #[test]
    fn of_two_findings_the_one_that_names_an_object_is_listed() {
        let code = Code::IstiodUnauthenticated;
        let (poor, rich) = ("Unauthenticated: denied", "serviceaccounts \"web\" not found");
        for (checks, level, found) in [
            (vec![error(code, "istiod", poor), error(code, "istiod", rich)], Level::Error, rich),
            (vec![error(code, "istiod", rich), error(code, "istiod", poor)], Level::Error, rich),
            (vec![error(code, "istiod", poor), warning(code, "istiod", rich)], Level::Error, rich),
            (vec![warning(code, "istiod", poor), error(code, "istiod", "x")], Level::Error, "x"),
        ] {
            let findings = report(checks).findings();
            let listed: Vec<_> = findings.iter().map(|it| (it.level, &*it.found)).collect();
            assert_eq!(listed, [(level, found)]);
        }
    }

    #[test]
    fn no_line_is_wider_than_the_terminal_and_no_word_is_lost() {
        let words = "word ".repeat(80);
        let long = "ü".repeat(300);
        let checks = vec![
            error(Code::AgentUnknown, "a", &words),
            error(Code::AgentUnknown, "b", &long),
            error(Code::AgentUnknown, "c", &format!("{words}{long}{words}")),
        ];
        let found = report(checks).judged(&PodState::NotReady, None);
        let text = found.text(true, WIDTH);
        let width = text.lines().map(|line| line.chars().count()).max();
        assert!(width <= Some(WIDTH), "{text}");
        let letters =
            |text: &str| text.chars().filter(|it| !it.is_whitespace()).collect::<String>();
        assert_eq!(letters(&text), letters(&found.text(true, usize::MAX)));
        let continued = text.lines().filter(|line| line.starts_with(INDENT));
        assert!(continued.count() > 10, "{text}");
    }

    #[test]
    fn the_report_of_an_older_agent_can_be_read() {
        let old = r#"{"node":"a","level":"ok","groups":[]}"#;
        let found: Report = serde_json::from_str(old).expect("a report");
        assert_eq!(found.judged(&PodState::Ready, None).verdict, "ready: no problem found");
    }

    #[test]
    fn a_text_of_another_process_is_cut() {
        let check = Check::new("a", Level::Error, "é".repeat(5000));
        assert_eq!(check.found.chars().count(), MAX_TEXT);
    }
}
