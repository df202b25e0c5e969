"""Write programs as Chakra execution traces, which network simulators such as ASTRA-sim take.

A rank's trace is a graph of ops, updates and messages, each with what it waits for. Releases of
memory are left out. Source: arXiv 2305.14516.
"""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.cost.hardware import Hardware
from toolkit.cost.stage_costs import Costs, moved_bytes
from toolkit.errors import UserError
from toolkit.schedule import Action, Program
from toolkit.schedule.dependencies import needs

_COMMUNICATION = {Action.SEND: "COMM_SEND_NODE", Action.RECV: "COMM_RECV_NODE"}


class Node(NamedTuple):
    """One node of a rank's trace; ``id`` is its place in the rank's program."""

    id: int
    name: str
    type: str  # of Chakra's NodeType
    data_deps: list[int]  # nodes whose results it uses
    ctrl_deps: list[int]  # the rank's op before it
    duration_micros: int
    attributes: dict[str, Any]


def chakra_nodes(program: Program, costs: Costs, hardware: Hardware, rank: int) -> list[Node]:
    """Return the trace of a rank.

    Args:
        program: a verified program.
        costs: one entry per stage.
        hardware: seconds of ops that were not measured.
        rank: the rank, from 0.
    """
    order, moved, found = program.ranks[rank], moved_bytes(costs), []
    tags: Counter[tuple] = Counter()  # the k-th message to a peer is its k-th receive from here
    last: list[int] = []  # op
    for at, (i, needed) in enumerate(zip(order, needs(order, rank), strict=True)):
        if i.action == Action.FREE:
            continue
        what: dict[str, Any] = {"is_cpu_op": False}
        kind, after, micros = "COMP_NODE", [], 0
        if i.action.communicates:
            kind = _COMMUNICATION.get(i.action, "COMM_COLL_NODE")
            what["comm_size"] = int(moved[i.buffer][i.stage])
            if i.action in _COMMUNICATION:
                ends = (rank, *i.peers) if i.action == Action.SEND else (*i.peers, rank)
                what |= {"comm_src": ends[0], "comm_dst": ends[1], "comm_tag": tags[ends]}
                tags[ends] += 1
            else:
                what |= {"comm_type": i.action.name, "pg_name": ",".join(map(str, i.peers))}
        elif i.action.computes:
            micros = round(costs[i.stage].op_seconds(hardware)[i.action] * 1e6)
            after, last = last, [at]
        deps = [p for p in needed if order[p].action != Action.FREE]
        found.append(Node(at, str(i), kind, deps, after, micros, what))
    return found


def write_chakra(program: Program, costs: Costs, hardware: Hardware, folder: str | Path) -> None:
    """Write ``rank.0.et`` and so on to ``folder``; arguments as in :func:`chakra_nodes`.

    Raises:
        UserError: the package of the format is not installed.
    """
    try:
        from chakra.schema.protobuf import et_def_pb2 as schema
        from chakra.src.third_party.utils.protolib import encodeMessage
    except ImportError as error:
        raise UserError("Chakra traces need its package: pip install mlc-chakra") from error
    Path(folder).mkdir(parents=True, exist_ok=True)
    fields = {bool: "bool_val", int: "int64_val", str: "string_val"}
    for rank in range(len(program.ranks)):
        with (Path(folder) / f"rank.{rank}.et").open("wb") as file:
            encodeMessage(file, schema.GlobalMetadata(version="0.0.4"))
            for node in chakra_nodes(program, costs, hardware, rank):
                *given, attributes = node
                made = schema.Node(**dict(zip(Node._fields, given, strict=False)))
                for name, value in attributes.items():
                    if name == "comm_type":
                        value = schema.CollectiveCommType.Value(value)
                    made.attr.add(name=name, **{fields[type(value)]: value})
                encodeMessage(file, made)
