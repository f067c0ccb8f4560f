"""A set of runs recorded at one revision and compared, bit for bit, with the same set at another.

For a change that must change nothing. The runs go through the command line only, so that the package that they test is
whatever ``PYTHONPATH`` names; times and machine are left out of the comparison:

    python -m tools.reliability.unchanged record before          # at the revision before the change
    python -m tools.reliability.unchanged record after           # at the revision after it
    python -m tools.reliability.unchanged again before after     # the older folders, resumed and reported by the newer
    python -m tools.reliability.unchanged compare before after
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

SIZES = "--num-layers 4 --hidden-size 32 --num-heads 2 --threads 1"
SMALL = f"{SIZES} --steps 12 --batch-size 4 --sequence-length 32 --corpus text.txt"
SLOW = "--precision fp32 --compile off"
TRAIN = f"{SMALL} {SLOW} --save-steps 4 --logging-steps 2 --eval-steps 4"
FEW = "--num-layers 2 --threads 1 --steps 4 --batch-size 4 --sequence-length 32 --corpus text.txt"
PROBE = "--sequences 8 --sequence-length 32 --threads 1 --corpus text.txt"
MIX = "--corpus text.txt:0.7,other.txt:0.3"

# By name, which is the folder too: the command and its arguments.
CASES: dict[str, str] = {
    "accumulation": f"pretrain {TRAIN} --gradient-accumulation 3 --placement keel",
    "mix": f"pretrain {TRAIN} {MIX}",
    "streaming": f"pretrain {TRAIN} --streaming --shuffle-buffer 16 --placement peri_ln",
    "streamed-mix": f"pretrain {TRAIN} --streaming {MIX}",
    "moe": f"pretrain {TRAIN} --backbone experts --num-layers 3",
    "bf16": f"pretrain {TRAIN} --precision bf16 --placement fusenorm",
    "width": f"pretrain {TRAIN} --width-scaling mup --base-width 16 --k-hidden 2",
    "wsd": f"pretrain {TRAIN} --schedule wsd --tokenizer bpe:300 --trainer.optim adafactor",
    "probed": f"pretrain {TRAIN} --probe-every 4 --placement sandwich_ln",
    "rollback": f"pretrain {TRAIN} --steps 40 --learning-rate 3 --warmup 1 --divergence-patience 4 "
    "--divergence-margin 0.2 --rollback 2 --max-grad-norm 0 --placement post_ln --logging-steps 1",
    "from": f"pretrain --from pre_ln --corpus other.txt --steps 12 --batch-size 4 --sequence-length 32 {SLOW} "
    "--save-steps 4 --logging-steps 2 --eval-steps 4 --threads 1",
    "ddp": f"pretrain {TRAIN} --parallel ddp --placement keel",
    "fsdp2": f"pretrain {TRAIN} --parallel fsdp2 --placement peri_ln",
    "compare": f"compare {SMALL} {SLOW} --init same:scaled --placements pre_ln,keel --seeds 0,1 "
    "--learning-rates 1e-3,3e-3 --workers 1",
    "transfer": f"transfer {FEW} --hidden-size 32 --proxy-width 16 --learning-rates 1e-3,1e-2 --workers 1 {SLOW}",
    "coord-check": f"coord-check {FEW} --widths 16,32 --width-scaling mup",
    "preflight": f"preflight {SMALL} --steps 400 --placements pre_ln,post_ln,fusenorm --learning-rates 3e-3",
    "preflight-mix": f"preflight {SMALL} --steps 200 {MIX} --gradient-accumulation 2",
    "preflight-stream": f"preflight {SMALL} --steps 200 --streaming --precision bf16",
    "probe": f"probe pre_ln {PROBE}",
    "probe-keel": f"probe keel {PROBE}",
    "probe-vit": "probe vit --sequences 4 --threads 1 --corpus noise --probes hidden_states,gains",
}
TWO_PROCESSES = ("ddp", "fsdp2")
PRINTED = {
    "placements": "placements",
    "backbones": "backbones",
    "generate": "generate keel --prompt The --max-new-tokens 30 --temperature 0.7",
}
SAMPLE = ["sequences", "tokens"]  # of a probe's table
TIMES = {
    "seconds", "tokens_per_second", "step_seconds", "time", "began", "ended", "date", "hours", "eta", "peak_memory",
    "seconds_per_step", "memory", "peak_memory_mb", "created", "mtime", "pid", "wall_seconds",
}  # fmt: skip
# of the machine, the moment or the storage; checkpoints hold the times too, and their weights are in model/
# Words, dates and copies of the code; a study's and a probe's definitions are words, and a seal is of files with times.
WORDS = {"created", "digest", "command", "caption", "definition", "summary", "title", "sentences", "version", "seal"}
YOUNGER = {"bigram_entropy"}  # columns that the revision before does not have
SKIPPED = {"environment.json", "manifest.json"}

OTHER_MODELS = """
import lamina, torch, hashlib, json, pathlib
from lamina.modeling.backbones import resolve_backbone
from lamina import placements
said = {}
for backbone, sizes in {"vit-tiny": {}, "llama-71m": {}}.items():
    config = resolve_backbone(backbone, num_layers=3, hidden_size=48, num_heads=3)
    for placement in placements.names():
        torch.manual_seed(0)
        model = lamina.build(config, placement)
        digest = hashlib.sha256()
        for name, value in sorted(model.state_dict().items()):
            digest.update(name.encode() + value.contiguous().numpy().tobytes())
        torch.manual_seed(1)
        if "vit" in backbone:
            out = model(pixel_values=torch.randn(2, 3, 224, 224)).logits
        else:
            out = model(input_ids=torch.arange(40).view(2, 20)).logits
        digest.update(out.detach().numpy().tobytes())
        said[f"{backbone} {placement}"] = digest.hexdigest()
        said[f"{backbone} {placement} plan"] = placements.resolve(placement, num_layers=7).to_dict()
