"""The shape of the package: who may import whom, one home for each library, sizes, habits.

A rule that stands in the way of clearer code is changed here, by name and with its reason.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import architecture_rules as rules
from tests.support.architecture_rules import Module

SOURCE = Path(__file__).parent.parent / "src" / "moesaic"
MODULES = rules.read_package(SOURCE)

EDGES: dict[str, tuple[str, ...]] = {
    # nouns, decisions, prices
    "core": (),
    # The only door to what only a GPU runs: shared code asks it for a part when the configuration names one.
    # Its functions are typed by what their users know of the parts.
    "core.gpu_parts": (
        *("config", "core.experts", "core.job_membership", "cluster.job_places", "cluster.members"),
        *("experts.remote", "experts.server_memory", "experts.worker_memory", "kernels.table"),
        *("planning.hardware.device", "planning.hardware.timing", "policy.fleet.replicas"),
        *("runtime.context", "runtime.step.running_step", "runtime.step.stages"),
        *("gpu.exchange.full_graphs", "gpu.exchange.server_transport", "gpu.graphs.graphs", "gpu.hardware"),
        *("gpu.ipc.device_rows", "gpu.nvshmem.package", "gpu.nvshmem.places", "gpu.triton.operations"),
        *("gpu.ranks.recorded_attention", "gpu.ranks.recorded_rank"),
    ),
    "cost": ("core",),
    "policy": ("core", "cost"),
    # mechanisms
    "kernels": ("core", "core.gpu_parts"),
    "models": ("core", "kernels", "config.environment"),  # digests are kept in the user's cache folder
    # The spec says how wide a token's keys and values are. A block attends over what its layer keeps.
    "models.kvcache": ("core", "kernels", "models.block", "models.pages", "models.spec"),
    "transport": ("core",),
    "trace": ("config", "core"),
    "experts.collectives": ("core", "transport", "policy.placement.shuffle"),
    # a server reads its own weights and decides what runs next; a client decides who is asked
    "experts": (
        "core.gpu_parts",
        *("config", "core", "cost.curves", "kernels", "trace.logs", "models", "policy.fleet.replicas"),
        "policy.fleet.relays",  # which server of another host passes rows on
        "offload.pool",  # a server with more experts than memory
        "policy.scheduling.microqueue",
        *("policy.scheduling.minimum_batch", "policy.scheduling.schedulers.expert_server"),
        "policy.scheduling.schedulers.server_setup",
        *("policy.scheduling.step_barrier", "trace", "transport"),
    ),
    "offload": (
        "core",
        "kernels",
        "models.kvcache",
        "models",
        "policy.offloading",
        "policy.scheduling.kvblocks",
    ),
    # reads memory and disk, and multiplies, by what the engine does it with
    "planning.hardware": (
        "core",
        "core.gpu_parts",
        "cost",
        "kernels",
        "offload.arena",
        "offload.reading",
        "runtime.machine",
    ),
    # what only a GPU runs
    "gpu": (),
    "gpu.exchange": (
        "config",
        "core.errors",
        "core.experts",
        "core.job_membership",
        "core.messages",
        "core.metrics",
        "core.tokens",
        "experts.client",
        "experts.connector",
        "experts.remote",
        "experts.server_memory",
        "experts.wire",
        "gpu.graphs.graphs",
        "gpu.ipc.device_calls",
        "gpu.ipc.device_heap",
        "gpu.ipc.device_rows",
        "gpu.ipc.device_sharing",
        "gpu.nvshmem.answerer",
        "gpu.nvshmem.job",
        "gpu.nvshmem.nvshmem_mailbox",
        "gpu.nvshmem.symmetric_heap",
        "kernels.moving",
        "kernels.table",
        "policy.fleet.replicas",
        "runtime.context",
        "runtime.step.eager",
        "runtime.step.running_step",
        "runtime.step.stages",
        "transport.address",
        "transport.authentication",
        "transport.calls",
        "transport.host_watch",
        "transport.listening",
        "transport.sealed_socket",
        "transport.words",
    ),
    "gpu.graphs": (
        "core.tokens",
        "experts.client",
        "kernels.batch",
        "kernels.moving",
        "kernels.table",
        "runtime.step.recordings",
        "runtime.step.running_step",
        "runtime.step.stages",
        "runtime.step.step_kind",
    ),
    "gpu.hardware": ("planning.hardware.device", "planning.hardware.timing"),
    "gpu.ipc": (
        "core.errors",
        "core.tokens",
        "experts.client",
        "experts.outstanding",
        "experts.server_memory",
        "experts.wire",
        "kernels.moving",
        "kernels.pointers",
        "transport.address",
        "transport.calls",
        "transport.listening",
        "transport.shm",
    ),
    "gpu.nvshmem": (
        "cluster.member",
        "cluster.members",
        "config",
        "core.errors",
        "core.experts",
        "core.job_membership",
        "core.messages",
        "core.tokens",
        "experts.wire",
        "gpu.exchange.exchange_launches",
        "gpu.exchange.lifeline",
        "gpu.exchange.mailbox_answerer",
        "gpu.exchange.server_mailbox",
        "gpu.ipc.device_calls",
        "gpu.ipc.device_sharing",
        "kernels.moving",
        "kernels.pointers",
        "transport.calls",
        "transport.words",
    ),
    "gpu.ranks": (
        "core.errors",
        "core.tokens",
        "experts.collectives.group",
        "gpu.graphs.graph_inputs",
        "kernels.batch",
        "kernels.moving",
        "kernels.table",
        "models.block",
        "models.kvcache.memory",
        "models.model",
        "runtime.group.arrays",
        "runtime.group.exchanges",
        "runtime.group.rows",
        "runtime.group.sharded_model",
        "runtime.group.announcer",
        "runtime.step.running_step",
        "runtime.step.stages",
        "runtime.step.step_kind",
    ),
    "gpu.triton": (
        "core",
        "gpu.exchange.exchange_launches",
        "gpu.nvshmem.symmetric_heap",
        "kernels",
    ),
    # programs
    "runtime": (
        "core.gpu_parts",
        *("config", "core", "experts.answer_check", "experts.client", "experts.connector"),
        *(
            "cost.curves",
            "cost.reading",
            "experts.measuring",
            "experts.observer",
            "experts.pacing",
            "experts.remote",
        ),
        *(
            "kernels",
            "models.kvcache",
            "experts.collectives",
            "trace.logs",
            "models",
            "offload",
            "policy",
            "text.structured",
            "trace",
        ),
        "transport",
    ),
    "cluster": (
        "core.gpu_parts",
        *("config", "core", "policy.fleet.autoscale", "policy.fleet.devices", "policy.placement.balance"),
        "policy.fleet.bounds",  # how many processes there may be
        "runtime.machine",  # how much memory is left for more of them
        "policy.fleet.silence",
        "policy.fleet.health",  # what an outage means for users
        "policy.fleet.nodes",  # where Ray should start a process
        *("policy.placement.around_homes", "policy.placement.dispatch"),
        "policy.placement.spreading",  # how many experts have all of their copies on one host
        "policy.placement.returning",  # which experts servers keep under a new supervisor
        *("trace.parts", "transport"),
        # placements from live routing: the verdict, what a process is asked, and what it answers
        *("policy.placement.locality", "policy.placement.online", "policy.placement.online_solution"),
        *("cluster.solving.job", "trace.live_routing"),
        *(
            "cluster.joining.options",
            "cluster.joining.watcher",
        ),  # what a process of another host is started with
        "cluster.joining.enlisting",  # the instruction sets of this host
        "models.fingerprint",  # whether a process that joins has the same checkpoint
        "models.file_state",  # whether its files are those of the start
        *("runtime.machine", "runtime.process_end"),  # cores of this host, and how its processes ended
    ),
    # joins a cluster as one role or the other
    "cluster.joining": (
        "core.gpu_parts",
        *("config", "core", "experts.keeping", "experts.process", "kernels.native.plain", "trace.logs"),
        *("models.fingerprint", "models.gguf.header", "policy.fleet.silence", "transport"),
        *("runtime.machine", "runtime.process", "runtime.process_end"),
        *("runtime.keeping", "runtime.group.build_rank"),
    ),
    "cluster.solving": ("core", "policy.placement"),  # a placement from live routing, in a process of its own
    "text.templates": ("config", "core"),
    "text.parsers": ("core",),  # answers of models: pure, text in and events out
    "text.tiktoken_model": ("core",),
    "text.gguf_tokenizer": (
        "core",
        "models.gguf",
        "text.tiktoken_model",
    ),  # the metadata of a GGUF file has the tokenizer
    "text.added_tokens": ("core",),
    "text.tokenizer": (
        "core",
        "text.added_tokens",
        "text.gguf_tokenizer",
        "models.gguf.header",
        "text.templates",
        "text.tiktoken_model",
    ),
    "text.detokenizer": ("text.tokenizer",),
    "text.stop_strings": (),
    # Workers are known through a transport only.
    # the tokens that an answer of a certain form may have: masks for a worker, a grammar for an engine
    "text.structured": ("core", "trace.logs", "text.tokenizer"),
    "engine": (
        *(
            "core",
            "text.detokenizer",
            "text.stop_strings",
            "text.structured.grammar",
            "text.tokenizer",
        ),
        "transport.base",
    ),
    "server": ("config", "core", "engine", "trace.logs", "text.parsers", "text.structured.grammar"),
    "server.client": ("core",),
    # one server in front of several models: which are loaded is a decision
    "server.front": (*("config", "core", "policy.fleet.model_pool", "server", "trace.logs"),),
    "jobs.bench": ("server.client", "config", "core", "llm", "trace.parts"),
    # the stages of a worker's step, layer by layer, beside another implementation
    "jobs.verify": ("core", "kernels", "models", "runtime.step.one_prompt"),
    # the same stages over prompts, to round experts by their inputs and to measure the result
    "jobs.quantizing": (
        *("config", "core", "kernels", "models", "jobs.profiling.prompts", "runtime.machine"),
        *("runtime.step.one_prompt", "text.tokenizer"),
    ),
    # from a job and a machine to a worker's settings, before there is a worker
    "planning": (
        *(
            "jobs.bench.lengths",
            "planning.sim",
        ),  # deployments are searched in virtual time, for recorded requests too
        *("config", "core", "cost", "models.files", "models.registry", "models.shard", "policy.offloading"),
        "kernels.table",  # the type in which experts are computed depends on the kernels
        *("models.conversion", "models.headers"),  # how many bytes of the files an expert has
        "policy.scheduling.step_prices",  # with which a worker that drafts tokens begins
    ),
    # the HTTP API's own code in this process, in front of workers; how long a file's requests are
    "jobs.batch": (
        *(
            "",
            "server.client",
            "cluster",
            "config",
            "core",
            "engine",
            "cluster.launch",
            "models.files",
            "planning",
        ),
        *("text.parsers.table", "server", "text.tokenizer", "trace.options"),
    ),
    # the engine in this process, and what its gates chose
    "jobs.profiling": (
        *("config", "core", "llm", "models.embedding", "models.files", "models.registry", "text.tokenizer"),
        "models.fingerprint",  # a list of hot experts names its checkpoint
    ),
    # a cluster in virtual time: the engine's policies, and neither a model nor a process
    "planning.sim": (
        *(
            "jobs.bench.lengths",
            "cluster.autoscaling",
            "cluster.balancing",
            "config",
            "core",
            "cost",
            "policy",
            "trace.parts",
        ),
    ),
    "config": ("core",),
    "jobs": (),
    "text": (),
    "trace.logs": (),  # the form of log lines, and the request that they belong to
    "testing": ("core", "text.tokenizer"),
    # these join the rest: an engine and its worker, here or in another process, and the command line
    "cluster.launch": (
        *("cluster", "config", "core", "engine", "models.files", "models.fingerprint", "text.tokenizer"),
        *("policy.fleet.devices", "trace.live_routing", "trace.options"),
        *("trace.parts", "trace.routing", "transport.base"),
    ),
    "llm": (
        *("config", "core", "engine", "models.files", "runtime", "text.structured.grammar", "text.tokenizer"),
        *("models.fingerprint", "models.served_files"),  # whether the mapped files are those of the start
        "transport.local",
    ),
    "__main__": ("commands.cli",),
    "commands.cli": (
        *(
            "",
            "jobs.batch.options",
            "jobs.bench.options",
            "commands",
            "config",
            "core",
            "jobs.profiling.options",
        ),
        *("jobs.quantizing.options", "trace.options"),
    ),
    "commands.served_model": ("commands", "core", "trace.logs"),
    "commands": (
        *(
            "",
            "jobs.batch",
            "jobs.bench",
            "server.client",
            "config",
            "core",
            "cluster.joining",
            "kernels.table",
            "cluster.launch",
            "trace.logs",
        ),
        *(
            "cluster.numa",
            "cluster.process_room",
            "policy.fleet.bounds",
            "models.compressing",
            "models.files",
            "text.parsers.table",
            "planning",
            "text.tokenizer",
        ),
        *("cost", "planning.hardware", "policy.offloading", "policy.placement", "jobs.profiling"),
        *("jobs.quantizing", "planning.sim"),
        *("runtime.limits", "runtime.machine", "server", "jobs.verify"),
        # what the loader says about a model before it is loaded
        *("models.checkpoint", "models.config", "models.registry", "models.spec"),
        *("experts.measuring", "policy.scheduling.minimum_batch"),  # which rows run alone on this machine
        "runtime.cache_size",  # the share of memory that a cache takes
        *("runtime.fitting", "runtime.quick_fit"),  # whether a model fits
        *("policy.fleet.model_pool", "runtime.process_end", "server.front"),  # several models in turn
        "runtime.model_loading",  # how many GPUs there are to plan for
        "runtime.offloaded_worker",  # experts that cannot be streamed are refused before anything is measured
        *("trace.options", "trace.parts", "transport.base", "transport.secret"),
    ),
    "": ("core", "llm"),  # the package itself: public names, loaded on first use
}
"""Room -> what it may import beside itself. "a.b" allows that one module, "" the package's own names."""

