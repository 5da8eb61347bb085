"""A copy of this machine on which packages are installed."""

import hashlib
import pathlib
import stat
import subprocess
import sys

USER = "istio-proxy"


def run(*words, **more):
    return subprocess.run(words, check=True, text=True, stdin=subprocess.DEVNULL, **more)


class Machine:
    """An overlay with the files of this machine in a directory. Changes there do not change this machine."""

    def __init__(self, folder):
        changed, work, self.root = (pathlib.Path(folder, name) for name in ("changed", "work", "root"))
        for path in (changed, work, self.root):
            path.mkdir(parents=True)
        layers = f"lowerdir=/,upperdir={changed},workdir={work}"
        run("mount", "-t", "overlay", "overlay", "-o", layers, str(self.root))
        for path in ("/dev", "/proc"):
            run("mount", "--rbind", path, f"{self.root}{path}")
        # With an empty /run, programs find no running systemd.
        run("mount", "-t", "tmpfs", "tmpfs", f"{self.root}/run")

    def path(self, path):
        # /etc/istio is an absolute link, which would lead out of the copy.
        return self.root / path.replace("/etc/istio/", "/var/lib/istio/").lstrip("/")

    def dpkg(self, *words):
        run("dpkg", f"--root={self.root}", *words, stdout=subprocess.DEVNULL)

    def facts(self, path):
        """Returns mode, owners and hash of a file."""
        found = self.path(path).lstat()
        content = self.path(path).read_bytes() if stat.S_ISREG(found.st_mode) else b""
        return stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, hashlib.sha256(content).hexdigest()

    def user(self):
        lines = self.path("/etc/passwd").read_text().splitlines()
        return [line.split(":")[2:] for line in lines if line.startswith(f"{USER}:")]


def expect(what, found, expected):
    if found != expected:
        sys.exit(f"{what}: found {found}, expected {expected}")