pathlib.Path("built.json").write_text(json.dumps(said, indent=1))
torch.manual_seed(0)
lamina.build(resolve_backbone("vit-tiny", num_layers=3, hidden_size=48, num_heads=3), "peri_ln").save_pretrained("vit")
"""
EXPERTS = """
from transformers import DeepseekV3Config
DeepseekV3Config(vocab_size=300, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=3,
    num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
    n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=8, v_head_dim=8, max_position_embeddings=64).save_pretrained("experts")
"""


def python(arguments: list[str], folder: Path, processes: int = 1, log: str | None = None) -> int:
    """Run python, in ``processes`` of them, in ``folder``; returns the worst exit code."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    running = []
    for rank in range(processes):
        several = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        several |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        given = environment | (several if processes > 1 else {})
        out = (folder / f"{log}.log").open("ab") if log else subprocess.DEVNULL
        running.append(subprocess.Popen([sys.executable, *arguments], cwd=folder, env=given, stdout=out, stderr=out))
    return max(abs(process.wait()) for process in running)


def record(folder: Path) -> None:
    """Run all cases into ``folder``; those that it holds already are left."""
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(__file__).parents[2] / "lamina" / "data"
    packed = [path.read_bytes() for path in sorted(library.glob("*.xz"))]
    text = b"".join(map(lzma.decompress, packed)).decode(errors="ignore")
    (folder / "text.txt").write_text(text[:60_000])
    (folder / "other.txt").write_text(text[90_000:130_000])
    if not (folder / "built.json").is_file():
        python(["-c", EXPERTS], folder, log="experts-config")
        python(["-c", OTHER_MODELS], folder, log="built")
    asked = [sys.executable, "-c", "from lamina import placements; print(*placements.names())"]
    for name in subprocess.run(asked, capture_output=True, text=True).stdout.split():
        _case(folder, name, f"pretrain {TRAIN} --placement {name}")
    for name, line in CASES.items():
        _case(folder, name, line)
    _killed(folder)
    for name, line in PRINTED.items():
        asked = [sys.executable, "-m", "lamina", *line.split()]
        done = subprocess.run(asked, cwd=folder, capture_output=True, text=True)
        (folder / f"{name}.txt").write_text(done.stdout)


def _case(folder: Path, name: str, line: str) -> None:
    if (folder / name).exists():
        return
    began = time.monotonic()
    processes = 2 if name in TWO_PROCESSES else 1
    code = python(["-m", "lamina", *line.split(), "--output", name], folder, processes, log=name)
    print(f"{name}: exit code {code}, {time.monotonic() - began:.0f} s", flush=True)


def _killed(folder: Path) -> None:
    """A run killed once it has a checkpoint, kept as it was, and a copy resumed."""
    if (folder / "killed").exists():
        return
    line = f"pretrain {TRAIN} --placement mix_ln --steps 60 --output killed"
    started = [sys.executable, "-m", "lamina", *line.split()]
    process = subprocess.Popen(started, cwd=folder, stderr=subprocess.DEVNULL)
    while not (folder / "killed" / "checkpoints" / "checkpoint-12").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    shutil.copytree(folder / "killed", folder / "killed-first")
    python(["-m", "lamina", "pretrain", "--output", "killed", "--resume"], folder, log="killed")