MECHANISMS = re.compile(
    r"nvshmem|cuda_ipc|device_rows|device rows|mailbox|lifeline|full_graph|cudagraph|cuda_graph",
    re.IGNORECASE,
)
NAME_MECHANISMS = (
    *("config.cluster", "config.values", "config.worker"),  # the flags
    *("commands.flag_groups", "commands.processes", "core.messages", "transport.authentication"),
    *("cluster.host_transport", "cluster.joining.enlisting"),  # which settings go together
    *("cluster.members", "cluster.scaling", "cluster.supervisor", "cluster.trust"),
    *("core.gpu_parts", "runtime.in_memory"),  # the door, and who asks for graphs of whole steps
)
"""The shared modules that name a mechanism which only GPUs have."""

TORCH_ROOMS = (
    *(
        "kernels",
        "models",
        "models.kvcache",
        "runtime",
        "experts",
        "offload",
        "planning.hardware",
        "jobs.verify",
    ),
    "jobs.quantizing",
    *("gpu.exchange", "gpu.graphs", "gpu.hardware", "gpu.ipc", "gpu.nvshmem", "gpu.ranks", "gpu.triton"),
    "text.structured.constraints",  # masks change the sampler's logits
)
HOMES: dict[str, tuple[str, ...]] = {
    "numpy": tuple(room for room in EDGES if room not in ("commands.cli", "commands", "config", "")),
    "scipy": (
        "policy.offloading.flexgen",
        "policy.placement.solvers",
    ),  # FlexGen's search is a linear program; ours is none
    "pymetis": ("policy.placement.solvers.metis",),
    "torch": (
        *(*TORCH_ROOMS, "commands.machine"),  # doctor asks torch which GPUs it sees
        "commands.schedule_curves",  # and multiplies with this machine's kernels
        "jobs.profiling.sglang_files",  # SGLang records routing with torch.save
    ),
    "safetensors": ("models.tensor_files",),
    "huggingface_hub": ("models.hub",),
    "tokenizers": ("text.tokenizer", "text.added_tokens", "text.gguf_tokenizer", "text.tiktoken_model"),
    "transformers": ("jobs.verify.reference",),
    "jinja2": (
        "text.templates.jinja_template",
        "text.templates.process",
    ),  # never in the process of the server
    "msgspec": ("transport",),
    "cryptography": ("transport.sealing",),
    "fastapi": ("server", "server.front"),
    "starlette": ("server", "server.front"),
    "uvicorn": ("server",),
    "pydantic": ("server", "server.front"),
    "prometheus_client": ("server", "server.front", "commands.top_view"),
    "httpx": ("server.client", "server.front.forwarding"),
    "rich": ("commands", "jobs.bench", "jobs.batch"),
    "cyclopts": ("commands.cli", "commands"),
    "yaml": ("commands.yaml_settings",),
    "llguidance": ("text.structured",),
    "triton": ("gpu.triton",),
    "opentelemetry": ("server.otlp",),
    "ray": ("cluster.ray_launcher",),
}
"""Foreign library -> the only places that import it."""

