"""Write programs as Chakra execution traces, which network simulators such as ASTRA-sim take.

A rank's trace is a graph of ops, updates and messages, each with what it waits for. Releases of
memory are left out. Source: arXiv 2305.14516.
"""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.cost.hardware import Hardware
from toolkit.cost.stage_costs import Costs, moved_bytes
from toolkit.extras import check_installed
from toolkit.schedule import Action, Instruction, Program
from toolkit.schedule.dependencies import needs

# All other communication is collective: COMM_COLL_NODE.
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


def chakra_nodes(
    program: Program, costs: Costs, hardware: Hardware, rank: int
) -> list[Node]:
    """Return the trace of a rank.

    Args:
        program: a verified program.
        costs: one entry per stage.
        hardware: seconds of ops that were not measured.
        rank: the rank, from 0.
    """
    order = program.ranks[rank]
    message_bytes = moved_bytes(costs)
    accumulate = program.schedule.accumulate
    nodes: list[Node] = []
    tags: Counter[tuple[int, int]] = Counter()
    last_op: list[int] = []  # index of the op before, if there is one
    for index, (instruction, needed_indices) in enumerate(
        zip(order, needs(order, rank), strict=True)
    ):
        # A trace has no node for a release, so that identifiers have gaps there.
        if instruction.action == Action.FREE:
            continue
        attributes: dict[str, Any] = {"is_cpu_op": False}
        node_type = "COMP_NODE"
        control_dependencies: list[int] = []
        microseconds = 0
        if instruction.action.communicates:
            node_type = _COMMUNICATION.get(instruction.action, "COMM_COLL_NODE")
            n_bytes = message_bytes[instruction.buffer][instruction.stage]
            attributes["comm_size"] = int(n_bytes)
            attributes |= _addresses(instruction, rank, tags)
        elif instruction.action.computes:
            op_seconds = costs[instruction.stage].op_seconds(hardware, accumulate)
            microseconds = round(op_seconds[instruction.action] * 1e6)
            # Only ops have durations and share the rank's compute, so only they are chained.
            control_dependencies = last_op
            last_op = [index]
        # Without releases, a version that comes again does not wait for its earlier release.
        data_dependencies = [
            dependency
            for dependency in needed_indices
            if order[dependency].action != Action.FREE
        ]
        nodes.append(
            Node(
                index,
                str(instruction),
                node_type,
                data_dependencies,
                control_dependencies,
                microseconds,
                attributes,
            )
        )
    return nodes


def _addresses(
    instruction: Instruction, rank: int, tags: Counter[tuple[int, int]]
) -> dict[str, Any]:
    """Return the attributes that say which ranks a message or a collective connects.

    Args:
        instruction: of ``rank``.
        rank: the rank of the trace.
        tags: messages so far, by sender and receiver; the message is counted.
    """
    if instruction.action not in _COMMUNICATION:
        members = ",".join(map(str, instruction.peers))
        return {"comm_type": instruction.action.name, "pg_name": members}
    (peer,) = instruction.peers
    endpoints = (rank, peer) if instruction.action == Action.SEND else (peer, rank)
    # The k-th message to a peer is the peer's k-th receive.
    tag = tags[endpoints]
    tags[endpoints] += 1
    return {"comm_src": endpoints[0], "comm_dst": endpoints[1], "comm_tag": tag}


def write_chakra(
    program: Program, costs: Costs, hardware: Hardware, folder: str | Path
) -> None:
    """Write ``rank.0.et`` and so on to ``folder``, a trace per rank.

    Args:
        program: a verified program.
        costs: one entry per stage.
        hardware: seconds of ops that were not measured.
        folder: folder of the traces; created if missing.

    Raises:
        UserError: the package of the format is not installed.
    """
    check_installed("chakra", "chakra=true")
    from chakra.schema.protobuf import et_def_pb2 as schema
    from chakra.src.third_party.utils.protolib import encodeMessage

    Path(folder).mkdir(parents=True, exist_ok=True)
    value_field_of_type = {bool: "bool_val", int: "int64_val", str: "string_val"}
    for rank in range(len(program.ranks)):
        with (Path(folder) / f"rank.{rank}.et").open("wb") as file:
            encodeMessage(file, schema.GlobalMetadata(version="0.0.4"))
            for node in chakra_nodes(program, costs, hardware, rank):
                *node_fields, attributes = node
                message = schema.Node(
                    **dict(zip(Node._fields, node_fields, strict=False))
                )
                for name, value in attributes.items():
                    if name == "comm_type":
                        value = schema.CollectiveCommType.Value(value)
                    message.attr.add(
                        name=name, **{value_field_of_type[type(value)]: value}
                    )
                encodeMessage(file, message)
