"""The cases of the suite. The name of a case is a claim. It returns its measurements, or raises Failed or Skipped."""

import base64
import contextlib
import hashlib
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import tarfile
import tempfile
import time

from world import GO, ISTIOD, OURS, Failed, Load, Skipped, expect

CASES = []
CLIENTS = ("client-ours", "client-go")
# The number of kinds of pods that are under load at once. With more, probes time out on a machine of two cores.
AT_ONCE = 4


def case(number, gate=False, own=False):
    """Adds a case to the suite. Cases with `own` change istiod or the mesh, so they never run in a user's cluster."""
    def noted(function):
        CASES.append((number, gate, own, function))
        return function
    return noted


def shop(world, name, agent, **template):
    world.deploy(name, agent, **template)
    world.rolled_out(name)
    return f"http://{name}:8080/"


def resource(version, kind, name, **spec):
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


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
            world.restart("shop")
            expect("agent of the new pod", agent, world.agent_of("deploy/shop"))
    return load.expect_none_failed()


@case(2)
def pods_deleted_evicted_rolled_out_and_scaled_fail_no_request(world, agent=OURS):
    url = shop(world, "crowd", agent, replicas=2)
    with Load(world, url, *CLIENTS) as load:
        for end in (delete, evict):
            pod = world.pods("crowd")[0]
            end(world, pod)
            world.gone([pod])
            world.rolled_out("crowd")
        world.restart("crowd")
        for replicas in (4, 1):
            world.kubectl("scale", "deploy/crowd", f"--replicas={replicas}")
            world.rolled_out("crowd")
        world.until("one pod is left", lambda: len(world.get("pods", "-l", "app=crowd")["items"]) == 1)
    world.kubectl("delete", "deploy/crowd", "--wait=false")
    return load.expect_none_failed()


def delete(world, pod):
    world.kubectl("delete", f"pod/{pod}", "--wait=false")


