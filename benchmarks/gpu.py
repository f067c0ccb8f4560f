"""Measure training speed on a GPU in at most nine minutes (`make bench-gpu`). Each result is saved at once.

    python benchmarks/gpu.py --output benchmarks/results/gpu.json
    python benchmarks/gpu.py --device cpu --size smoke --output smoke.json    # a quick test on a CPU

The plan, in seconds on an H100 with 16 cores:

      0  compile   all contenders start and compile, each in a new process, with a shared cache
                   (TORCHINDUCTOR_CACHE_DIR). Lamina's contenders compile models of two layers
      0  tests     at the same time, the quick part of `make test-gpu`, at most 60 s
    120  card      matrix products, copies, and PyTorch's attention kernels: 10 s
    130  50m       8 blocks, 50M parameters, vocabulary 8192, 0.5M tokens per step: two turns of 10 s, 6 contenders
    270  400m      24 x 1024, vocabulary 50280: two turns of 10 s, 5 contenders
    410  watch     a plain loop at 400m with and without `lamina.watch`, first eager, then with compiled layers
    450  variants  50m with cuDNN's attention (plain loop and Lamina), and Lamina with less memory: one turn of 10 s
    490  then      your own command (--then), in the remaining time

Between turns, contenders wait without activations. A contender that runs out of memory starts again when the others
wait, and then with half the micro-batch and twice the accumulation. The script leaves out a stage that does not fit
into the remaining time, and prints a message. A later call with the same revision and GPU measures only what is
missing, unless you add `--again`.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

BORN = time.monotonic()
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from common import Absent, flops_per_token, settings_of_machine, sizes_of, write_record  # noqa: E402

STAGES = ("tests", "card", "50m", "400m", "watch", "variants", "then")
TURNS, TURN_SECONDS, LEAST_TURN = 2, 10.0, 3.0
COMPILED_BY, TEST_SECONDS, BUILDING = 170.0, 60.0, 3
PLAIN = "nanogpt-style"
# Each stage: the size, sequences per micro-batch, micro-batches per step, tokens per sequence.
SHAPES = {"50m": ("50m", 32, 8, 2048), "400m": ("400m", 8, 4, 2048), "variants": ("50m", 32, 8, 2048)}
SMOKE = dict.fromkeys(SHAPES, ("smoke", 4, 2, 16))
MHC, ATTENTION_RESIDUALS = "lamina:pre_ln(wiring=mhc)", "lamina:pre_ln(wiring=attn_res,size=6)"
# The first contender of a stage is the baseline.
CONTENDERS: dict[str, list[dict[str, Any]]] = {
    "50m": [
        {"name": PLAIN},
        {"name": "transformers"},
        *({"name": f"lamina:{placement}"} for placement in ("pre_ln", "keel", "peri_ln", "fusenorm")),
    ],
    "400m": [
        *({"name": f"lamina:{placement}"} for placement in ("pre_ln", "keel", "fusenorm")),
        {"name": MHC, "batch_size": 4, "accumulation": 8},  # four streams
        {"name": ATTENTION_RESIDUALS, "compiled_layers": 24},  # a kind of block for each number of states
    ],
    "variants": [
        {"name": PLAIN, "attention": "cudnn"},
        {"name": "lamina:pre_ln", "attention": "cudnn"},
        {"name": "lamina:pre_ln", "recomputed": True},
    ],
}
GOALS = {"speed_ratio": 1.0, "mfu": 0.40, "watch_time_ratio": 1.03}
PUBLIC = {"karpathy/autoresearch, H100": {"tokens_per_second": 1.67e6, "mfu": 0.398}}


class Process:
    """A process that prints answers as lines of JSON after "@"."""

    def __init__(self, command: list[str], environment: dict[str, str]):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, cwd=ROOT, env=environment, **pipes)
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                self.lines.put(line[1:])
        self.lines.put(None)

    def say(self, **what: Any) -> None:
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise Absent(f"its process ended with code {self.process.poll()}") from None

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """Return the next answer, or None if there is no answer within these seconds. Raises Absent."""
        try:
            line = self.lines.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None
        if line is None:
            raise Absent(f"its process ended with code {self.process.wait()}")
        answer = json.loads(line)
        if "absent" in answer:
            raise Absent(answer["absent"])
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Entry:
    """A contender in a stage, with the process, the measured turns, and the row for the record."""

    def __init__(self, stage: str, task: dict[str, Any], environment: dict[str, str]):
        self.stage, self.task, self.environment = stage, task, environment
        self.row: dict[str, Any] = {"name": task["name"]}
        self.row |= {key: task[key] for key in ("attention", "recomputed") if key in task}
        self.process: Process | None = None
        self.compiled = self.went = False
        self.ready: dict[str, Any] | None = None
        self.seconds: list[float] = []

    @property
    def label(self) -> str:
        return self.row["name"] + "".join(f", {k} {v}" for k, v in self.row.items() if k in ("attention", "recomputed"))

    @property
    def absent(self) -> bool:
        return "absent" in self.row

    def start(self) -> None:
        command = [sys.executable, str(ROOT / "benchmarks" / "worker.py"), json.dumps(self.task)]
        self.process = Process(command, self.environment)
        self.compiled = self.went = False
        self.ready = None
        self.row.pop("absent", None)

    def look(self, seconds: float = 0.0) -> None:
        if self.process is None or self.absent or self.ready is not None:
            return
        try:
            while (answer := self.process.answer(seconds)) is not None:
                if "compiled" not in answer:
                    self.ready = answer
                    return
                self.compiled = True
                self.row["compile_seconds"] = round(answer["compiled"], 1)
        except Absent as reason:
            self.give_up(str(reason))

    def go(self) -> None:
        assert self.process is not None
        try:
            self.process.say(go=True)
            self.went = True
        except Absent as reason:
            self.give_up(str(reason))

    def give_up(self, reason: str) -> None:
        self.row["absent"] = reason
        if self.process is not None:
            self.process.kill()
            self.process = None

    def wait_until_ready(self, until: float) -> bool:
        """Wait until the model is ready. After running out of memory, start again with a smaller micro-batch."""
        tried = False
        while time.monotonic() < until:
            if self.process is None:
                if not self.row.get("absent", "").startswith("out of memory"):
                    return False
                if tried and self.task["batch_size"] > 1:
                    self.task["batch_size"] //= 2
                    self.task["accumulation"] *= 2
                tried = True
                self.start()
            while self.process is not None and self.ready is None and time.monotonic() < until:
                if self.compiled and not self.went:
                    self.go()
                self.look(0.2)
            if self.ready is not None:
                return True
        return False

    def turn(self, seconds: float) -> None:
        """Train for about these seconds, and keep the seconds per step."""
        assert self.process is not None
        assert self.ready is not None
        steps = max(2, round(seconds / self.ready["step_seconds"]))
        try:
            self.process.say(steps=steps)
            answer = self.process.answer(10 * seconds + 30)
            if answer is None:
                raise Absent(f"no answer in {10 * seconds + 30:.0f} s")
            self.seconds.append(answer["seconds"] / steps)
        except Absent as reason:
            self.give_up(str(reason))

    def end(self) -> None:
        if self.process is None:
            return
        try:
            self.process.say(steps=0)
            if (last := self.process.answer(20)) is not None:
                self.row["peak_memory_mib"] = round(last["peak_memory_mib"])
        except Absent:
            pass
        self.process.kill()
        self.process = None


class Bench:
    """All stages of a call, with the time limit and the record. The record is written after each result."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments, self.began = arguments, BORN
        self.cuda = arguments.device == "cuda"
        self.shapes = SMOKE if arguments.size == "smoke" else SHAPES
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(ROOT / "build" / "inductor"))
        self.environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_COMPILE_THREADS": "4",  # of each of a dozen processes
            "OMP_NUM_THREADS": "2" if self.cuda else "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),  # not installed
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0") if self.cuda else "",
        }
        from lamina.training.execution.devices import peak_of

        self.peak = peak_of(arguments.device)
        machine = settings_of_machine()
        if not self.cuda:
            machine["machine"].pop("gpu", None)
        head = {"benchmark": "gpu", "goals": GOALS, "public": PUBLIC, "peak_bf16_flops": self.peak, **machine}
        self.record: dict[str, Any] = {**head, "size": arguments.size, "stages": {}}
        if not arguments.again and arguments.output.is_file():
            earlier = json.loads(arguments.output.read_text(encoding="utf-8"))
            keys = ("revision", "machine", "versions", "size")
            if all(earlier.get(key) == self.record[key] for key in keys):
                self.record["stages"] = earlier["stages"]
        contending = {**self.environment, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        self.entries = [
            Entry(stage, self._task(stage, own), contending)
            for stage, own_tasks in CONTENDERS.items()
            if stage in arguments.stages and not (stage == "variants" and not self.cuda)
            for own in own_tasks
        ]
        chosen = arguments.only
        self.entries = [
            entry
            for entry in self.entries
            if not self._measured(entry) and (chosen is None or entry.row["name"] in chosen)
        ]

    def _task(self, stage: str, own: dict[str, Any]) -> dict[str, Any]:
        size, batch, accumulation, length = self.shapes[stage]
        task = {"size": size, "batch_size": batch, "accumulation": accumulation, "sequence_length": length}
        task |= {"precision": "bf16" if self.cuda else "fp32", "compile": "on" if self.cuda else "off", "parked": True}
        task |= {"compiled_layers": 2 if own["name"].startswith("lamina:") else None}
        task |= {"threads": None if self.cuda else 1}
        if self.arguments.size == "smoke":
            own = {key: value for key, value in own.items() if key in ("name", "attention", "recomputed")}
        return {**task, **own}

    def _measured(self, entry: Entry) -> bool:
        rows = self.record["stages"].get(entry.stage, {}).get("results", [])
        return any(row["name"] == entry.row["name"] and "absent" not in row and entry.row.items() <= row.items()
                   for row in rows)  # fmt: skip

    @property
    def left(self) -> float:
        return self.arguments.limit - (time.monotonic() - self.began)

    def write(self) -> None:
        write_record(self.arguments.output, self.record)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", file=sys.stderr, flush=True)

    def compile(self) -> None:
        """Start and compile all contenders. The contenders of 50m also build their models, a few at a time."""
        for entry in self.entries:
            entry.start()
            if not self.cuda:  # one at a time
                self._until(lambda entry=entry: entry.compiled or entry.absent, [entry])
        waiting = [entry for entry in self.entries if entry.stage == "50m"]

        def there() -> bool:
            building = [e for e in waiting if e.went and e.ready is None and not e.absent]
            for entry in waiting:
                if entry.compiled and not entry.went and not entry.absent and len(building) < BUILDING:
                    entry.go()
                    building.append(entry)
            return all(e.absent or (e.ready is not None if e in waiting else e.compiled) for e in self.entries)

        self._until(there, self.entries)
        for entry in self.entries:
            how = entry.row.get("absent") or ("ready" if entry.ready else "compiled" if entry.compiled else "compiling")
            self.say(f"{entry.stage} {entry.label}: {how} {entry.row.get('compile_seconds', '')}")

    def _until(self, there: Any, entries: list[Entry]) -> None:
        deadline = self.began + (COMPILED_BY if self.cuda else self.arguments.limit)
        while time.monotonic() < deadline and not there():
            for entry in entries:
                entry.look()
            time.sleep(0.05)

    def stage(self, name: str, reserve: float) -> None:
        """Measure the contenders of a stage in turns. If possible, leave ``reserve`` seconds for later stages."""
        entries = [entry for entry in self.entries if entry.stage == name]
        if not entries:
            return
        turns = 1 if name == "variants" else TURNS
        for entry, following in zip(entries, [*entries[1:], None], strict=True):
            if following is not None and following.compiled and not following.went and not following.absent:
                following.go()  # two build at a time
            if not entry.wait_until_ready(time.monotonic() + max(0.0, self.left - reserve)):
                entry.row.setdefault("absent", "not ready in time")
                self.say(f"{name} {entry.label}: {entry.row['absent']}")
        here = [entry for entry in entries if entry.ready is not None and not entry.absent]
        seconds = TURN_SECONDS if self.arguments.size == "full" else 0.2
        if here:
            seconds = min(seconds, (self.left - reserve) / (turns * len(here)) - 2.0 * self.cuda)
        for number in range(turns if seconds >= (LEAST_TURN if self.cuda else 0.0) else 0):
            for entry in here if number % 2 == 0 else here[::-1]:
                entry.turn(seconds)
                self._keep(name, entries)
                self.say(
                    f"{name} {entry.label}: {entry.row.get('tokens_per_second', entry.row.get('absent'))} tokens/s"
                )
        for entry in entries:
            entry.end()
        self._keep(name, entries)

    def _keep(self, name: str, entries: list[Entry]) -> None:
        """Write the rows of a stage. Rows of earlier calls come first."""
        size, _, _, length = self.shapes[name]
        stage = self.record["stages"].setdefault(name, {"size": size, **sizes_of(size), "sequence_length": length})
        rows = [row for row in stage.get("results", []) if not any(row is entry.row for entry in entries)]
        new = [(entry.label, entry.row) for entry in entries]
        rows = [row for row in rows if "absent" not in row]
        first = CONTENDERS[name][0]["name"]
        base = next((entry for entry in entries if entry.task["name"] == first), None)
        earlier = next((row for row in rows if row["name"] == first), None)
        for entry in entries:
            if entry.seconds:
                entry.row |= self._row(entry)
            if entry.seconds and base is not None and base.seconds and name != "variants":
                pairs = zip(base.seconds, entry.seconds, strict=False)
                entry.row["speed_ratio"] = round(statistics.median(b / e for b, e in pairs), 4)
            elif entry.seconds and earlier is not None and name != "variants":  # of an earlier call
                entry.row["speed_ratio"] = round(earlier["step_seconds"] / entry.row["step_seconds"], 4)
        stage["results"] = [*rows, *(row for _, row in new)]
        self.write()

    def _row(self, entry: Entry) -> dict[str, Any]:
        task, seconds = entry.task, statistics.median(entry.seconds)
        tokens = task["batch_size"] * task["accumulation"] * task["sequence_length"]
        flops = flops_per_token(task["size"], task["sequence_length"]) * tokens / seconds
        assert entry.ready is not None
        return {
            **{key: task[key] for key in ("precision", "compile", "batch_size", "accumulation")},
            "parameters": int(entry.ready["parameters"]),
            "first_step_seconds": round(entry.ready["first_step"], 2),
            "step_seconds": round(seconds, 5),
            "turns": [round(each, 5) for each in entry.seconds],
            "tokens_per_second": round(tokens / seconds),
            "teraflops_per_second": round(flops / 1e12, 2),
            **({} if self.peak is None else {"mfu": round(flops / self.peak, 4)}),
        }

    def command(self, name: str, command: list[str], seconds: float) -> dict[str, Any]:
        began = time.monotonic()
        run = subprocess.Popen(
            command, cwd=ROOT, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            text, _ = run.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGINT)  # pytest then prints the results so far
            try:
                text, _ = run.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                run.kill()
                text, _ = run.communicate()
        found = {"code": run.returncode, "seconds": round(time.monotonic() - began, 1)}
        self.record["stages"][name] = {**found, "output": text.splitlines()[-40:]}
        self.write()
        self.say(f"{name}: code {run.returncode}, {(text.strip().splitlines() or ['no output'])[-1]}")
        return self.record["stages"][name]

    def wanted(self, name: str, stage: str | None = None) -> bool:
        return (stage or name) in self.arguments.stages and self.record["stages"].get(name, {}).get("code") != 0

    def tests(self) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", "tests/gpu"]
        self.command("tests", command, min(TEST_SECONDS, self.left))

    def watch(self, reserve: float) -> None:
        """Measure a loop with and without `lamina.watch`, first eager, then with compiled layers."""
        size, batch, _, length = self.shapes["400m"]
        output = self.arguments.output.with_suffix(".watch.json")
        for stage, compiled in (("watch", "off"), ("watch-compiled", "layers")):
            if not self.wanted(stage, "watch"):
                continue
            seconds = self.left - reserve
            if seconds < 20 and self.cuda:
                self.say(f"{stage}: left out, because too little time remains")
                return
            command = [sys.executable, str(ROOT / "benchmarks" / "watching.py"), "--device", self.arguments.device]
            command += ["--size", size, "--batch-size", str(max(1, batch // 2)), "--sequence-length", str(length)]
            command += ["--compile", compiled, "--turns", "3", "--output", str(output)]
            self.command(stage, command, seconds)
            if output.is_file():
                self.record["stages"][stage] |= json.loads(output.read_text(encoding="utf-8"))
                output.unlink()
                self.record["stages"][stage].pop("output")
                self.write()

    def card(self) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--measure-card"]
        found = self.command("card", command, 40)
        lines = [line for line in found["output"] if line.startswith("@")]
        if lines:
            self.record["stages"]["card"] = {"code": found["code"], **json.loads(lines[-1][1:])}
            self.write()

    def run(self) -> None:
        stages = self.arguments.stages
        testing = threading.Thread(target=self.tests) if self.wanted("tests") else None
        try:
            if testing is not None:
                testing.start()
                if not self.cuda:
                    testing.join()
            self.compile()
            if testing is not None:
                testing.join()
            if self.wanted("card") and self.cuda:
                self.card()
            self.stage("50m", reserve=150 if self.cuda and "400m" in stages else 20)
            self.stage("400m", reserve=50 if self.cuda and "watch" in stages else 0)
            self.watch(reserve=10)
            self.stage("variants", reserve=5)
            if self.arguments.then and self.left > 5:
                self.command("then", shlex.split(self.arguments.then), self.left)
        finally:
            for entry in self.entries:
                if entry.process is not None:
                    entry.process.kill()
            self.record["seconds"] = round(time.monotonic() - self.began, 1)
            self.write()


def measure_card() -> None:
    """Print one line with TFLOP/s of matrix products, GB/s of copies, and milliseconds per attention kernel."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def seconds(call: Any, repeats: int) -> float:
        for _ in range(3):
            call()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        for _ in range(repeats):
            call()
        marks[1].record()
        torch.cuda.synchronize()
        return marks[0].elapsed_time(marks[1]) / 1e3 / repeats

    one, other = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    long = torch.randn(2**28, device="cuda")
    copy = torch.empty_like(long)
    found: dict[str, Any] = {
        "product_teraflops": round(2 * 8192**3 / seconds(lambda: one @ other, 20) / 1e12, 1),
        "copy_gigabytes_per_second": round(2 * 4 * 2**28 / seconds(lambda: copy.copy_(long), 20) / 1e9),
        "attention": {},
    }
    for shape in ((32, 5, 2048, 128), (8, 8, 2048, 128), (32, 10, 2048, 64)):
        query, key, value = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        for kernel in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):

            def call(query=query, key=key, value=value) -> None:
                scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

            name = f"{kernel.lower()} {'x'.join(map(str, shape))}"
            try:
                with sdpa_kernel(getattr(SDPBackend, kernel)):
                    found["attention"][name] = round(1e3 * seconds(call, 10), 3)
            except RuntimeError as error:
                found["attention"][name] = str(error).splitlines()[0]
    print("@" + json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--size", choices=("full", "smoke"), default="full")
    parser.add_argument("--limit", type=float, default=530.0, help="seconds for the whole benchmark (default: 530)")
    parser.add_argument("--stages", type=lambda text: text.split(","), default=list(STAGES))
    parser.add_argument(
        "--only", type=lambda text: text.split(","), help="contenders to measure, such as nanogpt-style,lamina:keel"
    )
    parser.add_argument("--then", help="command to run in the remaining time, such as 'lamina study run ladder-s2'")
    parser.add_argument("--again", action="store_true", help="repeat measurements that the output file already has")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json")
    parser.add_argument("--measure-card", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure_card:
        measure_card()
        return
    if unknown := set(arguments.stages) - set(STAGES):
        parser.error(f"--stages: {', '.join(sorted(unknown))} (allowed: {', '.join(STAGES)})")
    import torch

    there = torch.cuda.is_available()
    arguments.device = ("cuda" if there else "cpu") if arguments.device == "auto" else arguments.device
    if arguments.device == "cuda" and not there:
        parser.error("--device cuda: this machine has no GPU")
    if arguments.device == "cpu" and arguments.size == "full":
        parser.error("--size full needs a GPU (on a CPU: --size smoke)")
    bench = Bench(arguments)
    bench.run()
    for name, stage in bench.record["stages"].items():
        for row in stage.get("results", ()):
            label = ", ".join([row["name"], *(f"{k} {row[k]}" for k in ("attention", "recomputed") if k in row)])
            if "tokens_per_second" not in row:
                print(f"{name:<9} {label:<40} left out: {row.get('absent', 'no turn')}")
                continue
            share = f"{row['mfu']:.1%}" if "mfu" in row else "-"
            print(
                f"{name:<9} {label:<40} {row['tokens_per_second']:>10,} tokens/s  x{row.get('speed_ratio', '-'):<7} "
                f"MFU {share:>6} {row.get('peak_memory_mib', 0):>7,} MiB  {row['accumulation']} x {row['batch_size']}"
            )
        if "time_ratio" in stage:
            print(f"{name:<9} watched / bare: {stage['time_ratio']}")
    print(f"{bench.record['seconds']} s, {arguments.output}")


if __name__ == "__main__":
    main()
