"""Finding a model: a directory, the demo, the local cache, a hub."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support import gguf_files, model_configs, tiny_models
from tests.support.fake_hub import hub

import moesaic
from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.models import files
from moesaic.models.gguf import hub as hub_files

SCRIPT = """
import json
import sys
from moesaic.core.errors import MoesaicError
from moesaic.models import files
for arguments in json.loads(sys.argv[1]):
    try:
        print(files.resolve(*arguments))
    except MoesaicError as error:
        print("refused:", error)
assert "torch" not in sys.modules
"""
REPOSITORY = "some-org/tiny-moe"


def resolve(endpoint: str, home: Path, *arguments: str, **environment: str) -> str:
    """What `files.resolve` says in a process of its own, whose hub is `endpoint`."""
    [said] = resolve_each(endpoint, home, [arguments], **environment)
    return said


def resolve_each(endpoint: str, home: Path, calls: Sequence[Sequence[str]], **environment: str) -> list[str]:
    """What one process says of several names. One line each."""
    source = str(Path(moesaic.__file__).parent.parent)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    env = {**clean, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONPATH": source, **environment}
    command = [sys.executable, "-c", SCRIPT, json.dumps(calls)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == len(calls), "one line each"
    return said


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The files of a repository, some of which must stay there."""
    path = tmp_path / "repository"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "mixtral"}')
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "pytorch_model.bin").write_bytes(b"pickle")
    (path / "consolidated.safetensors").write_bytes(b"a copy")
    (path / "modeling.py").write_text("raise SystemExit")
    return path


