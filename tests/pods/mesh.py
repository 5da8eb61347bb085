"""The resources local-istiod serves to the pods, of the shapes istiod sends."""

import base64
import json
import os

TYPES = "type.googleapis.com/envoy"
NAME_TABLE = "type.googleapis.com/istio.networking.nds.v1.NameTable"
ADS = {"ads": {}, "resource_api_version": "V3", "initial_fetch_timeout": "0s"}


def identity(account):
    return f"spiffe://cluster.local/ns/demo/sa/{account}"


def secret(name):
    return {"name": name, "sds_config": {
        "resource_api_version": "V3", "initial_fetch_timeout": "0s",
        "api_config_source": {
            "api_type": "GRPC", "transport_api_version": "V3",
            "set_node_on_first_message_only": True,
            "grpc_services": [{"envoy_grpc": {"cluster_name": "sds-grpc"}}]}}}


def tls(direction, *accounts):
    """Mutual TLS with the workload's certificate, for peers of these accounts."""
    kind = f"{TYPES}.extensions.transport_sockets.tls.v3.{direction}TlsContext"
    names = [{"san_type": "URI", "matcher": {"exact": identity(account)}} for account in accounts]
    context = {"tls_certificate_sds_secret_configs": [secret("default")],
               "combined_validation_context": {
                   "default_validation_context": {"match_typed_subject_alt_names": names},
                   "validation_context_sds_secret_config": secret("ROOTCA")}}
    config = {"@type": kind, "common_tls_context": context}
    if direction == "Downstream":
        config["require_client_certificate"] = True
    return {"name": "envoy.transport_sockets.tls", "typed_config": config}


def manager(routes, **more):
    """A network filter that answers HTTP."""
    return {"name": "envoy.filters.network.http_connection_manager", "typed_config": {
        "@type": f"{TYPES}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        # The agent counts requests under way by the names that istiod gives.
        "stat_prefix": f"{routes}_0.0.0.0_8080;", "rds": {"route_config_name": routes, "config_source": ADS},
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": {
            "@type": f"{TYPES}.extensions.filters.http.router.v3.Router"}}]} | more}


def listener(name, port, chain, direction, filters=()):
    return {"@type": f"{TYPES}.config.listener.v3.Listener", "name": name,
            "address": {"socket_address": {"address": "0.0.0.0", "port_value": port}},
            "traffic_direction": direction, "filter_chains": [chain],
            "listener_filters": [{"name": f"envoy.filters.listener.{kind}", "typed_config": {
                "@type": f"{TYPES}.extensions.filters.listener.{kind}.v3.{message}"} | more}
                for kind, message, more in filters]}


def routes(name, clusters):
    """Routes by host to the cluster of a value."""
    return {"@type": f"{TYPES}.config.route.v3.RouteConfiguration", "name": name, "virtual_hosts": [
        {"name": host, "domains": [host], "routes": [
            {"match": {"prefix": "/"}, "route": {"cluster": cluster, "timeout": "5s"}}]}
        for host, cluster in clusters.items()]}


def cluster(name, **more):
    return {"@type": f"{TYPES}.config.cluster.v3.Cluster", "name": name, "type": "EDS",
            "connect_timeout": "2s", "eds_cluster_config": {"eds_config": ADS}} | more


def endpoints(name, addresses):
    return {"@type": f"{TYPES}.config.endpoint.v3.ClusterLoadAssignment", "cluster_name": name,
            "endpoints": [{"lb_endpoints": [
                {"endpoint": {"address": {"socket_address": {"address": address, "port_value": port}}}}
                for address, port in addresses]}] if addresses else []}


def inbound(mode, *callers):
    """A sidecar's inbound side: mutual TLS with these callers, then the application."""
    filters = [("original_dst", "OriginalDst", {})]
    source = {"upstream_bind_config": {"source_address": {"address": "127.0.0.6", "port_value": 0}}}
    if mode == "TPROXY":
        filters.append(("original_src", "OriginalSrc", {"mark": 1337}))
        source = {}
    chain = {"transport_socket": tls("Downstream", *callers), "filters": [manager(
        "inbound", forward_client_cert_details="SANITIZE_SET",
        set_current_client_cert_details={"uri": True})]}
    virtual = listener("virtualInbound", 15006, chain, "INBOUND", filters)
    if mode == "TPROXY":
        virtual["transparent"] = True
    passthrough = cluster("inbound", type="ORIGINAL_DST", lb_policy="CLUSTER_PROVIDED") | source
    del passthrough["eds_cluster_config"]
    return [virtual, passthrough, routes("inbound", {"*": "inbound"})]


