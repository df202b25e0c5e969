"""What the arguments of a runtime must be, and what ranks of several devices do not take."""

import pytest

from toolkit.errors import UserError
from toolkit.runtime import StepOptions
from toolkit.runtime.runtime_arguments import check_width


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compression": "int8"}, "width=2 takes no compression=int8"),
        ({"is_parallelized": False}, r"width=2 needs .*parallelize="),
        ({"options": StepOptions(compile="default")}, "width=2 takes no compile"),
    ],
)
def test_ranks_of_several_devices_do_not_take_everything(arguments, message):
    """A rank of one device takes it all."""
    accepted = {
        "compression": "bf16",
        "options": StepOptions(),
        "is_parallelized": True,
    }
    check_width(2, **accepted)
    check_width(1, **accepted | arguments)
    with pytest.raises(UserError, match=message):
        check_width(2, **accepted | arguments)
