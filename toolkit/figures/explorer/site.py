"""The explorer as one page that needs no kernel: every schedule of the catalogue, precomputed."""

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from gzip import compress

from toolkit.cost import UNIT, Costs, Hardware, Timeline, unit_costs
from toolkit.errors import UserError
from toolkit.figures.explorer.inspection import Analysis, analyse, costs_of, predict, verdict
from toolkit.figures.explorer.page import HTML, frame_of, pane, pictures_of
from toolkit.schedule import ScheduleSpec
from toolkit.schedule.catalog import METHODS

SIZES = (4, 8)  # stages, and micro-batches
SETTINGS = ("uniform", *(f"{model} on {machine}" for model in ("resnet50", "vit_b_16")
                         for machine in ("ethernet_10", "a100_nvlink")))  # fmt: skip
BESIDE = ("dp", "cdp_v1", "cdp_v2", "gpipe", "one_f_one_b", "zero_dp")
_STEPS = 2  # training steps drawn


def site_page(sizes: Sequence[int] = SIZES, settings: Sequence[str] = SETTINGS) -> str:
    """Return a page with every schedule beside another; the URL keeps what is chosen.

    Args:
        sizes: stages, and as many micro-batches.
        settings: ``"uniform"``, or a model and a machine such as ``"resnet50 on ethernet_10"``.
    """
    compressed = {
        f"{size}/{setting}": _packed(dict(_group(size, setting)))
        for size in sizes
        for setting in settings
    }
    fields = {
        "schedule": ["cdp_v2", *(name for name in METHODS if name != "cdp_v2")],
        "beside": [*BESIDE],
        "size": [str(size) for size in sizes],
        "costs": [*settings],
    }
    return HTML.document(
        "Explorer", HTML.site(fields, json.dumps(compressed), HTML.side_by_side(["", ""], ""))
    )


def _group(size: int, setting: str) -> Iterator[tuple[str, str]]:
    """Yield panes by schedule, on one scale, and verdicts by two schedules."""
    is_uniform, (model, _, machine) = setting == "uniform", setting.partition(" on ")
    hardware = UNIT if is_uniform else Hardware.preset(machine)
    results: dict[str, tuple[Analysis, Timeline]] = {}
    for name in METHODS:
        try:
            analysis = analyse(ScheduleSpec(name, size, size), _STEPS)
            stages = analysis.schedule.n_stages
            costs: Costs = unit_costs(stages) if is_uniform else costs_of(model, stages)
            results[name] = analysis, predict(analysis, costs, hardware)
        except UserError as error:
            yield name, HTML.impossible(error, "")
    pictures = dict(
        zip(results, pictures_of([*results.values()], by_slots=is_uniform), strict=True)
    )
    common_frame, default_frame = (
        frame_of([*pictures.values()]),
        frame_of([pictures["dp"], pictures["cdp_v2"]]),
    )
    for name, (analysis, timeline) in results.items():
        picture = pictures[name]
        frame = common_frame._replace(
            end=picture.end, scale=default_frame.scale, cell=default_frame.cell
        )
        yield name, pane(analysis, timeline, picture, frame) + HTML.lines(analysis.spec)
        for other_name in BESIDE:
            if other_name in results and other_name != name:
                sentence = verdict(results[name], results[other_name], in_slots=is_uniform)
                yield f"{name} {other_name}", sentence


def _packed(group: dict[str, str]) -> dict[str, str]:
    return {
        name: b64encode(compress(text.encode(), mtime=0)).decode() for name, text in group.items()
    }