def evict(world, pod):
    world.kubectl("create", "--raw", f"/api/v1/namespaces/{world.namespace}/pods/{pod}/eviction", "-f", "-", input=json.dumps(
        {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": world.namespace}}))


@case(2, own=True)
def istiod_restarted_scaled_to_nothing_and_of_another_version_fails_no_request(world, agent=OURS):
    url = shop(world, "steady", agent)
    with Load(world, url, *CLIENTS) as load:
        world.kubectl("rollout", "restart", *ISTIOD)
        world.rolled_out_istiod()
        configuration_flows(world, "steady")
        world.scale_istiod(0)
        time.sleep(5)
        world.scale_istiod(1)
        configuration_flows(world, "steady")
        for version in (world.cluster.another_istiod(), None):
            world.cluster.set_mesh(istiod=version)
            world.rolled_out_istiod()
            configuration_flows(world, "steady")
    return load.expect_none_failed()


def configuration_flows(world, client):
    """Creates a service, checks that a client soon knows it, and deletes it."""
    name = f"new-{time.time_ns()}"
    world.apply(service(name, 80))
    world.until("a new service is known", lambda: name in world.admin(
        f"deploy/{client}", "config_dump?resource=dynamic_route_configs"))
    world.kubectl("delete", f"service/{name}")


def service(name, port, **spec):
    return resource("v1", "Service", name, ports=[{"name": "http", "port": port}], **spec)


def containers(pod):
    return [one for part in ("initContainers", "containers") for one in pod["spec"].get(part, [])]


def images_of(pod):
    return [one["image"] for one in containers(pod)]


def config(**metadata):
    return {"proxy.istio.io/config": json.dumps({"proxyMetadata": metadata})}


NATIVE, USUAL = {"sidecar.istio.io/nativeSidecar": "true"}, {"sidecar.istio.io/nativeSidecar": "false"}
READ_ONLY = {"securityContext": {"readOnlyRootFilesystem": True, "runAsUser": 1000, "runAsNonRoot": True}}
# All that Kubernetes' Pod Security Standard `restricted` requires of a container.
RESTRICTED = {"securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsUser": 1000,
                                  "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}}
KINDS = {
    "usual": {"annotations": USUAL},
    "native": {"annotations": NATIVE},
    "tproxy": {"annotations": {"sidecar.istio.io/interceptionMode": "TPROXY"}},
    "read-only": {"app": READ_ONLY},
    "restricted": {"app": RESTRICTED, "spec": {"securityContext": {
        "fsGroup": 2000, "seccompProfile": {"type": "RuntimeDefault"}}}},
    "sotw": {"annotations": config(ISTIO_DELTA_XDS="false")},
    "dns": {"annotations": config(ISTIO_META_DNS_CAPTURE="true")},
    "hold": {"annotations": {"proxy.istio.io/config": json.dumps({"holdApplicationUntilProxyStarts": True})}},
    "small": {"annotations": {"sidecar.istio.io/proxyCPU": "50m", "sidecar.istio.io/proxyCPULimit": "500m",
                              "sidecar.istio.io/proxyMemoryLimit": "256Mi"}},
    "stats": {"annotations": {"sidecar.istio.io/statsInclusionRegexps": ".*"}},
    "ports": {"annotations": {"traffic.sidecar.istio.io/excludeOutboundPorts": "9",
                              "traffic.sidecar.istio.io/excludeInboundPorts": "9"}},
}


@case(3, gate=True)
def pods_of_every_kind_capture_traffic_both_ways_with_mutual_tls(world, agent=OURS):
    return kinds(world, agent, KINDS)


@case(3, gate=True, own=True)
def a_dual_stack_pod_captures_both_families(world, agent=OURS):
    dual = {"annotations": config(ISTIO_DUAL_STACK="true"), "spec": {"runtimeClassName": "dual-stack"}}
    world.apply(service("six", 8080, ipFamilies=["IPv6"], selector={"app": "dual"}))
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


@contextlib.contextmanager
def another_user(world):
    """Makes the proxies of new pods run as the user that OpenShift's annotations give them, while the block runs."""
    # Only on this platform does istiod read the proxy's user from the annotations of the namespace.
    world.kubectl("set", "env", *ISTIOD, "PLATFORM=openshift")
    world.kubectl("annotate", "--overwrite", f"namespace/{world.namespace}",
                  "openshift.io/sa.scc.uid-range=1000750000/10001",
                  "openshift.io/sa.scc.supplemental-groups=1000750000/10001")
    try:
        world.until("the webhook takes the user", lambda: "1000760000" in json.dumps(world.injected()))
        yield
    finally:
        world.cluster.set_mesh()
        world.rolled_out_istiod()


@case(3, own=True)
def the_proxy_runs_as_another_user(world, agent=OURS):
    with another_user(world):
        return kinds(world, agent, {"user": {}})


CNI = ("-n", "istio-system", "daemonset/istio-cni-node")


@contextlib.contextmanager
def cni(world, *values):
    """Makes Istio's CNI plugin capture the traffic of new pods, while the block runs."""
    try:
        install_cni(world, *values)
        world.until("the webhook injects istio-validation", lambda: "istio-validation" in json.dumps(world.injected()))
        yield
    finally:
        world.cluster.remove_cni()
        world.cluster.set_mesh()
        world.until("the webhook injects istio-init", lambda: "istio-init" in json.dumps(world.injected()))


def install_cni(world, *values):
    world.cluster.set_mesh(*values, cni=True)
    world.kubectl("rollout", "status", *CNI, "--timeout=60s")


def by_cni(world, agent, templates):
    """Checks that each kind has traffic with the plugin's rules, and has no capabilities unless it is `tproxy`."""
    told = kinds(world, agent, templates, keep=True)
    for name, template in templates.items():
        pod = world.get(f"pod/{world.pods(name)[0]}")
        added = [one["securityContext"]["capabilities"].get("add") for one in containers(pod) if one["name"] != "app"]
        wanted = [None, ["NET_ADMIN"]] if name == "tproxy" else [None, None]
        expect(f"capabilities of istio-validation and istio-proxy in {name}", wanted, added)
        if template.get("agent", agent) == OURS:
            verify_rules(world, pod)
    world.kubectl("delete", "deploy", "--wait=false", *templates)
    return told


CNI_KINDS = {"cni-usual": KINDS["usual"], "cni-native": KINDS["native"], "cni-socket": {
    "agent": OURS, "annotations": config(ISTIO_AGENT_ADMIN_SOCKET="true")}, "cni-dns": {
    "annotations": KINDS["dns"]["annotations"] | KINDS["ports"]["annotations"]}}


@case(3, gate=True, own=True)
def istios_cni_plugin_captures_traffic_of_pods_without_privileges(world, agent=OURS):
    with cni(world):
        return by_cni(world, agent, CNI_KINDS)


@case(3, own=True)
def istios_cni_plugin_captures_traffic_of_either_agent_tproxy_and_another_user(world, agent=OURS):
    others = {"cni-other": {"agent": GO if agent == OURS else OURS}, "tproxy": KINDS["tproxy"]}
    told = []
    with cni(world):
        told.append(by_cni(world, agent, others))
        with another_user(world):
            told.append(by_cni(world, agent, {"cni-user": {}}))
    with cni(world, "global.nativeNftables=true"):
        told.append(by_cni(world, agent, CNI_KINDS | others))
    return "; ".join(told)


def verify_rules(world, pod):
    """Checks the rules of a pod with the command in docs/operations/traffic-capture.md."""
    validation = next(one for one in containers(pod) if one["name"] == "istio-validation")
    name = f"pod/{pod['metadata']['name']}"
    root = {"securityContext": {"runAsUser": 0, "runAsNonRoot": False}}
    world.kubectl("debug", name, "-c", "verify", f"--image={validation['image']}", "--profile=netadmin",
                  "--custom=/dev/stdin", "--target=istio-proxy",
                  *(f"--env={one['name']}={one['value']}" for one in validation.get("env", [])),
                  "--", "pilot-agent", *validation["args"], "--verify", input=json.dumps(root))
    ended = world.until("--verify has ended", lambda: [
        one["state"]["terminated"] for one in world.get(name)["status"].get("ephemeralContainerStatuses", [])
        if "terminated" in one["state"]])
    if ended[0]["exitCode"]:
        raise Failed(f"--verify in {name}: {world.kubectl('logs', name, '-c', 'verify')}")


@case(3, own=True)
def istios_cni_plugin_repairs_or_deletes_pods_that_failed_their_validation(world, agent=OURS):
    with cni(world):
        world.kubectl("delete", "--cascade=foreground", *CNI)
        world.deploy("early", agent)
        early = world.until("istio-validation has failed", lambda: broken(world))
        install_cni(world, "cni.repair.repairPods=false", "cni.repair.labelPods=true")
        world.kubectl("wait", "--for=jsonpath={.metadata.labels.cni\\.istio\\.io/uninitialized}=true",
                      f"pod/{early}", "--timeout=30s")
        world.kubectl("delete", "--cascade=foreground", *CNI)
        install_cni(world)
        world.rolled_out("early")
        expect("pods after the repair", [early], world.pods("early"))
        expect_healthy(world, "deploy/early", agent)
        world.kubectl("delete", "--cascade=foreground", *CNI)
        world.kubectl("rollout", "restart", "deploy/early")
        early = world.until("istio-validation has failed", lambda: broken(world))
        install_cni(world, "cni.repair.repairPods=false", "cni.repair.deletePods=true")
        world.rolled_out("early")
        expect("whether the pod is deleted", False, early in world.pods("early"))
        world.kubectl("delete", "deploy/early", "--wait=false")


def broken(world):
    """Returns the pod whose istio-validation has exited with the code that the plugin's controller expects, or None."""
    return next((pod["metadata"]["name"] for pod in world.get("pods", "-l", "app=early")["items"]
                 for one in pod["status"].get("initContainerStatuses", [])
                 if one["name"] == "istio-validation" and one["lastState"].get("terminated", {}).get("exitCode") == 126), None)


def identity(world, account="default"):
    return f"URI=spiffe://cluster.local/ns/{world.namespace}/sa/{account}"


def expect_healthy(world, target, agent):
    """Checks that the doctor has no finding in a pod that serves, except that it cannot have clusters on demand if the whole
    suite has them."""
    if agent != OURS:
        return
    report = json.loads(world.exec(target, "pilot-agent", "doctor", "--json", container="istio-proxy", fails=True))
    checks = [check for group in report["groups"] for check in group["checks"] if check["level"] in ("warning", "error")]
    expect(f"findings of the doctor in {target}", [], [check for check in checks if check.get("code") != "ON_DEMAND_OFF"])


@case(3)
def the_doctor_finds_nothing_on_a_busy_node(world, agent=OURS):
    world.deploy("busy", agent)
    world.rolled_out("busy")
    hogs = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2 * os.cpu_count())]
    try:
        with Load(world, "http://busy:8080/", *CLIENTS) as load:
            for _ in range(5):
                expect_healthy(world, "deploy/busy", agent)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    world.kubectl("delete", "deploy/busy", "--wait=false")
    return load.expect_none_failed()


def kinds(world, agent, templates, keep=False):
    """Checks that each kind serves the clients under load and calls one of them, and that both sides use mutual TLS."""
    for name, template in templates.items():
        world.deploy(name, **{"agent": agent} | template)
    world.rolled_out(*templates)
    names = list(templates)
    served = []
    for first in range(0, len(names), AT_ONCE):
        served += under_load(world, agent, templates, names[first:first + AT_ONCE])
    if not keep:
        world.kubectl("delete", "deploy", "--wait=false", *templates)
    return "; ".join(served)


def under_load(world, agent, templates, names):
    """Checks these kinds, all under load, and returns how many requests each has served."""
    loads = {name: Load(world, f"http://{name}:8080/", CLIENTS[number % 2]) for number, name in enumerate(names)}
    with contextlib.ExitStack() as stack:
        for load in loads.values():
            stack.enter_context(load)
        for name in names:
            for client, server in ((CLIENTS[0], name), (name, CLIENTS[0])):
                seen = world.call(client, f"http://{server}:8080/")
                if identity(world) not in seen["caller"]:
                    raise Failed(f"{server} saw no certificate of {client}: {seen}")
            if name == "tproxy":
                address = world.get("pods", "-l", f"app={CLIENTS[0]}")["items"][0]["status"]["podIP"]
                expect("client's address behind TPROXY", address, world.call(CLIENTS[0], f"http://{name}:8080/")["from"])
            expect_healthy(world, f"deploy/{name}", templates[name].get("agent", agent))
    return [f"{name}: {load.expect_none_failed()}" for name, load in loads.items()]


@case(3, gate=True)
def a_job_calls_the_mesh_from_its_init_container_and_completes(world, agent=OURS):
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
        expect_healthy(world, "pod/probed", agent)
        expect("restarts", [0, 0], [one["restartCount"] for one in world.get("pod/probed")["status"]["containerStatuses"]
                                    if one["name"] != "istio-proxy"])
    finally:
        world.kubectl("delete", "pod/probed", "--wait=false")


@case(4, gate=True)
def a_held_application_reaches_the_mesh_at_its_first_try(world, agent=OURS):
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
    """Tests a native sidecar, which drains by its preStop hook, and a usual one that exits with its last connection."""
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
        return any(one["name"] == "istio-proxy" and one["ready"] for pod in world.get("pods", "-l", "app=never")["items"]
                   for part in ("initContainerStatuses", "containerStatuses") for one in pod["status"].get(part, []))
    world.until("the sidecar is ready", proxy_ready)
    begun = time.monotonic()
    world.kubectl("delete", "deploy/never", "--wait=false")
    world.until("the pod is gone", lambda: not world.get("pods", "-l", "app=never")["items"], 19)
    return f"gone after {time.monotonic() - begun:.0f} s"


OUTSIDE = {"sidecar.istio.io/inject": "false"}


def injected_gateway(world, name, agent, host, **annotations):
    """Creates a gateway with a plain-text port that leads to a service."""
    world.deploy(name, agent, annotations={"inject.istio.io/templates": "gateway"} | annotations,
                 spec={"containers": [{"name": "istio-proxy", "image": "auto", "imagePullPolicy": "IfNotPresent"}]})
    world.apply(
        resource("networking.istio.io/v1", "Gateway", name, selector={"app": name}, servers=[
            {"hosts": ["*"], "port": {"name": "http", "number": 8080, "protocol": "HTTP"}}]),
        resource("networking.istio.io/v1", "VirtualService", name, hosts=["*"], gateways=[name], http=[
            {"route": [{"destination": {"host": host, "port": {"number": 8080}}}]}]))


@case(5)
def both_kinds_of_gateways_are_replaced_without_a_failed_request(world, agent=OURS):
    if not world.kubectl("get", "gatewayclass/istio", fails=True):
        raise Skipped("needs the Gateway API")
    shop(world, "shop", GO)
    world.deploy("outside", GO, labels=OUTSIDE)
    injected_gateway(world, "gateway", agent, "shop")
    # istiod creates the Deployment and Service of this Gateway, with the Gateway's labels and annotations.
    api = resource("gateway.networking.k8s.io/v1", "Gateway", "api", gatewayClassName="istio",
                   listeners=[{"name": "http", "port": 8080, "protocol": "HTTP"}])
    api["metadata"] |= {"labels": {"app": "api-istio"}, "annotations": {
        "sidecar.istio.io/proxyImage": world.images[agent] or world.mesh_image()}}
    world.apply(
        api,
        resource("gateway.networking.k8s.io/v1", "HTTPRoute", "api", parentRefs=[{"name": "api"}],
                 rules=[{"backendRefs": [{"name": "shop", "port": 8080}]}]))
    world.kubectl("wait", "--for=create", "deploy/api-istio", "--timeout=30s")
    accounts = {"gateway": "default", "api-istio": "api-istio"}
    world.rolled_out("outside", *accounts)
    told = []
    for gateway, account in accounts.items():
        url = f"http://{gateway}:8080/"
        with Load(world, url, "outside") as load:
            world.until("its agent is this one", lambda: world.agent_of(f"deploy/{gateway}") == agent)
            expect_healthy(world, f"deploy/{gateway}", agent)
            expect("account that calls", identity(world, account), world.call("outside", url)["caller"].rpartition(";")[2])
            world.restart(gateway)
        told.append(f"{gateway}: {load.expect_none_failed()}")
    # This also waits for the end of the Gateway's Deployment, because another run creates it again.
    world.kubectl("delete", "--cascade=foreground", "gateways.gateway.networking.k8s.io/api", "httproutes/api",
                  "gateways.networking.istio.io/gateway", "virtualservices/gateway", "deploy/gateway", "deploy/outside")
    return "; ".join(told)


@case(6, gate=True)
def a_machine_registers_itself_tells_its_health_and_has_traffic_both_ways(world, agent=OURS):
    group = {"apiVersion": "networking.istio.io/v1", "kind": "WorkloadGroup",
             "metadata": {"name": "machine", "namespace": world.namespace}, "spec": {
                 "metadata": {"labels": {"app": "machine"}}, "template": {"serviceAccount": "default"},
                 "probe": {"periodSeconds": 1, "failureThreshold": 1, "httpGet": {"path": "/health", "port": 8080}}}}
    url = shop(world, "shop", GO)
    world.apply(group, service("machine", 8080, selector={"app": "machine"}))
    with tempfile.TemporaryDirectory() as folder:
        # istioctl writes the files that a machine needs.
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
        # The first requests to a new machine sometimes show no certificate, whichever agent runs at either end.
        begun = time.monotonic()
        world.until("the machine sees a certificate", lambda: identity(world) in world.call(CLIENTS[0], "http://machine:8080/")["caller"], 20)
        took = time.monotonic() - begun
        seen = json.loads(world.exec("pod/machine", "/application", "get", url))
        if identity(world) not in seen["caller"]:
            raise Failed(f"shop saw no certificate: {seen}")
    expect_healthy(world, "pod/machine", agent)
    told = load.expect_none_failed()
    for state, wanted in (("no", "False"), ("yes", "True")):
        world.exec("pod/machine", "/application", "get", f"http://127.0.0.1:8080/health/{state}")
        world.until(f"its health is {wanted}", lambda: healthy() == wanted, 30)
    world.until("it serves again", lambda: world.call(CLIENTS[0], "http://machine:8080/"), 20)
    world.kubectl("delete", "pod/machine", "--wait=false")
    world.until("it is registered no longer", lambda: healthy() is None, 60)
    return f"{told}; a certificate after {took:.1f} s"


def machine(world, agent, variables):
    """Returns a pod in place of a machine: nothing is injected, and the agent has a machine's files and variables."""
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


@case(7)
def wasm_modules_run_and_a_wrong_digest_fails_open_or_closed(world, agent=OURS):
    url = shop(world, "filtered", agent)
    digests = serve_modules(world)
    run = lambda: sorted(world.call(CLIENTS[0], url)["wasm"].split())
    with Load(world, url, *CLIENTS) as load:
        for mark, digest in digests.items():
            plugin(world, mark, digest)
        world.until("both modules run", lambda: run() == ["http", "oci"])
        expect_healthy(world, "deploy/filtered", agent)
        plugin(world, "http", "0" * 64, "FAIL_OPEN")
        world.until("requests pass by the module that is wrong", lambda: run() == ["oci"])
    plugin(world, "oci", "0" * 64)
    world.until("requests are refused for want of a module", lambda: refused(world, url))
    plugin(world, "oci", digests["oci"])
    world.until("the right digest ends it", lambda: run() == ["oci"])
    world.kubectl("delete", "wasmplugins/http", "wasmplugins/oci", "deploy/modules", "deploy/filtered", "--wait=false")
    return load.expect_none_failed()


def plugin(world, mark, digest, strategy="FAIL_CLOSE"):
    host = f"modules.{world.namespace}:8080"
    url = {"http": f"http://{host}/v2/http.wasm", "oci": f"oci://{host}/oci:1"}[mark]
    world.apply(resource("extensions.istio.io/v1alpha1", "WasmPlugin", mark, url=url, sha256=digest,
                         failStrategy=strategy, selector={"matchLabels": {"app": "filtered"}}))


def refused(world, url):
    try:
        world.call(CLIENTS[0], url)
    except Failed as why:
        return "status 403" in str(why)


def serve_modules(world):
    """Serves two modules, one by its URL and one in a registry, and returns their digests."""
    digest = lambda data: hashlib.sha256(data).hexdigest()
    oci, nothing = module("oci"), b"{}"
    layers = [{"mediaType": f"application/vnd.module.wasm.{kind}", "digest": f"sha256:{digest(data)}", "size": len(data)}
              for kind, data in (("content.layer.v1+wasm", oci), ("config.v1+json", nothing))]
    manifest = json.dumps({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
                           "config": layers[1], "layers": layers}).encode()
    files = {"http.wasm": module("http"), "oci/manifests/1": manifest,
             **{f"oci/blobs/{layer['digest']}": data for layer, data in zip(layers, (oci, nothing))}}
    world.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "modules"}, "binaryData": {
        f"file-{number}": base64.b64encode(data).decode() for number, data in enumerate(files.values())}})
    shop(world, "modules", GO, labels=OUTSIDE, app={"volumeMounts": [{"name": "files", "mountPath": "/v2"}]},
         spec={"volumes": [{"name": "files", "configMap": {"name": "modules", "items": [
             {"key": f"file-{number}", "path": path} for number, path in enumerate(files)]}}]})
    return {"http": digest(files["http.wasm"]), "oci": digest(manifest)}


