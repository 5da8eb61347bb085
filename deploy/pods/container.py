"""One container: its root and mounts, its process and its log."""

import asyncio
import os
import pathlib
import shlex
import signal

from .environment import environment, expand
from .groups import Group
from .manifest import Refused
from .tools import child_of, output_of, run, tool

# What container runtimes leave a container that drops nothing.
DEFAULT_CAPABILITIES = {
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD",
    "NET_BIND_SERVICE", "NET_RAW", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}
DEVICES = ["null", "zero", "full", "random", "urandom", "tty"]


class Container:
    """A container of a pod, over all its restarts."""

    def __init__(self, spec, pod, image, is_init=False):
        self.spec, self.pod, self.image = spec, pod, image
        self.name = spec["name"]
        self.is_init = is_init
        self.is_sidecar = spec.get("restartPolicy") == "Always"
        self.folder = pod.folder / "containers" / self.name
        self.log = pod.runner.folder / "logs" / pod.name / f"{self.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.exit_codes = []
        self.was_out_of_memory = False
        self.is_ready = self.has_started = False
        self.process = self.pid = self.group = self._reading = None
        self.user, self.main_group = self._identity()

    # What it may do.

    def security(self, name, default=None):
        """A field of the container's security context, else of the pod's."""
        for context in (self.spec, self.pod.spec):
            if (value := context.get("securityContext", {}).get(name)) is not None:
                return value
        return default

    def _identity(self):
        user, group = self.image.identity()
        given = self.security("runAsUser")
        if given is not None and given != user:
            user, group = given, 0
        group = self.security("runAsGroup", group)
        if user == 0 and self.security("runAsNonRoot"):
            raise Refused(f"container {self.name} has runAsNonRoot, but its user is root")
        return user, group

    def _dropped(self):
        """Capabilities as capsh names them."""
        wanted = self.security("capabilities", {})
        drop, add = ({name.upper().removeprefix("CAP_") for name in wanted.get(key, [])}
                     for key in ("drop", "add"))
        every = {name.upper().removeprefix("CAP_") for name in self.pod.runner.capabilities}
        if unknown := (drop | add) - every - {"ALL"}:
            raise Refused(f"container {self.name}: unknown capability {', '.join(unknown)}")
        kept = set() if "ALL" in drop else DEFAULT_CAPABILITIES - drop
        kept = every if "ALL" in add else kept | add
        return [f"cap_{name.lower()}" for name in sorted(every - kept)]

    def _confined(self, command):
        """The command within the container's root, as its user and with its capabilities."""
        groups = {self.main_group, *self.pod.groups}
        words = [tool("capsh"), f"--chroot={self.root}"]
        if dropped := self._dropped():
            words.append(f"--drop={','.join(dropped)}")
        if self.security("allowPrivilegeEscalation") is False:
            words.append("--no-new-privs")
        words += [f"--groups={','.join(map(str, sorted(groups)))}", f"--gid={self.main_group}",
                  f"--uid={self.user}", f"--shell={self._program(command[0])}", "--"]
        return [*words, *command[1:]]

    def _program(self, name):
        """The path of a program in the container's root."""
        folders = [""] if "/" in name else self.variables.get("PATH", "").split(":")
        for folder in folders:
            path = os.path.join("/", folder, name)
            if os.access(within(self.root, path), os.X_OK):
                return path
        raise Refused(f"container {self.name}: its image has no program {name}")

    # Its root.

    @property
    def root(self):
        return self.folder / str(len(self.exit_codes)) / "root"

    async def _make_root(self):
        layers = self.root.parent
        for name in ("upper", "work", "root"):
            (layers / name).mkdir(parents=True)
        os.chmod(layers / "upper", 0o755)
        if set(str(self.image.root)) & set(",:"):
            raise Refused(f"image {self.image.root}: its path has a comma or a colon")
        lower = f"lowerdir={self.image.root},upperdir={layers / 'upper'},workdir={layers / 'work'}"
        await run("mount", "-t", "overlay", "overlay", "-o", lower, self.root)
        script = [shlex.join(map(str, command)) for command in self._mounts()]
        await run("sh", "-ec", "\n".join(script))

    def _mounts(self):
        """Commands that mount everything; makes what they are mounted on."""
        self._place("/proc")
        device = self._place("/dev")
        yield ["mount", "-t", "tmpfs", "-o", "mode=755,size=64k", "tmpfs", device]
        for name in DEVICES:
            yield ["touch", f"{device}/{name}"]
            yield ["mount", "--bind", f"/dev/{name}", f"{device}/{name}"]
        for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
            yield ["ln", "-s", f"/proc/self/{target}", f"{device}/{name}"]
        yield ["mkdir", f"{device}/shm"]
        yield ["mount", "-t", "tmpfs", "-o", "mode=1777,size=64m", "tmpfs", f"{device}/shm"]
        yield ["mount", "--bind", "-o", "ro", "/sys", self._place("/sys")]
        if self.group:
            yield from self.group.mounts(self.root)
        for name in ("hosts", "hostname", "resolv.conf"):
            source = self.pod.folder / name
            yield ["mount", "--bind", source, self._place(f"/etc/{name}", is_file=True)]
        for mount in sorted(self.spec.get("volumeMounts", []), key=lambda one: one["mountPath"]):
            volume = self.pod.volumes[mount["name"]]
            mode = "ro" if mount.get("readOnly") or not volume.is_writable else "rw"
            target = self._place(mount["mountPath"])
            yield ["mount", "--bind", "-o", mode, volume.path, target]
        if self.security("readOnlyRootFilesystem"):
            yield ["mount", "-o", "remount,bind,ro", self.root]

    def _place(self, path, is_file=False):
        """The place of a path in the root, made if it is not there."""
        place = within(self.root, path)
        if is_file:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        else:
            place.mkdir(parents=True, exist_ok=True)
        return place

    # Its process.

    @property
    def is_running(self):
        return self.process is not None and self.process.returncode is None

    @property
    def restarts(self):
        return len(self.exit_codes)

    async def start(self):
        """Starts the process in a fresh root."""
        limits = self.spec.get("resources", {}).get("limits", {})
        if hierarchy := self.pod.runner.hierarchy:
            name = f"{self.pod.name}.{self.name}.{self.restarts}"
            self.group = Group(hierarchy, name, limits)
        self.variables = environment(self.spec, self.pod, self.image)
        await self._make_root()
        command = self.image.command(self.spec, lambda word: expand(word, self.variables))
        command = [*self._joined(), *self.pod.sandbox.enter(),
                   *as_first_process(self.root, self._confined(command))]
        reading, writing = os.pipe()
        # The container may open /dev/stdout again.
        os.fchown(writing, self.user, self.main_group)
        try:
            self.process = await asyncio.create_subprocess_exec(
                *map(str, command), env=self.variables, stdin=asyncio.subprocess.DEVNULL,
                stdout=writing, stderr=writing, start_new_session=True)
        finally:
            os.close(writing)
        self._reading = asyncio.create_task(self._keep_log(reading))
        self.pid = await child_of(self.process)

    def _joined(self):
        if not self.group:
            return []
        return [tool("sh"), "-c", 'echo $$ >"$0" && exec "$@"', self.group.path / "cgroup.procs"]

    async def _keep_log(self, reading):
        """Copies what the container prints to its log, and shows it line by line."""
        reader = asyncio.StreamReader(limit=2**20)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb"))
        rest = b""
        with open(self.log, "ab", buffering=0) as file:
            while some := await reader.read(2**16):
                file.write(some)
                *lines, rest = (rest + some).split(b"\n")
                for line in lines:
                    self.pod.runner.show(self, line.decode(errors="replace"))
                rest = rest[-(2**16):]

    async def wait(self):
        """Waits for the end; returns the exit code, 128 + n for signal n."""
        code = await self.process.wait()
        # A control group may end the parent as well.
        code = 128 - code if code < 0 else code
        await self._reading
        self.was_out_of_memory = bool(self.group and self.group.kills())
        await run("umount", "--recursive", "--lazy", self.root)
        self.exit_codes.append(code)
        self.is_ready = self.has_started = False
        return code

    def signal(self, number):
        if self.is_running and self.pid:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass  # It has just ended.

    async def execute(self, command, limit):
        """Runs a command in the container; returns its exit code, None if it took too long, and what
        it printed."""
        if not self.is_running:
            return 126, "the container does not run"
        enter = [tool("nsenter"), f"--target={self.pid}", "--mount", "--net", "--uts", "--ipc",
                 "--pid"]
        command = [*self._joined(), *enter, *self._confined(command)]
        return await output_of(command, limit, env=self.variables)

    async def stop(self, grace, turn=None):
        """Stops the container: the hook first, SIGTERM when its turn has come, SIGKILL at the end of
        the grace period in seconds."""
        hook = self.spec.get("lifecycle", {}).get("preStop")
        try:
            async with asyncio.timeout(grace):
                if hook and self.is_running:
                    await self.pod.run_hook(self, "preStop", hook)
                if turn:
                    await turn()
                self.signal(signal.SIGTERM)
                while self.is_running:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            self.pod.say(f"container {self.name} did not end within {grace} s: SIGKILL")
            self.signal(signal.SIGKILL)


def as_first_process(root, command):
    """The command as the first process of a new process namespace, with its own /proc. Its parent exits
    as it does, with 128 + n if signal n ended it (`unshare --fork` has another code for SIGKILL), and
    does not write to its log."""
    parent = 'exec 3>&2 2>/dev/null; "$@"; exit $?'
    child = 'exec 2>&3 3>&-; mount=$1; shift; "$mount" -t proc proc "$0" && exec "$@"'
    shell = tool("sh")
    return [tool("unshare"), "--pid", "--mount", shell, "-c", parent, shell,
            shell, "-c", child, root / "proc", tool("mount"), *command]


def within(root, path):
    """The place of a path below a root, by the links of that root."""
    place, todo, links = root, [part for part in pathlib.PurePath(path).parts[1:]], 0
    while todo:
        part = todo.pop(0)
        if part == "..":
            place = place.parent if place != root else root
        elif (place / part).is_symlink() and (links := links + 1) < 40:
            target = pathlib.PurePath(os.readlink(place / part))
            if target.is_absolute():
                place, target = root, target.relative_to("/")
            todo = [*target.parts, *todo]
        else:
            place /= part
    return place
