"""The claims: each function is one, and its name and sentence are printed."""

import asyncio
import base64
import json
import os
import re
import ssl
import sys

import yaml

import inject
import mesh
from pods import manifest
from pods.manifest import Refused
from pods.tools import output_of
from world import HERE, OURS, PAGES, STAND_IN, annotated, expect, until

GRPC_PORT = 50051
# What Istio's Envoy has, and waypoints need.
EXTENSION = "istio.workload.BootstrapExtension"
# The object identifier of RSA keys, as certificates have it.
RSA = bytes.fromhex("2a864886f70d010101")


class Mesh:
    """One pod of each kind, and a client that calls them."""

    def __init__(self, world):
        self.world, page = world, world.page
        ours = page("one-annotation.md", 0)
        native, tproxy, held = (page("one-annotation.md", number) for number in (1, 2, 3))
        self.stays = page("one-annotation.md", 4)
        self.ours, self.native = ours, native
        gateway = annotated({"inject.istio.io/templates": "gateway",
                             **page("gateway.md", 0)["podAnnotations"]})
        make = world.make
        self.client = make("client", ours, native, account="client")
        self.pods = {
            "sidecar": make("sidecar", ours), "native": make("native", ours, native),
            "tproxy": make("tproxy", ours, tproxy), "cni": make("cni", ours, cni=True),
            "custom": make("custom", ours, held),
            "gateway": make("gateway", gateway, account="gateway")}
        self.hosts = {}
        self.write()

    def write(self):
        resources = self.world.resources
        for kind, pod in self.pods.items():
            if kind == "gateway":
                to = {"gateway": ("server", [(self.pods["sidecar"].address, 8080)])}
                resources.put(pod.name, mesh.outbound(to, port=80))
                self.hosts[kind] = (None, [(pod.address, 80)])
            else:
                mode = "TPROXY" if kind == "tproxy" else "REDIRECT"
                resources.put(pod.name, mesh.inbound(mode, "client", "gateway"))
                self.hosts[kind] = ("server", [(pod.address, 8080)])
        resources.put(self.pods["custom"].name, [mesh.name_table(
            {kind: pod.address for kind, pod in self.pods.items()})], "names")
        self.point()

    def point(self, **hosts):
        """Says where the client finds hosts."""
        self.hosts |= hosts
        self.world.resources.put(self.client.name, mesh.outbound(self.hosts))

    async def start(self):
        agent = self.world.runner.images[OURS].root / "usr/local/bin/pilot-agent"
        # In a cluster the CNI plugin does this.
        capture = [agent, "istio-iptables", *inject.capture_arguments("REDIRECT")]
        pods = [self.client, *self.pods.values()]
        await asyncio.gather(*(pod.start(capture if pod.name == "cni-0" else None) for pod in pods))
        await asyncio.gather(*(pod.wait_ready() for pod in pods))


async def each_kind_becomes_ready_by_its_own_probes(world, kinds):
    await kinds.start()
    for pod in (kinds.client, *kinds.pods.values()):
        version = await pod.container("istio-proxy").execute(["pilot-agent", "version"], 10)
        if "istio-agent" not in version[1]:
            raise Refused(f"{pod.name} does not run this agent: {version}")
        world.memory(pod, "at rest")


async def native_sidecars_start_before_the_application_and_others_where_asked(world, kinds):
    def order(pod, *lines):
        found = [world.events.index(f"pod {pod.name}: container {line}") for line in lines]
        if found != sorted(found):
            raise Refused(f"pod {pod.name}: expected {lines} in this order")
    order(kinds.pods["native"], "istio-proxy has passed its startup probe", "app started")
    order(kinds.pods["custom"], "istio-proxy started", "app started")
    order(kinds.pods["sidecar"], "app started", "istio-proxy started")


