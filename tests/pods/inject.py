"""Makes a pod of a Deployment and its annotations, as Istio's injection templates would.

Only what the tests need: the images, flags, variables, volumes and probes of the agent's containers.
"""

import copy
import json

import yaml

IMAGE = "docker.io/istio/proxyv2:1.32.0"
USER = 1337
HEALTH = {"httpGet": {"path": "/healthz/ready", "port": 15021}, "timeoutSeconds": 3}
DATA = {"istio-envoy": ("/etc/istio/proxy", {"emptyDir": {"medium": "Memory"}}),
        "istio-data": ("/var/lib/istio/data", {"emptyDir": {}}),
        "workload-socket": ("/var/run/secrets/workload-spiffe-uds", {}),
        "credential-socket": ("/var/run/secrets/credential-uds", {}),
        "workload-certs": ("/var/run/secrets/workload-spiffe-credentials", {}),
        "istiod-ca-cert": ("/var/run/secrets/istio", {"configMap": {"name": "istio-ca-root-cert"}}),
        "istio-ca-crl": ("/var/run/secrets/istio/crl",
                         {"configMap": {"name": "istio-ca-crl", "optional": True}}),
        "istio-podinfo": ("/etc/istio/pod", {"downwardAPI": {"items": [
            {"path": name, "fieldRef": {"fieldPath": f"metadata.{name}"}}
            for name in ("labels", "annotations")]}}),
        "istio-token": ("/var/run/secrets/tokens", {"projected": {"sources": [
            {"serviceAccountToken": {"audience": "istio-ca", "expirationSeconds": 43200,
                                     "path": "istio-token"}}]}})}


