"""Parse the command line and call the command. Lamina imports no heavy package before it knows the command."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
import traceback

from lamina.catalog import COMMANDS, GROUPS, JOBS
from lamina.core.extras import missing_extra
from lamina.core.terminal import escape_everything, show_error
from lamina.errors import UserError, is_reported, nearest, out_of_memory, shortened
from lamina.jobs.signals import interruptible_imports

# Errors of the user's paths and disk. Any other error is a fault of Lamina, and Lamina prints the traceback.
_USER_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST, errno.EMFILE),
    errno.ECONNRESET,  # another process of the run has ended
}

USAGE = """lamina: choose where the norms sit in a Transformer, train the model, and see what each layer does

usage: lamina COMMAND [OPTIONS]        (for the options: lamina COMMAND --help)

{commands}

examples:
  lamina compare                                      six placements, 24 layers deep, in about three minutes
  lamina compare --corpus my_texts/ --num-layers 24 --learning-rates 1e-3,3e-3,1e-2 --output runs/mine
  lamina placements keel
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 for a failed run, 2 for a user's mistake, or 130 for Ctrl-C."""
    try:
        try:
            if argv is None:  # the process is ours
                for stream in (
                    sys.stdout,
                    sys.stderr,
                ):  # print the number of a character that the terminal does not have
                    stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
                escape_everything()
                with interruptible_imports(lambda: _interrupted(*sys.argv[1:2])):
                    return _main(sys.argv[1:])
            return _main(argv)
        finally:
            sys.stdout.flush()  # here, Lamina can still distinguish a closed pipe from a fault
    except BrokenPipeError:  # `lamina placements | head`
        with contextlib.suppress(OSError, ValueError):  # discard the rest of the buffer
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        listed = [[f"{group}:", *(f"  {name:<12} {text}" for name, text in GROUPS[group].items())] for group in GROUPS]
        print(USAGE.format(commands="\n\n".join("\n".join(lines) for lines in listed)))
        return 0
    if argv[0] in ("-V", "--version"):
        from lamina import __version__

        print(f"lamina {__version__}")
        return 0
    name, *rest = argv
    try:
        if name not in COMMANDS:
            quoted = shortened(repr(name), 200)
            raise UserError(f"unknown command {quoted}{nearest(name, COMMANDS)} (allowed: {', '.join(COMMANDS)})")
        # Messages of Trainer and the tokenizers are for developers. Lamina prints everything that users must know.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        if name in JOBS and not JOBS[name].own_command:
            from lamina.commands import run_job

            return run_job.run(JOBS[name], rest)
        return importlib.import_module(f"lamina.commands.{name}").run(rest)
    except UserError as error:
        return _fail(str(error), 2, reported=is_reported(error))
    except ModuleNotFoundError as error:
        if (line := missing_extra(name, error)) is None:
            raise
        return _fail(str(line), 2)
    except KeyboardInterrupt:
        return _interrupted(name)
    except SystemExit as error:
        *_, (raised_in, _) = traceback.walk_tb(error.__traceback__)
        if str(raised_in.f_globals.get("__name__")).startswith("lamina.commands."):  # --help
            raise
        return _fail(f"code in one of your files ended the process ({error.code!r}). Finished work is kept", 1)
    except OSError as error:
        if error.errno not in _USER_ERRORS:  # including a closed pipe
            raise
        where = f": {error.filename}" if error.filename else ""
        return _fail(f"{error.strerror}{where}. Finished work is kept", 2, reported=is_reported(error))
    except Exception as error:
        if (reason := out_of_memory(error)) is None:
            raise
        lower = "--batch-size, --sequence-length, --hidden-size, --num-layers or --workers"
        return _fail(f"{reason}. Finished work is kept. Lower the command's {lower}.", 2)


def _interrupted(command: str = "") -> int:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    resumes = command in JOBS and JOBS[command].resumes
    return _fail(f"interrupted{'; finished work is kept (continue with --resume)' if resumes else ''}", 130)


def _fail(message: str, code: int, *, reported: bool = False) -> int:
    if not reported:
        show_error(message)
    return code


if __name__ == "__main__":
    sys.exit(main())
