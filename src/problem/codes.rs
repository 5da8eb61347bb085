//! The table of problem codes. A test writes it to `docs/problems.md`.

use super::Code;

macro_rules! codes {
    ($($section:literal { $($name:ident: $cause:literal, $consequence:literal, $remedy:literal;)* })*) => {
        $($(pub const $name: &Code = &Code {
            name: stringify!($name),
            section: $section,
            cause: $cause,
            consequence: $consequence,
            remedy: $remedy,
        };)*)*
        pub const TABLE: &[&Code] = &[$($($name,)*)*];
    };
}

codes! {
    "Settings" {
    SETTING_INVALID: "the value of a setting cannot be used", "the agent does not start", "`pilot-agent config` shows where the value comes from";
    SETTING_REPLACED: "the value of a setting cannot be used or is overridden", "another value is used", "";
    SETTING_UNKNOWN: "a variable that begins with `ISTIO_AGENT_` is unknown", "the variable is ignored", "";
    MEMBER_UNKNOWN: "ProxyConfig has no such member", "the member is ignored", "";
    MEMBER_REPEATED: "a member of ProxyConfig occurs twice", "the last one counts", "";
    FLAG_OVERRIDES_CONFIG: "a flag overrides a member of ProxyConfig", "the flag is used", "";
    FILE_MISSING: "a setting names a file that does not exist", "the agent does not start", "mount the file, or correct the setting";
    FILE_UNREADABLE: "a file of settings exists and cannot be used", "the agent starts without the file", "correct the file or its permissions";
    FILE_INVALID: "the content of a file cannot be used", "", "correct or remove the file";
    BOOTSTRAP_OVERRIDE_UNREADABLE: "the file that `ISTIO_BOOTSTRAP_OVERRIDE` names cannot be used", "Envoy starts without the override", "mount the file, or correct its path or its content";
    ARGUMENT_INVALID: "an argument cannot be used", "", "";
    FILE_LINE: "a line of a file of settings cannot be used", "the line is ignored", "";
    INTERFACES_UNREADABLE: "the kernel does not list the network interfaces", "the pod's addresses are unknown", "";
    INTERFACE_UNKNOWN: "the pod does not have an interface that a setting names", "the name is ignored", "";
    WORKLOAD_KEY_SIZE: "`WORKLOAD_RSA_KEY_SIZE` is not a size that the agent supports", "the agent does not start", "remove the variable: an ECDSA key is smaller and faster";
    STATUS_PORT_ANNOTATION: "the annotation `status.sidecar.istio.io/port` is not a port", "the annotation is ignored", "";
    BOOTSTRAP_TEMPLATE_SET: "a setting names a template for Envoy's bootstrap", "the agent does not start", "use `customConfigFile` or `ISTIO_BOOTSTRAP_OVERRIDE`; the agent does not read templates";
    LOAD_STATS_CONFIG_INVALID: "`ISTIO_META_LOAD_STATS_CONFIG_JSON` is not a JSON object", "the agent does not start", "";
    }
    "DNS" {
    DNS_RESOLV_CONF_UNREADABLE: "the file with the pod's resolvers cannot be used", "the pod's resolvers are unknown", "mount the file, or set `ISTIO_AGENT_RESOLV_CONF` to another file";
    DNS_PORT_TAKEN: "another process uses the address of the agent's DNS server", "the agent does not start", "stop that process, or set `DNS_PROXY_ADDR` to another address";
    DNS_LISTEN_FAILED: "the agent cannot listen for DNS queries", "the agent does not start", "set `DNS_PROXY_ADDR` to an address of this pod, with a port above 1023 unless the agent is root";
    DNS_SERVER_SILENT: "the agent's DNS server does not answer", "applications cannot resolve names", "restart the container istio-proxy";
    DNS_RESOLVER_MISSING: "the pod has no resolver other than this agent", "only names of the mesh are resolved", "name the resolvers of the cluster in `dnsConfig.nameservers` of the pod, or in the file that `ISTIO_AGENT_RESOLV_CONF` names";
    DNS_RESOLVER_INVALID: "a nameserver line of the pod's resolvers is not an IP address, is this agent, or follows 16 others", "it is left out", "correct `dnsConfig.nameservers` of the pod, or the file that `ISTIO_AGENT_RESOLV_CONF` names";
    DNS_RESOLVER_SILENT: "a resolver of the pod does not answer in time", "applications may not resolve names", "check that DNS server, and that network policies allow UDP and TCP to its port";
    DNS_RESOLVER_UNREACHABLE: "queries to a resolver of the pod cannot be sent, or are rejected", "applications may not resolve names", "correct `dnsConfig.nameservers` of the pod, or start that DNS server";
    DNS_RESOLVER_REFUSES: "a resolver of the pod answers SERVFAIL or REFUSED", "applications may not resolve names", "read the log of that DNS server";
    DNS_LOOP: "the agent's own queries come back to it", "names outside the mesh are not resolved", "set `--proxy-uid` of istio-init to the user of the container istio-proxy, so that its queries are not captured";
    DNS_NAME_TABLE_MISSING: "istiod has not sent the names of the mesh (NDS)", "names that only the mesh knows are not resolved", "istiod sends them when Envoy is connected: compare `istioctl proxy-status`";
    DNS_NOT_CAPTURED: "the rules do not redirect DNS queries to the agent, although `ISTIO_META_DNS_CAPTURE` is true", "names that only the mesh knows are not resolved", "set `ISTIO_META_DNS_CAPTURE` in `proxyMetadata` of ProxyConfig, so that istio-init or istio-cni sees it, and delete the pod";
    }
    "Traffic capture" {
    CAPTURE_OPTION_INVALID: "the value of an option of `istio-iptables` cannot be used", "no rule is created", "";
    CAPTURE_OPTION_REPLACED: "the value of an option of `istio-iptables` cannot be used", "another value is used", "";
    CAPTURE_MODE_UNKNOWN: "the option `--istio-inbound-interception-mode` is unknown", "the mode REDIRECT is used", "";
    CAPTURE_OPTION_MISSING: "`--verify` or `--explain` lacks an option that names the pod's rules", "", "add the arguments of the container istio-init or istio-validation, or of the CNI plugin";
    CAPTURE_NO_ADDRESS: "the pod has no IP address other than those of loopback", "no rule is created", "check the CNI plugin: `kubectl get pod -o wide` shows the address";
    CAPTURE_PERMISSION: "the container lacks the capability `NET_ADMIN`", "the rules cannot be read or changed", "add `NET_ADMIN` and `NET_RAW` to the capabilities of the container istio-init, or use Istio's CNI plugin";
    CAPTURE_PROGRAM_MISSING: "a program that reads or changes rules is not installed", "the rules cannot be read or changed", "install iptables (nft or legacy) in the image, or use `--native-nftables` with nft";
    CAPTURE_PROGRAM_FAILED: "a program that reads or changes rules fails", "", "its message names the cause; usual ones are a missing capability `NET_ADMIN` or kernel module";
    CAPTURE_RULES_UNREADABLE: "the rules or tables cannot be read", "", "";
    CAPTURE_ROUTES_FAILED: "the routes of captured traffic cannot be set up", "no rule is created", "";
    CAPTURE_LOCKED: "another process changes the rules of this pod", "no rule is created", "stop that process, or wait for its end";
    CAPTURE_VALIDATION_FAILED: "`--run-validation` finds that traffic is not redirected to Envoy", "the pod is not ready for Istio", "run it as the user of `--proxy-uid`; with Istio CNI, the pod may be older than istio-cni on its node: delete it, or set `cni.repair.deletePods=true`";
    CAPTURE_RULES_MISSING: "no rule redirects the pod's traffic to Envoy", "traffic bypasses Envoy", "read the log of the container istio-init, or of istio-cni on the node; then delete the pod, which creates the rules again";
    CAPTURE_RULES_CHANGED: "rules exist, and traffic does not reach Envoy", "traffic bypasses Envoy or is lost", "read the log of the container istio-init, or of istio-cni on the node; then delete the pod, which creates the rules again";
    CAPTURE_RULES_EARLIER: "a rule of an earlier version of Istio redirects DNS queries", "queries may be lost", "run `pilot-agent istio-clean-iptables` in the network namespace, or delete the pod";
    CAPTURE_PROXY_UID: "Envoy's own traffic is captured", "its connections come back to Envoy", "set `--proxy-uid` of istio-init to the user of the container istio-proxy, or `runAsUser` of the container to 1337";
    }
    "Probes and metrics" {
    PROBE_PORT_CLOSED: "the application does not listen on the port of its probe", "the probe fails", "let the application listen on that port at all addresses (0.0.0.0), or correct the port of the probe in the pod, which `ISTIO_KUBE_APP_PROBERS` repeats";
    PROBE_LATE: "the application does not answer a probe in time", "the probe fails", "read the application's log, or raise `timeoutSeconds` of the probe";
    PROBE_STATUS: "the application answers a probe with a status other than 2xx and 3xx", "the probe fails", "read the application's log";
    PROBE_FAILED: "a probe of the application fails", "the probe fails", "read the application's log, and compare the probe in the pod with what the port serves";
    READINESS_FAILED: "the kubelet cannot see that Envoy is ready", "the pod is not ready", "restart the container istio-proxy if this lasts";
    SCRAPE_FAILED: "metrics of Envoy or of the application cannot be fetched", "the page lacks these samples", "correct `prometheus.io/port` and `prometheus.io/path` of the pod";
    SCRAPE_LATE: "metrics of Envoy or of the application arrive too late", "the page lacks these samples", "raise `scrape_timeout` of the scraper, or reduce the metrics";
    SCRAPE_PAGE_INVALID: "a page of metrics is too large or malformed", "the page lacks the rest of these samples", "correct the page that the application serves";
    }
    "Wasm modules" {
    WASM_CONFIGURATION: "the configuration of a Wasm filter does not say where its module is", "", "correct `url` and `imagePullSecret` of the WasmPlugin";
    WASM_NOT_ALLOWED: "a setting of the agent forbids a Wasm module", "", "pin the module by `sha256`, or change `ISTIO_AGENT_WASM_ALLOWED_REGISTRIES` or `ISTIO_AGENT_WASM_REQUIRE_DIGEST`";
    WASM_DOWNLOAD_FAILED: "a Wasm module cannot be downloaded", "", "check `url` of the WasmPlugin, and that the pod may connect to its server";
    WASM_MANIFEST_FAILED: "the manifest of a Wasm image cannot be fetched", "", "check `url` and `imagePullSecret` of the WasmPlugin, and that the pod may connect to the registry";
    WASM_CHECKSUM: "a Wasm module has another checksum than configured", "", "correct `sha256` of the WasmPlugin";
    WASM_INVALID: "what was downloaded is not a Wasm module", "", "correct `url` of the WasmPlugin, or the image";
    WASM_CACHE: "the directory of Wasm modules cannot be written", "", "mount a writable volume with free space at that directory";
    }
}
