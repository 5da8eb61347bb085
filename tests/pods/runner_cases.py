"""The claims of pod-runner itself."""

import asyncio
import json

import yaml

from pods import manifest
from pods.manifest import Refused
from pods.tools import output_of
from world import HERE, expect, until

PROBED = r"""
write() { (: >"$1") 2>/dev/null && echo written || echo refused; }
echo "process $$$$, user $(id -u), group $(id -g), groups $(id -G), host $(hostname)"
sed -nE 's/^(CapBnd|CapEff|NoNewPrivs):[[:space:]]*0*/\1 /p' /proc/self/status
echo "root $(write /x), volume $(write /data/x), config map $(write /config/x)"
echo "config $(cat /config/key), nested $(ls /config/nested | wc -l), labels $(cat /info/labels)"
echo "token $(stat -L -c '%a %u' /secrets/token), medium $(stat -f -c %T /data)"
echo "variables $ALL"
echo "port $(cat /proc/sys/net/ipv4/ip_unprivileged_port_start)"
"""
FOUND = """\
process 1, user 1000, group 2000, groups 2000 3000, host probed
CapEff 
CapBnd 1000
NoNewPrivs 1
root refused, volume written, config map refused
config value, nested 0, labels a="b\\"c"
token 600 1000, medium tmpfs
variables probed 64 value $(NAME) $(NONE)
port 7
"""


async def pod_runner_runs_what_it_is_given_and_refuses_what_it_does_not_know(world, kinds):
    runner = HERE.parent.parent / "deploy/pod-runner"
    refused = [
        ("kind: Service\nmetadata: {name: x}", "kind 'Service' is not known"),
        ("kind: Pod\nmetadata: {name: x}\nspec: {hostNetwork: true, containers: []}",
         "Pod.spec.hostNetwork: pod-runner does not know this field"),
        ("kind: Pod\nmetadata: {name: x}\nspec: {containers: [{name: a, image: b, tty: true}]}",
         "Pod.spec.containers[0].tty: pod-runner does not know this field"),
        ("kind: Pod\nmetadata: {name: x}\nspec: {containers: [{name: a, image: b, volumeMounts: "
         "[{name: c, mountPath: /c}]}]}", "container a mounts the volume c"),
        ("kind: Secret\nmetadata: {name: x}\ndata: {a: '?'}", "Secret.data.a is not base64"),
        ("kind: Pod\nmetadata: {name: x}\nspec: {containers: [{name: a, image: b, env: "
         "[{name: c, value: true}]}]}", "env[0].value: found True, expected str"),
        ("a: [", "this is not YAML")]
    for text, expected in refused:
        try:
            manifest.read(text)
        except Refused as refusal:
            if expected not in str(refusal):
                raise Refused(f"expected {expected!r}, found {str(refusal)!r}") from refusal
        else:
            raise Refused(f"not refused: {text}")
    text = (f"kind: Pod\nmetadata: {{name: one}}\nspec:\n  restartPolicy: Never\n  containers:\n"
            "  - {name: a, image: this, command: [sh, -c, 'echo $(WHO); exit 3'], "
            "env: [{name: WHO, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]}")
    path = world.folder / "one.yaml"
    path.write_text(text)
    layout = world.folder / "broken"
    layout.mkdir()
    (layout / "oci-layout").write_text("{}")
    for image, expected in (("this=/nowhere", "/nowhere is neither a directory nor an OCI layout"),
                            (f"this={layout}", "is not an OCI layout that can be read"),
                            ("other=/", "image this: pass --image this=")):
        command = ["unshare", "--net", runner, path, "--image", image]
        code, output = await output_of([*command, "--folder", world.folder / "cli"], 30)
        if code != 1 or expected not in output or "Traceback" in output:
            raise Refused(f"expected {expected!r}, exit code {code}: {output}")
    # Its own network: a machine has one bridge of pod-runner.
    code, output = await output_of(
        ["unshare", "--net", runner, path, "--image", "this=/", "--folder", world.folder / "cli"], 30)
    if code != 1 or "one/a | one" not in output or "container a ended with 3" not in output:
        raise Refused(f"pod-runner: exit code {code}: {output}")
    await pod_runner_follows_its_manifest(runner, world.folder / "cli.yaml")


