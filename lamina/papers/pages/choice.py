"""Which figures a study has: those that its YAML names, and those that follow from its axes and measures."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from lamina.core.json_types import Json
from lamina.papers.pages.drawing import Drawing, Request
from lamina.papers.pages.folder import StudyFolder
from lamina.papers.pages.kinds import KINDS
from lamina.papers.pages.measured import MAPPED, can_show, probe_of
from lamina.papers.trials.measures import file_name

logger = logging.getLogger(__name__)
_MOST = 6
_FIELDS = ("kind", "x", "y", "color", "measure")


def drawings(study: StudyFolder) -> list[Drawing]:
    """The figures of a study, the one of the paper's own form first; none of a study without a result."""
    return chosen(study)[0]


def chosen(study: StudyFolder) -> tuple[list[Drawing], list[Drawing]]:
    """The figures of a study, and those that are left out: of what follows from its axes, only the first few."""
    written = _made(study, _written(study))
    made = written | {name: drawing for name, drawing in _made(study, _default(study)).items() if name not in written}
    count = max(_MOST, len(written))
    return list(made.values())[:count], list(made.values())[count:]


def _made(study: StudyFolder, requests: Iterable[Request]) -> dict[str, Drawing]:
    made: dict[str, Drawing] = {}
    for request in requests:
        if request.kind not in KINDS:
            logger.warning("%s: figure %r: left out (known: %s)", study.name, request.kind, ", ".join(KINDS))
            continue
        drawing = KINDS[request.kind](study, request)
        if drawing is not None:
            made.setdefault(drawing.name, drawing)
    return made


def _written(study: StudyFolder) -> list[Request]:
    for part in (study.definition_of_scale, study.definition):
        written = part.get("figures") or ([part["figure"]] if part.get("figure") else [])
        if isinstance(written, list) and written:
            return [_request(one) for one in written if isinstance(one, dict)]
    return []


def _request(written: Json) -> Request:
    texts = {name: str(written.get(name) or "") for name in _FIELDS}
    measure = texts.pop("measure")
    measure = file_name(measure).removesuffix(".parquet") if "/" in measure else measure
    return Request(measure=measure, more={k: v for k, v in written.items() if k not in _FIELDS}, **texts)


def _default(study: StudyFolder) -> Iterable[Request]:
    others = [axis for axis in study.varied if axis != "placement"]
    if "num_layers" in others:
        yield Request(kind="by_depth")
    for axis in others:
        if axis != "num_layers":
            yield Request(kind="by_axis", x=axis)
    if not others:
        yield Request(kind="by_axis")
    yield Request(kind="sweep")
    probes: set[str] = set()
    for measure in study.measures:
        probe = probe_of(measure)
        if measure == "records-metrics":
            yield Request(kind="curves")
        elif probe in MAPPED:
            yield Request(kind="heatmap", measure=measure)
        elif can_show(measure) and probe not in probes:
            yield Request(kind="lines_over_layers", measure=probe)
        probes.add(probe)
