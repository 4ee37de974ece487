"""The settings that MoE-Lightning evaluated: inputs, published policies and published throughputs.

Policies and throughputs are from the paper's Figures 7 and 8, its Tables 4 and 5, and its artifact's
README. The paper leaves some inputs out, which are stated here. m_c is the RAM that was free when a search
began. b_c is the RAM's bandwidth on the command line. The third one is the variant of the GPU's memory. A
T4 counts as 15 GiB, an L4 as 24 GiB, and the link as 16 GiB/s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_lightning_search import Setting

from moesaic.cost.hardware import GIB
from moesaic.cost.machines import machine
from moesaic.cost.sizes import PUBLISHED_MODELS
from moesaic.policy.offloading.flexgen import FITTED_CONSTANTS
from moesaic.policy.offloading.flexgen import FlexGenPolicy as FlexGenFound
from moesaic.policy.offloading.flexgen import search as flexgen_search
from moesaic.policy.offloading.policies import Workload

SMALL, LARGE = 184.29, 405.0
"""m_c in GiB: for hosts with 192 GB as in the README's example, and an assumption for hosts with 416 GB."""
LENGTHS = (32, 64, 128, 256)
"""Numbers of generated tokens in MTBench."""


@dataclass(frozen=True)
class Published:
    """One setting with its published policy and throughput. None: not published."""

    name: str
    setting: Setting
    micro_batch: int | None
    micro_batches: int | None
    batch: int | None
    measured: float | None
    """Generated tokens/s over prefill and decode, as the paper reports them."""
    note: str = ""

    @property
    def inputs(self) -> str:
        """All inputs of the search, in one line."""
        given, slow = self.setting, self.setting.hardware.slow
        residual = "residual offloaded" if given.residual_offloaded else "residual on GPU"
        return (
            f"{given.model.name}, {given.gpus} x {given.hardware.name.partition('-')[0]}, s {given.prompt}, "
            f"n {given.generate}, m_c {slow.memory / GIB:.2f}, b_c {slow.bandwidth / GIB:.0f}, {residual}"
        )


def setting(
    model: str,
    gpu: str,
    prompt: int,
    generate: int,
    gpus: int = 1,
    free: float = SMALL,
    bandwidth: float = 100,
    residual_offloaded: bool = False,
) -> Setting:
    """Make a setting. free, bandwidth: free memory and bandwidth of the host's RAM, in GiB and GiB/s."""
    hardware = machine(gpu).with_slow(free * GIB, bandwidth * GIB)
    return Setting(PUBLISHED_MODELS[model], hardware, prompt, generate, gpus, residual_offloaded)


def settings() -> Iterator[Published]:
    """All settings in the paper's order: 32 of MTBench, 4 of HELM."""
    yield from _padded()
    yield from _unpadded()
    yield from _tensor_parallel()
    yield from _helm()


def _padded() -> Iterator[Published]:
    measured = {"S1": (15.6, 24.0, 30.1, 33.9), "S2": (53.7, 67.4, 79.0, 78.6)}
    for n, reached in zip(LENGTHS, measured["S1"], strict=True):
        given = setting("mixtral-8x7b", "t4", 418, n)
        yield Published(f"S1 MTBench padded, n {n}", given, 36, 14, 504, reached)
    for n, count, reached in zip(LENGTHS, (16, 15, 13, 11), measured["S2"], strict=True):
        given = setting("mixtral-8x7b", "l4", 418, n, residual_offloaded=True)
        yield Published(f"S2 MTBench padded, n {n}", given, 68, count, 68 * count, reached)


def _unpadded() -> Iterator[Published]:
    for n, mu, count, reached in (
        (32, 324, 14, 203.0),
        (64, 228, 16, 294.5),
        (128, 164, 16, 217.5),
        (256, 132, 12, 167.9),
    ):
        given = setting("mixtral-8x7b", "l4", 77, n, bandwidth=76)
        note = "" if n < 256 else "the README's policy is not the optimum of its own search: m_c varied"
        yield Published(f"S2 MTBench, n {n}", given, mu, count, mu * count, reached, note)
    varied = "published for another m_c: README policies vary with free memory"
    unknown = "the published policy is unknown: +prefill is for the policy found"
    for n, size, number, reached, note in (
        (32, 164, 19, 63.0, ""),
        (64, None, None, 101.3, unknown),
        (128, None, None, 97.7, unknown),
        (256, 100, 15, 96.9, varied),
    ):
        given = setting("mixtral-8x7b", "t4", 77, n, bandwidth=76)
        batch = size * number if size and number else None
        yield Published(f"S1 MTBench, n {n}", given, size, number, batch, reached, note)


