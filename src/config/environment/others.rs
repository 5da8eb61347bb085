//! Variables of pilot-agent that this agent does not read by name: families, which are read by prefix,
//! and variables without effect, with the reason. Variables of `istio-iptables` are not listed.

use super::Counterpart::Same;
use super::Row;
use super::State::{self, Honoured, Refused, WithoutEffect};

const UNUSED: State = WithoutEffect(super::UNUSED);
const GO: State = WithoutEffect("this agent does not use the Go runtime");

/// Variables of `istio-iptables` and of the script that starts the agent on a machine.
pub(super) const OTHER_PROGRAMS: [&str; 2] = ["ISTIO_AGENT_PROTECT_ADMIN", "ISTIO_AGENT_FLAGS"];

const fn row(
    name: &'static str,
    kind: &'static str,
    default: &'static str,
    help: &'static str,
    state: State,
) -> Row {
    Row {
        name,
        kind,
        // A variable without effect has no wrong value.
        is_valid: |_| true,
        expected: "",
        default,
        help,
        counterpart: Same,
        state,
    }
}

#[rustfmt::skip]
pub(super) const OTHERS: &[Row] = &[
    row("ISTIO_META_<KEY>", "string", "", "Sets the member KEY of the node metadata.", Honoured),
    row("ISTIO_METAJSON_<ANY>", "JSON", "", "JSON object whose members are added to the node metadata; members of LABELS become labels.", Honoured),
    row("XDS_HEADER_<NAME>", "string", "", "Additional header of xDS calls.", Honoured),
    row("CA_HEADER_<NAME>", "string", "", "Additional header of certificate requests.", Honoured),
    row("CREDENTIAL_IDENTITY_PROVIDER", "string", "GoogleComputeEngine", "Identity provider of the credentials.", UNUSED),
    row("XDS_AUTH_PROVIDER", "string", "", "Credential provider for xDS.", UNUSED),
    row("ISTIO_GPRC_MAXSTREAMS", "int", "100000", "Maximum number of streams on a local socket.", WithoutEffect("Envoy opens only a few streams")),
    row("ISTIO_ENABLE_CONTROLLER_QUEUE_METRICS", "bool", "false", "Queue metrics.", WithoutEffect("this agent does not have these queues")),
    row("GOOGLE_APPLICATION_CREDENTIALS", "string", "", "File with Google Cloud credentials.", WithoutEffect("this agent does not read the labels of Google Cloud instances")),
    row("TOKEN_AUDIENCES", "list", "istio-ca", "Token audiences.", UNUSED),
    row("XDS_AUTH", "bool", "true", "istiod authenticates clients.", UNUSED),
    row("XDS_AUTH_PLAINTEXT", "bool", "false", "istiod authenticates clients without TLS.", UNUSED),
    row("CLUSTER_ID", "string", "Kubernetes", "Name of istiod's cluster.", UNUSED),
    row("ENABLE_VTPROTOBUF", "bool", "true", "Protobuf encoder of istiod.", UNUSED),
    row("RESOLVE_HOSTNAME_GATEWAYS", "bool", "true", "istiod resolves gateway host names.", UNUSED),
    row("UNSAFE_PILOT_ENABLE_RUNTIME_ASSERTIONS", "bool", "false", "Ends pilot-agent if an internal assertion fails.", Refused("an assertion must not stop a running sidecar")),
    row("PILOT_<ANY>", "string", "", "Settings of istiod, except those in the tables above.", UNUSED),
    row("GOMEMLIMIT", "string", "", "Memory limit of the Go runtime.", GO),
    row("GODEBUG", "string", "", "Debug options of the Go runtime.", GO),
    row("GOMAXPROCS", "int", "", "Threads of the Go runtime.", GO),
    row("GRPC_GO_LOG_<ANY>", "string", "", "Logging of Go's gRPC library.", GO),
];
