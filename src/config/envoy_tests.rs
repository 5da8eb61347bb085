//! Tests the configuration of Envoy and of its bootstrap.

use std::path::Path;
use std::time::Duration;

use serde_json::json;

use super::status_port;
use super::tests::machine;
use crate::envoy::restart_budget::Budget;
use crate::envoy::shutdown::Drain;
use crate::problem::Code;

#[test]
fn flags_reach_envoy_and_may_switch_it_off() {
    let config =
        machine(&[]).load("router --concurrency 3 --proxyLogLevel info,a:b:c").expect("good");
    let envoy = config.envoy.expect("Envoy");
    assert_eq!(envoy.command.concurrency, Some(3));
    assert_eq!(envoy.command.log.level.as_deref(), Some("info"));
    assert!(!envoy.drain_inbound_only);
    let subjects: Vec<_> = config.warnings.iter().map(|w| w.subject.as_str()).collect();
    assert_eq!(subjects, ["--concurrency", "--proxyLogLevel"]);
    assert!(machine(&[("DISABLE_ENVOY", "true")]).config().envoy.is_none());
    let problems = machine(&[]).load("sidecar --templateFile x").expect_err("refused");
    assert_eq!(problems[0].subject, "proxyBootstrapTemplatePath of --templateFile");
}

#[test]
fn a_drain_ends_before_the_pods_grace_period_timed_or_until_idle() {
    let seconds = Duration::from_secs;
    for (variables, at_least, at_most) in [
        (&[][..], 5, 3600),
        (&[("TERMINATION_GRACE_PERIOD_SECONDS", "120")], 5, 115),
        (&[("TERMINATION_GRACE_PERIOD_SECONDS", "6")], 5, 3),
        (
            &[
                ("TERMINATION_GRACE_PERIOD_SECONDS", "30"),
                ("ISTIO_AGENT_DRAIN_CEILING", "2m"),
                ("MINIMUM_DRAIN_DURATION", "10s"),
            ],
            10,
            120,
        ),
    ] {
        let until_idle = [("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", "true")];
        let config = machine(&[&until_idle, variables].concat()).config();
        let expected = Drain::UntilIdle { at_least: seconds(at_least), at_most: seconds(at_most) };
        let envoy = config.envoy.expect("Envoy");
        assert_eq!(envoy.limits.drain, expected, "{variables:?}");
        assert_eq!(envoy.internal_ports, [15021, 15090]);
    }
    let (delay, jitter) = ("ISTIO_AGENT_DRAIN_DELAY", "ISTIO_AGENT_DRAIN_JITTER");
    let grace = "TERMINATION_GRACE_PERIOD_SECONDS";
    for (variables, least, most, long_requests) in [
        (&[][..], 0, 0, 10),
        (&[(delay, "5s")], 5, 5, 10),
        (&[(delay, "5s"), (jitter, "3s")], 5, 8, 10),
        (&[(jitter, "3s"), (grace, "20")], 0, 3, 7),
        // The drain takes 5 s.
        (&[(delay, "1m"), (jitter, "1m"), (grace, "60")], 53, 53, 0),
        (&[(delay, "20s"), (jitter, "10s")], 20, 23, 0),
        (&[(delay, "5s"), (grace, "6")], 0, 0, 0),
    ] {
        let config = machine(variables).config();
        let limits = config.envoy.expect("Envoy").limits;
        let found = limits.delay;
        assert!(found >= seconds(least) && found <= seconds(most), "{found:?} for {variables:?}");
        assert_eq!(limits.long_requests, seconds(long_requests), "{variables:?}");
    }
    let set = "ISTIO_AGENT_LAST_REQUESTS";
    for (variables, long_requests) in [
        (&[][..], 10),
        (&[(grace, "60")], 50),
        (&[(grace, "6")], 0),
        (&[(set, "2m")], 120),
        (&[(set, "2m"), (grace, "60")], 50),
        (&[(set, "3s"), (grace, "60")], 3),
        (&[(set, "0s"), (grace, "60")], 0),
    ] {
        let config = machine(variables).config();
        let counts = config.bootstrap.stats.in_flight_expressions.len();
        let limits = config.envoy.expect("Envoy").limits;
        assert_eq!(limits.long_requests, seconds(long_requests), "{variables:?}");
        assert_eq!(counts > 0, long_requests > 0, "{variables:?}");
    }
    let envoy = machine(&[]).config().envoy.expect("Envoy");
    assert_eq!(envoy.limits.drain, Drain::For(seconds(5)));
}

