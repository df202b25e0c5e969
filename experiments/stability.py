"""The largest stable learning rate of a schedule, certified; times the curvature of the loss.

    python experiments/stability.py schedule=cdp_v1 workers=8 stages=8
    python experiments/stability.py model=resnet8 data=digits +schedule@also.cdp_v1=cdp_v1
    python experiments/stability.py measured=networks

With a model and data: the curvature at the first weights, and the largest stable rates. More
schedules: +schedule@also.NAME=... With measured=quadratic or measured=networks: rates found by
training next to certified ones, on a quadratic loss or on three small networks.
"""

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from toolkit.cli import entry_point, output_folder
from toolkit.errors import UserError

if TYPE_CHECKING:
    from toolkit.plan.curvature import Curvature
    from toolkit.schedule import Schedule

_FORMS = (("heavy ball", False), ("Nesterov", True))


@entry_point("stability")
def main(config: DictConfig) -> None:
    from benchmarks import stable_rates

    from toolkit.cli import build_schedules
    from toolkit.format import table
    from toolkit.results import describe, write_result
    from toolkit.training import pick_device

    start, folder, device = time.perf_counter(), output_folder(), pick_device(config.device)
    more: dict[str, Any] = {}
    if config.measured is not None:
        rows = []
        for row in stable_rates.measured_rates(config.measured, config.stages, config.seed):
            case = " ".join(row[key] for key in ("model", "start", "rule", "momentum") if row[key])
            print(f"{case}: certified {row['certified']:.4g}, found {row['found']:.4g}", flush=True)
            rows.append(row)
        shown = more["summary"] = stable_rates.summary(rows)
        print(f"\nlargest stable rates of {config.stages} stages, found by training\n")
    else:
        schedules = build_schedules(config)
        if (config.model is None) != (config.data is None):
            raise UserError("model and data go together: give both, or none of them")
        rows, momentum = [], config.optimizer.get("momentum")
        if momentum is None:
            raise UserError("optimizer has no momentum: stability is that of SGD, optimizer=sgd")
        for name, schedule in schedules.items():
            found = curvature(config, schedule) if config.model is not None else None
            rows.append({"schedule": name} | limits(schedule, momentum, found))
        shown = [cells(row) for row in rows]
        print(f"\nlargest stable rate times curvature, momentum {momentum:g}\n")
    seconds = time.perf_counter() - start
    write_result(folder, "stability", rows, config, describe(device), seconds, **more)
    print(f"{table(shown)}\n\nwritten to {folder}: stability.csv, result.json")


def limits(
    schedule: "Schedule", momentum: float, found: "tuple[Curvature, list[float]] | None"
) -> dict[str, Any]:
    """The limits of a schedule, with heavy ball and Nesterov, over those of DP; and rates."""
    from toolkit.plan.stability import coupling_of, largest_stable_rate
    from toolkit.schedule import catalog

    dp = catalog.data_parallel(schedule.n_microbatches, n_stages=schedule.n_stages)
    row: dict[str, Any] = {}
    for form, nesterov in _FORMS:
        certify = partial(largest_stable_rate, momentum=momentum, nesterov=nesterov)
        certificate = certify(schedule)
        row[form] = certificate.limit
        row[f"{form} / DP"] = certificate.limit / certify(dp).limit
        if found:
            curved, shares = found
            own = certify(schedule, coupling=coupling_of(shares))
            row |= {"curvature": curved.value, f"rate, {form}": own.rate(curved.value)}
    return row | {"kind": certificate.kind}


def curvature(config: DictConfig, schedule: "Schedule") -> "tuple[Curvature, list[float]]":
    """Measure the curvature of the first training step, and each stage's share in its direction."""
    from hydra.utils import instantiate

    from toolkit.cli import build_model, load_samples
    from toolkit.options import TrainingOptions
    from toolkit.plan.rate_check import first_curvature, stage_shares
    from toolkit.training import prepare

    names = ("batch", "seed", "partition", "device")
    samples = load_samples(config.data)
    run = prepare(
        TrainingOptions(**{name: config[name] for name in names}),
        model=partial(build_model, config.model, samples.form),
        samples=samples,
        schedule=schedule,
        optimizer=instantiate(config.optimizer, _partial_=True, _convert_="all"),
    )
    found = first_curvature(run, schedule.n_microbatches, tolerance=config.tolerance)
    return found, stage_shares(run, found)


def cells(row: dict[str, Any]) -> dict[str, Any]:
    """``row`` with three digits a number."""
    return {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items()}


if __name__ == "__main__":
    main()
