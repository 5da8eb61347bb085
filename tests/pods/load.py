"""Requests of an application: `load.py ADDRESS:PORT HOST STOP`.

Sends until the file STOP is there, on kept and on new connections; once, if STOP is `once`. Prints JSON:
the last answer, how many were sent, and what failed. No request is repeated.
"""

import http.client
import json
import pathlib
import sys
import threading
import time

PAUSE = 0.01


def main(address, host, stop):
    load = Load(address, host)
    if stop == "once":
        load.send(load.connection())
    else:
        threads = [threading.Thread(target=load.run, args=(pathlib.Path(stop), keeps))
                   for keeps in (True, True, False, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(json.dumps({"answer": load.answer, "sent": load.sent, "failed": load.failed}))


class Load:
    def __init__(self, address, host):
        self.address, self.host = address, host
        self.answer, self.sent, self.failed = {}, 0, []

    def connection(self):
        return http.client.HTTPConnection(self.address, timeout=10)

    def run(self, stop, keeps):
        connection = self.connection()
        while not stop.exists():
            if not self.send(connection) or not keeps:
                connection.close()
                connection = self.connection()
            threading.Event().wait(PAUSE)

    def send(self, connection):
        self.sent += 1
        try:
            connection.request("GET", "/hello", headers={"host": self.host})
            response = connection.getresponse()
            body = response.read().decode()
            if response.status == 200:
                self.answer = json.loads(body)
                return True
            why = f"status {response.status}: {body[:200]}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
        self.failed.append(f"{time.strftime('%H:%M:%S')} {why}")
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