#[test]
fn the_default_restart_budget_is_three_in_ten_minutes() {
    let budget = |restarts, seconds| {
        let within = Duration::from_secs(seconds);
        Some(Budget { restarts, within })
    };
    let name = "ISTIO_AGENT_ENVOY_RESTARTS";
    for (variables, expected, warnings) in [
        (&[][..], budget(3, 600), 0),
        (&[(name, "1/1h")], budget(1, 3600), 0),
        (&[(name, "")], None, 0),
        (&[(name, "0")], None, 0),
        (&[(name, "0/10m")], None, 0),
        (&[(name, "often")], budget(3, 600), 1),
        (&[(name, "3")], budget(3, 600), 1),
    ] {
        let config = machine(variables).config();
        let restarts = config.envoy.expect("Envoy").restarts;
        assert_eq!(restarts, expected, "{variables:?}");
        let found: Vec<_> = config.warnings.iter().map(|it| &*it.subject).collect();
        assert_eq!(found, vec![name; warnings], "{variables:?}");
    }
}

#[test]
fn hot_restart_is_off_by_default_and_old_envoys_outlive_their_drain() {
    assert!(machine(&[]).config().envoy.expect("Envoy").hot_restart.is_none());
    let seconds = Duration::from_secs;
    for (time, drain, expected, warnings) in
        [("60s", "45s", 60, 0), ("3s", "1s", 3, 0), ("45s", "45s", 46, 1), ("1s", "45s", 46, 1)]
    {
        let proxy_config = format!("{{drainDuration: {drain}}}");
        let machine = machine(&[
            ("ISTIO_AGENT_HOT_RESTART", "true"),
            ("ISTIO_AGENT_PARENT_SHUTDOWN_TIME", time),
            ("PROXY_CONFIG", proxy_config.leak()),
            ("ISTIO_BOOTSTRAP_OVERRIDE", "in/override.json"),
        ]);
        machine.file("in/override.json", "{}");
        let config = machine.config();
        let limits = config.envoy.expect("Envoy").hot_restart.expect("on");
        assert_eq!(limits.parent_shutdown, seconds(expected));
        assert_eq!(config.warnings.len(), warnings, "{:?}", config.warnings);
        let inputs: Vec<_> = config.inputs.iter().map(|path| path.display()).collect();
        let inputs: Vec<_> = inputs.iter().map(ToString::to_string).collect();
        assert_eq!(
            inputs,
            [
                "./etc/istio/pod/labels",
                "./etc/istio/pod/annotations",
                "./etc/istio/config/mesh",
                "/usr/local/bin/envoy",
                "in/override.json",
            ]
        );
    }
}

#[test]
fn pod_annotations_override_proxy_config_after_its_validation() {
    let machine = machine(&[("PROXY_CONFIG", "{statusPort: 15099}")]);
    let annotations = "sidecar.istio.io/discoveryAddress=\"a_b:15012\"\n\
                       status.sidecar.istio.io/port=\"0\"\n";
    machine.file("etc/istio/pod/annotations", annotations);
    let config = machine.config();
    assert_eq!(config.istiod.address, "a_b:15012");
    assert_eq!(config.bootstrap.node.proxy_config.agent_port(), None);
    let document = config.bootstrap.node.proxy_config.document();
    assert!(!document.contains_key("statusPort"), "{document:?}");
    let env = machine.variables.iter().copied().collect();
    let port_of_command = || status_port(&env, machine.root.path());
    assert_eq!(port_of_command(), None);
    let bad = "status.sidecar.istio.io/port=\"http\"\n";
    machine.file("etc/istio/pod/annotations", bad);
    let config = machine.config();
    assert_eq!(config.bootstrap.node.proxy_config.agent_port(), Some(15_099));
    assert_eq!(port_of_command(), Some(15_099));
    assert_eq!(config.warnings.len(), 1);
}

#[test]
fn a_mesh_file_yields_its_default_config_and_is_refused_when_broken() {
    let machine = machine(&[]);
    machine.file(
        "etc/istio/config/mesh",
        "connectTimeout: 2h\ndefaultConfig:\n  statusPort: x\n  drainDuration: []\n",
    );
    let mesh = "./etc/istio/config/mesh";
    let expected = [
        format!("drainDuration of defaultConfig of {mesh} line 4"),
        format!("statusPort of defaultConfig of {mesh} line 3"),
    ];
    assert_eq!(machine.subjects(), expected);
    machine.file("etc/istio/config/mesh", "default_config: []\n");
    assert_eq!(machine.subjects(), [format!("defaultConfig of {mesh} line 1")]);
}

