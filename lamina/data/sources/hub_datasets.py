"""Datasets from the Hugging Face hub, or from a local folder that the datasets library can read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from lamina.core.extras import install
from lamina.core.hub_access import local_when_unreachable
from lamina.errors import UserError, one_line, unknown

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

    OneSplit: TypeAlias = Dataset | IterableDataset
    Loaded: TypeAlias = OneSplit | DatasetDict | IterableDatasetDict

PREFIX = "hf:"
ALLOWED = "hf:NAME[:CONFIG][@SPLIT]"


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """The parts of ``hf:NAME[:CONFIG][@SPLIT]``. ``folder`` is the path if NAME is a local folder, otherwise None.

    Error messages begin with ``field``, the name of the setting.
    """

    spec: str
    name: str
    config: str | None
    split: str | None
    folder: Path | None
    field: str = "corpus"


def is_hub(corpus: str) -> bool:
    """Return whether Lamina loads this corpus with the datasets library."""
    return corpus.startswith(PREFIX)


def parse(spec: str, field: str = "corpus") -> HubSource:
    """Split ``hf:NAME[:CONFIG][@SPLIT]`` into its parts. Raises UserError if the name is missing."""
    name, config, split = spec.removeprefix(PREFIX), "", ""
    # the name of a folder may contain ':' or '@', so the name of an existing folder is not split
    if not Path(name).expanduser().is_dir() and "@" in name:
        name, _, split = name.rpartition("@")
    if not Path(name).expanduser().is_dir() and ":" in name:
        name, _, config = name.rpartition(":")
    if not name:
        raise UserError(f"{field}: {spec!r} names no dataset. Write {ALLOWED}.")
    folder = Path(name).expanduser()
    if folder.is_file():
        raise UserError(f"{field}: {spec!r} names a file on this machine. Write {name} without {PREFIX}.")
    known = folder if folder.is_dir() else None
    return HubSource(spec=spec, name=name, config=config or None, split=split or None, folder=known, field=field)


def load(source: HubSource) -> Dataset:
    """Load one split of a dataset: the named split, or else ``train``, or else the only split."""
    return cast("Dataset", _one_split(source, _loaded(source)))


def load_splits(source: HubSource, held_out: Sequence[str]) -> list[Dataset]:
    """Load the named split, or else the training split and the first split in ``held_out`` that exists."""
    loaded = _loaded(source)
    first = cast("Dataset", _one_split(source, loaded))
    splits = [name for name in held_out if isinstance(loaded, dict) and name in loaded]
    if source.split or not splits or str(first.split) in held_out:
        return [first]
    return [first, cast("Dataset", loaded[splits[0]])]


def stream(source: HubSource) -> tuple[IterableDataset, str]:
    """Return a split as a stream, and a hash that identifies the dataset. Raises the same errors as :func:`load`."""
    if source.folder is not None and _was_saved_to_disk(source.folder):
        saved = load(source)
        return saved.to_iterable_dataset(), saved._fingerprint
    streamed = cast("IterableDataset", _one_split(source, _loaded(source, streaming=True)))
    import datasets

    name = str(source.folder or source.name)
    return streamed, datasets.load_dataset_builder(name, source.config).hash or ""


def texts(spec: str, rows: Iterable[Mapping[str, object]], text_field: str) -> Iterator[str]:
    """Yield the texts in a dataset's column. A null becomes an empty text. Raises UserError for any other value."""
    for row in rows:
        if text_field not in row:
            raise unknown("text_field", text_field, row, f"corpus {spec!r}")
        text = row[text_field]
        if text is not None and not isinstance(text, str):
            raise UserError(f"corpus: {spec!r}: the column {text_field!r} must hold strings, not {type(text).__name__}")
        yield text or ""


def _loaded(source: HubSource, *, streaming: bool = False) -> Loaded:
    try:
        import datasets
    except ImportError:
        raise UserError(f"{source.field}: {source.spec!r} needs the datasets library. Run: {install('hub')}") from None
    reachable = True
    try:
        if source.folder is None:
            with local_when_unreachable() as reachable:
                return datasets.load_dataset(source.name, source.config, split=source.split, streaming=streaming)
        if _was_saved_to_disk(source.folder):
            return datasets.load_from_disk(str(source.folder))
        return datasets.load_dataset(str(source.folder), source.config, split=source.split, streaming=streaming)
    # datasets, huggingface_hub, fsspec and httpx raise dozens of types; only the text matters to the user
    except Exception as error:
        reason = one_line(error) if reachable else "the hub cannot be reached, and this machine has no copy"
        raise UserError(
            f"{source.field}: {source.spec!r} could not be loaded ({reason}). Check the name ({ALLOWED}) and the "
            "network, or give a local file."
        ) from error


def _was_saved_to_disk(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _one_split(source: HubSource, loaded: Loaded) -> OneSplit:
    if not isinstance(loaded, dict):
        if source.split and str(loaded.split) not in (source.split, "None", source.split.partition("[")[0]):
            raise unknown("split", source.split, [str(loaded.split)], f"{source.field} {source.spec!r}")
        return loaded
    splits = cast("dict[str, OneSplit]", loaded)
    name = source.split or ("train" if "train" in splits else next(iter(splits)))
    if name not in splits:
        raise unknown("split", name, splits, f"{source.field} {source.spec!r}")
    if source.split is None and name != "train" and len(splits) > 1:
        raise UserError(
            f"{source.field}: {source.spec!r} has several splits. Append @ and one of {', '.join(sorted(splits))}."
        )
    return splits[name]