def module(mark):
    """Returns a Wasm module for Proxy-Wasm that adds the header `x-wasm` with this value to requests."""
    name = lambda text: bytes([len(text)]) + text.encode()
    constant = lambda number: bytes([0x41, number])
    call_and_drop = b"\x10\x00\x1a"
    add = b"".join(map(constant, (0, 0, 6, 6, len(mark)))) + call_and_drop
    # Exported functions by name: the number of parameters, the number of results, and the code.
    functions = {
        "proxy_abi_version_0_2_1": (0, 0, b""), "_initialize": (0, 0, b""), "malloc": (1, 1, constant(0)),
        "proxy_on_context_create": (2, 0, b""), "proxy_on_vm_start": (2, 1, constant(1)),
        "proxy_on_configure": (2, 1, constant(1)), "proxy_on_request_headers": (3, 1, add + constant(0))}

    def section(number, *items):
        data = bytes([len(items)]) + b"".join(items)
        return bytes([number, len(data) & 127 | 128, len(data) >> 7]) + data
    shape = lambda takes, returns, _: b"\x60" + bytes([takes]) + b"\x7f" * takes + bytes([returns]) + b"\x7f" * returns
    return b"\0asm\1\0\0\0" + b"".join((
        section(1, shape(5, 1, None), *(shape(*one) for one in functions.values())),
        section(2, name("env") + name("proxy_add_header_map_value") + b"\0\0"),
        section(3, *(bytes([number]) for number in range(1, len(functions) + 1))),
        section(5, b"\0\1"),
        section(7, name("memory") + b"\2\0", *(name(one) + bytes([0, number]) for number, one in enumerate(functions, 1))),
        section(10, *(bytes([len(code) + 2, 0]) + code + b"\x0b" for _, _, code in functions.values())),
        section(11, b"\0" + constant(0) + b"\x0b" + name("x-wasm" + mark))))


