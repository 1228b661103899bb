"""The KV block pool: who holds which block, which blocks can be reused, and what they contain.

KV memory is cut into blocks of `block_size` tokens. A request's *block table* lists its blocks in
order; token i lives in block `table[i // block_size]`. The manager deals in ids only: the tensors
are the worker's.

    free queue   [ 7  3  9 ... ]   oldest first; a block that still holds known KV keeps its key
    held         ref count > 0     by one table, or by several that begin alike
    block 0      the null block    never handed out: padding points at it

Prefix cache: a full block's key is SHA-256 over (key of the block before, its token ids), so a key
stands for a whole prefix. Keys live in the block manager, per request, and are found again in
`_cached` (key -> block). A request's first key hangs on a root that covers everything else the KV
depends on, so foreign KV cannot be hit.

Where a block is freed: `release` puts a request's blocks at the tail of the free queue, its last
block first, so that the leaves of a shared prefix go before its stem. A freed block keeps its key
and may be hit again; it is forgotten only in `_take`, when it is handed out anew.

Invariants (`check_integrity`): free + held = all; ref counts equal occurrences in tables; each key
maps to a block that carries it; a shared or registered block is never written. Every operation is
O(1) per block. When to allocate, wait or preempt: `scheduler`. The idea: PagedAttention (Kwon et
al., SOSP 2023) and its hash-based prefix cache.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable

NULL_BLOCK = 0


def root_key(cache_salt: str = "") -> bytes:
    """The key before a request's first block: what its KV depends on besides the tokens."""
    return hashlib.sha256(b"salt:" + cache_salt.encode()).digest()


def chain_key(parent: bytes, token_ids: array[int]) -> bytes:
    """The key of a full block that holds `token_ids` after the prefix `parent` stands for.

    >>> a, b = array("i", [1, 2]), array("i", [3, 4])
    >>> ab = chain_key(chain_key(root_key(), a), b)
    >>> ab == chain_key(chain_key(root_key(), a), b)
    True
    >>> ab == chain_key(chain_key(root_key("other"), a), b)
    False
    """
    return hashlib.sha256(parent + token_ids.tobytes()).digest()


class _Table:
    """One request's blocks, and the keys of its full blocks as far as they have been hashed."""

    __slots__ = ("block_ids", "keys", "num_registered", "root")

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.block_ids: list[int] = []
        self.keys: list[bytes] = []
        self.num_registered = 0  # leading blocks whose keys are settled (hit or registered)