class Injection:
    """One pod template and what its annotations ask for."""

    def __init__(self, deployment, image=IMAGE, cni=False):
        self.deployment = copy.deepcopy(deployment)
        self.pod = self.deployment["spec"]["template"]
        self.metadata, self.spec = self.pod.setdefault("metadata", {}), self.pod["spec"]
        self.annotations = self.metadata.setdefault("annotations", {})
        self.labels = self.metadata.setdefault("labels", {})
        self.image = self.annotations.get("sidecar.istio.io/proxyImage", image)
        self.kind = self.annotations.get("inject.istio.io/templates", "sidecar")
        self.mode = self.annotations.get("sidecar.istio.io/interceptionMode", "REDIRECT")
        self.is_native = self.annotations.get("sidecar.istio.io/nativeSidecar") == "true"
        self.cni = cni
        config = yaml.safe_load(self.annotations.get("proxy.istio.io/config", "{}"))
        self.metadata_variables = config.get("proxyMetadata", {})
        self.config = config

    def made(self):
        """The Deployment with the containers and volumes of the kind."""
        proxy = self.proxy()
        containers = self.spec["containers"]
        self.spec.setdefault("initContainers", [])
        if self.kind in ("gateway", "waypoint"):
            containers[0] = proxy | {"ports": containers[0].get("ports", [])}
            self.spec["securityContext"] = {"sysctls": [
                {"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}]}
        elif self.kind == "grpc-agent":
            self.share_with_application(containers[0])
            containers.insert(0 if self.config.get("holdApplicationUntilProxyStarts") else 1, proxy)
        else:
            self.rewrite_probes(proxy, containers[0])
            self.spec["initContainers"].append(self.capture())
            if self.is_native:
                proxy["restartPolicy"] = "Always"
                proxy["lifecycle"] = {"preStop": {"exec": {"command": [
                    "pilot-agent", "request", "--debug-port=15020", "POST", "drain"]}}}
                self.spec["initContainers"].append(proxy)
            elif self.config.get("holdApplicationUntilProxyStarts"):
                proxy["lifecycle"] = {"postStart": {"exec": {"command": ["pilot-agent", "wait"]}}}
                containers.insert(0, proxy)
            else:
                containers.append(proxy)
        self.spec.setdefault("volumes", []).extend(
            {"name": name} | source for name, (_, source) in DATA.items())
        return self.deployment

    def proxy(self):
        role = {"gateway": "router", "waypoint": "waypoint"}.get(self.kind, "sidecar")
        limits = {name: self.annotations[f"sidecar.istio.io/proxy{label}Limit"]
                  for name, label in (("cpu", "CPU"), ("memory", "Memory"))
                  if f"sidecar.istio.io/proxy{label}Limit" in self.annotations}
        made = {
            "name": "istio-proxy", "image": self.image,
            "args": ["proxy", role, "--domain", "$(POD_NAMESPACE).svc.cluster.local",
                     "--proxyLogLevel=warning", "--log_output_level=default:info"],
            "env": self.variables(), "resources": {"limits": limits},
            "securityContext": self.proxy_security(),
            "readinessProbe": HEALTH | {"periodSeconds": 1, "failureThreshold": 4},
            "startupProbe": HEALTH | {"periodSeconds": 1, "failureThreshold": 600},
            "volumeMounts": self.mounts()}
        if self.kind == "grpc-agent":
            made["readinessProbe"] = made.pop("startupProbe") | {
                "httpGet": {"path": "/healthz/ready", "port": 15020}}
            made["lifecycle"] = {"postStart": {"exec": {"command": [
                "pilot-agent", "wait", "--url=http://localhost:15020/healthz/ready"]}}}
        return made

    def proxy_security(self):
        if self.kind in ("gateway", "waypoint"):
            return {"runAsUser": USER, "runAsGroup": USER}
        if self.kind == "grpc-agent":
            return {}
        is_transparent = self.mode == "TPROXY"
        return {"allowPrivilegeEscalation": False, "privileged": False,
                "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"] if is_transparent else []},
                "readOnlyRootFilesystem": True, "runAsGroup": USER,
                "runAsNonRoot": not is_transparent, "runAsUser": 0 if is_transparent else USER}

    def variables(self):
        name = self.deployment["metadata"]["name"]
        fields = {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace",
                  "INSTANCE_IP": "status.podIP", "SERVICE_ACCOUNT": "spec.serviceAccountName",
                  "HOST_IP": "status.hostIP", "ISTIO_META_NODE_NAME": "spec.nodeName"}
        plain = {"PILOT_CERT_PROVIDER": "istiod", "CA_ADDR": "istiod.istio-system.svc:15012",
                 "PROXY_CONFIG": json.dumps(self.config), "TRUST_DOMAIN": "cluster.local",
                 "ISTIO_META_CLUSTER_ID": "Kubernetes", "ISTIO_META_WORKLOAD_NAME": name,
                 "ISTIO_META_INTERCEPTION_MODE": self.mode, **self.metadata_variables}
        if self.kind == "grpc-agent":
            plain |= {"ISTIO_META_GENERATOR": "grpc", "OUTPUT_CERTS": "/var/lib/istio/data",
                      "DISABLE_ENVOY": "true"}
        made = [{"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                for key, path in fields.items()]
        for key, resource in (("ISTIO_CPU_LIMIT", "limits.cpu"), ("GOMEMLIMIT", "limits.memory")):
            made.append({"name": key, "valueFrom": {"resourceFieldRef": {"resource": resource}}})
        return made + [{"name": key, "value": value} for key, value in plain.items()]

    def mounts(self):
        return [{"name": name, "mountPath": path} for name, (path, _) in DATA.items()]

    def rewrite_probes(self, proxy, application):
        """Probes of the application are answered by the agent."""
        probe = application.get("readinessProbe")
        if probe and "httpGet" in probe:
            path = f"/app-health/{application['name']}/readyz"
            told = json.dumps({path: {"httpGet": probe["httpGet"]}})
            proxy["env"].append({"name": "ISTIO_KUBE_APP_PROBERS", "value": told})
            application["readinessProbe"] = probe | {"httpGet": {"path": path, "port": 15020}}

    def share_with_application(self, application):
        """A gRPC application reads the agent's bootstrap and certificates."""
        application.setdefault("env", []).extend([
            {"name": "GRPC_XDS_EXPERIMENTAL_SECURITY_SUPPORT", "value": "true"},
            {"name": "GRPC_XDS_BOOTSTRAP", "value": "/etc/istio/proxy/grpc-bootstrap.json"}])
        application.setdefault("volumeMounts", []).extend(
            {"name": name, "mountPath": DATA[name][0]} for name in ("istio-envoy", "istio-data"))

    def capture(self):
        """The init container that captures traffic, or checks that the CNI plugin did."""
        security = {"allowPrivilegeEscalation": False, "runAsUser": 0, "runAsGroup": 0,
                    "runAsNonRoot": False,
                    "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN", "NET_RAW"]}}
        if self.cni:
            security |= {"runAsUser": USER, "runAsGroup": USER, "runAsNonRoot": True,
                         "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        arguments = ["istio-iptables", *capture_arguments(self.mode)]
        return {"name": "istio-validation" if self.cni else "istio-init", "image": self.image,
                "args": arguments + (["--run-validation", "--skip-rule-apply"] if self.cni else []),
                "env": [{"name": key, "value": value}
                        for key, value in self.metadata_variables.items()],
                "securityContext": security}


def capture_arguments(mode):
    return ["-p", "15001", "-z", "15006", "-u", str(USER), "-m", mode, "-i", "*", "-x", "", "-b", "*",
            "-d", "15090,15021,15020"]