@case(8, gate=True, own=True)
def last_known_good_configuration_serves_while_istiod_is_unreachable(world, agent=OURS):
    """Tests a usual sidecar, a native one and a gateway, which need no setting for this except the agent's image."""
    sidecars = {"kept-usual": USUAL, "kept-native": NATIVE}
    for name, annotations in sidecars.items():
        world.deploy(name, agent, annotations=annotations)
    shop(world, "shop", GO)
    world.deploy("outside", GO, labels=OUTSIDE)
    injected_gateway(world, "kept-gateway", agent, "shop")
    callers = {"kept-usual": CLIENTS[0], "kept-native": CLIENTS[1], "kept-gateway": "outside"}
    world.rolled_out("outside", *callers)

    def loads(stack):
        return [stack.enter_context(Load(world, f"http://{name}:8080/", client)) for name, client in callers.items()]
    with contextlib.ExitStack() as stack:
        before = loads(stack)
        for name in callers:
            expect_healthy(world, f"deploy/{name}", agent)
        # The configuration that Envoy has accepted is stored after 5 s at most.
        time.sleep(6)
        world.scale_istiod(0)
    took = {}
    try:
        for name, client in callers.items():
            world.kill(world.pods(name)[0], "istio-proxy")
            begun = time.monotonic()
            world.until(f"{name} serves again", lambda: world.call(client, f"http://{name}:8080/"), 60)
            took[name] = time.monotonic() - begun
        with contextlib.ExitStack() as stack:
            after = loads(stack)
            world.scale_istiod(1)
            # The streams of the Envoys reach istiod again, and so they get new configuration.
            world.deploy("later", GO)
            world.rolled_out("later")
            # A request to a service that Envoy does not know passes, too, but without mutual TLS, so the caller's
            # certificate shows that Envoy knows it. pilot-agent may connect seconds later than this agent, and its
            # client loses requests if that happens in the next case.
            for name in (*sidecars, *CLIENTS):
                world.until(f"{name} knows a new service", lambda: identity(world) in world.call(name, "http://later:8080/")["caller"])
    finally:
        world.scale_istiod(1)
        world.kubectl("delete", "deploy", "--wait=false", "later", "outside", *callers, fails=True)
        world.kubectl("delete", "gateways.networking.istio.io/kept-gateway", "virtualservices/kept-gateway", fails=True)
    served = ", ".join(f"{name} served {seconds:.1f} s after the kill" for name, seconds in took.items())
    return "; ".join([load.expect_none_failed() for load in before] + [served] + [load.expect_none_failed() for load in after])


