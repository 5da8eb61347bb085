"""Finds free TCP ports.

The ports are below the range from which the kernel takes ports of outgoing connections. The load's connections
therefore cannot take a listener's port while its owner restarts. The ports are not reserved.
"""

import os
import pathlib
import random
import socket

from processes import Refused


def free_ports(names):
    """Returns a different free port for each name."""
    held, ports = [], {}
    try:
        for name in names:
            held.append(bind_somewhere())
            ports[name] = held[-1].getsockname()[1]
    finally:
        for listener in held:
            listener.close()
    return ports


def bind_somewhere():
    for port in [*random.sample(range(10000, first_outgoing_port()), 50), 0]:
        listener = socket.socket()
        try:
            listener.bind(("0.0.0.0", port))
            return listener
        except OSError:
            listener.close()
    raise Refused("found no free TCP port")


def first_outgoing_port():
    try:
        text = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        return max(int(text.split()[0]), 11000)
    except OSError:
        return 32768


def accepts(port):
    """Returns true if the port has a listener."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    except OSError:
        return False


def accepts_unix(path):
    """Returns true if the Unix socket has a listener. The path may be too long for a direct connection."""
    folder = None
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1)
            client.connect(f"/proc/self/fd/{folder}/{path.name}")
            return True
    except OSError:
        return False
    finally:
        if folder is not None:
            os.close(folder)
