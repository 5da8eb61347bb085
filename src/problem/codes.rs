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
    DNS_RESOLV_CONF_UNREADABLE: "the file with the pod's resolvers cannot be used", "only names of the mesh are resolved", "set `ISTIO_AGENT_RESOLV_CONF` to a file with nameserver lines";
    }
    "Traffic capture" {
    CAPTURE_OPTION_INVALID: "the value of an option of `istio-iptables` cannot be used", "no rule is created", "";
    CAPTURE_OPTION_REPLACED: "the value of an option of `istio-iptables` cannot be used", "another value is used", "";
    CAPTURE_MODE_UNKNOWN: "the option `--istio-inbound-interception-mode` is unknown", "the mode REDIRECT is used", "";
    }
}