REFUSED = "virtualInbound"


@case(8, gate=True, own=True)
def a_restarted_container_serves_while_istiod_sends_a_listener_that_envoy_refuses(world, agent=OURS):
    """Compares with pilot-agent, whose restarted container does not serve. The doctor of a new pod, which has no stored
    configuration, names the listener."""
    names = {one: f"refused-{one}" for one in (agent, GO)}
    for one, name in names.items():
        world.deploy(name, one, annotations=USUAL, labels={"team": "refused"})
    world.rolled_out(*names.values())
    pods = {one: world.pods(name)[0] for one, name in names.items()}
    urls = {one: f"http://{name}:8080/" for one, name in names.items()}
    pod, url = pods[agent], urls[agent]
    world.until("the listeners are stored", lambda: agent == GO or any("Listener" in kind for kind in stored(world, pod)))
    try:
        with contextlib.ExitStack() as stack:
            before = [stack.enter_context(Load(world, one, *CLIENTS)) for one in urls.values()]
            world.apply(broken_filter())
            seen = {one: world.until(f"Envoy of {one} refuses the listener", lambda: refusals(world, one)) for one in pods.values()}
            # The listener in use has no such rule, and Envoy refuses the listener that has it.
            world.apply(resource(
                "security.istio.io/v1", "AuthorizationPolicy", "refused", selector={"matchLabels": {"team": "refused"}},
                action="DENY", rules=[{"to": [{"operation": {"paths": ["/denied"], "ports": ["8080"]}}]}]))
            for one, earlier in seen.items():
                world.until(f"Envoy of {one} refuses it again", lambda: refusals(world, one) > earlier)
        heard = nacks_in_istiods_log(world, pod)
        for one in pods.values():
            world.kill(one, "istio-proxy")
        begun = time.monotonic()
        world.until(f"{names[agent]} serves again", lambda: world.call(CLIENTS[0], url), 60)
        took = time.monotonic() - begun
        with Load(world, url, *CLIENTS) as after:
            world.until("istiod gets the NACK of the new Envoy", lambda: nacks_in_istiods_log(world, pod) > heard)
            world.until("the doctor says that the stored listener serves", lambda: "RESOURCE_REFUSED_STORED_SERVED" in findings(world, pod))
            expect("resources after a NACK, by the metric", 1, served_after_nack(world, pod))
            expect("the old policy is in force", True, serves(world, f"{url}denied"))
            world.kubectl("scale", f"deploy/{names[agent]}", "--replicas=2")
            new = world.until("there is a new pod", lambda: [one for one in world.pods(names[agent]) if one != pod])[0]
            world.until("the doctor of the new pod names the listener", lambda: "RESOURCE_REFUSED" in findings(world, new))
            world.until("pilot-agent's new Envoy refuses the listener", lambda: (
                world.container(pods[GO], "istio-proxy")["restartCount"] and refusals(world, pods[GO])))
            for one in (new, pods[GO]):
                expect(f"readiness of {one}", False, world.container(one, "istio-proxy")["ready"])
            expect("pilot-agent's pod serves", False, serves(world, urls[GO]))
            world.kubectl("delete", "envoyfilters/refused")
            world.rolled_out(*names.values())
            for one in (pod, new, pods[GO]):
                address = world.get(f"pod/{one}")["status"]["podIP"]
                world.until(f"the new policy is in force in {one}", lambda: refused(world, f"http://{address}:8080/denied"))
            for one in (pod, new):
                world.until(f"the doctor of {one} finds no refusal", lambda: not findings(world, one))
                expect("resources after a NACK, by the metric", 0, served_after_nack(world, one))
    finally:
        world.kubectl("delete", "--ignore-not-found", "envoyfilters/refused", "authorizationpolicies/refused", fails=True)
        world.kubectl("delete", "deploy", "--wait=false", *names.values(), fails=True)
    return "; ".join([load.expect_none_failed() for load in before] + [
        f"served {took:.1f} s after the kill", after.expect_none_failed()])


def broken_filter():
    """Returns an EnvoyFilter that istiod accepts. Envoy cannot compile its script, and refuses the inbound listener."""
    types = "type.googleapis.com/envoy.extensions.filters.http"
    manager = {"name": "envoy.filters.network.http_connection_manager", "subFilter": {"name": "envoy.filters.http.router"}}
    return resource(
        "networking.istio.io/v1alpha3", "EnvoyFilter", "refused", workloadSelector={"labels": {"team": "refused"}}, configPatches=[{
            "applyTo": "HTTP_FILTER", "match": {"context": "SIDECAR_INBOUND", "listener": {"filterChain": {"filter": manager}}},
            "patch": {"operation": "INSERT_BEFORE", "value": {"name": "broken", "typed_config": {
                "@type": f"{types}.lua.v3.Lua", "default_source_code": {"inline_string": "function envoy_on_request("}}}}}])


def agents_page(world, target, path):
    return world.exec(target, "pilot-agent", "request", "--debug-port=15020", "GET", path, container="istio-proxy")


def stored(world, pod):
    """Returns the types of resources that the agent has stored."""
    return json.loads(agents_page(world, f"pod/{pod}", "debug/xdsz")).get("kept", {})


def served_after_nack(world, pod):
    page = agents_page(world, f"pod/{pod}", "metrics/agent")
    return sum(float(value) for value in re.findall(r"^istio_agent_xds_kept_after_nack\{.*\} (\S+)$", page, re.MULTILINE))


def refusals(world, pod):
    """Returns the number of responses with listeners that this Envoy has refused."""
    page = world.admin(f"pod/{pod}", "stats?filter=listener_manager.lds.update_rejected")
    return sum(int(count) for count in re.findall(r"update_rejected: (\d+)", page))


def nacks_in_istiods_log(world, pod):
    log = world.kubectl("logs", "-n", "istio-system", "deploy/istiod", "--since=15m")
    return sum("ACK ERROR" in line and pod in line and REFUSED in line for line in log.splitlines())


def findings(world, pod):
    """Returns the codes of the doctor's findings about the listener that Envoy refuses."""
    report = json.loads(world.exec(f"pod/{pod}", "pilot-agent", "doctor", "--json", container="istio-proxy", fails=True))
    checks = [check for group in report["groups"] for check in group["checks"]]
    return {check["code"] for check in checks if check.get("code") and REFUSED in json.dumps(check)}


def serves(world, url):
    try:
        return bool(world.call(CLIENTS[0], url))
    except Failed:
        return False


