"""Access to the Hugging Face hub, with a fast test of the connection."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies


def hub_resolves() -> bool:
    """Return whether DNS can resolve the hub's host name. Behind a proxy, return True, because the proxy resolves
    names.
    """
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
    """Restrict the hub's libraries to local files if the hub is unreachable. Yield whether the hub is reachable.

    The libraries read the environment variable HF_HUB_OFFLINE only at import, so Lamina sets their internal switches.
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
