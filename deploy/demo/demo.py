#!/usr/bin/env python3
"""Shows the agent at work: three workloads, three Envoys and a control plane, all on loopback.

The demo has scenes. Each scene prints its measurements, and the demo stops at the first step that fails.
Run it with `make demo`. It needs only Python's standard library, an Envoy, and the two binaries.
`make demo KEEP=1` leaves all processes running, `make demo-stop` stops them.
"""

import argparse
import http.client
import pathlib
import signal
import socket
import ssl
import sys
import time

import load
import mesh
import ports
import processes
import screen
from envoy import short
from processes import Refused, wait_until

OUTAGE_AT_LEAST = 8  # Seconds.
PROBE_PERIOD = 1  # Second.


def main():
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: stopped by SIGTERM"))
    root = options.folder.resolve()
    if options.stop:
        return stop_kept(root)
    the_mesh = None
    keep = False
    try:
        the_mesh = mesh.Mesh(options.agent.resolve(), options.istiod.resolve(), options.envoy.resolve(), root)
        Story(the_mesh, options.keep).tell()
        keep = options.keep
        return 0
    except Refused as refusal:
        explain(refusal, options)
        return 1
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        explain(Refused(f"{type(error).__name__}: {error}"), options)
        return 1
    except KeyboardInterrupt:
        screen.say("\ndemo: interrupted")
        return 130
    finally:
        if the_mesh and not keep:
            the_mesh.family.end_all()


def parse_options():
    parser = argparse.ArgumentParser(description="Shows the agent at work on this machine.")
    debug = pathlib.Path("target/debug")
    parser.add_argument("--agent", type=pathlib.Path, default=debug / "pilot-agent")
    parser.add_argument("--istiod", type=pathlib.Path, default=debug / "local-istiod")
    parser.add_argument("--envoy", type=pathlib.Path, default=pathlib.Path("envoy"))
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("target/demo"))
    parser.add_argument("--keep", action="store_true", help="leave all processes running at the end")
    parser.add_argument("--stop", action="store_true", help="stop the processes that --keep left running")
    return parser.parse_args()


def stop_kept(root):
    ended = processes.end_kept(root.with_suffix(".running.json"))
    screen.say(f"stopped {', '.join(ended)}" if ended else "no demo is running")
    return 0


def explain(refusal, options):
    """Prints the failure, and the last lines of the logs that explain it."""
    for log in refusal.logs:
        lines = log.read_text(errors="replace").splitlines()[-15:] if log.exists() else []
        screen.say(screen.dim(f"\nlast lines of {log}:"))
        screen.say("\n".join(f"   {line}" for line in lines) or "   (empty)")
    screen.say(screen.red(f"\ndemo failed: {refusal}"))
    screen.say(f"All logs are in {options.folder / 'logs'}.")


