"""Helpers of the cases: kubectl, applications with the sidecar of either agent, and load that counts failures."""

import collections
import json
import pathlib
import shutil
import subprocess
import time

OURS, GO = "ours", "go"
ISTIOD = ("-n", "istio-system", "deploy/istiod")
LIMIT = "90s"
# The unit in which a load counts, by the kind of target.
SENT = {"http": "requests", "xds": "requests", "h2c": "requests by h2c", "grpc": "messages by grpc",
        "tcp": "messages by tcp", "dns": "queries by dns", "get": "requests by get"}


class Failed(Exception):
    """The reason why a case fails."""


class Skipped(Exception):
    """The reason why a case cannot run here."""


class World:
    """A namespace of a cluster. `cluster` is the cluster that the command has created, or None for a user's cluster;
    `layout` is the agent's image."""

    def __init__(self, kubectl, namespace, image, application, cluster=None, layout=None):
        self.command, self.namespace, self.cluster, self.layout = kubectl, namespace, cluster, layout
        # GO is the mesh's default agent, which needs no annotation.
        self.images = {OURS: image, GO: None}
        self.application = application

    def kubectl(self, *words, fails=False, **more):
        done = subprocess.run([*self.command, "-n", self.namespace, *map(str, words)],
                              capture_output=True, text=True, timeout=180, **more)
        if done.returncode and not fails:
            raise Failed(f"kubectl {' '.join(map(str, words))}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *words):
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def apply(self, *resources):
        self.kubectl("apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": resources}))

    def template(self, name, agent, annotations=None, labels=None, app=None, spec=None):
        """Returns the template of a pod with the application, for a Deployment or Job."""
        annotations = dict(annotations or {})
        if self.images[agent]:
            annotations["sidecar.istio.io/proxyImage"] = self.images[agent]
        container = {
            "name": "app", "image": self.application, "args": ["serve"],
            "readinessProbe": {"httpGet": {"path": "/health", "port": 8080}, "periodSeconds": 1},
            # Clients learn that a pod ends later than the pod itself.
            "lifecycle": {"preStop": {"sleep": {"seconds": 5}}}} | (app or {})
        return {"metadata": {"annotations": annotations, "labels": {"app": name} | (labels or {})},
                "spec": {"terminationGracePeriodSeconds": 20, "containers": [container]} | (spec or {})}

    def deploy(self, name, agent, replicas=1, **template):
        """Creates a Deployment and its Service, and returns the name without waiting for the pods."""
        self.apply(
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {
                "selector": {"app": name}, "ports": [
                    {"name": "http", "port": 8080}, {"name": "grpc", "port": 8081}, {"name": "tcp", "port": 8082},
                    {"name": "http2", "port": 8083, "targetPort": 8080}]}},
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": {
                "replicas": replicas, "selector": {"matchLabels": {"app": name}},
                "strategy": {"rollingUpdate": {"maxUnavailable": 0}},
                "template": self.template(name, agent, **template)}})
        return name

    def rolled_out(self, *names):
        for name in names:
            self.kubectl("rollout", "status", f"deploy/{name}", f"--timeout={LIMIT}")

    def swap(self, name, agent):
        """Gives a Deployment another agent by annotation, and waits until the old pods are deleted."""
        old = self.pods(name)
        self.kubectl("patch", f"deploy/{name}", "-p", json.dumps({"spec": {"template": {"metadata": {
            "annotations": {"sidecar.istio.io/proxyImage": self.images[agent]}}}}}))
        self.rolled_out(name)
        self.gone(old)

    def restart(self, name):
        """Replaces the pods of a Deployment, and waits until the old ones are deleted."""
        old = self.pods(name)
        self.kubectl("rollout", "restart", f"deploy/{name}")
        self.rolled_out(name)
        self.gone(old)

    def pods(self, name):
        return [pod["metadata"]["name"] for pod in self.get("pods", "-l", f"app={name}")["items"]
                if not pod["metadata"].get("deletionTimestamp")]

    def gone(self, pods):
        self.kubectl("wait", "--for=delete", f"--timeout={LIMIT}", *(f"pod/{pod}" for pod in pods), fails=True)

    def exec(self, target, *words, container="app", **more):
        return self.kubectl("exec", target, "-c", container, "--", *words, **more)

    def call(self, client, url):
        """Calls a URL from a client's application, and returns the response of the server's application."""
        return json.loads(self.exec(f"deploy/{client}", "/application", "get", url))

    def agent_of(self, target):
        """Returns the agent that runs in the sidecar."""
        return OURS if "istio-agent" in self.exec(target, "pilot-agent", "version", container="istio-proxy") else GO

    def container(self, pod, name):
        status = self.get(f"pod/{pod}")["status"]
        return next(one for part in ("containerStatuses", "initContainerStatuses")
                    for one in status.get(part, []) if one["name"] == name)

    def injected(self, agent=GO, **template):
        """Returns a pod after injection by the webhook. Nothing is created."""
        template = self.template("injected", agent, **template)
        return json.loads(self.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", input=json.dumps(
            {"apiVersion": "v1", "kind": "Pod", "spec": template["spec"],
             "metadata": template["metadata"] | {"name": "injected"}})))

    def mesh_image(self):
        """Returns the image that pods get without an annotation."""
        return next(one["image"] for part in ("initContainers", "containers")
                    for one in self.injected()["spec"].get(part, []) if one["name"] == "istio-proxy")

    def other_image(self, agent):
        """Returns another image of the same agent in a cluster of the command, otherwise the mesh's image."""
        return self.cluster.other(self.images[agent] or self.mesh_image()) if self.cluster else self.mesh_image()

    def istioctl(self, *words, **more):
        command = self.cluster.istioctl if self.cluster else ["istioctl", *self.command[1:]]
        if not shutil.which(command[0]):
            raise Skipped("needs istioctl")
        done = subprocess.run([*command, "-n", self.namespace, *words], capture_output=True, text=True, timeout=120, **more)
        if done.returncode:
            raise Failed(f"istioctl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def admin(self, target, path, method="GET"):
        """Returns a response of Envoy's admin interface, requested through the agent."""
        return self.exec(target, "pilot-agent", "request", method, path, container="istio-proxy")

    def rolled_out_istiod(self):
        self.kubectl("rollout", "status", *ISTIOD, f"--timeout={LIMIT}")

    def scale_istiod(self, replicas):
        self.kubectl("scale", *ISTIOD, f"--replicas={replicas}")
        self.rolled_out_istiod()
        if not replicas:
            self.kubectl("wait", "-n", "istio-system", "--for=delete", "pod", "-l", "app=istiod", f"--timeout={LIMIT}")

    def kill(self, pod, container):
        """Kills a container's first process, like the kernel when memory is short."""
        name = self.container(pod, container)["containerID"].partition("://")[2]
        self.cluster.inside("ctr", "--namespace", "k8s.io", "task", "kill", "--signal", "SIGKILL", name)

    def process(self, pod, program, container="istio-proxy"):
        """Returns the PID of a program in a sidecar's container, in the PID namespace of this machine."""
        container = self.container(pod, container)["containerID"].partition("://")[2]
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if (folder / "comm").read_text().strip() == program and container in (folder / "cgroup").read_text():
                    return int(folder.name)
            except OSError:
                continue
        raise Failed(f"no {program} in {pod}")

    def describe(self, folder):
        """Writes files that help to find out why a case has failed."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, words in {"pods": ["get", "pods", "-o", "wide"], "events": ["get", "events", "--sort-by=.lastTimestamp"],
                            "pods.yaml": ["get", "pods", "-o", "yaml"],
                            "istiod.log": ["logs", "-n", "istio-system", "deploy/istiod", "--tail=3000"]}.items():
            (folder / name).write_text(self.kubectl(*words, fails=True))
        for pod in self.get("pods")["items"]:
            name = pod["metadata"]["name"]
            for container in ("istio-proxy", "istio-standby"):
                for previous in ("", "--previous"):
                    if log := self.kubectl("logs", name, "-c", container, *previous.split(), fails=True):
                        (folder / f"{name}-{container}{previous}.log").write_text(log)

    def until(self, what, check, limit=60):
        """Waits until a check is true, and returns its value. A check that raises Failed or ValueError is repeated."""
        deadline = time.monotonic() + limit
        while True:
            try:
                if value := check():
                    return value
                why = ""
            except (Failed, ValueError) as error:
                why = f": {error}"
            if time.monotonic() > deadline:
                raise Failed(f"waited {limit} s in vain until {what}{why}")
            time.sleep(0.3)


class Load:
    """The load that the applications of Deployments send while the block runs. `told` has the results of each client.

    `targets` is one target, a list, or a list for each client. A stream or TCP connection is held for `hold` seconds.
    """

    def __init__(self, world, targets, *clients, hold=None):
        targets = [targets] if isinstance(targets, str) else targets
        self.world, self.options = world, [f"-hold={hold}s"] if hold else []
        self.targets = targets if isinstance(targets, dict) else dict.fromkeys(clients, targets)
        self.told = {}

    def __enter__(self):
        for client, targets in self.targets.items():
            others = [one for one in targets if SENT[kind_of(one)] != "requests"]
            for one in targets:
                if one not in others:
                    self.world.until(f"{client} reaches {one}", lambda: self.world.call(client, one))
            if others:
                self.world.until(f"{client} reaches {' '.join(others)}", lambda: self.reaches(client, others))
        self.running = {client: self.start(client, targets) for client, targets in self.targets.items()}
        time.sleep(1)
        return self

    def __exit__(self, kind, *_):
        time.sleep(0 if kind else 1)
        for client, process in self.running.items():
            try:
                self.told[client] = self.end(client, process)
            except Failed:
                if not kind:
                    raise

    def start(self, client, targets):
        return subprocess.Popen(
            [*self.world.command, "-n", self.world.namespace, "exec", "-i", f"deploy/{client}", "-c", "app", "--",
             "/application", "load", *self.options, *targets],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def end(self, client, process):
        output, errors = process.communicate(timeout=30)
        if process.returncode:
            raise Failed(f"the load of {client} ended: {errors.decode()}")
        return json.loads(output)

    def reaches(self, client, targets):
        """Returns true if a second of load reaches targets of every kind."""
        process = self.start(client, targets)
        time.sleep(1)
        told = self.end(client, process)
        if told["failed"]:
            raise Failed(told["failed"][0])
        return all(one["sent"] for one in told["by_kind"].values())

    def expect_none_failed(self):
        """Fails if a request failed, or if a client has sent none."""
        sent, failed = collections.Counter(), []
        silent = [str(client) for client, told in self.told.items() if not told["sent"]]
        if silent or not self.told:
            raise Failed(f"no request was sent by {', '.join(silent) or 'any client'}")
        for client, told in self.told.items():
            for kind, one in told["by_kind"].items():
                sent[kind] += one["sent"]
                if one["failed"]:
                    some = [text for text in told["failed"] if kind_of(text) == kind]
                    failed.append(f"{client}: {len(some)} of {one['sent']} {SENT[kind]}: {', '.join(some[:4])}")
        if failed:
            raise Failed(f"failed requests: {'; '.join(failed)}")
        return "".join(f"{sent[kind]} {what}, " for kind, what in SENT.items() if kind in sent) + "none failed"


def kind_of(target):
    return target.partition(":")[0]


def expect(what, wanted, found):
    if wanted != found:
        raise Failed(f"{what}: expected {wanted!r}, found {found!r}")