def _tensor_parallel() -> Iterator[Published]:
    for n, reached in zip(LENGTHS, (5.38, 7.33, 7.75, 9.13), strict=True):
        given = setting("mixtral-8x22b", "t4", 418, n, 2, LARGE)
        yield Published(f"S6 MTBench padded, n {n}", given, 36, 7, 252, reached)
    measured = (14.9, 22.3, 26.2, 25.8)
    for n, count, reached in zip(LENGTHS, (18, 17, 15, 13), measured, strict=True):
        given = setting("mixtral-8x22b", "t4", 418, n, 4, LARGE)
        note = "m_c is not published" if n == 128 else ""
        yield Published(f"S7 MTBench padded, n {n}", given, 36, count, 36 * count, reached, note)
    dbrx = {
        "S8": (2, (2652, 2652, 2244, 1344), (34.0, 36.2, 29.7, 25.9)),
        "S9": (4, (4352, 3604, 2440, 1836), (71.5, 83.6, 83.0, 59.5)),
    }
    for name, (gpus, batches, reached_all) in dbrx.items():
        for n, batch, reached in zip(LENGTHS, batches, reached_all, strict=True):
            given = setting("dbrx", "t4", 77, n, gpus, LARGE)
            note = "micro-batch and m_c are not published"
            yield Published(f"{name} MTBench, n {n}", given, None, None, batch, reached, note)


def _helm() -> Iterator[Published]:
    plateau = "36 x 19 to 36 x 41 have the same predicted throughput: GPU memory is the limit"
    by_hand = "mu 8 is not in the search's grid: FlexGen's policy, set by hand"
    yield Published(
        "S1 synthetic reasoning", setting("mixtral-8x7b", "t4", 256, 50), 36, 26, 936, 26.349, plateau
    )
    yield Published("S2 synthetic reasoning", setting("mixtral-8x7b", "l4", 256, 50), 100, 15, 1500, 105.29)
    yield Published("S1 summarization", setting("mixtral-8x7b", "t4", 1984, 64), 4, 19, 76, 4.52)
    yield Published("S2 summarization", setting("mixtral-8x7b", "l4", 1984, 64), 8, 36, 288, 12.393, by_hand)


@dataclass(frozen=True)
class FlexGenPublished:
    """A policy of FlexGen's own search, with the throughput that the search predicted."""

    gpu: str
    prompt: int
    generate: int
    micro_batch: int
    micro_batches: int
    predicted: float

    def search(self, walk: bool = False) -> FlexGenFound:
        """Repeat FlexGen's search. walk: as in `flexgen.search`."""
        model = PUBLISHED_MODELS["mixtral-8x7b"]
        return flexgen_search(model, FITTED_CONSTANTS[self.gpu], Workload(self.prompt, self.generate), walk)


FLEXGEN = tuple(
    FlexGenPublished(*row)
    for row in (
        ("t4", 418, 32, 32, 40, 13.33),
        ("t4", 418, 64, 16, 78, 20.61),
        ("t4", 418, 128, 8, 139, 27.40),
        ("t4", 418, 256, 8, 113, 30.59),
        ("t4", 256, 50, 32, 61, 26.44),
        ("t4", 1984, 64, 3, 92, 4.67),
        ("l4", 418, 32, 64, 21, 3.15),
        ("l4", 418, 64, 64, 20, 5.69),
        ("l4", 418, 128, 64, 18, 9.42),
        ("l4", 418, 256, 32, 30, 13.66),
        ("l4", 256, 50, 64, 33, 7.15),
        ("l4", 1984, 64, 8, 36, 1.25),
    )
)
"""The settings in which MoE-Lightning's artifact ran FlexGen."""
