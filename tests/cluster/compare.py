"""Measures both agents in one cluster and writes docs/comparison.md."""

import base64
import contextlib
import ctypes
import datetime
import inspect
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import cases
import draw
import standby
from programs import ISTIODS, programs
from world import GO, ISTIOD, OURS, Failed, Load, Skipped

AGENTS = (GO, OURS)
# Further pods of istio-agent, with their settings and what is said of them.
UNSTORED, ON_DEMAND = "unstored", "on-demand"
VARIANTS = {
    UNSTORED: ({"ISTIO_AGENT_KEEP_CONFIG": ""}, "without stored configuration"),
    ON_DEMAND: ({"ISTIO_AGENT_ON_DEMAND_CLUSTERS": "true"}, "with clusters on demand"),
}
HOSTS = 3000
# The hosts of a ServiceEntry.
GROUP = 10
WORDS = """account audit billing cart catalog checkout customer delivery discount email export fraud gateway identity image
    import inventory invoice ledger login mail message order partner payment pricing profile promotion quote rating refund
    report return review risk search session settings shipping stock storage subscription supplier tax ticket token tracking
    user voucher wallet warehouse""".split()
TOKEN_EXPIRED_FOR = 20
# pilot-agent backs off for up to 10 s or more, so its recovery depends on the length of the outage.
OUTAGES = [20 + 40 * number / 9 for number in range(10)]
CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
DISCOVERY = "istiod.istio-system.svc"
HEADINGS = {"memory": "Memory", "processor": "Processor time", "disk": "Disk", "start": "Start, outside a pod",
            "istiod": "istiod", "faults": "Faults", "cases": "Failed requests in each case"}
NOTES = {
    "memory": "The working set is the memory that the kubelet charges to the sidecar container, Envoy included. Private memory "
              "excludes pages that a process shares with other processes of the node, such as the pages of its program file. "
              "Hosts have different names, and ten endpoints each.",
    "start": "Inside a pod, the kubelet's probes decide when the pod is ready; they run once a second.",
    "istiod": f"istiod was unreachable {len(OUTAGES)} times, for {OUTAGES[0]:.0f} to {OUTAGES[-1]:.0f} s plus the time that its own start takes. "
              "Both agents saw the same outages.",
    "cases": "Each row is a case of `make cluster`. The server's pod ran pilot-agent in the first column and istio-agent in the second; "
             "clients ran both agents.",
}
# The cases of the page, and what each row says.
SENTENCES = {
    "pods_deleted_evicted_rolled_out_and_scaled_fail_no_request":
        "No request fails while pods are deleted, evicted, rolled out and scaled.",
    "istiod_restarted_scaled_to_nothing_and_of_another_version_fails_no_request":
        "No request fails while istiod is restarted, scaled to nothing, and replaced by another version.",
    "pods_of_every_kind_capture_traffic_both_ways_with_mutual_tls":
        "Pods of every kind capture traffic in both directions, with mutual TLS.",
    "a_dual_stack_pod_captures_both_families":
        "A dual-stack pod captures traffic of both IP families.",
    "native_nftables_capture_traffic":
        "Native nftables rules capture traffic.",
    "the_proxy_runs_as_another_user":
        "The proxy runs as another user.",
    "istios_cni_plugin_captures_traffic_of_pods_without_privileges":
        "Istio's CNI plugin captures the traffic of pods without privileges.",
    "istios_cni_plugin_captures_traffic_of_either_agent_tproxy_and_another_user":
        "Istio's CNI plugin captures traffic by nftables: of either agent, with TPROXY, and of another user.",
    "istios_cni_plugin_repairs_or_deletes_pods_that_failed_their_validation":
        "Istio's CNI plugin labels, repairs and deletes pods whose `istio-validation` has failed.",
    "the_doctor_finds_nothing_on_a_busy_node":
        "The doctor finds nothing on a busy node.",
    "a_job_calls_the_mesh_from_its_init_container_and_completes":
        "A Job with a native sidecar calls the mesh from its init container, and completes.",
    "probes_of_all_four_kinds_are_rewritten_and_tell_the_applications_state":
        "Probes of all four kinds are rewritten, and report the application's state.",
    "a_held_application_reaches_the_mesh_at_its_first_try":
        "An application that is held until the proxy starts reaches the mesh at its first try.",
    "requests_under_way_end_well_when_their_pod_is_deleted":
        "Requests that are running when their pod is deleted end well.",
    "a_pod_whose_application_never_starts_is_deleted_without_delay":
        "A pod whose application never starts is deleted without delay.",
    "both_kinds_of_gateways_are_replaced_without_a_failed_request":
        "Gateways, injected or of the Gateway API, let traffic in, and are replaced without a failed request.",
    "a_machine_registers_itself_tells_its_health_and_has_traffic_both_ways":
        "A machine registers itself, reports its health, and has traffic in both directions.",
    "wasm_modules_run_and_a_wrong_digest_fails_open_or_closed":
        "Wasm modules run, by HTTP and from a registry; with a wrong digest, the filter fails open or closed.",
    "last_known_good_configuration_serves_while_istiod_is_unreachable":
        "The last known good configuration serves while istiod is unreachable.",
    "a_restarted_container_serves_while_istiod_sends_a_listener_that_envoy_refuses":
        "A restarted container serves while istiod sends a listener that Envoy rejects.",
    "a_crashed_envoy_restarts_until_its_budget_is_used_up":
        "A crashed Envoy restarts in its container, until its budget is used up.",
    "a_job_that_ends_its_sidecar_by_signal_or_quitquitquit_completes":
        "A Job completes when it ends its sidecar, by a signal or by `/quitquitquit`.",
    "a_sidecar_is_upgraded_in_place_and_its_application_runs_on":
        draw.UPGRADE,
    "a_grpc_client_without_envoy_calls_with_mutual_tls":
        "A gRPC client without Envoy calls with mutual TLS, and no request fails.",
    "the_root_is_rotated_by_cacerts_and_no_request_fails":
        "No request fails while the root is rotated by `cacerts`.",
}


