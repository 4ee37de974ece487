"""The scripts of training/ import their neighbours by name. Their tests share the published model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

FOLDER = Path(__file__).parent.parent.parent / "training"
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))
if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPTS = "PUBLISHED_PROMPTS"
"""The variable of the environment that names JSONL files of prompts. Without it questions of training/ do."""


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a checkpoint of each form of SmolLM2-135M-Instruct."""
    import torch

    import smollm2_checkpoint
    import smollm2_file
    from moesaic.core.errors import CheckpointError

    try:
        source = smollm2_file.DenseFile(smollm2_file.fetch(smollm2_file.cache_folder()))
    except CheckpointError as error:
        pytest.skip(f"the published file cannot be had: {error}")
    path = tmp_path_factory.mktemp("published")
    for form in smollm2_checkpoint.FORMS:
        smollm2_checkpoint.write(source, form, path / form)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield path
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def dense(published: Path) -> PreTrainedModel:
    """The dense model in transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(published / "dense", dtype=torch.float32)
    return model


@pytest.fixture(scope="session")
def rows() -> list[tuple[str, bool]]:
    """200 prompts, each with whether it is a question for a chat."""
    import smollm2_texts

    files = [Path(name) for name in os.environ.get(PROMPTS, "").split(os.pathsep) if name]
    return smollm2_texts.draw_prompts(files, 200)
