use serde_json::json;

use super::*;

/// Returns a pod with these arguments of `proxy`, variables and annotations.
fn pod(arguments: &[&str], variables: Value, annotations: Value) -> Value {
    let mut args = vec!["proxy", "sidecar", "--domain", "$(POD_NAMESPACE).svc"];
    args.extend(arguments);
    let mut env = vec![
        json!({"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}),
        json!({"name": "ISTIO_CPU_LIMIT", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}),
    ];
    let variables = variables.as_object().cloned().unwrap_or_default();
    env.extend(variables.into_iter().map(|(name, value)| json!({"name": name, "value": value})));
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "cart", "namespace": "shop", "annotations": annotations},
        "spec": {"containers": [
            {"name": "cart", "args": ["proxy"]},
            {"name": "istio-proxy", "args": args, "env": env},
        ]},
    })
}

fn init(arguments: &[&str], variables: Value) -> Value {
    let mut pod = pod(&[], variables.clone(), json!({}));
    let env = pod["spec"]["containers"][1]["env"].take();
    let args: Vec<_> = ["istio-iptables"].iter().chain(arguments).collect();
    pod["spec"]["initContainers"] = json!([{"name": "istio-init", "args": args, "env": env}]);
    pod["spec"]["containers"] = json!([{"name": "cart"}]);
    pod
}

/// Returns level, name and row of each finding for a pod, sorted by level.
fn found(pod: &Value) -> Vec<(Level, String, &'static str)> {
    let report = report(&pod.to_string()).expect("a pod");
    let found = report.findings.into_iter().map(|finding| finding.found);
    let found = found.map(|found| (found.check.level, found.check.name, found.row));
    found.collect()
}

#[test]
fn differences_are_ok_or_warnings_and_rejected_settings_are_errors() {
    for (variables, level) in [
        (json!({"PROV_CERT": "/certs"}), Level::Ok),
        (json!({"ISTIO_META_DNS_CAPTURE": "true"}), Level::Warning),
        (json!({"ISTIO_BOOTSTRAP": "/own"}), Level::Error),
    ] {
        let pod = pod(&[], variables, json!({}));
        assert_eq!(report(&pod.to_string()).expect("a pod").level, level);
    }
}

#[test]
fn each_kind_of_finding_has_one_row() {
    for kind in [
        Selector::Problem(Code::SettingInvalid),
        Selector::Problem(Code::CaptureOptionInvalid),
        Selector::ProbeWithoutTimeout,
        Selector::Problem(Code::MemberRepeated),
        Selector::UnknownFlag,
        Selector::Problem(Code::MemberUnknown),
        Selector::VariableWithoutEffect,
    ] {
        let rows = TABLE.iter().filter(|row| row.selectors.contains(&kind));
        assert_eq!(rows.count(), 1, "{kind:?}");
    }
}

/// Fails if a setting was renamed, because the old name would not select its row any more.
#[test]
fn each_setting_of_the_table_exists_and_selects_its_row() {
    let members = [
        "terminationDrainDuration: 9s\nenvoyMetricsServiceAddress: a:1\ntracing: {stackdriver: {}}\n\
         readinessProbe: {httpGet: {port: 1, scheme: HTTPS}}",
        "tracing: {lightstep: {address: 'a:1', accessToken: t}}\nreadinessProbe: {tcpSocket: {port: 1}}",
        "readinessProbe: {grpc: {port: 1}}",
    ];
    // Two known variables that are not rows of the environment: one of a family, and one of
    // istio-iptables.
    let others = ["ISTIO_META_DELTA_NDS", "ISTIO_OUTBOUND_OWNER_GROUPS"];
    for row in TABLE {
        for selector in row.selectors {
            let Selector::Set(names) = selector else {
                continue;
            };
            let flags: Vec<_> = names.split(' ').map(|name| format!("{name}=1")).collect();
            let flags: Vec<_> = flags.iter().map(String::as_str).collect();
            let pods = match names.split_at(2) {
                ("--", name) if name.contains("log") => vec![pod(&flags, json!({}), json!({}))],
                ("--", _) => vec![init(&flags, json!({}))],
                _ if names.contains('/') => vec![pod(&[], json!({}), json!({*names: "1"}))],
                _ if names.starts_with(char::is_uppercase) => {
                    let mut rows = environment::rows();
                    let (name, value) = names.split_once('=').unwrap_or((names, "1"));
                    let is_known = rows.any(|row| row.name == name) || others.contains(&name);
                    assert!(is_known, "{names}");
                    vec![pod(&[], json!({name: value, "ISTIO_NATIVE_SIDECAR": "true"}), json!({}))]
                }
                _ => members.map(|text| pod(&[], json!({"PROXY_CONFIG": text}), json!({}))).into(),
            };
            let mut found = pods.iter().flat_map(found);
            let expected =
                |(_, settings, id): (_, String, _)| id == row.id && settings.contains(names);
            assert!(found.any(expected), "{names}");
        }
    }
}