async def pod_runner_follows_its_manifest(runner, path):
    """Saving it with another label changes that of the running pod; SIGTERM deletes the pod."""
    script = ("trap 'echo told; exit 0' TERM; until grep -q blue /info/labels; do sleep 0.1; done; "
              "echo blue; while :; do sleep 0.1; done")
    text = (f"kind: Pod\nmetadata: {{name: one, labels: {{team: COLOUR}}}}\nspec:\n  containers:\n"
            f"  - name: a\n    image: this\n    command: [sh, -c, {json.dumps(script)}]\n"
            "    volumeMounts: [{name: info, mountPath: /info}]\n  volumes:\n  - name: info\n"
            "    downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}\n")
    path.write_text(text.replace("COLOUR", "red"))
    child = await asyncio.create_subprocess_exec(
        "unshare", "--net", runner, path, "--image", "this=/", "--folder", path.parent / "cli",
        stdout=asyncio.subprocess.PIPE)

    async def line(wanted):
        async for one in child.stdout:
            if wanted in one.decode():
                return
        raise Refused(f"pod-runner ended before it printed {wanted!r}")
    async with asyncio.timeout(30):
        await line("pod one is ready")
        path.write_text(text.replace("COLOUR", "blue"))
        await line("one/a | blue")
        child.terminate()
        await line("one/a | told")
        await line("pod one: deleted")
        expect("exit code of pod-runner", 0, await child.wait())


async def pod_runner_gives_a_container_what_its_manifest_says(world, kinds):
    container = {
        "name": "probed", "image": "application",
        "command": ["sh", "-c", PROBED],
        "env": [{"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "LIMIT", "valueFrom": {"resourceFieldRef": {
                    "resource": "limits.memory", "divisor": "1Mi"}}},
                {"name": "KEY", "valueFrom": {"configMapKeyRef": {"name": "own", "key": "key"}}},
                {"name": "ALL", "value": "$(NAME) $(LIMIT) $(KEY) $$(NAME) $(NONE)"}],
        "resources": {"limits": {"memory": "64Mi"}},
        "securityContext": {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False,
                            "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]}},
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in (
            ("data", "/data"), ("info", "/info"), ("config", "/config"), ("none", "/config/nested"),
            ("token", "/secrets"))]}
    volumes = [
        {"name": "data", "emptyDir": {"medium": "Memory"}}, {"name": "none"},
        {"name": "config", "configMap": {"name": "own"}},
        {"name": "info", "downwardAPI": {"items": [
            {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
        {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}]
    text = yaml.safe_dump_all([
        {"kind": "ConfigMap", "metadata": {"name": "own", "namespace": "demo"}, "data": {"key": "value"}},
        {"kind": "Pod", "metadata": {"name": "probed", "namespace": "demo", "labels": {"a": 'b"c'}},
         "spec": {"restartPolicy": "Never", "containers": [container], "volumes": volumes,
                  "serviceAccountName": "server", "securityContext": {
                      "runAsUser": 1000, "runAsGroup": 2000, "supplementalGroups": [3000], "sysctls": [
                          {"name": "net.ipv4.ip_unprivileged_port_start", "value": "7"}]}}}])
    pods, data = manifest.read(text)
    world.runner.data |= data
    folder = world.folder / "out/demo.server"
    (folder / "token").write_bytes(world.first_token)
    pod = world.runner.make(pods[0])
    await pod.start()
    await until("the container has ended", lambda: pod.phase in ("Succeeded", "Failed"), 20)
    # The capability 12 is NET_ADMIN.
    expect("what the container found", FOUND, world.log(pod, "probed"))
    expect("exit codes", [0], pod.container("probed").exit_codes)
