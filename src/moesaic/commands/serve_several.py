"""`moesaic serve A B`: a front that answers HTTP, and a server in a process of its own for each model.

Question: What does `moesaic serve` do with several models?
"""

from __future__ import annotations

import asyncio
import json
import pickle
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from moesaic.commands import descriptors
from moesaic.commands.memory_need import count_loaded_bytes, measure
from moesaic.commands.model_settings import ServedModel
from moesaic.commands.serve import check_packages, stoppable
from moesaic.config import (
    CorsConfig,
    NamedModel,
    SeveralModelsConfig,
    model_environment,
)
from moesaic.core.errors import ConfigError
from moesaic.models import files
from moesaic.policy.fleet.model_pool import ModelPool
from moesaic.runtime.machine import NVIDIA, available_memory
from moesaic.runtime.process_end import describe_exit
from moesaic.server.elastic import admin_paths
from moesaic.server.front.app import create_front
from moesaic.server.front.fleet import FleetModel, ModelFleet
from moesaic.server.front.model_process import ModelProcess, ProcessStart
from moesaic.server.guard import Access
from moesaic.server.hosts import Hosts, is_loopback
from moesaic.server.listener import listen, name_address
from moesaic.server.run import serve
from moesaic.text.parsers.table import check_parsers
from moesaic.trace import logs

WITH_ONE_MODEL = {
    "nnodes": "--nnodes",
    "cluster_address": "--cluster-address",
    "standby_for": "--standby-for",
    "placement": "--placement",
    "schedule_policy_file": "--schedule-policy-file",
    "distributed_executor_backend": "--distributed-executor-backend",
    "profile": "--profile",
    "hot_experts": "--hot-experts",
    "record_routing": "--record-routing",
    "trace": "--trace",
}
"""Settings that name other hosts, or a file of one model."""


def run(
    models: Sequence[NamedModel], loading: SeveralModelsConfig, common: ServedModel, as_json: bool
) -> int:
    """Serve `models` until a signal arrives. Returns the exit code.

    common: the settings of every model. Their processes get those, and listen on sockets of their own.
    """
    logs.set_up("front", common.worker.log_level)
    server = common.server
    check(models, common)
    if server.served_model_name:
        models = [NamedModel(server.served_model_name, models[0].source)]
    max_loaded = choose_max_loaded(models, loading, common)
    descriptors.prepare()
    with (
        stoppable(),
        listen(server.host, server.port, server.uds) as listener,
        tempfile.TemporaryDirectory(prefix="moesaic-") as folder,  # of mode 700
    ):
        host, url = name_address(listener)
        has_processes = common.cluster.resolve().has_several_processes
        new_key = secrets.token_hex(24) if has_processes and server.admin_key is None else None
        capacity = available_memory()
        pool = ModelPool([model.names[0] for model in models], max_loaded, capacity, loading.idle_unload)
        fleet = ModelFleet(
            [
                make_fleet_model(model, common, Path(folder) / f"{number}.socket", capacity)
                for number, model in enumerate(models)
            ],
            pool,
            load_wait=loading.load_wait,
            preloads=[model.names[0] for model in models] if loading.preload else [],
        )
        hosts = None if server.uds else Hosts.from_listener(server.host, host, server.more_hosts)
        protect_status = server.api_key is None and not is_loopback(host)
        admin = admin_paths(protect_status) if has_processes else frozenset[str]()
        app = create_front(
            fleet,
            access=Access(server.api_key, server.admin_key or new_key, admin, hosts),
            body_seconds=common.connections.timeout_body,
            cors=common.cors,
            tokenizer_info=server.enable_tokenizer_info_endpoint,
        )
        announce(models, url, max_loaded, as_json, new_key)
        return serve(app, fleet, listener, limits=common.connections, access_log=server.access_log)


