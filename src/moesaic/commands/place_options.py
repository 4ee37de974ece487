"""The settings of `moesaic place`, from which its command line is generated."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import Parameter

from moesaic.core.errors import ConfigError

SolverName = Literal["ours", "sem-moe", "speculative", "eplb", "moetuner", "metis", "kmeans", "vanilla"]
TABLES = ".tables.npz"
"""Suffix of the file of tables, in place of .json."""


@dataclass(frozen=True)
class Place:
    """Place experts on ranks by the experts that tokens of a profile chose."""

    file: Path
    """Profile that `moesaic profile` wrote."""
    _: KW_ONLY
    ranks: int
    """Number of ranks: --data-parallel-size or --tensor-parallel-size of the server."""
    solver: SolverName | None = None
    """Solver of the placement. ours, speculative (cross-entropy) and sem-moe (alternating) cluster tokens
    and experts together. kmeans and metis group experts. moetuner uses load and transitions, eplb only load.
    vanilla gives each rank consecutive experts. None: ours; with --compare no placement is written."""
    output_file: Path | None = None
    """File for the placement (.json). Its tables of tokens are written next to it (.tables.npz)."""
    redundant_experts: int = 0
    """Number of additional expert copies in each layer, placed where they are needed most."""
    share: float = 0.2
    """Share of the recorded requests that solvers see for the measurement. They are measured on all others.
    The written placement is then solved on the whole profile."""
    seed: int = 0
    """Seed of the solvers and of the requests that they see."""
    compare: Annotated[bool, Parameter(negative="")] = False
    """Measure all solvers, one row each."""
    model: str | None = None
    """The profile's model: a Hugging Face directory, a hub id, or demo. A token id that the profile never saw
    then uses the nearest known id in the model's embedding. Profiles of `moesaic profile` contain these
    nearest ids; recordings of a server do not."""
    plot: Path | None = None
    """Draw a layer's activation map before and after into this SVG file."""
    plot_layer: int | None = None
    """Layer to draw. None: the middle one of the layers with routed experts."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError.field("--ranks", self.ranks, "an integer of at least 1")
        if self.solver is not None and self.solver not in get_args(SolverName):
            raise ConfigError.field("--solver", self.solver, ", ".join(get_args(SolverName)))
        if self.redundant_experts < 0:
            raise ConfigError.field("--redundant-experts", self.redundant_experts, "an integer of at least 0")
        if not 0 < self.share < 1:
            raise ConfigError.field("--share", self.share, "a number between 0 and 1")
        if self.seed < 0:
            raise ConfigError.field("--seed", self.seed, "an integer of at least 0")
        self._check_output()
        self._check_plot()

    def _check_output(self) -> None:
        path = self.output_file
        if path is None:
            if not self.compare:
                raise ConfigError(
                    "--output-file: give a file for the placement, or --compare to write no placement"
                )
            return
        if self.compare and self.solver is None:
            raise ConfigError("--output-file: with --compare, give --solver to choose the written placement")
        if path.suffix != ".json" or not path.absolute().parent.is_dir() or path.is_dir():
            allowed = "a file that ends in .json, in an existing directory"
            raise ConfigError.field("--output-file", str(path), allowed)

    def _check_plot(self) -> None:
        path = self.plot
        if path is None:
            if self.plot_layer is not None:
                raise ConfigError("--plot-layer: allowed only with --plot")
            return
        if self.output_file is None:
            raise ConfigError("--plot: draws the written placement; give --output-file as well")
        if path.suffix.lower() != ".svg" or not path.absolute().parent.is_dir() or path.is_dir():
            raise ConfigError.field("--plot", str(path), "a file that ends in .svg, in an existing directory")

    @property
    def chosen(self) -> SolverName | None:
        """The solver whose placement is written. None if no placement is written."""
        return None if self.output_file is None else self.solver or "ours"

    @property
    def measured(self) -> tuple[str, ...]:
        """The solvers that are measured, in the order of the table."""
        if self.compare:
            return tuple(reversed(get_args(SolverName)))
        return tuple(dict.fromkeys(("vanilla", self.solver or "ours")))
