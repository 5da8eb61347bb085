"""The cases: each function is a claim. It returns what it has measured, or raises Failed or Skipped."""

import json
import subprocess
import tempfile
import time

from world import GO, ISTIOD, OURS, Failed, Load, expect

CASES = []
CLIENTS = ("client-ours", "client-go")


def case(number, gate=False, own=False):
    """A claim of the suite; `own` ones touch istiod or the mesh, so the cluster has to be the command's."""
    def noted(function):
        CASES.append((number, gate, own, function))
        return function
    return noted


def shop(world, name, agent, **template):
    world.deploy(name, agent, **template)
    world.rolled_out(name)
    return f"http://{name}:8080/"


@case(1, gate=True)
def the_annotation_swaps_agents_both_ways_and_no_request_fails(world):
    url = shop(world, "shop", GO)
    with Load(world, url, *CLIENTS) as load:
        for agent in (OURS, GO):
            world.swap("shop", agent)
            expect("agent of the new pod", agent, world.agent_of("deploy/shop"))
    return load.expect_none_failed()


@case(1, gate=True, own=True)
def the_charts_value_swaps_every_pod_and_back_and_no_request_fails(world):
    url = shop(world, "shop", GO)
    with Load(world, url, *CLIENTS) as load:
        for agent, image in ((OURS, world.images[OURS]), (GO, world.mesh_image())):
            world.cluster.set_mesh(f"global.proxy.image={image}", f"global.proxy_init.image={image}")
            world.until("the webhook injects it", lambda: image in images_of(world.injected()))
            old = world.pods("shop")
            world.kubectl("rollout", "restart", "deploy/shop")
            world.rolled_out("shop")
            world.gone(old)
            expect("agent of the new pod", agent, world.agent_of("deploy/shop"))
    return load.expect_none_failed()


def images_of(pod):
    return [one["image"] for part in ("initContainers", "containers") for one in pod["spec"].get(part, [])]


def config(**metadata):
    return {"proxy.istio.io/config": json.dumps({"proxyMetadata": metadata})}


NATIVE, USUAL = {"sidecar.istio.io/nativeSidecar": "true"}, {"sidecar.istio.io/nativeSidecar": "false"}
READ_ONLY = {"securityContext": {"readOnlyRootFilesystem": True, "runAsUser": 1000, "runAsNonRoot": True}}
KINDS = {
    "usual": {"annotations": USUAL},
    "native": {"annotations": NATIVE},
    "tproxy": {"annotations": {"sidecar.istio.io/interceptionMode": "TPROXY"}},
    "read-only": {"app": READ_ONLY},
    "dns": {"annotations": config(ISTIO_META_DNS_CAPTURE="true")},
}


@case(3, gate=True)
def pods_of_every_kind_capture_traffic_both_ways_with_mutual_tls(world, agent=OURS):
    return kinds(world, agent, KINDS)


@case(3, gate=True, own=True)
def a_dual_stack_pod_captures_both_families(world, agent=OURS):
    dual = {"annotations": config(ISTIO_DUAL_STACK="true"), "spec": {"runtimeClassName": "dual-stack"}}
    world.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "six"}, "spec": {
        "ipFamilies": ["IPv6"], "selector": {"app": "dual"}, "ports": [{"name": "http", "port": 8080}]}})
    world.deploy("dual-client", agent, **dual)
    told = kinds(world, agent, {"dual": dual}, keep=True)
    world.rolled_out("dual-client")
    with Load(world, "http://six:8080/", "dual-client") as load:
        seen = world.call("dual-client", "http://six:8080/")
    world.kubectl("delete", "deploy", "--wait=false", "dual", "dual-client")
    expect("source of a captured connection over IPv6", "::6", seen["from"])
    expect("a caller over IPv6", True, identity(world) in seen["caller"])
    return f"{told}; over IPv6: {load.expect_none_failed()}"


@case(3, gate=True, own=True)
def native_nftables_capture_traffic(world, agent=OURS):
    world.cluster.set_mesh("global.nativeNftables=true")
    try:
        world.until("the webhook asks for nftables", lambda: "--native-nftables" in json.dumps(world.injected()))
        return kinds(world, agent, {"nftables": {}})
    finally:
        world.cluster.set_mesh()
        world.until("the webhook asks for iptables", lambda: "--native-nftables" not in json.dumps(world.injected()))


