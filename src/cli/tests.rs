//! Tests how command lines are parsed.

use super::*;
use crate::config::pod::NodeType;

fn typed(line: &str) -> Result<ParsedLine, ParseError> {
    parse(line.split(' ').map(str::to_owned))
}

fn proxy(line: &str) -> (ProxyFlags, LogFlags, Vec<String>) {
    let typed = typed(line).expect("the line is understood");
    match typed.cli.command {
        Some(Command::Proxy(flags)) => {
            let unknown = typed.unknown_flags.iter().map(ToString::to_string);
            (flags, typed.cli.log, unknown.collect())
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn understands_what_the_injector_passes() {
    let (flags, log, unknown) = proxy(
        "pilot-agent proxy sidecar --domain shop.svc.cluster.local --proxyLogLevel=warning \
         --proxyComponentLogLevel=misc:error --log_output_level=default:info --log_as_json \
         --stsPort=1 --concurrency 2",
    );
    assert_eq!(flags.kind, NodeType::Sidecar);
    assert_eq!(flags.domain, "shop.svc.cluster.local");
    assert_eq!(flags.proxy_component_log_level, "misc:error");
    assert_eq!(flags.concurrency, 2);
    assert_eq!(log.output_level, "default:info");
    assert!(log.as_json);
    assert!(unknown.is_empty());
}

#[test]
fn an_unknown_flag_of_proxy_is_reported_and_keeps_the_type() {
    for (line, named) in [
        ("pilot-agent proxy --old router", "--old"),
        ("pilot-agent proxy router --old", "--old"),
        ("pilot-agent proxy --old=1 router", "--old"),
        ("pilot-agent proxy --old value router", "--old and the word after it"),
        ("pilot-agent --old proxy router", "--old"),
        ("pilot-agent --old value proxy router", "--old and the word after it"),
        ("pilot-agent --log_target proxy proxy -x=1 router", "-x"),
        ("pilot-agent --log_output_level debug proxy --old router", "--old"),
        ("pilot-agent proxy --old debug router", "--old and the word after it"),
    ] {
        let (flags, _, unknown) = proxy(line);
        assert_eq!(flags.kind, NodeType::Router, "{line}");
        assert_eq!(unknown, [named], "{line}");
    }
}

#[test]
fn a_misspelt_proxy_flag_is_reported_with_the_nearest_flag() {
    for (line, name) in [
        ("pilot-agent proxy --domian x", "--domian (--domain?)"),
        ("pilot-agent proxy --log_targt=x", "--log_targt (--log_target?)"),
        ("pilot-agent proxy --frobnicate", "--frobnicate"),
        ("pilot-agent --vrsion", "--vrsion (--version?)"),
    ] {
        let unknown = typed(line).expect("the flag is left out").unknown_flags;
        assert_eq!(unknown.len(), 1, "{line}");
        let shown = unknown[0].trim_end_matches(" and the word after it");
        assert_eq!(shown, name, "{line}");
    }
}

#[test]
fn proxy_starts_with_a_version_flag() {
    let command = typed("pilot-agent proxy --version");
    let command = command.expect("tolerated").cli.command;
    assert!(matches!(command, Some(Command::Proxy(_))), "{command:?}");
}

#[test]
fn help_groups_the_logging_flags_and_shows_no_empty_default() {
    for line in [
        "pilot-agent --help",
        "pilot-agent proxy --help",
        "pilot-agent version --help",
        "pilot-agent request --help",
        "pilot-agent istio-iptables --help",
    ] {
        let Err(ParseError::Help(text)) = typed(line) else {
            panic!("{line}");
        };
        assert!(!text.contains("default: \"\"") && !text.contains("default \"\""), "{text}");
        let (before, logging) = text.split_once("\nLogging:\n").expect("the group");
        assert!(!before.contains("--log_") && !before.contains("--vklog"), "{text}");
        let own = logging.split("\n\n").next().expect("the group");
        let own = own.lines().filter(|line| line.trim_start().starts_with("--"));
        let is_of_logging = |line: &str| line.contains("--log_") || line.contains("--vklog");
        assert!(own.clone().count() == 6 && own.clone().all(is_of_logging), "{text}");
    }
}

#[test]
fn invalid_command_lines_are_refused_with_one_sentence() {
    for (line, sentence) in [
        ("pilot-agent proxy gateway", "invalid proxy Type: gateway"),
        ("pilot-agent proxy ztunnel", "proxy type ztunnel is not supported"),
        ("pilot-agent proxy --concurrency x", "--concurrency"),
        ("pilot-agent frobnicate", "unknown command \"frobnicate\" for \"pilot-agent\""),
        (
            "pilot-agent proxi sidecar",
            "unknown command \"proxi\" for \"pilot-agent\"\n\nDid you mean this?\n\tproxy\n",
        ),
        ("pilot-agent proxy sidecr", "invalid proxy Type: sidecr (sidecar?)"),
        ("pilot-agent wait --periodMilis 1", "unknown flag: --periodMilis (--periodMillis?)"),
        ("pilot-agent istio-iptables --explian=x", "unknown flag: --explian (--explain?)"),
        ("pilot-agent wait --log_as_jsn", "unknown flag: --log_as_jsn (--log_as_json?)"),
        ("pilot-agent config -o jsn", "--output must be 'yaml' or 'json'"),
        ("pilot-agent version --old", "unknown flag: --old"),
        ("pilot-agent --old version", "unknown flag: --old"),
        ("pilot-agent request GET proxy --old", "unknown flag: --old"),
        ("pilot-agent request GET", "expected <PATH>"),
        ("pilot-agent version -o xml", "--output must be 'yaml' or 'json'"),
        ("pilot-agent completion csh", "expected bash, zsh, fish or powershell"),
    ] {
        match typed(line) {
            Err(ParseError::Invalid(text)) => assert!(text.contains(sentence), "{text}"),
            other => panic!("{line}: {other:?}"),
        }
    }
}

#[test]
fn booleans_take_a_value_only_after_an_equals_sign() {
    let (flags, ..) = proxy("pilot-agent proxy --profiling=false");
    assert!(!flags.profiling);
    let (flags, ..) = proxy("pilot-agent proxy --profiling router");
    assert!(flags.profiling);
    assert_eq!(flags.kind, NodeType::Router);
}

#[test]
fn a_boolean_has_every_spelling_of_the_environment() {
    for (text, value) in [("T", true), ("1", true), ("False", false), ("0", false)] {
        let (_, log, _) = proxy(&format!("pilot-agent proxy --log_as_json={text}"));
        assert_eq!(log.as_json, value, "{text}");
    }
    assert!(typed("pilot-agent proxy --log_as_json=yes").is_err());
}

#[test]
fn a_flag_said_twice_has_its_last_value_and_targets_add_up() {
    let (flags, log, _) = proxy(
        "pilot-agent --log_target=stderr proxy --concurrency=1 --concurrency=2 \
         --log_as_json --log_as_json=false --log_target=/tmp/x",
    );
    assert_eq!(flags.concurrency, 2);
    assert!(!log.as_json);
    assert!(log.target.contains(&"/tmp/x".to_owned()), "{:?}", log.target);
    let (_, log, _) = proxy("pilot-agent proxy --log_target=stderr --log_target=/tmp/x");
    assert_eq!(log.target, ["stderr", "/tmp/x"]);
}

#[test]
fn flags_of_older_releases_still_start_the_agent() {
    let (_, log, unknown) = proxy(
        "pilot-agent proxy --log_rotate /x --log_rotate_max_age=30 --log_rotate_max_size 1 \
         --log_rotate_max_backups 1 --vklog 4 --log_caller=all --log_stacktrace_level=sds:debug",
    );
    assert_eq!(unknown, [""; 0]);
    log.options().expect("logging is set up");
    let (_, log, _) = proxy("pilot-agent proxy --log_stacktrace_level=loud");
    assert!(log.options().is_err());
}

#[test]
fn the_program_and_each_command_have_help() {
    for line in [
        "pilot-agent --help",
        "pilot-agent help",
        "pilot-agent help wait",
        "pilot-agent proxy --help",
        "pilot-agent istio-iptables --help",
    ] {
        assert!(matches!(typed(line), Err(ParseError::Help(_))), "{line}");
    }
    for line in ["pilot-agent", "pilot-agent --old", "pilot-agent --old value"] {
        assert!(typed(line).expect("no command").cli.command.is_none(), "{line}");
    }
}

#[test]
fn help_of_istio_iptables_names_the_variables_of_its_flags() {
    let Err(ParseError::Help(help)) = typed("pilot-agent istio-iptables --help") else {
        panic!("no help");
    };
    for line in [
        "[env: ISTIO_SERVICE_CIDR]",
        "[env: DROP_INVALID, INVALID_DROP]",
        "[env: ISTIO_AGENT_PROTECT_ADMIN]",
    ] {
        assert!(help.contains(line), "{line}: {help}");
    }
}

#[test]
fn help_is_in_plain_english() {
    const REJECTED: [&str; 7] =
        ["anew", "all the same", "goes on", "is away", "those of", "as it came", "of its own"];
    let mut command = Cli::command();
    let own = command.render_long_help().to_string();
    let helps = command.get_subcommands_mut();
    let helps = helps.map(|command| command.render_long_help().to_string());
    for help in helps.chain([own]) {
        let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for phrase in REJECTED {
            assert!(!words.contains(phrase), "{phrase}: {help}");
        }
    }
}

#[test]
fn the_hooks_of_the_injector_are_understood() {
    for line in [
        "pilot-agent request --debug-port=15020 POST drain",
        "pilot-agent request GET /stats?filter=x body more words",
        "pilot-agent wait",
        "pilot-agent wait --url=http://localhost:15020/healthz/ready --periodMillis 1",
        "pilot-agent version -s -o yaml",
        "pilot-agent version --short=false --output=json",
        "pilot-agent completion",
        "pilot-agent completion fish",
    ] {
        typed(line).expect(line);
    }
}

#[test]
fn further_words_are_ignored_where_pilot_agent_ignores_them() {
    for command in ["proxy router", "wait", "version", "request GET / body"] {
        for line in [
            format!("pilot-agent {command} now"),
            format!("pilot-agent {command} one two --log_as_json three"),
        ] {
            typed(&line).expect(&line);
        }
    }
    typed("pilot-agent istio-iptables now -p 15001 then").expect("a line");
    assert!(typed("pilot-agent completion bash now").is_err());
}

#[test]
fn reports_are_text_or_json() {
    let format = |flags: &str| match typed(&format!("pilot-agent {flags}")).unwrap().cli.command {
        Some(Command::Doctor(flags)) => flags.format,
        Some(Command::Preflight(flags)) => flags.format,
        other => panic!("{other:?}"),
    };
    for command in ["doctor", "preflight"] {
        for (flags, is_json) in [
            ("-o text", false),
            ("-o json", true),
            ("--output=json", true),
            ("--json", true),
            ("--json -o text", true),
            ("-o json -o text", false),
        ] {
            assert_eq!(format(&format!("{command} {flags}")).is_json(), is_json, "{flags}");
        }
        assert!(!format(command).is_json());
        let invalid = typed(&format!("pilot-agent {command} -o yaml")).unwrap_err();
        let text = format!("{invalid:?}");
        assert!(text.contains("for '--output <OUTPUT>', expected text, json"), "{text}");
    }
}

#[test]
fn only_the_level_at_the_beginning_of_a_line_is_coloured() {
    for (line, expected) in [
        ("error    a: b", "\u{1b}[31merror\u{1b}[0m    a: b"),
        ("  warning  error: b", "  \u{1b}[33mwarning\u{1b}[0m  error: b"),
        ("  ok       a", "  \u{1b}[32mok\u{1b}[0m       a"),
        ("skipped  a", "\u{1b}[2mskipped\u{1b}[0m  a"),
        ("           error again", "           error again"),
        ("errors: 1, warnings: 0", "errors: 1, warnings: 0"),
        ("error", "\u{1b}[31merror\u{1b}[0m"),
        ("", ""),
    ] {
        assert_eq!(coloured(line), expected);
    }
}

#[test]
fn no_output_is_coloured_that_is_not_a_terminal_of_an_operator() {
    // The tests' output is captured.
    for variables in [vec![], vec![("NO_COLOR", "1")], vec![("TERM", "dumb")]] {
        assert!(!has_colours(&variables.into_iter().collect()));
    }
}

#[tokio::test(start_paused = true)]
async fn work_with_progress_ends_with_its_result() {
    for seconds in [0, 2] {
        let work = async {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            seconds
        };
        assert_eq!(with_progress("", work).await, seconds);
    }
}

#[test]
fn debug_is_a_command_only_at_the_beginning_of_a_line() {
    let line = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    for (text, is_data) in [
        ("pilot-agent debug xdsz", true),
        ("pilot-agent --log_output_level debug proxy", false),
        ("pilot-agent --log_output_level debug config", true),
    ] {
        assert_eq!(prints_data(&line(text)), is_data, "{text}");
    }
    let command = typed("pilot-agent debug xdsz").unwrap().cli.command;
    assert!(matches!(command, Some(Command::Debug(_))), "{command:?}");
}
