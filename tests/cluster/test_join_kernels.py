"""A process that joins computes with the instruction set of the cluster, or is refused."""

from __future__ import annotations

import pytest

from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.member import Role, Stage
from moesaic.cluster.members import Members
from moesaic.cluster.router import Router
from moesaic.config import ExpertServerConfig, ModelConfig, WorkerConfig
from moesaic.core import messages
from moesaic.transport.local import local_pair
from tests.cluster.test_changes import LAYOUT, FakeProcess


@pytest.fixture
def members() -> Members:
    """One server that computes with AVX-512."""
    found = Members(WorkerConfig(ModelConfig("m")), Router(), lambda member, message: None, lambda: 0.0)
    server = found.add(Role.SERVER)
    server.stage, server.kernels = Stage.SERVING, "native (avx512), paced"
    return found


def process(*sets: str, role: Role = Role.SERVER) -> RemoteProcess:
    return RemoteProcess(None, "10.0.0.2:1", role, instruction_sets=sets)  # type: ignore[arg-type]


def test_a_cpu_that_lacks_the_instruction_set_is_refused(members: Members) -> None:
    told = members.explain_difference(process("avx2", "portable"))
    assert told is not None and told.startswith("--kernels: this cluster computes with avx512, which the CPU")
    assert "of 10.0.0.2 lacks; start the cluster with --kernels avx2" in told


def test_others_are_not(members: Members) -> None:
    assert members.explain_difference(process("avx512", "avx2", "portable")) is None
    assert members.explain_difference(process()) is None, (
        "it has no native kernels, or names its kernels itself"
    )
    assert members.explain_difference(process("avx2", role=Role.WORKER)) is None, "no worker serves yet"


def test_who_joins_is_told_the_instruction_set(members: Members) -> None:
    ours, far = local_pair()
    members.adopt(members.add(Role.SERVER), FakeProcess(ours, far), "w", LAYOUT)  # type: ignore[arg-type]
    told = far.receive(5.0)
    assert isinstance(told, messages.EnlistReply)
    assert ExpertServerConfig.from_json(told.config).kernels == "avx512"
    members.stop()
