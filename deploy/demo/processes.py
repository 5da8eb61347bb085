"""Starts, watches and ends the processes of the demo.

Each process has a session and a log file of its own and is noted in `running.json`, so that every
way out of the demo, and the next run after a kept one, can end it with all it started. A pid is
only signalled while its start time is the noted one.
"""

import json
import os
import pathlib
import signal
import subprocess
import time


class Refused(Exception):
    """A step that did not succeed: one sentence, and the logs that tell more."""

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
        """Refuses to go on when the process has ended."""
        code = self.child.poll()
        if code is not None:
            raise Refused(f"{self.name} ended unexpectedly, {how_it_ended(code)}", [self.log])

    def terminate(self, limit):
        """Asks the process to end; returns its exit code and how long it took."""
        asked = time.monotonic()
        self.child.send_signal(signal.SIGTERM)
        try:
            code = self.child.wait(limit)
        except subprocess.TimeoutExpired:
            raise Refused(f"{self.name} still ran {limit} s after SIGTERM", [self.log]) from None
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
        """Ends whatever still runs, first politely."""
        end_processes([(p.pid, p.birth) for p in self.members])
        for process in self.members:
            process.child.wait()
        self.register.unlink(missing_ok=True)


def end_kept(register):
    """Ends the processes a kept run left; returns their names."""
    register = pathlib.Path(register)
    if not register.exists():
        return []
    noted = json.loads(register.read_text())
    alive = [entry for entry in noted if is_alive(entry["pid"], entry["birth"])]
    end_processes([(entry["pid"], entry["birth"]) for entry in alive])
    register.unlink()
    return [entry["name"] for entry in alive]


def end_processes(processes, patience=8):
    """SIGTERM to each, SIGKILL to what is left of them and of their children after `patience`."""
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
            pass  # It ended between the two lines.


def stat_fields(pid):
    """The fields of /proc/PID/stat after the name, or None when there is no such process."""
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
    """Returns the first true value of `check`; refuses when none came within `limit` seconds."""
    deadline = time.monotonic() + limit
    while True:
        for process in watched:
            process.check()
        if value := check():
            return value
        if time.monotonic() > deadline:
            raise Refused(f"waited {limit} s for {what}, in vain", [p.log for p in watched])
        time.sleep(pause)