@case(3, own=True)
def the_proxy_runs_as_another_user(world, agent=OURS):
    # Only then the annotations of a namespace say which user the proxy runs as.
    world.kubectl("set", "env", *ISTIOD, "PLATFORM=openshift")
    world.kubectl("annotate", "--overwrite", f"namespace/{world.namespace}",
                  "openshift.io/sa.scc.uid-range=1000750000/10001",
                  "openshift.io/sa.scc.supplemental-groups=1000750000/10001")
    try:
        world.until("the webhook takes the user", lambda: "1000760000" in json.dumps(world.injected()))
        return kinds(world, agent, {"user": {}})
    finally:
        world.cluster.set_mesh()
        world.kubectl("rollout", "status", *ISTIOD, "--timeout=90s")


def identity(world):
    return f"URI=spiffe://cluster.local/ns/{world.namespace}/sa/default"


def kinds(world, agent, templates, keep=False):
    """Each kind serves the clients under load and calls one of them, and both sides are known by certificate."""
    for name, template in templates.items():
        world.deploy(name, agent, **template)
    world.rolled_out(*templates)
    loads = [Load(world, f"http://{name}:8080/", CLIENTS[number % 2]) for number, name in enumerate(templates)]
    for load in loads:
        load.__enter__()
    for name in templates:
        for client, server in ((CLIENTS[0], name), (name, CLIENTS[0])):
            seen = world.call(client, f"http://{server}:8080/")
            if identity(world) not in seen["caller"]:
                raise Failed(f"{server} saw no certificate of {client}: {seen}")
        if name == "tproxy":
            address = world.get("pods", "-l", f"app={CLIENTS[0]}")["items"][0]["status"]["podIP"]
            expect("client's address behind TPROXY", address, world.call(CLIENTS[0], f"http://{name}:8080/")["from"])
    for load in loads:
        load.__exit__(None)
    if not keep:
        world.kubectl("delete", "deploy", "--wait=false", *templates)
    return "; ".join(f"{name}: {load.expect_none_failed()}" for name, load in zip(templates, loads))


@case(3, gate=True)
def a_job_with_a_native_sidecar_calls_the_mesh_from_its_init_container_and_completes(world, agent=OURS):
    url = shop(world, "shop", GO)
    call = {"image": world.application, "args": ["get", url]}
    template = world.template("job", agent, annotations=NATIVE, spec={
        "restartPolicy": "Never", "containers": [{"name": "app"} | call], "initContainers": [{"name": "first"} | call]})
    world.apply({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"},
                 "spec": {"backoffLimit": 0, "template": template}})
    try:
        world.kubectl("wait", "--for=condition=complete", "job/job", "--timeout=60s")
        pod = world.get("pods", "-l", "app=job")["items"][0]
        expect("agent", True, world.images[agent] is None or world.images[agent] in images_of(pod))
    finally:
        world.kubectl("delete", "job/job", "--wait=false")


@case(4, gate=True)
def probes_of_all_four_kinds_are_rewritten_and_tell_the_applications_state(world, agent=OURS):
    every = {"periodSeconds": 1, "failureThreshold": 1}
    app = {"startupProbe": {"tcpSocket": {"port": 8082}, "periodSeconds": 1, "failureThreshold": 30},
           "readinessProbe": {"httpGet": {"path": "/health", "port": 8080}} | every,
           "livenessProbe": {"grpc": {"port": 8081}} | every}
    second = {"name": "second", "image": world.application, "args": ["wait"],
              "readinessProbe": {"exec": {"command": ["/application", "healthy"]}, "periodSeconds": 1}}
    template = world.template("probed", agent, app=app)
    template["spec"]["containers"].append(second)
    world.apply({"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"] | {"name": "probed"},
                 "spec": template["spec"]})
    try:
        world.kubectl("wait", "--for=condition=Ready", "pod/probed", "--timeout=60s")
        container = next(one for one in world.get("pod/probed")["spec"]["containers"] if one["name"] == "app")
        for kind, path in (("startup", "startupz"), ("readiness", "readyz"), ("liveness", "livez")):
            expect(f"path of the {kind} probe", f"/app-health/app/{path}", container[f"{kind}Probe"].get("httpGet", {}).get("path"))
        for state, wanted in (("no", "false"), ("yes", "true")):
            world.exec("pod/probed", "/application", "get", f"http://127.0.0.1:8080/health/{state}")
            world.kubectl("wait", f"--for=condition=Ready={wanted}", "pod/probed", "--timeout=20s")
        expect("restarts", [0, 0], [one["restartCount"] for one in world.get("pod/probed")["status"]["containerStatuses"]
                                    if one["name"] != "istio-proxy"])
    finally:
        world.kubectl("delete", "pod/probed", "--wait=false")


