"""Print text on a terminal. Lamina escapes control characters and shortens very long messages."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from types import TracebackType

from lamina.errors import printable, shortened

LONGEST_LINE = 2000  # characters of an error message, with the field at the beginning and the allowed values at the end
_formatter = logging.Formatter()


def escape_logs(prefix: str) -> None:
    """Escape terminal control characters in all later log lines of loggers with names that begin with ``prefix``."""
    make = logging.getLogRecordFactory()

    def escaped(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.name.startswith(prefix):
            try:
                record.msg, record.args = printable(record.getMessage()).replace("\n", "\\n"), None
            except (TypeError, ValueError):  # logging itself reports a message that does not match its arguments
                return record
            if record.exc_info and record.exc_info[0] is not None:
                record.exc_text = printable(_formatter.formatException(record.exc_info))
        return record

    logging.setLogRecordFactory(escaped)


def escape_everything() -> None:
    """Escape terminal control characters in all logs, warnings and tracebacks of this process."""
    escape_logs("")
    formatted = warnings.formatwarning
    warnings.formatwarning = lambda *args, **kwargs: printable(formatted(*args, **kwargs))
    sys.excepthook = show_traceback


def show_traceback(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, frames))))


def show_line(text: str) -> None:
    """Print a line on standard error, above an open progress bar."""
    from tqdm.auto import tqdm

    tqdm.write(printable(text), file=sys.stderr)


def show(text: object = "", end: str = "\n") -> None:
    sys.stdout.write(printable(str(text)) + end)
    sys.stdout.flush()


def show_error(message: str) -> None:
    """Print a message on standard error as one line. Cut out the middle of a very long message."""
    line = f"lamina: {shortened(printable(' '.join(message.split())), LONGEST_LINE)}"
    if "tqdm" in sys.modules:  # start a new line if a library's progress bar is open
        sys.modules["tqdm"].tqdm.write(line, file=sys.stderr)
    else:
        sys.stderr.write(f"{line}\n")