def check(models: Sequence[NamedModel], common: ServedModel) -> None:
    """Raise ConfigError for what several models cannot have, before anything is loaded."""
    if len(models) > 1 and common.server.served_model_name:
        name = common.server.served_model_name[0]
        raise ConfigError.field("--served-model-name", name, "nothing with several models; write NAME=MODEL")
    for settings in (common.cluster, common.offload, common.record, common.worker):
        for setting in fields(settings):
            flag = WITH_ONE_MODEL.get(setting.name)
            value = getattr(settings, setting.name)
            if flag is not None and value != setting.default:
                allowed_values = "nothing with models that are loaded and unloaded: it belongs to one model"
                raise ConfigError.field(flag, str(value), allowed_values)
    template = common.server.chat_template
    if template is not None and not Path(template).is_file():
        raise ConfigError.field("--chat-template", template, "a file with a Jinja template")
    check_parsers(common.server.tool_call_parser, common.server.reasoning_parser)
    check_packages(common.server.otlp_traces_endpoint)
    for model in models:
        if not files.is_hub_name(model.source):
            files.resolve(model.source, common.worker.model.revision, common.worker.model.hf_overrides)


def choose_max_loaded(models: Sequence[NamedModel], loading: SeveralModelsConfig, common: ServedModel) -> int:
    """The value of --max-loaded. Raises ConfigError for more than one model on GPUs that one takes whole."""
    device = common.worker.model.device
    has_gpu = device == "cuda" or (device == "auto" and NVIDIA.exists())
    takes_gpu = has_gpu and common.worker.cache.kv_cache_memory == "auto"
    if takes_gpu and (loading.max_loaded or 1) > 1:
        allowed_values = "1 on a GPU, whose memory one model takes, or a size in --kv-cache-memory"
        raise ConfigError.field("--max-loaded", loading.max_loaded, allowed_values)
    return loading.max_loaded or (1 if takes_gpu else len(models))


def make_fleet_model(model: NamedModel, common: ServedModel, socket: Path, capacity: int) -> FleetModel:
    """A model of the fleet, with what starts its process."""
    key = secrets.token_hex(24)
    settings = settle_model(model, common, socket, key)
    source = Path(model.source)
    start = ProcessStart(
        model.names[0],
        pickle.dumps(settings),
        socket,
        model_environment(),
        key,
        partial(describe_exit, model=source if source.exists() else None),
    )
    return FleetModel(
        settings.server.served_model_name,
        model.source,
        max_waiting=common.worker.scheduler.max_num_seqs + common.server.max_queue,
        launch=partial(ModelProcess.launch, start),
        measure=partial(asyncio.to_thread, measure, settings, capacity),
        count_bytes=partial(count_loaded_bytes, settings),
    )


def settle_model(model: NamedModel, common: ServedModel, socket: Path, key: str) -> ServedModel:
    """The settings of the process of one model: those of all, behind the front that checks who calls."""
    server = replace(
        common.server,
        uds=str(socket),
        api_key=None,
        admin_key=key,
        allowed_hosts=None,
        served_model_name=model.names,
        access_log=False,
    )
    worker = replace(common.worker, model=replace(common.worker.model, model=model.source))
    connections = replace(common.connections, max_connections=None)
    return replace(common, worker=worker, server=server, connections=connections, cors=CorsConfig())


def announce(
    models: Sequence[NamedModel], url: str, max_loaded: int, as_json: bool, admin_key: str | None
) -> None:
    """Say what is served and where. Models may still load."""
    names = [model.names[0] for model in models]
    if as_json:
        record: dict[str, Any] = {"event": "serving", "models": names, "url": url, "max_loaded": max_loaded}
        print(json.dumps(record | ({} if admin_key is None else {"admin_key": admin_key})), flush=True)
        return
    if admin_key is not None:
        print(f"Admin key, which moesaic scale --admin-key needs: {admin_key}")
    print(f"Page with a chat and a live view: {url}/{'' if admin_key is None else f'#key={admin_key}'}")
    print(f"Serving {', '.join(names)} at {url}, at most {max_loaded} of them loaded", flush=True)
