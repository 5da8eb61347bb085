"""An application: answers under any path with what it saw of the request."""

import http.server
import json
import signal
import sys


class Application(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        seen = {"path": self.path, "client": self.client_address[0],
                "caller": self.headers.get("x-forwarded-client-cert", "")}
        body = json.dumps(seen).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Says nothing: the load would fill the log."""


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


if __name__ == "__main__":
    # The first process of a container has no handler by default, so that signals would not end it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    Server(("0.0.0.0", int(sys.argv[1])), Application).serve_forever()
