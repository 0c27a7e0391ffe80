"""The door that vLLM opens: ``spec_name: MemKVOffloadingSpec``, ``spec_module_path: memkv_vllm.spec``. Wiring only.

vLLM imports this module in its front end, in the engine core and in every worker; importing it needs vLLM and
nothing else (no NIC, GPU or server). The engine core calls ``get_manager``, each worker ``get_worker``; in the
in-process executor both happen in one process, on two instances.

A wrong setting or an unserved geometry is refused here, at start, with the reason. An unreachable server is not:
the engine starts detached and its hits begin when the server is up.
"""

from __future__ import annotations

import logging
from typing import Any

from memkv_vllm.config import DirectConfig, load_client_config, parse_extra_config
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.integration import compat
from memkv_vllm.integration.facts import EngineFacts
from memkv_vllm.integration.metrics import metric_definitions
from memkv_vllm.types import MemoryKind

__all__ = ["MemKVOffloadingSpec"]

logger = logging.getLogger("memkv.integration.spec")


class MemKVOffloadingSpec(compat.OffloadingSpec):
    """MemKV as an offload medium, direct mode. Constructor arguments are vLLM's, of any supported release.

    Raises:
        ConfigError: settings, with every problem.
        GeometryError: the KV cache cannot be served by this version.
        EnvironmentFault: another vLLM, or this host lacks something that is configured.
    """

    def __init__(self, *args: Any) -> None:
        compat.require_supported()
        compat.join_vllm_logging()
        super().__init__(*args)
        vllm_config = compat.find_vllm_config(args)
        self._policy_advice = compat.failure_policy_advice(vllm_config)
        self._direct: DirectConfig = parse_extra_config(self.extra_config)
        self._facts = EngineFacts.from_spec(self, vllm_config)
        self._facts.check()
        self._client = load_client_config()
        self._cluster = ClusterSettings.from_config(self._client, "direct")
        self._manifest = self._facts.namespace(self._direct.spec_prefix)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """What our manager exports, by name; asked for by vLLM's front end."""
        return metric_definitions()

    def get_manager(self) -> Any:
        """The scheduler side: existence probes over a control-only client of its own."""
        from memkv_vllm.engine.prober import Prober
        from memkv_vllm.integration.manager import MemKVOffloadingManager, PresenceSettings

        self._facts.check()
        for advice in (self._policy_advice, self._facts.seed_advice()):
            if advice:
                logger.warning("event=start_advice %s", advice)
        unused = self._client.unused_with(self._client.transport_for("direct"))
        if unused:
            logger.warning("event=unused_settings given, but nothing here reads them: %s", "; ".join(unused))
        direct = self._direct
        prober = Prober(
            cluster=self._cluster,
            shards=self._facts.world_size,
            namespace=self._manifest,
            name="scheduler",
            probe_timeout_s=direct.lookup_timeout_s,
        )
        prober.start()
        logger.info("event=manager_started %s %s", self._where(), self._manifest.to_json().decode())
        return MemKVOffloadingManager(
            namespace=self._manifest,
            prober=prober,
            settings=PresenceSettings(direct.lookup_hit_ttl, direct.lookup_miss_ttl, direct.lookup_timeout_s),
            kv_events=self._facts.kv_events,
        )

    def get_worker(self, kv_caches: Any) -> Any:
        """One rank: layout, mover, staging and engine over the live KV tensors."""
        from memkv_vllm.engine.engine import EngineSettings, TransferEngine
        from memkv_vllm.engine.plan import budget_warning, plan_staging, startup_line
        from memkv_vllm.integration.gather import make_mover
        from memkv_vllm.integration.layout import BlockLayout
        from memkv_vllm.integration.worker import MemKVOffloadingWorker

        facts, direct = self._facts, self._direct
        facts.check()
        layout = BlockLayout.from_caches(kv_caches, facts.kv_dtype)
        plan = plan_staging(
            layout.value_bytes,
            direct.num_threads,
            direct.scratch_mb_per_thread,
            direct.load_threads,
            direct.store_threads,
            tokens_per_block=facts.tokens_per_block[0],
        )
        medium = self._medium()
        engine = TransferEngine(
            cluster=self._cluster.on_rail(facts.rank),
            plan=plan,
            mover=make_mover(layout),
            shard=facts.rank,
            settings=EngineSettings.from_config(direct),
            name=f"rank{facts.rank}",
        )
        compat.install_load_error_hook()
        engine.start()
        logger.info("%s", startup_line(facts.rank, len(layout.pages), layout.num_layers, plan, medium))
        logger.info("event=worker_started rank=%d device=%s %s", facts.rank, layout.device, self._where())
        warning = budget_warning(plan)
        if warning:
            logger.warning("%s", warning)
        return MemKVOffloadingWorker(engine, namespace=self._manifest.digest, device=layout.device, rank=facts.rank)

    def _medium(self) -> MemoryKind:
        """Where the staging slots live. ``host`` is what this version has; nothing else is taken silently."""
        from memkv_vllm.transports.registry import client_transport

        wanted, name = self._direct.scratch_medium, self._cluster.transport
        if wanted == "host":
            return MemoryKind.HOST
        capable = client_transport(name).capabilities.gpu_memory
        why = (
            "staging in GPU memory is not part of this version"
            if capable
            else f"transport {name} cannot reach GPU memory"
        )
        if wanted == "gpu":
            raise EnvironmentFault(
                f"memkv_scratch_medium is gpu, but {why}; set it to host, or to auto to let memkv choose"
            )
        logger.info("event=scratch_medium wanted=auto chosen=host: %s", why)
        return MemoryKind.HOST

    def _where(self) -> str:
        servers = ",".join(server.name for server in self._cluster.servers)
        return f"transport={self._cluster.transport} servers={servers} namespace={self._manifest.digest.hex()[:12]}"
