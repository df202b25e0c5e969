"""How much weights and gradients a rank sends and receives by one instruction.

An all-reduce among n ranks counts as a ring, 2(n-1) messages a rank of 1/n of the stage each. A
broadcast or a reduction to one rank counts as a binomial tree of whole stages, here on six ranks::

    position 0 --> 1, 2, 4      1 --> 3, 5      2, 3, 4, 5 are leaves
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from toolkit.schedule.instruction import Action, Instruction


class Traffic(NamedTuple):
    """Parameter messages of one rank in one slot, and their size in stage-parameters."""

    messages: int
    units: Fraction


NOTHING = Traffic(0, Fraction(0))


def total_traffic(amounts: Iterable[Traffic]) -> Traffic:
    """Return the sum of all messages and units."""
    messages, units = NOTHING
    for traffic in amounts:
        messages += traffic.messages
        units += traffic.units
    return Traffic(messages, units)


def units_sent(traffic: Sequence[Sequence[Traffic]]) -> tuple[Fraction, ...]:
    """Return what all ranks send in each slot, in stage-parameters, from ``[slot][rank]``."""
    units = []
    for sent_of_ranks in traffic:
        # Most ranks send nothing in a slot, and fractions are slow to add.
        units.append(
            sum((sent.units for sent in sent_of_ranks if sent.units), Fraction())
        )
    return tuple(units)


def rounds(action: Action, n_ranks: int) -> int:
    """Return how many messages of a collective, a ring or a binomial tree, wait for each other."""
    if action == Action.ALL_REDUCE:
        return 2 * (n_ranks - 1)
    return (n_ranks - 1).bit_length()


def traffic_of(i: Instruction, rank: int) -> Traffic:
    """Return what ``rank`` sends by an instruction that moves weights or gradients."""
    if i.action == Action.ALL_REDUCE:
        messages = rounds(i.action, len(i.peers))
        return Traffic(messages, Fraction(messages, len(i.peers)))
    if i.action == Action.BROADCAST:
        messages = _tree_children(i.peers.index(rank), len(i.peers))
    else:
        is_giver = i.action == Action.REDUCE and rank != i.peers[0]
        messages = int(is_giver or i.action == Action.SEND)
    return Traffic(messages, Fraction(messages))


def received_of(i: Instruction, rank: int) -> Traffic:
    """Return what ``rank`` receives by an instruction that moves something."""
    if i.action == Action.ALL_REDUCE:
        return traffic_of(i, rank)
    if i.action == Action.REDUCE:
        messages = _tree_children(i.peers.index(rank), len(i.peers))
    else:
        messages = int(i.action.communicates and i.leaves(rank))
    return Traffic(messages, Fraction(messages))


def _tree_children(position: int, n: int) -> int:
    """Return how many children ``position`` has in the binomial tree over 0 .. n-1 with root 0."""
    # The children of a position are one bit longer: it plus each power of two above it.
    bits = range(position.bit_length(), n.bit_length())
    return sum(position + (1 << bit) < n for bit in bits)
