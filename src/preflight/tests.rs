use std::collections::BTreeSet;

use serde_json::json;

use super::*;

/// A pod with these arguments of `proxy`, variables and annotations.
fn pod(arguments: &[&str], variables: Value, annotations: Value) -> Value {
    let mut args = vec!["proxy", "sidecar", "--domain", "$(POD_NAMESPACE).svc"];
    args.extend(arguments);
    let mut env = vec![
        json!({"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}),
        json!({"name": "ISTIO_CPU_LIMIT", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}),
    ];
    let variables = variables.as_object().cloned().unwrap_or_default();
    env.extend(
        variables
            .into_iter()
            .map(|(name, value)| json!({"name": name, "value": value})),
    );
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

fn found(pod: &Value) -> Vec<(Level, String, &'static str)> {
    let report = report(&pod.to_string()).expect("a pod");
    let differences = report.pods.into_iter().flat_map(|pod| pod.differences);
    let found = differences.map(|found| (found.check.level, found.check.name, found.row));
    // That of all pods is tested once.
    found
        .filter(|(_, name, _)| name != "WORKLOAD_RSA_KEY_SIZE (not set)")
        .collect()
}

#[test]
fn every_reference_exists_in_the_page() {
    let problems = rows::PROBLEMS.iter().map(|(_, row)| *row);
    let settings = rows::SETTINGS.iter().map(|(_, row)| *row);
    let others = [
        rows::CONFIGURATION,
        rows::NODE_TYPE,
        rows::PROBE_TIMEOUT,
        rows::THREADS,
        rows::UNKNOWN_FLAG,
        rows::WITHOUT_EFFECT,
    ];
    for name in problems.chain(settings).chain(others) {
        let row = rows::row(name).unwrap_or_else(|| panic!("{name:?} is no row"));
        assert!(!row.here.is_empty(), "{name}");
    }
    let row = rows::row("key of the workload").expect("it");
    assert_eq!(row.pilot_agent, "RSA 2048");
    assert!(row.surprise.starts_with("peers that verify RSA"), "{row:?}");
}

#[test]
fn a_row_of_the_page_has_five_cells() {
    let rows = rows::PAGE.lines().filter(|line| line.starts_with("| "));
    let wrong: Vec<_> = rows.filter(|row| row.matches('|').count() != 6).collect();
    assert_eq!(wrong, [""; 0]);
}

#[test]
fn each_kind_of_difference_of_a_proxy_is_found() {
    use Level::{Error, Ok, Warning};
    let config = |text: &str| json!({"PROXY_CONFIG": text});
    let none = || json!({});
    for (arguments, variables, annotations, level, name, row) in [
        (
            &["--frob=1"][..],
            none(),
            none(),
            Warning,
            "flag",
            rows::UNKNOWN_FLAG,
        ),
        (
            &["--concurrency=x"],
            none(),
            none(),
            Error,
            "command line",
            rows::CONFIGURATION,
        ),
        (
            &["--templateFile=/own"],
            none(),
            none(),
            Error,
            "proxyBootstrapTemplatePath of --templateFile",
            "own bootstrap template",
        ),
        (
            &["--log_stacktrace_level=default:error"],
            none(),
            none(),
            Ok,
            "--log_stacktrace_level",
            rows::WITHOUT_EFFECT,
        ),
        (
            &["--log_rotate=/log"],
            none(),
            none(),
            Ok,
            "--log_rotate",
            rows::WITHOUT_EFFECT,
        ),
        (
            &[],
            json!({"ISTIO_BOOTSTRAP": "/own"}),
            none(),
            Error,
            "ISTIO_BOOTSTRAP",
            "own bootstrap template",
        ),
        (
            &[],
            json!({"OUTPUT_CERTS": "/certs"}),
            none(),
            Warning,
            "OUTPUT_CERTS",
            "`OUTPUT_CERTS`",
        ),
        (
            &[],
            json!({"PROV_CERT": "/certs"}),
            none(),
            Ok,
            "PROV_CERT",
            "expired token",
        ),
        (
            &[],
            json!({"GOMEMLIMIT": "1"}),
            none(),
            Ok,
            "GOMEMLIMIT",
            rows::WITHOUT_EFFECT,
        ),
        (
            &[],
            json!({"CA_PROVIDER": "Other"}),
            none(),
            Error,
            "CA_PROVIDER",
            rows::CONFIGURATION,
        ),
        (
            &[],
            json!({"WORKLOAD_RSA_KEY_SIZE": "1024"}),
            none(),
            Error,
            "WORKLOAD_RSA_KEY_SIZE",
            "key of the workload",
        ),
        (
            &[],
            json!({"ISTIO_DELTA_XDS": "maybe"}),
            none(),
            Warning,
            "ISTIO_DELTA_XDS",
            rows::CONFIGURATION,
        ),
        (
            &[],
            json!({"ISTIO_KUBE_APP_PROBERS": r#"{"/app-health/a/livez": {"httpGet": {"port": 1}}}"#}),
            none(),
            Warning,
            "/app-health/a/livez",
            rows::PROBE_TIMEOUT,
        ),
        (
            &[],
            config("drainDurations: 1s"),
            none(),
            Warning,
            "PROXY_CONFIG line 1",
            "unknown members of ProxyConfig",
        ),
        (
            &[],
            config("meshId: a\nmeshId: b"),
            none(),
            Warning,
            "PROXY_CONFIG line 2",
            "repeated members of ProxyConfig",
        ),
        (
            &[],
            config("statusPort: x"),
            none(),
            Error,
            "statusPort of PROXY_CONFIG line 1",
            rows::CONFIGURATION,
        ),
        (
            &[],
            config("terminationDrainDuration: 9s"),
            none(),
            Warning,
            "terminationDrainDuration",
            "requests longer than the drain",
        ),
        (
            &[],
            config("tracing: {stackdriver: {}}"),
            none(),
            Ok,
            "tracing.stackdriver",
            "`stackdriver` tracing outside Google Cloud",
        ),
        (
            &[],
            none(),
            json!({"proxy.istio.io/config": "frob: 1"}),
            Warning,
            "proxy.istio.io/config line 1",
            "unknown members of ProxyConfig",
        ),
        (
            &[],
            none(),
            json!({"status.sidecar.istio.io/port": "x"}),
            Warning,
            "status.sidecar.istio.io/port",
            "a bad `status.sidecar.istio.io/port`",
        ),
        (
            &[],
            none(),
            json!({"sidecar.istio.io/bootstrapOverride": "own"}),
            Warning,
            "sidecar.istio.io/bootstrapOverride",
            "own bootstrap template",
        ),
    ] {
        let pod = pod(arguments, variables, annotations);
        assert_eq!(found(&pod), [(level, name.to_owned(), row)], "{pod}");
    }
}

#[test]
fn each_kind_of_difference_of_traffic_capture_is_found() {
    use Level::{Error, Ok, Warning};
    let none = || json!({});
    let options = "ports, users, groups, interfaces, marks";
    for (arguments, variables, level, name, row) in [
        (
            &["-b", "80,http"][..],
            none(),
            Error,
            "an item of --istio-inbound-ports",
            options,
        ),
        (&["-p", "99999"], none(), Error, "--envoy-port", options),
        (
            &[],
            json!({"INBOUND_CAPTURE_PORT": "x"}),
            Error,
            "--inbound-capture-port",
            options,
        ),
        (
            &["-m", "MAGIC"],
            none(),
            Warning,
            "--istio-inbound-interception-mode",
            "an unknown interception mode",
        ),
        (
            &["--reconcile"],
            none(),
            Ok,
            "--reconcile",
            "rules that differ from what is wanted",
        ),
        (
            &["--cni-mode"],
            none(),
            Ok,
            "--cni-mode",
            "`--cni-mode`, `--network-namespace`",
        ),
        (
            &["--cleanup-only"],
            none(),
            Warning,
            "--cleanup-only",
            "`istio-iptables --cleanup-only`",
        ),
        (
            &["--frob"],
            none(),
            Error,
            "command line",
            rows::CONFIGURATION,
        ),
    ] {
        let pod = init(arguments, variables);
        assert_eq!(found(&pod), [(level, name.to_owned(), row)], "{pod}");
    }
}

#[test]
fn a_usual_pod_differs_by_its_key_alone() {
    let mut pod = pod(&[], json!({"TRUST_DOMAIN": "td"}), json!({}));
    pod["spec"]["initContainers"] =
        init(&["-p", "15001"], json!({}))["spec"]["initContainers"].take();
    let report = report(&pod.to_string()).expect("a pod");
    assert_eq!((report.level, report.others), (Level::Ok, 0));
    let expected = "Pod shop/cart\n  istio-proxy: ok       WORKLOAD_RSA_KEY_SIZE (not set): pilot-agent: RSA 2048; here: ECDSA";
    assert!(report.to_string().starts_with(expected), "{report}");
    let last = "pods with errors: 0, with warnings: 0, with neither: 1, without Istio: 0; [rows] are those of docs/differences.md";
    assert_eq!(report.to_string().lines().last(), Some(last));
    let json = serde_json::to_value(&report).expect("JSON");
    let difference = &json["pods"][0]["differences"][0];
    assert_eq!(json["pods"][0]["name"], "Pod shop/cart");
    assert_eq!(difference["row"], "key of the workload");
    assert_eq!(
        (&difference["level"], &difference["container"]),
        (&json!("ok"), &json!("istio-proxy"))
    );
}

#[test]
fn a_pod_that_says_nothing_of_threads_differs_if_its_cpus_are_limited() {
    let mut pod = pod(&[], json!({}), json!({}));
    let proxy = &mut pod["spec"]["containers"][1];
    proxy["env"] = json!([]);
    proxy["resources"] = json!({"limits": {"cpu": "500m"}});
    let expected = (
        Level::Warning,
        "concurrency (not set)".to_owned(),
        rows::THREADS,
    );
    assert_eq!(found(&pod), [expected]);
    pod["spec"]["containers"][1]["env"] = json!([{"name": "DISABLE_ENVOY", "value": "true"}]);
    assert_eq!(found(&pod), []);
    pod["spec"]["containers"][1]["env"] = json!([]);
    pod["spec"]["containers"][1]["resources"] = json!({});
    assert_eq!(found(&pod), []);
}

#[test]
fn what_was_not_compared_is_named() {
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
    let ztunnel = (Level::Skipped, "command line".to_owned(), rows::NODE_TYPE);
    assert_eq!(found(&pod), [ztunnel]);
    assert_eq!(report(&pod.to_string()).expect("a pod").level, Level::Ok);
}

#[test]
fn pods_are_found_in_lists_streams_and_templates() {
    let pod = pod(&[], json!({}), json!({}));
    let template = json!({"metadata": pod["metadata"], "spec": pod["spec"]});
    let deployment =
        json!({"kind": "Deployment", "metadata": {"name": "web"}, "spec": {"template": template}});
    let job = json!({"kind": "CronJob", "metadata": {"name": "night"}, "spec": {"jobTemplate": {"spec": {"template": template}}}});
    let service = json!({"kind": "Service", "metadata": {"name": "cart"}});
    let list = json!({"kind": "List", "items": [pod, deployment]});
    let mut bare = pod.clone();
    bare.as_object_mut().expect("an object").remove("kind");
    let pods = json!({"kind": "PodList", "items": [bare]});
    let native = json!({"kind": "Pod", "metadata": {"generateName": "native-"}, "spec": {
        "initContainers": [{"name": "istio-proxy", "restartPolicy": "Always", "command": ["/usr/local/bin/pilot-agent"], "args": ["proxy", "sidecar"]}],
        "containers": [{"name": "app"}],
    }});
    let plain = json!({"kind": "Pod", "metadata": {"name": "plain"}, "spec": {"containers": [{"name": "app"}]}});
    let all = [list, pods, job, service, native, plain];
    let expected = [
        "Pod shop/cart",
        "Deployment web",
        "Pod shop/cart",
        "CronJob night",
        "Pod native-",
    ];
    let json: String = all.iter().map(ToString::to_string).collect();
    // JSON is YAML.
    let yaml: String = all
        .iter()
        .map(|object| format!("---\n{object:#}\n"))
        .collect();
    for text in [json, yaml + "---\n"] {
        let report = report(&text).expect("pods");
        let names: Vec<_> = report.pods.iter().map(|pod| pod.name.as_str()).collect();
        assert_eq!((names.as_slice(), report.others), (&expected[..], 1));
    }
}

#[test]
fn a_text_without_pods_is_an_error_that_says_what_it_is() {
    for (text, expected) in [
        ("", "no pod and no template of pods, only: nothing"),
        ("a: [", "neither YAML nor JSON: "),
        ("{\"kind\": ", "neither YAML nor JSON: "),
        (
            "words",
            "document 1: expected a Kubernetes object, with its kind",
        ),
        (
            "- 1",
            "document 1: expected a Kubernetes object, with its kind",
        ),
        (
            "a: 1",
            "document 1: expected a Kubernetes object, with its kind",
        ),
        (
            "kind: Service\n---\nkind: ConfigMap",
            "no pod and no template of pods, only: ConfigMap, Service",
        ),
        (
            "kind: List\nitems: []",
            "no pod and no template of pods, only: an empty list",
        ),
        (
            "kind: List\nitems: [1]",
            "document 1 item 1: expected a Kubernetes object, with its kind",
        ),
        (
            "kind: Pod\nmetadata: {name: a}",
            "document 1, Pod a: expected a list spec.containers",
        ),
    ] {
        let error = report(text).expect_err(text).to_string();
        assert!(error.starts_with(expected), "{text}: {error}");
    }
}

#[test]
fn names_of_the_table_are_those_of_variables_flags_and_members() {
    let variables: BTreeSet<_> = environment::rows().map(|row| row.name).collect();
    let is_variable = |name: &&str| {
        name.chars()
            .all(|c| c.is_ascii_uppercase() || "_0123456789".contains(c))
    };
    let names = rows::SETTINGS.iter().map(|(name, _)| *name);
    for name in names.filter(is_variable) {
        assert!(variables.contains(name), "{name}");
    }
}
