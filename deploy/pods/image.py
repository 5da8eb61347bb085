"""Images: a directory that is the root of a file system, or an OCI layout."""

import gzip
import json
import pathlib
import shutil

from .manifest import Refused
from .tools import run

WHITEOUT = ".wh."


class Image:
    """A root, and how its program is started."""

    def __init__(self, root, config):
        self.root = pathlib.Path(root)
        if config.get("WorkingDir", "/") not in ("", "/"):
            raise Refused(f"image {root}: pod-runner knows the working directory / only, found "
                          f"{config['WorkingDir']}")
        self.entrypoint = config.get("Entrypoint") or []
        self.arguments = config.get("Cmd") or []
        self.environment = config.get("Env") or [
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
        self.user = config.get("User", "")

    def command(self, container, expand):
        """What a container runs: the image's entry point, unless it has a command."""
        own, arguments = container.get("command"), container.get("args")
        words = own or self.entrypoint
        words = [*words, *(arguments if arguments is not None else [] if own else self.arguments)]
        if not words:
            raise Refused(f"container {container['name']} has no command, nor has its image")
        return [expand(word) for word in words]

    def identity(self):
        """User and group of the image; the group is 0 where it is not named."""
        user, _, group = self.user.partition(":")
        return self._number(user, "passwd"), self._number(group, "group")

    def _number(self, name, file):
        if not name or name.isdigit():
            return int(name or 0)
        path = self.root / "etc" / file
        for line in path.read_text().splitlines() if path.exists() else []:
            fields = line.split(":")
            if fields[0] == name:
                return int(fields[2])
        raise Refused(f"image {self.root}: its user {self.user} is not in /etc/{file}")


async def image(source, entrypoint, folder):
    """The image at a path; a layout is unpacked into the folder."""
    source = pathlib.Path(source)
    if (source / "oci-layout").exists():
        try:
            root, config = await unpack(source, folder)
        except (OSError, ValueError, KeyError) as error:
            raise Refused(f"image {source} is not an OCI layout that can be read: "
                          f"{type(error).__name__}: {error}") from error
    elif source.is_dir():
        root, config = source.resolve(), {}
    else:
        raise Refused(f"image {source} is neither a directory nor an OCI layout")
    if entrypoint:
        config = config | {"Entrypoint": entrypoint, "Cmd": []}
    return Image(root, config)


async def unpack(layout, folder):
    """Unpacks the layers of the only image of a layout."""
    manifests = json.loads((layout / "index.json").read_text())["manifests"]
    if len(manifests) != 1:
        raise Refused(f"image {layout} has {len(manifests)} manifests, expected one")
    manifest = json.loads(blob(layout, manifests[0]).read_text())
    if "layers" not in manifest:
        raise Refused(f"image {layout} is a list of images, expected one image")
    config = json.loads(blob(layout, manifest["config"]).read_text())
    root = folder / "root"
    root.mkdir(parents=True)
    for layer in manifest["layers"]:
        await run("tar", "--extract", "--numeric-owner", "--same-permissions", "--same-owner",
                  "--xattrs", "--xattrs-include=*", f"--file={blob(layout, layer)}",
                  f"--directory={root}", *compression(blob(layout, layer)), limit=300)
        for mark in sorted(root.rglob(f"{WHITEOUT}*")):
            remove_hidden(mark)
    return root, config.get("config", {})


def remove_hidden(mark):
    """Removes what a whiteout of a layer hides, and the whiteout."""
    name = mark.name.removeprefix(WHITEOUT)
    if name == f"{WHITEOUT}.opq":
        raise Refused(f"pod-runner does not know opaque directories, found {mark}")
    hidden = mark.with_name(name)
    mark.unlink()
    if hidden.is_dir() and not hidden.is_symlink():
        shutil.rmtree(hidden)
    else:
        hidden.unlink(missing_ok=True)


def compression(path):
    try:
        with gzip.open(path) as file:
            file.read(1)
        return ["--gzip"]
    except gzip.BadGzipFile:
        return ["--no-auto-compress"]


def blob(layout, descriptor):
    algorithm, _, digest = descriptor["digest"].partition(":")
    return layout / "blobs" / algorithm / digest
