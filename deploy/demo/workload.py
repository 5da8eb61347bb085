"""The server workload: a small HTTP application that returns path and caller of each request.

It knows no certificates: it takes the caller's identity from a header that its Envoy sets.
Usage: workload.py PORT NAME
"""

import http.server
import json
import sys

TOLD = {"caller": "x-forwarded-client-cert", "client_serial": "x-demo-client-serial",
        "connection": "x-demo-connection"}


class Workload(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        answer = {name: self.headers.get(header, "") for name, header in TOLD.items()}
        answer |= {"path": self.path, "workload": sys.argv[2]}
        body = (json.dumps(answer) + "\n").encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Logs nothing: the load would fill the log."""


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Workload).serve_forever()
