"""Draw a study's configurations as lines. Colors show one compared setting, and panels show the others."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lamina.lab.papers.pages.drawing import Axis, Panel, Series, Value
from lamina.lab.papers.pages.folder import StudyFolder
from lamina.lab.papers.study_catalog import STAGE
from lamina.reports.records import Frame, rows_of
from lamina.reports.sentences import Guess
from lamina.reports.style import PALETTE, Look, looks

_MOST_PANELS = 9
_WIDE = 8  # the axis is logarithmic if the numbers differ by this factor
_DASHES = ("solid", "dash", "dot", "dashdot")
_MARKERS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
_ALONE = Look("#1f2933")
_PAIRS = ("reward", "dpo")  # jobs that compute the loss of a pair of answers
_TITLES = {
    "learning_rate": "learning rate",
    "max_learning_rate": "largest learning rate",
    "num_layers": "layers",
    "hidden_size": "width",
    "hidden_top_abs": "largest |x|",
    "edr": "effective dimension ratio",
    "cosine_by_distance": "cosine similarity",
    "eigenvalue_over_median": "eigenvalue divided by the median",
    "log10_product": "log10 of the product of the norms",
    "arm": "setting",
    "left": "left side of the bound",
    "right": "right side of the bound",
}


def title_of(column: str) -> str:
    return _TITLES.get(column, column.replace("_", " "))


def value_title(study: StudyFolder, column: str) -> str:
    """Return a column's axis title. The title of a loss has the unit of the loss in this study."""
    if column != "eval_loss":
        return title_of(column)
    stages = study.definition_of_scale.get("then")
    jobs = {str(s.get("job") or name) for name, s in stages.items()} if isinstance(stages, dict) else set()
    return f"eval loss ({'nats' if jobs & {*_PAIRS} else Guess.of_any(study.results).unit})"


def arms_title(study: StudyFolder) -> str:
    """Return the title of the column of results in a study's table."""
    return "score, reward or loss" if STAGE in study.axes else value_title(study, study.value)


def color_axis(study: StudyFolder, x: str = "", wanted: str = "") -> str:
    """Return the setting to show by color: ``wanted``, else the placement, else the first setting that varies."""
    if wanted in study.results or wanted == "placement":
        return wanted
    free = [axis for axis in study.varied if axis != x]
    return "placement" if "placement" in free or not free else free[0]


def looks_of(study: StudyFolder, axis: str) -> dict[str, Look]:
    """Return the line style of each value of a compared setting. Values with the same placement share a color."""
    if axis not in study.results:
        return {}
    values = list(dict.fromkeys(_text(value) for value in study.results[axis]))
    placements = study.results["placement"].groupby([_text(value) for value in study.results[axis]]).unique()
    by_placement = looks(study.results["placement"])
    several = study.results["placement"].nunique() > 1 and all(len(placements[value]) == 1 for value in values)
    if axis != "placement" and not several:
        return {
            value: Look(PALETTE[number % len(PALETTE)], marker=_MARKERS[number % len(_MARKERS)])
            for number, value in enumerate(values)
        }
    chosen: dict[str, Look] = {}
    for value in values:
        look = by_placement[value if axis == "placement" else placements[value][0]]
        same = sum(other.color == look.color for other in chosen.values())
        chosen[value] = Look(look.color, _DASHES[same % len(_DASHES)], _MARKERS[same % len(_MARKERS)]) if same else look
    return chosen


