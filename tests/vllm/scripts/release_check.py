"""Whether a vLLM release's Python sources fit ``compat``: ``python -m tests.vllm.scripts.release_check FOLDER``.

FOLDER holds a ``vllm`` package, for example the ``.py`` files of a wheel (no compiled extension is needed). Runs the
manager and the worker over fakes with that release's own base classes, and proves the load-error hook on its
connector. Prints one line; a traceback says what does not fit.
"""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace as Value
from typing import Any


def check(folder: str) -> str:
    """Everything that needs no engine."""
    sys.path.insert(0, folder)
    import torch
    import vllm

    assert str(vllm.__file__).startswith(folder), f"vllm comes from {vllm.__file__}"
    from memkv_vllm.integration import compat
    from memkv_vllm.integration.facts import EngineFacts
    from memkv_vllm.integration.manager import MemKVOffloadingManager
    from memkv_vllm.integration.metrics import metric_definitions
    from memkv_vllm.integration.worker import MemKVOffloadingWorker
    from memkv_vllm.spec import MemKVOffloadingSpec
    from tests.support.fake_engine import FakeEngine
    from tests.support.fake_prober import FakeProber
    from tests.support.vllm_shapes import spec_0_32, vllm_config

    compat.require_supported()
    check_hook(compat)
    facts = EngineFacts.from_spec(spec_0_32(), vllm_config())
    manager = MemKVOffloadingManager(namespace=facts.namespace(""), prober=FakeProber(), kv_events=True)
    worker = MemKVOffloadingWorker(FakeEngine(), namespace=manager.namespace, device=torch.device("cpu"), rank=0)
    request, key, blocks = Value(req_id="a"), bytes(36), Value(block_ids=[5])
    manager.on_new_request(request)
    assert manager.lookup(key, request) is compat.LookupResult.RETRY
    manager.on_schedule_end(Value(new_req_ids=["a"], preempted_req_ids=()))
    assert manager.lookup(key, request) is compat.LookupResult.MISS
    output = manager.prepare_store([key], request)
    assert worker.submit_store(1, blocks, pickle.loads(pickle.dumps(output.store_spec)))  # noqa: S301 - as vLLM does
    assert worker.submit_load(2, manager.prepare_load([key], request), blocks)
    assert [result.success for result in worker.get_finished()] == [True, True]
    manager.complete_store({key}, request)
    (event,) = manager.take_events()
    stats: Any = manager.get_stats()
    assert set(stats.data["data"] if "data" in stats.data else stats.data) and metric_definitions()
    manager.reset_cache()
    manager.shutdown()
    worker.shutdown()
    what = f"fixed hash seed {compat.has_fixed_hash_seed()}, {event.medium}"
    return f"{compat.release()}: fits ({MemKVOffloadingSpec.__name__}, {what})"


def check_hook(compat: Any) -> None:
    """The release's connector reports our worker's lost blocks, and nobody else's."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    poll = OffloadingConnector.get_block_ids_with_load_errors
    assert poll(Value(connector_worker=None)) == set()
    compat.install_load_error_hook()
    poll = OffloadingConnector.get_block_ids_with_load_errors
    assert poll(Value(connector_worker=Value(worker=Value(take_load_errors=lambda: {3})))) == {3}
    assert poll(Value(connector_worker=None)) == set()


if __name__ == "__main__":
    sys.stdout.write(check(sys.argv[1]) + "\n")