class Page:
    """The tables of the page. A run of some measurements takes the other rows from the page."""

    def __init__(self, page, resume):
        self.rows = {key: {} for key in HEADINGS}
        for part in page.read_text().split("\n## ")[1:] if resume else []:
            heading, *lines = part.splitlines()
            key = next(key for key, one in HEADINGS.items() if one == heading)
            rows = [line for line in lines if line.startswith("| ") and not line.startswith("| |")]
            self.rows[key] = {row.split(" | ")[0].removeprefix("| "): row for row in rows}

    def figures(self, heading, what, unit, of, more=False):
        medians = {agent: statistics.median(of[agent]) for agent in AGENTS}
        less, greater = sorted(medians.values())
        ratio = greater / less if less else float("inf") if greater else 1
        best = OURS if (medians[OURS] > medians[GO]) == more else GO
        name = "**pilot-agent**" if best == GO else "istio-agent"
        times = f"{ratio:.1f} times " if less else ""
        verdict = "equal" if ratio < 1.1 else f"{name}: {times}{'more' if more else 'less'}"
        self.text(heading, f"{what}, {unit}", {agent: spread(of[agent]) for agent in AGENTS}, verdict)

    def text(self, heading, what, of, verdict=""):
        self.rows[heading][what] = f"| {what} | {of[GO]} | {of[OURS]} | {verdict} |"
        print(self.rows[heading][what], flush=True)

    def written(self, head):
        parts = [head]
        for key, rows in self.rows.items():
            table = ["| | pilot-agent | istio-agent | better |", "|---|---|---|---|", *rows.values()]
            picture = [f"![{title}]({name})" for name, title in [draw.PICTURES[key]]] if key in draw.PICTURES else []
            parts += [f"## {HEADINGS[key]}", *([NOTES[key]] if key in NOTES else []), *picture, "\n".join(table)]
        return "\n\n".join(parts) + "\n"


def spread(values):
    digits = lambda value: f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
    shown = digits(statistics.median(values))
    return shown if len(values) < 2 else f"{shown} ({digits(min(values))} to {digits(max(values))})"


def in_turns(rounds, measure):
    """Measures both agents in turns in each round, and returns their figures."""
    of = {agent: [] for agent in AGENTS}
    for _ in range(rounds):
        for agent in AGENTS:
            of[agent].append(measure(agent))
    return of


