"""A gRPC application that speaks xDS: `serve PORT`, or `say TARGET`. Certificates are the agent's."""

import signal
import sys
import threading
from concurrent import futures

import grpc
import grpc.experimental

LIMIT = 20


def serve(port):
    def answer(request, context):
        peer = context.auth_context().get("peer_spiffe_id", context.auth_context().get(
            "x509_subject_alternative_name", [b"no certificate"]))
        return b"heard " + request + b" of " + peer[0]
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.server(futures.ThreadPoolExecutor(2), xds=True)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("echo", {"Say": handler})])
    security = grpc.xds_server_credentials(grpc.insecure_server_credentials())
    server.add_secure_port(f"0.0.0.0:{port}", security)
    server.start()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()


def say(target):
    security = grpc.xds_channel_credentials(
        grpc.experimental.insecure_channel_credentials())
    with grpc.secure_channel(target, security) as channel:
        answer = channel.unary_unary("/echo/Say")(b"hello", timeout=LIMIT, wait_for_ready=True)
        print(answer.decode())


{"serve": serve, "say": say}[sys.argv[1]](*sys.argv[2:])
