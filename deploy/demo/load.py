"""Sends steady requests from the client workload, on open and on new connections, and checks every response.

Four threads send to the client's Envoy: two use one open connection each, two open a connection for each request. For
each of the latter, the client's Envoy opens a new mTLS connection. A request succeeds if the status is 200, and both
identities are the expected ones. Failed requests are not retried.
"""

import collections
import http.client
import json
import threading
import time

from envoy import serial

PAUSE = 0.02


class Answer:
    """The response to one request."""

    def __init__(self, response, body):
        self.status = response.status
        self.server_identity = response.getheader("x-demo-server-identity", "")
        told = json.loads(body) if self.status == 200 else {}
        self.caller = uri_of(told.get("caller", ""))
        self.client_serial = serial(told.get("client_serial", ""))
        self.connection = told.get("connection", "")
        self.workload = told.get("workload", "")
        self.version = told.get("path", "").strip("/").split("/")[0]


def uri_of(forwarded):
    """Returns the URI in an x-forwarded-client-cert header."""
    parts = dict(part.split("=", 1) for part in forwarded.split(";") if "=" in part)
    return parts.get("URI", "")


def ask(connection, path):
    connection.request("GET", path, headers={"host": "server.demo.svc.cluster.local"})
    response = connection.getresponse()
    return Answer(response, response.read())


def ask_once(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        return ask(connection, path)
    finally:
        connection.close()


class Load:
    """The running load, and its counts."""

    def __init__(self, port, client_identity, server_identity):
        self.port = port
        self.expected = (client_identity, server_identity)
        self.lock = threading.Lock()
        self.counts = collections.Counter()
        self.failures = []
        self.serials, self.handshakes, self.versions = set(), set(), collections.Counter()
        self.requests, self.latest = collections.Counter(), {}  # By workload.
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=run, daemon=True)
                        for run in (self._keep, self._keep, self._open_new, self._open_new)]

    def start(self):
        for thread in self.threads:
            thread.start()

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join(timeout=10)

    def so_far(self):
        """Returns the totals so far: requests on open and on new connections, failed requests, mTLS connections."""
        with self.lock:
            return {"kept": self.counts["kept"], "new": self.counts["new"],
                    "failed": len(self.failures), "handshakes": len(self.handshakes)}

    def serials_seen(self):
        with self.lock:
            return set(self.serials)

    def first_failures(self):
        with self.lock:
            return self.failures[:3]

    def _keep(self):
        connection = None
        while not self.stopping.wait(PAUSE):
            connection = connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            if not self._send(connection, "/hello", "kept"):
                connection.close()
                connection = None

    def _open_new(self):
        while not self.stopping.wait(PAUSE):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            self._send(connection, "/fresh/hello", "new")
            connection.close()

    def _send(self, connection, path, kind):
        try:
            answer = ask(connection, path)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return self._fail(kind, f"{type(error).__name__}: {error}")
        if answer.status != 200:
            return self._fail(kind, f"status {answer.status}")
        if (answer.caller, answer.server_identity) != self.expected:
            return self._fail(kind, f"seen {answer.caller!r} calling {answer.server_identity!r}")
        return self._count(kind, answer)

    def _count(self, kind, answer):
        with self.lock:
            self.counts[kind] += 1
            self.versions[answer.version] += 1
            self.requests[answer.workload] += 1
            self.latest[answer.workload] = time.monotonic()
            if kind == "new":
                self.handshakes.add((answer.workload, answer.connection))
                self.serials.add(answer.client_serial)
        return True

    def _fail(self, kind, why):
        with self.lock:
            self.failures.append(f"{time.strftime('%H:%M:%S')} on a {kind} connection: {why}")
        return False
