//! Tests how environment variables are read, and the table of variables.

use super::*;

fn read<T: Value>(variable: &Variable<T>, value: Option<&str>) -> (T, usize) {
    let env: Environment = value.map(|v| (variable.row.name, v)).into_iter().collect();
    (env.get(variable), env.malformed().count())
}

#[test]
fn every_default_is_of_its_variables_type() {
    for row in rows() {
        let is_read = TABLE.iter().any(|read| read.name == row.name);
        let good = match row.kind {
            "string" | "JSON" | "list" => true,
            _ if row.default.is_empty() => !is_read,
            "bool" => bool::parse(row.default).is_some(),
            "int" => u32::parse(row.default).is_some(),
            "port" => u16::parse(row.default).is_some(),
            "float" => f64::parse(row.default).is_some(),
            "duration" => Duration::parse(row.default).is_some(),
            _ => false,
        };
        assert!(good, "{}", row.name);
    }
}

#[test]
fn an_empty_string_is_text_and_a_warning_for_other_types() {
    assert_eq!(read(&TRUST_DOMAIN, Some("")), (String::new(), 0));
    assert_eq!(read(&TRUST_DOMAIN, None), ("cluster.local".into(), 0));
    assert_eq!(read(&ISTIO_DELTA_XDS, Some("")), (true, 1));
    assert_eq!(read(&ISTIO_CPU_LIMIT, Some("")), (0, 1));
}

#[test]
fn a_value_of_the_wrong_type_warns_and_the_default_is_used() {
    assert_eq!(read(&ISTIO_DELTA_XDS, Some("no")), (true, 1));
    assert_eq!(read(&ISTIO_DELTA_XDS, Some("F")), (false, 0));
    assert_eq!(read(&INSTANCE_IP, Some("pod")), (None, 1));
    assert_eq!(read(&ENVOY_STATUS_PORT, Some("70000")), (15021, 1));
    let day = Duration::from_secs(86_400);
    assert_eq!(read(&SECRET_TTL, Some("24")), (day, 1));
    assert_eq!(read(&SECRET_TTL, Some("1m")), (Duration::from_secs(60), 0));
    assert_eq!(read(&SECRET_GRACE_PERIOD_RATIO, Some("NaN")), (0.5, 1));
}

#[test]
fn a_restart_budget_is_parsed_as_count_slash_duration() {
    let expected = Budget { restarts: 3, within: Duration::from_secs(600) };
    assert_eq!(budget("3/10m"), Some(Some(expected)));
    for text in ["", "0", "0/10m"] {
        assert_eq!(budget(text), Some(None), "{text}");
    }
    for text in ["3", "3/0s", "3/10", "-1/10m", "3/10m/", "/10m", "many/10m"] {
        assert_eq!(budget(text), None, "{text}");
    }
}

#[test]
fn metadata_of_google_has_four_parts() {
    let parts = ["a", "", "c", "d"].map(str::to_owned);
    assert_eq!(read(&GCP_METADATA, Some("a||c|d")), (Some(parts), 0));
    assert_eq!(read(&GCP_METADATA, Some("")), (None, 0));
    for text in ["a|b|c", "a|b|c|d|e"] {
        assert_eq!(read(&GCP_METADATA, Some(text)), (None, 1), "{text}");
    }
}

#[test]
fn a_prefix_is_stripped_and_must_leave_a_name() {
    let env: Environment =
        [("XDS_HEADER_a", "b=c"), ("XDS_HEADER_", "x"), ("OTHER", "y")].into_iter().collect();
    let found: Vec<_> = env.with_prefix("XDS_HEADER_").collect();
    assert_eq!(found, [("a", "b=c")]);
}

#[test]
fn no_variable_has_two_rows() {
    let mut names: Vec<_> = rows().map(|row| row.name).collect();
    names.sort_unstable();
    let count = names.len();
    names.dedup();
    assert_eq!(names.len(), count, "one of them is listed twice: {names:?}");
}

#[test]
fn unknown_variables_of_this_agent_are_named_with_the_nearest_one() {
    let variables = [
        ("ISTIO_AGENT_FLAGS", "--log_as_json"),
        ("ISTIO_AGENT_FROBNICATE", "1"),
        ("ISTIO_AGENT_HOTRESTART", "true"),
        ("ISTIO_AGENT_HOT_RESTART", "true"),
        ("ISTIO_AGENT_PROTECT_ADMIN", "true"),
        ("ISTIO_META_ANYTHING", "1"),
        ("SOMETHING_ELSE", "1"),
    ];
    let env = Environment::from_iter(variables);
    let found: Vec<_> = env.unknown().map(|problem| problem.brief()).collect();
    let expected = [
        "ISTIO_AGENT_FROBNICATE: unknown variable",
        "ISTIO_AGENT_HOTRESTART: unknown variable (ISTIO_AGENT_HOT_RESTART?)",
    ];
    assert_eq!(found, expected);
}

#[test]
fn the_help_of_proxy_has_every_variable_with_its_state() {
    let text = reference();
    for line in [
        "  POD_NAME (string)\n",
        "  ISTIO_BOOTSTRAP (string) [refused: this agent writes the bootstrap itself]\n",
        "  WASM_PURGE_INTERVAL (duration, default \"1h\")\n",
    ] {
        assert!(text.contains(line), "{line}");
    }
}
