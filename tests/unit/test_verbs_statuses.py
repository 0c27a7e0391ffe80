"""Every completion status there is means what this table says, and none means success but success."""

from __future__ import annotations

import pytest

from memkv_vllm.errors import (
    ConnectionLost,
    EnvironmentFault,
    LocalProtocolError,
    MemkvError,
    RemoteProtocolError,
    Scope,
)
from memkv_vllm.transports.verbs.statuses import SUCCESS, WR_FLUSH_ERR, error_of, outcome_of
from memkv_vllm.types import LossReason

NAMES = (
    "SUCCESS", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_EEC_OP_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR", "MW_BIND_ERR",
    "BAD_RESP_ERR", "LOC_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_OP_ERR", "RETRY_EXC_ERR",
    "RNR_RETRY_EXC_ERR", "LOC_RDD_VIOL_ERR", "REM_INV_RD_REQ_ERR", "REM_ABORT_ERR", "INV_EECN_ERR",
    "INV_EEC_STATE_ERR", "FATAL_ERR", "RESP_TIMEOUT_ERR", "GENERAL_ERR", "TM_ERR", "TM_RNDV_INCOMPLETE",
)  # fmt: skip
"""``enum ibv_wc_status`` in its order, from 0."""

OURS = {"LOC_LEN_ERR", "LOC_PROT_ERR", "LOC_ACCESS_ERR", "MW_BIND_ERR"}
"""Only a bug here can cause them."""
PEERS = {"REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_INV_RD_REQ_ERR"}
"""The peer offered what it does not have."""
HOSTS = {"FATAL_ERR", "GENERAL_ERR"}
"""The NIC or its driver is broken."""


def expected_class(name: str) -> type[MemkvError]:
    """Whatever is not named is the connection's."""
    if name in OURS:
        return LocalProtocolError
    if name in PEERS:
        return RemoteProtocolError
    return EnvironmentFault if name in HOSTS else ConnectionLost


@pytest.mark.parametrize(("status", "name"), list(enumerate(NAMES))[1:], ids=NAMES[1:])
def test_every_failure_has_a_class_a_reason_and_a_text(status: int, name: str) -> None:
    """P068: no failure is taken for a success, and none is without a name."""
    outcome = outcome_of(status)
    assert (outcome.status, outcome.name, outcome.error) == (status, name, expected_class(name))
    assert outcome.reason.isidentifier() and outcome.reason == outcome.reason.lower()
    assert len(outcome.text) > 20
    error = error_of(outcome, "an RDMA WRITE to 10.0.0.1")
    assert type(error) is outcome.error
    assert str(error) == f"an RDMA WRITE to 10.0.0.1 failed with {name}: {outcome.text}"


def test_what_each_class_means_to_a_caller() -> None:
    """Scope, whether trying again helps, and what a block lost to it is counted as."""
    of_class = {type(error_of(outcome_of(status), "x")): error_of(outcome_of(status), "x") for status in range(1, 24)}
    facts = {kind: (error.scope, error.retryable, error.reason) for kind, error in of_class.items()}
    assert facts == {
        ConnectionLost: (Scope.CONNECTION, True, LossReason.BREAKER),
        LocalProtocolError: (Scope.CONNECTION, False, LossReason.FAILED),
        RemoteProtocolError: (Scope.CONNECTION, False, LossReason.FAILED),
        EnvironmentFault: (Scope.PROCESS, False, LossReason.FAILED),
    }


def test_a_status_of_a_later_library_is_a_failure() -> None:
    """P068: unknown means failed, whatever the number."""
    for status in (24, 25, 255, 1 << 31, -1):
        outcome = outcome_of(status)
        assert (outcome.error, outcome.reason) == (ConnectionLost, "unknown")
        assert str(status) in str(error_of(outcome, "an RDMA READ"))


def test_reasons_are_counted_apart() -> None:
    """P094: one counter per status."""
    reasons = [outcome_of(status).reason for status in range(1, 25)]
    assert len(set(reasons)) == len(reasons)


def test_success_is_no_failure() -> None:
    assert (SUCCESS, WR_FLUSH_ERR) == (0, NAMES.index("WR_FLUSH_ERR"))
    with pytest.raises(LocalProtocolError, match="succeeded"):
        outcome_of(SUCCESS)


def test_a_kind_for_the_counter_of_a_peer_that_is_cut() -> None:
    error = error_of(outcome_of(NAMES.index("REM_ACCESS_ERR")), "an RDMA WRITE")
    assert isinstance(error, RemoteProtocolError) and error.kind == "rdma_remote_access"
