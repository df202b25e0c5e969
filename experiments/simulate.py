"""Time, memory and traffic of a schedule on a model and a machine, predicted.

    python experiments/simulate.py schedule=one_f_one_b model=vit_b_16 stages=4 microbatches=16
    python experiments/simulate.py schedule.file=my_schedule.csv hardware=ethernet_10

More schedules next to it: +schedule@also.gpipe=gpipe. The trace opens in ui.perfetto.dev.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from tqdm.auto import tqdm

from toolkit.cli import entry_point, output_folder
from toolkit.cli.check_options import check_counts
from toolkit.errors import UserError
from toolkit.format import GIB, MB

if TYPE_CHECKING:
    from toolkit.cost import Costs, Timeline
    from toolkit.schedule import Schedule

_MAX_RANKS = 16  # that are printed
_N_TIMED = 16  # steady training steps whose mean counts: those of contended links differ
_OPS_A_SECOND = 20_000  # that are lowered, verified and simulated
_WORTH = 0.03  # share of a step that other messages have to save


@entry_point("simulate")
def main(config: DictConfig) -> None:
    import torch

    from toolkit.cli import (
        analysed_form,
        build_hardware,
        build_model,
        build_schedules,
        model_name,
        settle_delays,
    )
    from toolkit.cost import profile, recomputing, simulate, write_chakra
    from toolkit.figures import save, timelines
    from toolkit.files import write_csv
    from toolkit.model import partition
    from toolkit.results import describe, write_result
    from toolkit.schedule.steady_state import steps_to_time
    from toolkit.training import pick_device

    start = time.perf_counter()
    check_counts(config, "batch", "steps")
    if not config.optimizer_words >= 0:
        raise UserError(f"optimizer_words is 0 or more: got {config.optimizer_words}")
    form = analysed_form(config)
    settle_delays(config, lambda: form)
    schedules = build_schedules(config)
    hardware = build_hardware(config.hardware)
    device = pick_device(config.device) if config.measured else torch.device("meta")
    example = form.example(config.batch, device)
    with torch.device(device):
        model = build_model(config.model, form)

    @cache  # stages are timed once
    def costs_of(n_stages: int, by: Any = None) -> "Costs":
        stages = partition(model, n_stages, example, by or config.partition, check=False)
        costs = profile(stages, example, precision=config.precision)
        return recomputing(costs, config.checkpoint)

    def predict(schedule: "Schedule", by: Any = None, steps: int | None = None) -> "Timeline":
        costs = costs_of(schedule.n_stages, by)
        state_bytes = [config.optimizer_words * cost.parameter_bytes for cost in costs]
        n_steps = steps or steps_to_time(schedule, _N_TIMED)
        bar.set_description(f"{schedule.name}, {n_steps} steps, {seconds_of(schedule, n_steps)}")
        return simulate(schedule.lower(n_steps).verify(), costs, hardware, state_bytes)

    folder = output_folder()
    notes: list[str] = []
    timelines_drawn: list[Timeline] = []
    rows: list[dict[str, Any]] = []
    rank_rows: list[dict[str, Any]] = []
    with tqdm(unit=" simulations", leave=False, total=2 * len(schedules)) as bar:
        bar.set_description("tracing the model")
        for index, (name, schedule) in enumerate(schedules.items()):
            # The steady state is timed over many steps, and fewer are drawn.
            timeline = predict(schedule)
            bar.update()
            n_samples = config.batch * schedule.n_microbatches
            row = {"schedule": name} | summary(timeline, n_samples, hardware)
            rows.append(row | {"mean staleness": round(schedule.mean_staleness, 3)})
            rank_rows += by_rank(name, timeline)
            notes += faster(schedule, timeline.step_time, predict, config)
            drawn = replace(predict(schedule, steps=config.steps), name=name)
            timelines_drawn.append(drawn)
            bar.update()

            suffix = str(index) if index else ""
            write_traces(drawn, folder, suffix, kineto=config.kineto)
            if config.chakra:
                program, costs = schedule.lower(config.steps), costs_of(schedule.n_stages)
                write_chakra(program, costs, hardware, folder / f"chakra{suffix}")
    figures = save(timelines(timelines_drawn), folder / "timeline")
    write_csv(folder / "ranks.csv", rank_rows)
    device_name = describe(device) if config.measured else "meta tensors"
    write_result(folder, "simulation", rows, config, device_name, time.perf_counter() - start)

    title = f"{model_name(config.model)} in {config.precision}"
    timed = f"stages timed on {device_name}, links of " if config.measured else ""
    print(f"\n{title}, micro-batches of {config.batch}, {timed}{hardware.name}\n")
    print(tables(rows, rank_rows))
    for note in [*size_notes(schedules), *notes]:
        print(f"\nnote: {note}")
    print(f"\nwritten to {folder}: {', '.join(path.name for path in figures)}, trace.json, ...")


def write_traces(timeline: "Timeline", folder: Path, suffix: str, kineto: bool) -> None:
    """Write a timeline for ui.perfetto.dev, as a table, and, if asked, for torch's tools."""
    timeline.to_chrome_trace(folder / f"trace{suffix}.json")
    timeline.to_frame().to_csv(folder / f"spans{suffix}.csv", index=False)
    if kineto:
        timeline.to_kineto_traces(folder / f"kineto{suffix}")


