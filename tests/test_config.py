from __future__ import annotations

import dataclasses
import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from moesaic import config
from moesaic.config import (
    CacheConfig,
    ClusterConfig,
    ConnectionConfig,
    CorsConfig,
    ModelConfig,
    OffloadConfig,
    ParallelConfig,
    QueueConfig,
    SchedulerConfig,
    ServerConfig,
    SeveralModelsConfig,
    WorkerConfig,
)
from moesaic.core.errors import ConfigError

CONFIGS = (
    ModelConfig,
    CacheConfig,
    SchedulerConfig,
    QueueConfig,
    ServerConfig,
    ConnectionConfig,
    SeveralModelsConfig,
)

STORED = CacheConfig(prefix_cache_dir="d")


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 * 2**20), ("4GB", 4 * 10**9), ("2g", 2 * 2**30), (" 1.5 KiB ", 1536), ("77", 77)],
)
def test_sizes(text: str, size: int) -> None:
    assert config.parse_bytes("--x", text) == size


@pytest.mark.parametrize("text", ["", "4XB", "-1", "0", "auto", "1e9", "GiB"])
def test_bad_sizes_name_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--x: got .*; allowed: a positive size"):
        config.parse_bytes("--x", text)


def whole_steps(
    scheduler: SchedulerConfig = SchedulerConfig(),
    kernels: str = "triton",
    enforce_eager: bool = False,
    **worker: Any,
) -> WorkerConfig:
    model = ModelConfig("m", kernels=kernels, enforce_eager=enforce_eager, cudagraph_mode="full")
    return WorkerConfig(model, scheduler=scheduler, **worker)


def test_json_carries_whole_steps() -> None:
    assert WorkerConfig.from_json(whole_steps().to_json()) == whole_steps()


def test_json_carries_every_setting() -> None:
    full = WorkerConfig(
        ModelConfig(
            "m",
            revision="r",
            hf_overrides='{"a": null}',
            device="cpu",
            dtype="float32",
            max_model_len=64,
            threads=3,
            pin_threads=True,
            mmap=False,
            kernels="portable",
            enforce_eager=True,
        ),
        CacheConfig("1GiB", "float16", 32, prefix_cache_dir="d", prefix_cache_disk="1GiB"),
        SchedulerConfig(
            7,
            99,
            prefill_step_ms=150,
            schedule="async",
            queue_policy="mtfs",
            combine="partial",
            relay="off",
            replica_timeout=0.1,
            speculative_config='{"method": "ngram", "num_speculative_tokens": 3}',
        ),
        remote_experts=True,
        supervised=True,
        beside=2,
        own_server=3,
        most_threads=2,
        cpus=(0, 1),
        transport="socket",
        queues=QueueConfig(0.25, 0, 8, 1.5),
    )
    for part in (full.model, full.cache, full.scheduler):
        blank = dataclasses.replace(WorkerConfig(ModelConfig("x")))
        default = next(value for value in vars(blank).values() if type(value) is type(part))
        same = {name for name, value in vars(part).items() if value == getattr(default, name)}
        # 2, full and False go with other settings only
        assert same <= {"inflight_batches", "cudagraph_mode", "enable_prefix_caching"}
    assert WorkerConfig.from_json(full.to_json()) == full


