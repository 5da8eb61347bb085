"""The parts of the demo's mesh: a control plane, and workloads that have an agent and an Envoy each.

All use one folder, and loopback addresses. The working directory of each agent replaces the root of its container.
"""

import json
import os
import pathlib
import shlex
import shutil
import string
import subprocess
import sys
import time

import envoy
import ports
import processes
from processes import Refused, wait_until

HERE = pathlib.Path(__file__).resolve().parent
TRUST_DOMAIN, NAMESPACE = "cluster.local", "demo"
CERTIFICATE_SECONDS = 30
DISCOVERED = ["Cluster", "ClusterLoadAssignment", "Listener", "RouteConfiguration"]
NAMES = ["istiod", "workload", "inbound", "outbound", "machine_workload", "machine_inbound",
         *(f"{workload}_{use}" for workload in ("client", "server", "machine")
           for use in ("admin", "status", "health", "metrics"))]


def identity(account):
    return f"spiffe://{TRUST_DOMAIN}/ns/{NAMESPACE}/sa/{account}"


class Mesh:
    """Paths, ports and processes of one run."""

    def __init__(self, agent, istiod, envoy_binary, root):
        self.agent, self.istiod_binary, self.envoy_binary, self.root = agent, istiod, envoy_binary, root
        self.register = root.with_suffix(".running.json")
        self.was_kept = processes.end_kept(self.register)
        shutil.rmtree(root, ignore_errors=True)
        (root / "logs").mkdir(parents=True)
        self.family = processes.Family(self.register)
        self.ports = ports.free_ports(NAMES)
        self.istiod = None
        self.machine_is_healthy = root / "machine-is-healthy"

    def log(self, name):
        return self.root / "logs" / f"{name}.log"

    # The control plane.

    def start_istiod(self):
        port, folder = self.ports["istiod"], self.root / "istiod"
        command = [
            self.istiod_binary, "--listen", f"127.0.0.1:{port}",
            "--resources", folder / "resources", "--out", folder / "out",
            "--state", folder / "state", "--trust-domain", TRUST_DOMAIN,
            "--max-cert-ttl", f"{CERTIFICATE_SECONDS}s"]
        for account in ("client", "server"):
            command += ["--identity", f"{NAMESPACE}/{account}"]
        log = self.log("local-istiod")
        before = log.stat().st_size if log.exists() else 0
        self.istiod = self.family.start(
            "local-istiod", [str(part) for part in command], folder, base_environment(), log)
        said_so = lambda: b"local-istiod listening on" in log.read_bytes()[before:]
        wait_until("local-istiod to listen", said_so, 15, [self.istiod], pause=0.005)
        return time.monotonic() - self.istiod.started

    def write_resources(self, version):
        """Fills the templates in, and replaces each file that has changed atomically."""
        values = {f"{name}_port": port for name, port in self.ports.items()}
        values |= {"version": version, "client_identity": identity("client"),
                   "server_identity": identity("server"), "namespace": NAMESPACE}
        of_machine = values | {use: values[f"machine_{use}"]
                               for use in ("inbound_port", "workload_port")}
        self.fill_in("client", "client", values)
        self.fill_in("server", "server", values)
        self.fill_in("server", "machine", of_machine)

    def fill_in(self, templates, node, values):
        for template in sorted((HERE / "resources" / templates).glob("*.yaml")):
            text = string.Template(template.read_text()).substitute(values)
            target = self.root / "istiod/resources" / node / template.name
            if not target.exists() or target.read_text() != text:
                put_in_place(target, text, self.root / "istiod")

    def all_acknowledged(self):
        """Returns true if both Envoys have acknowledged every type, according to local-istiod's log."""
        self.expect_no_refusal()
        lines = self.istiod.log.read_text(errors="replace").splitlines()
        acknowledged = {(line.split()[1], line.split()[-1])
                        for line in lines if line.startswith("ACK ")}
        return acknowledged >= {(kind, f"{account}-0.{NAMESPACE}")
                                for kind in DISCOVERED for account in ("client", "server")}

    def expect_no_refusal(self):
        for line in self.istiod.log.read_text(errors="replace").splitlines():
            if line.startswith("NACK "):
                raise Refused(f"an Envoy refused a resource: {line[:300]}", [self.istiod.log])

    # The workloads.

    def start_application(self, name, port):
        command = [sys.executable, str(HERE / "workload.py"), str(port), name]
        process = self.family.start(
            f"the {name} workload", command, self.root, base_environment(),
            self.log(f"{name}-workload"))
        wait_until(f"the {name} workload to listen", lambda: ports.accepts(port), 15, [process])

    def start_workload(self, account):
        return Workload(self, account, account, {}, {})

    def start_machine(self, probe):
        """Starts a machine of the group `server`, with the server's account."""
        return Workload(self, "machine", "server", {"readinessProbe": probe},
                        {"ISTIO_META_AUTO_REGISTER_GROUP": "server"})

    def logged(self, line):
        """Returns the number of times that local-istiod has logged this line."""
        return self.istiod.log.read_text(errors="replace").splitlines().count(line)


