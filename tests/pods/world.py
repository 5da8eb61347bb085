"""The machine of the tests: a control plane, the images, and pods of all kinds."""

import asyncio
import json
import pathlib
import re
import shutil
import sys
import time

import yaml

import inject
import mesh
from pods import manifest
from pods.manifest import Refused
from pods.runner import Runner
from pods.tools import run

HERE = pathlib.Path(__file__).resolve().parent
PAGES = HERE.parent.parent / "deploy" / "kubernetes"
OURS = "registry.example/proxyv2-istio-agent:1.32.0"
STAND_IN = inject.IMAGE
APPLICATION = f"{sys.executable} -B {HERE / 'app.py'} 8080"
ACCOUNTS = ("client", "server", "gateway", "cart")
LIMIT = 150  # Seconds for one claim.
# Shorter than these tests, so that both are renewed within them.
TOKEN_SECONDS, CERTIFICATE_SECONDS = 20, 30


class World:
    """All that runs, under one folder."""

    def __init__(self, options):
        self.options, self.folder = options, options.folder
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.resources = mesh.Resources(self.folder / "resources")
        self.resources.folder.mkdir()
        self.events = []
        self.runner = Runner(self.folder, tokens=self.folder / "out", say=self.note,
                             hosts={"istiod.istio-system.svc": "10.244.77.1"})
        self.blocks = {page.name: re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
                       for page in sorted(PAGES.glob("*.md"))}
        self.shown = set()
        self.istiod = self.first_token = None
        self.checked, self.failed, self.figures, self.rendered = [], [], [], []

    def note(self, text):
        self.events.append(text)
        with open(self.folder / "events.log", "a", encoding="utf-8") as file:
            print(f"{time.strftime('%H:%M:%S')} {text}", file=file)

    async def start(self):
        await run("ip", "link", "set", "lo", "up")
        await self.runner.start()
        command = [self.options.binaries / "local-istiod", "--listen", "0.0.0.0:15012",
                   "--resources", self.resources.folder, "--out", self.folder / "out",
                   "--token-ttl", f"{TOKEN_SECONDS}s", "--max-cert-ttl", f"{CERTIFICATE_SECONDS}s"]
        for account in ACCOUNTS:
            command += ["--identity", f"demo/{account}"]
        with open(self.folder / "local-istiod.log", "wb") as log:
            self.istiod = await asyncio.create_subprocess_exec(
                *map(str, command), stdout=log, stderr=log)
        root = self.folder / "out/root-cert.pem"
        await until("local-istiod has written its root", root.exists)
        ca = self.folder / "ca"
        ca.mkdir()
        shutil.copy(root, ca)
        self.runner.folders["ConfigMap", "istio-ca-root-cert"] = ca
        self.first_token = (self.folder / "out/demo.server/istio-token").read_bytes()
        await self.add_images()

    async def add_images(self):
        await self.runner.add_image(OURS, self.options.image)
        await self.runner.add_image("application", "/", APPLICATION.split())
        await self.runner.add_image("cart", "/", APPLICATION.split())
        if stand_in := self.options.proxyv2:
            is_layout = (stand_in / "oci-layout").exists()
            agent = None if is_layout else ["/usr/local/bin/pilot-agent"]
            await self.runner.add_image(STAND_IN, stand_in, agent)

    def say(self, text):
        self.note(text)
        print(text, flush=True)

    async def check(self, claim, kinds):
        """Tests one claim; the others go on if it fails, except the first."""
        name = claim.__name__.replace("_", " ")
        started = time.monotonic()
        try:
            async with asyncio.timeout(LIMIT):
                skipped = await claim(self, kinds)
        except (Refused, OSError, ValueError) as error:
            self.failed.append(name)
            self.say(f"FAILED {name}: {type(error).__name__}: {error}")
            if len(self.checked) == 0:
                raise
        else:
            took = f"({time.monotonic() - started:.1f} s)"
            self.say(f"skipped: {name}: {skipped}" if skipped else f"ok {name} {took}")
        self.checked.append(name)

    def sum_up(self):
        """Prints memory and what failed; returns the exit code."""
        for block in self.not_shown() if not self.options.only else ():
            self.failed.append(block)
            self.say(f"FAILED {block}: no test runs this manifest")
        self.say("memory, in MB: resident          agent   Envoy   charged to both")
        for pod, when, *sizes in self.figures:
            sizes = "".join(f"{size / 1e6:8.1f}" for size in sizes)
            self.say(f"   {pod:13} {when:10} {sizes}")
        self.say(f"pods: {len(self.failed)} of {len(self.checked)} claims failed; logs are in {self.folder}"
                 if self.failed else f"pods: all {len(self.checked)} claims hold")
        return int(bool(self.failed))

    def memory(self, pod, when):
        """Notes what the agent of a pod and its Envoy hold."""
        proxy = pod.container("istio-proxy")
        children = pathlib.Path(f"/proc/{proxy.pid}/task/{proxy.pid}/children").read_text().split()
        sizes = [resident(pid) for pid in (proxy.pid, *children)]
        charged = proxy.group.used() if proxy.group else 0
        self.figures.append((pod.name, when, sizes[0], sum(sizes[1:]), charged))

    async def stop(self):
        await self.runner.stop()
        if self.istiod:
            self.istiod.terminate()
            await self.istiod.wait()

    def page(self, name, number):
        """A block of a page, by its number."""
        self.shown.add((name, number))
        return yaml.safe_load(self.blocks[name][number])

    def not_shown(self):
        return [f"{name}, block {number + 1}" for name, blocks in self.blocks.items()
                for number in range(len(blocks)) if (name, number) not in self.shown]

    def make(self, name, *patches, account="server", bare=False, **more):
        """A pod of the application, with patches to its Deployment, injected unless it is bare."""
        deployment = application(name, account)
        for patch in patches:
            merge(deployment, patch)
        if not bare:
            deployment = inject.Injection(deployment, **more).made()
        pods, _ = manifest.read(yaml.safe_dump(deployment))
        return self.runner.make(pods[0])

    async def call(self, pod, host, address):
        """What the application of another pod saw of a request."""
        command = [sys.executable, "-B", HERE / "load.py", address, host, "once"]
        code, output = await pod.container("app").execute(command, 20)
        expect("exit code of a request", 0, code, output)
        told = json.loads(output)
        expect(f"failed requests to {host}", [], told["failed"])
        return told["answer"]

    def log(self, pod, container="istio-proxy"):
        return pod.container(container).log.read_text(errors="replace")


