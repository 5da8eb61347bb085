//! The table of deliberate differences from pilot-agent. `preflight` reports rows for pods by their
//! selectors, and a test writes the table to `docs/differences.md`.
//!
//! Each text is a sentence without capital and full stop, because `preflight` joins texts by semicolons.
//! No text decides on a level: texts may be edited freely, ids may not.

use crate::problem::{Code, codes};

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Difference {
    /// Unique and stable, because scripts search reports for it.
    pub id: &'static str,
    pub section: &'static str,
    pub impact: Impact,
    pub selectors: &'static [Selector],
    pub pilot_agent: &'static str,
    pub this_agent: &'static str,
    pub reason: &'static str,
    /// Empty if the impact is [`Impact::Benign`].
    pub advice: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Impact {
    /// No case is known in which the difference surprises an operator.
    Benign,
    Surprising,
    /// One of the twelve rows that come first on the page.
    Harmful,
}

/// A property of a pod that a row is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selector {
    /// A variable, flag, annotation or member of ProxyConfig with a value other than 0 and false. Several
    /// ones, separated by spaces, must all have such a value.
    Set(&'static str),
    /// A problem with this code. Other problems belong to the row of `SETTING_INVALID`.
    Problem(&'static Code),
    ProbeWithoutTimeout,
    UnknownFlag,
    VariableWithoutEffect,
}

macro_rules! differences {
    ($($section:literal { $($id:ident: $impact:ident, [$($selector:expr),*],
       $pilot_agent:literal, $this_agent:literal, $reason:literal $(, $advice:literal)?;)* })*) => {
        pub const TABLE: &[Difference] = &[$($(Difference {
            id: stringify!($id),
            section: $section,
            impact: Impact::$impact,
            selectors: &[$($selector),*],
            pilot_agent: $pilot_agent,
            this_agent: $this_agent,
            reason: $reason,
            advice: concat!($($advice)?),
        },)*)*];
    };
}

use Selector::{ProbeWithoutTimeout, Problem, Set, UnknownFlag, VariableWithoutEffect};

differences! {
    "Certificates and identity" {
    WORKLOAD_KEY: Harmful, [Problem(codes::WORKLOAD_KEY_SIZE)], "pilot-agent creates an RSA key of 2048 bits or of `WORKLOAD_RSA_KEY_SIZE`, unless `ECC_SIGNATURE_ALGORITHM` is set", "this agent creates an ECDSA P-256 key. It creates an RSA key if `WORKLOAD_RSA_KEY_SIZE` or `privateKeyProvider.qat` is set, or once the authority has rejected an ECDSA key that no setting asks for, unless the authority rejects RSA keys as well", "an ECDSA key takes microseconds to create, an RSA key tens of milliseconds", "peers that verify RSA keys only reject the certificate: set `WORKLOAD_RSA_KEY_SIZE`";
    ROOTS_MERGED: Benign, [], "pilot-agent passes on the roots of the authority unchanged, or merged with the roots of the mesh", "this agent always merges the roots and leaves out broken certificates", "Envoy rejects the whole bundle for one broken certificate";
    ROOTS_OF_ONE_KEY: Benign, [], "pilot-agent keeps roots with the same name and key, as renewed roots have, in the order of their texts or of their file", "this agent puts valid roots first, and of these the one that expires last", "Envoy uses the first root, and an expired one fails all mutual TLS";
    PEM_FORM: Benign, [], "if a line of a file contains more than the begin or end of a PEM block (files joined without a line feed, a byte order mark, indentation) or ends with CR, pilot-agent skips blocks or serves the file unchanged, and Envoy rejects it", "this agent reads all blocks, rewrites text that Envoy cannot read, and names text that is not PEM in the log", "a missing line feed does not cost a certificate";
    TRUST_BUNDLE_CHANGE: Benign, [], "every pilot-agent requests a certificate at once when the trust bundle of the mesh changes, also for the first bundle", "this agent spreads the requests over up to 30 s, and requests nothing for the first bundle", "istiod is not overloaded";
    OUTPUT_CERTS: Benign, [Set("OUTPUT_CERTS")], "pilot-agent writes and renames the files of `OUTPUT_CERTS` one after the other, and only while an SDS client asks for secrets", "this agent writes all files before it renames them, and does so on every rotation", "other readers of the directory see each rotation too";
    EXPIRED_TOKEN: Benign, [Set("PROV_CERT")], "pilot-agent sends an expired token", "this agent does not send an expired token while the client certificate is in use", "istiod does not have to reject it";
    CLIENT_CERTIFICATE_REJECTED: Benign, [], "if istiod rejects the client certificate in the handshake, pilot-agent does not get a connection", "this agent connects without the certificate and sends the token", "a machine survives the retirement of a root";
    CERTIFICATE_OVER_RESTART: Harmful, [], "pilot-agent requests a certificate after each restart of the container", "this agent stores key and certificate in `./etc/istio/proxy/istio-agent` (mode 0700) if that is in memory, and uses them after a restart", "a container can restart while istiod is unreachable", "root and the agent's user can read the key there, as they can from the SDS socket: an empty `ISTIO_AGENT_KEEP_CERTS` switches it off, also in `proxyMetadata` of MeshConfig";
    CORE_DUMPS: Surprising, [], "a core dump of pilot-agent contains keys", "this agent does not dump core", "keys do not reach the disk of the node", "a crash of the agent leaves no core dump: `ISTIO_AGENT_CORE_DUMP` allows it";
    CERTIFICATE_ATTEMPTS: Benign, [], "pilot-agent makes up to five attempts for a request, 0.1 to 0.8 s apart, and each stream of Envoy repeats them", "this agent makes one attempt for all streams, and retries with one backoff", "several streams do not multiply the load";
    CERTIFICATE_TIMEOUT: Benign, [], "pilot-agent waits without limit for the response to a certificate request", "this agent cancels the request after 10 s, and the next ones after 20, 40 and 80 s", "the agent leaves an istiod that hangs, and a slow signer has time";
    CERTIFICATE_RENEWAL: Benign, [], "pilot-agent drops the certificate from its cache when it is time to renew it", "this agent keeps the certificate until the new one arrives or the old one expires", "a short outage of the control plane has no effect";
    }
    "Discovery and istiod" {
    CONFIGURATION_OVER_RESTART: Harmful, [], "under pilot-agent, a restarted Envoy has no configuration until istiod sends it", "this agent stores what Envoy has accepted in `./var/lib/istio/data/istio-agent-config` (mode 0700) if a disk volume is mounted there, and serves it while istiod is unreachable, if discovery is delta", "a container that restarts during an outage serves", "credentials that an EnvoyFilter contains inline are on the node's disk until the pod is deleted, and up to 64 MB count against its ephemeral storage: an empty `ISTIO_AGENT_KEEP_CONFIG` switches it off, also in `proxyMetadata` of MeshConfig";
    CONFIGURATION_AFTER_NACK: Surprising, [], "under pilot-agent, a new Envoy that rejects a resource of istiod does not have it, and the pod is not ready", "this agent sends such an Envoy the stored version of the resource, which an earlier Envoy of the pod accepted, until istiod sends a version that Envoy accepts or removes the resource. istiod gets the NACK", "a push that Envoy rejects does not stop a container that restarts", "a changed policy that Envoy rejects stays in force in its old form, as in any Envoy that runs: `ISTIO_AGENT_KEEP_CONFIG_ON_NACK=false` switches it off, also in `proxyMetadata` of MeshConfig";
    ISTIO_VERSION: Benign, [], "pilot-agent reports the version of its binary to istiod", "this agent reports the version of the image, from the file `pilot-agent.istio-version` next to the binary. Without the file it reports 1.31.0", "istiod decides by the version what Envoy understands";
    CONNECTION_AFTER_REJECTION: Benign, [], "pilot-agent closes the connection after a failed certificate request and dials again", "this agent keeps the connection, unless the request got no answer or the connection lacks the client certificate", "the connection works";
    ISTIOD_UNREACHABLE: Benign, [], "while istiod is unreachable or answers discovery with an error, pilot-agent ends Envoy's stream, and Envoy backs off for up to 30 s", "this agent holds Envoy's stream open until istiod's first response. It sends the requests again within 4 s, and at once when the token changes", "Envoy gets its configuration as soon as istiod is back";
    ISTIOD_CONNECTIONS: Benign, [], "pilot-agent opens one connection to istiod for each stream and one for certificates", "this agent opens one connection for Envoy and for certificates (two if `CA_ADDR` or the headers differ), and one for other clients", "this needs fewer TLS handshakes, and one place reconnects";
    ISTIOD_DIALS: Benign, [], "while istiod is unreachable, pilot-agent dials for each attempt of Envoy, which waits up to 30 s between attempts. For certificates gRPC dials with a backoff of 1 s to 2 min", "this agent dials at random intervals of 1 to 2 s, or of 10 to 11 s if dials time out", "the load stays below one dial a second, and the agent finds a returning istiod within seconds";
    CONTROL_PLANES: Benign, [], "pilot-agent knows one address of istiod", "this agent accepts several addresses in `DISCOVERY_ADDRESS`. It switches to the next one after three failures or 15 s without an answer, and tries the first one again after ten minutes", "a mesh with a second control plane survives the loss of the first";
    ISTIOD_FAILURE_METRIC: Benign, [], "pilot-agent's `istio_agent_istiod_connection_failures` counts malformed addresses only", "this agent's metric counts failed dials", "the value matches the name";
    DISCOVERY_STREAMS: Benign, [], "pilot-agent serves one discovery stream; a second stream ends the first", "this agent serves one stream for each Envoy, and up to 64 streams of other clients over a separate connection to istiod", "consecutive Envoys and proxyless gRPC applications do not evict each other";
    REQUEST_QUEUE: Benign, [], "pilot-agent queues requests that istiod does not read, without limit", "this agent ends Envoy's stream at 64 MiB of waiting requests, and makes other clients wait", "a client cannot fill the memory";
    CLOUD_PLATFORM: Benign, [], "pilot-agent detects the cloud platform for up to 5 s before it starts anything", "this agent detects the platform for up to 5 s while it sets up sockets and certificates. Only Envoy's start waits for the result, and a stop does not", "a metadata service that does not answer costs less time";
    CLOUD_METADATA_PROXY: Benign, [Set("HTTP_PROXY")], "pilot-agent sends requests for the metadata of AWS and Azure through the proxy in `HTTP_PROXY`", "this agent sends them directly, as both agents do for Google", "the metadata would describe the proxy's machine";
    SERVER_CA_CERTIFICATE: Harmful, [], "pilot-agent accepts a CA certificate (CA:TRUE) as the server certificate of istiod or of a Wasm server", "this agent accepts it only if it is a root, or if a root without name constraints has signed it", "rustls has no switch for it, and a second verifier of chains would be a risk", "the connection fails if an intermediate has signed such a certificate: issue it with `isCA: false` (cert-manager) or `-addext basicConstraints=CA:FALSE` (openssl)";
    SERVER_NAME_CONSTRAINTS: Harmful, [], "if the server certificate of istiod or of a Wasm server contains a URI, pilot-agent verifies the authorities' name constraints for URIs", "this agent rejects such a certificate below an authority with such constraints, and names the authority", "rustls cannot verify these constraints", "the connection fails if such an authority, for example one of SPIRE, issues istiod's certificate: use an authority without name constraints for URIs";
    SERVER_CHAIN_LENGTH: Benign, [], "pilot-agent accepts more than six intermediate certificates between a server certificate and a root", "this agent rejects such a chain", "rustls has this limit";
    SERVER_RSA_1024: Surprising, [], "pilot-agent accepts RSA keys of 1024 bits in the chain of a server certificate", "this agent rejects such keys", "such keys can be broken", "the connection fails with the error `BadSignature`: replace the root";
    DISCOVERY_SOCKET: Benign, [], "pilot-agent replaces a discovery socket on which another process listens", "this agent replaces it too, and logs an error that names the process", "the other process does not get any more connections";
    }
    "Envoy" {
    OPEN_FILES: Benign, [], "pilot-agent raises its own limit of open files to the allowed maximum, and starts Envoy with the original limit", "this agent raises the limit for Envoy too", "Envoy may have as many connections, and only unsafe code can lower the limit of a child process";
    ENVOY_STOP: Benign, [], "pilot-agent kills Envoy with SIGKILL after the drain", "this agent asks Envoy to quit over the admin port, then sends SIGTERM, then SIGKILL. It always waits for the process", "Envoy closes its listeners and flushes its logs";
    DRAIN_END: Benign, [], "under pilot-agent, Envoy accepts new connections until the end of the drain", "this agent closes the listeners for the last quarter of the drain, at most one second", "in-flight requests can end";
    IN_FLIGHT_REQUESTS: Harmful, [Set("terminationDrainDuration")], "pilot-agent cuts requests that take longer than `terminationDrainDuration`", "this agent waits for them until 5 s before the end of the grace period. If it does not know the grace period, it waits for at most 10 s, and for 25 s together with the drain. `ISTIO_AGENT_LAST_REQUESTS=0s` turns the wait off", "an accepted request gets its response", "pods with long requests end later, within the grace period";
    ENVOY_STATISTICS: Benign, [], "the bootstrap of pilot-agent excludes Envoy's statistics of active requests and connections by default", "the bootstrap of this agent includes these statistics (of a sidecar, inbound ones), unless the agent cuts requests", "the statistics show when the last request has ended";
    SECOND_SIGNAL: Surprising, [], "pilot-agent ignores a second signal", "this agent cuts the drain short at the second signal, and kills Envoy at the third", "the operator asked twice", "a supervisor that sends SIGTERM twice cuts the drain short";
    LAST_CONNECTION: Benign, [Set("EXIT_ON_ZERO_ACTIVE_CONNECTIONS")], "with `EXIT_ON_ZERO_ACTIVE_CONNECTIONS`, pilot-agent waits for the last connection without limit, and does not recognise Envoy's probe and metrics listeners by their IPv6 names", "this agent waits with a limit, and recognises IPv6 names", "the wait ends before the platform sends SIGKILL";
    ACCESS_LOG_OUTPUT: Benign, [], "if pilot-agent's output is a socket (a unit of systemd) or Envoy has another user, Envoy cannot open `/dev/stdout` for access logs. Envoy then rejects each listener with such a log, and is never ready", "this agent gives Envoy a pipe and copies the lines to the agent's output", "access logs work on machines";
    ENVOY_EXIT_CODE: Harmful, [], "pilot-agent exits with 0 when Envoy crashes", "this agent restarts a crashed Envoy in place, three times in ten minutes (`ISTIO_AGENT_ENVOY_RESTARTS`). After that, and if Envoy has not served or was killed for lack of memory, this agent exits with Envoy's exit code. Both agents exit with 0 when Envoy does, as after SIGTERM", "a new Envoy serves sooner than a new container, and the container status shows why the agent exits", "alerts on the restart count of the container do not see a restarted Envoy: use `istio_agent_envoy_restarts_total`. Alerts on its exit code see crashes: check them. Scripts that end a sidecar by sending SIGKILL to Envoy start another: send SIGTERM, or set the variable to `0`";
    HOT_RESTART: Benign, [], "pilot-agent uses a new Envoy binary or bootstrap in the next pod only", "this agent hot-restarts Envoy if `ISTIO_AGENT_HOT_RESTART` is set", "connections and requests survive";
    DRAIN_CALL: Benign, [], "pilot-agent's drain request to Envoy has no time limit", "this agent's request has a limit of two seconds", "a stuck Envoy does not block the shutdown";
    }
    "Secrets (SDS)" {
    SDS_ACCESS: Harmful, [], "pilot-agent serves every process that can open the socket", "this agent serves root, its own user (unless that is 65534) and the users in `ISTIO_AGENT_SDS_USERS`. The default is 1337; `any` allows every user", "the key is for Envoy only", "programs of other users cannot read the socket: list the users in `ISTIO_AGENT_SDS_USERS`";
    SDS_MISSING_FILE: Benign, [], "if the file of a secret is missing, pilot-agent ends the stream after 10 s", "this agent keeps the stream open, and serves all other secrets", "a bad file affects one certificate only";
    SDS_FILE_CHANGE: Benign, [], "pilot-agent watches the certificate of a pair, not the key, and does not follow all links", "this agent watches both files, follows all links and compares the contents", "no rotation is missed, and none is served half done";
    SDS_FILES_VANISH: Benign, [Set("FILE_MOUNTED_CERTS")], "if mounted certificate files vanish, pilot-agent requests another certificate from the authority. With `FILE_MOUNTED_CERTS` it ends the stream instead", "this agent keeps the last good pair", "the identity does not change unnoticed";
    SDS_REVOCATION_LIST: Benign, [], "pilot-agent adds the revocation list to every bundle of roots", "this agent adds it to the workload's own roots only", "other authorities have no list, and Envoy would reject their peers";
    SDS_REVOCATION_FORM: Benign, [], "pilot-agent passes the file name of a revocation list to Envoy even if the list is DER, white space or null, and Envoy rejects all peers", "this agent converts DER to PEM. While the file has no list, Envoy gets none", "Envoy reads PEM only";
    SDS_REJECTED_SECRET: Harmful, [], "pilot-agent logs a warning if Envoy rejects a secret", "this agent logs an error, and the pod is not ready while Envoy has no version of the secret", "Envoy's listeners reset every connection without the secret", "a pod with such a secret is not ready any more: the log names the secret";
    SDS_OTHER_PROVIDER: Benign, [], "pilot-agent looks for the SDS server of another provider once, at its start", "this agent can wait for that server (`ISTIO_AGENT_EXTERNAL_SDS`)", "the start order does not matter";
    SDS_NAMES: Surprising, [], "pilot-agent serves the workload certificate under any unknown name", "this agent rejects unknown names", "a key is served under one name only", "clients that ask for invented names get no certificate: ask for `default`";
    SDS_READ_ONLY_ROOT: Benign, [], "next to another provider's SDS server and under a read-only root file system, pilot-agent tells istiod of a socket for files that does not exist", "this agent does not tell istiod of it", "istiod must not refer Envoy to this socket";
    }
    "Traffic capture" {
    CAPTURE_OPTIONS: Surprising, [Problem(codes::CAPTURE_OPTION_INVALID), Problem(codes::CAPTURE_OPTION_REPLACED)], "pilot-agent passes ports, users, groups, interfaces and marks to iptables without a check", "this agent checks them, and names every problem before it builds a rule", "a typo is named, and no value becomes an option of iptables", "values that iptables accepts and Istio does not document are errors";
    CAPTURE_PORT_RANGES: Benign, [], "pilot-agent passes on port ranges, and iptables and nftables spell them differently", "this agent accepts `8000:9000` and `8000-9000` with both back ends, and no service names", "one setting works for both";
    CAPTURE_CNI_FLAGS: Benign, [Set("--cni-mode"), Set("--network-namespace")], "pilot-agent has `--cni-mode` and `--network-namespace` for the CNI plugin, which calls the same code", "this agent accepts both without effect", "the plugin is a separate program";
    CAPTURE_VALIDATION: Benign, [Set("--run-validation")], "pilot-agent's `--run-validation` does not open another connection after one that hangs", "this agent opens another connection each second", "the check sees rules that arrive late";
    CAPTURE_UNKNOWN_USER: Benign, [], "pilot-agent fails while it sets up rules if a user or group does not exist", "this agent checks users and groups first, also with `--skip-rule-apply` and `--dry-run`", "the error comes before any change";
    CAPTURE_MODE: Benign, [Problem(codes::CAPTURE_MODE_UNKNOWN)], "pilot-agent treats an unknown `--istio-inbound-interception-mode` as REDIRECT", "this agent does the same, with a warning", "a typo is visible";
    CAPTURE_RECONCILE: Benign, [Set("--reconcile")], "pilot-agent fails if the existing rules differ from the wanted ones. With `--reconcile` it replaces them, and drops traffic meanwhile", "this agent always replaces rules that differ, each table at once", "a container that starts again is captured, and no packet is lost";
    CAPTURE_OTHER_VERSION: Benign, [], "pilot-agent leaves the rules of another Istio version in place", "this agent replaces them", "the old rules would capture traffic too";
    CAPTURE_RULE_ORDER: Benign, [], "pilot-agent does not compare the order of rules", "this agent compares the order too", "the first matching rule decides";
    CAPTURE_FAILURE: Benign, [], "if pilot-agent fails midway, the rules stay half done", "this agent undoes its changes", "traffic is never captured in part";
    CAPTURE_CLEANUP: Surprising, [Set("--cleanup-only")], "with `--cleanup-only`, pilot-agent removes the rules that the same arguments set up, ignores errors, and leaves the routes", "this agent removes all rules of Istio by any back end, DNS rules since Istio 1.8, and the routes. This agent reports errors, except for IPv6 where Istio has no rules", "the arguments of the earlier run are often not known", "rules of another Istio are removed too";
    CAPTURE_FORCE: Benign, [Set("--force-apply")], "pilot-agent's `--force-apply` fails if the rules are equal", "this agent sets up equal rules again", "the flag asks for that";
    CAPTURE_TPROXY_RULE: Benign, [], "pilot-agent adds another `ip rule` with each run in mode TPROXY", "this agent keeps one rule", "one rule is enough";
    NFTABLES_ANOTHER_RUN: Benign, [Set("--native-nftables")], "with `--native-nftables`, another run of pilot-agent leaves the rules of tables that the run does not need", "this agent replaces all tables in one transaction", "rules of an earlier mode do not capture traffic";
    NFTABLES_DRY_RUN: Benign, [Set("--native-nftables --dry-run")], "pilot-agent applies the rules of `--native-nftables` even with `--dry-run`", "this agent prints the rules", "a dry run changes nothing";
    NFTABLES_WITHOUT_IPV6: Benign, [Set("--native-nftables")], "in a pod without IPv6, pilot-agent's rules of `--native-nftables` capture IPv6 too if they do not name an address", "this agent does not capture IPv6 then, as with iptables", "Envoy does not listen on IPv6";
    NFTABLES_DNS: Benign, [Set("--native-nftables")], "in a pod without IPv6, pilot-agent's `--native-nftables` fails if all DNS servers have IPv6 addresses", "this agent captures no DNS then", "the pod starts";
    CAPTURE_VERIFY: Benign, [Set("--verify")], "pilot-agent does not have `--verify`", "`--verify` of this agent says how the live rules differ. It exits with 3 if a rule is missing, extra or misplaced, or if a rule of others comes first", "an operator can check a running pod";
    CAPTURE_ADMIN_PORT: Benign, [Set("--protect-admin")], "pilot-agent does not have `--protect-admin`", "`--protect-admin` of this agent resets connections of applications to Envoy's admin port", "the admin port can stop Envoy";
    CAPTURE_OWNER_GROUPS: Benign, [Set("ISTIO_OUTBOUND_OWNER_GROUPS")], "pilot-agent accepts at most 64 groups in `ISTIO_OUTBOUND_OWNER_GROUPS`", "this agent accepts as many as iptables does", "a further limit is not needed";
    CAPTURE_DRY_RUN: Benign, [Set("--dry-run")], "with `--dry-run`, pilot-agent writes the rules to its log and to `DRY_RUN_FILE_PATH`", "this agent writes them to standard output, and replaces the file as a whole", "other programs can read the output";
    }
    "Flags, configuration and bootstrap" {
    UNKNOWN_FLAG: Benign, [UnknownFlag], "pilot-agent silently ignores an unknown flag of `proxy` and the word after it", "this agent ignores the flag, names it in the log with the nearest known flag, and keeps the node type", "an old template still starts, and its author sees which flag has no effect";
    VARIABLE_WITHOUT_EFFECT: Benign, [VariableWithoutEffect], "some variables of pilot-agent set Go's runtime, Google's credentials or limits of sockets", "this agent accepts them without effect; [settings](settings.md) has the reasons", "this agent does not have the parts that they set";
    FLAG_WITHOUT_EFFECT: Benign, [Set("--log_stacktrace_level"), Set("--vklog"), Set("UNSAFE_PILOT_ENABLE_RUNTIME_ASSERTIONS"), Set("--log_rotate"), Set("--log_rotate_max_age"), Set("--log_rotate_max_backups"), Set("--log_rotate_max_size")], "these settings of pilot-agent, some of them of older releases, set stack traces, further logs, internal assertions and rotated log files", "this agent accepts them without effect", "this agent has none of these";
    NODE_TYPES: Benign, [], "pilot-agent accepts `proxy ztunnel` and `proxy agentgateway`", "this agent rejects both by name", "these proxies are separate programs";
    WAIT: Benign, [], "pilot-agent's `wait` pauses for one period before each check", "this agent's `wait` checks at once, and then after a tenth of the time waited. The period is the longest pause", "the other containers of the pod start sooner";
    BOOTSTRAP_TEMPLATE: Harmful, [Problem(codes::BOOTSTRAP_TEMPLATE_SET)], "pilot-agent executes a custom bootstrap template in Go's template language (`proxyBootstrapTemplatePath`, `ISTIO_BOOTSTRAP`)", "this agent rejects it by name and does not start", "this agent does not contain that language", "pods with a custom template do not start: use `customConfigFile` or `ISTIO_BOOTSTRAP_OVERRIDE`";
    CONFIGURATION_ERROR: Harmful, [Problem(codes::SETTING_INVALID)], "pilot-agent reports the first configuration error, and reads some values of the wrong form as zero", "this agent reports all errors at once, with member and line. A value of the wrong form is an error", "one restart is enough to find all errors", "a pod with such a value does not start: `preflight` lists the value";
    STATUS_PORT_VALUE: Benign, [Problem(codes::STATUS_PORT_ANNOTATION)], "pilot-agent switches the status port off if `status.sidecar.istio.io/port` is not a number", "this agent logs a warning and uses the configured port", "a typo does not make a pod unready";
    STATISTICS_INTERVALS: Benign, [Set("sidecar.istio.io/statsFlushInterval"), Set("sidecar.istio.io/statsEvictionInterval")], "pilot-agent writes the flush interval in Go's notation, which Envoy rejects below a second and from a minute on. It rounds the eviction interval down to seconds, and crashes at a flush interval of zero with an eviction interval", "this agent writes exact intervals in seconds, and does not crash", "Envoy accepts them";
    COLLECTOR_TLS: Benign, [], "for TLS of collectors without a CA, pilot-agent writes a form that Envoy rejects", "this agent writes the system's roots, or with `insecureSkipVerify` no verification", "Envoy accepts this form";
    METRICS_SERVICE_ADDRESS: Benign, [Set("envoyMetricsServiceAddress")], "pilot-agent crashes if `envoyMetricsServiceAddress` is set and `envoyMetricsService` is not", "this agent uses the address", "the setting is valid";
    STACKDRIVER: Benign, [Set("tracing.stackdriver")], "pilot-agent does not start with `tracing.stackdriver` outside Google Cloud", "this agent starts without a tracer, as both agents do inside Google Cloud", "the setting has no effect anywhere";
    IPV6_FIRST: Benign, [Set("ISTIO_DUAL_STACK")], "in a pod with two address families, IPv6 first, pilot-agent polls Envoy's admin port on `127.0.0.1`", "this agent polls it on `::1`", "Envoy's admin port listens on `::1`";
    BOOTSTRAP_FILES: Benign, [Set("tracing.lightstep")], "pilot-agent writes the bootstrap and the token of `tracing.lightstep` in place, readable by all, and leaves the token behind", "this agent moves complete files into place. The token has mode 0600 and is removed with the bootstrap", "other users do not read the token, and Envoy does not read half a file";
    LOAD_STATISTICS: Benign, [Problem(codes::LOAD_STATS_CONFIG_INVALID)], "pilot-agent copies `ISTIO_META_LOAD_STATS_CONFIG_JSON` to the bootstrap, and Envoy fails if the value is not valid JSON", "this agent reports an error that names the variable", "the cause is visible";
    UNKNOWN_MEMBER: Benign, [Problem(codes::MEMBER_UNKNOWN)], "pilot-agent silently ignores unknown members of ProxyConfig", "this agent ignores them, and names them in the log with their line and the nearest known member", "a typo is visible";
    MESH_FILE: Benign, [], "pilot-agent checks all members of the mesh file, as istiod does", "this agent reads `defaultConfig` only", "the other members are for istiod";
    REPEATED_MEMBER: Benign, [Problem(codes::MEMBER_REPEATED)], "pilot-agent uses the last of repeated members of ProxyConfig", "this agent uses the last one too, and names it in the log", "a mistake is visible";
    STATSD_NAME: Benign, [], "pilot-agent tries to resolve the name of the statsd server for 15 s", "this agent tries for 2 s", "statistics do not delay the start";
    LOG_LEVELS: Benign, [], "pilot-agent sets log levels at its start", "this agent can also change levels while it runs (`/debug/logging`), also for a limited time. It refuses the level `none`, and logs each change", "an operator can examine a fault without a restart";
    LOG_LENGTH: Benign, [], "pilot-agent logs long texts, such as a `Location` header, in full", "this agent cuts the middle out of texts of more than 1 KiB, and names the number of missing bytes", "a client cannot fill the disk of the node";
    LOG_READER: Benign, [], "a log reader that stalls blocks pilot-agent", "this agent buffers 256 KiB of lines, drops and counts further ones, and waits 1 s for the reader when it exits", "probes and signals are not blocked";
    }
    "Status port, probes and health" {
    STATUS_PORT_IN_USE: Surprising, [], "if another process uses the status port, pilot-agent logs that, and the pod is never ready", "this agent exits with 255 before Envoy starts", "the error is visible", "the container restarts instead of staying unready";
    STATUS_PORT_DRAIN: Benign, [], "pilot-agent closes the status port when the drain begins", "this agent serves it to the end, with readiness 503", "probes and metrics of the last seconds are answered";
    READINESS_BODY: Benign, [], "pilot-agent answers a failed readiness check with an empty body", "this agent names the cause in the body. Kubernetes' events do not show the body; the log, `doctor` and `pilot-agent request --debug-port=15020 GET healthz/ready` do", "an operator finds the cause";
    READINESS_WITHOUT_ENVOY: Benign, [], "once Envoy has been ready, pilot-agent's readiness check does not look at Envoy's process", "this agent answers 503 while it stops, and without an Envoy process", "a pod without Envoy is not ready";
    READINESS_LOG: Benign, [], "pilot-agent logs a failed readiness check at each probe", "this agent logs it when the cause changes", "`pilot-agent wait` asks more often here";
    AGENT_METRICS: Benign, [], "pilot-agent answers `/metrics/agent` with 404", "this agent serves its own metrics there", "the page is cheap, and does not depend on Envoy";
    CONTROL_WITHOUT_ENVOY: Benign, [], "in pilot-agent without Envoy, the handlers of `/drain` and `/quitquitquit` crash", "in this agent both work without Envoy", "proxyless pods can use them";
    CONTROL_ACCESS: Benign, [], "pilot-agent lets every process of the pod call `/drain` and `/quitquitquit`", "this agent does too, unless `ISTIO_AGENT_CONTROL_USERS` names users", "jobs use these paths";
    DEBUG_ACCESS: Surprising, [], "pilot-agent lets every process of the pod call `/debug/…`", "this agent lets root, its own user and the users in `ISTIO_AGENT_DEBUG_USERS` call these paths; `any` allows every user. The kernel reports the caller's user. An application that runs as root is not kept out", "an application must neither read the agent's state nor change its log", "scripts of other users are refused: list the users in `ISTIO_AGENT_DEBUG_USERS`";
    PPROF: Surprising, [], "pilot-agent serves Go's profiles at `/debug/pprof`", "this agent answers 404", "this agent does not use Go", "profiling scripts fail: use `perf` with `pilot-agent.debug`";
    LOOPBACK_PAGES: Surprising, [], "at `/debug/…`, `/drain` and `/quitquitquit`, pilot-agent accepts any `Host` and `Origin`, and callers from 127.0.0.6", "this agent answers 403 to a `Host` with a name other than `localhost`, to a foreign `Origin`, and to callers from 127.0.0.6", "a web page must not call a forwarded port, and clients must not call the pages through Envoy", "calls through another name are refused: use `localhost` or an IP address";
    DRAIN_PLAN: Benign, [], "pilot-agent answers `GET /drain` with 405", "this agent answers with the plan of the shutdown and its progress, as JSON", "an operator sees how long a shutdown takes";
    PROBE_TIMEOUT: Harmful, [ProbeWithoutTimeout], "in pilot-agent an application probe without `timeoutSeconds` has no time limit, and fails at once over gRPC", "in this agent it has the kubelet's default of 1 s, and a lifecycle hook has an hour", "no probe hangs", "slow probes fail after 1 s, as without Istio: set `timeoutSeconds`";
    PROBE_ANSWERS: Benign, [], "from probed and scraped applications, pilot-agent accepts any number of headers within 10 MB, and TLS 1.2 with CBC and SHA-1", "this agent accepts 24,576 headers within 1 MiB, and only cipher suites with AEAD", "the libraries have these limits";
    REQUEST_PORT: Benign, [], "pilot-agent's `request` refuses a status port other than 15020, so the drain hook of a native sidecar with another status port fails", "this agent's `request` also accepts the status port that the pod configures", "the drain hook works";
    HEALTH_TLS: Benign, [Set("readinessProbe.httpGet.scheme")], "pilot-agent verifies the certificate of a `readinessProbe` over HTTPS against the system's roots", "this agent does not verify the certificate, as the kubelet does not", "the workload's certificate is for its own clients";
    HEALTH_SOURCE: Surprising, [Set("readinessProbe.tcpSocket"), Set("readinessProbe.grpc")], "traffic capture hands pilot-agent's connection for `readinessProbe.tcpSocket` or `readinessProbe.grpc` to Envoy, which always accepts", "this agent connects from 127.0.0.6 or ::6, as for HTTP, so capture does not take the connection", "the workload itself is checked", "a workload that does not accept connections is unhealthy now";
    HEALTH_CRASH: Benign, [Set("readinessProbe.grpc")], "pilot-agent crashes if `readinessProbe.grpc` answers anything other than SERVING, or if `readinessProbe` has no kind of check", "this agent treats the workload as unhealthy in the first case, and does not start in the second", "a health check must not stop the traffic";
    HEALTH_AT_END: Benign, [Set("readinessProbe")], "when pilot-agent stops, the last result of `readinessProbe` remains valid", "this agent reports the workload as unhealthy as soon as the agent stops or Envoy drains", "callers leave before the listeners close";
    }
    "Metrics" {
    METRICS_ONE_FAMILY: Benign, [], "pilot-agent declares a metric family from two sources twice, which strict parsers reject", "this agent declares it once, with all samples. It drops and counts an identical series of a later source", "one name must not cost all metrics";
    METRICS_ENCODING: Surprising, [], "pilot-agent compresses with gzip or zstd, and prefers zstd if the scraper likes both", "this agent compresses with gzip only", "all usual scrapers accept gzip", "a scraper that accepts zstd only gets a page without compression";
    METRICS_TIMEOUT: Surprising, [], "pilot-agent does not limit a scrape if the scraper sends no time limit", "this agent's limit is then 10 s (`ISTIO_AGENT_SCRAPE_TIMEOUT`)", "a target that hangs does not hold up the page", "without a time limit from the scraper, pages that take longer than 10 s are cut: raise `ISTIO_AGENT_SCRAPE_TIMEOUT`";
    METRICS_MALFORMED_LINES: Surprising, [], "pilot-agent keeps malformed lines, and Prometheus rejects the whole page", "this agent leaves out malformed samples, and HELP, TYPE and UNIT lines with a wrong name, and counts them. A sample with a malformed exemplar loses only the exemplar", "one line must not cost all metrics", "a metric with a name such as `disk-0` is missing: rename it";
    METRICS_CODING: Benign, [], "pilot-agent copies the bytes of a target's page in deflate, br, zstd or compress, and Prometheus rejects the merged page", "in this agent the target fails, and the log names the coding. Both agents ignore a value that is not a coding (`UTF-8`)", "one target must not cost all metrics";
    METRICS_END: Benign, [], "if one of several OpenMetrics targets does not end with `# EOF`, pilot-agent's page is in OpenMetrics", "this agent's page is in text, without timestamps and exemplars of OpenMetrics targets. A page that is too large to buffer stays in OpenMetrics", "the target may have sent text";
    METRICS_LOOP: Benign, [], "pilot-agent endlessly scrapes a target that is its own page or redirects to it", "this agent answers the inner scrape with 508, and the target counts as failed", "one scrape must not become thousands";
    METRICS_BROKEN_OFF: Benign, [], "if a target breaks off, pilot-agent drops it, or with a single target serves half a line", "this agent keeps the complete lines in text, and aborts the response in OpenMetrics", "no half line appears, and no series vanishes unnoticed";
    METRICS_ONE_TARGET: Benign, [], "in pilot-agent the older settings for port and path override a single entry in `targets`", "this agent uses the entry", "`targets` is the newer setting";
    METRICS_ACCEPT: Benign, [], "pilot-agent replaces the weights in `Accept`, counting down from the number of remaining entries", "this agent passes the weights on unchanged", "the application sees the preferences of the scraper";
    }
    "DNS" {
    DNS_ONE_NAME: Benign, [], "of several hosts with one name, pilot-agent answers with any, and after each push maybe with another", "this agent answers with the host of that name, then with short forms, then with further hosts. Among equals the first in order wins", "the same question has the same answer";
    DNS_RECURSION: Benign, [], "pilot-agent's answers about the mesh say that recursion is not available", "this agent's answers say that it is available", "the DNS standards ask for this";
    DNS_EDNS: Benign, [], "pilot-agent's answers about the mesh have no EDNS record, and its other answers have the record of the resolver", "each answer of this agent has the agent's record if the question has one. Another EDNS version gets BADVERS", "each server answers for itself (RFC 6891)";
    DNS_EDNS_OPTIONS: Surprising, [], "pilot-agent passes on EDNS options, such as cookies and client subnet, in both directions", "this agent does not pass them on", "options are for direct neighbours: after a resolver's cookie, c-ares discards answers without one", "resolvers do not see a client subnet";
    DNS_EDNS_REJECTED: Benign, [], "if a resolver rejects EDNS (FORMERR, NOTIMP), pilot-agent passes that answer to the client", "this agent asks the resolver again without EDNS", "the agent itself speaks EDNS, so the client would not ask again";
    DNS_WILDCARD: Benign, [], "for a wildcard host with the search domain appended, pilot-agent's answer is a CNAME to `*.…`", "this agent's answer has the addresses under the name in the question", "clients reject such a CNAME";
    DNS_DELTA_TABLE: Benign, [Set("ISTIO_META_DELTA_NDS")], "pilot-agent subscribes to a delta name table and reads a response as an empty table", "this agent does not subscribe to it. It rejects such a response and keeps the last table", "names of the mesh would fail";
    DNS_CASE: Benign, [], "pilot-agent writes names in answers about the mesh in lower case", "this agent uses the case of the question, and lower case for CNAME targets", "other DNS servers do the same";
    DNS_ANY: Benign, [], "pilot-agent forwards ANY queries for names of the mesh", "this agent answers with the addresses of both families", "resolvers would answer NXDOMAIN";
    DNS_CLASSES: Benign, [], "pilot-agent treats every class as IN", "this agent forwards classes other than IN and ANY", "the name table is about class IN";
    DNS_TCP: Benign, [], "pilot-agent closes a TCP connection after 128 queries", "this agent does not close it, and serves at most 256 connections", "clients do not have to reconnect, and the memory is bounded";
    DNS_WAITING_QUERIES: Benign, [], "pilot-agent does not limit the number of queries that wait for resolvers", "this agent lets 1024 queries per socket wait, and answers further ones with SERVFAIL", "a resolver that hangs cannot fill the memory";
    DNS_RESOLVER_ERRORS: Surprising, [Set("ISTIO_META_DNS_CAPTURE")], "if a resolver answers SERVFAIL, REFUSED or NOTIMP, pilot-agent passes that answer to the client", "this agent asks the other resolvers as well, for a second at most", "one broken resolver does not fail a lookup", "if a split-horizon resolver refuses a name on purpose, another resolver may answer";
    DNS_TIMEOUT: Benign, [Set("DNS_FORWARD_TIMEOUT")], "in pilot-agent `DNS_FORWARD_TIMEOUT` limits the query to each resolver, and twice as long for TCP", "in this agent it limits the query to all resolvers together", "clients do not wait longer";
    DNS_IDENTICAL_QUERIES: Benign, [], "pilot-agent forwards each of several identical queries at the same time", "this agent forwards one of them; `istio_agent_dns_upstream_*` count one", "resolvers have less load";
    DNS_RESOLV_CONF: Benign, [], "pilot-agent reads resolv.conf once, and the file may name the agent itself", "this agent follows changes of the file and leaves out its own addresses", "queries do not loop";
    DNS_LOST_PACKETS: Benign, [], "pilot-agent sends a query to a resolver once", "this agent sends it again after 300 ms and later, to other resolvers if there are any", "a lost packet does not fail a lookup";
    DNS_ALL_ADDRESSES: Benign, [], "to listen at all addresses (`0.0.0.0`, `[::]`), pilot-agent opens one socket for both families", "this agent opens a socket for each address of both families that exists at its start", "an answer comes from the address that was asked";
    DNS_MISSING_ADDRESS: Benign, [], "pilot-agent does not start if the machine lacks a listen address of DNS, such as `::1` without IPv6", "this agent leaves the address out if others remain", "the other addresses work";
    DNS_CACHE: Benign, [], "pilot-agent does not cache answers", "this agent does not either, unless a variable `ISTIO_AGENT_DNS_CACHE_…` is set", "within its TTL an address may already belong to another pod";
    DNS_WITHOUT_RESOLV_CONF: Benign, [], "pilot-agent does not start without resolv.conf", "this agent logs a warning and answers names of the mesh", "the mesh does not need other resolvers";
    }
    "Wasm" {
    WASM_RETRY: Benign, [], "after a failed fetch, pilot-agent's RBAC filter stays until the next push", "this agent fetches the module again after up to 2 s, 4 s and so on, up to 5 min, and then sends the response to Envoy again; istiod sees a second ACK. Until then, only a push that changes the object causes another fetch", "the module works as soon as its server does";
    WASM_ORDER: Benign, [], "of two responses that wait for modules, pilot-agent may send the older one last", "this agent sends only the newer one. With delta discovery a resource waits for its own module only", "Envoy would return to the older configuration";
    WASM_OVER_RESTART: Benign, [], "pilot-agent fetches all modules again after a restart of the container", "this agent uses a module on disk once its digest is checked. It looks up a tag with the policy `Always` again", "a container can restart while the registry is unreachable";
    WASM_EXPIRY: Benign, [Set("WASM_MODULE_EXPIRY")], "pilot-agent removes modules that no response has used for `WASM_MODULE_EXPIRY`, even if Envoy uses them", "this agent does not remove a module that a resource uses. It removes others earlier beyond `ISTIO_AGENT_WASM_CACHE_MAX_BYTES`", "Envoy reads the module again with each new listener";
    WASM_MOVED_TAG: Benign, [], "after it has removed a module, pilot-agent fails with a checksum mismatch if the tag has moved", "this agent fetches the module", "the tag is valid";
    WASM_INDEX: Benign, [], "from an index, pilot-agent takes the manifest for linux/amd64", "this agent takes the manifest that the digest names, or else the manifest for linux/amd64", "a digest names one manifest";
    WASM_SIZE: Surprising, [Set("ISTIO_WASM_MAX_BINARY_SIZE_BYTES")], "pilot-agent silently truncates a module at `ISTIO_WASM_MAX_BINARY_SIZE_BYTES`", "this agent reports an error, also for an archive that is truncated or unpacks to more", "a truncated module does not work", "a module that was silently truncated fails now: raise the limit";
    WASM_BASIC_AUTHENTICATION: Benign, [], "pilot-agent rejects registries with Basic authentication", "this agent sends them the credentials", "such registries are common";
    WASM_PLAIN_REGISTRY: Surprising, [Set("WASM_INSECURE_REGISTRIES")], "pilot-agent uses HTTP for a registry without TLS", "this agent does too. It sends credentials only if the registry is local or in `WASM_INSECURE_REGISTRIES`", "an attacker could ask for the credentials", "plain registries with credentials fail: list them in `WASM_INSECURE_REGISTRIES`";
    WASM_CREDENTIAL_HELPERS: Surprising, [], "pilot-agent runs the programs that `credHelpers` in a pull secret names", "this agent ignores `credHelpers`", "a pull secret must not run programs", "a secret with helpers only gives no credentials: put them into the secret";
    WASM_CREDENTIAL_PATHS: Benign, [], "of the keys with a path in a pull secret, pilot-agent uses the key of the host, or else a random path of that host", "this agent uses the longest key that leads to the image, then the host, and never another path", "the password of another team would be sent";
    WASM_TOKEN_SERVER: Benign, [], "pilot-agent rejects a token server at the registry's own private address", "this agent sends it the request", "it is the registry itself";
    WASM_PROXY: Benign, [Set("HTTPS_PROXY"), Set("BLOCKED_CIDRS_IN_WASM_FETCH")], "with `HTTPS_PROXY`, pilot-agent leaves URLs with addresses of `BLOCKED_CIDRS_IN_WASM_FETCH` to the proxy", "this agent rejects such URLs, and leaves names to the proxy", "the agent can check addresses, and only the proxy resolves names";
    WASM_ATTEMPTS: Benign, [Set("WASM_HTTP_REQUEST_MAX_RETRIES")], "over HTTP, pilot-agent makes up to `WASM_HTTP_REQUEST_MAX_RETRIES` attempts after errors and statuses from 500; at registries it makes three", "this agent makes up to that number at both, also after 408 and 429", "one setting holds for both";
    WASM_TIMEOUT: Benign, [Set("WASM_HTTP_REQUEST_TIMEOUT")], "in pilot-agent `WASM_HTTP_REQUEST_TIMEOUT` limits a whole HTTP response, and does not apply to registries", "in this agent it limits the time until the response headers arrive. The body has the rest of the plugin's time", "a large module may arrive slowly";
    WASM_LAYERS: Benign, [], "pilot-agent expects layers of the types that belong to the kind of manifest, and two of them in an artifact", "this agent accepts every known type in every manifest, and detects compression by the bytes", "build tools combine them in many ways";
    WASM_TAR: Benign, [], "from a tar over HTTP, pilot-agent takes the first entry", "this agent takes the first file", "the first entry may be a directory";
    WASM_TYPED_STRUCT: Benign, [], "pilot-agent accepts a plugin configuration in a TypedStruct of any type that Istio knows", "this agent accepts protobuf's well-known types, of which Envoy reads StringValue, BytesValue and Struct", "Envoy reads no other types";
    }
}
