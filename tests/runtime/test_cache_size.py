"""Which pool a worker gets."""

from moesaic.config import CacheConfig
from moesaic.models.kvcache.memory import CacheSize
from moesaic.offload.padding import PaddedBlocks
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.stateblocks import StateBlocks
from moesaic.runtime.cache_size import make_block_pool


def test_the_pool_is_the_one_that_the_model_needs() -> None:
    assert type(make_block_pool(CacheConfig(), CacheSize(4))) is KVBlocks
    assert type(make_block_pool(CacheConfig(), CacheSize(4), 8)) is PaddedBlocks
    assert type(make_block_pool(CacheConfig(), CacheSize(4, seats=2, snapshots=1))) is StateBlocks
