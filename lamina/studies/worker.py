"""Execute a study's training runs in separate processes, without importing your script or notebook again."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from lamina.core.json_types import Json
from lamina.core.terminal import escape_everything, show_traceback
from lamina.errors import UserError
from lamina.jobs.environment import environment
from lamina.jobs.files import disk_full, read_result, write_json
from lamina.jobs.kinds import Kind
from lamina.jobs.names import ENVIRONMENT
from lamina.jobs.seals import write_result
from lamina.jobs.signals import STOP_SIGNALS, watch_parent
from lamina.jobs.status import ENDED
from lamina.studies.task import Busy, task_of

DISK_FULL = 74  # EX_IOERR of sysexits.h
BUSY = 75  # EX_TEMPFAIL: another process already executes the run
ROUND_SECONDS = 0.05


def serve(descriptor: int, driver: int) -> NoReturn:
    """Fork a training run for each request, and report each run's exit code. Stop when the calling process ends."""
    for number in STOP_SIGNALS:  # the calling process signals each run; the server ends with the calling process
        signal.signal(number, signal.SIG_IGN)
    # the server has imported torch and transformers, so that a run starts in milliseconds
    connection = Connection(descriptor)
    import lamina.training.pretrain  # noqa: F401  # loaded before the first fork

    gc.freeze()  # no run collects these objects, because collecting would copy their memory

    server, running = os.getpid(), {}
    with contextlib.suppress(EOFError, OSError):  # the calling process ended; the runs notice this and stop
        while os.getppid() == driver:
            request = json.loads(connection.recv_bytes()) if connection.poll(ROUND_SECONDS) else {}
            if "settings" in request:
                signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the run handles them
                if (pid := os.fork()) == 0:
                    connection.close()
                    watch_parent(server)
                    os.setsid()
                    _end_with(request)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
                running[pid] = request["number"]
                connection.send_bytes(json.dumps({"number": running[pid], "pid": pid}).encode())
            elif "signal" in request:
                for pid in (pid for pid, number in running.items() if number == request["number"]):
                    os.kill(pid, request["signal"])
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    reply = {"number": running.pop(pid), "code": os.waitstatus_to_exitcode(status)}
                    connection.send_bytes(json.dumps(reply).encode())
    os._exit(0)  # at once, because the runs wait for the server's end


def alone() -> int:
    """Execute the run that standard input describes. Lamina uses this function where forking is not safe."""
    request = json.loads(sys.stdin.readline())

    def wait() -> None:
        sys.stdin.read()  # ends when the calling process ends
        watch_parent(-1)

    threading.Thread(target=wait, daemon=True).start()
    return run(request)


def run(request: Json) -> int:
    """Execute a run, and write its printed output to log.txt. Returns the exit code."""
    folder = Path(request["directory"]) / request["settings"]["output"]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.default_int_handler)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        _like_the_driver(request)
        task, rank = task_of(request), int(os.environ.get("RANK", "0"))
        with task.claim() if rank == 0 else contextlib.nullcontext():
            if rank == 0:  # marks the folder as a run's folder before the log exists
                write_json(folder / ENVIRONMENT, environment(getattr(task.settings, "seed", 0), Kind.RUN))
            name = f"log-{rank}.txt" if rank else "log.txt"
            with (folder / name).open("a", encoding="utf-8") as log:
                sys.stdout.flush()
                for stream in (1, 2):
                    os.dup2(log.fileno(), stream)
                escape_everything()
                task.run()
    except Busy:
        return BUSY
    except KeyboardInterrupt:
        _note(folder, "interrupted", "stopped before it started")
    except Exception as error:
        if disk_full(error):
            return DISK_FULL
        _note(folder, "failed", str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
        show_traceback(type(error), error, error.__traceback__)
        return 1
    return 0


def _note(folder: Path, status: str, reason: str) -> None:
    """Write a run's status and reason to result.json, unless result.json already has a final status."""
    if (read_result(folder) or {}).get("status") not in ENDED:
        write_result(folder, {"status": status, "reason": reason})


def _end_with(request: Json) -> NoReturn:
    """Execute a run, then end the process at once, because freeing the memory takes longer than starting a run."""
    code = 1
    try:
        code = run(request)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _like_the_driver(request: Json) -> None:
    """Copy the environment variables, sys.path, sys.argv and working directory of the calling process."""
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:], sys.argv[:] = request["path"], request["argv"]
    os.chdir(request["directory"])
