"""Whether the Hugging Face hub is worth asking: its clients retry for half a minute where there is no network."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies


def hub_resolves() -> bool:
    """Whether the hub's host has an address; taken to be so behind a proxy, which looks names up itself."""
    from huggingface_hub import constants

    if getproxies():
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return False
    return True


@contextmanager
def local_when_unreachable() -> Iterator[bool]:
    """Inside, the hub's libraries use only what is on disk if the hub has no address; yields whether it is asked.

    They read their offline switch from the environment when imported, so it is turned in place, and back afterwards.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or hub_resolves():
        yield not constants.HF_HUB_OFFLINE
        return
    switches = [constants, *([sys.modules["datasets"].config] if "datasets" in sys.modules else [])]
    for switch in switches:
        switch.HF_HUB_OFFLINE = True
    try:
        yield False
    finally:
        for switch in switches:
            switch.HF_HUB_OFFLINE = False


def one_line(error: Exception) -> str:
    """An exception as ``Type: first line``, for a message that must be one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.:')}" if lines else type(error).__name__
