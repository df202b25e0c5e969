"""The paper's comparison of DP with CDP, each number as a formula and as counted from programs.

    python experiments/communication.py workers=8

Fails if a formula and a count differ.
"""

import sys
import time
from dataclasses import asdict
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from toolkit.config import entry_point

LEGEND = """\
A: activations of one micro-batch over the whole model; P: parameters of the model
activations: the most that a rank holds; in brackets all ranks together
parameters: what a rank keeps from step to step; weights: the most that it holds at once, older
versions included (counted)
sent: parameters and gradients, by a rank in a step on average; in a slot: the most by any rank
rounds: messages of a stage that wait for each other between two slots
"""


@entry_point("communication", Path(__file__).parents[1] / "conf")
def main(config: DictConfig) -> None:
    from toolkit.schedule.comparison import compare
    from toolkit.tracking import describe_cpu, provenance, table, write_csv, write_json

    start = time.perf_counter()
    rows = compare(config.workers)
    folder = Path(HydraConfig.get().runtime.output_dir)
    print(f"\nN = {config.workers}\n\n{table([readable(row) for row in rows])}\n\n{LEGEND}")
    records = [
        {"setting": row.setting, "rule": row.rule}
        | {f"{name}_formula": float(value) for name, value in row.formula.items()}
        | {name: float(value) for name, value in asdict(row.counted).items()}
        for row in rows
    ]
    source = provenance(config, describe_cpu(), time.perf_counter() - start)
    write_csv(folder / "communication.csv", records)
    write_json(folder / "result.json", {"metrics": records, "provenance": source})
    print(f"written to {folder}")
    differing = [row for row in rows if row.differences]
    for row in differing:
        for name, (formula, counted) in row.differences.items():
            print(
                f"{row.setting}, {row.rule}: {name} is {formula} by its formula and {counted} as"
                " counted",
                file=sys.stderr,
            )
    if differing:
        sys.exit(1)
    print("every formula equals its count")


def readable(row) -> dict[str, str]:  # type: ignore[no-untyped-def]
    counted = row.counted
    return {
        "setting": row.setting,
        "rule": row.rule,
        "ranks": f"{counted.ranks}",
        "activations (all)": f"{counted.activations} ({counted.total_activations}) A",
        "parameters": f"{counted.parameters} P",
        "weights": f"{counted.weights} P",
        "sent": f"{counted.traffic} P",
        "in a slot": f"{counted.traffic_in_slot} P",
        "rounds": f"{counted.rounds}",
        "formula": "differs" if row.differences else "equal",
    }


if __name__ == "__main__":
    main()
