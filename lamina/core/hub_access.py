"""Access to the Hugging Face hub, with a fast test of the connection."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from lamina.core.values import nearby
from lamina.errors import UserError


def hub_resolves() -> bool:
    from huggingface_hub import constants

    if getproxies():  # the proxy resolves names
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return False
    return True


@contextmanager
def local_when_unreachable() -> Iterator[bool]:
    """Restrict the hub's libraries to local files if the hub is unreachable. Yield whether the hub is reachable."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or hub_resolves():
        yield not constants.HF_HUB_OFFLINE
        return
    # After their import, the libraries no longer read the environment variable HF_HUB_OFFLINE.
    switches = [constants, *([sys.modules["datasets"].config] if "datasets" in sys.modules else [])]
    for switch in switches:
        switch.HF_HUB_OFFLINE = True
    try:
        yield False
    finally:
        for switch in switches:
            switch.HF_HUB_OFFLINE = False


def refuse_missing_model(field: str, name: str) -> None:
    """Raise UserError if a saved model is neither on this machine nor on the hub. This function loads no torch."""
    if Path(name).exists():
        return
    from huggingface_hub import hf_hub_download

    try:
        with local_when_unreachable():
            hf_hub_download(name, "config.json")
    except Exception as error:
        if there := nearby(name):
            raise UserError(f"{field}: {name!r} does not exist{there}. Check the name.") from error
        raise UserError(
            f"{field}: {name!r} is neither a folder nor a model on the hub that Lamina can read. Check the name and "
            "the connection."
        ) from error