PUBLIC = ("", "testing")
"""Modules that users import; every __main__ is a program besides."""
SUBJECTS = ("scheduling", "placement", "offloading", "fleet")
"""Of policy. None of them imports another."""

PURE_ROOMS = ("core", "cost", "policy", "text.parsers")
IMPURE = (
    *("torch", "asyncio", "threading", "multiprocessing", "concurrent", "socket", "selectors", "subprocess"),
    *("time", "os", "queue", "secrets"),
)
DOORS = ("core.gpu_parts",)
"""Modules that import late what knows their own users."""
LATE_IMPORTS = {
    "core.gpu_parts": "what only a GPU runs is loaded where the configuration names it, and nowhere else",
    "__main__": "Ctrl-C while modules load ends the command quietly, too",
    "commands.cli": "what a command does is imported when it is called, so that --help answers at once",
    "commands.bench": "only the engine in this process needs torch, which takes seconds to import",
    "commands.plan": "only --hardware this needs torch, which takes seconds to import",
    "commands.place": "only --model needs torch, which takes seconds to import",
    "commands.place_formats": "only a .pt file needs torch",
    "commands.groups": "as in cli",
    "commands.chat": "a chat with a server elsewhere needs no server here; Python may lack readline",
    "commands.settings": "only --config needs PyYAML",
    "commands.starting": "only a plan needs torch, and a process of its own makes it",
    "commands.memory_need": "only a model that is not small needs torch, in a process of its own",
    "commands.serve": "the API takes most of a second to import, which the worker loads in as well",
    "experts.process": "a server on the native kernels never imports torch, one on the reference has to",
    "cluster.joining.__main__": "only a worker needs torch, which takes seconds to import",
    "cluster.launch": "Ray is needed for --distributed-executor-backend ray only, and need not be installed",
    "models.hub": "the hub's library is needed for hub ids only and takes a second to import",
    "jobs.verify.reference": "transformers need not be installed",
    "text.templates.__main__": "its parent says where modules are found",
    "policy.offloading.flexgen": "only FlexGen's search needs SciPy, which takes half a second to import",
    "policy.placement.solvers": "only MoETuner imports SciPy's optimisers with it",
    "policy.placement.solvers.affinity": "a server that never solves a placement needs no SciPy",
    "policy.placement.solvers.assignment": "as in affinity",
}
BROAD_EXCEPTS = {
    "cluster.failures": "a bug in one thing that the supervisor does must not end its watch over the rest",
    "transport.nixl_link": "NIXL's errors have no base class of their own",
    "cluster.watchdog": "whatever ends the supervisor's thread, another one takes its place",
}
LONGER_FILES: dict[str, int] = {}
"""Module -> lines, where more than 600 read better; the reason stands beside it."""
NAMES = ("utils", "util", "common", "helpers", "manager", "misc")

RULES: dict[str, Callable[[list[Module]], list[str]]] = {
    "rooms import only what the table of edges allows": lambda m: rules.crossings(m, EDGES),
    "no subject of policy imports another": lambda m: rules.entangled(m, "policy", SUBJECTS),
    "each foreign library has one home": lambda m: rules.homeless(m, HOMES, EDGES),
    "nouns, prices and decisions are pure": lambda m: rules.impure(m, PURE_ROOMS, IMPURE),
    "no import cycles": lambda m: rules.cycles(m, DOORS),
    "every module is reached by a command or a public name": lambda m: rules.unreached(m, PUBLIC),
    "function-level imports only where listed": lambda m: rules.late_imports(m, LATE_IMPORTS),
    "no broad except that does not raise": lambda m: rules.broad_excepts(m, BROAD_EXCEPTS),
    "no global statement": rules.globals_written,
    "the environment is read in config only": lambda m: rules.environment_readers(m, "config.environment"),
    "every function has a return type": rules.untyped,
    "nothing is named after nothing": lambda m: rules.drawers(m, NAMES),
    "files and functions stay small": lambda m: rules.oversized(m, LONGER_FILES, 600, 50),
}

VIOLATIONS = [
    (
        "rooms import only what the table of edges allows",
        "models.x",
        "from moesaic.policy.scheduling import batching",
    ),
    ("rooms import only what the table of edges allows", "runtime.x", "import moesaic.experts.server"),
    ("rooms import only what the table of edges allows", "core.x", "from ..engine import Engine"),
    ("rooms import only what the table of edges allows", "attic.x", ""),
    # a room within another one: neither has the rights of the other
    ("rooms import only what the table of edges allows", "cluster.x", "import moesaic.cluster.joining.loop"),
    (
        "rooms import only what the table of edges allows",
        "cluster.solving.x",
        "import moesaic.transport.base",
    ),
    ("each foreign library has one home", "server.client", "import fastapi"),
    (
        "no subject of policy imports another",
        "policy.fleet.x",
        "from moesaic.policy.placement import balance",
    ),
    ("no subject of policy imports another", "policy.x", ""),
    ("every module is reached by a command or a public name", "core.x", ""),
    ("each foreign library has one home", "engine", "import fastapi.responses"),
    ("each foreign library has one home", "core.x", "def f() -> None:\n    import requests"),
    ("nouns, prices and decisions are pure", "policy.x", "import time"),
    ("nouns, prices and decisions are pure", "policy.x", "from os import environ"),
    ("nouns, prices and decisions are pure", "policy.x", "import random\nx = random.random()"),
    ("nouns, prices and decisions are pure", "cost.x", "import numpy as np\nx = np.random.default_rng()"),
    ("no import cycles", "core.x", "from moesaic.core import x2"),
    (
        "no import cycles",
        "core.x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from moesaic.core import x2",
    ),
    ("function-level imports only where listed", "engine", "def f() -> None:\n    import json"),
    ("no broad except that does not raise", "engine", "try:\n    f()\nexcept Exception:\n    pass"),
    ("no broad except that does not raise", "engine", "try:\n    f()\nexcept (OSError, Exception):\n    g()"),
    ("no broad except that does not raise", "engine", "try:\n    f()\nexcept:\n    g()"),
    ("no global statement", "engine", "def f() -> None:\n    global x\n    x = 1"),
    ("the environment is read in config only", "engine", "import os\nx = os.environ['HOME']"),
    ("the environment is read in config only", "engine", "from os import getenv"),
    ("every function has a return type", "engine", "class A:\n    def f(self): ..."),
    ("nothing is named after nothing", "core.utils", ""),
    ("nothing is named after nothing", "core.x", "class BlockManager: ..."),
    ("files and functions stay small", "core.x", "\n" * 601),
    ("files and functions stay small", "core.x", "def f() -> None:\n" + "    g()\n" * 50),
]