#[test]
fn the_flag_names_the_service_cluster_only_where_the_configuration_empties_it() {
    for (document, expected) in [
        ("{}", json!("istio-proxy")),
        ("{serviceCluster: ''}", json!("from-flag")),
        ("{serviceCluster: own}", json!("own")),
        ("{tracingServiceName: 0}", json!(null)),
    ] {
        let config = machine(&[("PROXY_CONFIG", document)])
            .load("sidecar --serviceCluster from-flag")
            .expect("good");
        let canonical = config.bootstrap.node.proxy_config.document();
        let found = canonical.get("serviceCluster");
        assert_eq!(found.unwrap_or(&json!(null)), &expected, "{document}");
    }
}

#[test]
fn a_custom_bootstrap_is_passed_to_envoy() {
    let machine = machine(&[
        ("PROXY_CONFIG", "{customConfigFile: own/envoy.json}"),
        ("ISTIO_BOOTSTRAP", "not-looked-at.tmpl"),
    ]);
    let problem = &machine.load("sidecar").expect_err("missing")[0];
    assert_eq!(problem.subject, "customConfigFile of PROXY_CONFIG line 1");
    machine.file("own/envoy.json", "{}");
    let config = machine.config();
    assert!(config.has_custom_bootstrap);
    let envoy = config.envoy.expect("Envoy");
    assert_eq!(envoy.command.bootstrap, Path::new("own/envoy.json"));
}

#[test]
fn a_container_with_a_standby_has_its_own_sockets() {
    for (container, suffix) in [("", ""), ("istio-standby", "-istio-standby")] {
        let bootstrap = machine(&[("ISTIO_AGENT_STANDBY", container)]).config().bootstrap;
        for (socket, name) in [
            (&bootstrap.xds_socket, "XDS"),
            (&bootstrap.sds_socket, "socket"),
            (&bootstrap.files_socket, "files-socket"),
        ] {
            assert!(socket.ends_with(format!("{name}{suffix}")), "{socket:?}");
        }
    }
}

#[test]
fn istios_own_template_is_recognised_and_no_other() {
    let path = "var/lib/istio/envoy/envoy_bootstrap_tmpl.json";
    for prefix in ["", "./", "/"] {
        let config = machine(&[]).load(&format!("sidecar --templateFile {prefix}{path}"));
        assert!(!config.expect("good").has_custom_bootstrap);
    }
    for template in ["../var/lib/istio/envoy/envoy_bootstrap_tmpl.json", "x"] {
        let config = machine(&[]).load(&format!("sidecar --templateFile {template}"));
        assert_eq!(config.expect_err("refused").len(), 1, "{template}");
    }
}

