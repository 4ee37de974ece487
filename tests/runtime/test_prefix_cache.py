from __future__ import annotations

import os
import resource
import signal
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moesaic import LLM, SamplingParams
from moesaic.commands.starting import settle
from moesaic.config import CacheConfig, ClusterConfig, ModelConfig, OffloadConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.metrics import StoredPrefixStats
from moesaic.core.request import Request
from moesaic.llm import Completion
from moesaic.policy.scheduling.kvblocks import block_contents
from moesaic.policy.scheduling.schedulers.actions import KeepPrefixes, PrefixRead, ReadPrefix
from moesaic.policy.scheduling.stored_prefixes import PrefixChanges, PrefixPath, chain_digests
from moesaic.runtime.prefix_cache.build import compute_root, report_size
from moesaic.runtime.prefix_cache.entry_files import FOLDER, EntryFiles
from moesaic.runtime.prefix_cache.part import OwnPart
from moesaic.runtime.prefix_cache.prefixes import PrefixesOnDisk
from moesaic.runtime.prefix_cache.writer import PrefixWriter

PROMPT = [5 + index % 300 for index in range(100)]
BLOCK_BYTES = 4096


def engine(directory: Path | None, **settings: object) -> LLM:
    stored = {} if directory is None else {"prefix_cache_dir": str(directory)}
    settings = {"kv_cache_memory": "4MiB", "max_model_len": 256} | stored | settings
    return LLM("demo", threads=1, **settings)


def answer(llm: LLM, prompt: list[int] = PROMPT, salt: str = "") -> tuple[int, object]:
    """How many tokens were in a cache, and all that the bits of the KV decide."""
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=2, cache_salt=salt)
    (completion,) = llm.generate([prompt], params)
    return completion.outputs[0].num_cached_tokens, bits(completion)


def bits(completion: Completion) -> object:
    return completion.outputs[0].token_ids, completion.outputs[0].logprobs


def end(llm: LLM) -> None:
    """Ends the worker as a command does: what waits is written."""
    llm._worker.close()


def entries(directory: Path) -> list[Path]:
    return sorted((directory / FOLDER).iterdir())


@pytest.fixture(scope="module")
def expected() -> object:
    return answer(engine(None))[1]


def test_a_prefix_comes_back_after_a_restart(tmp_path: Path, expected: object) -> None:
    first, neighbour = engine(tmp_path), engine(tmp_path)
    assert answer(first) == (0, expected)
    assert answer(first) == (96, expected)
    assert first.stats().stored_prefixes.read_tokens == 0
    end(first)
    assert answer(neighbour) == (96, expected), "another process reads what this one wrote"
    flip(list_entries(tmp_path, PROMPT)[3])
    again = engine(tmp_path)
    assert answer(again, salt="mine") == (0, expected)
    assert answer(again) == (48, expected)
    stats = again.stats().stored_prefixes
    assert (stats.read_tokens, stats.damaged_entries) == (48, 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_other_types_of_the_cache_come_back(dtype: str, tmp_path: Path) -> None:
    first = engine(tmp_path, kv_cache_dtype=dtype)
    assert answer(first) == (0, answer(engine(None, kv_cache_dtype=dtype))[1])
    end(first)
    assert answer(engine(tmp_path, kv_cache_dtype=dtype)) == (96, answer(first)[1])
    assert answer(engine(tmp_path))[0] == 0


@pytest.mark.slow
def test_blocks_are_stored_when_they_are_evicted_and_when_requests_are_preempted(tmp_path: Path) -> None:
    """The cache holds 256 tokens, and each request needs 160."""
    prompts = [[3 + (index * (offset + 1)) % 300 for index in range(100)] for offset in range(4)]
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    alone = [bits(completion) for completion in engine(None).generate(prompts, params)]
    small = engine(tmp_path, kv_cache_memory=str(256 * 3072))
    for _ in range(2):
        assert [bits(completion) for completion in small.generate(prompts, params)] == alone
    assert small.stats().preemptions and small.stats().stored_prefixes.read_tokens
    end(small)
    again = engine(tmp_path)
    assert [bits(completion) for completion in again.generate(prompts, params)] == alone
    assert again.stats().stored_prefixes.read_tokens == 4 * 96


def test_what_the_bits_depend_on_is_part_of_the_name() -> None:
    model = SimpleNamespace(spec=SimpleNamespace(states=None, state_layers=(), kv_layers=2, kv="layout"))
    loaded = SimpleNamespace(
        model=model,
        device=torch.device("cpu"),
        kernels=SimpleNamespace(name="avx2"),
        dtype=torch.float32,
    )
    config = WorkerConfig(ModelConfig("demo"), CacheConfig(prefix_cache_dir="x"))
    base = compute_root(config, loaded, torch.float32)
    assert base == compute_root(config, loaded, torch.float32)
    other_kernels = SimpleNamespace(**vars(loaded) | {"kernels": SimpleNamespace(name="avx512")})
    roots = [
        compute_root(config, loaded, torch.bfloat16),
        compute_root(config, other_kernels, torch.float32),
        compute_root(replace(config, cache=replace(config.cache, block_size=8)), loaded, torch.float32),
    ]
    assert len({base, *roots}) == 4
    assert compute_root(WorkerConfig(ModelConfig("demo")), loaded, torch.float32) is None


def test_a_limit_below_one_prompt_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "moesaic")
    config = WorkerConfig(ModelConfig("demo"), CacheConfig(prefix_cache_dir="x", prefix_cache_disk="5MiB"))
    size = "6.0 MiB, 3072 bytes for each token of --max-model-len"
    for limit in (6 << 20, 5 << 20):
        report_size(3072.0, 2048, limit, config)
    assert caplog.messages == [
        f"--prefix-cache-dir: a prompt of 2048 tokens takes {size}",
        f"--prefix-cache-disk: 5MiB holds less than one prompt of 2048 tokens, which takes {size}",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_padding_is_refused_at_the_start() -> None:
    worker = WorkerConfig(ModelConfig("demo"), CacheConfig(prefix_cache_dir="x"))
    with pytest.raises(ConfigError, match="--pad: got 'true'; allowed: .* with --prefix-cache-dir"):
        settle(worker, ClusterConfig(), OffloadConfig(fast_memory="1GiB", pad=True))


def test_only_the_owner_can_read_what_users_wrote(tmp_path: Path) -> None:
    written(EntryFiles(str(tmp_path / "new"), 1 << 20), 2)
    assert stat.S_IMODE((tmp_path / "new" / FOLDER).stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in entries(tmp_path / "new")} == {0o600}
    (tmp_path / FOLDER).mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="mode 700"):
        EntryFiles(str(tmp_path), 1 << 20)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--prefix-cache-dir: got '.*file'"):
        EntryFiles(str(tmp_path / "file"), 1 << 20)