@pytest.mark.parametrize(
    ("flag", "make"),
    [
        ("--max-num-seqs", lambda: WorkerConfig(ModelConfig("m"), scheduler=SchedulerConfig(max_num_seqs=0))),
        ("--max-num-batched-tokens", lambda: WorkerConfig(ModelConfig("m"), scheduler=SchedulerConfig(1, 0))),
        ("--max-num-batched-tokens", lambda: WorkerConfig(ModelConfig("m"), scheduler=SchedulerConfig(9, 8))),
        ("--max-num-seqs", lambda: WorkerConfig(ModelConfig("m"), scheduler=SchedulerConfig("8"))),
        ("--device", lambda: WorkerConfig(ModelConfig("m", device="tpu"))),
        ("--device", lambda: WorkerConfig(ModelConfig("m", device="cuda"), STORED)),
        (
            "--nnodes",
            lambda: WorkerConfig(ModelConfig("m"), STORED, parallel=ParallelConfig(2, nnodes=2)),
        ),
        ("--prefix-cache-disk", lambda: CacheConfig(prefix_cache_dir="d", prefix_cache_disk="1 lot")),
        ("--no-enable-prefix-caching", lambda: dataclasses.replace(STORED, enable_prefix_caching=False)),
        (
            "--replica-timeout",
            lambda: WorkerConfig(ModelConfig("m"), scheduler=SchedulerConfig(replica_timeout=0.0)),
        ),
        ("--dtype", lambda: WorkerConfig(ModelConfig("m", dtype="int4"))),
        ("--cudagraph-mode", lambda: WorkerConfig(ModelConfig("m", cudagraph_mode="none"))),
        ("--kernels", lambda: whole_steps(kernels="auto")),
        ("--enforce-eager", lambda: whole_steps(enforce_eager=True)),
        ("--schedule", lambda: whole_steps(SchedulerConfig(schedule="async"))),
        ("--inflight-batches", lambda: whole_steps(SchedulerConfig(inflight_batches=2))),
        ("--combine", lambda: whole_steps(SchedulerConfig(combine="partial"))),
        ("--tensor-parallel-size", lambda: whole_steps(parallel=ParallelConfig(tensor_parallel_size=2))),
        ("--fast-memory", lambda: whole_steps(server_memory=1)),
        ("--paced", lambda: whole_steps(paced="f")),
        ("--kv-cache-dtype", lambda: WorkerConfig(ModelConfig("m"), CacheConfig(kv_cache_dtype="fp8"))),
        ("--block-size", lambda: WorkerConfig(ModelConfig("m"), CacheConfig(block_size=0))),
        ("--max-model-len", lambda: WorkerConfig(ModelConfig("m", max_model_len=1))),
        ("--threads", lambda: WorkerConfig(ModelConfig("m", threads=0))),
        ("--threads", lambda: WorkerConfig(ModelConfig("m", threads=99999))),
        ("--kv-cache-memory", lambda: WorkerConfig(ModelConfig("m"), CacheConfig("much"))),
        ("--memory-division", lambda: OffloadConfig("1GiB", memory_division="never")),
        ("--hot-experts", lambda: OffloadConfig("1GiB", hot_experts="")),
        ("--queue-urgency", lambda: QueueConfig(queue_urgency=-1)),
        ("--queue-history", lambda: QueueConfig(queue_history=-1)),
        ("--expert-batch-pairs", lambda: QueueConfig(expert_batch_pairs=0)),
        ("--expert-batch-pairs", lambda: QueueConfig(expert_batch_wait=2.0)),
        ("--expert-batch-wait", lambda: QueueConfig(expert_batch_pairs=8)),
        ("--expert-batch-wait", lambda: QueueConfig(expert_batch_pairs=8, expert_batch_wait=101.0)),
        ("--port", lambda: ServerConfig(port=65536)),
        ("--uds", lambda: ServerConfig(uds="x" * 108)),
        ("--max-loaded", lambda: SeveralModelsConfig(max_loaded=0)),
        ("--load-wait", lambda: SeveralModelsConfig(load_wait=-1.0)),
        ("--idle-unload", lambda: SeveralModelsConfig(idle_unload=0.0)),
        ("--max-queue", lambda: ServerConfig(max_queue=-1)),
        ("--api-key", lambda: ServerConfig(api_key="")),
        ("--admin-key", lambda: ServerConfig(admin_key="se cret")),
        ("--allowed-hosts", lambda: ServerConfig(allowed_hosts="a.example,,b.example")),
        ("--allowed-hosts", lambda: ServerConfig(allowed_hosts="http://a.example")),
        ("--served-model-name", lambda: ServerConfig(served_model_name=("a", " "))),
        ("--served-model-name", lambda: ServerConfig(served_model_name=("a", "a"))),
        ("--allowed-origins", lambda: CorsConfig("chat.example")),
        ("--allowed-origins", lambda: CorsConfig("https://chat.example/")),
        ("--allowed-origins", lambda: CorsConfig('["https://a.example", 1]')),
        ("--allowed-origins", lambda: CorsConfig("*", allow_credentials=True)),
        ("--allowed-methods", lambda: CorsConfig("*", "GE T")),
        ("--allowed-headers", lambda: CorsConfig("*", "*", "a,,b")),
        ("--timeout-header", lambda: ConnectionConfig(timeout_header=0)),
        ("--timeout-body", lambda: ConnectionConfig(timeout_body=float("inf"))),
        ("--timeout-keep-alive", lambda: ConnectionConfig(timeout_keep_alive=-1)),
        ("--shutdown-timeout", lambda: ConnectionConfig(shutdown_timeout=0)),
        ("--unavailable-timeout", lambda: ClusterConfig(attention_workers=2, unavailable_timeout=0)),
        ("--max-connections", lambda: ConnectionConfig(max_connections=0)),
    ],
)
def test_a_wrong_setting_is_named(flag: str, make) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: .*allowed: "):
        make()


