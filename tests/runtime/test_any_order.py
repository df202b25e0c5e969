"""A program done in any order that its needs allow trains as in its own, bit by bit."""

import copy
import random
from collections import defaultdict, deque

import pytest
import torch
from torch.nn import functional as F

from tests.runtime import models
from tests.schedule.meetings import COLLECTIVES, METHODS, occasion, other_ends
from toolkit.runtime import SingleProcess
from toolkit.runtime.dataflow import Dataflow, in_background
from toolkit.runtime.single_process import Scheduled
from toolkit.runtime.updater import GradientSum
from toolkit.schedule import Action, Buffer


class InAnyOrder(Scheduled):
    """Does a program's instructions as they become possible, drawn at random."""

    def __init__(self, scheduled, seed):
        self.__dict__ |= scheduled.__dict__
        self.chance = random.Random(seed)

    def execute(self, program, versions, microbatches):
        self.microbatches = microbatches
        self.orders = program.ranks
        self.ranks = self._ranks(program, versions, self.microbatches)
        self.flows = [
            Dataflow(order, r, ordered=False) for r, order in enumerate(self.orders)
        ]
        self.main = [
            deque(p for p, i in enumerate(order) if not in_background(i))
            for order in self.orders
        ]
        self.on_its_way, self.other_end = {}, other_ends(program)
        self.met = defaultdict(dict)
        self.received = defaultdict(list)  # parts of sums, until they are used
        self.under_way = []
        self.opened = [0] * len(self.orders)
        while any(flow.n_left for flow in self.flows):
            assert any(
                self._advance(rank) for rank in self._shuffled(range(len(self.orders)))
            )
        yield from map(self.microbatches.result, program.steps)

    def _shuffled(self, some):
        return self.chance.sample([*some], len(some))

    def _advance(self, rank):
        """Do some of what is possible on a rank; whether anything has been."""
        flow, main, order = self.flows[rank], self.main[rank], self.orders[rank]
        ahead = self.chance.choice((1, 3, 30))
        self.opened[rank] = max(
            self.opened[rank], (main[0] if main else len(order)) + ahead
        )
        flow.open(min(self.opened[rank], len(order)))
        begun = []
        while (position := flow.next()) is not None:
            begun.append(position)
        for position in self._shuffled(begun):
            self._begin(rank, position)
        ended = [
            x for x in self._shuffled(self.under_way) if x[0] == rank and self._end(*x)
        ]
        computes = bool(main) and flow.lacks_nothing(main[0])
        if computes:
            position = main.popleft()
            self.ranks[rank].execute(order[position])
            flow.end(position)
        return bool(begun or ended or computes)

    def _begin(self, rank, position):
        i, here = self.orders[rank][position], self.ranks[rank]
        if i.action != Action.RECV and (
            i.buffer == Buffer.GRADIENT or i.action == Action.UPDATE
        ):
            for _, j, payload in sorted(self.received.pop((rank, i.stage, i.step), ())):
                here.take(j, payload)
        if not i.action.communicates:
            here.execute(i)
            self.flows[rank].end(position)
            return
        if i.action == Action.SEND:
            self.on_its_way[self.other_end[rank, position]] = copy.deepcopy(
                here.give(i)
            )
        elif i.action in COLLECTIVES:
            gives = i.action != Action.BROADCAST or rank == i.peers[0]
            self.met[occasion(i)][rank] = copy.deepcopy(here.give(i)) if gives else None
        self.under_way.append((rank, position))

    def _end(self, rank, position):
        i, here = self.orders[rank][position], self.ranks[rank]
        is_root = rank == i.peers[0]
        if i.action == Action.RECV:
            if (rank, position) not in self.on_its_way:
                return False
            payload = self.on_its_way.pop((rank, position))
            if i.buffer == Buffer.GRADIENT:
                self.received[rank, i.stage, i.step].append((position, i, payload))
            else:
                here.take(i, payload)
        elif i.action in COLLECTIVES:
            if len(self.met[occasion(i)]) < len(i.peers):
                return False
            parts = [copy.deepcopy(self.met[occasion(i)][peer]) for peer in i.peers]
            if i.action == Action.BROADCAST and not is_root:
                here.take(i, parts[0])
            elif i.action == Action.ALL_REDUCE or (
                i.action == Action.REDUCE and is_root
            ):
                total = GradientSum()
                for part in parts:
                    total.add(part.tensors)
                here.take(i, total)
        self.under_way.remove((rank, position))
        self.flows[rank].end(position)
        return True


@pytest.mark.parametrize("schedule", METHODS, ids=models.name_of)
def test_any_order_trains_alike(schedule):
    """Bit by bit as in the order of the program, whatever comes first."""
    batches = models.make_batches(schedule.n_microbatches, 3)

    def trained(seed):
        stages = models.cut(models.residual(), schedule)
        runtime = SingleProcess(stages, schedule, sgd, F.cross_entropy, "scheduled")
        if seed is not None:
            runtime._engine = InAnyOrder(runtime._engine, seed)
        losses = [result.losses for result in runtime.run(batches)]
        return runtime.module().state_dict() | dict(enumerate(losses))

    expected = trained(None)
    for seed in range(2):
        found = trained(seed)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
