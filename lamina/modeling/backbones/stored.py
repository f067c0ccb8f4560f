"""The files of a saved model: JSON objects, and the headers of safetensors. Nothing is ever unpickled."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from lamina.errors import UserError, one_line

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LARGEST_JSON = 2**26  # bytes
Shapes = dict[str, tuple[int, ...]]


def read_json(path: Path, source: str) -> dict[str, object]:
    """Read the object in a JSON file. Raises UserError, beginning with ``says``, if there is none."""
    if path.stat().st_size > _LARGEST_JSON:
        raise UserError(f"{source} has {path.stat().st_size} bytes (allowed: up to {_LARGEST_JSON})")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not JSON ({one_line(error)})") from None
    if not isinstance(data, dict):
        raise UserError(f"{source} holds {kind_of(data)} (allowed: an object)")
    return data


def kind_of(value: object) -> str:
    """A JSON value's kind in prose."""
    names = {"NoneType": "nothing", "list": "a list", "dict": "an object", "str": "a text", "bool": "true or false"}
    return names.get(type(value).__name__, "a number")


def stored_shapes(path: Path, field: str, *, pickles: bool = False) -> Shapes | None:
    """The shape of every tensor in a folder's safetensors files, by name. Checks the files' headers.

    Returns None if there are only pickled weights and ``pickles`` allows them. Raises UserError naming the file that is
    missing, cut short, altered or outside the folder.
    """
    source = f"{field} {str(path)!r}:"
    if (path / WEIGHTS).is_file():
        return _header(path / WEIGHTS, source)
    if (path / INDEX).is_file():
        return _indexed(path, source)
    others = sorted(p.name for kind in (*PICKLES, "*.gguf", "*.h5") for p in path.glob(kind))
    if others and pickles:
        return None
    content = f"has its weights in {others[0]}" if others else "has no weights"
    raise UserError(f"{field}: {str(path)!r} {content} (allowed: {WEIGHTS}; nothing is ever unpickled)")


def _indexed(path: Path, source: str) -> Shapes:
    places = read_json(path / INDEX, f"{source} {INDEX}").get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(v, str) for v in places.values()):
        raise UserError(f"{source} {INDEX}: weight_map is no table of tensors and files")
    shapes: Shapes = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise UserError(
                f"{source} {INDEX} names {one_line(repr(file))} (allowed: .safetensors files in its folder)"
            )
        if not (path / file).is_file():
            raise UserError(f"{source} {file} is missing ({INDEX} names it)")
        header = _header(path / file, source)
        lacking = sorted(k for k, v in places.items() if v == file and k not in header)
        if lacking:
            raise UserError(f"{source} {file} has no tensor {one_line(repr(lacking[0]))} ({INDEX} says so)")
        shapes |= header
    return shapes


def _header(file: Path, source: str) -> Shapes:
    try:
        with safe_open(file, framework="pt") as opened:
            return {key: tuple(opened.get_slice(key).get_shape()) for key in list(opened.keys())}
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{source} {file.name} is cut short or altered ({one_line(error)})") from None
