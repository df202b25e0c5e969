"""Horovod: gradients averaged by a ring of ranks."""

import os
import shlex
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.errors import check_choice
from toolkit.extras import check_installed
from toolkit.files import EXPERIMENTS
from toolkit.runtime.baselines.ddp import Synchronous, WholeModel
from toolkit.schedule import Schedule


@dataclass(eq=False, repr=False, kw_only=True)
class Horovod(Synchronous):
    """Data parallelism by Horovod's ring all-reduce.

    Any launcher starts the ranks, as for the other runtimes. A weight without a gradient gets one
    of zeros.

    Args:
        stages, optimizer, loss, lr_scheduler, seed, world: as in ``Distributed``.
        schedule: ``catalog.data_parallel(n)``.
        options: only precision and memory format may be set.
        compression: ``none``, or ``fp16`` for the gradients' messages.

    Raises:
        UserError: the schedule is not data parallelism, an option has no such value, or Horovod is
            not installed.

    Source: Sergeev and Del Balso, arXiv 1802.05799.
    """

    runtime = "horovod"
    states = ("replicated",)

    compression: str = "none"

    def __post_init__(self) -> None:
        check_choice("compression", self.compression, ("none", "fp16"))
        super().__post_init__()

    @classmethod
    def check_installed(cls) -> None:
        """Raise UserError if Horovod is missing."""
        way_out = f"sh {shlex.quote(str(EXPERIMENTS / 'install_horovod.sh'))} builds it"
        check_installed("horovod", f"runtime={cls.runtime}", way_out)

    def _check_options(self, schedule: Schedule) -> None:
        super()._check_options(schedule)
        self.check_installed()
        self._horovod = import_module("horovod.torch")

    def _wrap(self, model: WholeModel) -> nn.Module:
        with self.world.watch.waiting("connections of Horovod", self._everyone):
            self._connect()
        # Horovod averages gradients for an optimizer. This one never steps: each stage has its own.
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._averaging = self._horovod.DistributedOptimizer(
            torch.optim.SGD(trained.values()),
            named_parameters=trained.items(),
            compression=getattr(self._horovod.Compression, self.compression),
        )
        return model

    def _backward(self, loss: Tensor) -> None:
        super()._backward(loss)
        # What its own step() would begin with: wait for the sums that the backward's hooks have
        # begun.
        self._averaging.synchronize()

    def _connect(self) -> None:
        """Start Horovod in this job; rank 0 serves the addresses that the others ask for."""
        if self._horovod.is_initialized():
            return
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        # To Horovod each rank is a machine of its own: only NCCL's hierarchy would use more.
        hosts = parse_hosts(",".join(f"rank{rank}:1" for rank in self._everyone))
        places = get_host_assignments(hosts, self.n_ranks)
        server = RendezvousServer()
        port = 0
        if self.rank == 0:
            port = server.start()
            server.init(places)
        port = self.world.gather(port)[0]
        os.environ |= _variables(places[self.rank], os.environ["MASTER_ADDR"], port)
        self._horovod.init()
        # The server ends only when every rank has asked it.
        self.world.barrier()
        if self.rank == 0:
            server.stop()


def _variables(place: Any, address: str, port: int) -> dict[str, str]:
    """Return the environment that Horovod's own launcher would give a rank."""
    numbers = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    values = {name: getattr(place, name) for name in numbers} | {
        "hostname": place.hostname,
        "controller": "gloo",
        "cpu_operations": "gloo",
        "gloo_rendezvous_addr": address,
        "gloo_rendezvous_port": port,
        "gloo_iface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
    }
    return {f"HOROVOD_{name.upper()}": str(value) for name, value in values.items()}
