"""A bridge of this machine, and a network namespace per pod with an address on it (IPv4)."""

import asyncio
import ipaddress
import os
import signal
import zlib

from .manifest import Refused
from .tools import child_of, run, tool

BRIDGE = "pod-runner"


class Network:
    """The bridge. The machine has its first address, pods have the others."""

    def __init__(self, subnet):
        try:
            self.subnet = ipaddress.IPv4Network(subnet)
        except ValueError as error:
            raise Refused(f"--subnet {subnet}: {error}") from error
        self.free = self.subnet.hosts()
        self.host = str(next(self.free))
        self.is_up = False

    async def start(self):
        if f"{BRIDGE}:" in await run("ip", "-o", "link", "show", "type", "bridge"):
            if await run("ip", "-o", "link", "show", "master", BRIDGE):
                raise Refused(f"another pod-runner has pods on the bridge {BRIDGE}")
            await run("ip", "link", "del", BRIDGE)  # Left over from one that was killed.
        await run("ip", "link", "add", BRIDGE, "type", "bridge")
        self.is_up = True
        await run("ip", "address", "add", f"{self.host}/{self.subnet.prefixlen}", "dev", BRIDGE)
        await run("ip", "link", "set", BRIDGE, "up")

    async def stop(self):
        if self.is_up:
            await run("ip", "link", "del", BRIDGE)

    def address(self):
        """An address of its own for a pod."""
        try:
            return str(next(self.free))
        except StopIteration:
            raise Refused(f"the subnet {self.subnet} has no address left") from None


class Sandbox:
    """The namespaces the containers of a pod share: network, host name, IPC. A process holds them,
    as the pause container does."""

    def __init__(self, name, address, network):
        self.name, self.address, self.network = name, address, network
        self.process = self.pid = None

    async def start(self, sysctls):
        self.process = await asyncio.create_subprocess_exec(
            tool("unshare"), "--net", "--uts", "--ipc", "--fork", "--kill-child", "sleep", "infinity",
            stdin=asyncio.subprocess.DEVNULL)
        self.pid = await child_of(self.process)
        interface = f"pod{zlib.crc32(self.address.encode()):08x}"
        await run("ip", "link", "add", interface, "type", "veth", "peer", "name", "eth0",
                  "netns", self.pid)
        await run("ip", "link", "set", interface, "master", BRIDGE, "up")
        prefix = self.network.subnet.prefixlen
        script = f"""
            hostname {self.name}
            ip link set lo up
            ip address add {self.address}/{prefix} dev eth0
            ip link set eth0 up
            ip route add default via {self.network.host}
        """
        await run(*self.enter(), "sh", "-ec", script)
        for sysctl in sysctls:
            if not sysctl["name"].startswith("net."):
                raise Refused(f"sysctl {sysctl['name']}: pod-runner knows those of net only")
            path = f"/proc/sys/{sysctl['name'].replace('.', '/')}"
            await run(*self.enter(), "sh", "-ec", 'echo "$1" >"$0"', path, sysctl["value"])

    def enter(self):
        """The words before a command that is to run in these namespaces."""
        return [tool("nsenter"), f"--target={self.pid}", "--net", "--uts", "--ipc"]

    async def stop(self):
        if self.process and self.process.returncode is None:
            os.kill(self.pid, signal.SIGTERM)
            await self.process.wait()