@case(4, gate=True)
def an_application_held_until_the_proxy_starts_reaches_the_mesh_at_its_first_try(world, agent=OURS):
    url = shop(world, "shop", GO)
    annotations = USUAL | {"proxy.istio.io/config": json.dumps({"holdApplicationUntilProxyStarts": True})}
    template = world.template("held", agent, annotations=annotations, spec={
        "restartPolicy": "Never", "containers": [{"name": "app", "image": world.application, "args": ["get", url]}]})
    world.apply({"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"] | {"name": "held"},
                 "spec": template["spec"]})

    def exit_code():
        states = {one["name"]: one["state"] for one in world.get("pod/held")["status"].get("containerStatuses", [])}
        return str(states.get("app", {}).get("terminated", {}).get("exitCode", ""))
    try:
        expect("exit code of the application", "0", world.until("the application has ended", exit_code))
    finally:
        world.kubectl("delete", "pod/held", "--wait=false")


@case(4, gate=True)
def requests_under_way_end_well_when_their_pod_is_deleted(world, agent=OURS):
    """Of a native sidecar, which drains by its preStop hook, and of one that exits with its last connection."""
    kinds = {"hook": {"annotations": NATIVE}, "zero": {"annotations": USUAL | config(
        EXIT_ON_ZERO_ACTIVE_CONNECTIONS="true")}}
    slow = {"lifecycle": {"preStop": {"sleep": {"seconds": 10}}}}
    for name, template in kinds.items():
        world.deploy(name, agent, app=slow, spec={"terminationGracePeriodSeconds": 60}, **template)
    world.rolled_out(*kinds)
    calls = {}
    for name in kinds:
        world.until(f"{CLIENTS[0]} reaches {name}", lambda: world.call(CLIENTS[0], f"http://{name}:8080/"))
        calls[name] = subprocess.Popen(
            [*world.command, "-n", world.namespace, "exec", f"deploy/{CLIENTS[0]}", "-c", "app", "--",
             "/application", "get", f"http://{name}:8080/?wait=8s"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(1)
    begun = time.monotonic()
    world.kubectl("delete", "deploy", "--wait=false", *kinds)
    took = {}
    for name, call in calls.items():
        output, errors = call.communicate(timeout=30)
        if call.returncode:
            raise Failed(f"the request to {name} failed: {errors.decode()}")
    for name in kinds:
        world.until(f"{name} is gone", lambda: not world.get("pods", "-l", f"app={name}")["items"], 55)
        took[name] = time.monotonic() - begun
    return ", ".join(f"{name} gone after {seconds:.0f} s" for name, seconds in took.items())


@case(4, gate=True)
def a_pod_whose_application_never_starts_is_deleted_without_delay(world, agent=OURS):
    world.deploy("never", agent, app={"image": "localhost/none:1", "imagePullPolicy": "Never"})

    def proxy_ready():
        status = world.get("pods", "-l", "app=never")["items"][0]["status"]
        return any(one["name"] == "istio-proxy" and one["ready"] for part in ("initContainerStatuses", "containerStatuses")
                   for one in status.get(part, []))
    world.until("the sidecar is ready", proxy_ready)
    begun = time.monotonic()
    world.kubectl("delete", "deploy/never", "--wait=false")
    world.until("the pod is gone", lambda: not world.get("pods", "-l", "app=never")["items"], 19)
    return f"gone after {time.monotonic() - begun:.0f} s"


@case(6, gate=True)
def a_machine_registers_itself_tells_its_health_and_has_traffic_both_ways(world, agent=OURS):
    group = {"apiVersion": "networking.istio.io/v1", "kind": "WorkloadGroup",
             "metadata": {"name": "machine", "namespace": world.namespace}, "spec": {
                 "metadata": {"labels": {"app": "machine"}}, "template": {"serviceAccount": "default"},
                 "probe": {"periodSeconds": 1, "failureThreshold": 1, "httpGet": {"path": "/health", "port": 8080}}}}
    url = shop(world, "shop", GO)
    world.apply(group, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "machine"}, "spec": {
        "selector": {"app": "machine"}, "ports": [{"name": "http", "port": 8080}]}})
    with tempfile.TemporaryDirectory() as folder:
        # Istio's own tool writes what a machine gets.
        with open(f"{folder}/group.json", "w", encoding="utf-8") as file:
            json.dump(group, file)
        world.istioctl("x", "workload", "entry", "configure", "-f", file.name, "-o", folder, "--autoregister",
                       "--clusterID", "Kubernetes", "--ingressIP", "127.0.0.1")
        files = [f"--from-file={folder}/{file}" for file in ("root-cert.pem", "istio-token", "mesh.yaml")]
        secret = world.kubectl("create", "secret", "generic", "machine", *files, "--dry-run=client", "-o", "json")
        with open(f"{folder}/cluster.env", encoding="utf-8") as file:
            variables = [line.strip().partition("=") for line in file]
    world.apply(json.loads(secret), machine(world, agent, variables))

    def healthy():
        for entry in world.get("workloadentries")["items"]:
            if entry["metadata"]["name"].startswith("machine-"):
                return {one["type"]: one["status"] for one in entry.get("status", {}).get("conditions", [])}.get("Healthy")
    world.until("it is registered as healthy", lambda: healthy() == "True", 30)
    with Load(world, "http://machine:8080/", *CLIENTS) as load:
        for server, seen in (("machine", world.call(CLIENTS[0], "http://machine:8080/")),
                             ("shop", json.loads(world.exec("pod/machine", "/application", "get", url)))):
            if identity(world) not in seen["caller"]:
                raise Failed(f"{server} saw no certificate: {seen}")
    told = load.expect_none_failed()
    for state, wanted in (("no", "False"), ("yes", "True")):
        world.exec("pod/machine", "/application", "get", f"http://127.0.0.1:8080/health/{state}")
        world.until(f"its health is {wanted}", lambda: healthy() == wanted, 30)
    world.until("it serves again", lambda: world.call(CLIENTS[0], "http://machine:8080/"), 20)
    world.kubectl("delete", "pod/machine", "--wait=false")
    world.until("it is registered no longer", lambda: healthy() is None, 60)
    return told