#[test]
fn metadata_of_the_wrong_type_is_a_problem() {
    let machine = machine(&[
        ("ISTIO_META_DNS_CAPTURE", "yes"),
        ("ISTIO_METAJSON_X", r#"{"NETWORK": 7}"#),
        ("ENVOY_SECURE_METRICS_PORT", "70000"),
        ("ISTIO_META_LOAD_STATS_CONFIG_JSON", "no"),
        ("PROXY_CONFIG", "envoyMetricsServiceAddress: nowhere"),
    ]);
    let subjects = machine.subjects();
    for subject in [
        "ISTIO_META_DNS_CAPTURE",
        "NETWORK of ISTIO_METAJSON_*",
        "ENVOY_SECURE_METRICS_PORT",
        "ISTIO_META_LOAD_STATS_CONFIG_JSON",
    ] {
        assert!(subjects.iter().any(|s| s == subject), "{subject} in {subjects:?}");
    }
    assert_eq!(subjects.len(), 5, "{subjects:?}");
}

#[test]
fn a_cluster_is_named_after_the_first_known_name() {
    let labels =
        r#"{"app": "a", "app.kubernetes.io/name": "n", "service.istio.io/canonical-name": "c"}"#;
    let only = "tracingServiceName: CANONICAL_NAME_ONLY";
    let both = "tracingServiceName: CANONICAL_NAME_AND_NAMESPACE";
    for (labels, workload, proxy_config, expected) in [
        (labels, "w", "", "a.shop"),
        ("{}", "w", "", "w.shop"),
        ("{}", "", "", "istio-proxy.shop"),
        (labels, "w", "serviceCluster: mine", "mine"),
        (labels, "w", only, "c"),
        (labels, "w", both, "c.shop"),
        ("{}", "w", both, "w.shop"),
        ("{}", "", both, "istio-proxy.shop"),
        ("{}", "", only, "istio-proxy.shop"),
        (r#"{"app": ""}"#, "w", "", ".shop"),
        (r#"{"app": "", "app.kubernetes.io/name": "n"}"#, "w", "", ".shop"),
        (r#"{"app.kubernetes.io/name": ""}"#, "w", "", ".shop"),
        (r#"{"service.istio.io/canonical-name": ""}"#, "", "", ".shop"),
        (r#"{"service.istio.io/canonical-name": "", "app": "a"}"#, "w", both, ".shop"),
        (r#"{"service.istio.io/canonical-name": "", "app": "a"}"#, "w", only, "a.shop"),
    ] {
        let config = machine(&[
            ("ISTIO_METAJSON_LABELS", labels),
            ("ISTIO_META_WORKLOAD_NAME", workload),
            ("PROXY_CONFIG", proxy_config),
        ])
        .config();
        let found = config.bootstrap.node.cluster;
        assert_eq!(found, expected, "{labels} {workload} {proxy_config}");
    }
}

#[test]
fn the_override_of_the_bootstrap_is_read_or_left_out() {
    let variables = [("ISTIO_BOOTSTRAP_OVERRIDE", "over.yaml"), ("HOST_IP", "fd00::1")];
    let machine = machine(&variables);
    machine.file("over.yaml", "admin: {profile_path: '$(HOST_IP):1'}\n");
    let command = machine.config().envoy.expect("Envoy").command;
    let expected = r#"{"admin":{"profile_path":"[fd00::1]:1"}}"#;
    assert_eq!(command.override_json.as_deref(), Some(expected));
    machine.file("over.yaml", "- 1\n");
    let config = machine.config();
    assert_eq!(config.envoy.expect("Envoy").command.override_json, None);
    let warning = &config.warnings[0];
    assert_eq!(warning.code, Code::BootstrapOverrideUnreadable);
    assert_eq!(warning.subject, "over.yaml (ISTIO_BOOTSTRAP_OVERRIDE)");
}

#[test]
fn a_null_list_of_buckets_is_left_out_and_others_are_taken() {
    let machine = machine(&[]);
    let buckets = r#"{\"a\": null, \"b\": [1, null, 2.5]}"#;
    let line = format!("sidecar.istio.io/statsHistogramBuckets=\"{buckets}\"\n");
    machine.file("etc/istio/pod/annotations", &line);
    let config = machine.config();
    assert_eq!(config.warnings, []);
    let buckets = serde_json::json!(config.bootstrap.stats.buckets);
    assert_eq!(buckets, serde_json::json!({"b": [1, 2.5]}));
}

#[test]
fn an_invalid_statistics_annotation_is_left_out() {
    for (annotation, value, good) in [
        ("statsFlushInterval", "10s", true),
        ("statsFlushInterval", "5m", false),
        ("statsFlushInterval", "-1s", false),
        ("statsEvictionInterval", "10s", true),
        ("statsEvictionInterval", "11s", false),
        ("statsHistogramBuckets", "[1]", false),
    ] {
        let machine = machine(&[]);
        let line = format!("sidecar.istio.io/{annotation}={value:?}\n");
        machine.file("etc/istio/pod/annotations", &line);
        let config = machine.config();
        assert_eq!(config.warnings.is_empty(), good, "{annotation}={value}");
        let stats = config.bootstrap.stats;
        let taken = stats.flush.or(stats.eviction).is_some();
        assert_eq!(taken, good, "{annotation}={value}");
    }
}

#[test]
fn clusters_on_demand_need_a_sidecar_with_delta_xds_and_an_envoy() {
    let (name, delta) = ("ISTIO_AGENT_ON_DEMAND_CLUSTERS", "ISTIO_DELTA_XDS");
    let keep = "ISTIO_AGENT_KEEP_CONFIG";
    for (flags, more, is_on, obstacle) in [
        ("sidecar", ("", ""), true, ""),
        ("sidecar", (delta, "true"), true, ""),
        ("sidecar", (delta, "false"), false, "ISTIO_DELTA_XDS=false"),
        ("sidecar", ("DISABLE_ENVOY", "true"), false, "DISABLE_ENVOY=true"),
        ("router", ("", ""), false, "is a router"),
        ("waypoint", ("", ""), false, "is a waypoint"),
    ] {
        for directory in ["", "./data"] {
            let config = machine(&[(name, "true"), (keep, directory), more]).load(flags);
            let config = config.expect("good");
            let ledger = config.last_known_good;
            assert_eq!(ledger.is_some(), is_on || !directory.is_empty(), "{flags} {more:?}");
            assert_eq!(ledger.is_some_and(|it| it.on_demand), is_on, "{flags} {more:?}");
            let mut warnings = config.warnings.iter().filter(|it| it.subject == name);
            let found = warnings.next().map_or("", |it| &*it.found);
            assert!(found.contains(obstacle), "{found}");
            assert_eq!(found.is_empty(), is_on);
        }
    }
    let config = machine(&[(keep, "")]).load("router").expect("good");
    assert!(config.last_known_good.is_none() && config.warnings.is_empty());
}
