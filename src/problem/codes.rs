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
    SETTING_REPLACED: "the value of a setting cannot be used or is overridden", "another value is used", "correct the value; `pilot-agent config` shows where it comes from";
    SETTING_UNKNOWN: "a variable that begins with `ISTIO_AGENT_` is unknown", "the variable is ignored", "correct its name, or remove it";
    MEMBER_UNKNOWN: "ProxyConfig has no such member", "the member is ignored", "correct its name, or remove it";
    MEMBER_REPEATED: "a member of ProxyConfig occurs twice", "the last one counts", "remove one of the two; `pilot-agent config` names the document";
    FLAG_OVERRIDES_CONFIG: "a flag overrides a member of ProxyConfig", "the flag is used", "nothing, if the flag is meant; else remove one of the two";
    FILE_MISSING: "a setting names a file that does not exist", "the agent does not start", "mount the file, or correct the setting";
    FILE_UNREADABLE: "a file of settings exists and cannot be used", "the agent starts without the file", "correct the file or its permissions";
    FILE_INVALID: "the content of a file cannot be used", "", "correct or remove the file";
    BOOTSTRAP_OVERRIDE_UNREADABLE: "the file that `ISTIO_BOOTSTRAP_OVERRIDE` names cannot be used", "Envoy starts without the override", "mount the file, or correct its path or its content";
    ARGUMENT_INVALID: "an argument cannot be used", "", "correct the argument; `--help` lists the values";
    FILE_LINE: "a line of a file of settings cannot be used", "the line is ignored", "correct the line that the message names";
    INTERFACES_UNREADABLE: "the kernel does not list the network interfaces", "the pod's addresses are unknown", "set `INSTANCE_IP` to the pod's address; a seccomp profile may forbid netlink sockets";
    INTERFACE_UNKNOWN: "the pod does not have an interface that a setting names", "the name is ignored", "correct the name; `ip link` in the pod lists the interfaces";
    WORKLOAD_KEY_SIZE: "`WORKLOAD_RSA_KEY_SIZE` is not a size that the agent supports", "the agent does not start", "remove the variable: an ECDSA key is smaller and faster";
    STATUS_PORT_ANNOTATION: "the annotation `status.sidecar.istio.io/port` is not a port", "the annotation is ignored", "correct the annotation: a number from 0 to 65535";
    BOOTSTRAP_TEMPLATE_SET: "a setting names a template for Envoy's bootstrap", "the agent does not start", "use `customConfigFile` or `ISTIO_BOOTSTRAP_OVERRIDE`; the agent does not read templates";
    ADMIN_SOCKET_UNSUPPORTED: "Envoy's admin interface cannot be on a Unix socket with the settings of this pod", "the agent does not start, because Envoy's admin port (15000) would stay open", "correct the settings that the message names, or remove `ISTIO_ENVOY_ADMIN_TRANSPORT` (the annotation `sidecar.istio.io/adminTransport`) or `ISTIO_AGENT_ADMIN_SOCKET`";
    LOAD_STATS_CONFIG_INVALID: "`ISTIO_META_LOAD_STATS_CONFIG_JSON` is not a JSON object", "the agent does not start", "correct the variable, or remove it";
    }
    "Envoy" {
    ENVOY_MISSING: "Envoy's path does not lead to a program", "Envoy does not start", "install Envoy there, or correct `binaryPath` of ProxyConfig";
    ENVOY_NOT_EXECUTABLE: "the kernel does not run Envoy's program for the agent's user", "Envoy does not start", "`chmod 755` the file, and mount its volume without `noexec`";
    ENVOY_WRONG_ARCHITECTURE: "Envoy's program is not a program for this machine", "Envoy does not start", "use an image whose Envoy is built for this architecture (`uname -m`, `file`)";
    ENVOY_LOADER_MISSING: "the loader or interpreter that Envoy's program names does not exist", "Envoy does not start", "use an image with the C library that this Envoy was built for";
    ENVOY_BOOTSTRAP_REFUSED: "Envoy exits because it cannot use its arguments or its bootstrap", "", "correct what Envoy's last lines name: bootstrap (`pilot-agent bootstrap`), `ISTIO_BOOTSTRAP_OVERRIDE`, `customConfigFile`, `--proxyLogLevel`, or Envoy's version";
    BOOTSTRAP_MEMBER_IGNORED: "Envoy ignores members of its bootstrap that it does not know", "these settings have no effect", "correct the member that Envoy's log names (`unknown field`): `ISTIO_BOOTSTRAP_OVERRIDE` or `customConfigFile` is for another version of Envoy, or misspelled";
    BOOTSTRAP_HOST_UNRESOLVED: "a host that the bootstrap names for tracing, metrics or access logs has no address", "these data are lost", "correct the address in `tracing`, `envoyMetricsService` or `envoyAccessLogService` of ProxyConfig, or the host's DNS record";
    ENVOY_CRASHED: "Envoy was ended by a signal that the agent did not send", "", "see Envoy's last lines (`kubectl logs`, with `--previous` if the container has restarted); a backtrace in them is a bug of Envoy or of a filter";
    ENVOY_OUT_OF_MEMORY: "the kernel killed Envoy because the container's memory was used up", "", "raise the memory limit of the container, or send Envoy fewer services (`pilot-agent scope` writes the Sidecar resource)";
    MEMORY_USED_UP: "nearly all memory that the container may use is in use", "the kernel kills Envoy or the agent when it is used up", "raise the memory limit of the container (`sidecar.istio.io/proxyMemoryLimit`), or send Envoy fewer services (`pilot-agent scope` writes the Sidecar resource)";
    TASKS_USED_UP: "the container has nearly as many processes and threads as it may", "programs and threads cannot be started", "raise `podPidsLimit` of the kubelet, or find the process that starts them (`ps -eLf`)";
    FILES_USED_UP: "Envoy has nearly as many open files as it may", "Envoy accepts and opens no further connections", "raise the limit of open files (`ulimit -n`) in the node's container runtime, or find out who keeps so many connections (`pilot-agent request GET clusters`)";
    PORTS_USED_UP: "nearly all local ports of the pod are in use", "new connections fail, also of probes and of the doctor", "reuse connections in the application; more ports: `net.ipv4.ip_local_port_range` in the pod's securityContext.sysctls";
    ENVOY_UNKILLABLE: "Envoy did not exit after SIGKILL", "the agent exits without it", "restart the node if its disk or network file system hangs";
    ENVOY_NOT_STARTED: "the agent has not started Envoy yet", "no traffic passes", "wait: the agent first asks the cloud's metadata service; set `CLOUD_PLATFORM=none` if it hangs";
    ENVOY_STOPPING: "Envoy drains or stops", "it drains or stops: new connections are refused", "none if the pod is being deleted";
    ENVOY_EXITED: "Envoy exited without an error, and the agent did not ask it to", "the agent exits, too", "find who called Envoy's `/quitquitquit` or sent SIGTERM";
    ADMIN_SOCKET_UNUSABLE: "Envoy's admin interface cannot listen on its Unix socket", "Envoy does not start", "remove what is in the place of the socket; give each agent another `configPath`";
    ENVOY_HANGS: "Envoy's process runs, and its admin port does not answer", "", "restart the container; `proxyAdminPort` of ProxyConfig must be the admin port of Envoy's bootstrap";
    STANDBY_UNUSABLE: "the two containers of a pod that run this agent cannot take over from each other", "the agent does not start", "mount the same volume in memory at `/etc/istio/proxy` in both containers, and run both as the same user (`docs/operations/standby.md`)";
    STANDBY_ABSENT: "the other container of the pod is not connected to the agent that serves", "if this container ends, traffic is cut until it has restarted", "see the state and the log of the other container";
    STANDBY_UNABLE: "the other container of the pod cannot take over while this one serves", "the sidecar cannot be upgraded without a cut", "give both containers the same volumes, also with the roots and the token for istiod, and images whose Envoys have the same hot restart version (`envoy --hot-restart-version`)";
    HANDOVER_FAILED: "the agent of the other container could not take over", "the container that serves continues, and this build is not tried again; if the other Envoy had started, this one's admin port is closed until a handover or a restart", "correct what the reason names, then change the image of the container that waits";
    HOT_RESTART_UNAVAILABLE: "Envoy runs without hot restart, because Envoys cannot share memory in `/dev/shm`, or because their sockets have no directory that only Envoy's user can open", "the next restart cuts connections, and no handover to another container is possible", "free space in `/dev/shm`, or mount an emptyDir with `medium: Memory` there in all containers; for the directory, correct its owner and mode, or use a shorter `configPath`";
    HOT_RESTART_REFUSED: "the new inputs of Envoy cannot be used", "current Envoy keeps serving", "correct the inputs; the agent tries again when they change";
    HOT_RESTART_FAILED: "the new Envoy ended or hung before it served", "current Envoy keeps serving; the next restart will be a full one", "see the new Envoy's last lines in the log; a full restart (`kubectl rollout restart`) needs no hot restart";
    RESOURCE_REFUSED: "Envoy refused resources of istiod", "Envoy uses the versions that it accepted before; a new Envoy has none, and is not ready", "correct the resource that Envoy's reason names: `istioctl analyze`, EnvoyFilters, versions of istiod and Envoy";
    RESOURCE_REFUSED_STORED_SERVED: "a new Envoy refused resources of istiod, and the agent has stored versions of them", "Envoy serves with the stored versions, which an earlier Envoy accepted; pods that store none are not ready", "let the owner of the EnvoyFilter, or of the control plane, correct the resource that Envoy's reason names; `istioctl proxy-status` shows the NACK";
    LISTENER_WARMING: "Envoy's listeners wait for a secret, a route or an extension", "these listeners do not serve", "for SdsApi: does the secret exist, and may the proxy's account read it; for default and ROOTCA of another process (such as a SPIRE agent): see its refusals in Envoy's log (`StreamSecrets`); for RDS: does istiod send the route (`istioctl proxy-status`)";
    CLUSTER_WARMING: "Envoy's clusters wait for endpoints, a secret or a name", "requests to these clusters fail", "does istiod send their endpoints (`istioctl proxy-status`), do their secrets exist, are their names resolved";
    SECRET_AWAITED: "Envoy waits for secrets", "listeners and clusters that use them do not work", "does the secret exist, and may the proxy's account read it; for default and ROOTCA see the workload certificate, or, if another process (such as a SPIRE agent) serves it, that process' refusals in Envoy's log (`StreamSecrets`)";
    ENVOY_NOT_INSPECTED: "a page of Envoy's admin port is too large or too late", "that part is not checked", "run it again when the node is less busy";
    PORT_TAKEN: "another process listens at a port that Envoy needs", "", "end that process, or move it to another port: 15000 to 15090 belong to the sidecar";
    STATUS_PORT_TAKEN: "the agent cannot listen at its status port", "the agent does not start", "end the process that has the port, or move the agent with `statusPort` of ProxyConfig (a port below 1024 takes NET_BIND_SERVICE)";
    APPLICATION_PORT_CLOSED: "Envoy cannot connect to the application, because nothing listens at its port", "requests to the pod get 503 (UF)", "let the application listen at that port on the pod's address, or correct `targetPort` of the Service";
    UPSTREAM_UNREACHABLE: "Envoy and the agent cannot connect to an endpoint of a service", "requests to it get 503 (UF)", "is the peer ready, does a NetworkPolicy or firewall block the port";
    PEER_CERTIFICATE_REFUSED: "Envoy does not accept the certificate of a peer", "requests to it get 503 (UF)", "restart the peer if its certificate has expired; else compare roots and trust domains of both meshes (`istioctl proxy-config secret POD`), and `subjectAltNames` of the DestinationRule or ServiceEntry";
    PEER_REFUSES_HANDSHAKE: "a peer ends handshakes (TLS) of Envoy", "requests to it get 503 (UF, UC)", "compare roots and trust domains of both sides (`istioctl proxy-config secret POD`); if the peer has no sidecar, set `tls.mode: DISABLE` in a DestinationRule for it";
    PEER_IN_PLAIN_TEXT: "a peer answers handshakes (TLS) of Envoy in plain text", "requests to it get 503 (UF)", "give the peer a sidecar, or set `tls.mode: DISABLE` in a DestinationRule for it; check that the port is the peer's TLS port";
    PEER_EXPECTS_TLS: "Envoy sends plain text to a peer that accepts mutual TLS, and most requests fail", "a peer with PeerAuthentication STRICT closes the connections", "if the peer is STRICT: remove `tls.mode: DISABLE` from the DestinationRule, or set PeerAuthentication to PERMISSIVE; else see the log of the peer's application";
    CIRCUIT_BREAKER_OPEN: "Envoy refused calls to a service, because they were more than its connection pool allows", "these requests get 503 (UO)", "raise `trafficPolicy.connectionPool` of the service's DestinationRule, or run more pods of the service";
    REQUESTS_FAIL: "connections to an endpoint work, and most requests to it fail", "the clients get errors of the application, 503 (UC) or 504 (UT)", "see the log of the application at that endpoint: it answers with 5xx, closes connections, or is slower than the route's timeout";
    NO_HEALTHY_ENDPOINT: "services of the mesh have no endpoint, or none that is healthy", "requests to them get 503 (UH)", "start ready pods of them: do the selectors match (`kubectl get endpointslices`), are the pods ready, do they answer";
    INBOUND_NOT_MATCHED: "Envoy closed inbound connections that no filter chain accepts", "the callers' connections are reset", "plain text under STRICT mTLS: give the caller a sidecar, or set PeerAuthentication to PERMISSIVE";
    HANDSHAKES_FAILED: "handshakes (TLS) with Envoy failed", "the callers' connections are reset", "compare certificates, roots and trust domains of both sides";
    RBAC_DENIED: "an AuthorizationPolicy denied requests", "the callers get 403", "see `istioctl experimental authz check` and the access log";
    TASK_EXITED: "a part of the agent exited unexpectedly", "the agent drains Envoy and exits", "report this as a bug, with `pilot-agent support-bundle`";
    }
    "Sockets and directories" {
    SOCKET_PATH_TOO_LONG: "the path of a socket is longer than a socket address", "the agent does not start", "use a shorter `configPath` or `WORKLOAD_IDENTITY_SOCKET_FILE`";
    SOCKET_TAKEN: "another process listens on a socket of the agent, or has removed it", "Envoy does not reach the agent", "find the process that shares the directory with this container, end it, and restart this container";
    SOCKET_DIRECTORY: "a directory with content, a volume or a file is where a socket belongs", "", "remove it, or correct the volume that holds it";
    SOCKET_HANGS: "the process behind a socket does not answer", "Envoy cannot use the socket", "restart the process if this continues";
    SOCKET_NOT_SERVED: "the process that should serve the workload's secrets does not serve them", "Envoy gets no certificate; one that it has can be used until it expires", "check that process (such as a SPIRE agent) and the volume of the socket; for certificates of istiod, unset `ISTIO_AGENT_EXTERNAL_SDS` and `WORKLOAD_IDENTITY_SOCKET_FILE`";
    DIRECTORY_FORBIDDEN: "the agent may not use a file or directory, because it belongs to another user", "", "give the agent's user access (`fsGroup` of the pod, `chown`), or run the agent as the owner";
    DIRECTORY_READ_ONLY: "a directory of the agent is read-only", "", "mount a writable volume there, such as the emptyDir of Istio's injection";
    DISK_FULL: "the disk or the volume of a directory is full", "", "free space, or raise `sizeLimit` of the volume";
    FILE_UNUSABLE: "a file, directory or socket cannot be read or made", "", "correct owner and mode of the path, and mount a writable volume there";
    }
    "Certificates and secrets" {
    CERTIFICATE_REQUEST_FAILED: "istiod or another authority did not sign the certificate", "", "istiod logs why: kubectl logs -n istio-system deployment/istiod";
    CERTIFICATE_ANSWER_UNUSABLE: "the authority's answer is not a certificate chain for the agent's key", "the answer is not used", "istiod logs which signer it uses: kubectl logs -n istio-system deployment/istiod";
    CERTIFICATE_KEY_FAILED: "a private key or a certificate request cannot be made", "there is no new certificate", "correct `ECC_SIGNATURE_ALGORITHM`, `ECC_CURVE` or `WORKLOAD_RSA_KEY_SIZE`";
    CERTIFICATE_NOT_ISSUED: "the authority has not answered the first certificate request yet", "Envoy waits for the certificate", "wait for the answer; if none comes, correct what is reported about istiod";
    CERTIFICATE_EXPIRED: "a certificate has expired", "peers reject it", "renew the certificate; if it is new, set this machine's clock (compare `date -u`)";
    CERTIFICATE_NOT_YET_VALID: "a certificate is not valid yet", "peers reject it", "set the clock of this machine or of the authority (compare `date -u`)";
    CERTIFICATE_EXPIRES_SOON: "a certificate is in the last tenth of its life", "peers reject it once it has expired", "renew the certificate";
    CERTIFICATE_CHAIN_REJECTED: "peers that trust the mesh's roots reject the certificate chain", "mutual TLS with them fails", "let a root of the mesh sign the chain; for one of istiod, compare the ConfigMap istio-ca-root-cert with istiod's CA";
    CERTIFICATE_FOR_OTHER_IDENTITY: "the authority signed for another identity than the requested one", "the certificate is used, and policies see the other identity", "correct `TRUST_DOMAIN`, `POD_NAMESPACE` or `SERVICE_ACCOUNT`";
    CERTIFICATE_CACHE_UNUSABLE: "the certificate of an earlier start cannot be used", "a new one is requested", "nothing: the new certificate replaces it";
    CERTIFICATE_CACHE_UNWRITABLE: "the certificate cannot be stored for the next start", "a restart requests a new one", "let the directory be in memory (emptyDir with `medium: Memory`), and let the agent's user own it";
    CERTIFICATES_LEFT_OUT: "a file or bundle of certificates has a part that is not a certificate", "the part is left out", "remove the part from the file or bundle";
    CLOCKS_DIFFER: "a new certificate is not valid by this clock", "it is used anyway", "compare the clocks (`date -u`) of this machine and of istiod's node";
    MESH_BUNDLE_INVALID: "istiod sent a trust bundle that does not hold certificates", "", "correct `caCertificates` in istiod's MeshConfig";
    OUTPUT_CERTS_UNWRITABLE: "the directory that `OUTPUT_CERTS` names cannot be written", "applications do not get the certificate", "mount a directory there that the agent's user can write, or correct `OUTPUT_CERTS`";
    REVOCATION_LIST_EMPTY: "the file of certificate revocation lists does not have a list", "Envoy gets none until the file changes", "write a list into the file, or remove it";
    REVOCATION_LIST_UNUSABLE: "the file of certificate revocation lists does not have a valid list of every authority that signed the workload's chain", "Envoy rejects all peers of that authority", "write a current list of every authority of the chain into the file, in PEM or DER (ConfigMap istio-ca-crl), or set `PILOT_ENABLE_CA_CRL=false`";
    ROOTS_EXPIRED: "the root that signed the workload's chain has expired", "Envoy and its peers reject each other", "renew the root of the mesh (Secret cacerts), and restart istiod; if it is new, set this machine's clock (compare `date -u`)";
    SDS_SOCKET_MISSING: "a setting names the SDS socket of another process, which does not exist", "the agent does not start", "start that process first, or set `ISTIO_AGENT_EXTERNAL_SDS=wait`";
    SDS_SOCKET_STALE: "a socket that no process serves cannot be removed", "the agent does not start", "remove the socket, or let the agent's user write to its directory";
    SDS_SOCKET_UNUSABLE: "the socket for secrets from files cannot be created", "Envoy does not get secrets from files", "let the agent's user write to its directory";
    SDS_SOCKET_ABSENT: "no process serves the SDS socket yet", "Envoy waits, and the agent serves secrets from files only", "start the process that serves it (`ISTIO_AGENT_EXTERNAL_SDS`)";
    SECRET_FILE_MISSING: "a file of a secret does not exist or is empty", "listeners and clusters that use the secret do not work", "mount the file (annotation `sidecar.istio.io/userVolumeMount`), or correct its path in the DestinationRule or Gateway; `FILE_MOUNTED_CERTS` means the workload's own files";
    SECRET_FILE_UNREADABLE: "a file of a secret exists and cannot be read", "listeners and clusters that use the secret do not work", "let the agent's user read the file";
    SECRET_FILE_UNUSABLE: "a file of a secret does not hold what it should", "", "write certificates in PEM, and the key of the first one, into the files";
    SECRET_FILES_NOT_WATCHED: "the kernel does not report changes to the files of secrets", "the files are read every 5 s instead", "raise `fs.inotify.max_user_instances` and `fs.inotify.max_user_watches` on the node";
    SECRET_FILES_TOO_MANY: "Envoy asks for more secrets from files than the agent reads", "listeners and clusters that use the secret do not work", "use fewer secrets from files";
    SECRET_NAME_UNKNOWN: "Envoy asks for a secret by a name that the agent does not serve", "Envoy does not get it", "correct the name in the EnvoyFilter or bootstrap that uses it";
    SECRET_UPDATE_REFUSED: "Envoy refused a new version of a secret", "Envoy keeps the version that it has", "correct the file or the key that Envoy's reason names";
    SECRET_REFUSED: "Envoy refused a secret, and has no version of it", "the pod is not ready", "correct the file or the key that Envoy's reason names";
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
    CAPTURE_OPTION_INVALID: "the value of an option of `istio-iptables` cannot be used", "no rule is created", "correct the option, or the annotation of the pod that it comes from (`traffic.sidecar.istio.io/…`)";
    CAPTURE_OPTION_REPLACED: "the value of an option of `istio-iptables` cannot be used", "another value is used", "correct the option, or the annotation of the pod that it comes from (`traffic.sidecar.istio.io/…`)";
    CAPTURE_MODE_UNKNOWN: "the option `--istio-inbound-interception-mode` is unknown", "the mode REDIRECT is used", "set `sidecar.istio.io/interceptionMode` to REDIRECT, TPROXY or NONE";
    CAPTURE_OPTION_MISSING: "`--verify` or `--explain` lacks an option that names the pod's rules", "", "add the arguments of the container istio-init or istio-validation, or of the CNI plugin";
    CAPTURE_NO_ADDRESS: "the pod has loopback addresses only", "no rule is created", "check the CNI plugin: `kubectl get pod -o wide` shows the address";
    CAPTURE_PERMISSION: "the container lacks the capability `NET_ADMIN`", "the rules cannot be read or changed", "add `NET_ADMIN` and `NET_RAW` to the capabilities of the container istio-init, or use Istio's CNI plugin. For `--verify`, use a debug container with both";
    CAPTURE_PROGRAM_MISSING: "a program that reads or changes rules is not installed", "the rules cannot be read or changed", "install iptables (nft or legacy) in the image, or use `--native-nftables` with nft";
    CAPTURE_PROGRAM_FAILED: "a program that reads or changes rules fails", "", "its message names the cause; usual ones are a missing capability, `NET_ADMIN` or `NET_RAW`, or a missing kernel module";
    CAPTURE_RULES_UNREADABLE: "the rules or tables cannot be read", "", "run the command as root with NET_ADMIN in the pod's network namespace (`kubectl debug --profile=netadmin`)";
    CAPTURE_ROUTES_FAILED: "the routes of captured traffic cannot be set up", "no rule is created", "use REDIRECT (`sidecar.istio.io/interceptionMode`) on nodes without policy routing, which TPROXY needs; TPROXY also needs NET_ADMIN";
    CAPTURE_LOCKED: "another process changes the rules of this pod", "no rule is created", "stop that process, or wait for its end";
    CAPTURE_VALIDATION_FAILED: "`--run-validation` finds that traffic is not redirected to Envoy", "the pod is not ready for Istio", "run it as the user of `--proxy-uid`; with Istio CNI, the pod may be older than istio-cni on its node: delete it, or set `cni.repair.deletePods=true`";
    CAPTURE_RULES_MISSING: "no rule redirects the pod's traffic to Envoy", "traffic bypasses Envoy", "read the log of the container istio-init, or of istio-cni on the node; then delete the pod, which creates the rules again";
    CAPTURE_RULES_CHANGED: "rules exist, and traffic does not reach Envoy", "traffic bypasses Envoy or is lost", "read the log of the container istio-init, or of istio-cni on the node; then delete the pod, which creates the rules again";
    CAPTURE_BYPASSED: "a connection bypasses Envoy, or may do so because of a rule that is not Istio's", "without Envoy they have no mutual TLS, no policy and no telemetry", "nothing, if they are meant to, such as by `excludeInboundPorts`; else remove the rule that is named, or compare the rules by `istio-iptables --verify`, and delete the pod, which creates them again";
    CAPTURE_RULES_EARLIER: "a rule of an earlier version of Istio redirects DNS queries", "queries may be lost", "run `pilot-agent istio-clean-iptables` in the network namespace, or delete the pod";
    CAPTURE_PROXY_UID: "Envoy's own traffic is captured", "its connections come back to Envoy", "set `--proxy-uid` of istio-init to the user of the container istio-proxy, or `runAsUser` of the container to 1337";
    }
    "Probes and metrics" {
    PROBE_PORT_CLOSED: "the application does not listen on the port of its probe", "the probe fails", "let the application listen on that port at all addresses (0.0.0.0), or correct the port of the probe in the pod, which `ISTIO_KUBE_APP_PROBERS` repeats";
    PROBE_LATE: "the application does not answer a probe in time", "the probe fails", "read the application's log, or raise `timeoutSeconds` of the probe";
    PROBE_STATUS: "the application answers a probe with a status other than 2xx and 3xx", "the probe fails", "read the application's log";
    PROBE_FAILED: "a probe of the application fails", "the probe fails", "read the application's log, and compare the probe in the pod with what the port serves";
    PROBE_UNKNOWN: "`ISTIO_KUBE_APP_PROBERS` does not have the path of a probe", "the probe fails", "inject the pod again: its probes and `ISTIO_KUBE_APP_PROBERS` were written at different times";
    READINESS_FAILED: "the kubelet cannot see that Envoy is ready", "the pod is not ready", "see Envoy's and the agent's log (`kubectl logs POD -c istio-proxy`), and ask again in some seconds";
    SCRAPE_FAILED: "metrics of Envoy or of the application cannot be fetched", "the page lacks these samples", "for the application, correct `prometheus.io/port` and `prometheus.io/path` of the pod; for Envoy see its log";
    SCRAPE_TLS_UNUSABLE: "a file of `ISTIO_AGENT_SCRAPE_TLS` cannot be used", "the page lacks the samples of this target", "correct the file; it is read again at the next scrape";
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
    "istiod and the certificate authority" {
    ISTIOD_ADDRESS_INVALID: "the address of a control plane is not `host:port`", "the control plane is not used", "write the address as host:port, such as istiod.istio-system.svc:15012";
    ISTIOD_NAME_NOT_RESOLVED: "the name of a control plane has no address", "", "check the name, the pod's resolvers in /etc/resolv.conf, and the service: `kubectl get service -n istio-system`";
    ISTIOD_CONNECTION_REFUSED: "nothing listens on the address of a control plane", "", "check that istiod is ready, and that the port is right: `kubectl get pods,endpoints -n istio-system`";
    ISTIOD_NOT_REACHABLE: "the address of a control plane does not answer", "", "a NetworkPolicy, a firewall or a security group may drop the packets: `kubectl get networkpolicy -A`";
    ISTIOD_NO_ROUTE: "the pod has no route to the address of a control plane", "", "give the pod an address of that family (IPv4 or IPv6), or use a name with addresses of the other family";
    ISTIOD_PROXY_UNREACHABLE: "the HTTP proxy on the way to a control plane does not answer", "", "correct `HTTPS_PROXY`, or add the host of the control plane to `NO_PROXY`";
    ISTIOD_PROXY_REFUSED: "the HTTP proxy does not open a tunnel to a control plane", "", "allow it in the proxy, or add the host of the control plane to `NO_PROXY`";
    ISTIOD_TIMEOUT: "a control plane accepts a connection and then says nothing", "", "check that istiod is not overloaded, and that the port is right: `kubectl get pods,endpoints -n istio-system`";
    ISTIOD_ROOTS_UNUSABLE: "the file of root certificates for a control plane cannot be used", "the control plane cannot be verified", "mount the ConfigMap istio-ca-root-cert, which istiod writes to each namespace: `kubectl get configmap istio-ca-root-cert`";
    SYSTEM_ROOTS_UNUSABLE: "the operating system has no usable root certificates", "servers cannot be verified", "install the package ca-certificates, or set `SSL_CERT_FILE`";
    ISTIOD_SAN_INVALID: "the expected name of a control plane is neither a DNS name nor an IP address", "", "correct `ISTIOD_SAN` or the address";
    ISTIOD_CERTIFICATE_UNTRUSTED: "no root certificate has signed the certificate of a control plane", "", "compare the roots with the ConfigMap istio-ca-root-cert of istiod's cluster; the address may lead to another mesh, or to a proxy that terminates TLS";
    ISTIOD_CERTIFICATE_NAME: "the certificate of a control plane is for other names", "", "use one of these names as address; for discoveryAddress, `ISTIOD_SAN` may name the expected one";
    ISTIOD_CERTIFICATE_EXPIRED: "the certificate of a control plane has expired, or the clock of this machine is ahead", "", "compare this clock (`date -u`) with others; if it is right: `kubectl rollout restart deployment/istiod -n istio-system`";
    ISTIOD_CERTIFICATE_NOT_YET_VALID: "the certificate of a control plane is not valid yet, because clocks differ", "", "correct the clock of this machine (`date -u`) or the one of istiod's node";
    ISTIOD_CERTIFICATE_UNUSABLE: "the certificate of a control plane cannot be used", "", "issue another certificate";
    ISTIOD_TLS_REFUSED: "a control plane ends the TLS handshake", "", "check that this is istiod's TLS port (15012); `kubectl logs -n istio-system deployment/istiod` gives the reason";
    ISTIOD_NOT_TLS: "the server does not speak TLS", "", "use istiod's TLS port (15012); for plain text (15010) set `controlPlaneAuthPolicy: NONE`";
    ISTIOD_NOT_GRPC: "the server does not speak HTTP/2, or does not answer in gRPC", "", "use istiod's gRPC port (15012, or 15010 without TLS); a load balancer or proxy at this address must pass HTTP/2, and have a healthy istiod behind it";
    ISTIOD_CONNECTION_LOST: "a control plane, or something on the way to it, closes a new connection", "", "check that istiod is ready (`kubectl get pods,endpoints -n istio-system`); a load balancer without a ready istiod, a proxy or a firewall may close connections as well";
    CLIENT_CERTIFICATE_REFUSED: "a control plane refuses the client certificate of `PROV_CERT`", "the token is used instead", "renew the certificate, and compare its root with the mesh's";
    CLIENT_CERTIFICATE_UNUSABLE: "the files of `PROV_CERT` are not a key and its certificate", "no connection is made", "replace both files";
    TLS_UNUSABLE: "the cryptographic module does not support the settings of TLS", "no connection is made", "correct `COMPLIANCE_POLICY`";
    AGENT_STOPPING: "the agent stops while a call waits for a connection", "", "nothing: the container ends";
    ISTIOD_TOKEN_MISSING: "the file of the token for istiod cannot be read", "istiod is called without a token", "mount the projected volume istio-token at /var/run/secrets/tokens, as sidecar injection does; on a machine copy a new token";
    ISTIOD_TOKEN_INVALID: "the file of the token for istiod does not hold a token", "istiod is called without a token", "mount the projected volume istio-token at /var/run/secrets/tokens, as sidecar injection does; on a machine copy a new token";
    ISTIOD_TOKEN_EXPIRED: "the token for istiod has expired", "", "the kubelet renews the file: `kubectl describe pod` shows its events; on a machine run `istioctl x workload entry configure`; compare the clock (`date -u`) with others";
    ISTIOD_TOKEN_AUDIENCE: "istiod refuses a token that is for another audience", "", "set the audience of the projected volume istio-token to istio-ca, or add the token's audience to `TOKEN_AUDIENCES` of istiod";
    ISTIOD_UNAUTHENTICATED: "istiod does not accept the token or the client certificate", "", "`kubectl logs -n istio-system deployment/istiod` gives the reason; istiod must know the cluster that `ISTIO_META_CLUSTER_ID` names (`istioctl remote-clusters`) and reach its API server";
    ISTIOD_PERMISSION_DENIED: "istiod knows the caller and does not allow the call", "", "compare `TRUST_DOMAIN` with trustDomain of the mesh (`kubectl get configmap istio -n istio-system -o yaml`); `kubectl logs -n istio-system deployment/istiod` gives the reason";
    ISTIOD_WITHOUT_DELTA: "istiod does not know incremental discovery (delta xDS)", "Envoy gets no configuration", "set `ISTIO_DELTA_XDS=false`";
    ISTIOD_WITHOUT_CA: "the server does not sign certificates", "", "set `CA_ADDR` to the certificate authority, or enable istiod's (`ENABLE_CA_SERVER`)";
    ISTIOD_UNAVAILABLE: "a call ended because istiod or the connection to it did", "", "`kubectl get pods -n istio-system`; a restart of istiod needs no action";
    ISTIOD_NO_ANSWER: "istiod does not answer a call in time", "", "check that istiod is not overloaded: `kubectl top pods -n istio-system`";
    DISCOVERY_STALLED: "istiod does not answer on Envoy's discovery stream, although the connection lives", "changes of the configuration may not reach Envoy; at most once an hour, the agent ends the stream, and Envoy opens another one", "if it happens again, check proxies and load balancers on the way to istiod, and whether istiod is overloaded: `kubectl top pods -n istio-system`";
    SUBSCRIPTION_UNANSWERED: "istiod answers on Envoy's discovery stream, but not for the named resources", "Envoy does not get these resources, or no new versions of them", "check that they exist, such as the Secret that a `credentialName` names; `kubectl logs -n istio-system deployment/istiod` may give the reason";
    LISTENERS_MISSING: "istiod has sent Envoy no listeners, or has not answered its request for clusters or listeners", "Envoy serves no traffic, and captured connections fail", "compare `istioctl proxy-status`; is the pod's namespace among discoverySelectors of the mesh, does a Sidecar or EnvoyFilter resource take the listeners away, and does `kubectl logs -n istio-system deployment/istiod` name this pod?";
    ISTIOD_ERROR: "istiod refuses a call for another reason", "", "`kubectl logs -n istio-system deployment/istiod` gives the reason";
    GOOGLE_TOKEN_MISSING: "the token of Google's metadata service cannot be read or stored", "", "give the machine a service account, and the agent write access to the token file";
    RESPONSE_REFUSED: "the agent cannot use a response of istiod", "the last one stays in use", "`kubectl logs -n istio-system deployment/istiod` shows what it sends";
    ON_DEMAND_OFF: "`ISTIO_AGENT_ON_DEMAND_CLUSTERS` is set for a workload that cannot use it", "Envoy gets all clusters", "remove `ISTIO_AGENT_ON_DEMAND_CLUSTERS`; it needs a sidecar whose Envoy the agent runs, delta xDS, and Envoy 1.39.0 or later";
    ON_DEMAND_LISTENER_REFUSED: "Envoy rejects a listener into which the agent has inserted the discovery of clusters", "Envoy gets the listener as istiod has sent it, and the clusters that it names", "report it with the listener (`istioctl proxy-config listeners -o yaml`); without `ISTIO_AGENT_ON_DEMAND_CLUSTERS` nothing is inserted";
    ON_DEMAND_CLUSTER_WARMS: "Envoy has not answered a response with clusters for 1 s", "Envoy loads no other cluster until it answers; the agent withdraws the new ones, and offers them again after 30 s", "check that the endpoints, host names and secrets of the named clusters exist";
    KEPT_CONFIG_UNWRITABLE: "the directory that `ISTIO_AGENT_KEEP_CONFIG` names cannot be written", "a restarted container waits for istiod", "mount a directory there that the agent's user can write, or correct `ISTIO_AGENT_KEEP_CONFIG`";
    KEPT_CONFIG_UNUSABLE: "stored configuration cannot be served", "Envoy waits for istiod", "delete the files of the directory in `ISTIO_AGENT_KEEP_CONFIG`";
    }
    "Doctor" {
    AGENT_NOT_RUNNING: "no process listens on the agent's status port, and no check found the reason", "", "start the agent, or look at the end of its log (`kubectl logs --previous`, `journalctl --unit istio-agent`)";
    AGENT_SILENT: "the agent does not answer on its status port", "only the configuration is checked", "run `doctor` again; if the agent is still silent, restart the container";
    AGENT_UNKNOWN: "the answer on the status port is not a doctor's report", "the checks are made from outside", "use the `pilot-agent` of the version that runs, or find the other process that has the port";
    POD_NOT_READY: "the agent reports that the pod is not ready, and no check found the reason", "the pod gets no traffic", "see Envoy's and the agent's log (`kubectl logs POD -c istio-proxy`), and ask again in some seconds";
    CHECKS_LATE: "some checks of the doctor did not finish in time", "their results are unknown", "run `doctor` again: the node, its disk or its network is slow";
    }
    "Status port" {
    CALLER_REFUSED: "a user requests a page of the status port that is only for other users", "", "repeat the request as root or as the agent's user, or add the user to `ISTIO_AGENT_DEBUG_USERS` or `ISTIO_AGENT_CONTROL_USERS`";
    CALLER_UNKNOWN: "the kernel does not report the user of a connection to the status port", "the request is refused", "set `ISTIO_AGENT_DEBUG_USERS=any` or `ISTIO_AGENT_CONTROL_USERS=any` to allow every user";
    CALLER_FOREIGN: "another web page sends a request to a debug page (foreign `Host` or `Origin`)", "the request is refused", "open the page at localhost or at an IP address";
    STATUS_PORT_EXHAUSTED: "the agent cannot accept a connection to the status port", "the agent closes an idle connection; probes and scrapes can fail", "raise the limit of open files";
    DRAIN_UNCONFIRMED: "Envoy did not confirm `/drain` in time", "the request is answered before Envoy drains", "`pilot-agent request --debug-port=15020 GET drain` shows the state of the drain";
    }
    "Logging" {
    LOG_TARGET_UNUSABLE: "the agent cannot open a file that `--log_target` names", "the agent does not start", "correct `--log_target`, or the permissions of its directory";
    LOG_SILENT: "the level of a scope is `none`", "errors of these scopes are not logged", "correct `--log_output_level`, or set a level at `/debug/logging`";
    LOG_LINES_DROPPED: "the reader of the log is slower than the agent", "", "lower the log level (`--log_output_level`, `--proxyLogLevel`), or speed up the node's disk";
    }
    "Support bundle" {
    BUNDLE_PORT_SILENT: "the agent or Envoy does not answer", "the bundle has no further pages of this port", "`pilot-agent doctor` names the cause";
    BUNDLE_PAGE_MISSING: "the agent or Envoy answers with an error", "the page is not in the bundle", "make another bundle once the agent and Envoy answer";
    BUNDLE_PART_CUT: "a page or file is too large, too slow, or not of its usual form", "the end is missing in the bundle", "read the whole page or file in the pod, if its end matters";
    BUNDLE_CONFIG_OF_COMMAND: "the agent does not answer", "the file has the configuration of the `support-bundle` command itself", "run the command in the agent's container, where the agent's environment is the same";
    BUNDLE_BOOTSTRAP_MISSING: "no bootstrap file exists", "the bundle has no bootstrap", "if the agent runs elsewhere, run the command in its working directory";
    BUNDLE_BOOTSTRAP_UNREADABLE: "a bootstrap file cannot be read", "the file is not in the bundle", "run the command as root or as the agent's user";
    BUNDLE_SETTINGS_LATE: "the configuration files are not read in time", "the bundle has the configuration without these files", "check the volumes of the configuration files: a disk or network file system hangs";
    BUNDLE_OUTPUT_UNUSABLE: "the support bundle cannot be written", "there is no bundle", "redirect standard output to a file, or give the name of a new file with `--output`";
    }
}