@case(8, gate=True, own=True)
def a_crashed_envoy_restarts_until_its_budget_is_used_up(world, agent=OURS):
    told = []
    for kind, annotations in {"usual": USUAL, "native": NATIVE}.items():
        name = f"crashed-{kind}"
        url = shop(world, name, agent, annotations=annotations)
        pod = world.pods(name)[0]
        for number in range(4):
            with Load(world, url, CLIENTS[0]) as load:
                os.kill(world.process(pod, "envoy"), signal.SIGSEGV)
                time.sleep(5)
            seen = load.told[CLIENTS[0]]
            if number == 0:
                told.append(f"{kind}: cut for {seen['seconds']:.2f} s, {len(seen['failed'])} of {seen['sent']} requests failed")
            restarts = lambda: world.container(pod, "istio-proxy")["restartCount"]
            if number < 3:
                expect(f"restarts of the {kind} container after crash {number + 1}", 0, restarts())
        world.until(f"the {kind} container restarts once", lambda: restarts() == 1, 20)
        world.kubectl("delete", f"deploy/{name}", "--wait=false")
    return "; ".join(told)


@case(8, gate=True, own=True)
def a_job_that_ends_its_sidecar_by_signal_or_quitquitquit_completes(world, agent=OURS):
    """Tests two ways of jobs: `pkill envoy` in a shared process namespace, and a request to the status port."""
    url = shop(world, "shop", GO)
    hold = {"proxy.istio.io/config": json.dumps({"holdApplicationUntilProxyStarts": True})}
    for way in ("pkill", "quitquitquit"):
        run_job(world, f"job-{way}", agent, USUAL | hold, url, way)
    return "both"


def run_job(world, name, agent, annotations, url, way):
    """Runs a job that calls a service, and ends its sidecar in this way; a native sidecar needs none."""
    template = world.template(name, agent, annotations=annotations, spec={
        "restartPolicy": "Never", "containers": [{"name": "app", "image": world.application, "args": ["get", url]}]})
    world.apply({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name},
                 "spec": {"backoffLimit": 0, "template": template}})
    try:
        pod = world.until("there is a pod", lambda: world.pods(name))[0]
        world.until("the application has ended", lambda: any(
            one["name"] == "app" and "terminated" in one["state"]
            for one in world.get(f"pod/{pod}")["status"].get("containerStatuses", [])))
        if way == "pkill":
            os.kill(world.process(pod, "envoy"), signal.SIGTERM)
        elif way == "quitquitquit":
            envoy = world.process(pod, "envoy")
            subprocess.run(["nsenter", f"--net=/proc/{envoy}/ns/net", "curl", "--silent", "--fail", "-X", "POST",
                            "http://127.0.0.1:15020/quitquitquit"], check=True, timeout=10, capture_output=True)
        world.kubectl("wait", "--for=condition=complete", f"job/{name}", "--timeout=60s")
    finally:
        world.kubectl("delete", f"job/{name}", "--wait=false")


@case(1, gate=True)
def the_sidecar_with_this_agent_takes_less_memory(world):
    """Compares the memory that the kubelet charges to the two clients' sidecars, which have sent the same requests."""
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


@case(10)
def the_agents_own_commands_and_pages_answer_in_a_pod(world):
    pod = world.pods(CLIENTS[0])[0]
    expect_healthy(world, f"pod/{pod}", OURS)
    command = [*world.command, "-n", world.namespace]
    bundle = subprocess.run([*command, "exec", pod, "-c", "istio-proxy", "--", "pilot-agent", "support-bundle"],
                            capture_output=True, check=True, timeout=60).stdout
    with tarfile.open(fileobj=io.BytesIO(bundle)) as tar:
        files = {pathlib.PurePath(name).name for name in tar.getnames()}
    if missing := {"doctor.txt", "overview.json", "config_dump.json", "log.txt"} - files:
        raise Failed(f"the support bundle lacks {missing}")
    with subprocess.Popen([*command, "port-forward", pod, "18020:15020"], stdout=subprocess.PIPE) as forward:
        forward.stdout.readline()
        try:
            page, overview = (world.kubectl("--server", "http://127.0.0.1:18020", "get", "--raw", f"/debug/{path}")
                              for path in ("", "overview"))
        finally:
            forward.terminate()
    expect("page", True, page.startswith("<!DOCTYPE html>") and f"{pod}.{world.namespace}" in page)
    expect("readiness", True, json.loads(overview)["ready"])
    script = pathlib.Path(__file__).parents[2] / "deploy/kubernetes/doctor"
    done = subprocess.run([script, "--kubectl", *world.command, "-n", world.namespace, "-l", f"app={CLIENTS[0]}",
                           "--level", "error", "--json"], capture_output=True, check=False, timeout=120)
    report = json.loads(done.stdout)
    expect("errors of all sidecars, and pods without a report", ([], {}), (report["findings"], report["not_asked"]))
    return f"{len(files)} files in the support bundle, {report['pods']} pods asked by the script"


@contextlib.contextmanager
def late_world():
    """Stops the processes by which clients learn of the end of a pod, for longer than a drain."""
    pids = [int(folder.name) for folder in pathlib.Path("/proc").glob("[0-9]*")
            if read_comm(folder) in ("kube-proxy", "pilot-discovery")]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
        time.sleep(8)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def read_comm(folder):
    try:
        return (folder / "comm").read_text().strip()
    except OSError:
        return ""


@case(4, own=True)
def a_drain_delay_saves_requests_to_twenty_pods_that_end(world):
    serves = {"lifecycle": {"preStop": {"sleep": {"seconds": 10}}}}
    told = []
    for name, agent, kind, metadata in (
            ("native-delay", OURS, NATIVE, {"ISTIO_AGENT_DRAIN_DELAY": "5s"}),
            ("usual-delay", OURS, USUAL, {"ISTIO_AGENT_DRAIN_DELAY": "5s"}),
            ("native", OURS, NATIVE, {}), ("usual", OURS, USUAL, {}),
            ("native-pilot-agent", GO, NATIVE, {}), ("usual-pilot-agent", GO, USUAL, {})):
        for part, replicas in (("ends", 20), ("stays", 2)):
            world.deploy(f"{name}-{part}", agent, replicas=replicas, annotations=kind | config(**metadata), app=serves,
                         labels={"group": name}, spec={"terminationGracePeriodSeconds": 30})
        # The second service is called without Istio's default retries.
        once = resource("networking.istio.io/v1", "VirtualService", f"{name}-once", hosts=[f"{name}-once"], http=[
            {"route": [{"destination": {"host": f"{name}-once"}}], "retries": {"attempts": 0}}])
        world.apply(once, *(service(one, 8080, selector={"group": name}) for one in (name, f"{name}-once")))
        world.rolled_out(f"{name}-ends", f"{name}-stays")
        with Load(world, [f"http://{name}:8080/", f"http://{name}-once:8080/"], *CLIENTS) as load:
            with late_world():
                world.kubectl("delete", f"deploy/{name}-ends", "--wait=false")
            world.until("the pods are gone", lambda: not world.get("pods", "-l", f"app={name}-ends")["items"], 60)
        told.append(f"{name}: {failures(load)}")
        if "delay" in name:
            load.expect_none_failed()
        world.kubectl("delete", "--wait=false", f"deploy/{name}-stays", f"virtualservice/{name}-once")
    return "; ".join(told)


