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
depends on, the caller's salt and the epoch of the weights, so foreign or stale KV cannot be hit.

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
from collections.abc import Hashable, Iterable

NULL_BLOCK = 0


def root_key(cache_salt: str = "", weight_epoch: int = 0) -> bytes:
    """The key before a request's first block: what its KV depends on besides the tokens."""
    return hashlib.sha256(b"epoch:%d salt:" % weight_epoch + cache_salt.encode()).digest()


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

    __slots__ = (
        "block_ids",
        "cache_salt",
        "epoch",
        "keys",
        "num_exclusive",
        "num_registered",
        "serial",
        "tokens",
    )

    def __init__(self, serial: int, tokens: array[int], cache_salt: str, epoch: int) -> None:
        self.serial = serial
        self.num_exclusive = 0  # of its blocks, those that no other table holds
        self.tokens = tokens  # the request's own, which grow
        self.cache_salt = cache_salt
        self.epoch = epoch  # of the weights that the keys stand for
        self.block_ids: list[int] = []
        self.keys: list[bytes] = []
        self.num_registered = 0  # leading blocks whose keys are settled (hit or registered)


class BlockManager:
    """Block tables, reference counts and the prefix cache; see the module header.

    A request is named by any hashable that is no other's for as long as it holds blocks; an id that
    a caller gives will not do, for it may come again then. Its life here: `open`, then `admit`,
    `grow` and `commit` while it runs, `release` when it is preempted or ends, `close` when it has
    ended.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._tables: dict[Hashable, _Table] = {}
        self._by_serial: dict[int, _Table] = {}
        self._num_opened = 0
        self.weight_epoch = 0
        self._claims: dict[bytes, Hashable] = {}  # key -> the running request that will compute it
        self.reset_pool(num_blocks)

    def reset_pool(self, num_blocks: int) -> None:
        """A new, empty pool, as after a restart of the workers: no request holds a block.

        Keys of open requests are kept: they depend on tokens, not on the pool.
        """
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._holders = [0] * num_blocks  # xor of the serials of the tables: of one table, itself
        self._keys: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        # An OrderedDict is a doubly linked list with an index: O(1) pop, append and removal.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._claims.clear()
        for table in self._tables.values():
            table.block_ids = []
            table.num_registered = table.num_exclusive = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the pool that requests hold, 0 to 1."""
        return 1 - len(self._free) / max(1, self.num_blocks - 1)

    def block_ids(self, request: Hashable) -> list[int]:
        """A copy of the request's block table."""
        return list(self._tables[request].block_ids)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens.

        >>> BlockManager(4, 16, enable_prefix_caching=True).num_blocks_for(17)
        2
        """
        return -(-num_tokens // self.block_size)

    def open(self, request: Hashable, tokens: array[int], cache_salt: str) -> None:
        """Make the request known and hash the full blocks of its tokens."""
        self._num_opened += 1
        table = _Table(self._num_opened, tokens, cache_salt, self.weight_epoch)
        self._tables[request] = self._by_serial[table.serial] = table
        if self.enable_prefix_caching:
            self._hash_to(table, len(tokens) // self.block_size)

    def close(self, request: Hashable) -> None:
        """Forget a request that holds no block any more."""
        assert not self._tables[request].block_ids, "close() of a request that holds blocks"
        del self._by_serial[self._tables.pop(request).serial]

    def _hash_to(self, table: _Table, num_full: int) -> None:
        size = self.block_size
        parent = table.keys[-1] if table.keys else root_key(table.cache_salt, table.epoch)
        for idx in range(len(table.keys), num_full):
            parent = chain_key(parent, table.tokens[idx * size : (idx + 1) * size])
            table.keys.append(parent)

    def raise_epoch(self) -> list[bytes]:
        """New weights: nothing computed with the old ones is hit again, as every key from here on
        hangs on another root. A request that holds blocks goes on with them, registers no more, and
        is keyed anew when it is next computed. Returns the keys that nobody will compute."""
        self.weight_epoch += 1
        abandoned = list(self._claims)
        self._claims.clear()
        return abandoned

    def match(self, request: Hashable, num_tokens: int, *, claimed: bool = False) -> int:
        """Leading blocks of the request that are in the cache, or (`claimed`) being computed.

        At most (num_tokens - 1) // block_size: one token at least must be computed, for its logits.
        """
        table = self._tables[request]
        if table.epoch != self.weight_epoch and self.enable_prefix_caching:
            table.epoch = self.weight_epoch
            table.keys.clear()
            self._hash_to(table, len(table.tokens) // self.block_size)
        keys = table.keys[: (num_tokens - 1) // self.block_size]
        for idx, key in enumerate(keys):
            if key not in self._cached and not (claimed and key in self._claims):
                return idx
        return len(keys)

    def claimed_key(self, request: Hashable, num_hit: int, num_tokens: int) -> bytes | None:
        """The key that the request could hit next, if a running request is computing it now."""
        keys = self._tables[request].keys
        if num_hit >= min(len(keys), (num_tokens - 1) // self.block_size):
            return None
        return keys[num_hit] if keys[num_hit] in self._claims else None

    def claimant(self, key: bytes) -> Hashable:
        """Who is computing that key."""
        return self._claims[key]

    def num_held(self, request: Hashable) -> int:
        """Blocks in the request's table."""
        return len(self._tables[request].block_ids)

    def num_exclusive(self, request: Hashable) -> int:
        """Blocks that nobody else holds, so that `release` frees them."""
        return self._tables[request].num_exclusive

    def num_short(
        self, request: Hashable, num_hit: int, num_tokens: int, without: Iterable[Hashable] = ()
    ) -> int:
        """Blocks that `admit` lacks, if the requests `without` released theirs first; at most 0
        when it would succeed."""
        released = Counter(_flatten(self._tables[other].block_ids for other in without))
        num_freed = sum(self._ref_counts[block] == count for block, count in released.items())
        hits = [self._cached[key] for key in self._tables[request].keys[:num_hit]]
        num_revived = sum(self._ref_counts[block] == released[block] for block in hits)
        num_new = self.num_blocks_for(num_tokens) - num_hit
        return num_new + num_revived - len(self._free) - num_freed

    def admit(self, request: Hashable, num_hit: int, num_tokens: int) -> bool:
        """Give the request its `num_hit` cached blocks and own ones for the rest of its tokens.

        All or nothing: False, and nothing changed, when too few blocks are free.
        """
        table = self._tables[request]
        assert not table.block_ids, "admit() of a request that holds blocks"
        if self.num_short(request, num_hit, num_tokens) > 0:
            return False
        hits = [self._cached[key] for key in table.keys[:num_hit]]
        for block in hits:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._count(block, table, 1)
        num_new = self.num_blocks_for(num_tokens) - num_hit
        table.block_ids = hits + [self._take(table) for _ in range(num_new)]
        table.num_registered = num_hit
        for key in table.keys[num_hit:]:
            if key not in self._cached:
                self._claims.setdefault(key, request)
        return True

    def can_grow(self, request: Hashable, num_tokens: int) -> bool:
        """Whether `grow` would find the blocks."""
        return self.num_blocks_for(num_tokens) - self.num_held(request) <= len(self._free)

    def grow(self, request: Hashable, num_tokens: int) -> list[int] | None:
        """Blocks added so that the request's table holds `num_tokens`; None if too few are free."""
        table = self._tables[request]
        num_new = self.num_blocks_for(num_tokens) - len(table.block_ids)
        if num_new <= 0:
            return []
        if num_new > len(self._free):
            return None
        new = [self._take(table) for _ in range(num_new)]
        table.block_ids += new
        return new

    def _count(self, block: int, table: _Table, by: int) -> None:
        """One holder of the block more or less."""
        if self._ref_counts[block] == 1:
            self._by_serial[self._holders[block]].num_exclusive -= 1
        self._ref_counts[block] += by
        self._holders[block] ^= table.serial
        if self._ref_counts[block] == 1:
            self._by_serial[self._holders[block]].num_exclusive += 1

    def _take(self, table: _Table) -> int:
        """Hand out the block that has been free the longest; what it cached is forgotten."""
        block, _ = self._free.popitem(last=False)
        key = self._keys[block]
        if key is not None:
            del self._cached[key]
            self._keys[block] = None
        self._count(block, table, 1)
        return block

    def commit(self, request: Hashable, num_computed: int) -> list[bytes]:
        """Register the request's blocks that are full of computed KV; returns their keys.

        Where a key exists already, the first block keeps it: this request's own copy stays private.
        """
        if not self.enable_prefix_caching:
            return []
        table = self._tables[request]
        num_full = num_computed // self.block_size
        if num_full <= table.num_registered or table.epoch != self.weight_epoch:
            return []
        self._hash_to(table, num_full)
        settled = table.keys[table.num_registered : num_full]
        for idx, key in enumerate(settled, table.num_registered):
            if key not in self._cached:
                block = table.block_ids[idx]
                self._cached[key] = block
                self._keys[block] = key
            if self._claims.get(key) == request:
                del self._claims[key]
        table.num_registered = num_full
        return settled

    def release(self, request: Hashable) -> list[bytes]:
        """Take all blocks from the request; returns the keys it will not compute after all."""
        table = self._tables[request]
        for block in reversed(table.block_ids):
            self._count(block, table, -1)
            if self._ref_counts[block] == 0:
                self._free[block] = None
        abandoned = [
            key for key in table.keys[table.num_registered :] if self._claims.get(key) == request
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
        for table in self._tables.values():
            alone = sum(self._ref_counts[block] == 1 for block in table.block_ids)
            assert table.num_exclusive == alone, "a table's exclusive blocks are miscounted"
        assert set(self._claims.values()) <= set(self._tables), "a claim by an unknown request"


def _flatten(tables: Iterable[list[int]]) -> Iterable[int]:
    for block_ids in tables:
        assert len(set(block_ids)) == len(block_ids), "a table holds a block twice"
        yield from block_ids