def panels(
    study: StudyFolder, rows: Frame, color: str, x: str, *, band: str = "std", numeric: bool = False, lost: bool = True
) -> tuple[Panel, ...]:
    """Draw rows as lines in panels. Each value of ``color`` has a line.

    Each combination of the remaining settings has a panel. If there would be too many panels, a single panel shows all
    lines, and the lines' names contain the remaining settings.

    Args:
        color: the compared setting that colors show.
        x: the column of the x axis.
        band: the kind of spread: "std" or "range".
        numeric: whether x is always a number, as training steps are.
        lost: whether to mark points at which every run failed.
    """
    if rows.empty:
        return ()
    ranks = {}
    for name in (name for name in study.measured_axes if name in rows):
        places = {value: number for number, value in enumerate(ordered_values(study.results[name]))}
        ranks[f"rank of {name}"] = [places.get(_key(value, places), len(places)) for value in rows[name]]
    rows = rows.assign(**ranks).sort_values(list(ranks), kind="stable") if ranks else rows
    rest = [study.label(row, without=(color, x)) for row in rows_of(rows)]
    several = len(set(rest)) <= _MOST_PANELS
    rows = rows.assign(panel=rest if several else "", line=[_text(value) for value in rows[color]], rest=rest)
    chosen, made = looks_of(study, color), []
    for title, group in rows.groupby("panel", sort=False):
        lines = []
        for (name, more), part in group.groupby(["line", "rest"], sort=False):
            label = str(name) if several or not more else f"{name}, {more}"
            part = part if lost else part[part["mean"].notna()]
            lines.append(line(part, x, label, chosen.get(str(name), _ALONE), band=band, numeric=numeric))
        kept = tuple(line for line in lines if line is not None)
        if kept:
            made.append(Panel(title=str(title), series=kept))
    return tuple(made)


def axis(column: str, values: Iterable[object]) -> Axis:
    """Return the axis of a column's values. Numbers over a wide range have a logarithmic axis."""
    ordered = ordered_values(values)
    numbers = [value for value in ordered if isinstance(value, float)]
    log = len(numbers) == len(ordered) > 2 and numbers[0] > 0 and numbers[-1] / numbers[0] >= _WIDE
    return Axis(title=title_of(column), log=log or column == "learning_rate", ticks=tuple(ordered))


def joined(values: Iterable[object]) -> bool:
    """Return whether lines may join the points. Every x value must be or contain a number."""
    return all(isinstance(value, float) or re.search(r"\d", str(value)) for value in ordered_values(values))


def ordered_values(values: Iterable[object]) -> list[Value]:
    """Return the distinct values of an axis: numbers by size, texts in the study's order."""
    once = list(dict.fromkeys(point(value) for value in values))
    numbers = sorted(value for value in once if isinstance(value, float))
    if len(numbers) < len(once):
        return [_text(value) for value in once]
    # With 0 and several powers of ten, neither a linear nor a logarithmic axis fits, so the numbers become texts.
    wide = len(numbers) > 2 and numbers[0] == 0 < numbers[1] and numbers[-1] / numbers[1] >= _WIDE
    wide = wide and numbers[2] > 3 * numbers[1]  # layers 0, 1, 2, ... are not powers of ten
    return [_text(value) for value in numbers] if wide else list(numbers)


def point(value: object) -> Value:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return float(value)


def line(rows: Frame, x: str, label: str, look: Look, *, band: str = "std", numeric: bool = False) -> Series | None:
    """Draw the rows of ``over_seeds`` as a line, with the arguments of ``panels``, or return None without points."""
    points = rows[rows["mean"].notna()]
    values = sorted({float(value) for value in rows[x]}) if numeric else ordered_values(rows[x])
    order: dict[Value, int] = {value: number for number, value in enumerate(values)}
    points = points.assign(place=[order[_key(value, order)] for value in points[x]]).sort_values("place", kind="stable")
    lost = rows[rows["mean"].isna()]
    if points.empty and lost.empty:
        return None
    several = bool((points["trained"] > 1).any())
    low, high = (tuple(map(float, points[name])) for name in ("low", "high"))
    if band == "std":
        spread = points["std"].fillna(0.0)
        low, high = (tuple(map(float, points["mean"] + sign * spread)) for sign in (-1, 1))
    return Series(
        label=label,
        look=look,
        x=tuple(_key(value, order) for value in points[x]),
        y=tuple(map(float, points["mean"])),
        low=low if several else (),
        high=high if several else (),
        lost=tuple((_key(row[x], order), str(row["ended"])) for row in rows_of(lost)),
    )


def _key(value: object, order: dict[Value, int]) -> Value:
    return as_point if (as_point := point(value)) in order else _text(value)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