def failures(load):
    return f"{sum(len(one['failed']) for one in load.told.values())} of {sum(one['sent'] for one in load.told.values())} failed"


@case(10)
def envoys_admin_interface_is_on_a_socket_and_its_port_is_closed(world):
    own = config(ISTIO_AGENT_ADMIN_SOCKET="true")
    kinds = {"usual": USUAL | own, "native": NATIVE | own, "tproxy": {"sidecar.istio.io/interceptionMode": "TPROXY"} | own,
             "istios": NATIVE | config(ISTIO_ENVOY_ADMIN_TRANSPORT="UDS", ISTIO_NATIVE_SIDECAR="true")}
    names = [f"socket-{kind}" for kind in kinds]
    for name, annotations in zip(names, kinds.values()):
        world.deploy(name, OURS, annotations=annotations)
    world.rolled_out(*names)
    for name in names:
        with Load(world, f"http://{name}:8080/", *CLIENTS) as load:
            expect_healthy(world, f"deploy/{name}", OURS)
            configuration_flows(world, name)
            expect("an answer at port 15000", "", world.exec(
                f"deploy/{name}", "/application", "get", "http://127.0.0.1:15000/ready", fails=True))
        load.expect_none_failed()
    with tempfile.NamedTemporaryFile("w") as dump:
        dump.write(world.admin(f"deploy/{names[0]}", "config_dump"))
        dump.flush()
        expect("istioctl reads the saved configuration", True, "BlackHoleCluster" in world.istioctl(
            "proxy-config", "clusters", "--file", dump.name))
    injected_gateway(world, "socket-gateway", OURS, names[0], **own)
    world.rolled_out("socket-gateway")
    expect("state of the gateway's Envoy", True, '"LIVE"' in world.admin("deploy/socket-gateway", "server_info"))
    world.kubectl("delete", "--wait=false", "deploy", *names, "socket-gateway")
    world.kubectl("delete", "gateways.networking.istio.io/socket-gateway", "virtualservices/socket-gateway")
    return f"{', '.join(kinds)} and a gateway"


# Texts that differ between pods or builds: serial numbers, times and Istio's version.
OWN = re.compile(r"\b[0-9a-f]{32}\b|\d{4}-\d\d-\d\dT\S+|\(RDS .*\)|unknown|\b1\.\d+\.\d+")


@case(10)
def istioctl_works_and_says_the_same_of_both_agents(world):
    if any(one.startswith("ISTIO_AGENT_ON_DEMAND_CLUSTERS") for one in getattr(world.cluster, "variables", ())):
        raise Skipped("with clusters on demand, Envoy has fewer clusters than istiod")
    pods = [world.pods(client)[0] for client in CLIENTS]
    # With this plugin Envoy has an extension configuration. The plugin has no module, so requests pass without it.
    world.apply(resource("extensions.istio.io/v1alpha1", "WasmPlugin", "none", url="http://127.0.0.1:1/none",
                         failStrategy="FAIL_OPEN"))
    kinds = ("cluster", "listener", "route", "endpoint", "secret", "bootstrap", "ecds", "all", "log")
    try:
        for words in (("proxy-status",), ("x", "describe", "pod"), *(("proxy-config", kind) for kind in kinds)):
            same_of_both(world, pods, *words)
    finally:
        world.kubectl("delete", "wasmplugins/none")
    for pod in pods:
        for level in ("debug", "warning"):
            levels = world.istioctl("proxy-config", "log", pod, "--level", f"http:{level}")
            expect("level", True, f" http: {level}" in levels)
        expect("pod in the list", True, pod in world.istioctl("proxy-status"))
    world.istioctl("analyze")
    with tempfile.TemporaryDirectory() as folder:
        world.istioctl("bug-report", "--include", world.namespace, "--dir", f"{folder}/work", "--output-dir", folder)
        with tarfile.open(f"{folder}/bug-report.tar.gz") as tar:
            files = [{name.partition(pod)[2] for name in tar.getnames() if f"/{pod}/" in name} for pod in pods]
    expect("files of a bug report", files[1] or "some", files[0])
    return f"{len(files[0])} files of each pod in the bug report"


def same_of_both(world, pods, *words):
    def said(pod):
        text = world.istioctl(*words, pod)
        if "bootstrap" in words:
            whole = json.loads(text)["bootstrap"]
            return {part: value for part, value in whole.items() if part not in ("node", "statsConfig")}
        for name in (pod, *CLIENTS):
            text = text.replace(name, "NAME")
        # The original destination of a connection is an endpoint for some seconds.
        return sorted(OWN.sub("", line).split() for line in text.splitlines() if not re.search(r"HEALTHY.* inbound\|", line))
    world.until(f"istioctl {' '.join(words)} says the same of both", lambda: (one := said(pods[0])) and one == said(pods[1]))


@case(11)
def a_grpc_client_without_envoy_calls_with_mutual_tls(world, agent=OURS):
    host = f"strict.{world.namespace}.svc.cluster.local"
    world.deploy("proxyless", agent, annotations={"inject.istio.io/templates": "grpc-agent"})
    shop(world, "strict", GO)
    world.apply(
        resource("security.istio.io/v1", "PeerAuthentication", "strict", selector={"matchLabels": {"app": "strict"}},
                 mtls={"mode": "STRICT"}),
        resource("networking.istio.io/v1", "DestinationRule", "strict", host=host,
                 trafficPolicy={"tls": {"mode": "ISTIO_MUTUAL"}}))
    world.rolled_out("proxyless")
    url = f"xds:///{host}:8081"
    with Load(world, url, "proxyless") as load:
        world.restart("strict")
    expect("agent", agent, world.agent_of("deploy/proxyless"))
    expect_healthy(world, "deploy/proxyless", agent)
    expect("security", "tls", world.call("proxyless", url)["security"])
    world.kubectl("delete", "deploy/proxyless", "deploy/strict", "--wait=false")
    return load.expect_none_failed()


