"""Bad values for every flag of every command, by the kind of value that its parser takes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from lamina.jobs.aliases import meaning

if TYPE_CHECKING:
    from lamina.commands.arguments import Argument

Row = tuple[str, list[str], tuple[str, ...], dict[str, str], bool]

TINY = {
    "corpus": "corpus.txt", "output": "out", "num-layers": "2", "hidden-size": "16", "num-heads": "2",
    "sequence-length": "16", "batch-size": "2", "steps": "2", "threads": "1",
}  # fmt: skip
# What makes each command's line whole and small, so that a value that is let through shows by a run that succeeds.
BASE: dict[str, tuple[list[str], dict[str, str]]] = {
    "pretrain": ([], TINY),
    "compare": ([], {**TINY, "placements": "pre_ln", "workers": "1"}),
    "preflight": ([], {**TINY, "burn-in": "4", "sequences": "2"}),
    "coord-check": ([], {k: v for k, v in TINY.items() if k not in ("hidden-size", "num-heads")} | {"widths": "16,32"}),
    "transfer": (
        [],
        {k: v for k, v in TINY.items() if k != "num-heads"}
        | {"proxy-width": "16", "hidden-size": "32", "learning-rates": "1e-3"},
    ),
    "probe": (["model"], {"corpus": "corpus.txt", "output": "out", "probes": "gains", "sequence-length": "16"}),
    "generate": (["model"], {"max-new-tokens": "1"}),
    "convert": (["model", "out"], {}),
    "report": (["run"], {}),
    "placements": (["keel"], {}),
    "backbones": ([], {}),
}
ANY_TEXT = ("text_field",)  # every text but one with NUL has a meaning
PATHS = ("output", "svg", "screenshot", "config")
LISTS = {"learning_rates": float, "verify_rates": float, "seeds": int, "widths": int}
ZERO_IS_GOOD = ("eval_blocks", "eval_task_limit", "save_steps", "probe_every", "rollback", "rollback_skip", "seed")
BEYOND = {
    "min_learning_rate": "1.5", "beta1": "1", "beta2": "1.5", "eval_fraction": "0.75", "rollback_factor": "2",
    "epsilon": "0", "learning_rate": "0", "warmup": "1e9", "steps": "0", "k_hidden": "0", "seed": "4294967296",
}  # fmt: skip


def line(name: str, **changes: str | None) -> list[str]:
    """A whole command line with these flags in place of the base's own (None: without)."""
    positional, flags = BASE[name]
    flags = {**flags, **{key.replace("_", "-"): value for key, value in changes.items()}}
    return [name, *positional, *(f"--{key}={value}" for key, value in flags.items() if value is not None)]


def options(name: str) -> list[Argument]:
    """The flags of a command, as its own parser has them."""
    from lamina.commands.run_job import parser

    return [option for option in parser(name).arguments if option.flags and option.name != "trainer"]


def kind_of(option: Argument) -> Any:
    """The kind of value that a flag takes: int, float, str or bool."""
    kinds = [kind for kind in option.kinds if kind is not NoneType]
    return kinds[0] if kinds[0] in (int, float, bool) else str


def optional(option: Argument) -> bool:
    """Whether a flag may be left without a value."""
    return NoneType in option.kinds or option.default is None


def cases(folder: Path, drawn: random.Random) -> Iterator[Row]:
    """Bad values of every flag, misspelled and unknown flags, flags that contradict each other, bad environments."""
    for name in BASE:
        for option in options(name):
            flag = max(option.flags, key=len)
            if flag.startswith("--no-"):
                continue
            field, kind = flag[2:].replace("-", "_"), kind_of(option)
            mentions = (field, flag, flag[2:], field.removesuffix("s"), *["from:"] * (field == "from_model"))
            for value in bad(field, kind, drawn, optional=optional(option)):
                given, shown = line(name, **{field: None}), repr(value)[1:41].rstrip("'")
                said = mentions if len(shown) < 2 else (*mentions, shown)
                yield f"values: {kind.__name__}", [*given, f"{flag}={value}"], said, {}, False
            if kind is not bool:
                yield "flags", [*line(name, **{field: None}), flag], mentions, {}, False  # without a value
            wrong = misspelled(flag, drawn)
            flags = {flag for option in options(name) for flag in option.flags}
            if wrong not in flags and not meaning(
                wrong[2:].replace("-", "_"), {o[2:].replace("-", "_") for o in flags}
            ):
                yield "flags", [*line(name), wrong, "1"], (wrong,), {}, False
        yield "flags", [*line(name), "--" + word(drawn)], ("unknown option", "unrecognized"), {}, False
        yield "flags", [*line(name), word(drawn), word(drawn)], ("argument", "unknown", "is no"), {}, False
    for wrong in ("comapre", "Pretrain", "", "\x1b[2J", "pre train", "--steps", word(drawn), word(drawn) * 200):
        yield "flags", [wrong], ("unknown command",), {}, False
    yield from contradictions()
    yield from environments(folder)


