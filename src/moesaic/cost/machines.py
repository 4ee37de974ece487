"""Known machines: the peak numbers of data sheets, and the hosts of MoE-Lightning's evaluation.

GPU figures are tensor flops in bf16 (T4: fp16) without sparsity, and memory bandwidth, from NVIDIA's data
sheets. T4 and L4 are as in MoE-Lightning's artifact. A data sheet's 10^9 bytes are taken as they are; the
papers' "GB" are 2^30 bytes. Real machines do not reach these peaks. To predict a machine, measure it.
"""

from __future__ import annotations

from moesaic.core.errors import ConfigError
from moesaic.cost.hardware import GIB, Hardware, Level, Link, Processor

ARTIFACT = "MoE-Lightning's artifact: peaks; its link reaches 6.5 to 8.6 GiB/s of these 16 by its own results"
MEASURED = "fitted to MoE-Lightning's published throughputs: effective link, share of the peak in prefill"
SHEETS = "data sheets: peaks"


def _papers_host(cores: int, gib: float, tflops: float) -> Level:
    """A Google Cloud host with the free memory and the 100 GiB/s of MoE-Lightning's scripts."""
    return Level(f"RAM, {cores} cores", gib * GIB, 100 * GIB, Processor(tflops * 1e12), 0.8)


def _host(gib: float, gbs: float, tflops: float) -> Level:
    return Level("RAM", gib * GIB, gbs * 1e9, Processor(tflops * 1e12), 0.8)


def _gpu(gib: float, gbs: float, tflops: float, usable: float = 0.9) -> Level:
    return Level("GPU memory", gib * GIB, gbs * 1e9, Processor(tflops * 1e12), usable)


def _papers_gpu(gib: float, gibs: float, tflops: float, prefill: float = 1.0) -> Level:
    return Level("GPU memory", gib * GIB, gibs * GIB, Processor(tflops * 1e12, prefill), 0.86)


def _pcie(gbs: float) -> Link:
    """A PCIe link without a copy into pinned memory."""
    return Link(gbs * 1e9, gbs * 1e9, None)


_PAPERS_LINK = Link(16 * GIB, 16 * GIB)
_T4, _L4 = _papers_gpu(15, 300, 65), _papers_gpu(24, 285, 104)
_T4_HOST, _L4_HOST = _papers_host(24, 184.29, 0.8), _papers_host(24, 184.29, 1.6)

MACHINES = {
    machine.name: machine
    for machine in (
        Hardware("t4", _T4, _T4_HOST, _PAPERS_LINK, ARTIFACT),
        Hardware("l4", _L4, _L4_HOST, _PAPERS_LINK, ARTIFACT),
        Hardware("t4-large-host", _T4, _papers_host(32, 405, 0.8), _PAPERS_LINK, ARTIFACT),
        Hardware(
            *("t4-measured", _papers_gpu(15, 300, 65, 0.10), _T4_HOST, Link(7.5 * GIB, 7.5 * GIB), MEASURED)
        ),
        Hardware(
            *("l4-measured", _papers_gpu(24, 285, 104, 0.33), _L4_HOST, Link(8.4 * GIB, 8.4 * GIB), MEASURED)
        ),
        Hardware("a100-40", _gpu(40, 1555, 312), _host(512, 200, 3.2), _pcie(25), SHEETS),
        Hardware("a100-80", _gpu(80, 2039, 312), _host(1024, 200, 3.2), _pcie(25), SHEETS),
        Hardware("h100", _gpu(80, 3350, 989), _host(1024, 300, 6.0), _pcie(50), SHEETS),
        Hardware("h200", _gpu(141, 4800, 989), _host(2048, 300, 6.0), _pcie(50), SHEETS),
    )
}
"""The known machines by their names for `moesaic plan --hardware`."""


def machine(name: str) -> Hardware:
    """A known machine. Raises ConfigError that lists the known names."""
    if name not in MACHINES:
        raise ConfigError.field("--hardware", name, ", ".join((*MACHINES, "a .toml file")))
    return MACHINES[name]
