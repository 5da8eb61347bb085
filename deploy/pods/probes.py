"""Startup, readiness and liveness probes, with kubelet's defaults."""

import asyncio
import ssl

from .manifest import Refused


class Probe:
    """One probe of a container."""

    def __init__(self, spec, container):
        self.spec, self.container = spec, container
        self.timeout = spec.get("timeoutSeconds", 1)

    async def watch(self, report):
        """Probes for ever; calls `report` with the outcome once it is there often enough in a row."""
        await asyncio.sleep(self.spec.get("initialDelaySeconds", 0))
        thresholds = {True: self.spec.get("successThreshold", 1),
                      False: self.spec.get("failureThreshold", 3)}
        last, times = None, 0
        while True:
            succeeded, why = await self.once()
            times = times + 1 if succeeded == last else 1
            last = succeeded
            if times == thresholds[succeeded]:
                report(succeeded, why)
            await asyncio.sleep(self.spec.get("periodSeconds", 10))

    async def succeeds(self):
        """Probes until it succeeds; returns the reason if it fails too often."""
        done = asyncio.get_running_loop().create_future()

        def report(succeeded, why):
            if not done.done():
                done.set_result(None if succeeded else why)
        watching = asyncio.create_task(self.watch(report))
        try:
            return await done
        finally:
            watching.cancel()

    async def once(self):
        """Whether it succeeds now, and what it found."""
        if action := self.spec.get("exec"):
            code, output = await self.container.execute(action["command"], self.timeout)
            return code == 0, f"exit code {code}: {output[-200:]}"
        try:
            async with asyncio.timeout(self.timeout):
                if action := self.spec.get("httpGet"):
                    status = await get(action, self.container)
                    return 200 <= status < 400, f"status {status}"
                action = self.spec.get("tcpSocket") or {}
                _, writer = await asyncio.open_connection(
                    *address(action, self.container))
                writer.close()
                return True, "connected"
        except (OSError, ValueError) as error:
            return False, f"{type(error).__name__}: {error}"


async def get(action, container):
    """The status of an HTTP request from this machine to the pod."""
    host, port = address(action, container)
    context = None
    if action.get("scheme") == "HTTPS":
        context = ssl._create_unverified_context()  # Kubelet does not verify either.
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        headers = {"host": f"{host}:{port}", "user-agent": "kube-probe/1.34", "accept": "*/*",
                   "connection": "close"}
        headers |= {one["name"].lower(): one["value"] for one in action.get("httpHeaders", [])}
        path = "/" + action.get("path", "/").removeprefix("/")
        lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        words = (await reader.readline()).split()
        if len(words) < 2 or not words[0].startswith(b"HTTP/"):
            raise ValueError(f"the answer is not HTTP: {words[:3]}")
        return int(words[1])
    finally:
        writer.close()


def address(action, container):
    """Host and port; a port may be the name of one of the container's."""
    port = action.get("port")
    if isinstance(port, str) and not port.isdigit():
        named = [one["containerPort"] for one in container.spec.get("ports", [])
                 if one.get("name") == port]
        if not named:
            raise Refused(f"container {container.name} has no port {port}")
        port = named[0]
    return action.get("host", container.pod.address), int(port)
