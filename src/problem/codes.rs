//! The table of problem codes. A test writes it to `docs/problems.md`.

use super::Level;

/// The texts of a code and what it means for a report.
struct Row {
    name: &'static str,
    section: &'static str,
    level: Level,
    cause: &'static str,
    consequence: &'static str,
    remedy: &'static str,
    hides: &'static [Code],
}

/// Makes an enum of the codes. `level` is an error, and the other cells that may be left out are empty, unless they are
/// given.
macro_rules! codes {
    ($($section:literal { $(
        $code:ident: $name:literal,
        $(level: $level:expr,)?
        cause: $cause:literal,
        $(consequence: $consequence:literal,)?
        remedy: $remedy:literal
        $(, hides: $hides:expr)?;
    )* })*) => {
        /// A kind of problem. Texts begin in lower case and have no full stop, because they are joined by semicolons.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Code {
            $($(#[doc = $cause] $code,)*)*
        }

        impl Code {
            pub const ALL: &[Self] = &[$($(Self::$code,)*)*];

            const fn row(self) -> &'static Row {
                match self {
                    $($(Self::$code => &Row {
                        name: $name,
                        section: $section,
                        level: or!(Level::Error $(, $level)?),
                        cause: $cause,
                        consequence: or!("" $(, $consequence)?),
                        remedy: $remedy,
                        hides: or!(&[] $(, $hides)?),
                    },)*)*
                }
            }
        }
    };
}

/// Returns the second of two values, if there are two.
macro_rules! or {
    ($default:expr) => {
        $default
    };
    ($default:expr, $given:expr) => {
        $given
    };
}