# ---- reading, with the memory of a fake


class Memory:
    """KV blocks of which each has one content for ever."""

    block_bytes, page_bytes = BLOCK_BYTES, 0

    def __init__(self) -> None:
        self.blocks: dict[int, np.ndarray] = {}

    def copy_block(self, block: int) -> np.ndarray:
        return content(block)

    copy_page = copy_block

    def put_page(self, page: int, data: np.ndarray) -> None:
        raise AssertionError("it has no states")

    def put_block(self, block: int, data: np.ndarray) -> None:
        self.blocks[block] = data.copy()


def list_entries(directory: Path, prompt: list[int]) -> list[Path]:
    """The files of a prompt's blocks, in their order: the last block was used least recently."""
    paths = sorted(entries(directory), key=lambda path: -path.stat().st_mtime_ns)
    return paths[: (len(prompt) - 1) // 16]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def exchange(path: Path) -> None:
    """The content of another entry, under this name."""
    others = [other for other in path.parent.iterdir() if other != path]
    path.write_bytes(others[0].read_bytes())


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "another bit": flip,
    "another content": exchange,
    "a pipe": make_pipe,
    "a link": make_link,
    "cut off": lambda path: os.truncate(path, 100),
    "empty": lambda path: path.write_bytes(b"") and None,
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_a_miss(damage: str, tmp_path: Path) -> None:
    """It is removed, and written again once its block was computed."""
    files, memory = EntryFiles(str(tmp_path), 1 << 30), Memory()
    prompt = Request(1, list(range(100)), SamplingParams())
    contents = block_contents(np.arange(100), 16, 0, 6, b"")
    path = PrefixPath([10, 11, 12, 13, 14, 15], chain_digests(b"root", contents))

    def read_prefix() -> int:
        """How many blocks are read, after all of them were kept once more."""
        prefixes = PrefixesOnDisk(OwnPart(memory, files), 16, b"root")
        stored = prefixes.count_stored_tokens([prompt]).get(1, 0) // 16
        count = 0
        if stored:
            prefixes.read(ReadPrefix(1, 0, np.arange(10, 10 + stored)))
            (event,) = prefixes.take_events(timeout=30.0)
            assert isinstance(event, PrefixRead) and not prefixes.is_reading
            count = event.num_blocks
        assert all((memory.blocks[block] == content(block)).all() for block in path.blocks[:count])
        prefixes.keep(KeepPrefixes(PrefixChanges([path])))
        prefixes.close()
        return count

    assert read_prefix() == 0
    assert read_prefix() == 6
    DAMAGES[damage](list_entries(tmp_path, prompt.prompt_token_ids)[2])
    assert read_prefix() == 2
    assert read_prefix() == 6


# ---- the files


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def whole_entries(directory: Path, count: int) -> list[int]:
    """The entries that are read, each of which must have its own content."""
    files, data, numbers = EntryFiles(str(directory), 1 << 30), np.empty(BLOCK_BYTES, np.uint8), []
    for number in range(count):
        is_read = files.read(digest(number), data)
        assert is_read is not None, "a file of this name is never half written"
        if is_read:
            assert (data == content(number)).all()
            numbers.append(number)
    return numbers


def test_the_least_recently_used_entries_give_way_last_block_first(tmp_path: Path) -> None:
    limit = 9 * (BLOCK_BYTES + 52)
    files = EntryFiles(str(tmp_path), limit)
    for number in range(8):
        assert files.write(digest(number), content(number)) == []
    files.touch([digest(number) for number in (4, 5, 6, 7)])
    files.touch([digest(number) for number in (0, 1, 2, 3)])
    removed = [one for number in (8, 9, 10) for one in files.write(digest(number), content(number))]
    assert removed[:2] == [digest(7), digest(6)]
    assert sum(path.stat().st_size for path in entries(tmp_path)) <= limit
    small = EntryFiles(str(tmp_path), BLOCK_BYTES)
    assert small.write(digest(99), content(99)) == [] and not small.contains(digest(99))
    assert 0 in whole_entries(tmp_path, 11)


def test_a_process_that_is_killed_leaves_whole_entries(tmp_path: Path) -> None:
    files = EntryFiles(str(tmp_path), 1 << 30)
    for delay in (0.0, 0.003, 0.01, 0.02):
        child = os.fork()
        if not child:
            try:
                for number in range(2000):
                    files.write(digest(number), content(number))
            finally:
                os._exit(0)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        whole_entries(tmp_path, 200)
    abandoned = tmp_path / FOLDER / f".{digest(1).hex()}.123"
    abandoned.write_bytes(b"half")
    os.utime(abandoned, (0, 0))
    EntryFiles(str(tmp_path), 1 << 30).write(digest(3000), content(3000))
    assert not abandoned.exists()


def written(files: EntryFiles, count: int) -> PrefixWriter:
    """A writer that was given so many blocks and has ended."""
    writer = PrefixWriter(files, content, content)
    blocks = list(range(count))
    writer.keep(PrefixChanges([PrefixPath(blocks, [digest(block) for block in blocks])]))
    writer.close()
    return writer


def test_a_full_disk_ends_the_writing_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, limits = EntryFiles(str(tmp_path), 1 << 30), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES // 2, limits[1]))
    try:
        writer = written(files, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(caplog.messages) == 1 and "prefixes are not stored now (File too large)" in caplog.text
    assert entries(tmp_path) == []
    written(files, 5)
    assert whole_entries(tmp_path, 6) == [0, 1, 2, 3, 4]
    assert writer is not None


def test_what_another_process_wrote_meanwhile_is_not_written_again(tmp_path: Path) -> None:
    """Both had no entry when their requests ended."""
    written(EntryFiles(str(tmp_path), 1 << 30), 5)
    writer = written(EntryFiles(str(tmp_path), 1 << 30), 7)
    assert writer.count(StoredPrefixStats()).written_bytes == 2 * BLOCK_BYTES


def test_an_evicted_block_is_written_as_it_was(tmp_path: Path) -> None:
    memory = {number: content(number) for number in range(40)}
    writer = PrefixWriter(EntryFiles(str(tmp_path), 1 << 30), lambda block: memory[block].copy(), content)
    blocks = list(range(40))
    writer.keep(PrefixChanges([PrefixPath(blocks, [digest(block) for block in blocks])], blocks))
    for data in memory.values():
        data[:] = 0
    writer.close()
    assert whole_entries(tmp_path, 40) == blocks


def test_what_is_evicted_while_the_process_ends_is_not_written_as_something_else(tmp_path: Path) -> None:
    """The thread is slow, and the memory of what waits is written over after `close` was called."""
    memory, is_closing = {number: content(number) for number in range(20)}, threading.Event()

    def copy_slowly(block: int) -> np.ndarray:
        if block == 0:
            is_closing.wait(30.0)
        return memory[block].copy()

    writer = PrefixWriter(EntryFiles(str(tmp_path), 1 << 30), copy_slowly, content)
    blocks = list(range(20))
    writer.keep(PrefixChanges([PrefixPath(blocks, [digest(block) for block in blocks])]))
    closing = threading.Thread(target=writer.close)
    closing.start()
    is_closing.set()
    writer.keep(PrefixChanges([PrefixPath([0], [digest(0)])], blocks))
    for data in memory.values():
        data[:] = 0
    closing.join()
    writer.keep(PrefixChanges([], blocks))
    whole_entries(tmp_path, 20)
