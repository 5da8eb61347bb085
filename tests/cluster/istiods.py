"""Cases with several istiods behind one Service. Pods of both agents are under load, and a host is added each second."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

from cases import CLIENTS, case, config, resource
from world import GO, ISTIOD, OURS, Failed, Load, expect

FLEET = {OURS: "many-ours", GO: "many-go"}
REPLICAS = 3
OLDER = "istiod-older"
# The limits in seconds until all pods have a change: a lost istiod is noticed at once, one that hangs by keep-alive.
SOON, LATE = 5, 45
# Notes when an Envoy first has each host, and prints it when the input ends.
WATCH = """
import json, re, select, sys, time, urllib.request
PAGE = "http://127.0.0.1:15000/config_dump?resource=dynamic_route_configs&name_regex=%5E80%24"
seen = {}
while not select.select([sys.stdin], [], [], 0.5)[0]:
    try:
        page = urllib.request.urlopen(PAGE, timeout=2).read().decode()
    except OSError:
        continue
    for host in re.findall(r'"name": "(late-[0-9]+)[.]test:80"', page):
        seen.setdefault(host, time.monotonic())
json.dump(seen, sys.stdout)
"""


class Churn:
    """Adds a host each second while the block runs. `delays` then has, for each pod of the fleet, the longest time from
    the creation of a host until Envoy had it."""

    def __init__(self, world):
        self.world, self.created, self.ended, self.watches, self.delays = world, {}, threading.Event(), {}, {}

    def __enter__(self):
        for pod in (pod for name in FLEET.values() for pod in self.world.pods(name)):
            pid = self.world.process(pod, "pilot-agent")
            self.watches[pod] = subprocess.Popen(["nsenter", "--target", str(pid), "--net", sys.executable, "-c", WATCH],
                                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.thread = threading.Thread(target=self.add)
        self.thread.start()
        time.sleep(3)
        return self

    def add(self):
        while not self.ended.wait(1):
            name = f"late-{len(self.created)}"
            with contextlib.suppress(Failed):  # istiod's webhook may be away, too.
                self.world.apply(resource(
                    "networking.istio.io/v1", "ServiceEntry", name, hosts=[f"{name}.test"], location="MESH_INTERNAL",
                    resolution="STATIC", endpoints=[{"address": "240.0.4.1"}], ports=[{"name": "http", "number": 80, "protocol": "HTTP"}]))
                self.created[name] = time.monotonic()

    def __exit__(self, kind, *_):
        self.ended.set()
        self.thread.join()
        time.sleep(0 if kind else 3)
        told = {pod: json.loads(process.communicate(timeout=10)[0]) for pod, process in self.watches.items()}
        missed = {pod: set(self.created) - set(seen) for pod, seen in told.items()}
        self.world.kubectl("delete", "serviceentry", *self.created)
        if not kind:
            expect("hosts that a pod never got", {}, {pod: names for pod, names in missed.items() if names})
            self.delays = {pod: max(seen[name] - at for name, at in self.created.items()) for pod, seen in told.items()}

    def longest(self, agent):
        return max(delay for pod, delay in self.delays.items() if pod.startswith(FLEET[agent]))


def istiods(world):
    """Returns the names of the istiods that are ready."""
    pods = world.get("pods", "-n", "istio-system", "-l", "app=istiod")["items"]
    return [pod["metadata"]["name"] for pod in pods if not pod["metadata"].get("deletionTimestamp")
            and all(one["ready"] for one in pod["status"].get("containerStatuses", [{"ready": False}]))]


def process_of(world, istiod):
    """Returns the PID of an istiod, in the PID namespace of this machine."""
    status = world.get("-n", "istio-system", f"pod/{istiod}")["status"]["containerStatuses"][0]
    container = status["containerID"].partition("://")[2]
    return next(int(folder.name) for folder in pathlib.Path("/proc").glob("[0-9]*")
                if read(folder / "comm").strip() == "pilot-discovery" and container in read(folder / "cgroup"))


def read(file):
    try:
        return file.read_text()
    except OSError:
        return ""


def debug(world, istiod, page):
    return json.loads(world.kubectl("exec", "-n", "istio-system", istiod, "-c", "discovery", "--",
                                    "pilot-discovery", "request", "GET", f"/debug/{page}"))


def watches(world, istiod):
    """Returns what the pods that are connected to an istiod have asked it for."""
    clients = debug(world, istiod, "adsz").get("clients") or []
    return {client["connectionId"].partition(".")[0]: client["watches"] for client in clients}


def shared_istiod(world):
    """Restarts the pods until an istiod has some of either agent, and returns it: pods are spread by new connections."""
    for _ in range(10):
        for name in FLEET.values():
            world.restart(name)
        for istiod in istiods(world):
            pods = watches(world, istiod)
            if all(any(pod.startswith(name) for pod in pods) for name in FLEET.values()):
                return istiod
    raise Failed("no istiod has pods of both agents")


def expect_same_subscriptions(world):
    """Compares what each Envoy subscribes to by name with what the istiod that it is connected to was asked for."""
    asked = {}
    for istiod in istiods(world):
        asked.update(watches(world, istiod))
    for pod in (pod for name in FLEET.values() for pod in world.pods(name)):
        dump = json.loads(world.admin(pod, "config_dump"))["configs"]
        part = lambda kind: next(one for one in dump if one["@type"].endswith(kind))
        clusters = [one["cluster"] for one in part("ClustersConfigDump").get("dynamic_active_clusters", [])]
        wanted = {
            "ClusterLoadAssignment": {one.get("eds_cluster_config", {}).get("service_name", one["name"])
                                      for one in clusters if one.get("type") == "EDS"},
            "RouteConfiguration": set(members(part("ListenersConfigDump"), "route_config_name"))}
        for kind, names in wanted.items():
            watched = next((set(names) for name, names in asked.get(pod, {}).items() if name.endswith(kind)), set())
            expect(f"subscriptions of {pod} ({kind}) that istiod does not have", set(), names - watched)


def members(value, name):
    """Yields all values of members with a name."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key == name:
            yield inner
        elif isinstance(inner, (dict, list)):
            yield from members(inner, name)


