"""The explorer as one page that needs no kernel: every schedule of the catalogue, precomputed."""

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import replace
from gzip import compress

from toolkit.cost import UNIT, Hardware, Timeline, unit_costs
from toolkit.errors import UserError
from toolkit.figures.explorer.device_costs import BATCH, model_costs
from toolkit.figures.explorer.inspection import (
    FASTEST,
    Analysis,
    analyse,
    ddp_seconds,
    predict,
    settled,
    verdict,
)
from toolkit.figures.explorer.page import HTML, frame_of, pane, pictures_of
from toolkit.schedule import ScheduleSpec
from toolkit.schedule.catalog import METHODS

SITE_SIZES = (2, 4, 8, 16)  # stages, and micro-batches
_LARGEST_SIMULATED = 8  # of a model on a machine: larger ones take minutes
UNIFORM = "uniform"
SITE_SETTINGS = (
    UNIFORM,
    "resnet50 on ethernet_10",
    "resnet50 on a100_nvlink",
    "vit_b_16 on ethernet_10",
    "vit_b_16 on a100_nvlink",
)
_STEPS = 2  # training steps drawn


def site_page(
    first: str,
    compared_methods: Sequence[str],
    sizes: Sequence[int] = SITE_SIZES,
    settings: Sequence[str] = SITE_SETTINGS,
) -> str:
    """Return a page with every schedule and another one side by side; the URL keeps the choice.

    Args:
        first: the method that the page shows at first.
        compared_methods: methods on offer at its side; the first one is shown at first.
        sizes: stages, and as many micro-batches.
        settings: ``"uniform"``, or a model and a machine such as ``"resnet50 on ethernet_10"``.
    """
    compressed = {}
    for size in sizes:
        for setting in settings:
            if setting != UNIFORM and size > _LARGEST_SIMULATED:
                continue
            group = _Group(size, setting)
            compressed[f"{size}/{setting}"] = {
                name: _packed(text)
                for name, text in group.texts(first, compared_methods)
            }
    fields = {
        "schedule": [first, *(name for name in METHODS if name != first)],
        "compared with": [*compared_methods],
        "size": [str(size) for size in sizes],
        "costs": [*settings],
    }
    view = HTML.side_by_side(["", ""], "")
    titles = {name: method.label for name, method in METHODS.items()}
    titles |= {setting: _title(setting) for setting in settings}
    return HTML.document(
        "Explorer", HTML.site(fields, titles, json.dumps(compressed), view)
    )


def _title(setting: str) -> str:
    """Return a setting as people say it."""
    if setting == UNIFORM:
        return "equal stages, messages take no time"
    model, _, machine = setting.partition(" on ")
    return f"{model}, {BATCH} images a worker, {Hardware.preset(machine).name}"


class _Group:
    """Every method at one size and in one setting, drawn on one scale."""

    def __init__(self, size: int, setting: str) -> None:
        self.is_uniform = setting == UNIFORM
        model, _, machine = setting.partition(" on ")
        hardware = UNIT if self.is_uniform else Hardware.preset(machine)
        self.results: dict[str, tuple[Analysis, Timeline]] = {}
        self.refusals: dict[str, UserError] = {}
        for name in METHODS:
            try:
                self.results[name] = self._result(
                    ScheduleSpec(name, size, size), model, hardware
                )
            except UserError as error:
                self.refusals[name] = error

    def _result(
        self, spec: ScheduleSpec, model: str, hardware: Hardware
    ) -> tuple[Analysis, Timeline]:
        """Analyse and simulate a schedule in its fastest form."""
        if self.is_uniform:
            analysis = analyse(spec, _STEPS)
            return analysis, predict(
                analysis, unit_costs(analysis.schedule.n_stages), hardware
            )
        costs_of = model_costs(model)
        # In its fastest form, as the widget shows it: otherwise two schedules would differ by their
        # cuts as well.
        spec, form = settled(spec, True, FASTEST, costs_of, hardware)
        assert form is not None  # the machine is a real one
        schedule = form.schedule
        seconds = ddp_seconds(
            costs_of, hardware, schedule.n_ranks, schedule.n_microbatches
        )
        analysis = replace(analyse(spec, _STEPS), form=form, ddp_seconds=seconds)
        return analysis, form.timeline

    def texts(
        self, first: str, compared_methods: Sequence[str]
    ) -> Iterator[tuple[str, str]]:
        """Yield panes by method, and verdicts by two methods."""
        for name, error in self.refusals.items():
            yield name, HTML.impossible(error, "")
        pictures = pictures_of([*self.results.values()], by_slots=self.is_uniform)
        picture_of = dict(zip(self.results, pictures, strict=True))
        # One scale for all methods of a group, so that any two can be compared by eye.
        common_frame = frame_of(pictures)
        # Cells are as wide as they are for the two methods that are shown at first.
        default_frame = frame_of([picture_of[compared_methods[0]], picture_of[first]])
        for name, (analysis, timeline) in self.results.items():
            picture = picture_of[name]
            frame = common_frame._replace(
                end=picture.end, scale=default_frame.scale, cell=default_frame.cell
            )
            yield (
                name,
                pane(analysis, timeline, picture, frame) + HTML.lines(analysis.spec),
            )
            for compared_method in compared_methods:
                if compared_method in self.results and compared_method != name:
                    sentence = verdict(
                        self.results[name],
                        self.results[compared_method],
                        in_slots=self.is_uniform,
                    )
                    yield f"{name} {compared_method}", sentence


def _packed(text: str) -> str:
    # Without a time in the header, so that equal pages are equal files.
    return b64encode(compress(text.encode(), mtime=0)).decode()
