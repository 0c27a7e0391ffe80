"""``memkv start`` that notices dead peers six times sooner: ``python -m tests.support.brisk_server CONFIG``.

What is tested is that keepalive and the user timeout are in use and that their end frees what the peer held; waiting
for them as they are takes half a minute a time.
"""

from __future__ import annotations

import sys

from memkv_vllm.cli import main
from memkv_vllm.transports import sockets

SOONER = 6

if __name__ == "__main__":
    sockets.KEEPALIVE_IDLE_S //= SOONER
    sockets.KEEPALIVE_INTERVAL_S = 1
    sockets.USER_TIMEOUT_MS //= SOONER
    sys.argv = ["memkv", "start", "--config", sys.argv[1]]
    main()
