"""Cases of what newer releases of Kubernetes do with pods: user namespaces, new sizes, rules for restarts, and kube-proxy's
nftables mode."""

import json
import pathlib

from cases import CLIENTS, KINDS, NATIVE, USUAL, by_cni, case, cni, containers, expect_healthy, identity, kinds
from standby import PAIR, STANDBY, page, settings, upgrade
from world import OURS, Failed, Load, Skipped, expect

OWN_USERS = {"hostUsers": False}


def need_user_namespaces(world):
    handlers = world.get("nodes")["items"][0]["status"].get("runtimeHandlers", [])
    if not any(one.get("features", {}).get("userNamespaces") for one in handlers):
        raise Skipped("the node's container runtime has no user namespaces")


def with_own_users(prefix, *names):
    return {name if name == "tproxy" else f"{prefix}-{name}": KINDS[name] | {"spec": KINDS[name].get("spec", {}) | OWN_USERS}
            for name in names}


@case(15, own=True)
def pods_with_a_user_namespace_capture_traffic_with_mutual_tls(world, agent=OURS):
    need_user_namespaces(world)
    templates = with_own_users("users", "usual", "native", "tproxy", "restricted", "dns")
    told = kinds(world, agent, templates, keep=True)
    for name in templates:
        envoy = world.process(world.pods(name)[0], "envoy")
        inside, outside, _ = pathlib.Path(f"/proc/{envoy}/uid_map").read_text().split()
        expect("root of the pod, and whether it is root of the node", ("0", False), (inside, outside == "0"))
    world.kubectl("delete", "deploy", "--wait=false", *templates)
    return told


@case(15, own=True)
def istios_cni_plugin_captures_traffic_of_pods_with_a_user_namespace(world, agent=OURS):
    need_user_namespaces(world)
    with cni(world):
        return by_cni(world, agent, with_own_users("cni-users", "usual", "native", "tproxy"))


@case(15, own=True)
def a_standby_in_a_user_namespace_is_upgraded_and_nothing_fails(world):
    """Tests `/dev/shm` and the sockets that both containers share."""
    need_user_namespaces(world)
    return upgrade(world, NATIVE, (world.other_image(OURS), world.images[OURS]), spec=OWN_USERS)


SIZE = {"sidecar.istio.io/proxyCPU": "50m", "sidecar.istio.io/proxyCPULimit": "1",
        "sidecar.istio.io/proxyMemory": "128Mi", "sidecar.istio.io/proxyMemoryLimit": "256Mi"}


@case(15)
def a_sidecar_is_resized_in_place_and_no_request_fails(world, agent=OURS):
    for name, kind in (("sized-usual", USUAL), ("sized-native", NATIVE)):
        world.deploy(name, agent, annotations=kind | SIZE)
    names = ("sized-usual", "sized-native")
    world.rolled_out(*names)
    pods = [world.pods(name)[0] for name in names]
    before = [world.container(pod, PAIR[0])["containerID"] for pod in pods]
    with Load(world, [f"http://{name}:8080/" for name in names], *CLIENTS) as load:
        for cpu, memory in (("2", "512Mi"), ("500m", "160Mi")):
            for pod in pods:
                resize(world, pod, cpu=cpu, memory=memory)
    for pod in pods:
        expect_healthy(world, pod, agent)
    expect("containers", before, [world.container(pod, PAIR[0])["containerID"] for pod in pods])
    world.kubectl("delete", "deploy", "--wait=false", *names)
    return load.expect_none_failed()


def resize(world, pod, **limits):
    """Gives the sidecar of a pod other limits, and returns when they are in force."""
    part = next(part for part in ("initContainers", "containers")
                if any(one["name"] == PAIR[0] for one in world.get(f"pod/{pod}")["spec"][part]))
    world.kubectl("patch", f"pod/{pod}", "--subresource=resize", "-p", json.dumps(
        {"spec": {part: [{"name": PAIR[0], "resources": {"limits": limits}}]}}))
    world.until(f"{pod} has the limits {limits}", lambda: world.container(pod, PAIR[0])["resources"]["limits"] == limits)


RULE = {"restartPolicy": "Always", "restartPolicyRules": [
    {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [137]}}]}


@case(15, own=True)
def a_rule_restarts_all_containers_of_a_pod_and_it_serves_again(world, agent=OURS):
    """Tests rules of the application and of a native sidecar. The sandbox stays, and so do rules that capture traffic."""
    if "restartPolicyRules" not in json.dumps(world.injected(app=RULE)):
        raise Skipped("needs Kubernetes 1.36")
    sidecar = {"initContainers": [{"name": PAIR[0], "image": "auto", "imagePullPolicy": "IfNotPresent"} | RULE]}
    told = []
    for name, ends, template in (
            ("rule-usual", "app", {"annotations": USUAL, "app": RULE}),
            ("rule-native", "app", {"annotations": NATIVE, "app": RULE}),
            ("rule-standby", "app", {"annotations": NATIVE | STANDBY | settings(), "app": RULE}),
            ("rule-sidecar", PAIR[0], {"annotations": NATIVE, "spec": sidecar})):
        world.deploy(name, agent, **template)
        world.rolled_out(name)
        pod = world.pods(name)[0]
        before = running(world, pod)
        with Load(world, f"http://{name}:8080/", *CLIENTS) as load:
            world.kill(pod, ends)
            world.until("all containers are other ones", lambda: (
                now := running(world, pod)).keys() == before.keys() and not set(now.values()) & set(before.values()))
            world.rolled_out(name)
            if "standby" in name:
                world.until("the standby waits", lambda: page(world, pod)["waits"])
        expect("pods", [pod], world.pods(name))
        expect_healthy(world, pod, agent)
        with Load(world, f"http://{name}:8080/", *CLIENTS) as after:
            expect("whether both sides have certificates", True, identity(world) in world.call(
                CLIENTS[0], f"http://{name}:8080/")["caller"])
        told.append(f"{name}: cut for {max(one['seconds'] for one in load.told.values()):.1f} s, then {after.expect_none_failed()}")
        world.kubectl("delete", f"deploy/{name}", "--wait=false")
    return "; ".join(told)


def running(world, pod):
    """Returns the IDs of a pod's containers by their names."""
    status = world.get(f"pod/{pod}")["status"]
    return {one["name"]: one["containerID"] for part in ("initContainerStatuses", "containerStatuses")
            for one in status.get(part, []) if one.get("containerID")}


@case(15, own=True)
def pods_capture_traffic_while_kube_proxy_is_in_nftables_mode(world, agent=OURS):
    try:
        world.cluster.proxy_mode("nftables")
        return kinds(world, agent, {name: KINDS[name] for name in ("usual", "native", "tproxy", "dns")})
    finally:
        world.cluster.proxy_mode("iptables")
