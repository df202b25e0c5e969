"""Values that papers publish about schedules, next to ours in the same settings.

    cyclic-dp papers
    cyclic-dp papers only=[zero_bubble,gpipe]

A file of conf/papers has the settings and values of a paper. Stage times and latencies are the
paper's, and nothing is fitted. Ours come from the programs that run, simulated.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from tqdm.auto import tqdm

from toolkit.cli import entry_point, output_folder
from toolkit.errors import UserError, check_choice
from toolkit.format import table
from toolkit.terminal import show

if TYPE_CHECKING:
    from toolkit.cost.published import PublishedValue

EQUAL = 0.005  # of the published value, or less than the digits that are printed
_DIGITS = 1e-4

LEGEND = """\
equal: within 0.5 %, or in four digits; at most: the largest difference
p: ranks; m: micro-batches; N: workers
bubble rate: idle share of the rank with the longest span
idle share: of the whole step; bubble time: in forwards of a rank
activations: in micro-batches over the whole model
TFLOP/s a device: as the paper counts operations; TP, PP, DP: devices of a rank,
ranks of a pipeline, workers"""


@entry_point("papers")
def main(config: DictConfig) -> None:
    from toolkit.cost.published import published_values
    from toolkit.results import describe_cpu, write_result

    start = time.perf_counter()
    values: list[PublishedValue] = []
    bar = tqdm(chosen_papers(config))
    for path in bar:
        bar.set_description(path.stem)
        values += published_values(path)
    rows = [row_of(value) for value in values]
    folder = output_folder()
    seconds = time.perf_counter() - start
    write_result(folder, "papers", rows, config, describe_cpu(), seconds)
    show(f"\n{table(summary(values))}\n")
    different = [cells_of(value) for value in values if not is_equal(value)]
    if different:
        show(f"What differs:\n\n{table(different)}\n")
    # One reason may explain several values.
    for note in dict.fromkeys(value.note for value in values if not is_equal(value)):
        show(f"note: {note}")
    show(f"\n{LEGEND}\n\nall {len(values)} values are in {folder}/papers.csv")


def chosen_papers(config: DictConfig) -> list[Path]:
    """Return the files of the papers that are asked for."""
    from toolkit.cost.published import papers

    paths = papers()
    if config.folder is not None:
        paths = sorted(Path(config.folder).glob("*.yaml"))
        if not paths:
            raise UserError(
                f"folder has files of papers, *.yaml: got {config.folder}, without any"
            )
    if config.only is None:
        return paths
    path_of_name = {path.stem: path for path in paths}
    names = [config.only] if isinstance(config.only, str) else [*config.only]
    for name in names:
        check_choice("only", name, [*path_of_name])
    return [path_of_name[name] for name in names]


def is_equal(value: "PublishedValue") -> bool:
    """Whether ours is the published value, to its digits."""
    # Of a value near 0, such as an idle share, half a per cent is less than its last digit.
    return abs(value.difference) <= max(_DIGITS, EQUAL * abs(value.value))


def summary(values: "Sequence[PublishedValue]") -> list[dict[str, Any]]:
    """Return a row for each paper and quantity."""
    groups: dict[tuple[str, str], list[PublishedValue]] = {}
    for value in values:
        groups.setdefault((value.paper, value.quantity), []).append(value)
    rows = []
    for (paper, quantity), group in groups.items():
        largest = max((abs(value.difference) for value in group), default=0.0)
        row: dict[str, Any] = {"paper": paper, "what": quantity, "values": len(group)}
        row["equal"] = sum(map(is_equal, group))
        rows.append(row | {"at most": f"{largest:.4f}"})
    return rows


def cells_of(value: "PublishedValue") -> dict[str, Any]:
    """Return a value as the cells of a printed row."""
    return {
        "what": value.quantity,
        "method": value.method,
        "setting": value.setting.in_words,
        "published": f"{value.value:.4f}",
        "ours": f"{value.ours:.4f}",
    }


def row_of(value: "PublishedValue") -> dict[str, Any]:
    """Return a value as a row of the result."""
    cells = cells_of(value) | {"published": value.value, "ours": round(value.ours, 6)}
    row = {"paper": value.paper, "source": value.source} | cells
    return row | {"difference": round(value.difference, 6), "note": value.note}


if __name__ == "__main__":
    main()
