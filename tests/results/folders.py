"""Folders of runs as the experiments leave them, written by hand."""

import json
from math import isnan, nan

import yaml
from PIL import Image

from toolkit.files import write_csv, write_json

CATALOG = "toolkit.schedule.catalog"
SCHEDULES = {
    "dp": ("DP", {"_target_": f"{CATALOG}.data_parallel", "delay": 0}),
    "cdp_v1": ("CDP-v1", {"_target_": f"{CATALOG}.cyclic", "delay": 1}),
    "cdp_v2": ("CDP-v2", {"_target_": f"{CATALOG}.cyclic", "delay": "freshest"}),
    "published": ("CDP-v2 as published", {"_target_": f"{CATALOG}.published"}),
}


def config(**more):
    """A training's options."""
    return {
        "model": {"_target_": "toolkit.model.build", "name": "resnet8", "target": None},
        "data": {"_target_": "toolkit.training.data.digits"},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
        "runtime": {"_target_": "toolkit.runtime.SingleProcess", "order": "grouped"},
        "stages": 2,
        "microbatches": 2,
        "batch": 16,
        "epochs": 2,
        "precision": "fp32",
        "device": "auto",
    } | more


def schedule(rule, n=2):
    return {"file": None, "n": n, "n_stages": n} | SCHEDULES[rule][1]


def provenance(options, command, **more):
    return {
        "command": command,
        "config": options,
        "commit": "0123456789abcdef+",
        "versions": {"python": "3.11.7", "torch": "2.15.0"},
        "device": "a processor, 2 threads",
        "started": "2026-01-02T03:04:05+00:00",
        "seconds": 12.5,
    } | more


def rows_of(top1, epochs=2):
    """Epochs that end with the accuracy ``top1`` (a share), and what it lacks as the loss."""
    ends = [top1 * (k + 1) / epochs for k in range(epochs)]
    loss = nan if isnan(top1) else 1.0
    return [
        {"epoch": k, "train_loss": loss, "test_loss": 1 - end, "top1": end}
        | {"samples_per_second": 100.0}
        for k, end in enumerate(ends)
    ]


def train(
    folder,
    rule="dp",
    seed=0,
    top1=0.9,
    command="python experiments/train.py",
    **options,
):
    """A training that has finished."""
    name = SCHEDULES[rule][0]
    n = options.get("stages", 2)
    own = config(schedule=schedule(rule, n), seed=seed) | options
    epochs = rows_of(top1, own["epochs"])
    folder.mkdir(parents=True)
    write_csv(folder / "epochs.csv", epochs)
    result = {"schedule": name, "metrics": epochs[-1], "delays": []}
    result["provenance"] = provenance(own, command)
    write_json(folder / "result.json", result)
    return result


def compare(folder, tops, **options):
    """A comparison that has finished; ``tops``: by rule, the accuracy of each seed.

    A rule is the name of a schedule, and may have a suffix such as in dp-nesterov.
    """
    n_seeds = len(next(iter(tops.values())))
    rules = {rule: schedule(rule.partition("-")[0]) for rule in tops}
    own = config(rules=rules, seeds=n_seeds, seed=0) | options
    folder.mkdir(parents=True)
    write_csv(
        folder / "runs.csv",
        [
            {"rule": rule, "seed": seed} | row
            for seed in range(n_seeds)
            for rule, of_rule in tops.items()
            for row in rows_of(of_rule[seed])
        ],
    )
    metrics = [
        {
            "rule": rule,
            "schedule": SCHEDULES[rule.partition("-")[0]][0],
            "accuracy": 100 * sum(top) / len(top),
        }
        | {"accuracy_sd": 0.5, "difference": -1.25, "difference_95": 0.75}
        | {"loss": 1 - sum(top) / len(top), "loss_sd": 0.125}
        | {"loss_difference": 0.25, "loss_difference_95": 0.0625}
        for rule, top in tops.items()
    ]
    delays = [
        {"rule": rule, "stage": stage, "delay": 1.0, "cosine": 0.9 + stage / 100}
        | {"gradient": 1.0, "fresh_gradient": 1.0, "moved": 0.02, "weights": 2.0}
        for rule in tops
        for stage in (0, 1)
    ]
    source = provenance(own, "python experiments/compare.py experiment=digits")
    write_json(
        folder / "result.json",
        {"metrics": metrics, "delays": delays, "provenance": source},
    )


def job(folder, options, name="train", rule="dp", status=None):
    """A job folder without a result."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(
        yaml.safe_dump(options, sort_keys=False)
    )
    hydra = {
        "hydra": {"job": {"name": name}, "runtime": {"choices": {"schedule": rule}}}
    }
    (folder / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(hydra))
    if status:
        write_json(folder / "status.json", status)


def measured(folder):
    """What a distributed run leaves beside its result."""
    names = ("peak_activations", "peak_weights", "messages_sent", "bytes_sent")
    more = ("messages_received", "bytes_received")
    rows = [
        {"rank": rank, "device_peak": ""}
        | dict.fromkeys((*names, *more), 2_000_000 + rank)
        for rank in (0, 1)
    ]
    write_csv(folder / "ranks.csv", rows)
    Image.new("RGB", (400, 200)).save(folder / "timeline.png")


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def change(folder, **more):
    write_json(folder / "result.json", result_of(folder) | more)