def again(before: Path, after: Path) -> None:
    """Resume and report the folders of ``before`` with the package of now, in copies under ``after/again``."""
    target = after / "again"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copytree(before / "killed-first", target / "killed")
    for name in ("text.txt", "other.txt"):
        shutil.copy2(before / name, target / name)
    python(["-m", "lamina", "pretrain", "--output", "killed", "--resume"], target, log="killed")
    for page in sorted(before.glob("*/report.html")):
        if not (target / page.parent.name).exists():
            shutil.copytree(page.parent, target / page.parent.name)
            (target / page.parent.name / "report.html").unlink()
            python(["-m", "lamina", "report", page.parent.name], target, log=page.parent.name)


def compare(before: Path, after: Path) -> int:
    """Say what differs; returns how many files do."""
    faults = _differences(before, after, before.glob("*"))
    if (after / "again").is_dir():
        kept = [path for path in before.glob("*") if (after / "again" / path.name).exists()]
        faults += [f"again: {line}" for line in _differences(before, after / "again", kept, pages=True)]
    for line in faults:
        print(line)
    print(f"{len(faults)} differences")
    return len(faults)


def _differences(before: Path, after: Path, roots: Any, *, pages: bool = False) -> list[str]:
    faults = []
    for root in sorted(roots):
        for path in [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file()):
            name = path.relative_to(before)
            skipped = (
                path.name in SKIPPED
                or path.suffix in (".log", ".py")
                or any("checkpoint-" in part for part in name.parts)
            )
            if skipped or (path.suffix == ".html" and not pages) or "killed-first" in name.parts:
                continue
            other = after / name
            if not other.is_file():
                faults.append(f"{name}: missing")
            elif (words := _differs(path, other)) is not None:
                faults.append(f"{name}: {words}")
    return faults


def _differs(one: Path, other: Path) -> str | None:
    if one.suffix == ".parquet":
        import pandas as pd

        a, b = pd.read_parquet(one), pd.read_parquet(other)
        b = b.drop(columns=[column for column in SAMPLE if column not in a], errors="ignore")  # of a later revision
        kept = [column for column in a.columns if column not in TIMES]
        return None if list(a.columns) == list(b.columns) and a[kept].equals(b[kept]) else "another table"
    if one.suffix == ".csv":
        import pandas as pd

        a, b = pd.read_csv(one), pd.read_csv(other)
        a, b = (table.drop(columns=list(YOUNGER & set(table.columns))) for table in (a, b))
        kept = [column for column in a.columns if not _is_time(column)]
        return None if list(a.columns) == list(b.columns) and a[kept].equals(b[kept]) else "another table"
    if one.suffix == ".yaml":
        a, b = (_without_times(yaml.safe_load(path.read_text(encoding="utf-8"))) for path in (one, other))
        return None if a == b else f"another content: {_first_difference(a, b)}"
    if one.suffix in (".json", ".jsonl"):
        a, b = ([_without_times(json.loads(line)) for line in _json_lines(path)] for path in (one, other))
        return None if a == b else f"another content: {_first_difference(a, b)}"
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (one, other)]
    return None if digests[0] == digests[1] else f"another content ({one.stat().st_size}, {other.stat().st_size} bytes)"


def _json_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return text.splitlines() if path.suffix == ".jsonl" else [text]


def _is_time(name: str) -> bool:
    return name in TIMES or "second" in name or "memory" in name


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        left_out = WORDS | YOUNGER
        return {key: _without_times(item) for key, item in value.items() if not _is_time(key) and key not in left_out}
    return [_without_times(item) for item in value] if isinstance(value, list) else value


def _first_difference(a: Any, b: Any, path: str = "") -> str:
    if isinstance(a, dict) and isinstance(b, dict) and set(a) == set(b):
        return next((_first_difference(a[k], b[k], f"{path}.{k}") for k in a if a[k] != b[k]), path)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return next(
            (_first_difference(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), path
        )
    return f"{path}: {str(a)[:80]} -> {str(b)[:80]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("record", "again", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    given = parser.parse_args()
    folders = [path.resolve() for path in given.folders]
    sys.exit(min(1, {"record": record, "again": again, "compare": compare}[given.work](*folders) or 0))
