"""What two processes find of the machine they run on."""

from toolkit.plan.measured_machine import link_of


def test_a_link_has_a_bandwidth_whatever_slows_its_small_messages():
    n_bytes = 2**22 - 2**12
    assert link_of(1.0, 3.0) == (n_bytes / 2, 1.0)
    assert link_of(3.0, 1.0) == (n_bytes, 0.0)
