"""A pod's life: init containers and sidecars in order, then its containers, restarts, and its end."""

import asyncio
import time
import uuid

from .container import Container
from .manifest import Refused
from .network import Sandbox
from .probes import Probe, get
from .tools import run
from .volumes import Volume

REFRESH = 1  # Seconds between two looks at volumes; kubelet takes up to a minute.
BACKOFF, LONGEST_BACKOFF = 10, 300  # Seconds; the first restart comes at once.
HOOK_LIMIT = 3600


class Pod:
    """One pod. `start` returns once all its containers were started, `wait_ready` once its own
    probes say that it is ready."""

    def __init__(self, manifest, runner):
        metadata, self.spec, self.runner = manifest["metadata"], manifest["spec"], runner
        self.name, self.namespace = metadata["name"], metadata["namespace"]
        self.labels, self.annotations = metadata["labels"], metadata["annotations"]
        self.uid = str(uuid.uuid4())
        self.account = self.spec.get("serviceAccountName", "default")
        self.folder = runner.work / "pods" / self.name
        self.address = runner.network.address()
        self.phase = "Pending"
        security = self.spec.get("securityContext", {})
        self.file_group = security.get("fsGroup")
        self.groups = [*security.get("supplementalGroups", []),
                       *([] if self.file_group is None else [self.file_group])]
        self.sandbox = Sandbox(self.name, self.address, runner.network)
        self.volumes = {volume["name"]: Volume(volume, self, self.folder / "volumes" / volume["name"])
                        for volume in self.spec.get("volumes", [])}
        self.init_containers = [Container(one, self, runner.image(one["image"]), True)
                                for one in self.spec.get("initContainers", [])]
        self.main = [Container(one, self, runner.image(one["image"]))
                     for one in self.spec["containers"]]
        self.tasks, self.is_ending = {}, False

    @property
    def containers(self):
        return [*self.init_containers, *self.main]

    @property
    def sidecars(self):
        return [one for one in self.init_containers if one.is_sidecar]

    @property
    def only_user(self):
        """The user all containers are told to run as, if it is one."""
        users = {one.security("runAsUser") for one in self.containers}
        return users.pop() if len(users) == 1 else None

    def container(self, name):
        for one in self.containers:
            if one.name == name:
                return one
        raise Refused(f"pod {self.name} has no container {name}")

    def say(self, text):
        self.runner.say(f"pod {self.name}: {text}")

    # Its start.

    async def start(self, network_command=None):
        """Starts it; `network_command` is what a CNI plugin would do in its network first."""
        self.folder.mkdir(parents=True)
        await self.sandbox.start(self.spec.get("securityContext", {}).get("sysctls", []))
        self.say(f"address {self.address}")
        if network_command:
            await run(*self.sandbox.enter(), *network_command)
        self._write_files()
        for volume in self.volumes.values():
            await volume.make()
        self._make_nested_places()
        self._spawn("volumes", self._refresh())
        for container in self.init_containers:
            await (self._started(container) if container.is_sidecar else self._finish(container))
        for container in self.main:
            await self._launched(container)
        self.phase = "Running"

    def _write_files(self):
        lines = ["127.0.0.1 localhost", f"{self.address} {self.name}"]
        lines += [f"{address} {name}" for name, address in self.runner.hosts.items()]
        lines += [f"{one['ip']} {' '.join(one['hostnames'])}"
                  for one in self.spec.get("hostAliases", [])]
        search = f"{self.namespace}.svc.cluster.local svc.cluster.local cluster.local"
        for name, text in (
                ("hosts", "\n".join(lines)), ("hostname", self.name),
                ("resolv.conf", f"search {search}\nnameserver {self.runner.network.host}\n"
                                "options ndots:5")):
            (self.folder / name).write_text(text + "\n")

    def _make_nested_places(self):
        """Directories in volumes on which other volumes are mounted."""
        for container in self.containers:
            mounts = container.spec.get("volumeMounts", [])
            for outer in mounts:
                for inner in mounts:
                    path = outer["mountPath"].rstrip("/") + "/"
                    if inner["mountPath"].startswith(path) and inner is not outer:
                        place = self.volumes[outer["name"]].path / inner["mountPath"][len(path):]
                        place.mkdir(parents=True, exist_ok=True)

    async def _refresh(self):
        while True:
            await asyncio.sleep(REFRESH)
            for volume in self.volumes.values():
                try:
                    if volume.refresh():
                        self.say(f"volume {volume.name}: updated")
                except (Refused, OSError) as error:
                    self.say(f"volume {volume.name}: {error}")

    async def _finish(self, container):
        """Runs an init container until it succeeds."""
        while True:
            await container.start()
            code = await container.wait()
            self.say(f"init container {container.name} ended with {code}")
            if code == 0:
                return
            if self.spec.get("restartPolicy") == "Never":
                self.phase = "Failed"
                raise Refused(f"pod {self.name}: init container {container.name} ended with {code}")
            await self._back_off(container)

    async def _launched(self, container):
        """Starts a container and keeps it running; returns when it was started and its hook was run."""
        launched = asyncio.get_running_loop().create_future()
        self._spawn(container.name, self._keep(container, launched))
        await launched

    async def _started(self, container):
        """The same for a sidecar; its startup probe must succeed before the next is started."""
        await self._launched(container)
        while not container.has_started and not self.is_ending:
            await asyncio.sleep(0.01)

    # Its containers.

    async def _keep(self, container, launched):
        while not self.is_ending:
            started = time.monotonic()
            try:
                await self._run_once(container, launched)
            except (Refused, OSError) as error:
                if not launched.done():
                    launched.set_exception(error)
                    return
                self.say(f"container {container.name}: {error}")
                container.exit_codes.append(128)
            if not self._is_to_be_restarted(container):
                break
            if time.monotonic() - started < 2 * LONGEST_BACKOFF:
                await self._back_off(container)
        self._note_end()

    async def _run_once(self, container, launched):
        await container.start()
        self.say(f"container {container.name} started")
        probing = asyncio.create_task(self._supervise(container, launched))
        try:
            code = await container.wait()
        finally:
            probing.cancel()
        why = ", out of memory" if container.was_out_of_memory else ""
        self.say(f"container {container.name} ended with {code}{why}")
        if not launched.done():
            launched.set_result(None)

    async def _supervise(self, container, launched):
        """The hook after the start, and the probes, of one running container."""
        hook = container.spec.get("lifecycle", {}).get("postStart")
        if hook and not await self.run_hook(container, "postStart", hook):
            return await self._end(container)
        if not launched.done():
            launched.set_result(None)
        if spec := container.spec.get("startupProbe"):
            if why := await Probe(spec, container).succeeds():
                self.say(f"container {container.name}: startup probe: {why}")
                return await self._end(container)
            self.say(f"container {container.name} has passed its startup probe")
        container.has_started = True
        probes = {"readinessProbe": self._report_readiness, "livenessProbe": self._report_liveness}
        watching = [Probe(container.spec[name], container).watch(report(container))
                    for name, report in probes.items() if name in container.spec]
        if "readinessProbe" not in container.spec:
            container.is_ready = True
        await asyncio.gather(*watching)

    def _report_readiness(self, container):
        def report(succeeded, why):
            if succeeded != container.is_ready:
                container.is_ready = succeeded
                self.say(f"container {container.name} is {'' if succeeded else 'not '}ready ({why})")
        return report

    def _report_liveness(self, container):
        def report(succeeded, why):
            if not succeeded:
                self.say(f"container {container.name}: liveness probe: {why}")
                self._spawn(f"{container.name} (stop)", self._end(container))
        return report

    async def _end(self, container):
        await container.stop(self.grace)

    async def run_hook(self, container, name, hook):
        """Runs a hook; returns whether it succeeded."""
        if "exec" in hook:
            code, output = await container.execute(hook["exec"]["command"], HOOK_LIMIT)
            succeeded, why = code == 0, f"exit code {code}: {output[-500:]}"
        elif "httpGet" in hook:
            try:
                status = await get(hook["httpGet"], container)
                succeeded, why = status < 400, f"status {status}"
            except (OSError, ValueError) as error:
                succeeded, why = False, str(error)
        else:
            await asyncio.sleep(hook["sleep"]["seconds"])
            succeeded, why = True, ""
        if not succeeded:
            self.say(f"container {container.name}: hook {name}: {why}")
        return succeeded

    def _is_to_be_restarted(self, container):
        policy = self.spec.get("restartPolicy", "Always")
        if self.is_ending:
            return False
        failed = container.exit_codes[-1] != 0
        return container.is_sidecar or policy == "Always" or policy == "OnFailure" and failed

    async def _back_off(self, container):
        if (number := container.restarts - 1) > 0:
            pause = min(BACKOFF * 2 ** (number - 1), LONGEST_BACKOFF)
            self.say(f"container {container.name} is started again in {pause} s")
            await asyncio.sleep(pause)

    def _note_end(self):
        """Once all main containers have ended by themselves, so do the sidecars."""
        if self.is_ending or self.phase != "Running":
            return
        if not any(self._is_to_be_restarted(one) or one.is_running
                   for one in self.main if one.exit_codes or one.is_running):
            failed = any(one.exit_codes and one.exit_codes[-1] for one in self.main)
            self.phase = "Failed" if failed else "Succeeded"
            self._spawn("end", self.delete())

    # What it is like, and its end.

    @property
    def is_ready(self):
        return self.phase == "Running" and all(one.is_ready for one in [*self.sidecars, *self.main])

    async def wait_ready(self, limit=60):
        """Waits until its own probes say that it is ready."""
        try:
            async with asyncio.timeout(limit):
                while not self.is_ready:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            waiting = [one.name for one in [*self.sidecars, *self.main] if not one.is_ready]
            raise Refused(f"pod {self.name} is not ready after {limit} s: "
                          f"{', '.join(waiting)}; logs are in "
                          f"{self.runner.folder / 'logs' / self.name}") from None

    @property
    def grace(self):
        return self.spec.get("terminationGracePeriodSeconds", 30)

    async def delete(self, grace=None):
        """Ends it as kubelet does: hooks of all containers at once, then SIGTERM for the main
        containers, and for sidecars in the reverse of their order once those before have ended."""
        if self.is_ending:
            return
        self.is_ending = True
        grace = self.grace if grace is None else grace
        order = [*reversed(self.sidecars)]

        def turn(container):
            """Waits for those that end before a sidecar; main containers wait for none."""
            async def wait():
                before = [*self.main, *order[:order.index(container)]]
                while any(one.is_running for one in before):
                    await asyncio.sleep(0.02)
            return wait if container in order else None

        started, running = time.monotonic(), [one for one in self.containers if one.is_running]
        await asyncio.gather(*(one.stop(grace, turn(one)) for one in running))
        if tasks := [self.tasks[one.name] for one in running if one.name in self.tasks]:
            await asyncio.wait(tasks, timeout=10)
        self.say(f"deleted in {time.monotonic() - started:.1f} s")
        await self._clear()

    async def _clear(self):
        for name, task in self.tasks.items():
            if name != "end":
                task.cancel()
        for container in self.containers:
            container.signal(9)
        await self.sandbox.stop()
        for volume in self.volumes.values():
            if volume.source.get("medium") == "Memory" and volume.path.is_mount():
                await run("umount", "--lazy", volume.path)
        if self.phase == "Running":
            self.phase = "Deleted"

    def _spawn(self, name, work):
        def report(task):
            if not task.cancelled() and (error := task.exception()):
                self.say(f"{name}: {type(error).__name__}: {error}")
        self.tasks[name] = asyncio.create_task(work)
        self.tasks[name].add_done_callback(report)