class Comparison:
    def __init__(self, world, options):
        self.world, self.options = world, options
        self.page = Page(options.write, bool(options.only))
        # A case without a sentence is found now, not after hours.
        self.claims = [(claim, SENTENCES[claim.__name__]) for _, _, _, claim in cases.CASES if "agent" in inspect.signature(claim).parameters]
        self.cluster = world.cluster
        # Programs that cases need are built first, because nothing can be downloaded in the cluster's network.
        for name in ISTIODS:
            programs(name)
        self.binaries = {GO: programs("istio") / "pilot-agent", OURS: options.agent.resolve()}
        self.envoy = options.envoy.resolve()
        self.enter()

    def enter(self):
        """Moves this process into the cluster's network, and resolves the name of istiod there."""
        libc = ctypes.CDLL(None, use_errno=True)
        address = self.world.get("-n", "istio-system", "service/istiod")["spec"]["clusterIP"]
        hosts = self.cluster.folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{address} {DISCOVERY}\n")
        with open(f"/proc/{self.cluster.first()}/ns/net", "rb") as file:
            if libc.setns(file.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWNS):
                raise OSError(ctypes.get_errno(), "the network of the cluster")
        run("mount", "--make-rprivate", "/")
        run("mount", "--bind", hosts, "/etc/hosts")
        run("mount", "--bind", pathlib.Path(cases.__file__).parents[2] / "deploy/cluster/config/resolv.conf", "/etc/resolv.conf")

    def all(self):
        try:
            for measure in (self.start, self.capture, self.expired_token, self.full_disk, self.measured_pods, self.changed_hosts,
                            self.names, self.standby):
                if re.search(self.options.only, measure.__name__):
                    measure()
            self.cases()
        finally:
            self.options.write.write_text(self.page.written(self.head()))
            for problem in draw.pictures(self.options.write, self.options.write.parent):
                print(problem, file=sys.stderr)

    def head(self):
        model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
        node = self.world.get("nodes")["items"][0]["status"]["nodeInfo"]
        return f"""# Comparison with pilot-agent

`make compare` generates this page. Both agents ran in one cluster, on the same pods and files, at the same time or in
turns. Each figure is a median; the lowest and the highest value follow in parentheses if it was measured more than
once. A difference of less than 10 % counts as equal.

| | |
|---|---|
| date | {datetime.datetime.now(datetime.timezone.utc):%d %B %Y}{", in part; other rows are older" if self.options.only else ""} |
| machine | {os.cpu_count()} cores{' (' + model[1] + ')' if model else ''}, {memory} GB, Linux {node['kernelVersion']} |
| Kubernetes | {node['kubeletVersion']}, {node['containerRuntimeVersion']} |
| istiod, pilot-agent | {programs('istio').name.rpartition('-')[0].removeprefix('istio-')} |
| istio-agent | {re.search('agent version: (.*)', run(self.binaries[OURS], 'version'))[1]} |
| Envoy | {re.search(r'version: [0-9a-f]+/([0-9.]+)', run(self.envoy, '--version'))[1]} |"""

    def start(self):
        def measure(agent):
            with Alone(self, agent) as alone:
                return alone.until(alone.sockets), alone.until(lambda: alone.said("generated new workload certificate")), alone.until(ready)
        of = in_turns(10, measure)
        for position, what in enumerate(("time until both sockets listen", "time until the first certificate", "time until Envoy is ready")):
            self.page.figures("start", what, "ms", {agent: [1e3 * each[position] for each in of[agent]] for agent in AGENTS})

    def capture(self):
        words = ("istio-iptables", "-p", "15001", "-z", "15006", "-u", "1337", "-m", "REDIRECT", "-i", "*", "-x", "", "-b", "*",
                 "-d", "15090,15021,15020")

        def measure(agent):
            with tempfile.NamedTemporaryFile() as network:
                run("unshare", f"--net={network.name}", "sh", "-c", "ip link set lo up && ip address add 10.99.9.9/32 dev lo")
                begun = time.monotonic()
                process = subprocess.Popen(["nsenter", f"--net={network.name}", self.binaries[agent], *words],
                                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                output = process.stdout.read()
                _, status, usage = os.wait4(process.pid, 0)
                took = time.monotonic() - begun
                run("umount", network.name)
            if status:
                raise Failed(f"istio-iptables: {output.decode()[-500:]}")
            return took, usage.ru_utime + usage.ru_stime
        of = in_turns(10, measure)
        self.page.figures("start", "time to set up traffic capture with iptables", "ms", {agent: [1e3 * each[0] for each in of[agent]] for agent in AGENTS})
        self.page.figures("processor", "traffic capture set up with iptables, child processes included", "ms",
                          {agent: [1e3 * each[1] for each in of[agent]] for agent in AGENTS})

    def expired_token(self):
        def measure(agent):
            with Alone(self, agent, token=self.token(expired=True)) as alone:
                time.sleep(TOKEN_EXPIRED_FOR)
                alone.put_token(self.token())
                begun = time.monotonic()
                alone.until(lambda: alone.said("generated new workload certificate"))
                return time.monotonic() - begun
        self.page.figures("faults", f"time from a valid token to a certificate, after {TOKEN_EXPIRED_FOR} s with an expired token", "s", in_turns(3, measure))

    def full_disk(self):
        def measure(agent):
            with Alone(self, agent, full=True) as alone:
                try:
                    return f"ready after {alone.until(ready, 20):.1f} s"
                except Failed:
                    code = alone.process.poll()
                    says = "says" if "no space left" in alone.lines[-1][1].lower() else "does not say"
                    return "not ready" if code is None else f"exits with {code}, and {says} that no space is left"
        self.page.text("faults", "start with a full disk", {agent: measure(agent) for agent in AGENTS})

    def token(self, expired=False):
        if not expired:
            return self.world.kubectl("create", "token", "default", "--audience=istio-ca").strip()
        encode = lambda data: base64.urlsafe_b64encode(data).rstrip(b"=")
        head, claims, _ = self.token().split(".")
        claims = json.loads(base64.urlsafe_b64decode(claims + "=="))
        claims |= {"exp": int(time.time()) - 60, "iat": int(time.time()) - 3600, "nbf": int(time.time()) - 3600}
        signed = head.encode() + b"." + encode(json.dumps(claims).encode())
        signature = subprocess.run(["openssl", "dgst", "-sha256", "-sign", self.cluster.folder / "accounts.key"],
                                   input=signed, capture_output=True, check=True).stdout
        return (signed + b"." + encode(signature)).decode()

    def measured_pods(self):
        """Measures a pod of each agent, both at the same time."""
        pods = {}
        for agent in AGENTS:
            self.world.deploy(f"measured-{agent}", agent, annotations=cases.USUAL)
        for agent in AGENTS:
            self.world.rolled_out(f"measured-{agent}")
            pods[agent] = Pod(self.world, self.world.pods(f"measured-{agent}")[0])
        time.sleep(20)
        used = self.used(pods, 60)
        self.page.figures("processor", "a minute at rest", "ms", used)
        self.memory("at rest", pods)
        self.page.figures("istiod", "connections to istiod", "at rest", {agent: [pods[agent].connections()] for agent in AGENTS})
        for agent in AGENTS:
            with Load(self.world, f"http://measured-{agent}:8080/", *cases.CLIENTS):
                time.sleep(20)
        self.memory("after load", pods)
        self.outages(pods)
        crashed = {}
        for agent in AGENTS:
            with Load(self.world, f"http://measured-{agent}:8080/", cases.CLIENTS[0]) as load:
                os.kill(pods[agent].process("envoy"), signal.SIGKILL)
                time.sleep(8)
            told = load.told[cases.CLIENTS[0]]
            crashed[agent] = f"no service for {told['seconds']:.1f} s, {len(told['failed'])} of {told['sent']} requests failed"
        self.page.text("faults", "Envoy killed in a pod, under load", crashed)
        self.world.kubectl("delete", "deploy", *(f"measured-{agent}" for agent in AGENTS))

    def changed_hosts(self):
        """Measures a pod of each agent, and pods with other settings, with more and more hosts, and while hosts change."""
        settings = dict.fromkeys(AGENTS, {}) | {name: settings for name, (settings, _) in VARIANTS.items()}
        for name, variables in settings.items():
            agent = name if name in AGENTS else OURS
            self.world.deploy(f"changing-{name}", agent, annotations=cases.USUAL | cases.config(**variables))
        everyone = {}
        for name in settings:
            self.world.rolled_out(f"changing-{name}")
            everyone[name] = Pod(self.world, self.world.pods(f"changing-{name}")[0])
        for count in (1000, HOSTS):
            self.know_hosts(count, everyone)
            self.memory(f"with {count:,} ServiceEntry hosts", everyone)
        some = f"1,000 of {HOSTS:,} hosts"
        self.spent(f"30 changes of the endpoints of {some}", everyone, lambda number: self.hosts(0, 1000, 80, number))
        self.spent(f"30 changes of the endpoints of {some} and of all clusters", everyone, self.endpoints_and_clusters)
        self.spent(f"30 changes of the port of {some}", everyone, lambda number: self.hosts(0, 1000, 80 + number))
        self.memory("after those changes", everyone)
        self.know_hosts(10_000, everyone)
        self.memory("with 10,000 ServiceEntry hosts", everyone)
        self.delete_hosts(HOSTS, 10_000)
        self.world.kubectl("delete", "destinationrule", "--all")
        self.world.kubectl("delete", "deploy", *(f"changing-{name}" for name in settings))

    def endpoints_and_clusters(self, number):
        self.world.apply(cases.resource("networking.istio.io/v1", "DestinationRule", "all", host="*.example", trafficPolicy={
            "connectionPool": {"tcp": {"connectTimeout": f"{1 + number % 5}s"}}}))
        self.hosts(0, 1000, 80, -number)

    def spent(self, what, pods, change):
        """Measures what 30 changes cost."""
        before = {name: (pod.used(), pod.used_by_all(), pod.written()) for name, pod in pods.items()}
        with Most(pods) as most:
            for number in range(1, 31):
                change(number)
                time.sleep(1)
            time.sleep(10)
        spent = {name: [now - then for now, then in zip((pod.used(), pod.used_by_all(), pod.written()), before[name])]
                 for name, pod in pods.items()}
        for position, (heading, row, unit) in enumerate((
                ("processor", what, "ms"), ("processor", f"{what}, Envoy included", "ms"), ("disk", f"written by the agent during {what}", "MB"))):
            self.figures(heading, row, unit, {name: figures[position] for name, figures in spent.items()})
        self.figures("memory", f"private memory of the agent at most during {what}", "MB", most.of)

    def figures(self, heading, what, unit, of):
        """Adds a row, and one for each pod with other settings."""
        self.page.figures(heading, what, unit, {agent: [of[agent]] for agent in AGENTS})
        for name, (_, said) in VARIANTS.items():
            if name in of:
                self.page.figures(heading, f"{what}, istio-agent {said}", unit, {GO: [of[GO]], OURS: [of[name]]})

    def know_hosts(self, count, pods):
        self.hosts(0, count, 80)
        for pod in pods.values():
            self.world.until("the hosts are known", lambda: pod.knows(host(count - 1)), 180)
        time.sleep(20)

    def memory(self, when, pods):
        time.sleep(15)
        node = self.world.get("nodes")["items"][0]["metadata"]["name"]
        summary = json.loads(self.world.kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy/stats/summary"))["pods"]
        held = {pod["podRef"]["name"]: container["memory"]["workingSetBytes"] / 1e6
                for pod in summary for container in pod["containers"] if container["name"] == "istio-proxy"}
        self.figures("memory", f"working set {when}", "MB", {name: held[pod.name] for name, pod in pods.items()})
        self.figures("memory", f"private memory of the agent {when}", "MB", {name: pod.private("pilot-agent") for name, pod in pods.items()})
        self.figures("memory", f"private memory of its Envoy {when}", "MB", {name: pod.private("envoy") for name, pod in pods.items()})

    def processors(self, pods):
        return {name: pod.used() for name, pod in pods.items()}

    def used(self, pods, seconds):
        before = self.processors(pods)
        time.sleep(seconds)
        after = self.processors(pods)
        return {agent: [after[agent] - before[agent]] for agent in AGENTS}

    def hosts(self, first, last, port, change=0):
        """Creates or changes ServiceEntries, each with ten hosts that have ten endpoints; others with each change."""
        # One call of kubectl has at most 3 minutes.
        for begin in range(first, last, 2000):
            self.world.apply(*({"apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry", "metadata": {"name": f"hosts-{number}"}, "spec": {
                "hosts": [host(one) for one in range(number, number + GROUP)], "addresses": [f"240.0.{1 + number // 1000}.{1 + number % 1000 // GROUP}"],
                "ports": [{"name": "http", "number": port, "protocol": "HTTP"}], "resolution": "STATIC",
                "endpoints": [{"address": address} for address in addresses(number + HOSTS * change)]}} for number in range(begin, min(begin + 2000, last), GROUP)))

    def delete_hosts(self, first, last):
        for begin in range(first, last, 1000):
            self.world.kubectl("delete", "--wait=false", "serviceentry", *(f"hosts-{number}" for number in range(begin, begin + 1000, GROUP)))

    def outages(self, pods):
        dials, flows = ({agent: [] for agent in AGENTS} for _ in range(2))
        for seconds in OUTAGES:
            for pod in pods.values():
                run("iptables", "-t", "raw", "-A", "PREROUTING", "-s", pod.address, "-p", "tcp", "--dport", "15012", "--syn")
            self.world.scale_istiod(0)
            time.sleep(seconds)
            name = f"back-{time.time_ns()}"
            self.world.apply(cases.service(name, 80))
            self.world.kubectl("scale", *ISTIOD, "--replicas=1")
            until(reachable, "istiod can be reached", 60)
            back, known = time.monotonic(), {}

            def watch(agent):
                until(lambda: pods[agent].knows(name), f"{name} is known", 90)
                known[agent] = time.monotonic() - back
            threads = [threading.Thread(target=watch, args=[agent]) for agent in AGENTS]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            counted = run("iptables", "-t", "raw", "-nvxL", "PREROUTING")
            run("iptables", "-t", "raw", "-F", "PREROUTING")
            for agent in AGENTS:
                flows[agent].append(known[agent])
                dials[agent].append(int(re.search(rf"^\s*(\d+) .* {pods[agent].address} ", counted, re.MULTILINE)[1]))
            self.world.rolled_out_istiod()
        self.page.figures("istiod", "time from istiod recovery to new configuration in Envoy", "s", flows)
        self.page.figures("istiod", "connection attempts", "per outage", dials)

    def names(self):
        """Queries names of the name table, from agents outside a pod."""
        with tempfile.NamedTemporaryFile("w") as questions:
            questions.writelines(f"{host(number)} A\n" for number in range(HOSTS))
            questions.flush()

            def measure(agent):
                with Alone(self, agent, ISTIO_META_DNS_CAPTURE="true", DNS_PROXY_ADDR="127.0.0.1:15053") as alone:
                    alone.until(ready)
                    alone.until(lambda: "240.0." in run("dig", "+short", "+tries=1", "@127.0.0.1", "-p", "15053", host(HOSTS - 1)))
                    before = used(alone.process.pid)
                    told = run("dnsperf", "-s", "127.0.0.1", "-p", "15053", "-d", questions.name, "-l", "5")
                    spent = used(alone.process.pid) - before
                    number = lambda name: float(re.search(rf"{name}:\s+([\d.]+)", told)[1])
                    return number("Queries per second"), 1e3 * spent / number("Queries completed")
            of = in_turns(3, measure)
        self.world.kubectl("delete", "serviceentry", "--all")
        self.page.figures("processor", "DNS: answers from the name table", "per second", {agent: [each[0] for each in of[agent]] for agent in AGENTS}, more=True)
        self.page.figures("processor", "DNS: an answer", "µs", {agent: [each[1] for each in of[agent]] for agent in AGENTS})

    def standby(self):
        """Measures memory while images change: istio-agent's with a standby, pilot-agent's in place."""
        pods = {}
        for agent, annotations in ((GO, {}), (OURS, standby.STANDBY | standby.settings())):
            self.world.deploy(f"changed-{agent}", agent, annotations=cases.NATIVE | annotations)
            self.world.rolled_out(f"changed-{agent}")
            pods[agent] = self.world.pods(f"changed-{agent}")[0]
        time.sleep(60)
        rest, most = ({agent: [self.sidecar(pod)] for agent, pod in pods.items()} for _ in range(2))

        def watch(agent):
            while not done.wait(0.2):
                # A process may end meanwhile.
                with contextlib.suppress(OSError, Failed):
                    most[agent] = [max(*most[agent], self.sidecar(pods[agent]))]
        for agent, pod in pods.items():
            done = threading.Event()
            watching = threading.Thread(target=watch, args=[agent])
            watching.start()
            if agent == OURS:
                standby.hand_over(self.world, pod, standby.PAIR[1], self.world.other_image(OURS))
            else:
                standby.patch(self.world, pod, standby.PAIR[0], self.world.other_image(GO))
                self.world.until("it is ready", lambda: self.world.container(pod, standby.PAIR[0])["ready"])
            done.set()
            watching.join()
        self.page.figures("memory", "private memory of a native sidecar at rest, istio-agent's with a standby", "MB", rest)
        self.page.figures("memory", "the same at most while its image is changed", "MB", most)
        self.world.kubectl("delete", "deploy", *(f"changed-{agent}" for agent in AGENTS))

    def sidecar(self, pod):
        """Returns the private memory of all processes in the sidecar's containers, in MB."""
        status = self.world.get(f"pod/{pod}")["status"]
        containers = [one["containerID"].partition("://")[2] for one in status["initContainerStatuses"]
                      if one["name"] in standby.PAIR and "running" in one["state"]]
        held = 0
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if any(one in (folder / "cgroup").read_text() for one in containers):
                    held += private(folder)
        return held

    def cases(self):
        for claim, sentence in self.claims:
            if re.search(self.options.only, claim.__name__):
                told = {}
                for agent in AGENTS:
                    try:
                        told[agent] = claim(self.world, agent=agent) or "passes"
                    except Skipped as why:
                        told[agent] = f"not run: {why}"
                    except (Failed, RuntimeError, OSError, LookupError, ValueError) as why:
                        # What the last command has printed is not for the page.
                        told[agent] = f"**fails**: {str(why).partition(': kubectl ')[0][:120]}"
                    self.world.until("ended pods are gone", lambda: not any(
                        pod["metadata"].get("deletionTimestamp") for pod in self.world.get("pods")["items"]), 120)
                self.page.text("cases", sentence, {agent: text.replace("|", "\\|").replace("\n", " ") for agent, text in told.items()})


class Most:
    """Samples the private memory of the agents in pods, and stores the highest value of each."""

    def __init__(self, pods):
        self.pods, self.of, self.done = pods, dict.fromkeys(pods, 0), threading.Event()
        self.thread = threading.Thread(target=self.sample)

    def sample(self):
        processes = {name: pathlib.Path(f"/proc/{pod.process()}") for name, pod in self.pods.items()}
        while not self.done.wait(0.05):
            for name, process in processes.items():
                self.of[name] = max(self.of[name], private(process))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()


def host(number):
    """Returns a host's name, which has words as names in real meshes have."""
    words = random.Random(number)
    return f"{words.choice(WORDS)}-{words.choice(WORDS)}-{number}.{words.choice(WORDS)}.example"


def addresses(number):
    """Returns ten addresses of endpoints."""
    chosen = random.Random(-number - 1)
    return [f"10.{chosen.randrange(100, 200)}.{chosen.randrange(256)}.{chosen.randrange(1, 255)}" for _ in range(10)]


def private(process):
    """Returns the private memory of a process, in MB."""
    maps = (process / "smaps_rollup").read_text()
    return sum(int(kilobytes) for kilobytes in re.findall(r"Private_\w+:\s+(\d+)", maps)) * 1024 / 1e6


class Pod:
    """A pod's sidecar, observed from the node."""

    def __init__(self, world, name):
        self.world, self.name = world, name
        self.address = world.get(f"pod/{name}")["status"]["podIP"]

    def process(self, program="pilot-agent"):
        return self.world.process(self.name, program)

    def private(self, program):
        return private(pathlib.Path(f"/proc/{self.process(program)}"))

    def used(self):
        return used(self.process())

    def used_by_all(self):
        return used(self.process()) + used(self.process("envoy"))

    def written(self):
        """Returns the bytes that the agent has written to disks, in MB."""
        counted = pathlib.Path(f"/proc/{self.process()}/io").read_text()
        return int(re.search(r"^write_bytes: (\d+)", counted, re.MULTILINE)[1]) / 1e6

    def connections(self):
        """Returns the number of established connections to port 15012, which is 3AA4 in hexadecimal."""
        tables = "".join(pathlib.Path(f"/proc/{self.process()}/net/{table}").read_text() for table in ("tcp", "tcp6"))
        return len(re.findall(r":3AA4 01 ", tables))

    def knows(self, name):
        """Returns true if Envoy has the cluster of a name, or routes to it: clusters on demand are not there before their use."""
        dumps = (run("nsenter", f"--net=/proc/{self.process()}/ns/net", "curl", "--silent",
                     f"http://127.0.0.1:15000/config_dump?resource={resource}&name_regex={pattern}")
                 for resource, pattern in (("dynamic_active_clusters", f".*{name}.*"), ("dynamic_route_configs", "80")))
        return any(name in dump for dump in dumps)


class Alone:
    """Runs an agent outside a pod, in a temporary folder with the files of a pod."""

    def __init__(self, comparison, agent, token=None, full=False, **variables):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.full = full
        for place in ("var/run/secrets/tokens", "var/run/secrets/istio", "etc/istio/proxy"):
            (self.folder / place).mkdir(parents=True)
        if full:
            run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", self.folder / "etc/istio/proxy")
            subprocess.run(["dd", "if=/dev/zero", f"of={self.folder}/etc/istio/proxy/full"], stderr=subprocess.DEVNULL, check=False)
        world = comparison.world
        (self.folder / "var/run/secrets/istio/root-cert.pem").write_text(cases.mesh_roots(world))
        self.put_token(token or comparison.token())
        template = programs("istio") / "envoy_bootstrap.json"
        environment = {
            "PATH": os.environ["PATH"], "POD_NAME": "alone", "POD_NAMESPACE": world.namespace, "INSTANCE_IP": "10.99.0.1",
            "SERVICE_ACCOUNT": "default", "ISTIO_META_CLUSTER_ID": "Kubernetes", "ISTIO_META_MESH_ID": "cluster.local", "TRUST_DOMAIN": "cluster.local",
            "CA_ADDR": f"{DISCOVERY}:15012", "PROXY_CONFIG": json.dumps(
                {"discoveryAddress": f"{DISCOVERY}:15012", "binaryPath": str(comparison.envoy)})} | variables
        if agent == GO:
            environment["ISTIO_BOOTSTRAP"] = str(template)
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            [comparison.binaries[agent], "proxy", "sidecar", "--domain", f"{world.namespace}.svc.cluster.local", "--proxyLogLevel=warning"],
            cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        self.lines = [(self.begun, "")]
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def put_token(self, token):
        place = self.folder / "var/run/secrets/tokens/istio-token"
        place.with_suffix(".new").write_text(token)
        place.with_suffix(".new").rename(place)

    def said(self, text):
        return any(text in line for _, line in list(self.lines))

    def sockets(self):
        for place in ("etc/istio/proxy/XDS", "var/run/secrets/workload-spiffe-uds/socket"):
            with socket.socket(socket.AF_UNIX) as one:
                # A path of a socket is at most 108 bytes.
                one.connect(str(self.folder / place))
        return True

    def until(self, check, limit=60):
        """Waits until a check holds, and returns the seconds since the start of the agent."""
        until(lambda: check() or self.process.poll() is not None and not time.sleep(0.2), "the agent has done it", limit)
        if self.process.poll() is not None:
            raise Failed(f"the agent has ended: {''.join(line for _, line in self.lines[-5:])}")
        return time.monotonic() - self.begun

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join()
        if self.full:
            run("umount", self.folder / "etc/istio/proxy")
        shutil.rmtree(self.folder)


def ready():
    with urllib.request.urlopen("http://127.0.0.1:15021/healthz/ready", timeout=1) as response:
        return response.status == 200


def reachable():
    with socket.create_connection((DISCOVERY, 15012), 1):
        return True


def until(check, what, limit):
    deadline = time.monotonic() + limit
    while True:
        try:
            if check():
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise Failed(f"waited {limit} s in vain until {what}")
        time.sleep(0.001)


def used(pid):
    """Returns the processor time of a process, without its children, in ms."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e3 / os.sysconf("SC_CLK_TCK")


def run(*words):
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout
