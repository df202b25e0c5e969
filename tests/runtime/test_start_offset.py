"""Who waits for its turn to start, who gives it, and that nobody waits for ever."""

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hypothesis import given

from tests.schedule.strategies import programs, quick
from toolkit.runtime.start_offset import StartOffset
from toolkit.schedule import Action, catalog


class NotYetError(Exception):
    """A rank would wait for this key."""


class Store:
    """Shared by all ranks; to wait for what is not there is an error, so nothing blocks."""

    def __init__(self):
        self.keys, self.given, self.waits = set(), Counter(), Counter()

    def set(self, key, value):
        self.keys.add(key)
        self.given[key] += 1

    def wait(self, keys, patience):
        (key,) = keys
        self.waits[key] += 1
        if key not in self.keys:
            raise NotYetError(key)

    def delete_key(self, key):
        self.keys.remove(key)


class World:
    def __init__(self, rank, store):
        self.rank, self.store = rank, store
        self.names = self.finished = 0
        self.waited_for = []
        self.watch = SimpleNamespace(timeout=5.0, waiting=self.waiting)

    def waiting(self, what, peers):
        self.waited_for += peers
        return nullcontext()

    def next_name(self):
        self.names += 1
        return f"world/{self.names}"

    def finish_computing(self):
        self.finished += 1


def first_forward(program, rank):
    return next(i for i in program.ranks[rank] if i.action == Action.FORWARD)


def test_each_program_has_turns_of_its_own():
    """A leader that ends early gives what is left."""
    program, store = catalog.cyclic(2).lower(1), Store()
    worlds = [World(rank, store) for rank in range(2)]
    for name in ("world/1", "world/2"):
        leader, second = (StartOffset(program, world) for world in worlds)
        with pytest.raises(NotYetError, match=rf"^turn/{name}/1$"):
            second.before(first_forward(program, 1))
        leader.finish()
        assert store.given[f"turn/{name}/1"] == 1


@given(programs(max_steps=2))
@quick
def test_turns_of_any_program(program):
    """Each is given once, when the leader reaches its tick, and awaited once.

    A rank that waits at a tick so depends on earlier ticks only, and no ranks can deadlock.
    """
    ticks = program.first_forwards()
    for rank, order in enumerate(program.ranks):
        assert [i.tick for i in order] == sorted(i.tick for i in order)
        first = next((i for i in order if i.action == Action.FORWARD), None)
        begins = first is not None and first.stage == 0
        assert ticks.get(rank) == (first.tick if begins else None)
    leader = min(ticks, key=lambda rank: (ticks[rank], rank))
    later = {
        f"turn/world/1/{r}": tick for r, tick in ticks.items() if tick > ticks[leader]
    }
    store = Store()
    worlds = [World(rank, store) for rank in range(len(program.ranks))]
    ranks = [StartOffset(program, world) for world in worlds]
    for i in program.ranks[leader]:
        ranks[leader].before(i)
        assert store.given == {key: 1 for key, tick in later.items() if tick <= i.tick}
    given = {*store.given}
    ranks[leader].finish()
    for rank in range(len(ranks)):
        for i in program.ranks[rank] if rank != leader else ():
            ranks[rank].before(i)
    # Ranks that start together, or wait for messages only, neither give nor wait.
    assert store.given == store.waits == dict.fromkeys(later, 1)
    assert store.keys == set()  # each rank has taken its turn
    assert worlds[leader].finished == len(given)  # a GPU has done what comes before
    assert [world.waited_for for world in worlds] == [
        [leader] if f"turn/world/1/{rank}" in later else []
        for rank in range(len(ranks))
    ]