INNOCENT = """
from __future__ import annotations
from typing import TYPE_CHECKING
import random
from moesaic.core.errors import ConfigError
if TYPE_CHECKING:
    from moesaic.core.errors import RequestError
def f(rng: random.Random) -> None:
    try:
        rng.random()
    except Exception as error:
        raise ConfigError("x") from error
"""


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str) -> None:
    complaints = RULES[rule](MODULES)
    assert not complaints, f"{rule}:\n  " + "\n  ".join(complaints)


@pytest.mark.parametrize(("rule", "name", "source"), VIOLATIONS)
def test_rule_has_teeth(rule: str, name: str, source: str) -> None:
    other = Module("moesaic.core.x2", "import moesaic.core.x")
    assert RULES[rule]([Module(f"moesaic.{name}", source), other])


@pytest.mark.parametrize("rule", RULES)
def test_rule_spares_the_innocent(rule: str) -> None:
    other = Module("moesaic.core.x2", "import moesaic.core.x")
    public = Module("moesaic", "import moesaic.core.x2", is_package=True)
    assert RULES[rule]([Module("moesaic.core.x", INNOCENT), other, public]) == []


def test_the_tables_name_only_what_exists() -> None:
    inner = {module.inner for module in MODULES}
    targets = [target for row in (*EDGES.values(), *HOMES.values()) for target in row]
    assert {*EDGES, *targets} <= inner