def machine(world, agent, variables):
    """A pod that stands for a machine: nothing is injected, and the agent has what a machine has."""
    environment = [{"name": name, "value": value.strip("'")} for name, _, value in variables if name] + [
        {"name": "INSTANCE_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "POD_NAME", "value": "machine"}, {"name": "CA_ADDR", "value": "istiod.istio-system.svc:15012"},
        {"name": "PROV_CERT", "value": "./etc/certs"}, {"name": "OUTPUT_CERTS", "value": "./etc/certs"}]
    image = world.images[agent] or world.mesh_image()
    places = {"root-cert.pem": "/var/run/secrets/istio", "istio-token": "/var/run/secrets/tokens"}
    mounts = [{"name": file.partition(".")[0], "mountPath": place} for file, place in places.items()] + [
        {"name": "mesh", "mountPath": "/etc/istio/config"}, {"name": "certs", "mountPath": "/etc/certs"},
        {"name": "proxy", "mountPath": "/etc/istio/proxy"}]
    volumes = [{"name": file.partition(".")[0], "secret": {"secretName": "machine", "items": [
        {"key": file, "path": "mesh" if file == "mesh.yaml" else file}]}} for file in (*places, "mesh.yaml")]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {
        "name": "machine", "labels": {"sidecar.istio.io/inject": "false"}}, "spec": {
            "terminationGracePeriodSeconds": 10, "securityContext": {"fsGroup": 1337},
            "volumes": volumes + [{"name": name, "emptyDir": {}} for name in ("certs", "proxy")],
            "initContainers": [{
                "name": "root", "image": world.application, "securityContext": {"runAsUser": 1337}, "volumeMounts": mounts,
                "args": ["copy", "/var/run/secrets/istio/root-cert.pem", "/etc/certs/root-cert.pem"]}, {
                "name": "capture", "image": image, "args": ["istio-iptables"], "env": environment, "securityContext": {
                    "runAsUser": 0, "runAsGroup": 0, "capabilities": {"add": ["NET_ADMIN", "NET_RAW"]}}}],
            "containers": [
                {"name": "istio-proxy", "image": image, "args": ["proxy", "sidecar"], "env": environment,
                 "volumeMounts": mounts},
                {"name": "app", "image": world.application, "args": ["serve"], "securityContext": {"runAsUser": 1000}}]}}


