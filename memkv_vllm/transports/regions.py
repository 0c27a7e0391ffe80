"""What a session may register: bounds that hold on every transport's server. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from memkv_vllm.errors import RemoteProtocolError, StoreError

__all__ = ["DEFAULT_MAX_REGIONS", "DEFAULT_MAX_REGION_BYTES", "check_region"]

DEFAULT_MAX_REGIONS = 8
DEFAULT_MAX_REGION_BYTES = 64 << 30


def check_region(
    region: int, length: int, held: Mapping[int, int], *, ended: bool, max_regions: int, max_region_bytes: int
) -> None:
    """Whether a session may register ``region`` of ``length`` bytes now.

    Args:
        region: its id.
        length: bytes.
        held: length by id of the regions that the session has.
        ended: whether the session was fenced.
        max_regions: regions per session.
        max_region_bytes: bytes of all regions of one session.

    Raises:
        StoreError: it may not: too many, too large, or the session has ended.
        RemoteProtocolError: it has registered this one already.
    """
    if ended:
        raise StoreError("this session has ended")
    if region in held:
        raise RemoteProtocolError("region", f"region {region} is registered already")
    if len(held) >= max_regions:
        raise StoreError(f"at most {max_regions} regions per session")
    total = length + sum(held.values())
    if total > max_region_bytes:
        raise StoreError(f"{total} bytes of regions; a session may register {max_region_bytes}")