async def captured_requests_reach_each_kind_by_mutual_tls(world, kinds):
    for kind in ("sidecar", "native", "tproxy", "cni", "custom"):
        pod = kinds.pods[kind]
        seen = await world.call(kinds.client, kind, f"{pod.address}:8080")
        caller = f"URI={mesh.identity('client')}"
        expect(f"the caller {kind} saw", caller, seen["caller"].split(";")[-1])
        source = kinds.client.address if kind == "tproxy" else "127.0.0.6"
        expect(f"the client's address {kind} saw", source, seen["client"])


async def a_gateway_serves_a_captured_caller(world, kinds):
    _, [(address, port)] = kinds.hosts["gateway"]
    seen = await world.call(kinds.client, "gateway", f"{address}:{port}")
    expect("the caller behind the gateway", f"URI={mesh.identity('gateway')}",
           seen["caller"].split(";")[-1])


async def a_waypoint_becomes_ready(world, kinds):
    told = world.page("gateway.md", 1)["metadata"]["annotations"]
    pod = world.make("waypoint", annotated({"inject.istio.io/templates": "waypoint", **told}),
                     account="gateway")
    await pod.start()
    envoy = world.runner.images[OURS].root / "usr/local/bin/envoy"
    if (await output_of(["grep", "--quiet", EXTENSION, envoy], 20))[0] == 0:
        await pod.wait_ready()
        skipped = None
    else:
        await until("Envoy names what it lacks", lambda: f"'{EXTENSION}'" in world.log(pod), 20)
        skipped = f"this Envoy has no {EXTENSION}; all up to its start was as it should be"
    await pod.delete(grace=1)
    return skipped


async def other_authorities_get_rsa_keys_or_serve_certificates_themselves(world, kinds):
    rsa = world.make("rsa", world.page("authorities.md", 0))
    spire = world.make("spire", world.page("authorities.md", 1))
    for pod in (rsa, spire):
        world.resources.put(pod.name, mesh.inbound("REDIRECT", "client", "gateway"))
    kinds.point(rsa=("server", [(rsa.address, 8080)]), spire=("server", [(spire.address, 8080)]))
    await asyncio.gather(rsa.start(), spire.start())
    await rsa.wait_ready()
    await world.call(kinds.client, "rsa", f"{rsa.address}:8080")
    code, output = await rsa.container("istio-proxy").execute(
        ["pilot-agent", "request", "GET", "config_dump"], 20)
    expect("exit code of config_dump", 0, code, output)
    chain = re.search(r'"certificate_chain": *\{\s*"inline_bytes": *"([^"]+)"', output)
    expect("a certificate in config_dump", True, chain is not None, output)
    chain = base64.b64decode(chain[1])
    leaf = ssl.PEM_cert_to_DER_cert(chain.decode().partition("-----END")[0] + ssl.PEM_FOOTER)
    expect("an RSA key", True, RSA in leaf)
    # The agent of another pod serves in the place of SPIRE, and later than the pod's own agent starts.
    await until("the agent waits for SPIRE", lambda: "no process serves secrets" in world.log(spire))
    expect("ready without SPIRE", False, spire.is_ready)
    socket = kinds.pods["sidecar"].volumes["workload-socket"].path / "socket"
    os.link(socket, spire.volumes["workload-socket"].path / "socket")
    await spire.wait_ready()
    await world.call(kinds.client, "spire", f"{spire.address}:8080")
    expect("certificates of the pod itself", 0, world.log(spire).count("generated new workload certificate"))
    await asyncio.gather(rsa.delete(grace=1), spire.delete(grace=1))


async def the_agent_answers_names_of_the_mesh(world, kinds):
    script = "import socket; print(socket.gethostbyname('tproxy.demo.svc.cluster.local'))"
    found = await kinds.pods["custom"].container("app").execute([sys.executable, "-c", script], 20)
    expect("the address of tproxy.demo", (0, kinds.pods["tproxy"].address), found)


async def a_changed_label_reaches_envoy(world, kinds):
    pod = kinds.pods["custom"]
    pod.labels["team"] = "checkout"
    folder = pod.volumes["istio-envoy"].path

    def told():
        texts = [path.read_text() for path in folder.glob("envoy-rev*.json")]
        return any('"team":"checkout"' in text.replace(" ", "") for text in texts)
    await until("Envoy is replaced by one with the new label", told)
    await until("the new Envoy serves", lambda: pod.is_ready)
    await world.call(kinds.client, "custom", f"{pod.address}:8080")


