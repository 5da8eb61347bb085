"""A gRPC server and gRPC clients that use gRPC's C core. Messages are bytes.

serve                  prints its port, and responds to /echo/Say
say TARGET             prints the response of such a server
stream SOCKET METHOD   sends standard input as a request on a Unix socket, and prints the first response
"""

import queue
import sys
from concurrent import futures

import grpc

LIMIT = 30


def serve():
    handler = grpc.unary_unary_rpc_method_handler(lambda request, _: b"heard " + request)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("echo", {"Say": handler})]
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


def say(target):
    with grpc.insecure_channel(target) as channel:
        answer = channel.unary_unary("/echo/Say")(b"hello", timeout=LIMIT, wait_for_ready=True)
        print(answer.decode())


def stream(socket, method):
    requests = queue.SimpleQueue()
    requests.put(sys.stdin.buffer.read())
    with grpc.insecure_channel("unix:" + socket) as channel:
        responses = channel.stream_stream(method)(iter(requests.get, None), timeout=LIMIT)
        sys.stdout.buffer.write(next(responses))
        requests.put(None)


{"serve": serve, "say": say, "stream": stream}[sys.argv[1]](*sys.argv[2:])