@pytest.mark.slow
def test_a_hub_id_is_downloaded_once_without_pickles_or_code(repository: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with hub(REPOSITORY, repository) as (endpoint, seen):
        found = Path(resolve(endpoint, home, REPOSITORY))
        assert any(line.startswith("GET") and "config.json" in line for line in seen)
    names = {file.name for file in found.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert resolve(endpoint, home, REPOSITORY) == str(found)  # The hub is gone; the cache is not.
    assert resolve(endpoint, home, REPOSITORY, HF_HUB_OFFLINE="1") == str(found)


@pytest.mark.slow
def test_what_a_hub_lacks_is_told_in_one_line(repository: Path, tmp_path: Path) -> None:
    with hub(REPOSITORY, repository) as (endpoint, _):
        said = resolve(endpoint, tmp_path / "home", "some-org/other")
        assert said == "refused: model: 'some-org/other' is neither a directory nor a model on the hub"
        said = resolve(endpoint, tmp_path / "home", REPOSITORY, "v9")
        assert said == f"refused: model: '{REPOSITORY}' has no revision 'v9' on the hub"
        (repository / "config.json").unlink()
        said = resolve(endpoint, tmp_path / "home", REPOSITORY)
        assert "no config.json in this repository" in said
        assert "\n" not in said


@pytest.mark.slow
def test_a_gguf_file_of_a_hub_is_named_by_its_type(repository: Path, tmp_path: Path) -> None:
    """Alone or split, and only its own files are downloaded. A file in the cache needs no hub."""
    source = tiny_models.save(tiny_models.build(*model_configs.CASES["qwen3"]), tmp_path / "source")
    whole, _ = gguf_files.write(source, tmp_path / "whole")
    first, _ = gguf_files.write(source, tmp_path / "split", files=2)
    for name in ("Tiny-Q4_K_M.gguf", "Tiny-IQ4_K_M.gguf", "mmproj-Q4_K_M.gguf", "Tiny-Q4_K_M-imatrix.dat"):
        (repository / name).write_bytes(whole.read_bytes())
    for part in (1, 2):
        file = first.parent / f"model-0000{part}-of-00002.gguf"
        (repository / f"Tiny-BF16-0000{part}-of-00002.gguf").write_bytes(file.read_bytes())
    home, model = tmp_path / "home", f"{REPOSITORY}:q4_k_m"
    with hub(REPOSITORY, repository) as (endpoint, _):
        found = Path(resolve(endpoint, home, model))
        assert [found.name] == [file.name for file in found.parent.iterdir()] == ["Tiny-Q4_K_M.gguf"]
        split = Path(resolve(endpoint, home, f"{REPOSITORY}:BF16"))
        assert split.name == "Tiny-BF16-00001-of-00002.gguf" and len(list(split.parent.iterdir())) == 3
        several = ("Tiny-IQ4_K_M.gguf", "Q8_0", "Q4_K", "model.gguf", "Tiny")
        named, *refused = resolve_each(endpoint, home, [[f"{REPOSITORY}:{one}"] for one in several])
        assert named.endswith("/Tiny-IQ4_K_M.gguf")
        for wrong, said in zip(several[1:], refused, strict=True):
            assert said.startswith(
                f"refused: model: got '{REPOSITORY}:{wrong}'; allowed: one of its files: Tiny-"
            )
            assert "mmproj" not in said and "00002-of" not in said
        (repository / "config.json").unlink()
        assert f"name a file as {REPOSITORY}:Q4_K_M" in resolve(endpoint, tmp_path / "other", REPOSITORY)
        assert "has no revision 'v9'" in resolve(endpoint, home, model, "v9")
    assert resolve(endpoint, home, model) == resolve(endpoint, home, model, HF_HUB_OFFLINE="1") == str(found)
    assert files.read_config(found)["model_type"] == "qwen3_moe"


@pytest.mark.slow
@pytest.mark.parametrize("name", [REPOSITORY, f"{REPOSITORY}:Q4_K_M"])
@pytest.mark.parametrize("offline", ["0", "1"])
def test_no_network_is_told_in_one_line(offline: str, name: str, tmp_path: Path) -> None:
    said = resolve("http://127.0.0.1:9", tmp_path / "home", name, HF_HUB_OFFLINE=offline)
    assert said == f"refused: model: '{name}' is not in the local cache and the hub is out of reach"


def test_a_directory_is_itself_and_has_no_revisions(repository: Path) -> None:
    assert files.resolve(str(repository)) == repository
    for model in (str(repository), "demo"):
        with pytest.raises(ConfigError, match="^--revision: got 'v2'; allowed: none for a model in a dir"):
            files.resolve(model, "v2")


def test_the_demo_is_in_the_package() -> None:
    assert (files.resolve("demo") / "model.safetensors").is_file()


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json in this directory"):
        files.resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/directory", "./none", "a/b/c", "~/none", "with space", "x" * 100])
def test_what_is_neither_path_nor_id_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="model: got"):
        files.resolve(name)


def test_json_that_is_no_object_is_refused(tmp_path: Path) -> None:
    broken = (
        ("[1]", "no JSON object"),
        ("{", "not valid JSON"),
        ("\xff", "JSON"),
        ("[" * 100_000, "valid JSON"),
    )
    for text, problem in broken:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(CheckpointError, match=problem):
            files.read_json(tmp_path / "config.json")


def write(path: Path, config: dict[str, object], generation: dict[str, object] | None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_end_ids_of_both_files_are_merged(tmp_path: Path) -> None:
    found = files.generation_defaults(write(tmp_path, {"eos_token_id": 7}, {"eos_token_id": [9, 3]}))
    assert found.eos_token_ids == (3, 7, 9)
    (tmp_path / "generation_config.json").unlink()
    assert files.generation_defaults(tmp_path).eos_token_ids == (7,)
    assert files.generation_defaults(write(tmp_path, {"eos_token_id": None}, None)).eos_token_ids == ()


def test_end_ids_outside_of_the_vocabulary_are_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": -1, "vocab_size": 10}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 10, None]}))
    assert files.generation_defaults(tmp_path).eos_token_ids == (9,)


def test_sampling_defaults_that_no_request_could_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature: got '0.6'"):
        files.generation_defaults(write(tmp_path, {}, {"temperature": "0.6"}))
    odd = {"temperature": 0, "top_k": None, "top_p": None, "min_p": 0, "do_sample": True}
    assert files.generation_defaults(write(tmp_path, {}, odd)).sampling == {"temperature": 0, "min_p": 0}


def test_sampling_defaults_are_taken_unless_the_model_is_greedy(tmp_path: Path) -> None:
    said = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    found = files.generation_defaults(write(tmp_path, {}, {**said, "do_sample": True}))
    assert found.sampling == said
    assert files.generation_defaults(write(tmp_path, {}, {"top_k": 5})).sampling == {"top_k": 5}
    greedy = files.generation_defaults(write(tmp_path, {}, {**said, "do_sample": False, "eos_token_id": 1}))
    assert (greedy.sampling, greedy.eos_token_ids) == ({}, (1,))


def test_examples() -> None:
    assert doctest.testmod(hub_files).failed == 0