codes! {
    "Settings" {
    SettingInvalid: "SETTING_INVALID",
        cause: "the value of a setting cannot be used",
        consequence: "the agent does not start",
        remedy: "`pilot-agent config` shows where the value comes from";
    SettingReplaced: "SETTING_REPLACED",
        cause: "the value of a setting cannot be used or is overridden",
        consequence: "another value is used",
        remedy: "correct the value; `pilot-agent config` shows where it comes from";
    SettingUnknown: "SETTING_UNKNOWN",
        cause: "a variable that begins with `ISTIO_AGENT_` is unknown",
        consequence: "the variable is ignored",
        remedy: "correct its name, or remove it";
    MemberUnknown: "MEMBER_UNKNOWN",
        cause: "ProxyConfig has no such member",
        consequence: "the member is ignored",
        remedy: "correct its name, or remove it";
    MemberRepeated: "MEMBER_REPEATED",
        cause: "a member of ProxyConfig occurs twice",
        consequence: "the last one counts",
        remedy: "remove one of the two; `pilot-agent config` names the document";
    FlagOverridesConfig: "FLAG_OVERRIDES_CONFIG",
        cause: "a flag overrides a member of ProxyConfig",
        consequence: "the flag is used",
        remedy: "nothing, if the flag is meant; else remove one of the two";
    FileMissing: "FILE_MISSING",
        cause: "a setting names a file that does not exist",
        consequence: "the agent does not start",
        remedy: "mount the file, or correct the setting";
    FileUnreadable: "FILE_UNREADABLE",
        cause: "a file of settings exists and cannot be used",
        consequence: "the agent starts without the file",
        remedy: "correct the file or its permissions";
    FileInvalid: "FILE_INVALID",
        cause: "the content of a file cannot be used",
        remedy: "correct or remove the file";
    BootstrapOverrideUnreadable: "BOOTSTRAP_OVERRIDE_UNREADABLE",
        cause: "the file that `ISTIO_BOOTSTRAP_OVERRIDE` names cannot be used",
        consequence: "Envoy starts without the override",
        remedy: "mount the file, or correct its path or its content";
    ArgumentInvalid: "ARGUMENT_INVALID",
        cause: "an argument cannot be used",
        remedy: "correct the argument; `--help` lists the values";
    FileLine: "FILE_LINE",
        cause: "a line of a file of settings cannot be used",
        consequence: "the line is ignored",
        remedy: "correct the line that the message names";
    InterfacesUnreadable: "INTERFACES_UNREADABLE",
        cause: "the kernel does not list the network interfaces",
        consequence: "the pod's addresses are unknown",
        remedy: "set `INSTANCE_IP` to the pod's address; a seccomp profile may forbid netlink \
            sockets";
    InterfaceUnknown: "INTERFACE_UNKNOWN",
        cause: "the pod does not have an interface that a setting names",
        consequence: "the name is ignored",
        remedy: "correct the name; `ip link` in the pod lists the interfaces";
    WorkloadKeySize: "WORKLOAD_KEY_SIZE",
        cause: "`WORKLOAD_RSA_KEY_SIZE` is not a size that the agent supports",
        consequence: "the agent does not start",
        remedy: "remove the variable: an ECDSA key is smaller and faster";
    StatusPortAnnotation: "STATUS_PORT_ANNOTATION",
        cause: "the annotation `status.sidecar.istio.io/port` is not a port",
        consequence: "the annotation is ignored",
        remedy: "correct the annotation: a number from 0 to 65535";
    BootstrapTemplateSet: "BOOTSTRAP_TEMPLATE_SET",
        cause: "a setting names a template for Envoy's bootstrap",
        consequence: "the agent does not start",
        remedy: "use `customConfigFile` or `ISTIO_BOOTSTRAP_OVERRIDE`; the agent does not read \
            templates";
    AdminSocketUnsupported: "ADMIN_SOCKET_UNSUPPORTED",
        cause: "Envoy's admin interface cannot be on a Unix socket with the settings of this pod",
        consequence: "the agent does not start, because Envoy's admin port (15000) would stay open",
        remedy: "correct the settings that the message names, or remove \
            `ISTIO_ENVOY_ADMIN_TRANSPORT` (the annotation `sidecar.istio.io/adminTransport`) or \
            `ISTIO_AGENT_ADMIN_SOCKET`";
    LoadStatsConfigInvalid: "LOAD_STATS_CONFIG_INVALID",
        cause: "`ISTIO_META_LOAD_STATS_CONFIG_JSON` is not a JSON object",
        consequence: "the agent does not start",
        remedy: "correct the variable, or remove it";
    }

    "Envoy" {
    EnvoyMissing: "ENVOY_MISSING",
        cause: "Envoy's path does not lead to a program",
        consequence: "Envoy does not start",
        remedy: "install Envoy there, or correct `binaryPath` of ProxyConfig",
        hides: NO_ENVOY;
    EnvoyNotExecutable: "ENVOY_NOT_EXECUTABLE",
        cause: "the kernel does not run Envoy's program for the agent's user",
        consequence: "Envoy does not start",
        remedy: "`chmod 755` the file, and mount its volume without `noexec`",
        hides: NO_ENVOY;
    EnvoyWrongArchitecture: "ENVOY_WRONG_ARCHITECTURE",
        cause: "Envoy's program is not a program for this machine",
        consequence: "Envoy does not start",
        remedy: "use an image whose Envoy is built for this architecture (`uname -m`, `file`)",
        hides: NO_ENVOY;
    EnvoyLoaderMissing: "ENVOY_LOADER_MISSING",
        cause: "the loader or interpreter that Envoy's program names does not exist",
        consequence: "Envoy does not start",
        remedy: "use an image with the C library that this Envoy was built for",
        hides: NO_ENVOY;
    EnvoyBootstrapRefused: "ENVOY_BOOTSTRAP_REFUSED",
        cause: "Envoy exits because it cannot use its arguments or its bootstrap",
        remedy: "correct what Envoy's last lines name: bootstrap (`pilot-agent bootstrap`), \
            `ISTIO_BOOTSTRAP_OVERRIDE`, `customConfigFile`, `--proxyLogLevel`, or Envoy's version",
        hides: NO_ENVOY;
    BootstrapMemberIgnored: "BOOTSTRAP_MEMBER_IGNORED",
        level: Level::Warning,
        cause: "Envoy ignores members of its bootstrap that it does not know",
        consequence: "these settings have no effect",
        remedy: "correct the member that Envoy's log names (`unknown field`): \
            `ISTIO_BOOTSTRAP_OVERRIDE` or `customConfigFile` is for another version of Envoy, or \
            misspelled";
    BootstrapHostUnresolved: "BOOTSTRAP_HOST_UNRESOLVED",
        level: Level::Warning,
        cause: "a host that the bootstrap names for tracing, metrics or access logs has no address",
        consequence: "these data are lost",
        remedy: "correct the address in `tracing`, `envoyMetricsService` or \
            `envoyAccessLogService` of ProxyConfig, or the host's DNS record";
    EnvoyCrashed: "ENVOY_CRASHED",
        cause: "Envoy was ended by a signal that the agent did not send",
        remedy: "see Envoy's last lines (`kubectl logs`, with `--previous` if the container has \
            restarted); a backtrace in them is a bug of Envoy or of a filter",
        hides: NO_ENVOY;
    EnvoyOutOfMemory: "ENVOY_OUT_OF_MEMORY",
        cause: "the kernel killed Envoy because the container's memory was used up",
        remedy: "raise the memory limit of the container, or send Envoy fewer services \
            (`pilot-agent scope` writes the Sidecar resource)",
        hides: &[
            Code::DnsNameTableMissing,
            Code::ListenersMissing,
            Code::MemoryUsedUp,
            Code::ReadinessFailed,
        ];
    MemoryUsedUp: "MEMORY_USED_UP",
        cause: "nearly all memory that the container may use is in use",
        consequence: "the kernel kills Envoy or the agent when it is used up",
        remedy: "raise the memory limit of the container (`sidecar.istio.io/proxyMemoryLimit`), or \
            send Envoy fewer services (`pilot-agent scope` writes the Sidecar resource)";
    TasksUsedUp: "TASKS_USED_UP",
        cause: "the container has nearly as many processes and threads as it may",
        consequence: "programs and threads cannot be started",
        remedy: "raise `podPidsLimit` of the kubelet, or find the process that starts them (`ps \
            -eLf`)",
        hides: NO_RESOURCES;
    FilesUsedUp: "FILES_USED_UP",
        cause: "Envoy has nearly as many open files as it may",
        consequence: "Envoy accepts and opens no further connections",
        remedy: "raise the limit of open files (`ulimit -n`) in the node's container runtime, or \
            find out who keeps so many connections (`pilot-agent request GET clusters`)",
        hides: NO_RESOURCES;
    PortsUsedUp: "PORTS_USED_UP",
        cause: "nearly all local ports of the pod are in use",
        consequence: "new connections fail, also of probes and of the doctor",
        remedy: "reuse connections in the application; more ports: `net.ipv4.ip_local_port_range` \
            in the pod's securityContext.sysctls",
        hides: NO_RESOURCES;
    EnvoyUnkillable: "ENVOY_UNKILLABLE",
        cause: "Envoy did not exit after SIGKILL",
        consequence: "the agent exits without it",
        remedy: "restart the node if its disk or network file system hangs",
        hides: NO_ENVOY;
    EnvoyNotStarted: "ENVOY_NOT_STARTED",
        cause: "the agent has not started Envoy yet",
        consequence: "no traffic passes",
        remedy: "wait: the agent first asks the cloud's metadata service; set \
            `CLOUD_PLATFORM=none` if it hangs",
        hides: NO_ENVOY;
    EnvoyStopping: "ENVOY_STOPPING",
        cause: "Envoy drains or stops",
        consequence: "it drains or stops: new connections are refused",
        remedy: "none if the pod is being deleted",
        hides: &[
            Code::ApplicationPortClosed,
            Code::ClusterWarming,
            Code::DnsNameTableMissing,
            Code::ListenersMissing,
            Code::ListenerWarming,
            Code::ProbeFailed,
            Code::ProbeLate,
            Code::ProbePortClosed,
            Code::ProbeStatus,
            Code::ProbeUnknown,
            Code::ReadinessFailed,
            Code::SecretAwaited,
            Code::StandbyAbsent,
            Code::StandbyUnable,
            Code::StandbyUnusable,
        ];
    EnvoyExited: "ENVOY_EXITED",
        cause: "Envoy exited without an error, and the agent did not ask it to",
        consequence: "the agent exits, too",
        remedy: "find who called Envoy's `/quitquitquit` or sent SIGTERM",
        hides: NO_ENVOY;
    AdminSocketUnusable: "ADMIN_SOCKET_UNUSABLE",
        cause: "Envoy's admin interface cannot listen on its Unix socket",
        consequence: "Envoy does not start",
        remedy: "remove what is in the place of the socket; give each agent another `configPath`";
    EnvoyHangs: "ENVOY_HANGS",
        cause: "Envoy's process runs, and its admin port does not answer",
        remedy: "restart the container; `proxyAdminPort` of ProxyConfig must be the admin port of \
            Envoy's bootstrap",
        hides: NO_ENVOY;
    StandbyUnusable: "STANDBY_UNUSABLE",
        cause: "the two containers of a pod that run this agent cannot take over from each other",
        consequence: "the agent does not start",
        remedy: "mount the same volume in memory at `/etc/istio/proxy` in both containers, and run \
            both as the same user (`docs/operations/standby.md`)";
    StandbyAbsent: "STANDBY_ABSENT",
        level: Level::Warning,
        cause: "the other container of the pod is not connected to the agent that serves",
        consequence: "if this container ends, traffic is cut until it has restarted",
        remedy: "see the state and the log of the other container";
    StandbyUnable: "STANDBY_UNABLE",
        level: Level::Warning,
        cause: "the other container of the pod cannot take over while this one serves",
        consequence: "the sidecar cannot be upgraded without a cut",
        remedy: "give both containers the same volumes, also with the roots and the token for \
            istiod, and images whose Envoys have the same hot restart version (`envoy \
            --hot-restart-version`)";
    HandoverFailed: "HANDOVER_FAILED",
        level: Level::Warning,
        cause: "the agent of the other container could not take over",
        consequence: "the container that serves continues, and this build is not tried again; if \
            the other Envoy had started, this one's admin port is closed until a handover or a \
            restart",
        remedy: "correct what the reason names, then change the image of the container that waits";
    HotRestartUnavailable: "HOT_RESTART_UNAVAILABLE",
        level: Level::Warning,
        cause: "Envoy runs without hot restart, because Envoys cannot share memory in `/dev/shm`, \
            or because their sockets have no directory that only Envoy's user can open",
        consequence: "the next restart cuts connections, and no handover to another container is \
            possible",
        remedy: "free space in `/dev/shm`, or mount an emptyDir with `medium: Memory` there in all \
            containers; for the directory, correct its owner and mode, or use a shorter \
            `configPath`";
    HotRestartRefused: "HOT_RESTART_REFUSED",
        cause: "the new inputs of Envoy cannot be used",
        consequence: "current Envoy keeps serving",
        remedy: "correct the inputs; the agent tries again when they change";
    HotRestartFailed: "HOT_RESTART_FAILED",
        cause: "the new Envoy ended or hung before it served",
        consequence: "current Envoy keeps serving; the next restart will be a full one",
        remedy: "see the new Envoy's last lines in the log; a full restart (`kubectl rollout \
            restart`) needs no hot restart";
    ResourceRefused: "RESOURCE_REFUSED",
        cause: "Envoy refused resources of istiod",
        consequence: "Envoy uses the versions that it accepted before; a new Envoy has none, and \
            is not ready",
        remedy: "correct the resource that Envoy's reason names: `istioctl analyze`, EnvoyFilters, \
            versions of istiod and Envoy",
        hides: NO_LISTENERS;
    ResourceRefusedStoredServed: "RESOURCE_REFUSED_STORED_SERVED",
        cause: "a new Envoy refused resources of istiod, and the agent has stored versions of them",
        consequence: "Envoy serves with the stored versions, which an earlier Envoy accepted; pods \
            that store none are not ready",
        remedy: "let the owner of the EnvoyFilter, or of the control plane, correct the resource \
            that Envoy's reason names; `istioctl proxy-status` shows the NACK",
        hides: NO_LISTENERS;
    ListenerWarming: "LISTENER_WARMING",
        cause: "Envoy's listeners wait for a secret, a route or an extension",
        consequence: "these listeners do not serve",
        remedy: "for SdsApi: does the secret exist, and may the proxy's account read it; for \
            default and ROOTCA of another process (such as a SPIRE agent): see its refusals in \
            Envoy's log (`StreamSecrets`); for RDS: does istiod send the route (`istioctl \
            proxy-status`)",
        hides: &[Code::ReadinessFailed];
    ClusterWarming: "CLUSTER_WARMING",
        cause: "Envoy's clusters wait for endpoints, a secret or a name",
        consequence: "requests to these clusters fail",
        remedy: "does istiod send their endpoints (`istioctl proxy-status`), do their secrets \
            exist, are their names resolved",
        hides: NO_LISTENERS;
    SecretAwaited: "SECRET_AWAITED",
        cause: "Envoy waits for secrets",
        consequence: "listeners and clusters that use them do not work",
        remedy: "does the secret exist, and may the proxy's account read it; for default and \
            ROOTCA see the workload certificate, or, if another process (such as a SPIRE agent) \
            serves it, that process' refusals in Envoy's log (`StreamSecrets`)",
        hides: NO_LISTENERS;
    EnvoyNotInspected: "ENVOY_NOT_INSPECTED",
        level: Level::Warning,
        cause: "a page of Envoy's admin port is too large or too late",
        consequence: "that part is not checked",
        remedy: "run it again when the node is less busy";
    PortTaken: "PORT_TAKEN",
        cause: "another process listens at a port that Envoy needs",
        remedy: "end that process, or move it to another port: 15000 to 15090 belong to the \
            sidecar",
        hides: &[Code::EnvoyBootstrapRefused, Code::ReadinessFailed];
    StatusPortTaken: "STATUS_PORT_TAKEN",
        cause: "the agent cannot listen at its status port",
        consequence: "the agent does not start",
        remedy: "end the process that has the port, or move the agent with `statusPort` of \
            ProxyConfig (a port below 1024 takes NET_BIND_SERVICE)",
        hides: &[Code::AgentUnknown];
    ApplicationPortClosed: "APPLICATION_PORT_CLOSED",
        cause: "Envoy cannot connect to the application, because nothing listens at its port",
        consequence: "requests to the pod get 503 (UF)",
        remedy: "let the application listen at that port on the pod's address, or correct \
            `targetPort` of the Service";
    UpstreamUnreachable: "UPSTREAM_UNREACHABLE",
        level: Level::Warning,
        cause: "Envoy and the agent cannot connect to an endpoint of a service",
        consequence: "requests to it get 503 (UF)",
        remedy: "is the peer ready, does a NetworkPolicy or firewall block the port";
    PeerCertificateRefused: "PEER_CERTIFICATE_REFUSED",
        level: Level::Warning,
        cause: "Envoy does not accept the certificate of a peer",
        consequence: "requests to it get 503 (UF)",
        remedy: "restart the peer if its certificate has expired; else compare roots and trust \
            domains of both meshes (`istioctl proxy-config secret POD`), and `subjectAltNames` of \
            the DestinationRule or ServiceEntry";
    PeerRefusesHandshake: "PEER_REFUSES_HANDSHAKE",
        level: Level::Warning,
        cause: "a peer ends handshakes (TLS) of Envoy",
        consequence: "requests to it get 503 (UF, UC)",
        remedy: "compare roots and trust domains of both sides (`istioctl proxy-config secret \
            POD`); if the peer has no sidecar, set `tls.mode: DISABLE` in a DestinationRule for it";
    PeerInPlainText: "PEER_IN_PLAIN_TEXT",
        level: Level::Warning,
        cause: "a peer answers handshakes (TLS) of Envoy in plain text",
        consequence: "requests to it get 503 (UF)",
        remedy: "give the peer a sidecar, or set `tls.mode: DISABLE` in a DestinationRule for it; \
            check that the port is the peer's TLS port";
    PeerExpectsTls: "PEER_EXPECTS_TLS",
        level: Level::Warning,
        cause: "Envoy sends plain text to a peer that accepts mutual TLS, and most requests fail",
        consequence: "a peer with PeerAuthentication STRICT closes the connections",
        remedy: "if the peer is STRICT: remove `tls.mode: DISABLE` from the DestinationRule, or \
            set PeerAuthentication to PERMISSIVE; else see the log of the peer's application";
    CircuitBreakerOpen: "CIRCUIT_BREAKER_OPEN",
        level: Level::Warning,
        cause: "Envoy refused calls to a service, because they were more than its connection pool \
            allows",
        consequence: "these requests get 503 (UO)",
        remedy: "raise `trafficPolicy.connectionPool` of the service's DestinationRule, or run \
            more pods of the service";
    RequestsFail: "REQUESTS_FAIL",
        level: Level::Warning,
        cause: "connections to an endpoint work, and most requests to it fail",
        consequence: "the clients get errors of the application, 503 (UC) or 504 (UT)",
        remedy: "see the log of the application at that endpoint: it answers with 5xx, closes \
            connections, or is slower than the route's timeout";
    NoHealthyEndpoint: "NO_HEALTHY_ENDPOINT",
        // Most meshes have such services: a service may be scaled to zero.
        level: Level::Ok,
        cause: "services of the mesh have no endpoint, or none that is healthy",
        consequence: "requests to them get 503 (UH)",
        remedy: "start ready pods of them: do the selectors match (`kubectl get endpointslices`), \
            are the pods ready, do they answer";
    InboundNotMatched: "INBOUND_NOT_MATCHED",
        level: Level::Warning,
        cause: "Envoy closed inbound connections that no filter chain accepts",
        consequence: "the callers' connections are reset",
        remedy: "plain text under STRICT mTLS: give the caller a sidecar, or set \
            PeerAuthentication to PERMISSIVE";
    HandshakesFailed: "HANDSHAKES_FAILED",
        level: Level::Warning,
        cause: "handshakes (TLS) with Envoy failed",
        consequence: "the callers' connections are reset",
        remedy: "compare certificates, roots and trust domains of both sides";
    RbacDenied: "RBAC_DENIED",
        level: Level::Warning,
        cause: "an AuthorizationPolicy denied requests",
        consequence: "the callers get 403",
        remedy: "see `istioctl experimental authz check` and the access log";
    TaskExited: "TASK_EXITED",
        cause: "a part of the agent exited unexpectedly",
        consequence: "the agent drains Envoy and exits",
        remedy: "report this as a bug, with `pilot-agent support-bundle`";
    }

    "Sockets and directories" {
    SocketPathTooLong: "SOCKET_PATH_TOO_LONG",
        cause: "the path of a socket is longer than a socket address",
        consequence: "the agent does not start",
        remedy: "use a shorter `configPath` or `WORKLOAD_IDENTITY_SOCKET_FILE`",
        hides: NO_CONFIGURATION;
    SocketTaken: "SOCKET_TAKEN",
        cause: "another process listens on a socket of the agent, or has removed it",
        consequence: "Envoy does not reach the agent",
        remedy: "find the process that shares the directory with this container, end it, and \
            restart this container",
        hides: NO_CONFIGURATION;
    SocketDirectory: "SOCKET_DIRECTORY",
        cause: "a directory with content, a volume or a file is where a socket belongs",
        remedy: "remove it, or correct the volume that holds it",
        hides: NO_CONFIGURATION;
    SocketHangs: "SOCKET_HANGS",
        cause: "the process behind a socket does not answer",
        consequence: "Envoy cannot use the socket",
        remedy: "restart the process if this continues",
        hides: NO_CONFIGURATION;
    SocketNotServed: "SOCKET_NOT_SERVED",
        cause: "the process that should serve the workload's secrets does not serve them",
        consequence: "Envoy gets no certificate; one that it has can be used until it expires",
        remedy: "check that process (such as a SPIRE agent) and the volume of the socket; for \
            certificates of istiod, unset `ISTIO_AGENT_EXTERNAL_SDS` and \
            `WORKLOAD_IDENTITY_SOCKET_FILE`",
        hides: NO_CONFIGURATION;
    DirectoryForbidden: "DIRECTORY_FORBIDDEN",
        cause: "the agent may not use a file or directory, because it belongs to another user",
        remedy: "give the agent's user access (`fsGroup` of the pod, `chown`), or run the agent as \
            the owner";
    DirectoryReadOnly: "DIRECTORY_READ_ONLY",
        cause: "a directory of the agent is read-only",
        remedy: "mount a writable volume there, such as the emptyDir of Istio's injection";
    DiskFull: "DISK_FULL",
        cause: "the disk or the volume of a directory is full",
        remedy: "free space, or raise `sizeLimit` of the volume",
        hides: &[
            Code::CertificateCacheUnwritable,
            Code::HotRestartUnavailable,
            Code::KeptConfigUnwritable,
            Code::OutputCertsUnwritable,
        ];
    FileUnusable: "FILE_UNUSABLE",
        cause: "a file, directory or socket cannot be read or made",
        remedy: "correct owner and mode of the path, and mount a writable volume there";
    }

    "Certificates and secrets" {
    CertificateRequestFailed: "CERTIFICATE_REQUEST_FAILED",
        cause: "istiod or another authority did not sign the certificate",
        remedy: "istiod logs why: kubectl logs -n istio-system deployment/istiod",
        hides: NO_CERTIFICATE;
    CertificateAnswerUnusable: "CERTIFICATE_ANSWER_UNUSABLE",
        cause: "the authority's answer is not a certificate chain for the agent's key",
        consequence: "the answer is not used",
        remedy: "istiod logs which signer it uses: kubectl logs -n istio-system deployment/istiod",
        hides: NO_CERTIFICATE;
    CertificateKeyFailed: "CERTIFICATE_KEY_FAILED",
        cause: "a private key or a certificate request cannot be made",
        consequence: "there is no new certificate",
        remedy: "correct `ECC_SIGNATURE_ALGORITHM`, `ECC_CURVE` or `WORKLOAD_RSA_KEY_SIZE`",
        hides: NO_CERTIFICATE;
    CertificateNotIssued: "CERTIFICATE_NOT_ISSUED",
        cause: "the authority has not answered the first certificate request yet",
        consequence: "Envoy waits for the certificate",
        remedy: "wait for the answer; if none comes, correct what is reported about istiod",
        hides: NO_SECRET;
    CertificateExpired: "CERTIFICATE_EXPIRED",
        cause: "a certificate has expired",
        consequence: "peers reject it",
        remedy: "renew the certificate; if it is new, set this machine's clock (compare `date -u`)",
        hides: CERTIFICATE_REFUSED;
    CertificateNotYetValid: "CERTIFICATE_NOT_YET_VALID",
        cause: "a certificate is not valid yet",
        consequence: "peers reject it",
        remedy: "set the clock of this machine or of the authority (compare `date -u`)",
        hides: CERTIFICATE_REFUSED;
    CertificateExpiresSoon: "CERTIFICATE_EXPIRES_SOON",
        level: Level::Warning,
        cause: "a certificate is in the last tenth of its life",
        consequence: "peers reject it once it has expired",
        remedy: "renew the certificate";
    CertificateChainRejected: "CERTIFICATE_CHAIN_REJECTED",
        cause: "peers that trust the mesh's roots reject the certificate chain",
        consequence: "mutual TLS with them fails",
        remedy: "let a root of the mesh sign the chain; for one of istiod, compare the ConfigMap \
            istio-ca-root-cert with istiod's CA",
        hides: CERTIFICATE_REFUSED;
    CertificateForOtherIdentity: "CERTIFICATE_FOR_OTHER_IDENTITY",
        cause: "the authority signed for another identity than the requested one",
        consequence: "the certificate is used, and policies see the other identity",
        remedy: "correct `TRUST_DOMAIN`, `POD_NAMESPACE` or `SERVICE_ACCOUNT`";
    CertificateCacheUnusable: "CERTIFICATE_CACHE_UNUSABLE",
        cause: "the certificate of an earlier start cannot be used",
        consequence: "a new one is requested",
        remedy: "nothing: the new certificate replaces it";
    CertificateCacheUnwritable: "CERTIFICATE_CACHE_UNWRITABLE",
        cause: "the certificate cannot be stored for the next start",
        consequence: "a restart requests a new one",
        remedy: "let the directory be in memory (emptyDir with `medium: Memory`), and let the \
            agent's user own it";
    CertificatesLeftOut: "CERTIFICATES_LEFT_OUT",
        cause: "a file or bundle of certificates has a part that is not a certificate",
        consequence: "the part is left out",
        remedy: "remove the part from the file or bundle";
    ClocksDiffer: "CLOCKS_DIFFER",
        cause: "a new certificate is not valid by this clock",
        consequence: "it is used anyway",
        remedy: "compare the clocks (`date -u`) of this machine and of istiod's node";
    MeshBundleInvalid: "MESH_BUNDLE_INVALID",
        cause: "istiod sent a trust bundle that does not hold certificates",
        remedy: "correct `caCertificates` in istiod's MeshConfig";
    OutputCertsUnwritable: "OUTPUT_CERTS_UNWRITABLE",
        cause: "the directory that `OUTPUT_CERTS` names cannot be written",
        consequence: "applications do not get the certificate",
        remedy: "mount a directory there that the agent's user can write, or correct \
            `OUTPUT_CERTS`";
    RevocationListEmpty: "REVOCATION_LIST_EMPTY",
        level: Level::Warning,
        cause: "the file of certificate revocation lists does not have a list",
        consequence: "Envoy gets none until the file changes",
        remedy: "write a list into the file, or remove it";
    RevocationListUnusable: "REVOCATION_LIST_UNUSABLE",
        cause: "the file of certificate revocation lists does not have a valid list of every \
            authority that signed the workload's chain",
        consequence: "Envoy rejects all peers of that authority",
        remedy: "write a current list of every authority of the chain into the file, in PEM or DER \
            (ConfigMap istio-ca-crl), or set `PILOT_ENABLE_CA_CRL=false`",
        hides: &[Code::HandshakesFailed];
    RootsExpired: "ROOTS_EXPIRED",
        cause: "the root that signed the workload's chain has expired",
        consequence: "Envoy and its peers reject each other",
        remedy: "renew the root of the mesh (Secret cacerts), and restart istiod; if it is new, \
            set this machine's clock (compare `date -u`)",
        hides: &[Code::HandshakesFailed];
    SdsSocketMissing: "SDS_SOCKET_MISSING",
        cause: "a setting names the SDS socket of another process, which does not exist",
        consequence: "the agent does not start",
        remedy: "start that process first, or set `ISTIO_AGENT_EXTERNAL_SDS=wait`";
    SdsSocketStale: "SDS_SOCKET_STALE",
        cause: "a socket that no process serves cannot be removed",
        consequence: "the agent does not start",
        remedy: "remove the socket, or let the agent's user write to its directory";
    SdsSocketUnusable: "SDS_SOCKET_UNUSABLE",
        cause: "the socket for secrets from files cannot be created",
        consequence: "Envoy does not get secrets from files",
        remedy: "let the agent's user write to its directory";
    SdsSocketAbsent: "SDS_SOCKET_ABSENT",
        cause: "no process serves the SDS socket yet",
        consequence: "Envoy waits, and the agent serves secrets from files only",
        remedy: "start the process that serves it (`ISTIO_AGENT_EXTERNAL_SDS`)";
    SecretFileMissing: "SECRET_FILE_MISSING",
        cause: "a file of a secret does not exist or is empty",
        consequence: "listeners and clusters that use the secret do not work",
        remedy: "mount the file (annotation `sidecar.istio.io/userVolumeMount`), or correct its \
            path in the DestinationRule or Gateway; `FILE_MOUNTED_CERTS` means the workload's own \
            files",
        hides: NO_SECRET;
    SecretFileUnreadable: "SECRET_FILE_UNREADABLE",
        cause: "a file of a secret exists and cannot be read",
        consequence: "listeners and clusters that use the secret do not work",
        remedy: "let the agent's user read the file",
        hides: NO_SECRET;
    SecretFileUnusable: "SECRET_FILE_UNUSABLE",
        cause: "a file of a secret does not hold what it should",
        remedy: "write certificates in PEM, and the key of the first one, into the files",
        hides: NO_SECRET;
    SecretFilesNotWatched: "SECRET_FILES_NOT_WATCHED",
        cause: "the kernel does not report changes to the files of secrets",
        consequence: "the files are read every 5 s instead",
        remedy: "raise `fs.inotify.max_user_instances` and `fs.inotify.max_user_watches` on the \
            node";
    SecretFilesTooMany: "SECRET_FILES_TOO_MANY",
        cause: "Envoy asks for more secrets from files than the agent reads",
        consequence: "listeners and clusters that use the secret do not work",
        remedy: "use fewer secrets from files",
        hides: &[Code::ReadinessFailed];
    SecretNameUnknown: "SECRET_NAME_UNKNOWN",
        cause: "Envoy asks for a secret by a name that the agent does not serve",
        consequence: "Envoy does not get it",
        remedy: "correct the name in the EnvoyFilter or bootstrap that uses it",
        hides: NO_SECRET;
    SecretUpdateRefused: "SECRET_UPDATE_REFUSED",
        level: Level::Warning,
        cause: "Envoy refused a new version of a secret",
        consequence: "Envoy keeps the version that it has",
        remedy: "correct the file or the key that Envoy's reason names";
    SecretRefused: "SECRET_REFUSED",
        cause: "Envoy refused a secret, and has no version of it",
        consequence: "the pod is not ready",
        remedy: "correct the file or the key that Envoy's reason names",
        hides: NO_SECRET;
    }

    "DNS" {
    DnsResolvConfUnreadable: "DNS_RESOLV_CONF_UNREADABLE",
        cause: "the file with the pod's resolvers cannot be used",
        consequence: "the pod's resolvers are unknown",
        remedy: "mount the file, or set `ISTIO_AGENT_RESOLV_CONF` to another file",
        hides: &[Code::IstiodNameNotResolved];
    DnsPortTaken: "DNS_PORT_TAKEN",
        cause: "another process uses the address of the agent's DNS server",
        consequence: "the agent does not start",
        remedy: "stop that process, or set `DNS_PROXY_ADDR` to another address";
    DnsListenFailed: "DNS_LISTEN_FAILED",
        cause: "the agent cannot listen for DNS queries",
        consequence: "the agent does not start",
        remedy: "set `DNS_PROXY_ADDR` to an address of this pod, with a port above 1023 unless the \
            agent is root";
    DnsServerSilent: "DNS_SERVER_SILENT",
        cause: "the agent's DNS server does not answer",
        consequence: "applications cannot resolve names",
        remedy: "restart the container istio-proxy";
    DnsResolverMissing: "DNS_RESOLVER_MISSING",
        cause: "the pod has no resolver other than this agent",
        consequence: "only names of the mesh are resolved",
        remedy: "name the resolvers of the cluster in `dnsConfig.nameservers` of the pod, or in \
            the file that `ISTIO_AGENT_RESOLV_CONF` names",
        hides: &[Code::IstiodNameNotResolved];
    DnsResolverInvalid: "DNS_RESOLVER_INVALID",
        level: Level::Warning,
        cause: "a nameserver line of the pod's resolvers is not an IP address, is this agent, or \
            follows 16 others",
        consequence: "it is left out",
        remedy: "correct `dnsConfig.nameservers` of the pod, or the file that \
            `ISTIO_AGENT_RESOLV_CONF` names",
        hides: &[Code::IstiodNameNotResolved];
    DnsResolverSilent: "DNS_RESOLVER_SILENT",
        cause: "a resolver of the pod does not answer in time",
        consequence: "applications may not resolve names",
        remedy: "check that DNS server, and that network policies allow UDP and TCP to its port",
        hides: &[Code::IstiodNameNotResolved];
    DnsResolverUnreachable: "DNS_RESOLVER_UNREACHABLE",
        cause: "queries to a resolver of the pod cannot be sent, or are rejected",
        consequence: "applications may not resolve names",
        remedy: "correct `dnsConfig.nameservers` of the pod, or start that DNS server",
        hides: &[Code::IstiodNameNotResolved];
    DnsResolverRefuses: "DNS_RESOLVER_REFUSES",
        cause: "a resolver of the pod answers SERVFAIL or REFUSED",
        consequence: "applications may not resolve names",
        remedy: "read the log of that DNS server",
        hides: &[Code::IstiodNameNotResolved];
    DnsLoop: "DNS_LOOP",
        cause: "the agent's own queries come back to it",
        consequence: "names outside the mesh are not resolved",
        remedy: "set `--proxy-uid` of istio-init to the user of the container istio-proxy, so that \
            its queries are not captured";
    DnsNameTableMissing: "DNS_NAME_TABLE_MISSING",
        cause: "istiod has not sent the names of the mesh (NDS)",
        consequence: "names that only the mesh knows are not resolved",
        remedy: "istiod sends them when Envoy is connected: compare `istioctl proxy-status`",
        hides: &[Code::ReadinessFailed];
    DnsNotCaptured: "DNS_NOT_CAPTURED",
        cause: "the rules do not redirect DNS queries to the agent, although \
            `ISTIO_META_DNS_CAPTURE` is true",
        consequence: "names that only the mesh knows are not resolved",
        remedy: "set `ISTIO_META_DNS_CAPTURE` in `proxyMetadata` of ProxyConfig, so that \
            istio-init or istio-cni sees it, and delete the pod";
    }

    "Traffic capture" {
    CaptureOptionInvalid: "CAPTURE_OPTION_INVALID",
        cause: "the value of an option of `istio-iptables` cannot be used",
        consequence: "no rule is created",
        remedy: "correct the option, or the annotation of the pod that it comes from \
            (`traffic.sidecar.istio.io/…`)";
    CaptureOptionReplaced: "CAPTURE_OPTION_REPLACED",
        cause: "the value of an option of `istio-iptables` cannot be used",
        consequence: "another value is used",
        remedy: "correct the option, or the annotation of the pod that it comes from \
            (`traffic.sidecar.istio.io/…`)";
    CaptureModeUnknown: "CAPTURE_MODE_UNKNOWN",
        cause: "the option `--istio-inbound-interception-mode` is unknown",
        consequence: "the mode REDIRECT is used",
        remedy: "set `sidecar.istio.io/interceptionMode` to REDIRECT, TPROXY or NONE";
    CaptureOptionMissing: "CAPTURE_OPTION_MISSING",
        cause: "`--verify` or `--explain` lacks an option that names the pod's rules",
        remedy: "add the arguments of the container istio-init or istio-validation, or of the CNI \
            plugin";
    CaptureNoAddress: "CAPTURE_NO_ADDRESS",
        cause: "the pod has loopback addresses only",
        consequence: "no rule is created",
        remedy: "check the CNI plugin: `kubectl get pod -o wide` shows the address";
    CapturePermission: "CAPTURE_PERMISSION",
        cause: "the container lacks the capability `NET_ADMIN`",
        consequence: "the rules cannot be read or changed",
        remedy: "add `NET_ADMIN` and `NET_RAW` to the capabilities of the container istio-init, or \
            use Istio's CNI plugin. For `--verify`, use a debug container with both";
    CaptureProgramMissing: "CAPTURE_PROGRAM_MISSING",
        cause: "a program that reads or changes rules is not installed",
        consequence: "the rules cannot be read or changed",
        remedy: "install iptables (nft or legacy) in the image, or use `--native-nftables` with \
            nft";
    CaptureProgramFailed: "CAPTURE_PROGRAM_FAILED",
        cause: "a program that reads or changes rules fails",
        remedy: "its message names the cause; usual ones are a missing capability, `NET_ADMIN` or \
            `NET_RAW`, or a missing kernel module";
    CaptureRulesUnreadable: "CAPTURE_RULES_UNREADABLE",
        cause: "the rules or tables cannot be read",
        remedy: "run the command as root with NET_ADMIN in the pod's network namespace (`kubectl \
            debug --profile=netadmin`)";
    CaptureRoutesFailed: "CAPTURE_ROUTES_FAILED",
        cause: "the routes of captured traffic cannot be set up",
        consequence: "no rule is created",
        remedy: "use REDIRECT (`sidecar.istio.io/interceptionMode`) on nodes without policy \
            routing, which TPROXY needs; TPROXY also needs NET_ADMIN";
    CaptureLocked: "CAPTURE_LOCKED",
        cause: "another process changes the rules of this pod",
        consequence: "no rule is created",
        remedy: "stop that process, or wait for its end";
    CaptureValidationFailed: "CAPTURE_VALIDATION_FAILED",
        cause: "`--run-validation` finds that traffic is not redirected to Envoy",
        consequence: "the pod is not ready for Istio",
        remedy: "run it as the user of `--proxy-uid`; with Istio CNI, the pod may be older than \
            istio-cni on its node: delete it, or set `cni.repair.deletePods=true`";
    CaptureRulesMissing: "CAPTURE_RULES_MISSING",
        cause: "no rule redirects the pod's traffic to Envoy",
        consequence: "traffic bypasses Envoy",
        remedy: "read the log of the container istio-init, or of istio-cni on the node; then \
            delete the pod, which creates the rules again",
        hides: &[Code::CaptureBypassed, Code::DnsNotCaptured];
    CaptureRulesChanged: "CAPTURE_RULES_CHANGED",
        cause: "rules exist, and traffic does not reach Envoy",
        consequence: "traffic bypasses Envoy or is lost",
        remedy: "read the log of the container istio-init, or of istio-cni on the node; then \
            delete the pod, which creates the rules again";
    CaptureBypassed: "CAPTURE_BYPASSED",
        level: Level::Warning,
        cause: "a connection bypasses Envoy, or may do so because of a rule that is not Istio's",
        consequence: "without Envoy they have no mutual TLS, no policy and no telemetry",
        remedy: "nothing, if they are meant to, such as by `excludeInboundPorts`; else remove the \
            rule that is named, or compare the rules by `istio-iptables --verify`, and delete the \
            pod, which creates them again";
    CaptureRulesEarlier: "CAPTURE_RULES_EARLIER",
        cause: "a rule of an earlier version of Istio redirects DNS queries",
        consequence: "queries may be lost",
        remedy: "run `pilot-agent istio-clean-iptables` in the network namespace, or delete the \
            pod";
    CaptureProxyUid: "CAPTURE_PROXY_UID",
        cause: "Envoy's own traffic is captured",
        consequence: "its connections come back to Envoy",
        remedy: "set `--proxy-uid` of istio-init to the user of the container istio-proxy, or \
            `runAsUser` of the container to 1337",
        hides: &[Code::CaptureRulesChanged];
    }

    "Probes and metrics" {
    ProbePortClosed: "PROBE_PORT_CLOSED",
        cause: "the application does not listen on the port of its probe",
        consequence: "the probe fails",
        remedy: "let the application listen on that port at all addresses (0.0.0.0), or correct \
            the port of the probe in the pod, which `ISTIO_KUBE_APP_PROBERS` repeats";
    ProbeLate: "PROBE_LATE",
        cause: "the application does not answer a probe in time",
        consequence: "the probe fails",
        remedy: "read the application's log, or raise `timeoutSeconds` of the probe";
    ProbeStatus: "PROBE_STATUS",
        cause: "the application answers a probe with a status other than 2xx and 3xx",
        consequence: "the probe fails",
        remedy: "read the application's log";
    ProbeFailed: "PROBE_FAILED",
        cause: "a probe of the application fails",
        consequence: "the probe fails",
        remedy: "read the application's log, and compare the probe in the pod with what the port \
            serves";
    ProbeUnknown: "PROBE_UNKNOWN",
        cause: "`ISTIO_KUBE_APP_PROBERS` does not have the path of a probe",
        consequence: "the probe fails",
        remedy: "inject the pod again: its probes and `ISTIO_KUBE_APP_PROBERS` were written at \
            different times";
    ReadinessFailed: "READINESS_FAILED",
        cause: "the kubelet cannot see that Envoy is ready",
        consequence: "the pod is not ready",
        remedy: "see Envoy's and the agent's log (`kubectl logs POD -c istio-proxy`), and ask \
            again in some seconds";
    ScrapeFailed: "SCRAPE_FAILED",
        cause: "metrics of Envoy or of the application cannot be fetched",
        consequence: "the page lacks these samples",
        remedy: "for the application, correct `prometheus.io/port` and `prometheus.io/path` of the \
            pod; for Envoy see its log";
    ScrapeTlsUnusable: "SCRAPE_TLS_UNUSABLE",
        cause: "a file of `ISTIO_AGENT_SCRAPE_TLS` cannot be used",
        consequence: "the page lacks the samples of this target",
        remedy: "correct the file; it is read again at the next scrape";
    ScrapeLate: "SCRAPE_LATE",
        cause: "metrics of Envoy or of the application arrive too late",
        consequence: "the page lacks these samples",
        remedy: "raise `scrape_timeout` of the scraper, or reduce the metrics";
    ScrapePageInvalid: "SCRAPE_PAGE_INVALID",
        cause: "a page of metrics is too large or malformed",
        consequence: "the page lacks the rest of these samples",
        remedy: "correct the page that the application serves";
    }

    "Wasm modules" {
    WasmConfiguration: "WASM_CONFIGURATION",
        cause: "the configuration of a Wasm filter does not say where its module is",
        remedy: "correct `url` and `imagePullSecret` of the WasmPlugin";
    WasmNotAllowed: "WASM_NOT_ALLOWED",
        cause: "a setting of the agent forbids a Wasm module",
        remedy: "pin the module by `sha256`, or change `ISTIO_AGENT_WASM_ALLOWED_REGISTRIES` or \
            `ISTIO_AGENT_WASM_REQUIRE_DIGEST`";
    WasmDownloadFailed: "WASM_DOWNLOAD_FAILED",
        cause: "a Wasm module cannot be downloaded",
        remedy: "check `url` of the WasmPlugin, and that the pod may connect to its server";
    WasmManifestFailed: "WASM_MANIFEST_FAILED",
        cause: "the manifest of a Wasm image cannot be fetched",
        remedy: "check `url` and `imagePullSecret` of the WasmPlugin, and that the pod may connect \
            to the registry";
    WasmChecksum: "WASM_CHECKSUM",
        cause: "a Wasm module has another checksum than configured",
        remedy: "correct `sha256` of the WasmPlugin";
    WasmInvalid: "WASM_INVALID",
        cause: "what was downloaded is not a Wasm module",
        remedy: "correct `url` of the WasmPlugin, or the image";
    WasmCache: "WASM_CACHE",
        cause: "the directory of Wasm modules cannot be written",
        remedy: "mount a writable volume with free space at that directory";
    }

    "istiod and the certificate authority" {
    IstiodAddressInvalid: "ISTIOD_ADDRESS_INVALID",
        cause: "the address of a control plane is not `host:port`",
        consequence: "the control plane is not used",
        remedy: "write the address as host:port, such as istiod.istio-system.svc:15012",
        hides: NO_ISTIOD;
    IstiodNameNotResolved: "ISTIOD_NAME_NOT_RESOLVED",
        cause: "the name of a control plane has no address",
        remedy: "check the name, the pod's resolvers in /etc/resolv.conf, and the service: \
            `kubectl get service -n istio-system`",
        hides: NO_CONNECTION;
    IstiodConnectionRefused: "ISTIOD_CONNECTION_REFUSED",
        cause: "nothing listens on the address of a control plane",
        remedy: "check that istiod is ready, and that the port is right: `kubectl get \
            pods,endpoints -n istio-system`",
        hides: NO_CONNECTION;
    IstiodNotReachable: "ISTIOD_NOT_REACHABLE",
        cause: "the address of a control plane does not answer",
        remedy: "a NetworkPolicy, a firewall or a security group may drop the packets: `kubectl \
            get networkpolicy -A`",
        hides: NO_CONNECTION;
    IstiodNoRoute: "ISTIOD_NO_ROUTE",
        cause: "the pod has no route to the address of a control plane",
        remedy: "give the pod an address of that family (IPv4 or IPv6), or use a name with \
            addresses of the other family",
        hides: NO_CONNECTION;
    IstiodProxyUnreachable: "ISTIOD_PROXY_UNREACHABLE",
        cause: "the HTTP proxy on the way to a control plane does not answer",
        remedy: "correct `HTTPS_PROXY`, or add the host of the control plane to `NO_PROXY`",
        hides: NO_CONNECTION;
    IstiodProxyRefused: "ISTIOD_PROXY_REFUSED",
        cause: "the HTTP proxy does not open a tunnel to a control plane",
        remedy: "allow it in the proxy, or add the host of the control plane to `NO_PROXY`",
        hides: NO_CONNECTION;
    IstiodTimeout: "ISTIOD_TIMEOUT",
        cause: "a control plane accepts a connection and then says nothing",
        remedy: "check that istiod is not overloaded, and that the port is right: `kubectl get \
            pods,endpoints -n istio-system`",
        hides: NO_CONNECTION;
    IstiodRootsUnusable: "ISTIOD_ROOTS_UNUSABLE",
        cause: "the file of root certificates for a control plane cannot be used",
        consequence: "the control plane cannot be verified",
        remedy: "mount the ConfigMap istio-ca-root-cert, which istiod writes to each namespace: \
            `kubectl get configmap istio-ca-root-cert`",
        hides: NO_ISTIOD;
    SystemRootsUnusable: "SYSTEM_ROOTS_UNUSABLE",
        cause: "the operating system has no usable root certificates",
        consequence: "servers cannot be verified",
        remedy: "install the package ca-certificates, or set `SSL_CERT_FILE`",
        hides: NO_ISTIOD;
    IstiodSanInvalid: "ISTIOD_SAN_INVALID",
        cause: "the expected name of a control plane is neither a DNS name nor an IP address",
        remedy: "correct `ISTIOD_SAN` or the address",
        hides: NO_ISTIOD;
    IstiodCertificateUntrusted: "ISTIOD_CERTIFICATE_UNTRUSTED",
        cause: "no root certificate has signed the certificate of a control plane",
        remedy: "compare the roots with the ConfigMap istio-ca-root-cert of istiod's cluster; the \
            address may lead to another mesh, or to a proxy that terminates TLS",
        hides: NO_ISTIOD;
    IstiodCertificateName: "ISTIOD_CERTIFICATE_NAME",
        cause: "the certificate of a control plane is for other names",
        remedy: "use one of these names as address; for discoveryAddress, `ISTIOD_SAN` may name \
            the expected one",
        hides: NO_ISTIOD;
    IstiodCertificateExpired: "ISTIOD_CERTIFICATE_EXPIRED",
        cause: "the certificate of a control plane has expired, or the clock of this machine is \
            ahead",
        remedy: "compare this clock (`date -u`) with others; if it is right: `kubectl rollout \
            restart deployment/istiod -n istio-system`",
        hides: NO_ISTIOD;
    IstiodCertificateNotYetValid: "ISTIOD_CERTIFICATE_NOT_YET_VALID",
        cause: "the certificate of a control plane is not valid yet, because clocks differ",
        remedy: "correct the clock of this machine (`date -u`) or the one of istiod's node",
        hides: NO_ISTIOD;
    IstiodCertificateUnusable: "ISTIOD_CERTIFICATE_UNUSABLE",
        cause: "the certificate of a control plane cannot be used",
        remedy: "issue another certificate",
        hides: NO_ISTIOD;
    IstiodTlsRefused: "ISTIOD_TLS_REFUSED",
        cause: "a control plane ends the TLS handshake",
        remedy: "check that this is istiod's TLS port (15012); `kubectl logs -n istio-system \
            deployment/istiod` gives the reason",
        hides: NO_CONNECTION;
    IstiodNotTls: "ISTIOD_NOT_TLS",
        cause: "the server does not speak TLS",
        remedy: "use istiod's TLS port (15012); for plain text (15010) set \
            `controlPlaneAuthPolicy: NONE`",
        hides: NO_CONNECTION;
    IstiodNotGrpc: "ISTIOD_NOT_GRPC",
        cause: "the server does not speak HTTP/2, or does not answer in gRPC",
        remedy: "use istiod's gRPC port (15012, or 15010 without TLS); a load balancer or proxy at \
            this address must pass HTTP/2, and have a healthy istiod behind it",
        hides: NO_CONNECTION;
    IstiodConnectionLost: "ISTIOD_CONNECTION_LOST",
        cause: "a control plane, or something on the way to it, closes a new connection",
        remedy: "check that istiod is ready (`kubectl get pods,endpoints -n istio-system`); a load \
            balancer without a ready istiod, a proxy or a firewall may close connections as well",
        hides: NO_CONNECTION;
    ClientCertificateRefused: "CLIENT_CERTIFICATE_REFUSED",
        cause: "a control plane refuses the client certificate of `PROV_CERT`",
        consequence: "the token is used instead",
        remedy: "renew the certificate, and compare its root with the mesh's",
        hides: NO_ISTIOD;
    ClientCertificateUnusable: "CLIENT_CERTIFICATE_UNUSABLE",
        cause: "the files of `PROV_CERT` are not a key and its certificate",
        consequence: "no connection is made",
        remedy: "replace both files",
        hides: NO_ISTIOD;
    TlsUnusable: "TLS_UNUSABLE",
        cause: "the cryptographic module does not support the settings of TLS",
        consequence: "no connection is made",
        remedy: "correct `COMPLIANCE_POLICY`",
        hides: NO_ISTIOD;
    AgentStopping: "AGENT_STOPPING",
        cause: "the agent stops while a call waits for a connection",
        remedy: "nothing: the container ends";
    IstiodTokenMissing: "ISTIOD_TOKEN_MISSING",
        cause: "the file of the token for istiod cannot be read",
        consequence: "istiod is called without a token",
        remedy: "mount the projected volume istio-token at /var/run/secrets/tokens, as sidecar \
            injection does; on a machine copy a new token",
        hides: NO_TOKEN;
    IstiodTokenInvalid: "ISTIOD_TOKEN_INVALID",
        cause: "the file of the token for istiod does not hold a token",
        consequence: "istiod is called without a token",
        remedy: "mount the projected volume istio-token at /var/run/secrets/tokens, as sidecar \
            injection does; on a machine copy a new token",
        hides: NO_TOKEN;
    IstiodTokenExpired: "ISTIOD_TOKEN_EXPIRED",
        cause: "the token for istiod has expired",
        remedy: "the kubelet renews the file: `kubectl describe pod` shows its events; on a \
            machine run `istioctl x workload entry configure`; compare the clock (`date -u`) with \
            others",
        hides: NO_TOKEN;
    IstiodTokenAudience: "ISTIOD_TOKEN_AUDIENCE",
        cause: "istiod refuses a token that is for another audience",
        remedy: "set the audience of the projected volume istio-token to istio-ca, or add the \
            token's audience to `TOKEN_AUDIENCES` of istiod",
        hides: NO_TOKEN;
    IstiodUnauthenticated: "ISTIOD_UNAUTHENTICATED",
        cause: "istiod does not accept the token or the client certificate",
        remedy: "`kubectl logs -n istio-system deployment/istiod` gives the reason; istiod must \
            know the cluster that `ISTIO_META_CLUSTER_ID` names (`istioctl remote-clusters`) and \
            reach its API server",
        hides: NO_ISTIOD;
    IstiodPermissionDenied: "ISTIOD_PERMISSION_DENIED",
        cause: "istiod knows the caller and does not allow the call",
        remedy: "compare `TRUST_DOMAIN` with trustDomain of the mesh (`kubectl get configmap istio \
            -n istio-system -o yaml`); `kubectl logs -n istio-system deployment/istiod` gives the \
            reason",
        hides: NO_ISTIOD;
    IstiodWithoutDelta: "ISTIOD_WITHOUT_DELTA",
        cause: "istiod does not know incremental discovery (delta xDS)",
        consequence: "Envoy gets no configuration",
        remedy: "set `ISTIO_DELTA_XDS=false`",
        hides: NO_ISTIOD;
    IstiodWithoutCa: "ISTIOD_WITHOUT_CA",
        cause: "the server does not sign certificates",
        remedy: "set `CA_ADDR` to the certificate authority, or enable istiod's \
            (`ENABLE_CA_SERVER`)",
        hides: NO_ISTIOD;
    IstiodUnavailable: "ISTIOD_UNAVAILABLE",
        cause: "a call ended because istiod or the connection to it did",
        remedy: "`kubectl get pods -n istio-system`; a restart of istiod needs no action",
        hides: NO_ISTIOD;
    IstiodNoAnswer: "ISTIOD_NO_ANSWER",
        cause: "istiod does not answer a call in time",
        remedy: "check that istiod is not overloaded: `kubectl top pods -n istio-system`",
        hides: NO_ISTIOD;
    DiscoveryStalled: "DISCOVERY_STALLED",
        cause: "istiod does not answer on Envoy's discovery stream, although the connection lives",
        consequence: "changes of the configuration may not reach Envoy; at most once an hour, the \
            agent ends the stream, and Envoy opens another one",
        remedy: "if it happens again, check proxies and load balancers on the way to istiod, and \
            whether istiod is overloaded: `kubectl top pods -n istio-system`";
    SubscriptionUnanswered: "SUBSCRIPTION_UNANSWERED",
        cause: "istiod answers on Envoy's discovery stream, but not for the named resources",
        consequence: "Envoy does not get these resources, or no new versions of them",
        remedy: "check that they exist, such as the Secret that a `credentialName` names; `kubectl \
            logs -n istio-system deployment/istiod` may give the reason";
    ListenersMissing: "LISTENERS_MISSING",
        cause: "istiod has sent Envoy no listeners, or has not answered its request for clusters \
            or listeners",
        consequence: "Envoy serves no traffic, and captured connections fail",
        remedy: "compare `istioctl proxy-status`; is the pod's namespace among discoverySelectors \
            of the mesh, does a Sidecar or EnvoyFilter resource take the listeners away, and does \
            `kubectl logs -n istio-system deployment/istiod` name this pod?",
        hides: &[Code::ReadinessFailed];
    IstiodError: "ISTIOD_ERROR",
        cause: "istiod refuses a call for another reason",
        remedy: "`kubectl logs -n istio-system deployment/istiod` gives the reason",
        hides: NO_ISTIOD;
    GoogleTokenMissing: "GOOGLE_TOKEN_MISSING",
        cause: "the token of Google's metadata service cannot be read or stored",
        remedy: "give the machine a service account, and the agent write access to the token file",
        hides: NO_ISTIOD;
    ResponseRefused: "RESPONSE_REFUSED",
        cause: "the agent cannot use a response of istiod",
        consequence: "the last one stays in use",
        remedy: "`kubectl logs -n istio-system deployment/istiod` shows what it sends";
    OnDemandOff: "ON_DEMAND_OFF",
        cause: "`ISTIO_AGENT_ON_DEMAND_CLUSTERS` is set for a workload that cannot use it",
        consequence: "Envoy gets all clusters",
        remedy: "remove `ISTIO_AGENT_ON_DEMAND_CLUSTERS`; it needs a sidecar whose Envoy the agent \
            runs, delta xDS, and Envoy 1.39.0 or later";
    OnDemandListenerRefused: "ON_DEMAND_LISTENER_REFUSED",
        cause: "Envoy rejects a listener into which the agent has inserted the discovery of \
            clusters",
        consequence: "Envoy gets the listener as istiod has sent it, and the clusters that it \
            names",
        remedy: "report it with the listener (`istioctl proxy-config listeners -o yaml`); without \
            `ISTIO_AGENT_ON_DEMAND_CLUSTERS` nothing is inserted";
    OnDemandClusterWarms: "ON_DEMAND_CLUSTER_WARMS",
        cause: "Envoy has not answered a response with clusters for 1 s",
        consequence: "Envoy loads no other cluster until it answers; the agent withdraws the new \
            ones, and offers them again after 30 s",
        remedy: "check that the endpoints, host names and secrets of the named clusters exist";
    KeptConfigUnwritable: "KEPT_CONFIG_UNWRITABLE",
        cause: "the directory that `ISTIO_AGENT_KEEP_CONFIG` names cannot be written",
        consequence: "a restarted container waits for istiod",
        remedy: "mount a directory there that the agent's user can write, or correct \
            `ISTIO_AGENT_KEEP_CONFIG`";
    KeptConfigUnusable: "KEPT_CONFIG_UNUSABLE",
        cause: "stored configuration cannot be served",
        consequence: "Envoy waits for istiod",
        remedy: "delete the files of the directory in `ISTIO_AGENT_KEEP_CONFIG`";
    }

    "Doctor" {
    AgentNotRunning: "AGENT_NOT_RUNNING",
        cause: "no process listens on the agent's status port, and no check found the reason",
        remedy: "start the agent, or look at the end of its log (`kubectl logs --previous`, \
            `journalctl --unit istio-agent`)";
    AgentSilent: "AGENT_SILENT",
        cause: "the agent does not answer on its status port",
        consequence: "only the configuration is checked",
        remedy: "run `doctor` again; if the agent is still silent, restart the container";
    AgentUnknown: "AGENT_UNKNOWN",
        cause: "the answer on the status port is not a doctor's report",
        consequence: "the checks are made from outside",
        remedy: "use the `pilot-agent` of the version that runs, or find the other process that \
            has the port";
    PodNotReady: "POD_NOT_READY",
        cause: "the agent reports that the pod is not ready, and no check found the reason",
        consequence: "the pod gets no traffic",
        remedy: "see Envoy's and the agent's log (`kubectl logs POD -c istio-proxy`), and ask \
            again in some seconds";
    ChecksLate: "CHECKS_LATE",
        cause: "some checks of the doctor did not finish in time",
        consequence: "their results are unknown",
        remedy: "run `doctor` again: the node, its disk or its network is slow";
    }

    "Status port" {
    CallerRefused: "CALLER_REFUSED",
        cause: "a user requests a page of the status port that is only for other users",
        remedy: "repeat the request as root or as the agent's user, or add the user to \
            `ISTIO_AGENT_DEBUG_USERS` or `ISTIO_AGENT_CONTROL_USERS`";
    CallerUnknown: "CALLER_UNKNOWN",
        cause: "the kernel does not report the user of a connection to the status port",
        consequence: "the request is refused",
        remedy: "set `ISTIO_AGENT_DEBUG_USERS=any` or `ISTIO_AGENT_CONTROL_USERS=any` to allow \
            every user";
    CallerForeign: "CALLER_FOREIGN",
        cause: "another web page sends a request to a debug page (foreign `Host` or `Origin`)",
        consequence: "the request is refused",
        remedy: "open the page at localhost or at an IP address";
    StatusPortExhausted: "STATUS_PORT_EXHAUSTED",
        cause: "the agent cannot accept a connection to the status port",
        consequence: "the agent closes an idle connection; probes and scrapes can fail",
        remedy: "raise the limit of open files";
    DrainUnconfirmed: "DRAIN_UNCONFIRMED",
        cause: "Envoy did not confirm `/drain` in time",
        consequence: "the request is answered before Envoy drains",
        remedy: "`pilot-agent request --debug-port=15020 GET drain` shows the state of the drain";
    }

    "Logging" {
    LogTargetUnusable: "LOG_TARGET_UNUSABLE",
        cause: "the agent cannot open a file that `--log_target` names",
        consequence: "the agent does not start",
        remedy: "correct `--log_target`, or the permissions of its directory";
    LogSilent: "LOG_SILENT",
        level: Level::Warning,
        cause: "the level of a scope is `none`",
        consequence: "errors of these scopes are not logged",
        remedy: "correct `--log_output_level`, or set a level at `/debug/logging`";
    LogLinesDropped: "LOG_LINES_DROPPED",
        cause: "the reader of the log is slower than the agent",
        remedy: "lower the log level (`--log_output_level`, `--proxyLogLevel`), or speed up the \
            node's disk";
    }

    "Support bundle" {
    BundlePortSilent: "BUNDLE_PORT_SILENT",
        cause: "the agent or Envoy does not answer",
        consequence: "the bundle has no further pages of this port",
        remedy: "`pilot-agent doctor` names the cause";
    BundlePageMissing: "BUNDLE_PAGE_MISSING",
        cause: "the agent or Envoy answers with an error",
        consequence: "the page is not in the bundle",
        remedy: "make another bundle once the agent and Envoy answer";
    BundlePartCut: "BUNDLE_PART_CUT",
        cause: "a page or file is too large, too slow, or not of its usual form",
        consequence: "the end is missing in the bundle",
        remedy: "read the whole page or file in the pod, if its end matters";
    BundleConfigOfCommand: "BUNDLE_CONFIG_OF_COMMAND",
        cause: "the agent does not answer",
        consequence: "the file has the configuration of the `support-bundle` command itself",
        remedy: "run the command in the agent's container, where the agent's environment is the \
            same";
    BundleBootstrapMissing: "BUNDLE_BOOTSTRAP_MISSING",
        cause: "no bootstrap file exists",
        consequence: "the bundle has no bootstrap",
        remedy: "if the agent runs elsewhere, run the command in its working directory";
    BundleBootstrapUnreadable: "BUNDLE_BOOTSTRAP_UNREADABLE",
        cause: "a bootstrap file cannot be read",
        consequence: "the file is not in the bundle",
        remedy: "run the command as root or as the agent's user";
    BundleSettingsLate: "BUNDLE_SETTINGS_LATE",
        cause: "the configuration files are not read in time",
        consequence: "the bundle has the configuration without these files",
        remedy: "check the volumes of the configuration files: a disk or network file system hangs";
    BundleOutputUnusable: "BUNDLE_OUTPUT_UNUSABLE",
        cause: "the support bundle cannot be written",
        consequence: "there is no bundle",
        remedy: "redirect standard output to a file, or give the name of a new file with \
            `--output`";
    }
}

