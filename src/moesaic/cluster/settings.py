"""The settings of a cluster's processes that do not depend on their hosts."""

from __future__ import annotations

from dataclasses import replace

from moesaic.cluster.join_listener import any_port_address
from moesaic.cluster.member import Member, Role
from moesaic.config import ClusterConfig, ExpertServerConfig, HostTransport, WorkerConfig
from moesaic.config.values import KernelName, KVRole
from moesaic.core.experts import ExpertLayout


def make_worker_config(
    worker: WorkerConfig, cluster: ClusterConfig, transport: HostTransport
) -> WorkerConfig:
    """The settings of every attention worker of this cluster. worker: what the user said of one."""
    cluster_address = cluster.cluster_address
    return replace(
        worker,
        remote_experts=cluster.expert_servers > 0,
        expert_servers=max(1, cluster.expert_servers),
        attention_workers=cluster.attention_workers,
        supervised=True,
        transport=transport,
        remote_address=None if cluster_address is None else any_port_address(cluster_address),
    )


class Settings:
    """The settings of the processes of one cluster."""

    def __init__(self, worker: WorkerConfig, prefill: bool) -> None:
        """worker: of every attention worker. prefill: whether there are prefill workers."""
        self._worker = worker
        self.prefill = prefill
        """Whether there are prefill workers."""

    def with_checkpoint_stamp(self, stamp: str) -> Settings:
        """These settings for a checkpoint whose files have another stamp."""
        return Settings(replace(self._worker, checkpoint_stamp=stamp), self.prefill)

    def worker_config(self, member: Member) -> WorkerConfig:
        """The settings of a worker of either role."""
        if not self.prefill:
            return self._worker
        role: KVRole = "prefill" if member.role is Role.PREFILL else "decode"
        return replace(self._worker, kv_role=role)

    def server_config(self, layout: ExpertLayout) -> ExpertServerConfig:
        """The settings of an expert server."""
        worker = self._worker
        return ExpertServerConfig(
            model=worker.model.model,
            layout=layout,
            address="unix:@",
            remote_address=worker.remote_address,
            kernels=worker.model.kernels,
            mmap=worker.model.mmap,
            fast_memory=worker.server_memory,
            device="cpu" if worker.model.device == "auto" else worker.model.device,
            schedule=worker.scheduler.schedule,
            queue_policy=worker.scheduler.queue_policy,
            queues=worker.queues,
            transport=worker.transport,
            log_level=worker.log_level,
            paced=worker.paced,
            policy_file=worker.policy_file,
        )

    def config_for_newcomer(
        self, member: Member, layout: ExpertLayout | None, instruction_set: KernelName | None
    ) -> str:
        """The settings of a process that joined by itself, as JSON.

        layout: of the experts, for a server. instruction_set: instruction set of the native kernels of
        members like it.
        """
        if member.role is Role.SERVER:
            assert layout is not None
            server = self.server_config(layout)
            return (server if instruction_set is None else replace(server, kernels=instruction_set)).to_json()
        settings = self.worker_config(member)
        model = (
            settings.model
            if instruction_set is None
            else replace(settings.model, kernels=instruction_set, device="cpu")
        )
        return replace(settings, model=model, trace=None, checkpoint_stamp="").to_json()
