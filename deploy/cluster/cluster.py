#!/usr/bin/env python3
"""Starts Kubernetes with istiod on this machine, in separate namespaces. `cluster.py FOLDER` stops it."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time

from images import Layout
from programs import ISTIODS, RELEASES, programs, say

HERE = pathlib.Path(__file__).resolve().parent
CONFIG = HERE / "config"
STANDBY = HERE.parent / "kubernetes" / "standby.yaml"
# Each agent's image has two names, so that a pod can change from one to the other.
OURS_NAMES, GO_NAMES = (tuple(f"localhost/agent-{agent}:{tag}" for tag in (1, 2)) for agent in ("ours", "go"))
APPLICATION = "localhost/application:1"
# Istio's programs look for iptables under these names.
IPTABLES = {f"/usr/sbin/{family}{action}": "xtables-nft-multi" for family in ("iptables", "ip6tables")
            for action in ("", "-save", "-restore")}
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30")


class Cluster:
    """A cluster. All its files are in one folder, and all its processes end with its first one. istio-agent's containers
    have the environment variables `variables` (NAME=VALUE)."""

    def __init__(self, folder, variables=()):
        self.folder, self.variables = folder, variables
        self.kubectl = folder / "kubectl"

    def first(self):
        """Returns the PID of the first process in the namespaces, or None if it does not run."""
        try:
            pid = int((self.folder / "pid").read_text())
            command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if str(HERE / "node").encode() in command else None

    def start(self, agent, istiod="istio", kubernetes="1.34"):
        """Starts the cluster with the agent's image, which is an OCI layout, an istiod and a release of Kubernetes."""
        if problems := missing(kubernetes):
            sys.exit("\n".join(f"cluster: {problem}" for problem in problems))
        if self.first():
            sys.exit(f"cluster: one runs in {self.folder} already; make cluster-stop ends it")
        istio, tools, node = programs("istio"), programs("tools"), [programs(name) for name in RELEASES[kubernetes]]
        control_plane = programs(istiod)
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "programs").mkdir(parents=True)
        for program in (file for folder in (*node, tools) for file in folder.iterdir()):
            (self.folder / "programs" / program.name).symlink_to(program)
        (self.folder / "istiod").symlink_to(control_plane)
        self.certificates()
        layout = Layout(self.folder / "images")
        layout.add("localhost/pause:1", {"/pause": tools / "pause"}, Entrypoint=["/pause"])
        self.images(layout, agent, istio, control_plane, tools)
        for program in (node[0] / "kubectl", istio / "istioctl"):
            wrapper = self.folder / program.name
            wrapper.write_text(f"#!/bin/sh\nexec nsenter --target $(cat {self.folder}/pid) --net --wd=\"$PWD\" "
                               f"{program} --kubeconfig {self.folder}/kubeconfig \"$@\"\n")
            wrapper.chmod(0o755)
        self.boot()
        self.install(istio)

    def images(self, layout, agent, istio, control_plane, tools):
        """Adds the images of applications, agents, istiod and its CNI plugin."""
        add_istiod(layout, "localhost/istiod:1", control_plane)
        layout.add(APPLICATION, {"/application": tools / "application"}, Entrypoint=["/application"])
        # The second image claims to be for another release of Istio, so that agents take it for another build.
        (self.folder / "version").write_text("1.31.1\n")
        for name, files in zip(OURS_NAMES, ({}, {"/usr/local/bin/pilot-agent.istio-version": self.folder / "version"})):
            layout.add(name, files, agent, variables=self.variables)
        for name in GO_NAMES:
            layout.add(name, go_agent(istio), agent)
        layout.add("localhost/install-cni:1", {"/usr/local/bin/install-cni": istio / "install-cni",
                                               "/opt/cni/bin/istio-cni": istio / "istio-cni", **IPTABLES}, agent)

    def add_image(self, name, files, base):
        """Adds an image to the running cluster."""
        layout = Layout(self.folder / "added")
        layout.add(name, files, base)
        archive = subprocess.run(["tar", "-C", layout.folder, "-c", "."], check=True, capture_output=True).stdout
        self.inside("ctr", "--namespace", "k8s.io", "images", "import", "--no-unpack", "-", input=archive)

    def openssl(self, *words):
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True)

    def authority(self, name):
        """Creates a root certificate, and returns the PEM texts of the certificate and its key."""
        self.openssl("req", "-x509", *NEW_KEY, "-subj", f"/O=cluster/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt")
        return tuple((self.folder / f"{name}.{part}").read_text() for part in ("crt", "key"))

    def certificates(self):
        """Creates a CA, a certificate for node and API server, one for the administrator, and the kubeconfig."""
        self.authority("ca")
        self.openssl("genrsa", "-out", "accounts.key", "2048")
        names = ("DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local,DNS:node,"
                 "IP:10.96.0.1,IP:10.99.0.1")
        for name, subject in (("node", "/CN=node"), ("admin", "/O=system:masters/CN=admin")):
            self.openssl("req", "-x509", *NEW_KEY, "-subj", subject, "-addext", f"subjectAltName={names}",
                         "-addext", "basicConstraints=critical,CA:FALSE", "-CA", "ca.crt", "-CAkey", "ca.key",
                         "-keyout", f"{name}.key", "-out", f"{name}.crt")
        # JSON is YAML. The paths are relative to this file, because kubectl outside and the controllers inside see it
        # in different folders.
        (self.folder / "kubeconfig").write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "cluster",
            "clusters": [{"name": "cluster", "cluster": {
                "server": "https://10.99.0.1:6443", "certificate-authority": "ca.crt"}}],
            "users": [{"name": "admin", "user": {
                "client-certificate": "admin.crt", "client-key": "admin.key"}}],
            "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": "admin"}}]}))

    def boot(self):
        with open(self.folder / "node.log", "wb") as log:
            process = subprocess.Popen(
                ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--net", "--ipc",
                 HERE / "node", self.folder, self.folder / "programs", CONFIG],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until("the namespaces exist", lambda: process.poll() is not None or children.read_text())
        (self.folder / "pid").write_text(children.read_text().strip())
        until("Kubernetes has started", lambda: (self.folder / "started").exists() or not self.first())
        if not self.first():
            raise SystemExit(f"cluster: it has not started: {(self.folder / 'node.log').read_text()}")
        self.run("apply", "-f", CONFIG / "base.yaml")
        self.run("wait", "--for=create", "node/node", "--timeout=60s")
        self.run("wait", "--for=condition=Ready", "node/node", "--timeout=60s")

    def install(self, istio):
        self.run("apply", "--server-side", "-f", istio / "gateway-api-crd.yaml")
        self.set_mesh()
        self.run("-n", "istio-system", "rollout", "status", "deploy/istiod", "--timeout=120s")

    def set_mesh(self, *values, istiod=None, cni=False):
        """Applies the charts of this istiod, or else of the one at the start, with config/istio.yaml and other values.
        With `cni` it also applies the chart istio-cni."""
        if istiod:
            values = (*values, f"pilot.image={istiod_image(istiod)}")
        words = [word for value in values for word in ("--set", f"values.{value}")]
        manifests = (programs(istiod) if istiod else self.folder / "istiod") / "manifests"
        rendered = subprocess.run(
            [self.folder / "istioctl", "manifest", "generate", "--manifests", manifests,
             "--filename", CONFIG / "istio.yaml", "--filename", self.templates(), "--set", f"components.cni.enabled={str(cni).lower()}", *words],
            check=True, capture_output=True, text=True).stdout
        self.run("apply", "--server-side", "--force-conflicts", "-f", "-", input=rendered)

    def templates(self):
        """Writes a file with the injection template `standby` in the form that istioctl reads, and returns its path."""
        values = textwrap.indent(STANDBY.read_text(), "    ")
        file = self.folder / "standby.yaml"
        file.write_text(f"apiVersion: install.istio.io/v1alpha1\nkind: IstioOperator\nspec:\n  values:\n{values}")
        return file

    def remove_cni(self):
        """Deletes Istio's CNI plugin, which removes its files from the node when it ends."""
        self.run("-n", "istio-system", "delete", "--cascade=foreground", "--timeout=60s",
                 "-l", "operator.istio.io/component=Cni",
                 "daemonsets,configmaps,serviceaccounts,clusterroles,clusterrolebindings")

    def another_istiod(self):
        """Builds the istiod that the cluster was not started with, adds its image to the node, and returns its name."""
        name = next(name for name in ISTIODS if programs(name) != (self.folder / "istiod").resolve())
        layout = Layout(self.folder / "another")
        add_istiod(layout, istiod_image(name), programs(name))
        self.inside("sh", "-c", "tar -C /run/cluster/another -c . | ctr --namespace k8s.io images import -")
        return name

    def run(self, *words, **more):
        done = subprocess.run([self.kubectl, *words], capture_output=True, text=True, **more)
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(map(str, words))}: {done.stderr.strip()}")
        return done.stdout

    @property
    def istioctl(self):
        return [self.folder / "istioctl"]

    @staticmethod
    def other(image):
        return f"{image[:-1]}{3 - int(image[-1])}"

    def inside(self, *command, **more):
        path = f"PATH=/run/programs:{os.environ['PATH']}"
        return subprocess.run(["nsenter", "--target", str(self.first()), "--all", "env", path, *command],
                              check=True, capture_output=True, **more)

    def proxy_mode(self, mode):
        """Starts kube-proxy again in this mode. It deletes the rules of the former mode."""
        self.inside("timeout", "60", "sh", "-ec", r"""
            command=$(tr '\0' ' ' </proc/$(pidof kube-proxy)/cmdline)
            kill $(pidof kube-proxy)
            while pidof kube-proxy; do sleep 0.1; done
            setsid $command --proxy-mode $0 </dev/null >>/var/log/kube-proxy.log 2>&1 &
            until [ "$(curl -s 127.0.0.1:10249/proxyMode)" = $0 ]; do sleep 0.1; done""", mode)

    def stop(self):
        """Kills the first process, with which all processes, mounts and networks end, and removes control groups."""
        if pid := self.first():
            os.kill(pid, signal.SIGKILL)
            until("all processes have ended", lambda: not pathlib.Path(f"/proc/{pid}").exists())
        for root in pathlib.Path("/sys/fs/cgroup").glob("**/kubepods"):
            for folder, _, _ in os.walk(root, topdown=False):
                until(f"{folder} is empty", lambda: removed(folder), 10)
        for folder in ("lib", "images"):
            shutil.rmtree(self.folder / folder, ignore_errors=True)


