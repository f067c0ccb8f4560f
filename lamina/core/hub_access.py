"""Access to the Hugging Face hub. Lamina tests the connection first, because the hub's clients retry for half a minute
without a network.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies


def hub_resolves() -> bool:
    """Return whether DNS knows the hub's host name. Return True behind a proxy, because the proxy looks up names."""
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
    """Restrict the hub's libraries to local files if the hub is unreachable, and yield whether the hub is reachable.

    The libraries read the environment variable for offline use only at import. So Lamina sets the offline switch in the
    libraries' modules, and restores the switch at the end.
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
