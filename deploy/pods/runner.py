"""What all pods of one machine share: images, network, tokens, ConfigMaps, and where output goes."""

import os
import pathlib
import shutil
import tempfile

from . import groups
from .image import image
from .manifest import Refused
from .network import Network
from .pod import Pod
from .tools import run


class Runner:
    """Runs pods. Needs root, and mounts of its own (`unshare --mount`)."""

    def __init__(self, folder, subnet="10.244.77.0/24", tokens=None, hosts=None, say=print,
                 shows_logs=False):
        self.folder, self.tokens = pathlib.Path(folder).resolve(), tokens
        self.network, self.hosts = Network(subnet), hosts or {}
        self.node_name = os.uname().nodename
        self.say, self.shows_logs = say, shows_logs
        self.images, self.data, self.folders = {}, {}, {}
        self.pods, self.hierarchy, self.capabilities = [], None, []

    async def start(self):
        if os.getuid() != 0:
            raise Refused("pod-runner needs root: it makes network namespaces and mounts")
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="pod-runner-"))
        # In memory, and not within any file system that is the root of an image.
        await run("mount", "-t", "tmpfs", "-o", "mode=755,size=75%", "tmpfs", self.work)
        self.hierarchy = groups.hierarchy()
        if not self.hierarchy:
            self.say("memory limits are not kept: no control groups for memory can be made here")
        mask = pathlib.Path("/proc/self/status").read_text().split("CapBnd:")[1].split()[0]
        self.capabilities = (await run("capsh", f"--decode={mask}")).split("=")[1].split(",")
        await self.network.start()

    async def add_image(self, name, source, entrypoint=None):
        """Says where the image of that name is."""
        folder = self.work / "images" / str(len(self.images))
        self.images[name] = await image(source, entrypoint, folder)

    def image(self, name):
        if name not in self.images:
            raise Refused(f"image {name}: pass --image {name}=<directory or OCI layout>")
        return self.images[name]

    def files(self, kind, namespace, name):
        """The files of a ConfigMap or Secret, None if there is none."""
        if found := self.data.get((kind, namespace, name)):
            return found
        folder = self.folders.get((kind, name))
        if folder is None:
            return None
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def token(self, namespace, account, name):
        """A token of a service account as it is now."""
        path = pathlib.Path(self.tokens or ".") / f"{namespace}.{account}" / name
        if self.tokens and path.is_file():
            return path.read_bytes()
        raise Refused(f"there is no token {name} of {namespace}/{account}: pass --tokens <folder> "
                      f"with {namespace}.{account}/{name}")

    def make(self, manifest):
        """A pod of this machine, not started yet."""
        if any(pod.name == manifest["metadata"]["name"] for pod in self.pods
               if pod.phase in ("Pending", "Running")):
            raise Refused(f"pod {manifest['metadata']['name']} is there twice")
        self.pods.append(Pod(manifest, self))
        return self.pods[-1]

    def show(self, container, line):
        if self.shows_logs:
            self.say(f"{container.pod.name}/{container.name} | {line}")

    async def stop(self):
        """Ends what is left at once."""
        for pod in self.pods:
            await pod.delete(grace=0)
        await self.network.stop()
        if self.hierarchy:
            groups.remove(self.hierarchy, [pod.name for pod in self.pods])
        await run("umount", "--recursive", "--lazy", self.work)
        shutil.rmtree(self.work, ignore_errors=True)