class BlockManager:
    """Block tables, reference counts and the prefix cache; see the module header.

    A request's life here: `open`, then `admit`, `grow` and `commit` while it runs, `release` when
    it is preempted or ends, `close` when it has ended.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._tables: dict[str, _Table] = {}
        self._claims: dict[bytes, str] = {}  # key -> the running request that will compute it
        self.reset_pool(num_blocks)

    def reset_pool(self, num_blocks: int) -> None:
        """A new, empty pool, as after a restart of the workers: no request holds a block.

        Keys of open requests are kept: they depend on tokens, not on the pool.
        """
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        # An OrderedDict is a doubly linked list with an index: O(1) pop, append and removal.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._claims.clear()
        for table in self._tables.values():
            table.block_ids = []
            table.num_registered = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the pool that requests hold, 0 to 1."""
        return 1 - len(self._free) / max(1, self.num_blocks - 1)

    def block_ids(self, request_id: str) -> list[int]:
        """A copy of the request's block table."""
        return list(self._tables[request_id].block_ids)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens.

        >>> BlockManager(4, 16, enable_prefix_caching=True).num_blocks_for(17)
        2
        """
        return -(-num_tokens // self.block_size)

    def open(self, request_id: str, tokens: array[int], cache_salt: str) -> None:
        """Make the request known and hash the full blocks of its tokens."""
        table = self._tables[request_id] = _Table(root_key(cache_salt))
        if self.enable_prefix_caching:
            self._hash_to(table, tokens, len(tokens) // self.block_size)

    def close(self, request_id: str) -> None:
        """Forget a request that holds no block any more."""
        assert not self._tables[request_id].block_ids, "close() of a request that holds blocks"
        del self._tables[request_id]

    def _hash_to(self, table: _Table, tokens: array[int], num_full: int) -> None:
        size = self.block_size
        for idx in range(len(table.keys), num_full):
            parent = table.keys[-1] if table.keys else table.root
            table.keys.append(chain_key(parent, tokens[idx * size : (idx + 1) * size]))

    def match(self, request_id: str, num_tokens: int) -> int:
        """Leading blocks of the request that are in the cache.

        At most (num_tokens - 1) // block_size: one token at least must be computed, for its logits.
        """
        keys = self._tables[request_id].keys[: (num_tokens - 1) // self.block_size]
        for idx, key in enumerate(keys):
            if key not in self._cached:
                return idx
        return len(keys)

    def claimed_key(self, request_id: str, num_hit: int, num_tokens: int) -> bytes | None:
        """The key that the request could hit next, if a running request is computing it now."""
        keys = self._tables[request_id].keys
        if num_hit >= min(len(keys), (num_tokens - 1) // self.block_size):
            return None
        return keys[num_hit] if keys[num_hit] in self._claims else None

    def admit(self, request_id: str, num_hit: int, num_tokens: int) -> bool:
        """Give the request its `num_hit` cached blocks and own ones for the rest of its tokens.

        All or nothing: False, and nothing changed, when too few blocks are free.
        """
        table = self._tables[request_id]
        assert not table.block_ids, "admit() of a request that holds blocks"
        hits = [self._cached[key] for key in table.keys[:num_hit]]
        num_new = self.num_blocks_for(num_tokens) - num_hit
        num_revived = sum(self._ref_counts[block] == 0 for block in hits)
        if num_new + num_revived > len(self._free):
            return False
        for block in hits:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1
        table.block_ids = hits + [self._take() for _ in range(num_new)]
        table.num_registered = num_hit
        for key in table.keys[num_hit:]:
            if key not in self._cached:
                self._claims.setdefault(key, request_id)
        return True

    def grow(self, request_id: str, num_tokens: int) -> list[int] | None:
        """Blocks added so that the request's table holds `num_tokens`; None if too few are free."""
        table = self._tables[request_id]
        num_new = self.num_blocks_for(num_tokens) - len(table.block_ids)
        if num_new <= 0:
            return []
        if num_new > len(self._free):
            return None
        new = [self._take() for _ in range(num_new)]
        table.block_ids += new
        return new

    def _take(self) -> int:
        """Hand out the block that has been free the longest; what it cached is forgotten."""
        block, _ = self._free.popitem(last=False)
        key = self._keys[block]
        if key is not None:
            del self._cached[key]
            self._keys[block] = None
        self._ref_counts[block] = 1
        return block

    def commit(self, request_id: str, tokens: array[int], num_computed: int) -> list[bytes]:
        """Register the request's blocks that are full of computed KV; returns their keys.

        Where a key exists already, the first block keeps it: this request's own copy stays private.
        """
        if not self.enable_prefix_caching:
            return []
        table = self._tables[request_id]
        num_full = num_computed // self.block_size
        if num_full <= table.num_registered:
            return []
        self._hash_to(table, tokens, num_full)
        settled = table.keys[table.num_registered : num_full]
        for idx, key in enumerate(settled, table.num_registered):
            if key not in self._cached:
                block = table.block_ids[idx]
                self._cached[key] = block
                self._keys[block] = key
            if self._claims.get(key) == request_id:
                del self._claims[key]
        table.num_registered = num_full
        return settled

    def release(self, request_id: str) -> list[bytes]:
        """Take all blocks from the request; returns the keys it will not compute after all."""
        table = self._tables[request_id]
        for block in reversed(table.block_ids):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
        abandoned = [
            key for key in table.keys[table.num_registered :] if self._claims.get(key) == request_id
        ]
        for key in abandoned:
            del self._claims[key]
        table.block_ids = []
        table.num_registered = 0
        return abandoned

    def reset_prefix_cache(self) -> None:
        """Forget every key: nothing computed so far is hit again. Requests keep their blocks."""
        for block in self._cached.values():
            self._keys[block] = None
        self._cached.clear()

    def check_integrity(self) -> None:
        """Prove the invariants of the module header; raises AssertionError naming what broke."""
        held: Counter[int] = Counter(_flatten(t.block_ids for t in self._tables.values()))
        for block, count in enumerate(self._ref_counts):
            assert held[block] == count, f"block {block}: {held[block]} holders, ref count {count}"
            if block != NULL_BLOCK:
                assert (block in self._free) == (count == 0), f"block {block}: free and held differ"
        assert NULL_BLOCK not in self._free, "the null block is free"
        assert len(self._free) + len(held) == self.num_blocks - 1, "blocks were lost"
        for key, block in self._cached.items():
            assert self._keys[block] == key, f"block {block} does not carry the key that finds it"
        keyed = sum(key is not None for key in self._keys)
        assert keyed == len(self._cached), "a block carries a key that does not find it"
        assert set(self._claims.values()) <= set(self._tables), "a claim by an unknown request"


def _flatten(tables: Iterable[list[int]]) -> Iterable[int]:
    for block_ids in tables:
        assert len(set(block_ids)) == len(block_ids), "a table holds a block twice"
        yield from block_ids
