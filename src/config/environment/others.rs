//! Variables of pilot-agent that this agent does not read by name: families, which are read by prefix,
//! and variables without effect, with the reason. Variables of `istio-iptables` are not listed.

use super::Counterpart::Same;
use super::Row;
use super::State::{self, Honoured, Refused, WithoutEffect};

const UNUSED: State = WithoutEffect("pilot-agent does not use it either");
const GO: State = WithoutEffect("there is no Go runtime here");

/// Variables of `istio-iptables` and of the script that starts the agent on a machine.
pub(super) const OF_OTHER_PROGRAMS: [&str; 2] = ["ISTIO_AGENT_PROTECT_ADMIN", "ISTIO_AGENT_FLAGS"];

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
        is_good: |_| true,
        default,
        help,
        counterpart: Same,
        state,
    }
}

#[rustfmt::skip]
pub(super) const OTHERS: &[Row] = &[
    row("ISTIO_META_<KEY>", "string", "", "Member KEY of the node's metadata.", Honoured),
    row("ISTIO_METAJSON_<ANY>", "JSON", "", "An object whose members are added to node metadata; members of LABELS are labels.", Honoured),
    row("XDS_HEADER_<NAME>", "string", "", "A further header of discovery calls.", Honoured),
    row("CA_HEADER_<NAME>", "string", "", "A further header of certificate requests.", Honoured),
    row("CREDENTIAL_IDENTITY_PROVIDER", "string", "GoogleComputeEngine", "Identity provider of the credentials.", UNUSED),
    row("XDS_AUTH_PROVIDER", "string", "", "Provider of discovery's credentials.", UNUSED),
    row("ISTIO_GPRC_MAXSTREAMS", "int", "100000", "Most streams on a local socket.", WithoutEffect("one Envoy opens a handful")),
    row("ISTIO_META_ENABLE_SELF_DISCOVERY", "bool", "false", "Names Envoy's own cluster.", Honoured),
    row("ISTIO_ENABLE_CONTROLLER_QUEUE_METRICS", "bool", "false", "Metrics of queues.", WithoutEffect("there are no such queues here")),
    row("GOOGLE_APPLICATION_CREDENTIALS", "string", "", "File of Google credentials.", WithoutEffect("labels of Google's machines are not read")),
    row("TOKEN_AUDIENCES", "list", "istio-ca", "Audiences of tokens.", UNUSED),
    row("XDS_AUTH", "bool", "true", "Istiod authenticates clients.", UNUSED),
    row("XDS_AUTH_PLAINTEXT", "bool", "false", "Istiod authenticates clients without TLS.", UNUSED),
    row("CLUSTER_ID", "string", "Kubernetes", "Name of istiod's cluster.", UNUSED),
    row("ENABLE_VTPROTOBUF", "bool", "true", "Encoding in istiod.", UNUSED),
    row("RESOLVE_HOSTNAME_GATEWAYS", "bool", "true", "Resolution in istiod.", UNUSED),
    row("UNSAFE_PILOT_ENABLE_RUNTIME_ASSERTIONS", "bool", "false", "Ends pilot-agent where it contradicts itself.", Refused("a running sidecar is worth more than an assertion")),
    row("PILOT_<ANY>", "string", "", "Settings of istiod, but for those named here.", UNUSED),
    row("GOMEMLIMIT", "string", "", "Memory limit of Go.", GO),
    row("GODEBUG", "string", "", "Debugging of Go.", GO),
    row("GOMAXPROCS", "int", "", "Threads of Go.", GO),
    row("GRPC_GO_LOG_<ANY>", "string", "", "Logging of Go's gRPC library.", GO),
];