class Workload:
    """One agent with its Envoy."""

    def __init__(self, mesh, name, account, settings, environment):
        self.name, self.mesh, self.account = name, mesh, account
        self.folder = mesh.root / name
        self.admin = envoy.Admin(mesh.ports[f"{name}_admin"])
        self.give_credentials()
        self.variables = self.environment(settings) | environment
        self.agent = mesh.family.start(
            f"the {name}'s agent",
            [str(mesh.agent), "proxy", "sidecar",
             "--log_output_level=default:info"],
            self.folder, self.variables, mesh.log(f"{name}-agent-and-envoy"))
        self.envoy_pid = None

    def give_credentials(self):
        """Copies the files that the kubelet mounts in a pod: istiod's root and the service account's token."""
        out, secrets = self.mesh.root / "istiod/out", self.folder / "var/run/secrets"
        for source, target in [
                (out / "root-cert.pem", secrets / "istio/root-cert.pem"),
                (out / f"{NAMESPACE}.{self.account}/istio-token", secrets / "tokens/istio-token")]:
            if not source.exists():
                raise Refused(f"local-istiod did not write {source}", [self.mesh.istiod.log])
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)

    def environment(self, settings):
        own = lambda use: str(self.mesh.ports[f"{self.name}_{use}"])
        settings = settings | {
            "discoveryAddress": f"127.0.0.1:{self.mesh.ports['istiod']}",
            "binaryPath": str(self.mesh.envoy_binary), "serviceCluster": self.name,
            "proxyAdminPort": int(own("admin")), "statusPort": int(own("status")),
            "concurrency": 1, "terminationDrainDuration": "1s"}
        return base_environment() | {
            "POD_NAME": f"{self.name}-0", "POD_NAMESPACE": NAMESPACE, "SERVICE_ACCOUNT": self.account,
            "INSTANCE_IP": "127.0.0.1", "CLOUD_PLATFORM": "none", "TRUST_DOMAIN": TRUST_DOMAIN,
            "ISTIO_META_CLUSTER_ID": "Kubernetes", "ENVOY_STATUS_PORT": own("health"),
            "ENVOY_PROMETHEUS_PORT": own("metrics"), "PROXY_CONFIG": json.dumps(settings)}

    def measure_start(self, listener_port):
        """Returns the seconds from exec until the agent's sockets are open, Envoy is LIVE, and its listener is open."""
        since = lambda: time.monotonic() - self.agent.started
        wait = lambda what, check: wait_until(what, check, 30, [self.agent], pause=0.002)
        sockets = [self.folder / "etc/istio/proxy/XDS",
                   self.folder / "var/run/secrets/workload-spiffe-uds/socket"]
        listening = lambda: all(ports.accepts_unix(path) for path in sockets)
        wait(f"the {self.name}'s agent to open its sockets", listening)
        at_sockets = since()
        live = lambda: self.admin.state() == "LIVE"
        wait(f"the {self.name}'s Envoy to be LIVE", live)
        at_live = since()
        self.envoy_pid = self.find_envoy()

        def open_port():
            self.mesh.expect_no_refusal()
            return ports.accepts(listener_port)

        wait(f"the {self.name}'s Envoy to open port {listener_port}", open_port)
        return at_sockets, at_live, since()

    def find_envoy(self):
        """Returns the PID and the start time of the agent's child that runs Envoy."""
        wanted = os.path.realpath(self.mesh.envoy_binary)
        for pid in processes.descendants(self.agent.pid):
            if os.path.realpath(f"/proc/{pid}/exe") == wanted:
                return pid, processes.start_time(pid)
        raise Refused(f"the {self.name}'s agent has no child that runs {wanted}", [self.agent.log])

    def memory(self):
        """Returns the resident bytes of the agent and of Envoy."""
        return (processes.resident_bytes(self.agent.pid),
                processes.resident_bytes(self.envoy_pid[0]))

    def diagnose(self):
        """Returns the report of `pilot-agent doctor`, and its exit code: 0 without errors and warnings."""
        command = [str(self.mesh.agent), "doctor", "--verbose"]
        try:
            done = subprocess.run(command, cwd=self.folder, env=self.variables, timeout=10,
                                  capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            raise Refused(f"{' '.join(command)} did not finish within 10 s", [self.agent.log]) from None
        return done.stdout + done.stderr, done.returncode

    def command(self):
        """Writes a script that runs the agent with this workload's variables and folder."""
        program = self.folder / "pilot-agent"
        variables = shlex.join(f"{name}={value}" for name, value in self.variables.items())
        program.write_text(f'#!/bin/sh\ncd {shlex.quote(str(self.folder))} && exec env {variables} {self.mesh.agent} "$@"\n')
        program.chmod(0o755)
        return program

    def certificate(self):
        """Waits until Envoy has a certificate, and returns it."""
        return wait_until(f"the {self.name}'s Envoy to hold a certificate", self.admin.certificate,
                          15, [self.agent])


def base_environment():
    """Returns the caller's variables that cannot change the behaviour of an agent."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


def put_in_place(target, text, scratch):
    """Replaces a file atomically: a reader sees the old text or the new."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = scratch / f".{target.name}.new"
    fresh.write_text(text)
    os.replace(fresh, target)
