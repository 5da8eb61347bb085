"""Memory limits, by control groups of version 1 or 2."""

import pathlib
import time

from .manifest import quantity

ROOT = pathlib.Path("/sys/fs/cgroup")
OWN = "pod-runner"


def hierarchy():
    """Where groups with a memory limit can be made; None if the machine does not allow it."""
    old = ROOT / "memory"
    try:
        if (old / "cgroup.procs").exists():
            (old / OWN).mkdir(exist_ok=True)
            return old / OWN
        (ROOT / OWN).mkdir(exist_ok=True)
        for folder in (ROOT, ROOT / OWN):
            (folder / "cgroup.subtree_control").write_text("+memory")
        return ROOT / OWN
    except OSError:
        return None


class Group:
    """The group of one container."""

    def __init__(self, parent, name, limits):
        self.path = parent / name
        self.is_old = parent.parent.name == "memory"
        self.path.mkdir(exist_ok=True)
        if "memory" in limits:
            self.limit(int(quantity(limits["memory"])))

    def limit(self, size):
        """Sets the limit in bytes."""
        if self.is_old:
            (self.path / "memory.limit_in_bytes").write_text(str(size))
        else:
            (self.path / "memory.max").write_text(str(size))
            # As kubelet: all processes of a container end together.
            (self.path / "memory.oom.group").write_text("1")

    def used(self):
        """Bytes charged to the container, without files that could be dropped, as kubelet counts them."""
        used = self.path / ("memory.usage_in_bytes" if self.is_old else "memory.current")
        stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        name = "total_inactive_file" if self.is_old else "inactive_file"
        return int(used.read_text()) - int(stat.get(name, 0))

    def kills(self):
        """How many processes were ended for lack of memory."""
        file = self.path / ("memory.oom_control" if self.is_old else "memory.events")
        counters = dict(line.split() for line in file.read_text().splitlines())
        return int(counters.get("oom_kill", 0))

    def mounts(self, root):
        """What a container sees of it, as commands that run in its root."""
        target = f"{root}/sys/fs/cgroup"
        if self.is_old:
            yield ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", target]
            target += "/memory"
            yield ["mkdir", target]
        yield ["mount", "--bind", "-o", "ro", str(self.path), target]


def remove(hierarchy, pods):
    """Removes the groups of these pods; processes of a group may still be ending."""
    left = [path for pod in pods for path in hierarchy.glob(f"{pod}.*")]
    for path in [*left, hierarchy]:
        for _ in range(100):
            try:
                path.rmdir()
                break
            except OSError:
                time.sleep(0.01)
