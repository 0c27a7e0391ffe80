"""What each completion status means: whose fault it is, what it affects, its counter and what to check. Pure.

Every status but success ends the session: a reliable queue pair is in its error state by then, and the client makes
new ones. A status that is not in the table is a failure like the others.
"""

from __future__ import annotations

from typing import NamedTuple

from memkv_vllm.errors import (
    ConnectionLost,
    EnvironmentFault,
    LocalProtocolError,
    MemkvError,
    RemoteProtocolError,
)

__all__ = ["SUCCESS", "WR_FLUSH_ERR", "Outcome", "error_of", "outcome_of"]

SUCCESS = 0
WR_FLUSH_ERR = 5
"""The work request was not carried out because another one failed before it, or the queue pair was made to fail."""


class Outcome(NamedTuple):
    """One completion status that is not success."""

    status: int
    """Number of ``enum ibv_wc_status``."""
    name: str
    """As the library calls it, without ``IBV_WC_``."""
    reason: str
    """Counted as ``rdma_<reason>``."""
    error: type[MemkvError]
    """Says scope and whether trying again helps; see ``memkv_vllm.errors``."""
    text: str
    """What happened and what to look at."""

    @property
    def unanswered(self) -> bool:
        """Whether nothing came back: the peer is gone, or packets are lost. Any other status is somebody's answer."""
        return self.name in ("RETRY_EXC_ERR", "RESP_TIMEOUT_ERR")


_BUG = "a fault of this program: please report it with the lines of the log before this one"
_RETRY = (
    "the peer or a switch on the way is down, the path MTU is larger than what the switches carry, or a firewall drops "
    "UDP port 4791"
)

_TABLE = (
    Outcome(1, "LOC_LEN_ERR", "local_length", LocalProtocolError, f"a message longer than the port allows; {_BUG}"),
    Outcome(
        2, "LOC_QP_OP_ERR", "local_queue_pair", ConnectionLost, "the NIC could not send: look at its port (link state)"
    ),
    Outcome(3, "LOC_EEC_OP_ERR", "local_eec", ConnectionLost, "an error of a context that is not used here"),
    Outcome(4, "LOC_PROT_ERR", "local_protection", LocalProtocolError, f"local memory that is not registered; {_BUG}"),
    Outcome(5, "WR_FLUSH_ERR", "flushed", ConnectionLost, "the queue pair had failed before"),
    Outcome(6, "MW_BIND_ERR", "window", LocalProtocolError, f"an error of memory windows, which are not used; {_BUG}"),
    Outcome(7, "BAD_RESP_ERR", "bad_response", ConnectionLost, "the peer's NIC sent what it should not: its firmware"),
    Outcome(8, "LOC_ACCESS_ERR", "local_access", LocalProtocolError, f"local memory without the right for it; {_BUG}"),
    Outcome(
        9, "REM_INV_REQ_ERR", "remote_request", RemoteProtocolError, "the peer's queue pair does not take such requests"
    ),
    Outcome(
        10,
        "REM_ACCESS_ERR",
        "remote_access",
        RemoteProtocolError,
        "the peer has not registered that memory, or has taken it back (it fenced this session)",
    ),
    Outcome(11, "REM_OP_ERR", "remote_operation", ConnectionLost, "the peer's NIC could not carry it out: its log"),
    Outcome(12, "RETRY_EXC_ERR", "retries", ConnectionLost, f"no answer from the peer's NIC: {_RETRY}"),
    Outcome(13, "RNR_RETRY_EXC_ERR", "receiver", ConnectionLost, "the peer's NIC was not ready for too long"),
    Outcome(14, "LOC_RDD_VIOL_ERR", "local_domain", ConnectionLost, "an error of a domain that is not used here"),
    Outcome(15, "REM_INV_RD_REQ_ERR", "remote_read", RemoteProtocolError, "the peer takes no RDMA READ of that kind"),
    Outcome(16, "REM_ABORT_ERR", "remote_abort", ConnectionLost, "the peer's NIC gave the operation up"),
    Outcome(17, "INV_EECN_ERR", "context_number", ConnectionLost, "an error of a context that is not used here"),
    Outcome(18, "INV_EEC_STATE_ERR", "context_state", ConnectionLost, "an error of a context that is not used here"),
    Outcome(19, "FATAL_ERR", "fatal", EnvironmentFault, "the NIC failed: look at the kernel's log (dmesg)"),
    Outcome(20, "RESP_TIMEOUT_ERR", "response", ConnectionLost, f"no response from the peer's NIC: {_RETRY}"),
    Outcome(
        21, "GENERAL_ERR", "general", EnvironmentFault, "the NIC's driver failed: look at the kernel's log (dmesg)"
    ),
    Outcome(22, "TM_ERR", "tag_matching", ConnectionLost, "an error of tag matching, which is not used here"),
    Outcome(23, "TM_RNDV_INCOMPLETE", "tag_rendezvous", ConnectionLost, "tag matching, which is not used here"),
)
_BY_STATUS = {outcome.status: outcome for outcome in _TABLE}


def outcome_of(status: int) -> Outcome:
    """What ``status`` means; one that is not known is a failure of the connection.

    Raises:
        LocalProtocolError: ``status`` is success.
    """
    if status == SUCCESS:
        raise LocalProtocolError("a completion that succeeded has no failure")
    known = _BY_STATUS.get(status)
    if known is not None:
        return known
    return Outcome(status, f"status {status}", "unknown", ConnectionLost, "a completion status that is not known here")


def error_of(outcome: Outcome, what: str) -> MemkvError:
    """The exception for ``outcome`` of ``what``; its scope and reason are the class's."""
    text = f"{what} failed with {outcome.name}: {outcome.text}"
    if issubclass(outcome.error, RemoteProtocolError):
        return RemoteProtocolError(f"rdma_{outcome.reason}", text)
    return outcome.error(text)
