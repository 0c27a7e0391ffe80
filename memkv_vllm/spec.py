"""The door that vLLM opens: ``spec_name: MemKVOffloadingSpec``, ``spec_module_path: memkv_vllm.spec``. Wiring only.

vLLM imports this module in its front end, in the engine core and in every worker; importing it needs vLLM and
nothing else (no NIC, GPU or server). The engine core calls ``get_manager``, each worker ``get_worker``; in the
in-process executor both happen in one process, on two instances.

A wrong setting or an unserved geometry is refused here, at start, with the reason. An unreachable server is not:
the engine starts detached and its hits begin when the server is up.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from memkv_vllm.config import DirectConfig, load_client_config, parse_extra_config
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.integration import compat
from memkv_vllm.integration.facts import EngineFacts
from memkv_vllm.integration.metrics import metric_definitions

if TYPE_CHECKING:
    from memkv_vllm.engine.api import StagingMedium
    from memkv_vllm.engine.plan import StagingPlan
    from memkv_vllm.integration.layout import BlockLayout

__all__ = ["MemKVOffloadingSpec"]

logger = logging.getLogger("memkv.integration.spec")

SETTLE_S = 1.0
"""How long a start waits for the scheduler side's first connections; one on a healthy network takes milliseconds."""


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
        self._memory_share = compat.gpu_memory_utilization(vllm_config)
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
        # vLLM takes requests as soon as this returns, and what they ask of a server not connected yet would be missed.
        prober.settle(min(self._cluster.connect_timeout_s, SETTLE_S))
        logger.info("event=manager_started %s %s", self._where(), self._manifest.to_json().decode())
        return MemKVOffloadingManager(
            namespace=self._manifest,
            prober=prober,
            settings=PresenceSettings(direct.lookup_hit_ttl, direct.lookup_miss_ttl, direct.lookup_timeout_s),
            kv_events=self._facts.kv_events,
        )

    def get_worker(self, kv_caches: Any) -> Any:
        """One rank: layout, mover, staging and engine over the live KV tensors."""
        try:
            return self._make_worker(kv_caches)
        except EnvironmentFault as error:
            # vLLM ends with this, under many lines of its own: here it stands on one, to be found by its name.
            logger.error("event=start_refused rank=%d reason=%r", self._facts.rank, str(error))
            raise

    def _make_worker(self, kv_caches: Any) -> Any:
        from memkv_vllm.engine.engine import EngineSettings, TransferEngine
        from memkv_vllm.engine.plan import budget_warning, startup_line
        from memkv_vllm.integration.gather import make_mover
        from memkv_vllm.integration.layout import BlockLayout
        from memkv_vllm.integration.worker import MemKVOffloadingWorker

        facts, direct = self._facts, self._direct
        facts.check()
        layout = BlockLayout.from_caches(kv_caches, facts.kv_dtype)
        plan = self._plan(layout)
        cluster = self._on_rail(layout)
        medium = self._medium(cluster, layout, plan)
        engine = TransferEngine(
            cluster=cluster,
            plan=plan,
            medium=medium,
            mover=make_mover(layout),
            shard=facts.rank,
            settings=EngineSettings.from_config(direct),
            name=f"rank{facts.rank}",
        )
        compat.install_load_error_hook()
        engine.start()
        logger.info("%s", startup_line(facts.rank, len(layout.pages), layout.num_layers, plan, medium.kind))
        logger.info("event=worker_started rank=%d device=%s %s", facts.rank, layout.device, self._where())
        warning = budget_warning(plan)
        if warning:
            logger.warning("%s", warning)
        return MemKVOffloadingWorker(engine, namespace=self._manifest.digest, device=layout.device, rank=facts.rank)

    def _plan(self, layout: BlockLayout) -> StagingPlan:
        from memkv_vllm.engine.plan import plan_staging

        direct = self._direct
        return plan_staging(
            layout.value_bytes,
            direct.num_threads,
            direct.scratch_mb_per_thread,
            direct.load_threads,
            direct.store_threads,
            tokens_per_block=self._facts.tokens_per_block[0],
        )

    def _on_rail(self, layout: BlockLayout) -> ClusterSettings:
        """The settings for this rank: its share of the rails, and a NIC near its GPU."""
        from memkv_vllm.integration.cuda_driver import pci_address

        gpu = pci_address(layout.device.index or 0) if layout.device.type == "cuda" else ""
        return self._cluster.on_rail(self._facts.rank, self._facts.world_size, gpu)

    def _medium(self, cluster: ClusterSettings, layout: BlockLayout, plan: StagingPlan) -> StagingMedium:
        """Where the staging slots live."""
        from memkv_vllm.integration.scratch import make_medium

        return make_medium(
            self._direct.scratch_medium,
            cluster=cluster,
            layout=layout,
            plan=plan,
            rank=self._facts.rank,
            num_ranks=self._facts.world_size,
            memory_share=self._memory_share,
        )

    def _where(self) -> str:
        servers = ",".join(server.name for server in self._cluster.servers)
        return f"transport={self._cluster.transport} servers={servers} namespace={self._manifest.digest.hex()[:12]}"