def go_agent(istio):
    """Returns the files of pilot-agent that replace this agent's files in an image."""
    return {"/usr/local/bin/pilot-agent": istio / "pilot-agent",
            "/var/lib/istio/envoy/envoy_bootstrap_tmpl.json": istio / "envoy_bootstrap.json", **IPTABLES}


def istiod_image(name):
    return f"localhost/istiod:{name.replace('/', '-')}"


def add_istiod(layout, image, control_plane):
    layout.add(image, {"/usr/local/bin/pilot-discovery": control_plane / "pilot-discovery"},
               Entrypoint=["/usr/local/bin/pilot-discovery"], User="1337:1337")


def missing(kubernetes):
    """Returns the requirements that this machine does not meet."""
    if os.geteuid() != 0 or sys.platform != "linux":
        return ["root and Linux are needed: containers and network namespaces are made"]
    needs = subprocess.run([HERE.parent / "needs", "cluster", f"cluster-{kubernetes}"], capture_output=True, text=True)
    problems = needs.stderr.splitlines()
    if any(pathlib.Path("/sys/fs/cgroup").glob("**/kubepods")):
        problems.append("/sys/fs/cgroup has kubepods: another kubelet runs here")
    return problems


def removed(folder):
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def until(what, check, limit=120):
    deadline = time.monotonic() + limit
    while not (value := check()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {limit} s in vain until {what}")
        time.sleep(0.1)
    return value


if __name__ == "__main__":
    Cluster(pathlib.Path(sys.argv[1]).resolve()).stop()
