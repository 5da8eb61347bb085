"""Responds to each TCP connection and UDP datagram with the port at which it arrived.

Usage: receiver.py NAME ADDRESSES PORTS. The addresses and the ports are separated by commas. TCP is accepted at any
address; if the user is root, also at addresses that this machine does not have (IP_TRANSPARENT). The response is
`NAME PORT DESTINATION`, with the destination before a redirect. UDP is received at ADDRESSES; the response is
`NAME PORT`.
"""

import ipaddress
import os
import selectors
import socket
import sys

SO_ORIGINAL_DST = 80
IP_TRANSPARENT = 19
IPV6_TRANSPARENT = 75

name, addresses, ports = sys.argv[1:]
selector = selectors.DefaultSelector()


def destination(stream):
    """Returns the address and port to which the client has connected, before a redirect."""
    is_v6 = stream.family == socket.AF_INET6
    level, size = (socket.IPPROTO_IPV6, 28) if is_v6 else (socket.IPPROTO_IP, 16)
    try:
        raw = stream.getsockopt(level, SO_ORIGINAL_DST, size)
    except OSError:
        address, port = stream.getsockname()[:2]
    else:
        port = int.from_bytes(raw[2:4], "big")
        address = ipaddress.ip_address(raw[8:24] if is_v6 else raw[4:8])
    return f"[{address}]:{port}" if is_v6 else f"{address}:{port}"


def accept(listener, port):
    stream, _ = listener.accept()
    with stream:
        stream.sendall(f"{name} {port} {destination(stream)}".encode())


def receive(receiver, port):
    _, sender = receiver.recvfrom(100)
    receiver.sendto(f"{name} {port}".encode(), sender)


def bound(kind, address, port):
    is_v6 = ":" in address
    bound = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, kind)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_v6:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    if os.geteuid() == 0:
        transparent = IPV6_TRANSPARENT if is_v6 else IP_TRANSPARENT
        bound.setsockopt(socket.IPPROTO_IPV6 if is_v6 else socket.IPPROTO_IP, transparent, 1)
    bound.bind((address, port))
    return bound


for port in map(int, ports.split(",")):
    for address in ("0.0.0.0", "::"):
        listener = bound(socket.SOCK_STREAM, address, port)
        listener.listen()
        selector.register(listener, selectors.EVENT_READ, (accept, port))
    for address in addresses.split(","):
        receiver = bound(socket.SOCK_DGRAM, address, port)
        selector.register(receiver, selectors.EVENT_READ, (receive, port))
print("ready", flush=True)
while True:
    for key, _ in selector.select():
        answer, port = key.data
        try:
            answer(key.fileobj, port)
        except OSError as error:
            print(f"{name} {port}: {error}", file=sys.stderr)