ASYNC = SchedulerConfig(schedule="async")
LOCKSTEP = SchedulerConfig(schedule="lockstep")
WAITING = QueueConfig(expert_batch_pairs=8, expert_batch_wait=2.0)


@pytest.mark.parametrize(
    ("scheduler", "queues", "wrong"),
    [
        (ASYNC, QueueConfig(queue_urgency=0.0, queue_history=4), None),
        (
            LOCKSTEP,
            QueueConfig(queue_urgency=0.0),
            "--schedule: got 'lockstep'; .*async with --queue-urgency",
        ),
        (LOCKSTEP, QueueConfig(queue_history=4), "--schedule: got 'lockstep'; .*async with --queue-history"),
        (
            dataclasses.replace(ASYNC, queue_policy="flfs"),
            QueueConfig(queue_history=4),
            "--queue-policy: got 'flfs'; .*defrag with --queue-history",
        ),
        (
            dataclasses.replace(LOCKSTEP, queue_policy="mtfs"),
            QueueConfig(),
            "--schedule: got 'lockstep'; .*async with --queue-policy mtfs",
        ),
        (LOCKSTEP, WAITING, None),
        (ASYNC, WAITING, None),
        (
            SchedulerConfig(schedule="barrier"),
            WAITING,
            "--schedule: got 'barrier'; .*lockstep, async with --expert-batch-pairs",
        ),
    ],
)
def test_queues_are_refused_where_they_do_nothing(
    scheduler: SchedulerConfig, queues: QueueConfig, wrong: str | None
) -> None:
    with nullcontext() if wrong is None else pytest.raises(ConfigError, match=wrong):
        WorkerConfig(ModelConfig("m"), scheduler=scheduler, queues=queues)


def test_an_alignment_needs_a_shuffle() -> None:
    assert ParallelConfig(2, shuffle_align="variable") == ParallelConfig(
        2, shuffle_align="variable", moe_collectives=None
    )
    with pytest.raises(ConfigError, match="^--tensor-parallel-size: got 1; allowed: at least 2 with --shuf"):
        ParallelConfig(shuffle_align="variable")
    with pytest.raises(ConfigError, match="^--moe-collectives: got 'all-reduce'; allowed: shuffled with --s"):
        ParallelConfig(2, moe_collectives="all-reduce", shuffle_align="variable")


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ({"collectives_backend": "mpi"}, "--collectives-backend: got 'mpi'; allowed: host, nccl, gloo"),
        ({"tensor_parallel_size": 1}, "--tensor-parallel-size: got 1; allowed: at least 2 with --coll"),
        ({"nnodes": 2}, "--nnodes: got 2; allowed: 1 with --collectives-backend gloo"),
    ],
)
def test_rows_by_torch_need_ranks_of_one_host(setting: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"^{wrong}"):
        ParallelConfig(**({"tensor_parallel_size": 2, "collectives_backend": "gloo"} | setting))


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        (
            {"moe_collectives": "deepspeed"},
            "--moe-collectives: got 'deepspeed'; allowed: None with --exp",
        ),
        (
            {"shuffle_align": "variable"},
            "--shuffle-align: got 'variable'; allowed: move with --exper",
        ),
        (
            {"expert_tensor_parallel_size": 2},
            "--expert-tensor-parallel-size: got 2; allowed: 1 with --ex",
        ),
    ],
)
def test_ranks_beside_servers_hold_no_experts(setting: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"^{wrong}"):
        ClusterConfig(tensor_parallel_size=2, expert_servers=1, **setting)
    ClusterConfig(tensor_parallel_size=2, **setting)


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ({"nnodes": 3}, "--nnodes: got 3; allowed: 1, 2, 4, what divides --tensor-parallel-size 4"),
        ({"nnodes": 0}, "--nnodes: got 0; allowed: 1, 2, 4, "),
        (
            {"cluster_address": None, "cluster_secret_file": None},
            "--nnodes: got 2; allowed: 1 without --clus",
        ),
        ({"autoscale": "attention-workers=1:2"}, "--autoscale: got .*; allowed: nothing with --nnodes"),
        (
            {"distributed_executor_backend": "ray"},
            "--nnodes: got 2; allowed: 1 with --distributed-executor-backend ray",
        ),
    ],
)
def test_groups_over_hosts_that_cannot_be(setting: dict[str, Any], wrong: str) -> None:
    door = {"cluster_address": "tcp:10.0.0.1:7000", "cluster_secret_file": "secret"}
    group = {"tensor_parallel_size": 4, "nnodes": 2, **door}
    assert ClusterConfig(**group).parallel.ranks_per_node == 2  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"^{wrong}"):
        ClusterConfig(**(group | setting))