@case(8, gate=True, own=True)
def kept_configuration_serves_while_istiod_is_away_and_hands_over_when_it_is_back(world, agent=OURS):
    annotations = config(ISTIO_AGENT_KEEP_CONFIG="/var/run/istio-agent", ISTIO_AGENT_KEEP_CERTS="/var/run/istio-agent") | {
        "sidecar.istio.io/userVolume": json.dumps({"istio-agent": {"emptyDir": {"medium": "Memory", "sizeLimit": "128Mi"}}}),
        "sidecar.istio.io/userVolumeMount": json.dumps({"istio-agent": {"mountPath": "/var/run/istio-agent"}})}
    url = shop(world, "kept", agent, annotations=annotations)
    pod = world.pods("kept")[0]
    with Load(world, url, *CLIENTS) as before:
        world.scale_istiod(0)
    try:
        world.kill(pod, "istio-proxy")
        begun = time.monotonic()
        world.until("it serves what is kept", lambda: world.call(CLIENTS[0], url), 60)
        took = time.monotonic() - begun
        with Load(world, url, *CLIENTS) as after:
            world.scale_istiod(1)
            # The stream is handed over, and configuration flows again.
            world.deploy("later", GO)
            world.rolled_out("later")
            world.until("the kept pod knows a new service", lambda: world.call("kept", "http://later:8080/"))
    finally:
        world.scale_istiod(1)
    return f"{before.expect_none_failed()}; served {took:.1f} s after the kill; {after.expect_none_failed()}"


@case(1, gate=True)
def the_sidecar_with_this_agent_takes_less_memory(world):
    """What the kubelet charges to the two clients' sidecars, which have made the same requests."""
    node = world.get("pods", "-l", f"app={CLIENTS[0]}")["items"][0]["spec"]["nodeName"]
    pods = json.loads(world.kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy/stats/summary"))["pods"]
    held = {client: container["memory"]["workingSetBytes"] / 1e6 for client in CLIENTS for pod in pods
            if pod["podRef"]["name"] in world.pods(client) for container in pod["containers"]
            if container["name"] == "istio-proxy"}
    if held[CLIENTS[0]] >= held[CLIENTS[1]]:
        raise Failed(f"working sets in MB: {held}")
    return ", ".join(f"{client}: {megabytes:.1f} MB" for client, megabytes in held.items())


@case(9, gate=True)
def a_sidecar_is_upgraded_in_place_and_its_application_runs_on(world, agent=OURS):
    url = shop(world, "in-place", agent)
    pod = world.pods("in-place")[0]
    with Load(world, url, *CLIENTS) as load:
        started = world.container(pod, "istio-proxy")
        world.kubectl("set", "image", f"pod/{pod}", f"istio-proxy={world.other_image(agent)}")
        world.until("the sidecar is another one", lambda: (
            now := world.container(pod, "istio-proxy"))["ready"] and now["containerID"] != started["containerID"])
        time.sleep(2)
    expect("restarts of the application", 0, world.container(pod, "app")["restartCount"])
    expect("pods with requests", [pod], sorted({pod for told in load.told.values() for pod in told["pods"]}))
    longest = max(told["seconds"] for told in load.told.values())
    counts = ", ".join(f"{len(told['failed'])} of {told['sent']} requests of {client}" for client, told in load.told.items())
    return f"cut for {longest:.2f} s: {counts} failed"