def tables(rows: list[dict[str, Any]], rank_rows: list[dict[str, Any]]) -> str:
    """Return the table of schedules; and that of ranks if there is one schedule of few ranks."""
    from toolkit.format import table

    text = table(rows)
    if len(rows) == 1 and len(rank_rows) <= _MAX_RANKS:
        for rank_row in rank_rows:
            rank_row.pop("schedule")
        text += f"\n\n{table(rank_rows)}"
    return text


def size_notes(schedules: "dict[str, Schedule]") -> list[str]:
    """Return a note if schedules differ in their stages or micro-batches."""
    sizes = {name: (s.n_stages, s.n_microbatches) for name, s in schedules.items()}
    if len(set(sizes.values())) == 1:
        return []
    in_words = ", ".join(f"{name} {stages} and {m}" for name, (stages, m) in sizes.items())
    n_stages, n_microbatches = next(iter(sizes.values()))
    hint = f"stages={n_stages} microbatches={n_microbatches}"
    return [f"stages and micro-batches differ ({in_words}); {hint} gives those of the first"]


def seconds_of(schedule: "Schedule", n_steps: int) -> str:
    """Return about how long it takes to simulate a schedule, in words."""
    n_ops = 2 * schedule.n_stages * schedule.n_microbatches * n_steps
    return f"about {max(1, round(n_ops / _OPS_A_SECOND))} s"


def faster(
    schedule: Any, seconds: float, predict: Callable[..., "Timeline"], config: DictConfig
) -> Iterator[str]:
    """Yield a sentence if workers with late weights take less time with other chains or stages."""
    from toolkit.schedule import CHAINS

    has_late_workers = schedule.max_staleness > 0 and schedule.layout.has_whole_models
    if not has_late_workers or schedule.final is not schedule:
        return
    cuts = (None,) if config.measured else (None, "parameters")  # stages are timed once
    seconds_of_choice: dict[tuple[str, str | None], float] = {(schedule.chains, None): seconds}
    for chains, by in product(CHAINS, cuts):
        with suppress(UserError):  # the schedule or the model does not allow it
            timeline = predict(replace(schedule, chains=chains), by)
            seconds_of_choice[chains, by] = timeline.step_time
    (chains, by), best = min(seconds_of_choice.items(), key=itemgetter(1))
    if best < (1 - _WORTH) * seconds:
        options = f"chains={chains}" + (f" and partition={by}" if by else "")
        share = f"{best / seconds:.2f} of that"
        yield f"{schedule.name} takes {best * 1e3:.3f} ms a step, {share}, with {options}"


def summary(timeline: Any, n_samples: int, hardware: Any) -> dict[str, Any]:
    """Return a row: rates in the steady state, memory of the fullest rank."""
    from toolkit.cost.timeline import ACTIVATIONS, INPUTS

    peaks = [timeline.peak_memory(rank) for rank in range(timeline.n_ranks)]
    fits = all(peak <= hardware.memory_of(rank) for rank, peak in enumerate(peaks))
    fullest = max(range(timeline.n_ranks), key=peaks.__getitem__)
    bytes_of_kind = timeline.at_peak(fullest)
    return {
        "ranks": timeline.n_ranks,
        "ms a step": round(timeline.step_time * 1e3, 3),
        "samples/s": round(n_samples / timeline.step_time, 1),
        "idle": f"{timeline.idle_share:z.1%}",
        "GiB, fullest rank": round(peaks[fullest] / GIB, 3),
        "of it activations": round((bytes_of_kind[ACTIVATIONS] + bytes_of_kind[INPUTS]) / GIB, 3),
        "fits": "yes" if fits else "no",
        "MB a step, busiest rank": round(max(timeline.bytes_a_step()) / MB, 2),
    }


def by_rank(name: str, timeline: Any) -> list[dict[str, Any]]:
    """Return a row per rank: its memory at the peak, its largest activations, what it sends."""
    from toolkit.cost.timeline import ACTIVATIONS

    rows = []
    for rank, bytes_sent in enumerate(timeline.bytes_a_step()):
        row = {"schedule": name, "rank": rank, "GiB": round(timeline.peak_memory(rank) / GIB, 3)}
        for kind, n_bytes in timeline.at_peak(rank).items():
            row[f"of it {kind}"] = round(n_bytes / GIB, 3)
        row["most activations"] = round(timeline.peak_memory(rank, ACTIVATIONS) / GIB, 3)
        rows.append(row | {"MB a step": round(bytes_sent / MB, 2)})
    return rows


if __name__ == "__main__":
    main()
