"""Token blocks in a memory-mapped file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lamina.data.blocks import ArrayBlocks


class PackedBlocks(ArrayBlocks):
    """Token blocks in a memory-mapped file, [num_blocks, sequence_length]; pickling keeps the path, not the content."""

    def __init__(self, path: Path | str, dtype: str, num_blocks: int, sequence_length: int):
        self.path = Path(path)
        self.dtype = np.dtype(dtype)
        self.shape = (num_blocks, sequence_length)
        self._array: np.ndarray | None = None

    @property
    def array(self) -> np.ndarray:
        """The token ids, [num_blocks, sequence_length] of uint16 or uint32, read-only, mapped at first use."""
        if self._array is None:
            self._array = np.memmap(self.path, dtype=self.dtype, mode="r", shape=self.shape)
        return self._array

    def __len__(self) -> int:
        return self.shape[0]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_array": None}
