"""How a checkpoint stores the routed experts, and which servers serve them now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moesaic.core.endpoint import Endpoint
from moesaic.core.placement import fingerprint
from moesaic.core.topology import Way
from moesaic.core.weight_types import row_bytes, split_dtype


def model_name(layers: Sequence[int], num_experts: int, hidden: int, width: int, weights: str = "") -> str:
    """The name of a model in placements and profiles of its experts. See `fingerprint`."""
    return fingerprint("moe", layers, num_experts, hidden, width, weights)


NamedShape = tuple[str, *tuple[int, ...]]
"""Name and shape of a tensor of a checkpoint."""


@dataclass(frozen=True)
class Activation:
    """What an expert computes from its gate and up products, for the down projection.

    First gate is limited to at most `limit`, and up to -limit .. limit. Then the result is
    (up + added) * gate * sigmoid(alpha * gate). The defaults give silu(gate) * up.
    """

    alpha: float = 1.0
    up_offset: float = 0.0
    limit: float | None = None
    """None: nothing is limited."""


SILU = Activation()
ROWS, BIASED_ROWS, COLUMNS, DOWN_COLUMNS = "rows", "biased rows", "columns", "down in columns"
HALF_COLUMNS = "halves in columns"
"""How a checkpoint stores an expert: see `ExpertLayout.form`."""
FORMS_WITH_BIASES = (BIASED_ROWS, COLUMNS)
"""The forms with biases."""
TRANSPOSED_FORMS = (COLUMNS, HALF_COLUMNS, DOWN_COLUMNS)
"""The forms with matrices in columns, which become rows when they are loaded."""
PARTS = {ROWS: 3, BIASED_ROWS: 6, COLUMNS: 6, HALF_COLUMNS: 3, DOWN_COLUMNS: 3}
"""How many tensors an expert has in memory: gate, up and down, then their biases in the same order."""


@dataclass(frozen=True)
class ExpertLayout:
    """The sizes and tensor names of a checkpoint's routed experts.

    An expert server finds its weights with it.
    """

    prefixes: dict[int, str]
    """MoE layer -> prefix of its tensors.

    Expert E has the tensors `PREFIX.E.gate.weight`, and so for up and down, where `form` is ROWS.
    """
    gate_name: str
    up_name: str
    down_name: str
    """`gate`, `up` and `down` are the words for the three matrices in tensor names."""
    hidden: int
    """Size of a hidden state."""
    width: int
    """Size of an expert's intermediate row."""
    num_experts: int
    top_k: int
    dtype: str
    """The type that kernels read: "float32", "bfloat16", "compressed", or with torch "float16".

    Weights that are stored in another type are converted. Quantised ones have the types of
    core.weight_types, and then other layers may have other types (`others`).
    """
    weights: str = ""
    """Fingerprint of the checkpoint (`models.fingerprint`). Empty where no checkpoint was read."""
    origin: str = ""
    """Fingerprint by which placements and profiles know it: of the checkpoint before it was compressed."""
    form: str = ROWS
    """ROWS: gate [w, h], up [w, h] and down [h, w], without biases. COLUMNS: gate and up in turn as the
    columns of one matrix [h, 2w], down as [w, h], and a bias for each of both (gpt-oss). BIASED_ROWS: the
    matrices of ROWS and the biases of COLUMNS (gpt-oss in MXFP4). HALF_COLUMNS: the matrices of COLUMNS, but
    all gate columns come first, and no biases (Qwen3-VL). DOWN_COLUMNS: as ROWS, but down is [w, h]
    (DBRX)."""
    activation: Activation = SILU
    layer_dtypes: dict[int, str] = field(default_factory=dict)
    """Layer -> the type of its experts, for layers where that is not `dtype`."""
    prediction: int | None = None
    """The layer of `prefixes` that predicts the token after the next one. None: none of them does."""

    def dtype_of(self, layer: int) -> str:
        """The type that kernels read in a layer."""
        return self.layer_dtypes.get(layer, self.dtype)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending."""
        return tuple(sorted(self.prefixes))

    @property
    def model_layers(self) -> tuple[int, ...]:
        """The layers of `layers`, without the one that predicts the token after the next one."""
        return tuple(layer for layer in self.layers if layer != self.prediction)

    @property
    def fingerprint(self) -> str:
        """The name that placements and profiles of these experts have for the model."""
        return model_name(self.model_layers, self.num_experts, self.hidden, self.width, self.origin)

    @property
    def parameters(self) -> int:
        """Number of weights in all routed experts."""
        biases = self.hidden + 2 * self.width if self.form in FORMS_WITH_BIASES else 0
        return len(self.prefixes) * self.num_experts * (3 * self.hidden * self.width + biases)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, in the layer where experts are largest."""
        return sum(self.bytes_of(self.largest))

    @property
    def largest(self) -> str:
        """The type of the layer where experts are largest."""
        return max(sorted(self._types), key=lambda dtype: sum(self.bytes_of(dtype)))

    @property
    def matrix_bytes(self) -> tuple[int, ...]:
        """Bytes of one expert's gate, up and down matrices in memory, and of its three biases if it has them.

        Each is that of the layer where it is largest. Biases are float32.
        """
        return tuple(map(max, zip(*map(self.bytes_of, self._types), strict=True)))

    @property
    def _types(self) -> set[str]:
        return {self.dtype, *self.layer_dtypes.values()}

    def bytes_of(self, dtype: str) -> tuple[int, ...]:
        """The numbers of `matrix_bytes` for layers whose experts have this type."""
        inner_dtype, down_dtype = split_dtype(dtype)
        inner = self.width * row_bytes(inner_dtype, self.hidden)
        matrices = inner, inner, self.hidden * row_bytes(down_dtype, self.width)
        biases = 4 * self.width, 4 * self.width, 4 * self.hidden
        return matrices + biases if self.form in FORMS_WITH_BIASES else matrices

    @property
    def num_bytes(self) -> int:
        """Bytes of all routed experts."""
        layer_bytes = (sum(self.bytes_of(self.dtype_of(layer))) for layer in self.prefixes)
        return self.num_experts * sum(layer_bytes)

    def tensors(self, layer: int, expert: int) -> tuple[NamedShape, ...]:
        """Name and shape of what the checkpoint stores of an expert.

        ROWS: the gate [w, h], up [w, h] and down [h, w] matrices. COLUMNS and HALF_COLUMNS: see
        `column_tensors`. DOWN_COLUMNS: gate, up and down, [w, h] each.
        """
        prefix = f"{self.prefixes[layer]}.{expert}"
        if self.form == COLUMNS:
            return column_tensors(prefix, self.hidden, self.width)
        if self.form == HALF_COLUMNS:
            return column_tensors(prefix, self.hidden, self.width)[:2]
        if self.form == DOWN_COLUMNS:
            words = self.gate_name, self.up_name, self.down_name
            return tuple((f"{prefix}.{word}", self.width, self.hidden) for word in words)
        biases = column_tensors(prefix, self.hidden, self.width)[2:] if self.form == BIASED_ROWS else ()
        return (
            (f"{prefix}.{self.gate_name}.weight", self.width, self.hidden),
            (f"{prefix}.{self.up_name}.weight", self.width, self.hidden),
            (f"{prefix}.{self.down_name}.weight", self.hidden, self.width),
            *biases,
        )