def application(name, account):
    probe = {"httpGet": {"path": "/ready", "port": 8080}, "periodSeconds": 1}
    container = {"name": "app", "image": "application", "ports": [{"containerPort": 8080}],
                 "readinessProbe": probe}
    template = {"metadata": {"labels": {"app": name}, "annotations": {}},
                "spec": {"serviceAccountName": account, "containers": [container]}}
    return {"apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": name, "namespace": "demo"}, "spec": {"template": template}}


def merge(target, patch):
    """A patch as kubectl applies it to a Deployment: lists by the names of their elements."""
    for name, value in patch.items():
        if isinstance(value, dict) and isinstance(target.get(name), dict):
            merge(target[name], value)
        elif isinstance(value, list) and all("name" in one for one in value):
            by_name = {one["name"]: one for one in target.setdefault(name, [])}
            for one in value:
                if one["name"] in by_name:
                    merge(by_name[one["name"]], one)
                else:
                    target[name].append(one)
        elif value is None:
            target.pop(name, None)
        else:
            target[name] = value


def annotated(annotations):
    """A patch with annotations of the pod."""
    return {"spec": {"template": {"metadata": {"annotations": annotations}}}}


def resident(pid):
    pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


async def until(what, check, limit=60):
    """Waits until the check is true; returns its value."""
    deadline = time.monotonic() + limit
    while not (value := check()):
        if time.monotonic() > deadline:
            raise Refused(f"waited {limit} s in vain until {what}")
        await asyncio.sleep(0.05)
    return value


def expect(what, wanted, found, more=""):
    if wanted != found:
        raise Refused(f"{what}: expected {wanted!r}, found {found!r} {more}")
