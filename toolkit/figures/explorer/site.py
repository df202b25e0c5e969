"""The explorer as one page that needs no kernel: every schedule of the catalogue, precomputed."""

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from gzip import compress

from toolkit.cost import UNIT, Hardware, Timeline, unit_costs
from toolkit.errors import UserError
from toolkit.figures.explorer.inspection import Analysis, analyse, costs_of, predict, verdict
from toolkit.figures.explorer.page import HTML, frame_of, pane, pictures_of
from toolkit.schedule import ScheduleSpec
from toolkit.schedule.catalog import METHODS

SITE_SIZES = (4, 8)  # stages, and micro-batches
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
            group = _Group(size, setting)
            compressed[f"{size}/{setting}"] = {
                name: _packed(text) for name, text in group.texts(first, compared_methods)
            }
    fields = {
        "schedule": [first, *(name for name in METHODS if name != first)],
        "compared with": [*compared_methods],
        "size": [str(size) for size in sizes],
        "costs": [*settings],
    }
    view = HTML.side_by_side(["", ""], "")
    return HTML.document("Explorer", HTML.site(fields, json.dumps(compressed), view))


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
                analysis = analyse(ScheduleSpec(name, size, size), _STEPS)
                n_stages = analysis.schedule.n_stages
                costs = unit_costs(n_stages) if self.is_uniform else costs_of(model, n_stages)
                self.results[name] = analysis, predict(analysis, costs, hardware)
            except UserError as error:
                self.refusals[name] = error

    def texts(self, first: str, compared_methods: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield panes by method, and verdicts by two methods."""
        for name, error in self.refusals.items():
            yield name, HTML.impossible(error, "")
        pictures = pictures_of([*self.results.values()], by_slots=self.is_uniform)
        picture_of = dict(zip(self.results, pictures, strict=True))
        common_frame = frame_of(pictures)
        # Cells are as wide as they are for the two methods that are shown at first.
        default_frame = frame_of([picture_of[compared_methods[0]], picture_of[first]])
        for name, (analysis, timeline) in self.results.items():
            picture = picture_of[name]
            frame = common_frame._replace(
                end=picture.end, scale=default_frame.scale, cell=default_frame.cell
            )
            yield name, pane(analysis, timeline, picture, frame) + HTML.lines(analysis.spec)
            for compared_method in compared_methods:
                if compared_method in self.results and compared_method != name:
                    pair = self.results[name], self.results[compared_method]
                    yield f"{name} {compared_method}", verdict(*pair, in_slots=self.is_uniform)


def _packed(text: str) -> str:
    return b64encode(compress(text.encode(), mtime=0)).decode()
