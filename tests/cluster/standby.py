"""Cases of pods with a standby (deploy/kubernetes/standby.yaml). The variable UPGRADES is the number of times that pods
are upgraded or, every second time, rolled back."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import time

from cases import (
    CLIENTS, NATIVE, OUTSIDE, USUAL, case, containers, expect_healthy, injected_gateway, run_job, shop)
from world import GO, OURS, Failed, Load, Skipped, expect

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAIR = ("istio-proxy", "istio-standby")
STANDBY = {"inject.istio.io/templates": "sidecar,standby"}
# The fields that the template `standby` must give the same values in both containers.
SAME = ("image", "imagePullPolicy", "resources", "restartPolicy", "securityContext", "volumeMounts")
VERSION = "/usr/local/bin/pilot-agent.istio-version"
ENVOY = "/usr/local/bin/envoy"
# The lifetime of streams and connections of the load, in seconds. A former Envoy stays for 30 s. It sends GOAWAY with
# its next response, so another stream may begin on its connection when a stream ends.
HOLD = 12


def settings(quick=True, **metadata):
    """Returns the annotation with the proxy's configuration, which captures DNS. With `quick`, a former Envoy drains
    and exits after short times."""
    metadata |= {"ISTIO_META_DNS_CAPTURE": "true"} | ({"ISTIO_AGENT_PARENT_SHUTDOWN_TIME": "30s"} if quick else {})
    return {"proxy.istio.io/config": json.dumps(
        {"proxyMetadata": metadata, "holdApplicationUntilProxyStarts": True} | ({"drainDuration": "5s"} if quick else {}))}


def everything(world, *names):
    """Returns targets of all kinds: the clients call the pods of these names and their status ports, and these pods
    call another pod."""
    targets = {client: [] for client in CLIENTS}
    for name in names:
        for client in CLIENTS:
            targets[client] += [f"http://{name}:8080/", f"h2c://{name}:8083/", f"grpc://{name}:8081", f"tcp://{name}:8082"]
        for pod in world.pods(name):
            address = world.get(f"pod/{pod}")["status"]["podIP"]
            targets[CLIENTS[0]] += [f"get://{address}:15020/{page}" for page in ("healthz/ready", "stats/prometheus")]
        targets[name] = ["http://other:8080/", "h2c://other:8083/", "grpc://other:8081", "tcp://other:8082",
                         f"dns://other.{world.namespace}.svc.cluster.local."]
    return targets


@contextlib.contextmanager
def untouched(world, *names):
    """Fails if an application restarts or is replaced."""
    def applications():
        return {pod: (world.container(pod, "app")["containerID"], world.container(pod, "app")["restartCount"])
                for name in names for pod in world.pods(name)}
    before = applications()
    yield
    expect("applications", before, applications())


def image(world, name, number):
    """Gives an image another name. The kubelet delays a container that starts often with an image of the same name."""
    other = f"{name}-{number}"
    world.cluster.inside("ctr", "--namespace", "k8s.io", "images", "tag", "--force", name, other)
    return other


def page(world, pod):
    return json.loads(world.exec(pod, "pilot-agent", "request", "--debug-port=15020", "GET", "debug/standby", container=PAIR[0]))


def containers_of(world, pod):
    return containers(world.get(f"pod/{pod}"))


def patch(world, pod, container, image):
    """Changes the image of a container, and returns when the new one runs."""
    started = world.container(pod, container)["containerID"]
    world.kubectl("set", "image", f"pod/{pod}", f"{container}={image}")
    world.until(f"{container} is another one", lambda: "running" in (
        now := world.container(pod, container))["state"] and now["containerID"] != started, 90)


def hand_over(world, pod, container, image, limit=90):
    """Changes the image of the container that waits, and returns when it serves and the former Envoy has exited."""
    patch(world, pod, container, image)
    world.until(f"{container} serves alone", lambda: (now := page(world, pod))["serves"] == container and now["waits"], limit)


def ways(world, name, kind, spec=None, **metadata):
    world.deploy("other", GO)
    world.deploy(name, OURS, annotations=kind | STANDBY | settings(**metadata), spec=spec)
    world.rolled_out("other", name)
    pod = world.pods(name)[0]
    world.until("the standby waits", lambda: page(world, pod)["waits"])
    return pod


def upgrade(world, kind, images, spec=None):
    """Upgrades and rolls a pod back, with every kind of load."""
    pod = ways(world, "upgraded", kind, spec)
    with untouched(world, "upgraded"), Load(world, everything(world, "upgraded"), hold=HOLD) as load:
        for number in range(int(os.environ.get("UPGRADES", "2"))):
            for container in reversed(PAIR):
                hand_over(world, pod, container, image(world, images[number % 2], number))
        # Losses at the end become visible only after 5 s.
        time.sleep(6)
    world.kubectl("delete", "deploy/upgraded", "--wait=false")
    return load.expect_none_failed()


@case(9, own=True)
def a_pod_with_a_standby_is_upgraded_and_rolled_back_unharmed(world):
    return upgrade(world, NATIVE, (world.other_image(OURS), world.images[OURS]))


@case(9, own=True)
def a_usual_pod_with_a_standby_is_upgraded_and_rolled_back_unharmed(world):
    return upgrade(world, USUAL, (world.other_image(OURS), world.images[OURS]))


@case(9, own=True)
def a_standby_has_another_release_of_envoy_and_nothing_fails(world):
    envoy = subprocess.run([ROOT / "deploy/envoy/get-envoy"], env=os.environ | {"ENVOY": "1.39"},
                           check=True, capture_output=True, text=True).stdout.strip()
    older = "localhost/agent-ours:older"
    world.cluster.add_image(older, {ENVOY: pathlib.Path(envoy)}, world.layout)
    return upgrade(world, NATIVE, (older, world.images[OURS]))


@case(9, own=True)
def connections_of_five_minutes_outlast_an_upgrade_with_the_default_times(world):
    if not os.environ.get("UPGRADES"):
        raise Skipped("takes 11 minutes; UPGRADES=1 runs it")
    pod = ways(world, "default", NATIVE, quick=False)
    with untouched(world, "default"), Load(world, {CLIENTS[0]: ["tcp://default:8082", "grpc://default:8081"], CLIENTS[1]: [
            "http://default:8080/"]}, hold=300) as load:
        hand_over(world, pod, PAIR[1], world.other_image(OURS), 640)
    world.kubectl("delete", "deploy/default", "--wait=false")
    return load.expect_none_failed()


@case(9, own=True)
def three_pods_are_upgraded_by_the_script_and_nothing_fails(world):
    world.deploy("other", GO)
    world.deploy("three", OURS, replicas=3, annotations=NATIVE | STANDBY | settings())
    world.rolled_out("other", "three")
    begun = time.monotonic()
    with untouched(world, "three"), Load(world, everything(world, "three"), hold=HOLD) as load:
        for image in (world.other_image(OURS), world.images[OURS]):
            done = subprocess.run(
                [ROOT / "deploy/kubernetes/upgrade-sidecars", "--kubectl", world.command[0], "-n", world.namespace,
                 "-l", "app=three", "--image", image, "--parallel", "2"], capture_output=True, text=True, timeout=600)
            expect("exit code of the script", (0, ""), (done.returncode, done.stdout + done.stderr if done.returncode else ""))
        time.sleep(6)
    world.kubectl("delete", "deploy/three", "--wait=false")
    return f"there and back in {time.monotonic() - begun:.0f} s; {load.expect_none_failed()}"


@case(9, own=True)
def an_image_that_cannot_take_over_takes_no_pod_down(world):
    """Tests images without Envoy, and with one that exits, crashes while it starts, or never gets its configuration."""
    marked = world.cluster.folder / "broken"
    marked.write_text("1.31.2\n")
    nothing = world.cluster.folder / "nothing"
    nothing.write_text("")
    envoy = pathlib.Path(subprocess.run([ROOT / "deploy/envoy/get-envoy"], check=True, capture_output=True, text=True).stdout.strip())
    world.cluster.add_image("localhost/agent-ours:none", {VERSION: marked, "/usr/local/bin/.wh.envoy": nothing}, world.layout)
    world.cluster.add_image("localhost/agent-ours:broken", {
        VERSION: marked, ENVOY: world.cluster.folder / "programs/broken-envoy", "/usr/local/bin/real-envoy": envoy}, world.layout)
    told = []
    for number, (how, name) in enumerate((("none", "none"), ("exits", "broken"), ("crashes", "broken"), ("waits", "broken"))):
        pod = ways(world, f"bad-{how}", NATIVE, BROKEN_ENVOY=how)
        with untouched(world, f"bad-{how}"), Load(world, everything(world, f"bad-{how}"), hold=HOLD) as load:
            patch(world, pod, PAIR[1], image(world, f"localhost/agent-ours:{name}", number))
            world.until("the standby has failed", lambda: "HANDOVER_FAILED" in world.kubectl("logs", pod, "-c", PAIR[1]), 90)
            time.sleep(6)
            expect("container that serves", PAIR[0], page(world, pod)["serves"])
            # A roll-back must work.
            hand_over(world, pod, PAIR[1], image(world, world.other_image(OURS), f"after-{how}"))
            time.sleep(6)
        told.append(f"{how}: {load.expect_none_failed()}")
        world.kubectl("delete", f"deploy/bad-{how}", "--wait=false")
    return "; ".join(told)


@case(9, own=True)
def a_standby_takes_over_without_istiod_only_with_stored_configuration(world):
    names = {"kept": {}, "unkept": {"ISTIO_AGENT_KEEP_CONFIG": "", "ISTIO_AGENT_KEEP_CERTS": ""}}
    pods = {name: ways(world, name, NATIVE, **metadata) for name, metadata in names.items()}
    # With clusters on demand, only services that were used before are reachable without istiod.
    with Load(world, everything(world, *pods), hold=1):
        time.sleep(6)
    world.scale_istiod(0)
    try:
        with untouched(world, *pods), Load(world, everything(world, *pods), hold=HOLD) as load:
            # The image stays the same, because the stored configuration is used only by the same release of Istio.
            world.exec(pods["kept"], "pilot-agent", "request", "--debug-port=15020", "POST", "handover", container=PAIR[0])
            world.until("the standby serves alone", lambda: (now := page(world, pods["kept"]))["serves"] == PAIR[1] and now["waits"], 90)
            patch(world, pods["unkept"], PAIR[1], world.other_image(OURS))
            world.until("the handover has failed", lambda: page(world, pods["unkept"])["last"], 120)
            expect("container that serves", PAIR[0], page(world, pods["unkept"])["serves"])
            why = page(world, pods["unkept"])["last"]["failed"]
            time.sleep(6)
    finally:
        world.scale_istiod(1)
        world.kubectl("delete", "deploy", "--wait=false", *pods)
    return f"{load.expect_none_failed()}; without: {why}"


@case(9, own=True)
def a_standby_serves_after_the_container_that_served_is_killed_or_replaced(world):
    """Compares with pilot-agent, whose container restarts."""
    for name, agent, annotations in (("standby", OURS, NATIVE | STANDBY | settings()), ("alone", GO, NATIVE)):
        shop(world, name, agent, annotations=annotations)
    pods = {name: world.pods(name)[0] for name in ("standby", "alone")}

    def crash(pod, container):
        """Crashes Envoy more often than the agent restarts it."""
        for _ in range(5):
            with contextlib.suppress(Failed, OSError):
                os.kill(world.process(pod, "envoy", container), signal.SIGSEGV)
            time.sleep(1)

    def replace(pod, *containers):
        before = next(one["image"] for one in containers_of(world, pod) if one["name"] == containers[0])
        world.kubectl("set", "image", f"pod/{pod}", *(f"{one}={world.cluster.other(before)}" for one in containers))
    told = []
    for what, end in (("killed", world.kill), ("Envoy killed five times", crash), ("replaced", replace),
                      ("both replaced", lambda pod, container: replace(pod, *(PAIR if pod == pods["standby"] else [container])))):
        for name, pod in pods.items():
            serves = page(world, pod)["serves"] if name == "standby" else PAIR[0]
            started = world.container(pod, serves)["containerID"]
            with Load(world, f"http://{name}:8080/", *CLIENTS) as load:
                end(pod, serves)
                world.until("the container is another one", lambda: (
                    now := world.container(pod, serves))["ready"] and now["containerID"] != started, 120)
                if name == "standby":
                    # With a new build, the container that is replaced takes over again.
                    world.until("the other one waits", lambda: page(world, pod)["waits"], 90)
                time.sleep(3)
            seen = load.told.values()
            told.append(f"{name} {what}: cut for {max(one['seconds'] for one in seen):.2f} s, "
                        f"{sum(len(one['failed']) for one in seen)} of {sum(one['sent'] for one in seen)} requests failed")
            expect("restarts of the application", 0, world.container(pod, "app")["restartCount"])
    expect_healthy(world, "deploy/standby", OURS)
    world.kubectl("delete", "deploy", "--wait=false", *pods)
    return "; ".join(told)


@case(9, own=True)
def running_requests_end_well_when_a_pod_with_standby_is_deleted(world):
    """Tests the deletion while the first or the second container serves, and during a handover."""
    slow = {"lifecycle": {"preStop": {"sleep": {"seconds": 10}}}}
    told = []
    for name, kind, before in (
            ("first", NATIVE, lambda pod: None),
            ("second", NATIVE, lambda pod: hand_over(world, pod, PAIR[1], world.other_image(OURS))),
            ("between", NATIVE, lambda pod: world.kubectl("set", "image", f"pod/{pod}", f"{PAIR[1]}={world.other_image(OURS)}")),
            ("usual", USUAL, lambda pod: None)):
        url = shop(world, name, OURS, app=slow, spec={"terminationGracePeriodSeconds": 60}, annotations=kind | STANDBY | settings())
        pod = world.pods(name)[0]
        world.until("the standby waits", lambda: page(world, pod)["waits"])
        before(pod)
        world.until(f"{CLIENTS[0]} reaches {name}", lambda: world.call(CLIENTS[0], url))
        call = subprocess.Popen([*world.command, "-n", world.namespace, "exec", f"deploy/{CLIENTS[0]}", "-c", "app", "--",
                                 "/application", "get", f"{url}?wait=8s"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(1)
        begun = time.monotonic()
        world.kubectl("delete", f"deploy/{name}", "--wait=false")
        _, errors = call.communicate(timeout=30)
        if call.returncode:
            raise Failed(f"the request to {name} failed: {errors.decode()}")
        world.until(f"{name} is gone", lambda: not world.get("pods", "-l", f"app={name}")["items"], 30)
        told.append(f"{name} gone after {time.monotonic() - begun:.0f} s")
    return ", ".join(told)


@case(9, own=True)
def jobs_with_a_standby_complete(world):
    url = shop(world, "other", GO)
    for name, kind, way in (("usual-pkill", USUAL, "pkill"), ("usual-quit", USUAL, "quitquitquit"), ("native", NATIVE, None)):
        run_job(world, f"standby-{name}", OURS, kind | STANDBY | settings(), url, way)
    return "usual ones by a signal and by a request, and a native one"


@case(9, own=True)
def a_gateway_with_a_standby_is_upgraded_and_rolled_back_unharmed(world):
    name = "standby-gateway"
    shop(world, "other", GO)
    world.deploy("outside", GO, labels=OUTSIDE)
    injected_gateway(world, name, OURS, "other", **{"inject.istio.io/templates": "gateway,standby"} | settings())
    world.rolled_out("outside", name)
    pod = world.pods(name)[0]
    world.until("the standby waits", lambda: page(world, pod)["waits"])
    try:
        with Load(world, [f"http://{name}:8080/", f"h2c://{name}:8080/"], "outside", hold=HOLD) as load:
            for number, release in enumerate((world.other_image(OURS), world.images[OURS])):
                for container in reversed(PAIR):
                    hand_over(world, pod, container, image(world, release, f"gateway-{number}"))
    finally:
        world.kubectl("delete", "--wait=false", f"deploy/{name}", "deploy/outside", fails=True)
        world.kubectl("delete", f"gateways.networking.istio.io/{name}", f"virtualservices/{name}", fails=True)
    return load.expect_none_failed()


@case(9, own=True)
def the_template_of_the_standby_fits_istios_own(world):
    """Tests the pods that istiod's webhook returns, which the API server validates."""
    volume = {"sidecar.istio.io/userVolume": '{"more":{"emptyDir":{}}}',
              "sidecar.istio.io/userVolumeMount": '{"more":{"mountPath":"/more"}}'}
    limits = {"sidecar.istio.io/proxyCPU": "20m", "sidecar.istio.io/proxyMemoryLimit": "1Gi"}
    for annotations in ({}, volume, limits, {"sidecar.istio.io/interceptionMode": "TPROXY"},
                        {"sidecar.istio.io/capNetBindService": "true"}, {"sidecar.istio.io/bootstrapOverride": "none"}):
        for kind in (USUAL, NATIVE):
            same_in_both(world.injected(OURS, annotations=annotations | kind | STANDBY), annotations)
    more = {"securityContext": {"readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}},
            "resources": {"limits": {"memory": "256Mi"}}}
    for own in ({}, more):
        proxy = {"name": PAIR[0], "image": "auto", "imagePullPolicy": "IfNotPresent"} | own
        gateway = {"inject.istio.io/templates": "gateway,standby"}
        same_in_both(world.injected(OURS, annotations=gateway, spec={"containers": [proxy]}), own)
    return "both containers have the same mounts, user and limits"


def same_in_both(pod, what):
    both = {one["name"]: one for one in containers(pod)}
    for key in SAME:
        proxy, standby = (both[name].get(key) for name in PAIR)
        expect(f"{key} with {what}", proxy, standby)