class Story:
    """The scenes in their order, and the state that later scenes use."""

    def __init__(self, the_mesh, keep):
        self.mesh, self.keep = the_mesh, keep
        self.client = self.server = self.machine = self.load = None
        self.rotated = {}

    def tell(self):
        self.open()
        self.start_control_plane()
        self.start_workloads()
        self.meet()
        self.show_resources()
        self.load = load.Load(self.mesh.ports["outbound"], mesh.identity("client"),
                              mesh.identity("server"))
        self.load.start()
        try:
            self.rotate()
            self.push_route()
            self.lose_control_plane()
            self.join_machine()
            if self.mesh.agent.parent.name == "release":
                self.show_memory()
            self.ask_doctor()
        finally:
            self.load.stop()
        self.sum_up()
        self.leave() if self.keep else self.end()

    @property
    def workloads(self):
        return [w for w in (self.server, self.client, self.machine) if w]

    def open(self):
        screen.say(screen.bold("istio-agent: a request from one workload to another"))
        screen.say()
        screen.say("   client workload → client Envoy ══ mTLS ══▶ server Envoy → server workload")
        screen.say("                        │                         │")
        screen.say("                   client agent              server agent")
        screen.say("                        └───── local-istiod ──────┘")
        screen.say("   Later, a machine joins the server workload.")
        if self.mesh.was_kept:
            screen.say(f"\n(stopped the demo that was still running: {', '.join(self.mesh.was_kept)})")

    def start_control_plane(self):
        screen.scene("A control plane starts")
        self.mesh.write_resources("v1")
        took = self.mesh.start_istiod()
        screen.fact("local-istiod listens on", f"127.0.0.1:{self.mesh.ports['istiod']}, "
                    f"{screen.milliseconds(took)} after exec")
        screen.fact("its certificates are valid for", f"{mesh.CERTIFICATE_SECONDS} s, "
                    "so that they rotate while you watch")

    def start_workloads(self):
        screen.scene("Two workloads start: each has an agent, and the agent runs an Envoy")
        self.mesh.start_application("server", self.mesh.ports["workload"])
        rows = []
        for account, port in (("server", "inbound"), ("client", "outbound")):
            workload = self.mesh.start_workload(account)
            setattr(self, account, workload)
            times = workload.measure_start(self.mesh.ports[port])
            rows.append([account, *map(screen.milliseconds, times)])
        screen.table(["time from the agent's exec until", "its sockets are open", "Envoy is LIVE",
                      "Envoy takes requests"], rows)
        screen.fact("Envoy", f"{self.client.admin.version()}  {self.mesh.envoy_binary}")

    def meet(self):
        screen.scene("A request crosses the mesh: plain HTTP at both ends, mTLS between the Envoys")
        answer = wait_until("the first request to be answered", self.first_answer, 15,
                            [w.agent for w in self.workloads])
        expect("the server saw the caller", mesh.identity("client"), answer.caller)
        expect("the client saw the server", mesh.identity("server"), answer.server_identity)
        screen.fact("the server saw the caller", screen.green(answer.caller))
        screen.fact("the client saw the server", screen.green(answer.server_identity))
        why = refused_without_certificate(self.mesh.ports["inbound"])
        screen.done(f"a caller without a certificate is refused ({why})")

    def first_answer(self):
        try:
            answer = load.ask_once(self.mesh.ports["outbound"], "/hello")
            return answer if answer.status == 200 else None
        except OSError:
            return None

    def show_resources(self):
        screen.scene("Each Envoy accepts resources from the control plane, through its agent")
        accepted = {w.name: w.admin.accepted() for w in self.workloads}
        names = lambda found: ", ".join(sorted({name for name, _ in found})) or "none"
        screen.table(["", *accepted],
                     [[kind, *(names(found[kind]) for found in accepted.values())]
                      for kind in ("listeners", "routes", "clusters", "endpoints", "secrets")])
        wait_until("each Envoy to acknowledge each type", self.mesh.all_acknowledged, 10,
                   [self.mesh.istiod])
        screen.done("local-istiod has received an ACK for each type from each Envoy, and no NACK")

    def rotate(self):
        screen.scene("Certificates rotate under load")
        before = {w.name: w.certificate() for w in self.workloads}
        marked = self.load.so_far()
        self.wait_for_rotation(before)
        self.wait_for_new_serial_on_the_wire()
        rows = []
        for workload in self.workloads:
            now = workload.certificate()
            rows.append([workload.name, short(before[workload.name]["serial"]),
                         short(now["serial"]), now["expires"]])
        screen.table(["Envoy of", "serial before", "serial after", "valid until"], rows)
        self.report(marked, "while they rotated")

    def wait_for_rotation(self, before):
        """Waits until each Envoy has another certificate, and records the time."""
        def all_rotated():
            for workload in self.workloads:
                now = workload.certificate()
                if now["serial"] != before[workload.name]["serial"]:
                    self.rotated.setdefault(workload.name, (now["serial"], time.monotonic()))
            return len(self.rotated) == len(self.workloads)
        self.rotated = {}
        wait_until("both certificates to rotate", all_rotated, 2 * mesh.CERTIFICATE_SECONDS,
                   [w.agent for w in self.workloads], 0.1)

    def wait_for_new_serial_on_the_wire(self):
        wanted = self.rotated["client"][0]
        seen = lambda: wanted in self.load.serials_seen()
        wait_until(f"the client's new certificate {wanted} to reach the server", seen, 10,
                   [w.agent for w in self.workloads])
        screen.done(f"new connections to the server use the client's certificate {short(wanted)}")

    def push_route(self, version="v2", is_scene=True):
        if is_scene:
            screen.scene("A changed route takes effect")
        marked, pushed = self.load.so_far(), time.monotonic()
        self.mesh.write_resources(version)
        arrived = lambda: self.load.versions[version] > 0
        wait_until(f"the route {version} to take effect", arrived, 15,
                   [w.agent for w in self.workloads])
        took = time.monotonic() - pushed
        screen.fact(f"route {version}: from file to answer", screen.milliseconds(took))
        self.report(marked, "meanwhile")

    def lose_control_plane(self):
        screen.scene("The control plane stops, and traffic continues")
        marked, gone = self.load.so_far(), time.monotonic()
        self.mesh.istiod.terminate(10)
        if ports.accepts(self.mesh.ports["istiod"]):
            raise Refused("local-istiod has exited, but its port still answers")
        held = {w.name: w.certificate() for w in self.workloads}
        away = self.stay_away(gone)
        self.report(marked, f"in {away:.0f} s without a control plane")
        self.check_held(held)
        marked = self.load.so_far()
        took = self.mesh.start_istiod()
        screen.fact("local-istiod starts again", f"on the same port, listens after {screen.milliseconds(took)}")
        self.push_route("v3", is_scene=False)
        self.wait_for_rotation(held)
        self.wait_for_new_serial_on_the_wire()
        self.report(marked, "since this restart, with new certificates")

    def stay_away(self, gone):
        """Waits until both certificates have been due for renewal for two seconds."""
        due = max(at for _, at in self.rotated.values()) + mesh.CERTIFICATE_SECONDS / 2 + 2
        end = max(due, gone + OUTAGE_AT_LEAST)
        while (left := end - time.monotonic()) > 0:
            for workload in self.workloads:
                workload.agent.check()
            time.sleep(min(left, 0.2))
        return time.monotonic() - gone

    def check_held(self, held):
        for workload in self.workloads:
            now = workload.certificate()["serial"]
            expect(f"the {workload.name}'s certificate", held[workload.name]["serial"], now)
        screen.done("both certificates were due, could not be renewed, and stayed in use: "
                    + ", ".join(f"{name} {short(c['serial'])}" for name, c in held.items()))

    def join_machine(self):
        screen.scene("A machine joins the server workload, fails its probe, and recovers")
        marked, healthy = self.load.so_far(), self.mesh.machine_is_healthy
        self.mesh.start_application("machine", self.mesh.ports["machine_workload"])
        self.machine = self.mesh.start_machine(
            {"exec": {"command": ["test", "-e", str(healthy)]}, "periodSeconds": PROBE_PERIOD})
        self.machine.measure_start(self.mesh.ports["machine_inbound"])
        self.wait_for_istiod("machine 127.0.0.1 of machine-0.demo registered in demo/server")
        self.wait_for_health("unhealthy", 1)
        expect("requests to a machine whose probe fails", 0, self.load.requests["machine"])
        screen.done("the machine has registered in the group server, and gets no requests "
                    "while its probe fails")
        for time_of, change, state, count in (
                ("its probe succeeds: first request", healthy.touch, "healthy", 1),
                ("its probe fails: last request", healthy.unlink, "unhealthy", 2),
                ("its probe succeeds: first request", healthy.touch, "healthy", 2)):
            before, changed = self.load.requests["machine"], time.monotonic()
            change()
            self.wait_for_health(state, count)
            if state == "healthy":
                self.wait_for_requests(before)
                took = time.monotonic() - changed
            else:
                took = self.last_request() - changed
            screen.fact(time_of, f"{screen.milliseconds(took)} later "
                        f"(probed every {PROBE_PERIOD} s)")
        self.report(marked, "meanwhile")

    def wait_for_istiod(self, line, count=1):
        wait_until(f"local-istiod to log {line!r}", lambda: self.mesh.logged(line) >= count, 10,
                   [w.agent for w in self.workloads])

    def wait_for_health(self, state, count):
        self.wait_for_istiod(f"workload of machine-0.demo is {state}", count)

    def wait_for_requests(self, before):
        wait_until("a request to the machine", lambda: self.load.requests["machine"] > before, 10,
                   [w.agent for w in self.workloads])

    def last_request(self):
        """Waits until a hundred requests in a row avoid the machine, and returns the time of its last request."""
        def all_elsewhere():
            nonlocal mark
            now = dict(self.load.requests)
            if now["machine"] > mark["machine"]:
                mark = now
            return now["server"] >= mark["server"] + 100
        mark = dict(self.load.requests)
        wait_until("requests to avoid the machine", all_elsewhere, 10,
                   [w.agent for w in self.workloads])
        return self.load.latest["machine"]

    def show_memory(self):
        screen.scene("Resident memory under this load")
        megabytes = lambda size: f"{size / 1e6:.1f} MB"
        rows = [[w.name, *map(megabytes, w.memory())] for w in self.workloads]
        screen.table(["", "agent", "Envoy"], rows)

    def ask_doctor(self):
        screen.scene("pilot-agent doctor checks each workload")
        for workload in self.workloads:
            report, code = workload.diagnose()
            if code:
                screen.report(report)
                raise Refused(f"pilot-agent doctor reports problems of the {workload.name}",
                              [workload.agent.log])
            checks = sum(line.split()[:1] == ["ok"] for line in report.splitlines())
            screen.done(f"{workload.name}: {checks} checks, no errors, no warnings")

    def report(self, marked, when):
        """Prints the counts of the load since `marked`; raises Refused if a request failed."""
        now = self.load.so_far()
        since = {name: now[name] - marked[name] for name in now}
        if since["failed"]:
            raise Refused(f"{since['failed']} requests failed {when}: "
                          + "; ".join(self.load.first_failures()),
                          [w.agent.log for w in self.workloads])
        if not (since["kept"] and since["new"] and since["handshakes"]):
            raise Refused(f"the load came to a standstill {when}: {since}")
        screen.done(f"{since['kept']} requests on open connections and {since['new']} on new ones "
                    f"({since['handshakes']} mTLS handshakes) {when}: 0 failed")

    def sum_up(self):
        total = self.load.so_far()
        screen.scene("Total")
        if total["failed"]:
            raise Refused(f"{total['failed']} requests failed: "
                          + "; ".join(self.load.first_failures()))
        screen.done(f"{total['kept'] + total['new']} requests, {total['handshakes']} mTLS "
                    "handshakes, 0 failed")

    def end(self):
        for workload in (self.client, self.machine, self.server):
            code, took = workload.agent.terminate(20)
            expect(f"the exit code of the {workload.name}'s agent after SIGTERM", 0, code)
            if processes.is_alive(*workload.envoy_pid):
                raise Refused(f"the {workload.name}'s agent has exited, but its Envoy (pid "
                              f"{workload.envoy_pid[0]}) still runs", [workload.agent.log])
            screen.done(f"the {workload.name}'s agent drained, stopped its Envoy and exited with 0, "
                        f"{screen.milliseconds(took)} after SIGTERM")
        self.mesh.istiod.terminate(10)

    def leave(self):
        outbound = f"http://127.0.0.1:{self.mesh.ports['outbound']}"
        client, server = self.client.admin.address, self.server.admin.address
        route = self.mesh.root / "istiod/resources/client/outbound-route.yaml"
        agent = self.client.command()
        screen.say(screen.bold("\nThe demo is still running. Commands to explore it:"))
        for what, command in [
                ("send a request", f"curl -si {outbound}/hello"),
                ("the client's certificate", f"curl -s {client}/certs"),
                ("the server's certificate", f"curl -s {server}/certs"),
                ("the client Envoy's configuration", f"curl -s '{client}/config_dump?include_eds'"),
                ("the server Envoy's configuration", f"curl -s '{server}/config_dump?include_eds'"),
                ("change the route", f"$EDITOR {route}"),
                ("fail the machine's probe", f"rm {self.mesh.machine_is_healthy}"),
                ("the client's debug page", f"http://127.0.0.1:{self.mesh.ports['client_status']}/debug/"),
                ("diagnose the client", f"{agent} doctor"),
                ("collect data for a bug report", f"{agent} support-bundle > bundle.tar.gz"),
                ("follow the logs", f"tail -f {self.mesh.root / 'logs'}/*.log"),
                ("stop the demo", "make demo-stop")]:
            screen.fact(what, command)


def expect(what, wanted, found):
    if wanted != found:
        raise Refused(f"{what}: expected {wanted!r}, found {found!r}")


def refused_without_certificate(port):
    """Connects to the server's Envoy without a certificate, and returns the way in which Envoy refuses that."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
            with context.wrap_socket(plain) as tls:
                tls.sendall(b"GET /hello HTTP/1.1\r\nhost: server\r\n\r\n")
                if answer := tls.recv(100):
                    raise Refused(f"a caller without a certificate was answered: {answer!r}")
                return "connection closed"
    except ssl.SSLError as error:
        required = "CERTIFICATE_REQUIRED" in (error.reason or "")
        return "TLS alert: certificate required" if required else "connection closed"
    except ConnectionError:
        return "connection closed"


if __name__ == "__main__":
    sys.exit(main())
