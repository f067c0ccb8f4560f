"""What tools/runs/whole_path.py reaches: by placement the minutes of each stage, and the held-out reward's gain.

    pip install -e '.[posttrain]'
    make commonsense-data
    python -m tools.runs.after_pretraining --data data/commonsense170k.jsonl

Runs it, or goes on where it was, and ends with 1 unless every placement's reward has risen with its 95 %
interval above zero.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks import common

STAGES = ("pretrain", "sft", "reward", "rlhf")
GAIN = ("reward_gain", "reward_gain_low", "reward_gain_high", "eval_reward", "eval_kl")


def row_of(folder: Path) -> dict[str, object]:
    """A placement's numbers from the folders of its stages."""
    results = {stage: json.loads((folder / stage / "result.json").read_text(encoding="utf-8")) for stage in STAGES}
    minutes = {stage: result["seconds"] / 60 for stage, result in results.items()}
    gain = {name: results["rlhf"][name] for name in GAIN}
    accuracy = results["reward"]["eval_accuracy"]
    return {"placement": folder.name, "minutes": minutes, "reward_accuracy": accuracy, **gain}


def main() -> int:
    """Run the path and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Commonsense170K as JSON lines")
    parser.add_argument("--folder", type=Path, default=Path("runs/after-pretraining"))
    parser.add_argument(
        "--output", type=Path, default=common.ROOT / "benchmarks" / "results" / "after_pretraining.json"
    )
    given = parser.parse_args()
    command = [sys.executable, "-m", "tools.runs.whole_path", "--data", str(given.data), "--folder", str(given.folder)]
    subprocess.run(command, check=True, cwd=common.ROOT)
    folders = sorted(path.parent for path in given.folder.glob("*/rlhf"))
    rows = [row_of(folder) for folder in folders]
    ran = json.loads((folders[0] / "pretrain" / "environment.json").read_text(encoding="utf-8"))
    where = {**common.settings_of_machine(), "revision": ran["git_revision"]}  # of the runs, which may be older
    common.write_record(given.output, {**where, "rows": rows})
    return 0 if all(row["reward_gain_low"] > 0 for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