async def a_rotated_token_reaches_the_agent(world, kinds):
    pod = kinds.pods["sidecar"]
    token = pod.volumes["istio-token"].path / "istio-token"
    first = world.first_token
    log = world.folder / "local-istiod.log"
    await until("the token is replaced", lambda: token.read_bytes() != first)

    def renewals():
        lines = log.read_text().splitlines()
        refused = [line for line in lines if "certificate refused" in line]
        expect("refused certificates", [], refused)
        return world.log(pod).count("generated new workload certificate")
    # The first token has expired before the third certificate is asked for.
    await until("a certificate is issued for the new token", lambda: renewals() >= 3, 90)


async def replaced_pods_lose_no_request_and_the_way_back_is_the_same(world, kinds):
    ours, stays = kinds.ours, kinds.stays
    bare = STAND_IN not in world.runner.images
    without = annotated({"sidecar.istio.io/proxyImage": None})
    steps = [world.make("shop-1", ours, stays),
             world.make("shop-2", ours, without, stays, bare=bare),
             world.make("shop-3", ours, kinds.native, stays),
             world.make("shop-4", ours, stays)]
    app = kinds.client.container("app")
    stop = app.root / "tmp/stop"
    load = finished = None
    for number, pod in enumerate(steps):
        world.resources.put(pod.name, mesh.inbound("REDIRECT", "client"))
        await pod.start()
        await pod.wait_ready()
        is_bare = bare and number == 1
        kinds.point(shop=(None if is_bare else "server", [(pod.address, 8080)]))
        if load is None:
            await answered(world, kinds.client, "shop", f"{pod.address}:8080")
            command = [sys.executable, "-B", HERE / "load.py", f"{pod.address}:8080", "shop", "/tmp/stop"]
            load = asyncio.create_task(app.execute(command, 200))
            await asyncio.sleep(1)
            world.memory(pod, "under load")
            world.memory(kinds.client, "under load")
        else:
            finished = steps[number - 1]
            await finished.delete()
            expect(f"exit codes of {finished.name}", [0] * len(finished.main + finished.sidecars),
                   [one.exit_codes[-1] for one in finished.main + finished.sidecars])
    stop.touch()
    code, output = await load
    expect("exit code of the load", 0, code, output)
    told = json.loads(output)
    expect("failed requests", [], told["failed"])
    way = "without a sidecar (no PROXYV2)" if bare else "with Istio's own image"
    world.say(f"   {told['sent']} requests, 0 failed, over 3 replaced pods, one of them {way}")


async def answered(world, pod, host, address, limit=10):
    """Waits until the client's Envoy knows a host."""
    for attempt in range(limit * 4):
        try:
            return await world.call(pod, host, address)
        except Refused:
            if attempt + 1 == limit * 4:
                raise
            await asyncio.sleep(0.2)


async def an_envoy_out_of_memory_ends_the_container_with_137_and_it_is_restarted(world, kinds):
    if not world.runner.hierarchy:
        return "no control groups for memory here"
    limited = annotated({"sidecar.istio.io/proxyMemoryLimit": "160Mi"})
    pod = world.make("hungry", kinds.ours, limited)
    world.resources.put(pod.name, mesh.inbound("REDIRECT", "client"))
    await pod.start()
    await pod.wait_ready()
    proxy = pod.container("istio-proxy")
    many = [mesh.cluster(f"cluster-{number}", type="STATIC") for number in range(10_000)]
    for one in many:
        del one["eds_cluster_config"]
    world.resources.put(pod.name, many, "many")
    await until("Envoy runs out of memory", lambda: proxy.exit_codes, 90)
    world.resources.remove(pod.name, "many")
    expect("exit code of the container", 137, proxy.exit_codes[0])
    expect("out of memory", True, proxy.was_out_of_memory)
    await pod.wait_ready(90)
    # Where the kernel ends the agent as well, nothing can be noted.
    if proxy.group.is_old and not re.search(
            "previous Envoy ended .* killed by the kernel for want of memory", world.log(pod)):
        raise Refused("the next agent does not report why the previous Envoy ended")
    await pod.delete()