impl Code {
    /// Returns the code with a name, which may come from another version of the agent.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|code| code.name() == name)
    }

    /// Returns the unique and stable name, for which scripts and alerts search.
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the section of the documentation.
    pub const fn section(self) -> &'static str {
        self.row().section
    }

    /// Returns the level of reports, unless a check sets another one.
    pub const fn level(self) -> Level {
        self.row().level
    }

    pub const fn cause(self) -> &'static str {
        self.row().cause
    }

    /// Returns the consequence; empty if the cause or what was found is sufficient.
    pub const fn consequence(self) -> &'static str {
        self.row().consequence
    }

    pub const fn remedy(self) -> &'static str {
        self.row().remedy
    }

    /// Returns the codes that follow from this one. Reports do not list them beside it.
    pub const fn hides(self) -> &'static [Self] {
        self.row().hides
    }
}

/// What is missing without a running Envoy.
const NO_ENVOY: &[Code] =
    &[Code::DnsNameTableMissing, Code::ListenersMissing, Code::ReadinessFailed];

/// What is missing without the clusters and listeners of istiod.
const NO_LISTENERS: &[Code] = &[Code::ListenersMissing, Code::ReadinessFailed];

/// What waits for a secret.
const NO_SECRET: &[Code] = &[Code::ClusterWarming, Code::ReadinessFailed, Code::SecretAwaited];