@case(12, own=True)
def the_root_is_rotated_by_cacerts_and_no_request_fails(world, agent=OURS):
    """Tests the three steps of Istio: both roots are trusted, the new one signs, the old one is no longer trusted."""
    short = {"annotations": config(SECRET_TTL="60s")}
    clients = [world.deploy(f"rotating-{name}", name, **short) for name in (OURS, GO)]
    url = shop(world, "rotated", agent, **short)
    world.rolled_out(*clients)
    secret = world.get("-n", "istio-system", "secret/istio-ca-secret")["data"]
    old = [base64.b64decode(secret[f"ca-{part}.pem"]).decode() for part in ("cert", "key")]
    new = world.cluster.authority("rotated")
    with Load(world, url, *clients) as load:
        try:
            for (certificate, key), roots in ((old, [old, new]), (new, [old, new]), (new, [new])):
                cacerts(world, certificate, key, [root for root, _ in roots])
                for target in ("rotated", *clients):
                    world.until(f"{target} has the roots and a certificate of the one that signs",
                                lambda: has_roots(world, target, len(roots), certificate), 120)
        finally:
            world.kubectl("delete", "-n", "istio-system", "secret/cacerts", fails=True)
            world.kubectl("rollout", "restart", *ISTIOD)
            world.rolled_out_istiod()
            # The new istiod writes the ConfigMap only after its election. Until then new pods trust the wrong root.
            world.until("the ConfigMap has the old root again", lambda: mesh_roots(world).strip() == old[0].strip(), 120)
    world.kubectl("delete", "deploy", "--wait=false", "rotated", *clients)
    return load.expect_none_failed()


def cacerts(world, certificate, key, roots):
    files = {"ca-cert.pem": certificate, "ca-key.pem": key, "cert-chain.pem": certificate, "root-cert.pem": "".join(roots)}
    world.kubectl("-n", "istio-system", "apply", "-f", "-", input=json.dumps(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "cacerts"}, "stringData": files}))
    world.kubectl("rollout", "restart", *ISTIOD)
    world.rolled_out_istiod()


def mesh_roots(world):
    """Returns the root certificates that istiod has written for the pods of the namespace, as PEM."""
    return world.get("configmap/istio-ca-root-cert")["data"]["root-cert.pem"]


def has_roots(world, target, number, signing):
    """Checks that Envoy trusts this number of roots, and that the issuer of its certificate is `signing`."""
    dump = json.loads(world.admin(f"deploy/{target}", "config_dump?resource=dynamic_active_secrets"))
    secrets = {one["name"]: one["secret"] for one in dump["configs"]}
    pem = lambda name, *members: base64.b64decode(secrets[name][members[0]][members[1]]["inline_bytes"]).decode()
    expect("roots", number, pem("ROOTCA", "validation_context", "trusted_ca").count("BEGIN"))
    expect("issuer", named(signing, "subject"), named(pem("default", "tls_certificate", "certificate_chain"), "issuer"))
    return True


def named(pem, part):
    done = subprocess.run(["openssl", "x509", "-noout", f"-{part}"], input=pem, capture_output=True, text=True, check=True)
    return done.stdout.partition("=")[2]


HOSTS = 1000
USED = [f"host-{number}.test" for number in (0, 250, 500, 750, 999)]


@case(13, own=True)
def the_sidecar_that_scope_prints_is_applied_without_a_failed_request(world):
    """Tests two pods: one uses five of 1,000 hosts, the other one two. The merged Sidecar selects both pods."""
    shop(world, "left", OURS)
    address = world.get("pod", "-l", "app=left")["items"][0]["status"]["podIP"]
    hosts(world, address)
    # The number of clusters says what has been sent.
    variables = {"ISTIO_META_DNS_CAPTURE": "true", "ISTIO_AGENT_ON_DEMAND_CLUSTERS": "false"}
    pods = [world.deploy(f"scoped-{one}", OURS, annotations=config(**variables), labels={"team": "scoped"}) for one in "ab"]
    world.rolled_out(*pods)
    for pod in pods:
        world.until("all hosts are known", lambda: clusters(world, pod) > HOSTS)
    used_by_b = [USED[0], "host-7.test"]
    for host in used_by_b:
        world.call(pods[1], f"http://{host}/")
    with contextlib.ExitStack() as all_loads:
        loads = [all_loads.enter_context(Load(world, f"http://{host}/", pods[0])) for host in USED]
        before = sent_to(world, pods[0])
        usages = [world.exec(f"deploy/{pod}", "pilot-agent", "scope", "--json", container="istio-proxy") for pod in pods]
        advice = world.kubectl("exec", "-i", f"deploy/{pods[0]}", "-c", "istio-proxy", "--", "pilot-agent", "scope",
                               "--merge", "/dev/stdin", input="".join(usages))
        found = sorted(re.findall(r'^ +- "(.*)"$', advice, re.MULTILINE))
        expect("hosts", sorted(f"{world.namespace}/{host}" for host in {*USED, *used_by_b}), found)
        expect("mutual TLS with a service", True, bool(world.call(pods[1], "http://left:8080/")["caller"]))
        world.kubectl("apply", "-f", "-", input=advice)
        for pod in pods:
            world.until("the others are gone", lambda: clusters(world, pod) < 100)
        time.sleep(3)
        after = sent_to(world, pods[0])
    told = [load.expect_none_failed() for load in loads]
    # A service that is left out is reached like one outside the mesh. A host of a ServiceEntry has no address then.
    expect("caller of a service that is left out", "", world.call(pods[1], "http://left:8080/")["caller"])
    with contextlib.suppress(Failed):
        raise ValueError(f"host-8.test is left out and answers {world.call(pods[1], 'http://host-8.test/')}")
    world.kubectl("delete", "sidecar,serviceentry", "--all")
    world.kubectl("delete", "deploy", "--wait=false", "left", *pods)
    print(advice, flush=True)
    sums = "; ".join(f"{what} {one} -> {other}" for what, one, other in zip(("clusters", "Envoy MB", "bytes for a change"), before, after))
    return f"{sums}; {', '.join(told)}"


def hosts(world, address):
    world.apply(*(resource(
        "networking.istio.io/v1", "ServiceEntry", f"hosts-{first}", resolution="STATIC", addresses=[f"240.0.2.{1 + first // 250}"],
        hosts=[f"host-{one}.test" for one in range(first, first + 250)],
        ports=[{"name": "http", "number": 80, "protocol": "HTTP", "targetPort": 8080}], endpoints=[{"address": address}])
        for first in range(0, HOSTS, 250)))


def clusters(world, pod):
    dump = json.loads(world.admin(f"deploy/{pod}", "config_dump?resource=dynamic_active_clusters&mask=cluster.name"))
    return len(dump.get("configs", []))


def sent_to(world, pod):
    """Returns the number of clusters, the MB that Envoy has allocated, and the bytes of discovery for one change."""
    def pushed():
        page = agents_page(world, f"deploy/{pod}", "metrics/agent")
        return sum(int(float(value)) for value in re.findall(r"^istio_agent_xds_push_bytes_total\{.*\} (\S+)$", page, re.MULTILINE))
    allocated = int(json.loads(world.admin(f"deploy/{pod}", "memory"))["allocated"]) / 1e6
    before = pushed()
    world.apply(service(f"new-{time.time_ns()}", 80))
    time.sleep(5)
    return clusters(world, pod), f"{allocated:.1f}", pushed() - before