async def grpc_applications_talk_by_what_their_agents_relay(world, kinds):
    if not world.options.grpc:
        return "no grpcio here"
    annotations = world.page("grpc-agent.md", 0)

    def application(*words):
        return {"spec": {"template": {"spec": {"containers": [{
            "name": "app", "image": "application",
            "command": [sys.executable, "-B", str(HERE / "grpc_app.py"), *words],
            "readinessProbe": {"httpGet": None, "tcpSocket": {"port": int(words[1])}},
            "env": [{"name": "PYTHONPATH", "value": str(world.options.grpc)}]}]}}}}
    server = world.make("grpc-server", annotations, application("serve", str(GRPC_PORT)))
    client = world.make("grpc-client", annotations, application("serve", str(GRPC_PORT + 1)),
                        account="client")
    world.resources.put(server.name, mesh.grpc_server(GRPC_PORT, "client"))
    name = "echo.demo.svc.cluster.local:50051"
    world.resources.put(client.name, [
        *mesh.grpc_client(name, "server", server.address, GRPC_PORT),
        *mesh.grpc_server(GRPC_PORT + 1, "client")])
    await asyncio.gather(server.start(), client.start())
    await asyncio.gather(server.wait_ready(), client.wait_ready())
    world.memory(server, "gRPC agent")
    words = [sys.executable, "-B", HERE / "grpc_app.py", "say", f"xds:///{name}"]
    found = await client.container("app").execute(words, 40)
    expect("the answer", (0, f"heard hello of {mesh.identity('client')}"), found)
    await asyncio.gather(server.delete(), client.delete())


async def values_for_the_whole_mesh_swap_every_pod_and_the_memory_request_suffices(world, kinds):
    values = yaml.safe_load((PAGES / "mesh-wide.yaml").read_text())["global"]
    expect("image of the init container", values["proxy"]["image"], values["proxy_init"]["image"])
    memory = world.page("one-annotation.md", 5)
    pod = world.make("mesh-wide", memory, image=values["proxy"]["image"])
    world.resources.put(pod.name, mesh.inbound("REDIRECT", "client"))
    await pod.start()
    await pod.wait_ready()
    proxy = pod.container("istio-proxy")
    request = memory["spec"]["template"]["metadata"]["annotations"]["sidecar.istio.io/proxyMemory"]
    if proxy.group and (used := proxy.group.used()) > manifest.quantity(request):
        raise Refused(f"the container needs {used} bytes, more than the {request} it asks for")
    await pod.delete()


async def rendered_pods_run_unchanged_but_for_image_names(world, kinds):
    folder = world.options.rendered
    if not folder:
        return "no RENDERED_PODS"
    for path in sorted(folder.glob("*.yaml")):
        pods, _ = manifest.read(path.read_text().replace(STAND_IN, OURS))
        pod_manifest = pods[0]
        pod_manifest["metadata"]["name"] = f"cart-{path.stem}"
        pod = world.runner.make(pod_manifest)
        world.resources.put(pod.name, mesh.inbound("REDIRECT", "client"))
        if path.stem == "sidecar-custom":
            world.resources.put(pod.name, [mesh.name_table({})], "names")
        capture = None
        if path.stem == "sidecar-cni":
            agent = world.runner.images[OURS].root / "usr/local/bin/pilot-agent"
            capture = [agent, "istio-iptables", *inject.capture_arguments("REDIRECT")]
        world.rendered.append((pod, capture))
    await asyncio.gather(*(pod.start(capture) for pod, capture in world.rendered))
    await asyncio.gather(*(pod.wait_ready() for pod, _ in world.rendered))
    await asyncio.gather(*(pod.delete() for pod, _ in world.rendered))
    return None