def bad(field: str, kind: Any, drawn: random.Random, *, optional: bool) -> list[str]:
    """Values that a field of this kind cannot have."""
    if field in ("list", "json", "strict", "png", "resume", "overwrite") and kind is bool:
        return ["maybe"]
    if kind is bool:
        return ["maybe", "2", "", word(drawn)]
    numbers = [
        "", "many", "nan", "inf", "-inf", "1e400", "[1, 2]", "{a: 1}", "true", "1,5", "१२x", "1\u202e",
        "\x1b[1m3",
    ]  # fmt: skip
    if kind is int:
        large = str(drawn.randint(2**33, 2**90))
        more = ["1.5", "1e30", f"-{drawn.randint(1, 10**6)}", large, "9" * 5000, "0x10g"]
        return numbers + more + ([] if field in ZERO_IS_GOOD else ["0"]) + [BEYOND[f] for f in (field,) if f in BEYOND]
    if kind is float:
        return [*numbers, f"-{drawn.uniform(0.1, 9):.3f}", "1e", *([BEYOND[field]] if field in BEYOND else [])]
    if field in LISTS or (field == "learning_rate" and kind is str):
        lists = ["a,b", "1,1", "nan", "-1", "inf", "1;2", "1e400", ",,", word(drawn)]
        if LISTS.get(field) is int:
            lists += ["1.5", str(drawn.randint(2**33, 2**80)), "0x1"]
        return lists + ([] if field == "verify_rates" else [""])
    if field in ("prompt", "stop"):  # every text has a meaning, but nothing ends at an empty one
        return [""] if field == "stop" else []
    texts = ["a\0b"]
    if field in ANY_TEXT or field in PATHS:
        return texts + ([""] if field in PATHS else [])
    texts += [word(drawn), "\x1b]0;owned\x07", "\u202egnp.exe", "名前", "x" * 6000, "a b", "~nouser/x", "((", "/"]
    if field == "corpus":
        texts.remove("/")  # a folder of texts as any other
    defaults = ("to", "report_to", "verify_rates", "learning_rates_of", "depths")  # of which an empty text is one
    return texts if optional or field in defaults else [*texts, ""]


def word(drawn: random.Random) -> str:
    """A word that names nothing."""
    return "q" + "".join(drawn.choice("bcdfghjkmnpqvwxz") for _ in range(drawn.randint(6, 12)))


def misspelled(flag: str, drawn: random.Random) -> str:
    """The flag with a letter lost, doubled or swapped."""
    at = drawn.randrange(3, len(flag) - 1) if len(flag) > 4 else 3
    how = drawn.randrange(3)
    if how == 0:
        return flag[:at] + flag[at + 1 :]
    if how == 1:
        return flag[:at] + flag[at] * 2 + flag[at + 1 :]
    return flag + "s"


