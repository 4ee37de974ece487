"""Features in pairs, as `moesaic run-batch` starts them: the same answers, or one line that says why not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import SamplingParams, cli
from moesaic.testing import byte_tokenizer
from tests.commands.test_run_batch_offload import MACHINE, SIZES, answers, ask
from tests.support import model_configs, pairs, quantizers, tiny_models
from tests.support.composition import FEATURES, REASONS, groups, in_words, merged
from tests.support.group_placements import recorded, write

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]

LENGTHS = (3, 16, 30, 45)


class Workshop:
    """Checkpoints of each model, with a placement, and batches that they answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[str, Path] = {}
        self._known: dict[str, dict[str, Any]] = {}
        self._runs = 0

    def path(self, model: str) -> Path:
        if model not in self._paths:
            home = self._folder / model
            home.mkdir()
            self._paths[model] = self._saved(model, home / "model")
            (home / "this.toml").write_text(MACHINE)
            params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
            prompts = [tiny_models.prompt(20, model_configs.VOCAB, seed=seed) for seed in range(2)]
            made = write(home, recorded(str(self._paths[model]), prompts, params)[1], units=2)
            Path(made).rename(home / "placement.json")
        return self._paths[model]

    def _saved(self, model: str, to: Path) -> Path:
        case = (
            model_configs.CASES["qwen3-next"]
            if model == "states"
            else ("qwen3_moe", model_configs.qwen3(**SIZES))
        )
        to.mkdir()
        tiny_models.save(tiny_models.build(*case), to, torch.bfloat16)
        byte_tokenizer(to)
        if model != "quantised":
            return to
        return quantizers.quantize(to, to.parent / "both", quantizers.FORMATS["fp8 blocks"])[0]

    def run(self, names: Sequence[str]) -> tuple[int, Path]:
        """The exit code, and the file of results."""
        found = merged(names)
        assert found is not None
        flags, model = found
        path = self.path(model)
        self._runs += 1
        asked, out = self._folder / "in.jsonl", self._folder / f"out{self._runs}.jsonl"
        asked.write_text("".join(ask(f"r{length}", length) + "\n" for length in LENGTHS))
        words = [
            word.replace("{}", str(self._folder / model)) for pair in flags.items() for word in pair if word
        ]
        command = ["run-batch", "-i", str(asked), "-o", str(out), "--model", str(path), "--threads", "1"]
        return cli.main([*command, "--served-model-name", "tiny", *words]), out

    def answers(self, names: Sequence[str]) -> dict[str, str]:
        code, out = self.run(names)
        assert code == 0, names
        return {name: choices[0]["text"] for name, choices in answers(out).items()}

    def alone(self, names: Sequence[str]) -> dict[str, str]:
        """What the model of these features answers without any other one."""
        model, cache = merged(names)[1], "`--kv-cache-dtype int8`"  # type: ignore[index]
        key = [name for name in FEATURES if FEATURES[name].model == model and model != "plain"][:1]
        key += [cache] if cache in names else []
        if str(key) not in self._known:
            self._known[str(key)] = self.answers(key)
        return self._known[str(key)]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.mark.parametrize("names", groups(), ids=" ".join)
def test_what_goes_together_gives_the_same_answers(names: tuple[str, ...], workshop: Workshop) -> None:
    assert workshop.answers(names) == workshop.alone(names)


@pytest.mark.parametrize(
    ("feature", "other"),
    pairs.some(
        [(one, other) for one, others, _ in REASONS for other in others],
        [(one, others[-1]) for one, others, _ in REASONS],
    ),
)
def test_what_is_refused_is_one_line(
    feature: str, other: str, workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = workshop.run((feature, other))
    said = capsys.readouterr().err
    assert code == 2 and not (out.exists() and out.read_text())
    assert [line for line in said.splitlines() if line.startswith("moesaic: --") and "; allowed: " in line]
    assert "Traceback" not in said


def test_the_table_in_the_docs_is_this_one() -> None:
    page = (Path(__file__).parent.parent / "docs" / "cluster.md").read_text()
    assert in_words() in page
