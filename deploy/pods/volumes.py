"""Volumes of a pod, on this machine's disk or memory, refreshed while the pod lives."""

import os
import pathlib
import shutil
import time

from .environment import field, resource
from .manifest import Refused, quantity
from .tools import run


class Volume:
    """A directory that containers mount."""

    def __init__(self, spec, pod, path):
        self.spec, self.pod, self.path = spec, pod, pathlib.Path(path)
        self.name = spec["name"]
        kinds = [kind for kind in spec if kind != "name"] or ["emptyDir"]
        if len(kinds) > 1:
            raise Refused(f"volume {self.name} is of two kinds: {' and '.join(kinds)}")
        self.kind = kinds[0]
        self.source = spec.get(self.kind, {})

    @property
    def is_writable(self):
        return self.kind == "emptyDir"

    async def make(self):
        self.path.mkdir(parents=True)
        if self.source.get("medium") == "Memory":
            size = int(quantity(self.source.get("sizeLimit", 0))) or "50%"
            await run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", self.path)
        if self.is_writable:
            self.path.chmod(0o777)
            if self.pod.file_group is not None:
                os.chown(self.path, -1, self.pod.file_group)
                self.path.chmod(0o2777)
        else:
            self.refresh()

    def refresh(self):
        """Brings the files up to date; returns whether they changed."""
        if self.is_writable:
            return False
        files = {}
        for source in self.source.get("sources", [{self.kind: self.source}]):
            for kind, one in source.items():
                files |= getattr(self, f"_{kind}")(one)
        return write_at_once(self.path, files, self.pod.file_group)

    def _mode(self, item):
        return item.get("mode", self.source.get("defaultMode", 0o644))

    def _downwardAPI(self, source):
        files = {}
        for item in source.get("items", []):
            if "fieldRef" in item:
                text = field(item["fieldRef"]["fieldPath"], self.pod)
            else:
                text = resource(item["resourceFieldRef"], {}, self.pod)
            files[item["path"]] = (text.encode(), self._mode(item), 0)
        return files

    def _configMap(self, source):
        return self._data("ConfigMap", source["name"], source)

    def _secret(self, source):
        return self._data("Secret", source.get("secretName") or source["name"], source)

    def _data(self, kind, name, source):
        found = self.pod.runner.files(kind, self.pod.namespace, name)
        if found is None:
            if source.get("optional"):
                return {}
            raise Refused(f"volume {self.name}: there is no {kind} {self.pod.namespace}/{name}")
        items = source.get("items", [{"key": key, "path": key} for key in found])
        for item in items:
            if item["key"] not in found:
                raise Refused(f"volume {self.name}: {kind} {name} has no key {item['key']}")
        return {item["path"]: (found[item["key"]], self._mode(item), 0) for item in items}

    def _serviceAccountToken(self, source):
        token = self.pod.runner.token(self.pod.namespace, self.pod.account, source["path"])
        # Kubelet: the only user of the pod owns the token, else all may read it.
        user = self.pod.only_user
        mode = 0o644 if user is None and self.pod.file_group is None else 0o600
        return {source["path"]: (token, mode, user or 0)}


def write_at_once(folder, files, group):
    """Replaces all files of a folder by one rename: links lead through `..data`, as kubelet's do.
    `files` are contents, modes and owners by path. Returns whether anything changed."""
    data = folder / "..data"
    if data.exists() and contents(data) == {path: file[0] for path, file in files.items()}:
        return False
    fresh = folder / f"..{time.strftime('%Y_%m_%d_%H_%M_%S')}.{time.monotonic_ns()}"
    fresh.mkdir(mode=0o755)
    for path, (content, mode, user) in files.items():
        target = fresh / path
        if ".." in pathlib.PurePath(path).parts or target == fresh or os.path.isabs(path):
            raise Refused(f"{path!r} is no path within a volume")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        os.chown(target, user, -1 if group is None else group)
        target.chmod(mode | (0o040 if group is not None else 0))
    old = os.readlink(data) if data.is_symlink() else None
    link = folder / "..data_tmp"
    link.symlink_to(fresh.name)
    link.rename(data)
    update_links(folder, {pathlib.PurePath(path).parts[0] for path in files})
    if old:
        shutil.rmtree(folder / old)
    return True


def update_links(folder, names):
    for entry in folder.iterdir():
        if entry.is_symlink() and not entry.name.startswith("..") and entry.name not in names:
            entry.unlink()
    for name in names:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


def contents(folder):
    root = folder.resolve()
    return {str(path.relative_to(root)): path.read_bytes()
            for path in root.rglob("*") if path.is_file()}