def disturbed(world, replicas, limit, *events):
    """Has this number of istiods, and lets each event happen under load. Each gets the world and an istiod that has pods of
    either agent, and may return a function that undoes it after the limit."""
    for agent, name in FLEET.items():
        world.deploy(name, agent, replicas=REPLICAS, annotations=config())
    world.rolled_out(*FLEET.values())
    told = []
    try:
        for event in events:
            world.scale_istiod(replicas)
            istiod = shared_istiod(world)
            with Load(world, [f"http://{name}:8080/" for name in FLEET.values()], *CLIENTS) as load, Churn(world) as churn:
                undo = event(world, istiod)
                time.sleep(limit + 5)
                if undo:
                    undo()
                    time.sleep(5)
            expect_same_subscriptions(world)
            longest = {agent: churn.longest(agent) for agent in FLEET}
            told.append(f"{event.__name__}: {load.expect_none_failed()}, changes arrived after {longest[OURS]:.1f} s at most "
                        f"({longest[GO]:.1f} s with pilot-agent)")
            if longest[OURS] > limit:
                raise Failed(f"more than {limit} s: {told[-1]}")
    finally:
        world.scale_istiod(1)
        world.kubectl("delete", "deploy", "--wait=false", *FLEET.values(), fails=True)
    return "; ".join(told)


def killed(world, istiod):
    os.kill(process_of(world, istiod), signal.SIGKILL)


def hung(world, istiod):
    pid = process_of(world, istiod)
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


def without_network(world, istiod):
    pid = process_of(world, istiod)

    def drop(action):
        for chain, device in (("INPUT", "-i"), ("OUTPUT", "-o")):
            subprocess.run(["nsenter", "--target", str(pid), "--net", "iptables", action, chain, "!", device, "lo", "-j", "DROP"],
                           check=True)
    drop("-I")
    return lambda: drop("-D")


def only_the_older_release(world, _istiod):
    """Adds an istiod of the other release, which then is the only one."""
    other = world.cluster.another_istiod()
    template = world.get("-n", "istio-system", "deploy/istiod")["spec"]["template"]
    template["spec"]["containers"][0]["image"] = f"localhost/istiod:{other.replace('/', '-')}"
    template["metadata"]["labels"]["release"] = "older"
    selector = {"matchLabels": {"app": "istiod", "release": "older"}}
    world.kubectl("-n", "istio-system", "apply", "-f", "-", input=json.dumps({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": OLDER},
        "spec": {"replicas": 1, "selector": selector, "template": template}}))
    world.kubectl("rollout", "status", "-n", "istio-system", f"deploy/{OLDER}", "--timeout=90s")
    world.kubectl("scale", *ISTIOD, "--replicas=0")

    def undo():
        world.scale_istiod(1)
        world.kubectl("delete", "-n", "istio-system", f"deploy/{OLDER}")
    return undo


def rolling_restart(world, _istiod):
    world.kubectl("rollout", "restart", *ISTIOD)
    world.rolled_out_istiod()


def scaled_to_three_and_back(world, _istiod):
    for replicas in (3, 1):
        world.scale_istiod(replicas)
        time.sleep(5)


@case(15, own=True)
def one_of_two_istiods_is_killed_replaced_or_restarted_without_failed_requests(world):
    return disturbed(world, 2, SOON, killed, only_the_older_release, rolling_restart)


@case(15, own=True)
def two_istiods_one_hung_or_without_network_fail_no_request(world):
    return disturbed(world, 2, LATE, hung, without_network)


@case(15, own=True)
def three_istiods_after_one_and_before_one_fail_no_request(world):
    return disturbed(world, 1, SOON, scaled_to_three_and_back)
