"""Start and stop a study's training runs in separate processes, which never import the caller's script."""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from lamina.core.json_types import Json
from lamina.studies.task import Task

LOST = 255  # the exit code of a run if the server has ended
_CODE = "import sys; sys.path[:] = {path!r}; from lamina.studies import worker; sys.exit(worker.{call})"


def start(task: Task, environment: Mapping[str, str] = MappingProxyType({})) -> Process:
    """Start a training run in a separate process, with additional environment variables."""
    request = {
        **task.to_request(),
        "environment": {**os.environ, **environment},
        "path": list(sys.path),
        "argv": list(sys.argv),
        "directory": os.getcwd(),
    }
    # a fork after importing torch is safe on Linux only
    return Server.running().start(request) if sys.platform.startswith("linux") else Alone(request)


def prepare() -> None:
    """Start the server early, so that it imports packages while the study does other work."""
    if sys.platform.startswith("linux"):
        Server.running()


class Server:
    """The process from which Lamina forks training runs. The server ends when the calling process ends."""

    _current: Server | None = None
    _starting = threading.Lock()

    def __init__(self) -> None:
        self.owner, self.count, self.lock = os.getpid(), 0, threading.Lock()
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.connection, remote = multiprocessing.Pipe()
        call = f"serve({remote.fileno()}, {self.owner})"
        # in a separate session: Ctrl-C reaches only the study, which then signals each run once
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CODE.format(path=sys.path, call=call)],
            stdin=subprocess.DEVNULL,
            pass_fds=[remote.fileno()],
            start_new_session=True,
        )
        remote.close()
        atexit.register(self._leave)

    @classmethod
    def running(cls) -> Server:
        """Return this process's server. Start a server if none is running."""
        with cls._starting:
            server = cls._current
            if server is None or server.owner != os.getpid() or server.process.poll() is not None:
                server = cls._current = Server()
            return server

    def start(self, request: Json) -> Forked:
        with self.lock:
            self.count += 1
            trial = Forked(server=self, number=self.count)
        self.send({**request, "number": trial.number})
        return trial

    def send(self, request: Json) -> None:
        """Send a request. If the server has ended, do nothing, because ``code`` reports the end."""
        with self.lock, contextlib.suppress(OSError):
            self.connection.send_bytes(json.dumps(request).encode())

    def code(self, number: int) -> int | None:
        """Return a run's exit code, None while the run continues, or LOST if the server ended before the run."""
        with self.lock:
            try:
                while self.connection.poll():
                    reply = json.loads(self.connection.recv_bytes())
                    (self.codes if "code" in reply else self.pids)[reply["number"]] = reply.get(
                        "code", reply.get("pid")
                    )
            except (EOFError, OSError):
                if number not in self.codes and number in self.pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self.pids[number], signal.SIGKILL)
                self.codes.setdefault(number, LOST)
            return self.codes.get(number)

    def _leave(self) -> None:
        if self.owner != os.getpid():  # a fork of this process also calls this function
            return
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)


@dataclass(kw_only=True)
class Forked:
    """A training run in a process that the server forked."""

    server: Server = field(repr=False)
    number: int

    def exit_code(self) -> int | None:
        return self.server.code(self.number)

    def terminate(self) -> None:
        """Ask the run to save a checkpoint and end."""
        self.server.send({"number": self.number, "signal": int(signal.SIGTERM)})

    def kill(self) -> None:
        self.server.send({"number": self.number, "signal": int(signal.SIGKILL)})


class Alone:
    """A training run in a new Python interpreter, with the methods of ``Forked``."""

    def __init__(self, request: Json):
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CODE.format(path=sys.path, call="alone()")],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def exit_code(self) -> int | None:
        return self.process.poll()

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()


Process: TypeAlias = Forked | Alone