/// Causes without which nothing comes from a control plane or an authority.
const CONTROL_PLANE: &[&str] =
    &["ISTIOD_", "CLIENT_CERTIFICATE_", "SYSTEM_ROOTS_", "TLS_UNUSABLE", "GOOGLE_TOKEN_"];

/// Causes, and consequences that are not findings while a cause of at least their level exists. Beginnings of names
/// stand for all codes with them.
#[rustfmt::skip]
pub const FOLLOWS: &[(&[&str], &[&str])] = &[
    (&["ISTIOD_TOKEN_"], &["ISTIOD_UNAUTHENTICATED", "ISTIOD_PERMISSION_DENIED"]),
    (&["DNS_RESOLVER_", "DNS_RESOLV_CONF_"], &["ISTIOD_NAME_NOT_RESOLVED"]),
    (&["ISTIOD_NAME_", "ISTIOD_CONNECTION_", "ISTIOD_NOT_", "ISTIOD_NO_ROUTE", "ISTIOD_PROXY_", "ISTIOD_TIMEOUT", "ISTIOD_TLS_"], &["ISTIOD_UNAVAILABLE", "ISTIOD_NO_ANSWER"]),
    (CONTROL_PLANE, &["CERTIFICATE_REQUEST_", "CERTIFICATE_NOT_ISSUED", "DNS_NAME_TABLE_"]),
    (&["CERTIFICATE_REQUEST_", "CERTIFICATE_ANSWER_", "CERTIFICATE_KEY_"], &["CERTIFICATE_NOT_ISSUED"]),
    (&["CERTIFICATE_EXPIRED", "CERTIFICATE_NOT_YET_", "CERTIFICATE_CHAIN_", "ROOTS_EXPIRED", "REVOCATION_LIST_UNUSABLE"], &["HANDSHAKES_FAILED"]),
    (&["SOCKET_"], &["SECRET_AWAITED", "LISTENER_WARMING", "CLUSTER_WARMING", "LISTENERS_MISSING", "DNS_NAME_TABLE_", "READINESS_FAILED"]),
    (CONTROL_PLANE, &["SECRET_AWAITED", "LISTENER_WARMING", "CLUSTER_WARMING", "LISTENERS_MISSING", "READINESS_FAILED"]),
    (&["CERTIFICATE_", "SECRET_FILE_", "SECRET_NAME_", "SECRET_REFUSED"], &["SECRET_AWAITED", "CLUSTER_WARMING"]),
    (&["ENVOY_", "CLUSTER_WARMING", "SECRET_AWAITED", "RESOURCE_REFUSED"], &["LISTENERS_MISSING"]),
    (&["ENVOY_", "CERTIFICATE_", "SECRET_", "LISTENERS_MISSING", "LISTENER_WARMING", "CLUSTER_WARMING", "RESOURCE_REFUSED", "PORT_TAKEN", "DNS_NAME_TABLE_"], &["READINESS_FAILED"]),
    (&["ENVOY_"], &["DNS_NAME_TABLE_"]),
    (&["ENVOY_STOPPING"], &["STANDBY_", "APPLICATION_PORT_CLOSED", "PROBE_", "SECRET_AWAITED", "LISTENER_WARMING", "CLUSTER_WARMING"]),
    (&["ENVOY_OUT_OF_MEMORY"], &["MEMORY_USED_UP"]),
    (&["FILES_USED_UP", "TASKS_USED_UP", "PORTS_USED_UP"], &["ENVOY_HANGS", "READINESS_FAILED", "PROBE_", "ISTIOD_NO_ROUTE"]),
    (&["DISK_FULL"], &["CERTIFICATE_CACHE_UNWRITABLE", "KEPT_CONFIG_UNWRITABLE", "OUTPUT_CERTS_UNWRITABLE", "HOT_RESTART_UNAVAILABLE"]),
    (&["PORT_TAKEN"], &["ENVOY_BOOTSTRAP_REFUSED"]),
    (&["STATUS_PORT_TAKEN"], &["AGENT_UNKNOWN"]),
    (&["CAPTURE_RULES_MISSING"], &["DNS_NOT_CAPTURED", "CAPTURE_BYPASSED"]),
    (&["CAPTURE_PROXY_UID"], &["CAPTURE_RULES_CHANGED"]),
];