def column_tensors(
    prefix: str, hidden: int, width: int
) -> tuple[NamedShape, NamedShape, NamedShape, NamedShape]:
    """Name and shape of gate and up [h, 2w], down [w, h], and the biases of both, of an expert in COLUMNS.

    prefix: of the expert's tensors, with its id.
    """
    return (
        (f"{prefix}.gate_up_proj", hidden, 2 * width),
        (f"{prefix}.down_proj", width, hidden),
        (f"{prefix}.gate_up_proj_bias", 2 * width),
        (f"{prefix}.down_proj_bias", hidden),
    )


@dataclass(frozen=True)
class ServerEntry:
    """An expert server that clients can use."""

    server: int
    """The id of the server, which stays the same when its process is replaced."""
    incarnation: int
    """Counts the processes that had this id. When it grows, clients connect again."""
    endpoint: Endpoint


@dataclass(frozen=True)
class Directory:
    """Which servers serve which experts now. A new directory replaces the old one. Its version is higher."""

    version: int
    servers: list[ServerEntry]
    experts: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    """Server -> layer -> its logical experts."""
    suspected_servers: list[int] = field(default_factory=list)
    """Servers of other hosts that the supervisor has not heard for a while. They may be asked if no other
    server has the experts."""
    ways: dict[int, Way] = field(default_factory=dict)
    """Server -> the way from the worker that gets this directory. Servers without one count as near."""
