"""Methods of all kinds, and which instructions of a program meet."""

from collections import defaultdict

from toolkit.schedule import Action, Schedule, catalog

COLLECTIVES = (Action.ALL_REDUCE, Action.REDUCE, Action.BROADCAST)
METHODS = [
    catalog.data_parallel(3),
    catalog.data_parallel(3, state="sharded"),
    catalog.cyclic(3, 1),
    catalog.cyclic(3, "freshest"),
    catalog.cyclic(3, 1, chains="rotated"),
    catalog.cyclic(3, 1, correction="extrapolate"),
    catalog.cyclic(2, "freshest", "per_stage_and_microbatch", correction="extrapolate"),
    catalog.cyclic(3, "freshest", state="sharded"),
    catalog.cyclic(2, 1, "per_stage_and_microbatch"),
    catalog.interleaved_1f1b(4, 2, 2),
    catalog.zero_bubble(3, 3),
    catalog.v_half(4, 3),
    catalog.chimera(4, 4),
    catalog.dualpipe(2, 4),
    catalog.pipedream_2bw(2, 3),
    Schedule.from_rank_orders(
        ("0F0 1F0 1B0 0B0 0F1 0B1", "1F1 1B1"), name="rank orders"
    ),
]


def occasion(i):
    return i[1:]


def other_ends(program):
    """Where each send is received: the k-th from one rank to another is the k-th there."""
    ways = defaultdict(lambda: ([], []))
    for rank, order in enumerate(program.ranks):
        for position, i in enumerate(order):
            if i.action == Action.SEND:
                ways[rank, i.peers[0]][0].append((rank, position))
            elif i.action == Action.RECV:
                ways[i.peers[0], rank][1].append((rank, position))
    pairs = {}
    for sends, receives in ways.values():
        pairs |= dict(zip(sends, receives, strict=True))
    for (a, p), (b, q) in pairs.items():
        assert program.ranks[a][p][2:7] == program.ranks[b][q][2:7]
    return pairs
