"""What the pages say in words of the kept results is so."""

import json

import pytest

from tests.experiments.command import EXPERIMENTS

RESULTS = EXPERIMENTS / "results"
README = (EXPERIMENTS.parent / "README.md").read_text()
PAGE = (RESULTS / "README.md").read_text()


def rows(name):
    return json.loads((RESULTS / name / "result.json").read_text())["metrics"]


def of(result, rule, column="difference"):
    (row,) = (row for row in rows(result) if row["rule"] == rule)
    return row[column]


def told(result, rule, measure=""):
    """Whether the interval of a difference leaves zero out."""
    difference, width = (of(result, rule, f"{measure}difference{end}") for end in ("", "_95"))
    return abs(difference) > width


def delayed(result, most):
    """The rows with late weights, but by no more than ``most`` steps on average."""
    return [row for row in rows(result) if 0 < row["staleness_mean"] <= most]


def microseconds():
    return [row["us an op"] for row in rows("bench_simulator") if "torch" not in row["job"]]


def beside_torch():
    return [row["of torch's"] for row in rows("bench_simulator") if row["of torch's"]]


def reduction(model, axis):
    """Of 32 workers."""
    (row,) = (row for row in rows(f"memory_{model}") if (row["axis"], row["workers"]) == (axis, 32))
    return row["reduction"]


WHOLE = "GiB, fullest rank"


def simulated(name, rule, column):
    return next(row[column] for row in rows(name) if row["schedule"] == rule)


def on_one_device(checkpoint, rule, column="of it activations", stages="checkpointing"):
    """Of what DP has without checkpoints, in per cent."""
    without = simulated(f"{stages}_none", "DP", column)
    return round(100 * simulated(f"{stages}_{checkpoint}", rule, column) / without)


