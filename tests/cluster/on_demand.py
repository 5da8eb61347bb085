"""Cases of pods whose Envoy gets clusters when they are first used. The variable CHAOS_SECONDS is the length of the case
in which the mesh changes all the time."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time

from cases import case, config, resource, shop
from compare import private
from standby import NATIVE, PAIR, STANDBY, hand_over, image, page, settings
from world import OURS, Failed, Load, expect

ON = {"ISTIO_AGENT_ON_DEMAND_CLUSTERS": "true", "ISTIO_META_DNS_CAPTURE": "true"}
AT_ONCE = 200
# Prints the destination and the first byte of each TCP connection that an address opens, when its input ends, and the
# number of packets that it has missed.
CAPTURE = """
import json, select, socket, struct, sys
SOL_PACKET, PACKET_STATISTICS, SO_RCVBUFFORCE, ALL, SYN, ACK = 263, 6, 33, socket.htons(3), 2, 16
source = socket.inet_aton(sys.argv[1])
packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, ALL)
packets.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 28)
opened = {}
print("ready", flush=True)
while True:
    ready = select.select([sys.stdin, packets], [], [])[0]
    if packets not in ready:
        break
    packet = packets.recv(65536)
    if packet[0] >> 4 != 4 or packet[9] != 6 or packet[12:16] != source:
        continue
    tcp = packet[(packet[0] & 15) * 4:int.from_bytes(packet[2:4], "big")]
    connection = socket.inet_ntoa(packet[16:20]), int.from_bytes(tcp[2:4], "big"), int.from_bytes(tcp[:2], "big")
    sequence, payload = int.from_bytes(tcp[4:8], "big"), tcp[(tcp[12] >> 4) * 4:]
    # Each packet is seen at several devices.
    if tcp[13] & SYN and not tcp[13] & ACK and opened.get(connection, [None])[0] != sequence:
        opened[connection] = [sequence, None]
    elif payload and connection in opened and sequence == (opened[connection][0] + 1) % 2**32:
        opened[connection][1] = payload[0]
