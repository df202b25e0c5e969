"""Killed and resumed runs end with the same weights, in short."""

from tests.experiments.command import complete
from tests.thorough import thorough

SHORT = ("bench.runs=1", "bench.kills=1", "bench.rules=[cdp_v2]", "bench.runtimes=[single_process]")
SMALL = "'model=resnet8','data=synthetic','data.n_train=400','data.image_size=8','batch=4'"


@thorough
def test_a_short_one(tmp_path):
    result = complete(
        "bench", tmp_path, "bench=resume", *SHORT, f"bench.options=[{SMALL}]", "device=cpu"
    )
    (row,) = result["metrics"]
    assert row == {
        "runtime": "single_process",
        "rule": "cdp_v2",
        "runs": 1,
        "kills": 1,
        "bit-identical": 1,
        "failed": 0,
    }
