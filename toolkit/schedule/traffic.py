"""How messages and collectives are counted."""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from toolkit.schedule.instruction import Action, Instruction


class Traffic(NamedTuple):
    """What one rank sends in one slot: parameter messages, and their size in stage-parameters."""

    messages: int
    units: Fraction


NOTHING, _MESSAGE = Traffic(0, Fraction(0)), Traffic(1, Fraction(1))


def together(found: Sequence[Traffic]) -> Traffic:
    """The sum of all."""
    return Traffic(sum(f.messages for f in found), sum((f.units for f in found), Fraction()))


def units_sent(traffic: Sequence[Sequence[Traffic]]) -> tuple[Fraction, ...]:
    """What all ranks together send in each slot, in stage-parameters: of ``[slot][rank]``."""
    return tuple(sum((sent.units for sent in slot if sent.units), Fraction()) for slot in traffic)


def rounds(action: Action, n_ranks: int) -> int:
    """Messages of a collective that wait for each other: of a ring, or of a binomial tree."""
    return 2 * (n_ranks - 1) if action == Action.ALL_REDUCE else (n_ranks - 1).bit_length()


def traffic_of(i: Instruction, rank: int) -> Traffic:
    """What ``rank`` sends by an instruction that moves weights or gradients."""
    if i.action == Action.SEND:
        return _MESSAGE
    if i.action == Action.ALL_REDUCE:
        messages = rounds(i.action, len(i.peers))
        return Traffic(messages, Fraction(messages, len(i.peers)))
    if i.action == Action.BROADCAST:
        messages = _tree_children(i.peers.index(rank), len(i.peers))
    else:
        messages = int(i.action == Action.REDUCE and rank != i.peers[0])
    return Traffic(messages, Fraction(messages)) if messages else NOTHING


def received_of(i: Instruction, rank: int) -> Traffic:
    """What ``rank`` receives by an instruction that moves something."""
    if i.action == Action.RECV:
        return _MESSAGE
    if i.action == Action.ALL_REDUCE:
        return traffic_of(i, rank)
    if i.action == Action.REDUCE:
        messages = _tree_children(i.peers.index(rank), len(i.peers))
    else:
        messages = int(i.action == Action.BROADCAST and rank != i.peers[0])
    return Traffic(messages, Fraction(messages))


def _tree_children(position: int, n: int) -> int:
    """Children of ``position`` in the binomial tree over 0 .. n-1 whose root is 0."""
    bits = range(position.bit_length(), n.bit_length())
    return sum(position + (1 << bit) < n for bit in bits)