@pytest.mark.parametrize(("servers", "ranks"), [(0, "file.json"), (2, None)])
def test_a_placement_is_of_whoever_holds_experts(servers: int, ranks: str | None) -> None:
    cluster = ClusterConfig(tensor_parallel_size=2, expert_servers=servers, placement="file.json")
    assert cluster.parallel.placement == ranks


def test_urgency_may_be_set_off_or_left_as_it_is() -> None:
    said = [QueueConfig(queue_urgency=one).urgency(0.1) for one in (None, 0.0, 0.5)]
    assert said == [0.1, None, 0.5]
    assert QueueConfig().urgency(None) is None


def test_api_key_comes_from_the_flag_then_the_environment() -> None:
    environment = {"MOESAIC_API_KEY": "from-outside"}
    assert config.resolve_server(ServerConfig(), environment).api_key == "from-outside"
    assert config.resolve_server(ServerConfig(api_key="flag"), environment).api_key == "flag"
    assert config.resolve_server(ServerConfig(), {}).api_key is None


def test_the_admin_key_is_the_api_key_where_nothing_else_is_said() -> None:
    environment = {"MOESAIC_API_KEY": "everybody", "MOESAIC_ADMIN_KEY": "admins"}
    assert config.resolve_server(ServerConfig(), {}).admin_key is None
    assert config.resolve_server(ServerConfig(api_key="a"), {}).admin_key == "a"
    assert config.resolve_server(ServerConfig(api_key="a"), environment).admin_key == "admins"
    assert config.resolve_server(ServerConfig(api_key="a", admin_key="b"), environment).admin_key == "b"


def test_a_worker_gets_no_keys() -> None:
    environment = {"MOESAIC_API_KEY": "a", "MOESAIC_ADMIN_KEY": "b", "HOME": "/root"}
    ours = {"OMP_WAIT_POLICY": "passive", "NCCL_SOCKET_IFNAME": "lo"}
    assert config.worker_environment(environment) == {**ours, "HOME": "/root"}


def test_a_bad_key_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="^MOESAIC_API_KEY: ") as caught:
        config.api_key({"MOESAIC_API_KEY": "se cret"})
    assert "cret" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"^MOESAIC_API_KEY: .*not empty"):
        config.resolve_server(ServerConfig(), {"MOESAIC_API_KEY": ""})


def test_hub_cache_follows_the_hubs_variables() -> None:
    assert config.hub_cache({}) == Path("~/.cache/huggingface/hub").expanduser()
    assert config.hub_cache({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert config.hub_cache({"XDG_CACHE_HOME": "/x", "HF_HOME": "/h"}) == Path("/h/hub")
    assert config.hub_cache({"HF_HOME": "/h", "HF_HUB_CACHE": "/c"}) == Path("/c")


@pytest.mark.parametrize(
    ("given", "flag"),
    [({"attention_workers": 3}, "attention-workers"), ({"expert_servers": 3}, "expert-servers")],
)
def test_sizes_that_say_something_else_are_refused_by_flag(given: dict[str, int], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag}: got 3; allowed: 4 with --data-parallel-size 4"):
        config.ClusterConfig(data_parallel_size=4, enable_expert_parallel=True, **given)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_field_is_documented_and_frozen(kind: type) -> None:
    source = inspect.getsource(kind)
    for field in dataclasses.fields(kind):
        after = source.split(f"\n    {field.name}: ", 1)[1].split("\n", 1)[1]
        assert after.lstrip().startswith('"""'), f"{kind.__name__}.{field.name} has no docstring"
    assert kind.__dataclass_params__.frozen