def contradictions() -> Iterator[Row]:
    """Pairs of values that cannot hold together."""
    pairs: list[tuple[str, dict[str, str], list[str], str]] = [
        ("pretrain", {"warmup": "9"}, [], "warmup"),
        ("pretrain", {"rollback": "2"}, [], "rollback"),
        ("pretrain", {"base-width": "32"}, [], "base_width"),
        ("pretrain", {"k-hidden": "2"}, [], "k_hidden"),
        ("pretrain", {"width-scaling": "mup"}, [], "base_width"),
        ("pretrain", {"hidden-size": "17", "num-heads": "4"}, [], "num_heads"),
        ("pretrain", {"hidden-size": "17"}, [], "hidden_size"),
        ("pretrain", {}, ["--resume", "--overwrite"], "contradict"),
        ("pretrain", {}, ["--streaming", "--trainer.dataloader_num_workers=2"], "dataloader_num_workers"),
        ("pretrain", {}, ["--trainer.max_steps=9"], "max_steps"),
        ("pretrain", {}, ["--trainer.optim=nosuch"], "optim"),
        ("pretrain", {}, ["--trainer.nosuch=1"], "nosuch"),
        ("pretrain", {}, ["--trainer=5"], "trainer"),
        ("pretrain", {}, ["--steps=many", "--steps=2"], "steps"),
        ("pretrain", {}, ["--steps=2", "--steps=many"], "steps"),
        ("pretrain", {"placement": "mix_ln(alpha=2)"}, [], "alpha"),
        ("pretrain", {"placement": "mix_ln(alpa=0.5)"}, [], "alpa"),
        ("pretrain", {"placement": "pre_ln(groups=3)"}, [], "groups"),
        ("pretrain", {"placement": "pre_ln(norm=group,groups=7)"}, [], "groups"),
        ("pretrain", {"hidden-size": "1000000", "num-heads": "2"}, [], "hidden_size"),
        ("pretrain", {"batch-size": "1000000", "sequence-length": "100000"}, [], "batch_size"),
        ("pretrain", {"num-layers": "9999", "hidden-size": "65536"}, [], "num_layers"),
        ("compare", {"placements": "pre_ln,pre_ln"}, [], "pre_ln"),
        ("compare", {"placements": "pre_ln,keal"}, [], "keel"),
        ("compare", {}, ["--resume", "--overwrite"], "contradict"),
        ("compare", {"init": "same:nosuch"}, [], "nosuch"),
        ("preflight", {"placements": "keel"}, ["--placement=pre_ln"], "placement"),
        ("preflight", {"learning-rates": "1e-3"}, ["--learning-rate=1e-2"], "learning_rate"),
        ("preflight", {"burn-in": "3"}, [], "burn_in"),
        ("coord-check", {"widths": "16"}, [], "widths"),
        ("coord-check", {"widths": "16,17"}, [], "hidden_size"),
        ("transfer", {"num-heads": "2"}, [], "num_heads"),
        ("transfer", {"proxy-width": "64"}, [], "proxy_width"),
        ("transfer", {"verify-width": "64"}, [], "verify_width"),
        ("transfer", {"width-scaling": "none"}, [], "width_scaling"),
        ("probe", {"probes": "gains,gains"}, [], "gains"),
        ("probe", {"probes": "gains(nosuch=1)"}, [], "nosuch"),
        ("probe", {"dtype": "int8"}, [], "dtype"),
        ("convert", {}, ["--to=lamina"], "--to"),
        ("report", {}, ["--height=0"], "height"),
        ("placements", {}, ["--num-layers=0"], "num_layers"),
    ]
    for name, changes, more, said in pairs:
        flags = {key.replace("-", "_"): value for key, value in changes.items()}
        yield "contradictions", [*line(name, **flags), *more], (said, said.replace("_", "-")), {}, False


def environments(folder: Path) -> Iterator[Row]:
    """Variables that the commands read."""
    cache = {"LAMINA_CACHE": str(folder / "corpus.txt" / "cache")}
    yield "environment", line("pretrain"), ("cache",), cache, True
    yield "environment", line("compare"), ("cache",), cache, True
    for name in ("pretrain", "preflight"):
        yield "environment", line(name), ("LAMINA_CACHE",), {"LAMINA_CACHE": "~nouser/cache"}, name == "pretrain"
    for value in ("two", "-1", "0", "2", "1.5"):
        yield "environment", line("compare"), ("WORLD_SIZE",), {"WORLD_SIZE": value, "RANK": "0"}, True
        yield (
            "environment",
            line("pretrain"),
            ("WORLD_SIZE", "MASTER", "RANK"),
            {"WORLD_SIZE": value, "RANK": "0"},
            True,
        )
    yield "environment", line("pretrain"), ("RANK",), {"WORLD_SIZE": "1", "RANK": "first"}, True
