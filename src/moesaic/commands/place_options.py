"""The settings of `moesaic place`; the command line is generated from here."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import Parameter

from moesaic.core.errors import ConfigError

SolverName = Literal["ours", "sem-moe", "speculative", "eplb", "moetuner", "metis", "kmeans", "vanilla"]
TABLES = ".tables.npz"
"""What the file of tables ends in, in place of .json."""


@dataclass(frozen=True)
class Place:
    """Say which rank holds which experts, by what tokens were seen to choose."""

    file: Path
    """What `moesaic profile` wrote."""
    _: KW_ONLY
    ranks: int
    """Ranks to place the experts on: those of --data-parallel-size or --tensor-parallel-size."""
    solver: SolverName | None = None
    """How: co-clustering of tokens and experts (ours; speculative, cross-entropy; sem-moe, alternating),
    groups of experts (kmeans, metis), load and transitions (moetuner), load (eplb), or consecutive ranges
    (vanilla). None: ours, or with --compare nobody's is written."""
    output_file: Path | None = None
    """Where the placement is written (.json); tables of tokens go beside it (.tables.npz)."""
    redundant_experts: int = 0
    """Copies of each layer's experts beyond one of each, where they are asked for most."""
    share: float = 0.2
    """Share of the recorded requests that solvers see while they are measured, on all the others. What is
    written is then solved on everything that was counted."""
    seed: int = 0
    """Of the solvers, and of which requests they see."""
    compare: Annotated[bool, Parameter(negative="")] = False
    """Measure all solvers, a row each."""
    model: str | None = None
    """The profile's model: a directory, a hub id, or demo. Tokens that the profile never saw then take the
    nearest known one in its embedding. What `moesaic profile` wrote has that; live recordings don't."""
    plot: Path | None = None
    """Draw a layer's activation map, before and after, into this file, an SVG."""
    plot_layer: int | None = None
    """Number of the layer that is drawn; None: the middle one of those with routed experts."""

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
                    "--output-file: say where to write the placement, or --compare to write none"
                )
            return
        if self.compare and self.solver is None:
            raise ConfigError("--output-file: say with --solver whose placement of all that are compared")
        if path.suffix != ".json" or not path.absolute().parent.is_dir() or path.is_dir():
            allowed = "a file that ends in .json, in an existing directory"
            raise ConfigError.field("--output-file", str(path), allowed)

    def _check_plot(self) -> None:
        path = self.plot
        if path is None:
            if self.plot_layer is not None:
                raise ConfigError("--plot-layer: say with --plot where to draw it")
            return
        if self.output_file is None:
            raise ConfigError("--plot: draws the placement that is written; say with -o where")
        if path.suffix.lower() != ".svg" or not path.absolute().parent.is_dir() or path.is_dir():
            raise ConfigError.field("--plot", str(path), "a file that ends in .svg, in an existing directory")

    @property
    def chosen(self) -> SolverName | None:
        """Whose placement is written; None: nobody's."""
        return None if self.output_file is None else self.solver or "ours"

    @property
    def measured(self) -> tuple[str, ...]:
        """Who is measured, in the order of the table."""
        if self.compare:
            return tuple(reversed(get_args(SolverName)))
        return tuple(dict.fromkeys(("vanilla", self.solver or "ours")))
