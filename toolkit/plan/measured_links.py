"""Links as the processes of a job find them, in place of a machine's published ones."""

import os
from dataclasses import replace

from toolkit.cost import Hardware
from toolkit.errors import UserError
from toolkit.runtime.meters.running_costs import probe_links
from toolkit.runtime.process_group.join import join, leave
from toolkit.torchrun import is_rank_zero

_MESSAGE_BYTES = 2**22
# The fastest round counts, since other traffic only makes a link slower.
_ROUNDS = 3


def with_measured_links(hardware: Hardware, device: str = "auto") -> Hardware | None:
    """Return ``hardware`` with the latency and bandwidth that this job's processes measure.

    Every process of the job calls it. They form a ring, all send at once, and the slowest link
    counts. One process on each machine measures the links between machines; several processes of
    one machine measure those within it.

    Args:
        hardware: machines whose computing and memory stay as they are.
        device: whose memory messages leave from, as of :func:`toolkit.runtime.join`.

    Returns:
        The machines; None in all processes but the first, which have nothing more to do.

    Raises:
        UserError: the job has one process, several machines have several processes each, or ranks
            of a machine share its link.
    """
    n_processes = int(os.environ.get("WORLD_SIZE", "1"))
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", n_processes))
    if n_processes < 2:
        raise UserError(
            "measure_links=true times the links between the processes of a job: got one process."
            " Start one on each machine, by torchrun --nnodes 2 --nproc-per-node 1 -m toolkit plan"
        )
    if 1 < n_local < n_processes:
        raise UserError(
            f"measure_links=true: got {n_local} processes on a machine and {n_processes} in all;"
            " expected one on each machine (--nproc-per-node 1), or all on one machine"
        )
    if hardware.ranks_per_machine > 1:
        raise UserError(
            "measure_links=true measures links of one kind: got hardware of"
            f" {hardware.ranks_per_machine} ranks per machine, which have links of two; choose"
            " hardware of one rank per machine"
        )
    world = join(device=device)
    rounds = [probe_links(world, _MESSAGE_BYTES) for _ in range(_ROUNDS)]
    # The first process plans for minutes, and the others end: nobody is to be missed.
    leave()
    if not is_rank_zero():
        return None
    latency = min(latency for latency, _ in rounds)
    bandwidth = max(bandwidth for _, bandwidth in rounds)
    return replace(
        hardware,
        name=f"{hardware.name}, links as measured",
        link_latency=latency,
        link_bandwidth=bandwidth,
    )