def test_few_shared_modules_name_a_mechanism_of_gpus() -> None:
    naming = [
        module.inner
        for module in MODULES
        if not rules.within(module.inner, ["gpu"]) and MECHANISMS.search(module.source)
    ]
    assert sorted(naming) == sorted(NAME_MECHANISMS), "let core/gpu_parts.py decide it"


def test_every_rule_has_a_violation() -> None:
    assert set(RULES) == {rule for rule, _, _ in VIOLATIONS}


def test_rooms_say_what_they_are_for_and_none_is_empty() -> None:
    for folder in [SOURCE, *(path for path in SOURCE.rglob("*") if path.is_dir())]:
        if folder.name == "__pycache__" or folder == SOURCE / "demo" or folder.name == "csrc":
            continue
        if SOURCE / "server" / "page" in (folder, *folder.parents):  # files for browsers
            continue
        module = next((m for m in MODULES if m.is_package and _folder(m) == folder), None)
        assert module is not None, f"{folder}: no __init__.py: remove the folder, or fill it"
        assert rules.ast.get_docstring(module.tree), (
            f"{folder}/__init__.py: say in one line what the room is for"
        )


def _folder(module: Module) -> Path:
    return SOURCE.joinpath(*module.inner.split(".")) if module.inner else SOURCE


HEAVY = ("torch", "transformers", "fastapi", "huggingface_hub")


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("moesaic", (*HEAVY, "numpy", "rich")),
        ("moesaic.commands.cli", (*HEAVY, "rich.progress")),
        pytest.param("moesaic.commands.serve", HEAVY[:3], marks=pytest.mark.slow),
        pytest.param("moesaic.server.app, moesaic.server.run", HEAVY[:2], marks=pytest.mark.slow),
        pytest.param("moesaic.engine", (*HEAVY, "jinja2"), marks=pytest.mark.slow),
        ("moesaic.text.templates.process", (*HEAVY, "numpy", "tokenizers", "pydantic", "socket", "asyncio")),
    ],
)
def test_import_stays_light(module: str, banned: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sorted({set(banned)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], (
        f"importing {module} loads {done.stdout.strip()}: import it where it is used"
    )
