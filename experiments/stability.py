"""The largest stable learning rate of a schedule, certified; times the curvature of the loss.

    cyclic-dp stability schedule=cdp_v1 workers=8 stages=8
    cyclic-dp stability model=resnet8 data=digits +schedule@also.cdp_v1=cdp_v1
    cyclic-dp stability measured=networks
    cyclic-dp stability tuned=outputs/compare/...

With a model and data: the curvature at the first weights, and the largest stable rates. More
schedules: +schedule@also.NAME=... With measured=quadratic or measured=networks: rates found by
training next to certified ones, on a quadratic loss or on three small networks. With tuned=FOLDER:
the rates that a comparison has tuned next to certified ones, for the model and data if given.
"""

import time
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from toolkit.cli import entry_point, output_folder
from toolkit.errors import UserError
from toolkit.terminal import show, show_import

if TYPE_CHECKING:
    from toolkit.plan.curvature import Curvature
    from toolkit.schedule import Schedule

_FORMS = (("heavy ball", False), ("Nesterov", True))


@entry_point("stability")
def main(config: DictConfig) -> None:
    show_import()
    from benchmarks import stable_rates

    from toolkit.cli import build_schedules
    from toolkit.format import table
    from toolkit.results import describe, write_result
    from toolkit.training import pick_device

    if (config.model is None) != (config.data is None):
        raise UserError("model and data go together: give both, or none of them")
    if config.tuned is not None and config.measured is not None:
        raise UserError("measured and tuned are different questions: give one of them")
    start = time.perf_counter()
    folder = output_folder()
    device = pick_device(config.device)
    result_fields: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    if config.tuned is not None:
        rows, result_fields["summary"] = compare_with_tuned(config, folder)
        # Without a model there is no curvature, and columns of rates would be empty.
        measured_columns = {
            name for row in rows for name in row if row[name] is not None
        }
        table_rows = [
            {
                name: cell
                for name, cell in cells(row).items()
                if name in measured_columns
            }
            for row in rows
        ]
        show(f"\nlearning rates of {config.tuned}: tuned, and the largest stable\n")
    elif config.measured is not None:
        rows = measured_rates(config)
        table_rows = result_fields["summary"] = stable_rates.summary(rows)
        show(f"\nlargest stable rates of {config.stages} stages, found by training\n")
    else:
        schedules = build_schedules(config)
        momentum = config.optimizer.get("momentum")
        if momentum is None:
            raise UserError(
                "optimizer has no momentum: stability is that of SGD, optimizer=sgd"
            )
        for name, schedule in schedules.items():
            measured = None if config.model is None else curvature(config, schedule)
            rows.append({"schedule": name} | limits(schedule, momentum, measured))
        table_rows = [cells(row) for row in rows]
        show(f"\nlargest stable rate times curvature, momentum {momentum:g}\n")
    seconds = time.perf_counter() - start
    write_result(
        folder, "stability", rows, config, describe(device), seconds, **result_fields
    )
    show(table(table_rows))
    if config.tuned is not None:
        show(f"\n{table(result_fields['summary'])}")
    show(f"\nwritten to {folder}: stability.csv, result.json")


def measured_rates(config: DictConfig) -> list[dict[str, Any]]:
    """Find largest stable rates by training; print and return a row for each."""
    from benchmarks import stable_rates

    rows = []
    for row in stable_rates.measured_rates(config.measured, config.stages, config.seed):
        case = " ".join(
            row[key] for key in ("model", "start", "rule", "momentum") if row[key]
        )
        show(f"{case}: certified {row['certified']:.4g}, found {row['found']:.4g}")
        rows.append(row)
    return rows


def limits(
    schedule: "Schedule",
    momentum: float,
    measured: "tuple[Curvature, list[float]] | None",
) -> dict[str, Any]:
    """Return the limits of a schedule, also over those of DP, and its largest stable rates.

    Args:
        schedule: the schedule.
        momentum: momentum of SGD.
        measured: curvature of the loss, and each stage's share in its direction; None: no rates.
    """
    from toolkit.plan.stability import coupling_of, largest_stable_rate
    from toolkit.schedule import catalog

    dp = catalog.data_parallel(schedule.n_microbatches, n_stages=schedule.n_stages)
    row: dict[str, Any] = {}
    # Both forms in any case, since they decide how much delay lowers the rate.
    for form, nesterov in _FORMS:
        certify = partial(largest_stable_rate, momentum=momentum, nesterov=nesterov)
        certificate = certify(schedule)
        row[form] = certificate.limit
        row[f"{form} / DP"] = certificate.limit / certify(dp).limit
        if measured:
            curvature_of_loss, stage_shares = measured
            # The ratios above take stages as coupled equally. With a curvature, their own shares
            # count.
            coupled = certify(schedule, coupling=coupling_of(stage_shares))
            row["curvature"] = curvature_of_loss.value
            row[f"rate, {form}"] = coupled.rate(curvature_of_loss.value)
    row["kind"] = certificate.kind
    return row


def curvature(
    config: DictConfig, schedule: "Schedule"
) -> "tuple[Curvature, list[float]]":
    """Measure the curvature of the first training step, and each stage's share in its direction."""
    from hydra.utils import instantiate

    from toolkit.cli import build_model, load_samples
    from toolkit.options import TrainingOptions
    from toolkit.plan.rate_check import first_curvature, stage_shares
    from toolkit.training import prepare

    samples = load_samples(config.data)
    run = prepare(
        TrainingOptions(
            batch=config.batch,
            seed=config.seed,
            partition=config.partition,
            device=config.device,
        ),
        model=partial(build_model, config.model, samples.form),
        samples=samples,
        schedule=schedule,
        optimizer=instantiate(config.optimizer, _partial_=True, _convert_="all"),
    )
    measured = first_curvature(run, schedule.n_microbatches, tolerance=config.tolerance)
    return measured, stage_shares(run, measured)


def compare_with_tuned(
    config: DictConfig, folder: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Compare the tuned learning rates of a comparison with certified ones, and draw both.

    Returns:
        a row for each rule, and a row with the correlations of the two rates.
    """
    from benchmarks import tuned_rates

    from toolkit.figures import save
    from toolkit.figures import tuned_rates as draw
    from toolkit.results.run_schedule import rebuild_schedule

    runs = tuned_rates.tuned_runs(config.tuned)
    curvature_value: float | None = None
    shares: list[float] | None = None
    if config.model is not None:
        measured, shares = curvature(
            config, rebuild_schedule(runs[0].config["schedule"])
        )
        curvature_value = measured.value
    rows = tuned_rates.rate_rows(runs, curvature_value, shares)
    cosines = tuned_rates.cosines(config.tuned, runs)
    for row in rows:
        # In step 0 no weight can be late: all are the first ones.
        values = [value for step, value in cosines.get(row["rule"], ()) if step > 0]
        row["cosine"] = fmean(values) if values else None
    save(draw(rows, cosines), folder / "tuned_rates")
    return rows, [tuned_rates.correlations(rows)]


def cells(row: dict[str, Any]) -> dict[str, Any]:
    """Return ``row`` with three digits a number."""
    return {
        column: f"{value:.3g}" if isinstance(value, float) else value
        for column, value in row.items()
    }


if __name__ == "__main__":
    main()
