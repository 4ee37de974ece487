"""What a worker says of itself once it is ready."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker loaded, and the settings it chose."""

    model_type: str
    device: str
    kernels: str
    dtype: str
    threads: int
    num_parameters: int
    """Number of parameters. For a group of processes, those of its first rank."""
    weight_bytes: int
    """Bytes of weights. For a group of processes, those of its first rank."""
    num_layers: int
    num_experts: int
    top_k: int
    vocab_size: int
    max_model_len: int
    """Maximum tokens of one request, prompt and answer together."""
    block_size: int
    num_blocks: int
    kv_bytes: int
    kv_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    state_bytes: int = 0
    """Bytes of the states of linear attention. 0 for a model without."""
    state_seats: int = 0
    """Requests whose states fit, so that they can run at once."""
    state_snapshots: int = 0
    """States that may be kept of prefixes."""
    ranks: int = 1
    """Number of processes that form this worker."""
    collectives: str = ""
    """The collectives between attention and experts. Empty for a worker with one process."""
    torch_code: str = ""
    """What torch's own operations on the CPU are compiled for, such as AVX512. It decides the last bits of
    log-probabilities and of sampling, as `kernels` does of everything else. Empty on a GPU."""
    speculation: str = ""
    """How many tokens are drafted, and from which acceptance that pays. Empty where none are drafted."""
    least_rows: int = 0
    """Rows in flight of which some part may run alone, at least. 0 where rows stay together."""
    rounding_kernels: tuple[str, ...] = ()
    """Kernels of this CPU that round rows for these weights, where chosen ones compute in float32."""
    routed_layers: tuple[int, ...] = ()
    """Layers with routed experts, if the experts of each token can be returned. Empty otherwise."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the KV cache."""
        return self.block_size * self.num_blocks

    @property
    def kv_request_bytes(self) -> int:
        """Bytes of keys and values of one request of the maximum length, over all ranks."""
        return -(-self.max_model_len // self.block_size) * self.kv_bytes // self.num_blocks