missed = struct.unpack("II", packets.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))[1]
json.dump([[[*connection[:2], first] for connection, (_, first) in opened.items()], missed], sys.stdout)
"""


def hosts(world, name, number, server):
    """Creates services of this many hosts, which a server in the mesh serves. Returns the hosts."""
    address = world.get("pod", "-l", f"app={server}")["items"][0]["status"]["podIP"]
    names = [f"{name}-{one:04}.test" for one in range(number)]
    world.apply(*(resource(
        "networking.istio.io/v1", "ServiceEntry", f"{name}-{first}", hosts=names[first:first + AT_ONCE],
        addresses=[f"240.0.3.{1 + first // AT_ONCE}"], location="MESH_INTERNAL", resolution="STATIC",
        ports=[{"name": "http", "number": 80, "protocol": "HTTP", "targetPort": 8080}],
        endpoints=[{"address": address, "labels": {"security.istio.io/tlsMode": "istio"}}])
        for first in range(0, number, AT_ONCE)))
    return names


def client(world, name, last, **template):
    """Creates a client, and waits until its Envoy has routes to the last host."""
    world.deploy(name, OURS, **({"annotations": config(**ON)} | template))
    world.rolled_out(name)
    world.until("the hosts are known", lambda: last in world.admin(
        f"deploy/{name}", "config_dump?resource=dynamic_route_configs"))


def first_requests(world, name, names):
    """Requests hosts at once, each of them several times. Returns the number of requests."""
    load = Load(world, [])
    process = load.start(name, [f"get://{host}/" for host in names])
    time.sleep(3)
    load.told[name] = load.end(name, process)
    load.expect_none_failed()
    return load.told[name]["sent"]


def on_demand(world, name):
    return json.loads(world.exec(f"deploy/{name}", "pilot-agent", "request", "--debug-port=15020", "GET", "debug/xdsz",
                                 container="istio-proxy"))["on_demand"]


def sent_clusters(world, name):
    return on_demand(world, name)["sent"]


@contextlib.contextmanager
def captured(world, pod):
    """Yields a function that ends the capture of what a pod sends, and returns what CAPTURE prints."""
    source = world.get(f"pod/{pod}")["status"]["podIP"]
    process = subprocess.Popen(
        ["nsenter", "--target", str(world.cluster.first()), "--net", sys.executable, "-c", CAPTURE, source],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    try:
        yield lambda: json.loads(process.communicate(timeout=10)[0])
    finally:
        process.kill()


@case(14, own=True)
def a_thousand_first_requests_under_strict_mutual_tls_leave_encrypted(world):
    shop(world, "encrypted", OURS)
    world.apply(resource("security.istio.io/v1", "PeerAuthentication", "strict", mtls={"mode": "STRICT"},
                         selector={"matchLabels": {"app": "encrypted"}}))
    names = hosts(world, "encrypted", 1000, "encrypted")
    client(world, "encrypting", names[-1])
    server = world.get(f"pod/{world.pods('encrypted')[0]}")["status"]["podIP"]
    before = sent_clusters(world, "encrypting")
    with captured(world, world.pods("encrypting")[0]) as end:
        sent = sum(first_requests(world, "encrypting", names[first:first + AT_ONCE]) for first in range(0, len(names), AT_ONCE))
        connections, missed = end()
    expect("packets that the capture has missed", 0, missed)
    # Envoy also opens connections that it then does not need.
    to_server = [first for address, port, first in connections if (address, port) == (server, 8080) and first is not None]
    expect("first bytes to the server (a TLS handshake is 22)", {22}, set(to_server))
    # Envoy's and the agent's own connections go to istiod.
    expect("other destinations", set(), {(address, port) for address, port, _ in connections
                                         if address != server and port not in (15010, 15012, 53)})
    expect("clusters that the requests have loaded", len(names), sent_clusters(world, "encrypting") - before)
    # Envoy does not ask again for clusters that are created again.
    world.kubectl("delete", "serviceentry", "--all")
    world.until("the clusters are gone", lambda: sent_clusters(world, "encrypting") <= before)
    hosts(world, "encrypted", 1000, "encrypted")
    world.until("the clusters are back", lambda: sent_clusters(world, "encrypting") == before + len(names))
    sent += sum(first_requests(world, "encrypting", names[first:first + AT_ONCE]) for first in range(0, len(names), AT_ONCE))
    expect("clusters that Envoy did not load", None, re.search("ON_DEMAND_CLUSTER_WARMS", world.kubectl(
        "logs", "deploy/encrypting", "-c", "istio-proxy")))
    forget(world, "encrypted", "encrypting")
    return f"{sent} requests to {len(names)} hosts over {len(to_server)} connections, none failed"


@case(14, own=True)
def first_requests_in_a_handover_and_after_a_container_restart_succeed(world):
    shop(world, "handed", OURS)
    names = hosts(world, "handed", 4 * AT_ONCE, "handed")
    parts = [names[first:first + AT_ONCE] for first in range(0, len(names), AT_ONCE)]
    client(world, "handing", names[-1], annotations=NATIVE | STANDBY | settings(**ON))
    pod = world.pods("handing")[0]
    world.until("the standby waits", lambda: page(world, pod)["waits"])
    sent = first_requests(world, "handing", parts[0])
    used = sent_clusters(world, "handing")
    for number, (container, part) in enumerate(zip(reversed(PAIR), parts[1:])):
        load, processes = Load(world, []), []
        with concurrent.futures.ThreadPoolExecutor() as pool:
            other = image(world, world.other_image(OURS), number)
            handed = pool.submit(hand_over, world, pod, container, other, 120)
            for first in range(0, AT_ONCE, 10):
                processes.append(load.start("handing", [f"get://{host}/" for host in part[first:first + 10]]))
                time.sleep(1)
            handed.result()
        load.told = {number: load.end("handing", process) for number, process in enumerate(processes)}
        sent += sum(told["sent"] for told in load.told.values())
        load.expect_none_failed()
        if sent_clusters(world, "handing") < used + len(part):
            raise Failed("the successor lacks used clusters")
        used += len(part)
    restarts = world.container(pod, PAIR[0])["restartCount"]
    world.kill(pod, PAIR[0])
    world.until("the container has restarted", lambda: (now := world.container(pod, PAIR[0]))["ready"]
                and now["restartCount"] > restarts)
    sent += first_requests(world, "handing", parts[3])
    forget(world, "handed", "handing")
    return f"{sent} requests to {len(names)} hosts, none failed"


@case(14, own=True)
def used_services_are_served_while_istiod_is_away(world):
    shop(world, "kept", OURS)
    names = hosts(world, "kept", AT_ONCE, "kept")
    client(world, "keeping", names[-1])
    sent = first_requests(world, "keeping", names[:20])
    load = Load(world, [])
    process = load.start("keeping", [f"get://{host}/" for host in names[:20]])
    world.scale_istiod(0)
    try:
        time.sleep(60)
    finally:
        world.scale_istiod(1)
    sent += first_requests(world, "keeping", names[20:])
    load.told["keeping"] = load.end("keeping", process)
    sent += load.told["keeping"]["sent"]
    load.expect_none_failed()
    forget(world, "kept", "keeping")
    return f"{sent} requests, none failed"


@case(14, own=True)
def first_requests_succeed_while_the_mesh_changes_and_cpu_time_is_short(world):
    shop(world, "changing", OURS)
    limit = {"sidecar.istio.io/proxyCPU": "10m", "sidecar.istio.io/proxyCPULimit": "100m"}
    client(world, "limited", "changing", annotations=config(**ON) | limit)
    pod = world.pods("limited")[0]
    agent = world.process(pod, "pilot-agent")
    lasts = time.monotonic() + int(os.environ.get("CHAOS_SECONDS", "60"))
    sent, rounds, memory = 0, 0, []
    while time.monotonic() < lasts or rounds < 2:
        rounds += 1
        names = hosts(world, f"round-{rounds}", 20, "changing")
        # Changes of all clusters, and of a route.
        world.apply(resource("networking.istio.io/v1", "DestinationRule", "all", host="*.test", trafficPolicy={
            "connectionPool": {"tcp": {"connectTimeout": f"{5 + rounds % 5}s"}}}))
        world.apply(resource("networking.istio.io/v1", "VirtualService", "one", hosts=[names[0]], http=[
            {"route": [{"destination": {"host": names[1]}}], "timeout": f"{30 + rounds}s"}]))
        world.until("the hosts are known", lambda: names[-1] in world.admin(
            pod, "config_dump?resource=dynamic_route_configs"))
        if rounds % 4 == 0:
            world.kubectl("delete", "-n", "istio-system", "pod", "-l", "app=istiod", "--wait=false")
            world.rolled_out_istiod()
        sent += first_requests(world, "limited", names)
        world.kubectl("delete", "serviceentry", f"round-{rounds - 2}-0", fails=True)
        memory.append(private(pathlib.Path(f"/proc/{agent}")))
    state = on_demand(world, "limited")
    expect("clusters that are held or withdrawn", {0}, set(state["held"].values()))
    world.kubectl("delete", "destinationrule,virtualservice", "--all")
    forget(world, "changing", "limited")
    return f"{sent} requests in {rounds} rounds, none failed; the agent's private memory {memory[1]:.1f} to {memory[-1]:.1f} MB"


def forget(world, *names):
    world.kubectl("delete", "serviceentry,peerauthentication", "--all")
    world.kubectl("delete", "deploy", "--wait=false", *names)