#[test]
fn no_path_that_a_manifest_names_is_opened() {
    use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("named");
    std::fs::write(&path, "defaultConfig: {drainDuration: x}\nnameserver 10.0.0.1\n")
        .expect("written");
    let watch = inotify::init(CreateFlags::NONBLOCK).expect("inotify");
    inotify::add_watch(&watch, &path, WatchFlags::OPEN).expect("watched");
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    let mut is_opened = || {
        let mut events = inotify::Reader::new(&watch, &mut buffer);
        events.next().is_ok()
    };
    let named = path.to_str().expect("a path");
    let names = environment::rows().map(|row| (row.name.to_owned(), named.into()));
    let all: Map<_, _> = names.collect();
    let mut found = Vec::new();
    for more in [
        json!({}),
        json!({"PROXY_CONFIG": format!("customConfigFile: {named}\nconfigPath: {named}\nbinaryPath: {named}"),
            "DNS_PROXY_ADDR": "127.0.0.1:53", "ISTIO_META_DNS_CAPTURE": "true", "PILOT_CERT_PROVIDER": "istiod"}),
    ] {
        let mut variables = all.clone();
        variables.extend(more.as_object().expect("an object").clone());
        let annotations = json!({"proxy.istio.io/config": format!("customConfigFile: {named}")});
        let flags = [&*format!("--meshConfig={named}"), &format!("--templateFile={named}")];
        let pod = pod(&flags, variables.into(), annotations);
        found.extend(self::found(&pod));
        assert!(!is_opened(), "{more}");
    }
    // The content of the file is not in the report either.
    assert!(found.iter().all(|(_, name, _)| !name.contains("drainDuration")), "{found:?}");
    std::fs::read(&path).expect("read");
    assert!(is_opened(), "the watch sees what is opened");
}

#[test]
fn control_characters_of_a_manifest_are_escaped() {
    let mut pod =
        pod(&["--frob\u{1b}[2J=1"], json!({"ISTIO_BOOTSTRAP": "/own\u{9b}1m\n  x"}), json!({}));
    pod["metadata"]["name"] = "cart\u{1b}]0;x\u{7}\nPod shop/other".into();
    pod["spec"]["containers"][1]["name"] = "istio-proxy".into();
    let text = report(&pod.to_string()).expect("a pod").to_string();
    assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
    let owner = "pod: Pod shop/cart\\u001b]0;x\\u0007\\nPod shop/other (1)\n";
    assert!(text.contains(owner), "{text}");
    assert!(!text.contains("\n  x"), "{text}");
}

#[test]
fn a_member_of_a_pod_that_is_null_is_absent() {
    let variables = json!({"ISTIO_BOOTSTRAP": "/own"});
    let mut pod = pod(&[], variables, json!({"a": null, "proxy.istio.io/config": "frob: 1"}));
    let before = found(&pod);
    assert_eq!(before.len(), 2, "{before:?}");
    let containers = pod["spec"]["containers"].as_array_mut().expect("containers");
    containers.push(Value::Null);
    for container in containers.iter_mut().filter(|it| it.is_object()) {
        container["command"] = Value::Null;
        container["envFrom"] = Value::Null;
        if let Some(words) = container["args"].as_array_mut() {
            words.push(Value::Null);
        }
    }
    pod["spec"]["initContainers"] = Value::Null;
    assert_eq!(found(&pod), before);
}

