"""Programs of the machine: where they are, and runs of them."""

import asyncio
import functools
import os
import shutil
import signal

from .manifest import Refused

PACKAGES = {"capsh": "libcap2-bin", "hostname": "hostname", "ip": "iproute2"}


@functools.cache
def tool(name):
    """The path of a program."""
    found = shutil.which(name)
    if not found:
        raise Refused(f"{name} is missing: install {PACKAGES.get(name, 'util-linux')}")
    return found


async def output_of(command, limit, **settings):
    """Runs a program; returns its exit code, None if it took too long, and what it printed."""
    words = [str(word) for word in command]
    child = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT, start_new_session=True, **settings)
    try:
        async with asyncio.timeout(limit):
            output, _ = await child.communicate()
            return child.returncode, output.decode(errors="replace").strip()
    except TimeoutError:
        return None, f"it took longer than {limit} s"
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)


async def run(*command, limit=60):
    """Runs a program that must succeed; returns what it printed."""
    code, output = await output_of([tool(command[0]), *command[1:]], limit)
    if code != 0:
        raise Refused(f"{' '.join(map(str, command))}: exit code {code}: {output}")
    return output


async def child_of(process, limit=10):
    """The first child of a process, once there is one; None if the process ends before."""
    for _ in range(limit * 200):
        try:
            path = f"/proc/{process.pid}/task/{process.pid}/children"
            with open(path, encoding="ascii") as file:
                if found := file.read().split():
                    return int(found[0])
        except OSError:
            return None
        if process.returncode is not None:
            return None
        await asyncio.sleep(0.005)
    raise Refused(f"process {process.pid} has started no other after {limit} s")