def outbound(hosts, port=15001):
    """Captured requests to other workloads: by host, (account or None for plain text, addresses)."""
    made = [listener("virtualOutbound", port, {"filters": [manager("outbound")]}, "OUTBOUND",
                     [("original_dst", "OriginalDst", {})]),
            routes("outbound", {host: host for host in hosts})]
    for host, (account, addresses) in hosts.items():
        security = {"transport_socket": tls("Upstream", account)} if account else {}
        made += [cluster(host, **security), endpoints(host, addresses)]
    return made


def name_table(names):
    """The addresses of names, for the agent's DNS."""
    def field(number, value):
        value = value.encode() if isinstance(value, str) else value
        length, size = b"", len(value)
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + value
    table = b""
    for name, address in names.items():
        row = field(1, address) + field(2, "Kubernetes") + field(3, name) + field(4, "demo")
        table += field(1, field(1, f"{name}.demo.svc.cluster.local") + field(2, row))
    return {"@type": NAME_TABLE, "name": "names", "value": base64.b64encode(table).decode()}


class Resources:
    """The folder local-istiod serves; each pod has a folder of its name."""

    def __init__(self, folder):
        self.folder = folder

    def put(self, pod, resources, name="resources"):
        target = self.folder / pod / f"{name}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = self.folder.parent / f"{pod}.{name}.draft"
        draft.write_text(json.dumps({"resources": resources}))
        os.replace(draft, target)

    def remove(self, pod, name):
        (self.folder / pod / f"{name}.json").unlink()


def grpc_security(direction, account):
    """Mutual TLS of gRPC, by the certificate provider in the agent's bootstrap."""
    kind = f"{TYPES}.extensions.transport_sockets.tls.v3.{direction}TlsContext"
    provider = {"instance_name": "default"}
    validation = {"ca_certificate_provider_instance": provider | {"certificate_name": "ROOTCA"}}
    if direction == "Upstream":
        names = [{"exact": identity(account)}]
        validation["match_subject_alt_names"] = names
    config = {"@type": kind, "common_tls_context": {
        "tls_certificate_provider_instance": provider | {"certificate_name": "default"},
        "validation_context": validation}}
    if direction == "Downstream":
        config["require_client_certificate"] = True
    return {"name": "envoy.transport_sockets.tls", "typed_config": config}


def grpc_client(name, account, address, port):
    api = manager(name)["typed_config"]
    return [{"@type": f"{TYPES}.config.listener.v3.Listener", "name": name,
             "api_listener": {"api_listener": api}},
            {"@type": f"{TYPES}.config.route.v3.RouteConfiguration", "name": name, "virtual_hosts": [
                {"name": name, "domains": ["*"],
                 "routes": [{"match": {"prefix": ""}, "route": {"cluster": name}}]}]},
            cluster(name, transport_socket=grpc_security("Upstream", account)),
            endpoints(name, [(address, port)]) | {"endpoints": [{
                "locality": {"region": "here"}, "load_balancing_weight": 1,
                "lb_endpoints": endpoints(name, [(address, port)])["endpoints"][0]["lb_endpoints"]}]}]


def grpc_server(port, account):
    answering = manager("none")
    del answering["typed_config"]["rds"]
    answering["typed_config"]["route_config"] = {"virtual_hosts": [
        {"name": "all", "domains": ["*"],
         "routes": [{"match": {"prefix": "/"}, "non_forwarding_action": {}}]}]}
    chain = {"filters": [answering], "transport_socket": grpc_security("Downstream", account)}
    return [listener(f"xds.istio.io/grpc/lds/inbound/0.0.0.0:{port}", port, chain, "INBOUND")]