#[test]
fn each_kind_of_difference_of_a_proxy_is_found() {
    use Level::{Error, Ok, Warning};
    let config = |text: &str| json!({"PROXY_CONFIG": text});
    let none = || json!({});
    for (arguments, variables, annotations, level, name, row) in [
        (&["--frob=1"][..], none(), none(), Warning, "flag", "UNKNOWN_FLAG"),
        (&["--concurrency=x"], none(), none(), Error, "command line", "CONFIGURATION_ERROR"),
        (
            &["--templateFile=/own"],
            none(),
            none(),
            Error,
            "proxyBootstrapTemplatePath of --templateFile",
            "BOOTSTRAP_TEMPLATE",
        ),
        (
            &["--log_stacktrace_level=default:error"],
            none(),
            none(),
            Ok,
            "--log_stacktrace_level",
            "FLAG_WITHOUT_EFFECT",
        ),
        (&["--log_rotate=/log"], none(), none(), Ok, "--log_rotate", "FLAG_WITHOUT_EFFECT"),
        (
            &[],
            json!({"ISTIO_BOOTSTRAP": "/own"}),
            none(),
            Error,
            "ISTIO_BOOTSTRAP",
            "BOOTSTRAP_TEMPLATE",
        ),
        (
            &[],
            json!({"ISTIO_ENVOY_ADMIN_TRANSPORT": "UDS", "ISTIO_NATIVE_SIDECAR": "true"}),
            none(),
            Warning,
            "ISTIO_ENVOY_ADMIN_TRANSPORT=UDS",
            "ADMIN_SOCKET",
        ),
        (
            &[],
            json!({"ISTIO_ENVOY_ADMIN_TRANSPORT": "UDS"}),
            none(),
            Error,
            "ISTIO_ENVOY_ADMIN_TRANSPORT",
            "ADMIN_SOCKET",
        ),
        (
            &[],
            json!({"PROXY_READINESS_PROBE_TIMEOUT": "5s"}),
            none(),
            Ok,
            "PROXY_READINESS_PROBE_TIMEOUT",
            "READINESS_TIMEOUT",
        ),
        (&[], json!({"OUTPUT_CERTS": "/certs"}), none(), Ok, "OUTPUT_CERTS", "OUTPUT_CERTS"),
        (&[], json!({"PROV_CERT": "/certs"}), none(), Ok, "PROV_CERT", "EXPIRED_TOKEN"),
        (&[], json!({"GOMEMLIMIT": "1"}), none(), Ok, "GOMEMLIMIT", "VARIABLE_WITHOUT_EFFECT"),
        (&[], json!({"CA_PROVIDER": "Other"}), none(), Error, "CA_PROVIDER", "CONFIGURATION_ERROR"),
        (
            &[],
            json!({"ISTIO_META_LOAD_STATS_CONFIG_JSON": "{"}),
            none(),
            Error,
            "ISTIO_META_LOAD_STATS_CONFIG_JSON",
            "LOAD_STATISTICS",
        ),
        (
            &[],
            json!({"WORKLOAD_RSA_KEY_SIZE": "1024"}),
            none(),
            Error,
            "WORKLOAD_RSA_KEY_SIZE",
            "WORKLOAD_KEY",
        ),
        (
            &[],
            json!({"ISTIO_DELTA_XDS": "maybe"}),
            none(),
            Warning,
            "ISTIO_DELTA_XDS",
            "CONFIGURATION_ERROR",
        ),
        (
            &[],
            json!({"ISTIO_KUBE_APP_PROBERS": r#"{"/app-health/a/livez": {"httpGet": {"port": 1}}}"#}),
            none(),
            Warning,
            "/app-health/a/livez",
            "PROBE_TIMEOUT",
        ),
        (
            &[],
            config("drainDurations: 1s"),
            none(),
            Warning,
            "PROXY_CONFIG line 1",
            "UNKNOWN_MEMBER",
        ),
        (
            &[],
            config("meshId: a\nmeshId: b"),
            none(),
            Warning,
            "PROXY_CONFIG line 2",
            "REPEATED_MEMBER",
        ),
        (
            &[],
            config("statusPort: x"),
            none(),
            Error,
            "statusPort of PROXY_CONFIG line 1",
            "CONFIGURATION_ERROR",
        ),
        (
            &[],
            config("terminationDrainDuration: 9s"),
            none(),
            Warning,
            "terminationDrainDuration",
            "IN_FLIGHT_REQUESTS",
        ),
        (
            &[],
            config("tracing: {stackdriver: {}}"),
            none(),
            Ok,
            "tracing.stackdriver",
            "STACKDRIVER",
        ),
        (
            &[],
            none(),
            json!({"proxy.istio.io/config": "frob: 1"}),
            Warning,
            "proxy.istio.io/config line 1",
            "UNKNOWN_MEMBER",
        ),
        (
            &[],
            none(),
            json!({"status.sidecar.istio.io/port": "x"}),
            Warning,
            "status.sidecar.istio.io/port",
            "STATUS_PORT_VALUE",
        ),
    ] {
        let pod = pod(arguments, variables, annotations);
        assert_eq!(found(&pod), [(level, name.to_owned(), row)], "{pod}");
    }
}

#[test]
fn a_bootstrap_override_is_no_difference() {
    let variable =
        json!({"ISTIO_BOOTSTRAP_OVERRIDE": "/etc/istio/custom-bootstrap/custom_bootstrap.json"});
    let annotation = json!({"sidecar.istio.io/bootstrapOverride": "own"});
    assert_eq!(found(&pod(&[], variable, annotation)), []);
}

#[test]
fn each_kind_of_difference_of_traffic_capture_is_found() {
    use Level::{Error, Ok, Warning};
    let none = || json!({});
    let options = "CAPTURE_OPTIONS";
    for (arguments, variables, level, name, row) in [
        (&["-b", "80,http"][..], none(), Error, "an item of --istio-inbound-ports", options),
        (&["-p", "99999"], none(), Error, "--envoy-port", options),
        (&[], json!({"INBOUND_CAPTURE_PORT": "x"}), Error, "--inbound-capture-port", options),
        (&["-m", "MAGIC"], none(), Warning, "--istio-inbound-interception-mode", "CAPTURE_MODE"),
        (&["--reconcile"], none(), Ok, "--reconcile", "CAPTURE_RECONCILE"),
        (&["--cni-mode"], none(), Ok, "--cni-mode", "CAPTURE_CNI_FLAGS"),
        (&["--cleanup-only"], none(), Warning, "--cleanup-only", "CAPTURE_CLEANUP"),
        (&["--frob"], none(), Error, "command line", "CONFIGURATION_ERROR"),
    ] {
        let pod = init(arguments, variables);
        assert_eq!(found(&pod), [(level, name.to_owned(), row)], "{pod}");
    }
}

#[test]
fn levels_do_not_depend_on_texts() {
    for row in TABLE {
        for text in ["", "another text"] {
            let edited = Difference { pilot_agent: text, this_agent: text, advice: text, ..*row };
            let mut findings = Findings { container: "istio-proxy", found: Vec::new() };
            findings.difference("setting", &edited);
            let found = &findings.found[0];
            assert_eq!((found.check.level, found.row), (row.level, row.id));
        }
        // A warning says what to do.
        assert_eq!(row.level == Level::Warning, !row.advice.is_empty(), "{}", row.id);
    }
}

#[test]
fn a_default_pod_has_no_differences_and_each_finding_names_its_row() {
    let mut pod = pod(&[], json!({"TRUST_DOMAIN": "td"}), json!({}));
    pod["spec"]["initContainers"] =
        init(&["-p", "15001"], json!({}))["spec"]["initContainers"].take();
    let usual = report(&pod.to_string()).expect("a pod");
    let counts = (usual.errors, usual.warnings, usual.neither);
    assert_eq!((usual.level, counts), (Level::Ok, (0, 0, 1)));
    let last = "pods with errors: 0, with warnings: 0, with neither: 1, without Istio: 0; [codes] are explained in docs/differences.md and docs/problems.md";
    assert_eq!(usual.to_string(), last);
    pod["spec"]["containers"][1]["env"] = json!([{"name": "PROV_CERT", "value": "/certs"}]);
    let mut other = report(&pod.to_string()).expect("a pod");
    let expected = "ok       PROV_CERT: pilot-agent sends an expired token; this agent does not send an expired token while the client certificate is in use [EXPIRED_TOKEN]\n         istio-proxy of 1 pod: Pod shop/cart (1)\n";
    assert!(other.to_string().starts_with(expected), "{other}");
    let json = serde_json::to_value(&other).expect("JSON");
    let finding = &json["findings"][0];
    assert_eq!(finding["row"], "EXPIRED_TOKEN");
    assert_eq!(finding["owners"], json!({"Pod shop/cart": 1}));
    assert_eq!((&finding["level"], &finding["container"]), (&json!("ok"), &json!("istio-proxy")));
    other.retain(Level::Warning);
    assert_eq!(other.to_string(), last);
}

#[test]
fn pods_of_an_owner_with_equal_settings_are_one_finding() {
    let template = pod(&[], json!({"PROV_CERT": "/certs"}), json!({}));
    let pods = (0..70).map(|at| {
        let mut pod = template.clone();
        let metadata = &mut pod["metadata"];
        metadata["name"] = json!(format!("web-{at}"));
        metadata["labels"] = json!({"pod-template-hash": "6d5c"});
        metadata["annotations"] = json!({"example.com/address": at});
        let owner = format!("web{}-6d5c", at / 10);
        metadata["ownerReferences"] =
            json!([{"kind": "ReplicaSet", "name": owner, "controller": true}]);
        pod
    });
    let list = json!({"items": Vec::from_iter(pods), "kind": "List"});
    let report = report(&list.to_string()).expect("pods");
    assert_eq!(report.findings.len(), 1);
    assert_eq!(report.findings[0].owners["Deployment shop/web3"], 10);
    let text = report.to_string();
    let owners = "\n         istio-proxy of 70 pods: Deployment shop/web0 (10), ";
    assert!(text.contains(owners), "{text}");
    assert!(text.contains("Deployment shop/web4 (10), 2 others\n"), "{text}");
}

#[test]
fn settings_that_were_not_compared_are_named() {
    let mut pod = pod(&[], json!({}), json!({}));
    let proxy = &mut pod["spec"]["containers"][1];
    proxy["env"][0] =
        json!({"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}});
    proxy["envFrom"] = json!([{"configMapRef": {"name": "a"}}]);
    let skipped = |name: &str| (Level::Skipped, name.to_owned(), "");
    assert_eq!(found(&pod), [skipped("TOKEN"), skipped("envFrom")]);
    let mut pod = self::pod(&[], json!({}), json!({}));
    pod["spec"]["containers"][1]["args"] = json!(["sh", "-c", "pilot-agent proxy"]);
    assert_eq!(found(&pod), [skipped("command line")]);
    pod["spec"]["containers"][1]["args"] = json!(["proxy", "ztunnel"]);
    assert_eq!(found(&pod), [skipped("command line")]);
    assert_eq!(report(&pod.to_string()).expect("a pod").level, Level::Ok);
}

#[test]
fn pods_are_found_in_lists_streams_and_templates() {
    let pod = pod(&[], json!({"PROV_CERT": "/certs"}), json!({}));
    let template = json!({"metadata": pod["metadata"], "spec": pod["spec"]});
    let mut bare = pod.clone();
    bare.as_object_mut().expect("an object").remove("kind");
    let mut native = json!({"kind": "Pod", "metadata": {"generateName": "native-"}, "spec": {
        "initContainers": [{"name": "istio-proxy", "restartPolicy": "Always", "command": ["/usr/local/bin/pilot-agent"], "args": ["proxy", "sidecar"]}],
        "containers": [{"name": "app"}],
    }});
    native["spec"]["initContainers"][0]["env"] = json!([{"name": "PROV_CERT", "value": "/certs"}]);
    let all = [
        pod,
        json!({"kind": "Deployment", "metadata": {"name": "web"}, "spec": {"template": template}}),
        json!({"kind": "PodList", "items": [bare]}),
        json!({"kind": "CronJob", "metadata": {"name": "night"}, "spec": {"jobTemplate": {"spec": {"template": template}}}}),
        json!({"kind": "Service", "metadata": {"name": "cart"}}),
        native,
        json!({"kind": "Deployment", "metadata": {"name": "bare"}, "spec": {"template": {"spec": {"containers": [{"name": "app"}]}}}}),
        json!({"kind": "Pod", "metadata": {"name": "plain"}, "spec": {"containers": [{"name": "app"}]}}),
    ];
    let expected =
        [("CronJob night", 1), ("Deployment web", 1), ("Pod native-", 1), ("Pod shop/cart", 2)];
    let json = json!({"kind": "List", "items": all}).to_string();
    // A stream of YAML documents: each JSON object is valid YAML.
    let yaml = all.iter().map(|object| format!("---\n{object:#}\n"));
    for text in [json, yaml.collect::<String>() + "---\n"] {
        let report = report(&text).expect("pods");
        let owners = &report.findings[0].owners;
        let owners: Vec<_> = owners.iter().map(|(owner, count)| (owner.as_str(), *count)).collect();
        assert_eq!(owners, expected);
        assert_eq!((report.without_istio, report.not_injected), (1, 1));
        assert!(report.to_string().contains("not compared: 1 pod templates without a sidecar"));
    }
}

#[test]
fn a_text_without_pods_is_an_error() {
    for (text, expected) in [
        ("a: [", "neither YAML nor JSON: "),
        ("{\"kind\": ", "neither YAML nor JSON: "),
        ("", "no pod and no template of pods in the text"),
        ("words", "neither YAML nor JSON: "),
        ("- 1", "neither YAML nor JSON: "),
        ("kind: Service\n---\nkind: ConfigMap", "no pod and no template of pods in the text"),
        ("kind: List\nitems: [1]", "neither YAML nor JSON: "),
        ("kind: Pod\nmetadata: {name: a}", "no pod and no template of pods in the text"),
    ] {
        let error = report(text).expect_err(text).to_string();
        assert!(error.starts_with(expected), "{text}: {error}");
    }
}

#[test]
fn pods_that_cannot_get_clusters_on_demand_are_named() {
    let on = "ISTIO_AGENT_ON_DEMAND_CLUSTERS";
    for (kind, image, delta, reason) in [
        ("sidecar", "", "true", None),
        ("sidecar", "docker.io/istio/proxyv2:1.31.0", "true", None),
        ("sidecar", "hub:5000/proxyv2:1.31-alpha@sha256:0", "true", None),
        ("sidecar", "hub/own:1.20.0", "true", None),
        ("sidecar", "docker.io/istio/proxyv2:1.30.2-distroless", "true", Some("has Istio 1.30")),
        ("router", "docker.io/istio/proxyv2:1.30.2", "true", Some("a router")),
        ("sidecar", "", "false", Some("ISTIO_DELTA_XDS=false")),
    ] {
        for is_on in ["true", "false"] {
            let mut pod = pod(&[], json!({on: is_on, "ISTIO_DELTA_XDS": delta}), json!({}));
            let proxy = &mut pod["spec"]["containers"][1];
            (proxy["args"][1], proxy["image"]) = (json!(kind), json!(image));
            let report = report(&pod.to_string()).expect("a pod");
            let found = report.findings.iter().map(|it| &it.found.check);
            let found: Vec<_> = found.filter(|it| it.code == "ON_DEMAND_OFF").collect();
            let reason = reason.filter(|_| is_on == "true");
            assert_eq!(found.len(), usize::from(reason.is_some()), "{kind} {image} {delta}");
            let is_named = |it: &&Check| it.found.contains(reason.unwrap_or_default());
            assert!(found.iter().all(is_named), "{found:?}");
        }
    }
}
