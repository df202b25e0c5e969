"""Programs as Chakra execution traces."""

from collections import Counter

import pytest
from hypothesis import given

from tests.schedule.strategies import programs, quick
from toolkit.cost import UNIT, unit_costs, write_chakra
from toolkit.cost.chakra import chakra_nodes
from toolkit.schedule import Action, catalog


def test_nodes_of_a_pipeline():
    """The activation's message waits for the forward that makes it."""
    program = catalog.gpipe(2, 1).lower(1).verify()
    first, second = (
        chakra_nodes(program, unit_costs(2, 2.0), UNIT, rank) for rank in range(2)
    )
    assert [(node.type, node.data_deps, node.ctrl_deps) for node in first] == [
        ("COMP_NODE", [], []),
        ("COMM_SEND_NODE", [0], []),
        ("COMM_RECV_NODE", [], []),
        ("COMP_NODE", [0, 2], [0]),
        ("COMP_NODE", [3], []),
    ]
    assert [node.duration_micros for node in first] == [1_000_000, 0, 0, 2_000_000, 0]
    ends = {"comm_src": 0, "comm_dst": 1, "comm_tag": 0}
    for node in (first[1], second[0]):
        assert ends.items() <= node.attributes.items()


@given(programs())
@quick
def test_messages_meet_and_nothing_waits_for_what_is_left_out(program):
    costs, met = unit_costs(program.schedule.n_stages), Counter()
    for rank, order in enumerate(program.ranks):
        nodes = chakra_nodes(program, costs, UNIT, rank)
        assert len(nodes) == sum(i.action != Action.FREE for i in order)
        known: set[int] = set()
        for node in nodes:
            assert known.issuperset([*node.data_deps, *node.ctrl_deps])
            known.add(node.id)
            sign = {"COMM_SEND_NODE": 1, "COMM_RECV_NODE": -1}.get(node.type, 0)
            ends = [
                node.attributes.get(f"comm_{name}")
                for name in ("src", "dst", "tag", "size")
            ]
            met[tuple(ends)] += sign
    assert not any(met.values())


def test_files_are_read_back(tmp_path):
    pytest.importorskip("chakra.schema.protobuf.et_def_pb2")
    from chakra.schema.protobuf.et_def_pb2 import GlobalMetadata, Node
    from chakra.src.third_party.utils.protolib import decodeMessage, openFileRd

    program, costs = catalog.data_parallel(2).lower(2).verify(), unit_costs(2)
    write_chakra(program, costs, UNIT, tmp_path)
    for rank in range(2):
        file, found = openFileRd(str(tmp_path / f"rank.{rank}.et")), []
        decodeMessage(file, GlobalMetadata())
        while decodeMessage(file, node := Node()):
            found.append((node.id, node.name, [*node.data_deps]))
        file.close()
        expected = chakra_nodes(program, costs, UNIT, rank)
        assert found == [(node.id, node.name, node.data_deps) for node in expected]
