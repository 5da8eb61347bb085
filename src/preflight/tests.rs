use serde_json::json;

use super::*;

const FLAGS: &str = "`--log_stacktrace_level`, `--vklog`, `UNSAFE_PILOT_ENABLE_RUNTIME_ASSERTIONS`, of older releases `--log_rotate`, `--log_rotate_max_age`, `--log_rotate_max_backups`, `--log_rotate_max_size`";
const TEMPLATE: &str = "own bootstrap template";

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
    found.collect()
}

#[test]
fn rows_of_the_page_are_found_by_their_first_cells() {
    let lines = PAGE.lines().filter(|line| line.starts_with("| "));
    assert_eq!(lines.count(), rows().count());
    for name in [
        CONFIGURATION,
        OPTIONS,
        PROBE_TIMEOUT,
        REPEATED,
        UNKNOWN_FLAG,
        UNKNOWN_MEMBER,
        WITHOUT_EFFECT,
    ] {
        assert!(rows().any(|row| row[0] == name), "{name}");
    }
    // A setting that is renamed would not be found any more.
    for name in [
        "BLOCKED_CIDRS_IN_WASM_FETCH",
        "DNS_FORWARD_TIMEOUT",
        "EXIT_ON_ZERO_ACTIVE_CONNECTIONS",
        "FILE_MOUNTED_CERTS",
        "HTTPS_PROXY",
        "HTTP_PROXY",
        "ISTIO_DUAL_STACK",
        "ISTIO_META_DNS_CAPTURE",
        "ISTIO_WASM_MAX_BINARY_SIZE_BYTES",
        "OUTPUT_CERTS",
        "PROV_CERT",
        "UNSAFE_PILOT_ENABLE_RUNTIME_ASSERTIONS",
        "WASM_HTTP_REQUEST_MAX_RETRIES",
        "WASM_HTTP_REQUEST_TIMEOUT",
        "WASM_INSECURE_REGISTRIES",
        "WASM_MODULE_EXPIRY",
    ] {
        let quoted = format!("`{name}`");
        assert!(rows().any(|row| row[0].contains(&quoted)), "{name}");
        assert!(environment::rows().any(|row| row.name == name), "{name}");
    }
}

#[test]
fn no_path_that_a_manifest_names_is_opened() {
    use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("named");
    std::fs::write(
        &path,
        "defaultConfig: {drainDuration: x}\nnameserver 10.0.0.1\n",
    )
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
        let flags = [
            &*format!("--meshConfig={named}"),
            &format!("--templateFile={named}"),
        ];
        let pod = pod(&flags, variables.into(), annotations);
        found.extend(self::found(&pod));
        assert!(!is_opened(), "{more}");
    }
    // The content of the file is not in the report either.
    assert!(
        found
            .iter()
            .all(|(_, name, _)| !name.contains("drainDuration")),
        "{found:?}"
    );
    std::fs::read(&path).expect("read");
    assert!(is_opened(), "the watch sees what is opened");
}

#[test]
fn control_characters_of_a_manifest_are_escaped() {
    let mut pod = pod(
        &["--frob\u{1b}[2J=1"],
        json!({"ISTIO_BOOTSTRAP": "/own\u{9b}1m\n  x"}),
        json!({}),
    );
    pod["metadata"]["name"] = "cart\u{1b}]0;x\u{7}\nPod shop/other".into();
    pod["spec"]["containers"][1]["name"] = "istio-proxy".into();
    let text = report(&pod.to_string()).expect("a pod").to_string();
    assert!(
        !text.contains(|c: char| c.is_control() && c != '\n'),
        "{text:?}"
    );
    assert!(
        text.starts_with("Pod shop/cart\\u001b]0;x\\u0007\\nPod shop/other\n"),
        "{text}"
    );
    assert!(!text.contains("\n  x"), "{text}");
}

