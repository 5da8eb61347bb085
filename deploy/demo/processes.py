"""Starts, watches and ends the processes of the demo.

Each process has a separate session and log file. `running.json` lists all processes, so the demo can end them
however it exits, and so can the next run after a demo that was left running. The demo signals a pid only if its
start time is still the listed one.
"""

import json
import os
import pathlib
import signal
import subprocess
import time


class Refused(Exception):
    """A step that failed: one sentence, and the logs that explain it."""

    def __init__(self, sentence, logs=()):
        super().__init__(sentence)
        self.logs = list(logs)


class Process:
    """One running program."""

    def __init__(self, name, command, folder, environment, log):
        self.name, self.log = name, log
        with open(log, "ab") as output:
            self.started = time.monotonic()
            try:
                self.child = subprocess.Popen(
                    command, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            except OSError as error:
                raise Refused(f"cannot start {name}: {error}") from error
        self.pid = self.child.pid
        self.birth = start_time(self.pid)

    def check(self):
        """Raises Refused if the process has exited."""
        code = self.child.poll()
        if code is not None:
            raise Refused(f"{self.name} exited unexpectedly, {how_it_ended(code)}", [self.log])

    def terminate(self, limit):
        """Sends SIGTERM; returns the exit code, and the time until the exit."""
        asked = time.monotonic()
        self.child.send_signal(signal.SIGTERM)
        try:
            code = self.child.wait(limit)
        except subprocess.TimeoutExpired:
            raise Refused(f"{self.name} still runs {limit} s after SIGTERM", [self.log]) from None
        return code, time.monotonic() - asked


class Family:
    """All processes of one run."""

    def __init__(self, register):
        self.register = pathlib.Path(register)
        self.members = []

    def start(self, name, command, folder, environment, log):
        process = Process(name, command, folder, environment, log)
        self.members.append(process)
        self._note()
        return process

    def _note(self):
        noted = [{"name": p.name, "pid": p.pid, "birth": p.birth} for p in self.members]
        self.register.write_text(json.dumps(noted, indent=1) + "\n")

    def end_all(self):
        """Ends all processes that still run: SIGTERM first, then SIGKILL."""
        end_processes([(p.pid, p.birth) for p in self.members])
        for process in self.members:
            process.child.wait()
        self.register.unlink(missing_ok=True)


def end_kept(register):
    """Ends the processes that an earlier run left; returns their names."""
    register = pathlib.Path(register)
    if not register.exists():
        return []
    noted = json.loads(register.read_text())
    alive = [entry for entry in noted if is_alive(entry["pid"], entry["birth"])]
    end_processes([(entry["pid"], entry["birth"]) for entry in alive])
    register.unlink()
    return [entry["name"] for entry in alive]


def end_processes(processes, patience=8):
    """Sends SIGTERM to each process, and after `patience` seconds SIGKILL to the rest and to their children."""
    children = [(pid, start_time(pid)) for parent, birth in processes
                if is_alive(parent, birth) for pid in descendants(parent)]
    for pid, birth in processes:
        send(pid, birth, signal.SIGTERM)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and any(is_alive(*p) for p in processes):
        time.sleep(0.05)
    for pid, birth in [*processes, *children]:
        send(pid, birth, signal.SIGKILL)


def send(pid, birth, number):
    if is_alive(pid, birth):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # It exited between the two lines.


def stat_fields(pid):
    """Returns the fields of /proc/PID/stat after the name, or None if the process does not exist."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None


def start_time(pid):
    fields = stat_fields(pid)
    return fields[19] if fields else None


def is_alive(pid, birth):
    fields = stat_fields(pid)
    return bool(fields) and fields[19] == birth and fields[0] != "Z"


def descendants(pid):
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat_fields(entry.name)):
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def resident_bytes(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise Refused(f"/proc/{pid}/status has no VmRSS line")


def how_it_ended(code):
    return f"exit code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"


def wait_until(what, check, limit, watched=(), pause=0.02):
    """Returns the first true value of `check`; raises Refused after `limit` seconds without one."""
    deadline = time.monotonic() + limit
    while True:
        for process in watched:
            process.check()
        if value := check():
            return value
        if time.monotonic() > deadline:
            raise Refused(f"gave up after {limit} s of waiting for {what}", [p.log for p in watched])
        time.sleep(pause)