/// What is missing if Envoy gets neither configuration nor secrets.
const NO_CONFIGURATION: &[Code] = &[
    Code::ClusterWarming,
    Code::DnsNameTableMissing,
    Code::ListenersMissing,
    Code::ListenerWarming,
    Code::ReadinessFailed,
    Code::SecretAwaited,
];

/// What is missing without an istiod that accepts this agent.
const NO_ISTIOD: &[Code] = &[
    Code::CertificateNotIssued,
    Code::CertificateRequestFailed,
    Code::ClusterWarming,
    Code::DnsNameTableMissing,
    Code::ListenersMissing,
    Code::ListenerWarming,
    Code::ReadinessFailed,
    Code::SecretAwaited,
];

/// What is missing without a connection to istiod.
const NO_CONNECTION: &[Code] = &[
    Code::CertificateNotIssued,
    Code::CertificateRequestFailed,
    Code::ClusterWarming,
    Code::DnsNameTableMissing,
    Code::IstiodNoAnswer,
    Code::IstiodUnavailable,
    Code::ListenersMissing,
    Code::ListenerWarming,
    Code::ReadinessFailed,
    Code::SecretAwaited,
];

/// What is missing without a valid token.
const NO_TOKEN: &[Code] = &[
    Code::CertificateNotIssued,
    Code::CertificateRequestFailed,
    Code::ClusterWarming,
    Code::DnsNameTableMissing,
    Code::IstiodPermissionDenied,
    Code::IstiodUnauthenticated,
    Code::ListenersMissing,
    Code::ListenerWarming,
    Code::ReadinessFailed,
    Code::SecretAwaited,
];

/// What is missing without a certificate from the authority.
const NO_CERTIFICATE: &[Code] =
    &[Code::CertificateNotIssued, Code::ClusterWarming, Code::ReadinessFailed, Code::SecretAwaited];

/// What fails with a certificate that peers refuse.
const CERTIFICATE_REFUSED: &[Code] =
    &[Code::ClusterWarming, Code::HandshakesFailed, Code::ReadinessFailed, Code::SecretAwaited];

/// What fails if files, processes or ports are used up.
const NO_RESOURCES: &[Code] = &[
    Code::EnvoyHangs,
    Code::IstiodNoRoute,
    Code::ProbeFailed,
    Code::ProbeLate,
    Code::ProbePortClosed,
    Code::ProbeStatus,
    Code::ProbeUnknown,
    Code::ReadinessFailed,
];