#[test]
fn a_member_of_a_pod_that_is_null_is_absent() {
    let variables = json!({"ISTIO_BOOTSTRAP": "/own"});
    let mut pod = pod(
        &[],
        variables,
        json!({"a": null, "proxy.istio.io/config": "frob: 1"}),
    );
    let before = found(&pod);
    assert_eq!(before.len(), 2, "{before:?}");
    let containers = pod["spec"]["containers"]
        .as_array_mut()
        .expect("containers");
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
        (
            &["--frob=1"][..],
            none(),
            none(),
            Warning,
            "flag",
            UNKNOWN_FLAG,
        ),
        (
            &["--concurrency=x"],
            none(),
            none(),
            Error,
            "command line",
            CONFIGURATION,
        ),
        (
            &["--templateFile=/own"],
            none(),
            none(),
            Error,
            "proxyBootstrapTemplatePath of --templateFile",
            TEMPLATE,
        ),
        (
            &["--log_stacktrace_level=default:error"],
            none(),
            none(),
            Ok,
            "--log_stacktrace_level",
            FLAGS,
        ),
        (
            &["--log_rotate=/log"],
            none(),
            none(),
            Ok,
            "--log_rotate",
            FLAGS,
        ),
        (
            &[],
            json!({"ISTIO_BOOTSTRAP": "/own"}),
            none(),
            Error,
            "ISTIO_BOOTSTRAP",
            TEMPLATE,
        ),
        (
            &[],
            json!({"OUTPUT_CERTS": "/certs"}),
            none(),
            Ok,
            "OUTPUT_CERTS",
            "`OUTPUT_CERTS`",
        ),
        (
            &[],
            json!({"PROV_CERT": "/certs"}),
            none(),
            Ok,
            "PROV_CERT",
            "expired token, with `PROV_CERT`",
        ),
        (
            &[],
            json!({"GOMEMLIMIT": "1"}),
            none(),
            Ok,
            "GOMEMLIMIT",
            WITHOUT_EFFECT,
        ),
        (
            &[],
            json!({"CA_PROVIDER": "Other"}),
            none(),
            Error,
            "CA_PROVIDER",
            CONFIGURATION,
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
            CONFIGURATION,
        ),
        (
            &[],
            json!({"ISTIO_KUBE_APP_PROBERS": r#"{"/app-health/a/livez": {"httpGet": {"port": 1}}}"#}),
            none(),
            Warning,
            "/app-health/a/livez",
            PROBE_TIMEOUT,
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
            CONFIGURATION,
        ),
        (
            &[],
            config("terminationDrainDuration: 9s"),
            none(),
            Warning,
            "terminationDrainDuration",
            "requests longer than `terminationDrainDuration`",
        ),
        (
            &[],
            config("tracing: {stackdriver: {}}"),
            none(),
            Ok,
            "tracing.stackdriver",
            "`tracing.stackdriver` outside Google Cloud",
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
            "a status port that is no number",
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
            "rules that differ from what is wanted (`--reconcile`)",
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
        (&["--frob"], none(), Error, "command line", CONFIGURATION),
    ] {
        let pod = init(arguments, variables);
        assert_eq!(found(&pod), [(level, name.to_owned(), row)], "{pod}");
    }
}

#[test]
fn a_usual_pod_does_not_differ_and_each_line_of_another_has_its_row() {
    let mut pod = pod(&[], json!({"TRUST_DOMAIN": "td"}), json!({}));
    pod["spec"]["initContainers"] =
        init(&["-p", "15001"], json!({}))["spec"]["initContainers"].take();
    let usual = report(&pod.to_string()).expect("a pod");
    assert_eq!((usual.level, usual.others), (Level::Ok, 0));
    let last = "pods with errors: 0, with warnings: 0, with neither: 1, without Istio: 0; [rows] are those of docs/differences.md";
    assert_eq!(usual.to_string(), format!("Pod shop/cart\n{last}"));
    pod["spec"]["containers"][1]["env"] = json!([{"name": "PROV_CERT", "value": "/certs"}]);
    let other = report(&pod.to_string()).expect("a pod");
    let expected = "  istio-proxy: ok       PROV_CERT: pilot-agent: sent; here: not sent while the client certificate is in use [expired token, with `PROV_CERT`]";
    assert_eq!(other.to_string().lines().nth(1), Some(expected));
    let json = serde_json::to_value(&other).expect("JSON");
    let difference = &json["pods"][0]["differences"][0];
    assert_eq!(json["pods"][0]["name"], "Pod shop/cart");
    assert_eq!(difference["row"], "expired token, with `PROV_CERT`");
    assert_eq!(
        (&difference["level"], &difference["container"]),
        (&json!("ok"), &json!("istio-proxy"))
    );
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
    assert_eq!(found(&pod), [skipped("command line")]);
    assert_eq!(report(&pod.to_string()).expect("a pod").level, Level::Ok);
}

#[test]
fn pods_are_found_in_lists_streams_and_templates() {
    let pod = pod(&[], json!({}), json!({}));
    let template = json!({"metadata": pod["metadata"], "spec": pod["spec"]});
    let mut bare = pod.clone();
    bare.as_object_mut().expect("an object").remove("kind");
    let native = json!({"kind": "Pod", "metadata": {"generateName": "native-"}, "spec": {
        "initContainers": [{"name": "istio-proxy", "restartPolicy": "Always", "command": ["/usr/local/bin/pilot-agent"], "args": ["proxy", "sidecar"]}],
        "containers": [{"name": "app"}],
    }});
    let all = [
        pod,
        json!({"kind": "Deployment", "metadata": {"name": "web"}, "spec": {"template": template}}),
        json!({"kind": "PodList", "items": [bare]}),
        json!({"kind": "CronJob", "metadata": {"name": "night"}, "spec": {"jobTemplate": {"spec": {"template": template}}}}),
        json!({"kind": "Service", "metadata": {"name": "cart"}}),
        native,
        json!({"kind": "Pod", "metadata": {"name": "plain"}, "spec": {"containers": [{"name": "app"}]}}),
    ];
    let expected = [
        "Pod shop/cart",
        "Deployment web",
        "Pod shop/cart",
        "CronJob night",
        "Pod native-",
    ];
    let json = json!({"kind": "List", "items": all}).to_string();
    // JSON is YAML.
    let yaml = all.iter().map(|object| format!("---\n{object:#}\n"));
    for text in [json, yaml.collect::<String>() + "---\n"] {
        let report = report(&text).expect("pods");
        let names: Vec<_> = report.pods.iter().map(|pod| pod.name.as_str()).collect();
        assert_eq!((names.as_slice(), report.others), (&expected[..], 1));
    }
}

#[test]
fn a_text_without_pods_is_an_error() {
    for (text, expected) in [
        ("a: [", "neither YAML nor JSON: "),
        ("{\"kind\": ", "neither YAML nor JSON: "),
        ("", "no pod and no template of pods in the text"),
        ("words", "no pod and no template of pods in the text"),
        ("- 1", "no pod and no template of pods in the text"),
        (
            "kind: Service\n---\nkind: ConfigMap",
            "no pod and no template of pods in the text",
        ),
        (
            "kind: List\nitems: [1]",
            "no pod and no template of pods in the text",
        ),
        (
            "kind: Pod\nmetadata: {name: a}",
            "no pod and no template of pods in the text",
        ),
    ] {
        let error = report(text).expect_err(text).to_string();
        assert!(error.starts_with(expected), "{text}: {error}");
    }
}