CLAIMS = [
    (
        "CDP takes 27 % off the activations, for staleness and a version more of some weights; "
        "checkpoints take 84 % off those of DP, for 44 % more time. Together they are 86 % below, "
        "and the whole memory is no less than with checkpoints alone",
        lambda: (
            on_one_device("none", "CDP-v2") == 100 - 27
            and on_one_device("all", "DP") == 100 - 84
            and on_one_device("all", "DP", "ms a step") == 144
            and on_one_device("all", "CDP-v2") == 100 - 86
            and on_one_device("all", "CDP-v2", WHOLE) >= on_one_device("all", "DP", WHOLE)
        ),
    ),
    (
        "CDP then takes 44 % off the activations, and 40 % off the whole, in no more time",
        lambda: (
            on_one_device("none", "CDP-v2", stages="activations") == 100 - 44
            and on_one_device("none", "CDP-v2", WHOLE, "activations") == 100 - 40
            and on_one_device("none", "CDP-v2", "ms a step", "activations") == 100
        ),
    ),
    (
        "ResNet-50 with 8 micro-batches takes 40 % less memory than under DP, and less under "
        "CDP and checkpoints than under either",
        lambda: (
            on_one_device("none", "CDP-v2", WHOLE, "activations") == 100 - 40
            and simulated("activations_all", "CDP-v2", WHOLE)
            < min(
                simulated("activations_none", "CDP-v2", WHOLE),
                simulated("activations_all", "DP", WHOLE),
                simulated("checkpointing_all", "DP", WHOLE),
            )
        ),
    ),
    (
        "CDP needs the least of all: 8 % less than DP does with checkpoints in stages of equal "
        "FLOPs, which suit DP better",
        lambda: (
            round(
                100
                * simulated("activations_all", "CDP-v2", WHOLE)
                / simulated("checkpointing_all", "DP", WHOLE)
            )
            == 100 - 8
            and simulated("activations_all", "DP", WHOLE)
            > simulated("checkpointing_all", "DP", WHOLE)
        ),
    ),
    (
        "CDP-v2 ends 0.8 points below DP, and CDP-v1 1.25; both intervals include zero, the second "
        "only just",
        lambda: (
            -0.85 < of("cifar10_long_8", "cdp_v2") < -0.75
            and not told("cifar10_long_8", "cdp_v2")
            and round(of("cifar10_long_8", "cdp_v1"), 2) == -1.25
            and not told("cifar10_long_8", "cdp_v1")
            and of("cifar10_long_8", "cdp_v1") + of("cifar10_long_8", "cdp_v1", "difference_95")
            < 0.1
        ),
    ),
    (
        "the second only just, and that of its loss does not.",
        lambda: told("cifar10_long_8", "cdp_v1", "loss_"),
    ),
    (
        "| CIFAR-10 at four times that rate, in fewer epochs | two points | ten points | "
        "| Imagenette at the paper's rate, ten epochs | four | does not get going |",
        lambda: (
            [round(of(f"cifar10_narrow_{n}", "cdp_v2")) for n in (4, 8)] == [-2, -2]
            and [round(of(f"cifar10_narrow_{n}", "cdp_v1")) for n in (4, 8)] == [-10, -10]
            and round(of("imagenette_narrow_8", "cdp_v2")) == -4
        ),
    ),
    (
        "CDP-v1 gets going now, and ends sixteen points below DP; CDP-v2 ends 2.7 points below. "
        "Neither interval includes zero.",
        lambda: (
            round(of("imagenette_warm_8", "cdp_v1")) == -16
            and round(of("imagenette_warm_8", "cdp_v2"), 1) == -2.7
            and told("imagenette_warm_8", "cdp_v1")
            and told("imagenette_warm_8", "cdp_v2")
            and of("imagenette_warm_8", "cdp_v1", "accuracy")
            > of("imagenette_narrow_8", "cdp_v1", "accuracy") + 15
        ),
    ),
    (
        "CDP-v2 ends 1.5 points below DP instead of 2.7; the two intervals overlap, and neither "
        "includes zero. CDP-v1 ends eleven points below instead of sixteen, with an interval of "
        "nine points to either side.",
        lambda: (
            round(of("imagenette_long_8", "cdp_v2"), 1) == -1.5
            and round(of("imagenette_warm_8", "cdp_v2"), 1) == -2.7
            and told("imagenette_long_8", "cdp_v2")
            and told("imagenette_warm_8", "cdp_v2")
            and of("imagenette_warm_8", "cdp_v2")
            + of("imagenette_warm_8", "cdp_v2", "difference_95")
            > of("imagenette_long_8", "cdp_v2") - of("imagenette_long_8", "cdp_v2", "difference_95")
            and round(of("imagenette_long_8", "cdp_v1")) == -11
            and round(of("imagenette_long_8", "cdp_v1", "difference_95")) == 9
            and round(of("imagenette_warm_8", "cdp_v1")) == -16
        ),
    ),
    (
        "| the same with a warm-up | three | sixteen | "
        "| the same with a warm-up, ResNet-50 | two | nineteen | "
        "| the same with a warm-up, in twice the epochs | 1.5 | eleven |",
        lambda: (
            [round(of("imagenette_warm_8", rule)) for rule in ("cdp_v2", "cdp_v1")] == [-3, -16]
            and [round(of("imagenette50_narrow_8", rule)) for rule in ("cdp_v2", "cdp_v1")]
            == [-2, -19]
        ),
    ),
    (
        "Here CDP-v2 ends 1.7 points below DP, with an interval that includes zero; CDP-v1 ends "
        "nineteen below, with one that does not.",
        lambda: (
            round(of("imagenette50_narrow_8", "cdp_v2"), 1) == -1.7
            and not told("imagenette50_narrow_8", "cdp_v2")
            and round(of("imagenette50_narrow_8", "cdp_v1")) == -19
            and told("imagenette50_narrow_8", "cdp_v1")
        ),
    ),
    (
        "CDP-v2 ends a quarter of a nat behind DP. With NAdam, at the same rate, the interval of "
        "the difference includes zero; with Muon, CDP-v2 ends 0.04 nats behind DP, and ahead of DP "
        "with AdamW",
        lambda: (
            of("text", "cdp_v2", "loss_difference") == pytest.approx(0.25, abs=0.03)
            and not told("text_nadam", "cdp_v2", "loss_")
            and round(of("text_muon", "cdp_v2", "loss_difference"), 2) == 0.04
            and of("text_muon", "cdp_v2", "loss") < of("text", "dp", "loss")
        ),
    ),
    (
        "a constant delay of 2 costs a point, and longer ones break the training; delays of up to "
        "a step and a half on average cost less than half a point, and four of the five intervals "
        "include zero",
        lambda: (
            round(of("delays", "late_2")) == -1
            and max(of("delays", "late_4"), of("delays", "late_8")) < -20
            and len(delayed("delays", 1.5)) == 5
            and all(row["difference"] > -0.5 for row in delayed("delays", 1.5))
            and [row["rule"] for row in delayed("delays", 1.5) if told("delays", row["rule"])]
            == ["cdp_v2"]
        ),
    ),
    (
        "two thirds of the lost accuracy come back",
        lambda: (
            1 - of("prediction_narrow_8", "cdp_v1_predicted") / of("prediction_narrow_8", "cdp_v1")
            == pytest.approx(2 / 3, abs=0.05)
        ),
    ),
    (
        "ViT-B/16 saves nearly half on every time axis",
        lambda: all(
            round(reduction("vit_b_16", axis), 1) == 0.5 for axis in ("flops", "bytes", "roofline")
        ),
    ),
    (
        "Here ResNet-50 saves as much on the axis of FLOPs, and more on those of the roofline and "
        "of bytes; ViT-B/16 saves seven to eight points more than in the paper on every axis.",
        lambda: (
            round(100 * reduction("resnet50", "flops")) == 30
            and min(reduction("resnet50", axis) for axis in ("bytes", "roofline")) > 0.4
            and {round(100 * reduction("vit_b_16", a)) - 42 for a in ("flops", "bytes", "roofline")}
            == {7, 8}
        ),
    ),
    (
        "take about 25 µs an op, up to twice as long as torch.distributed.pipelining's",
        lambda: (
            all(20 < each < 30 for each in microseconds())
            and all(1 < x < 2 for x in beside_torch())
        ),
    ),
]


@pytest.mark.parametrize(("words", "holds"), CLAIMS, ids=[words[:30] for words, _ in CLAIMS])
def test_what_is_said_is_so(words, holds):
    assert words in " ".join(f"{README} {PAGE}".split())
    assert holds()
