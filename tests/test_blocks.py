from __future__ import annotations

import random
from array import array

import pytest

from minivllm.blocks import BlockManager


def tokens(*ids: int) -> array[int]:
    return array("i", ids)


def manager(num_blocks: int = 10, block_size: int = 2) -> BlockManager:
    return BlockManager(num_blocks, block_size, enable_prefix_caching=True)


def run_once(blocks: BlockManager, request_id: str, ids: array[int], salt: str = "") -> int:
    """Open, compute and release a request; returns the blocks it hit."""
    blocks.open(request_id, ids, salt)
    hit = blocks.match(request_id, len(ids))
    assert blocks.admit(request_id, hit, len(ids))
    blocks.commit(request_id, len(ids))
    blocks.release(request_id)
    blocks.close(request_id)
    return hit


def test_hits_are_the_longest_cached_prefix_but_never_everything() -> None:
    """A prompt hits its full cached blocks, at most up to the block of its last token."""
    blocks = manager()
    assert run_once(blocks, "a", tokens(1, 2, 3, 4, 5)) == 0
    assert run_once(blocks, "b", tokens(1, 2, 3, 4, 5, 6)) == 2
    assert run_once(blocks, "c", tokens(1, 2, 3, 4)) == 1
    assert run_once(blocks, "d", tokens(1, 2, 9, 9, 9)) == 1
    assert run_once(blocks, "e", tokens(9, 2, 3, 4, 5)) == 0


def test_a_salt_separates() -> None:
    """Prompts with different salts share nothing; equal salts share."""
    blocks = manager()
    run_once(blocks, "a", tokens(1, 2, 3), salt="x")
    assert run_once(blocks, "b", tokens(1, 2, 3)) == 0
    assert run_once(blocks, "c", tokens(1, 2, 3), salt="x") == 1


def test_a_shared_prefix_outlives_its_leaves() -> None:
    """Freed blocks are reused oldest first, a request's last block before its first."""
    blocks = manager(num_blocks=6)
    run_once(blocks, "a", tokens(1, 2, 3, 4, 5, 6))
    blocks.open("b", tokens(*range(20, 26)), "")
    assert blocks.admit("b", 0, 6)  # two unused blocks, then the last block of a
    assert blocks.match("b", 6) == 0
    blocks.open("c", tokens(1, 2, 3, 4, 5, 6), "")
    assert blocks.match("c", 6) == 2
    blocks.check_integrity()


def test_admission_is_all_or_nothing() -> None:
    """Too few free blocks leave everything as it was, hits included."""
    blocks = manager(num_blocks=5)
    run_once(blocks, "a", tokens(1, 2, 3, 4))
    blocks.open("b", tokens(*range(10, 14)), "")
    assert blocks.admit("b", 0, 4)
    blocks.open("c", tokens(1, 2, 7, 7, 7), "")
    before = blocks.num_free
    assert not blocks.admit("c", blocks.match("c", 5), 7)
    assert blocks.num_free == before
    blocks.check_integrity()


def test_the_first_block_keeps_the_key() -> None:
    """Of two requests that compute the same block, the second keeps a private copy."""
    blocks = manager()
    ids = tokens(1, 2, 3)
    for name in "ab":
        blocks.open(name, ids, "")
        assert blocks.admit(name, 0, 3)
    blocks.commit("a", 3)
    blocks.commit("b", 3)
    blocks.check_integrity()
    first = blocks.block_ids("a")[0]
    blocks.open("c", ids, "")
    assert blocks.admit("c", blocks.match("c", 3), 3)
    assert blocks.block_ids("c")[0] == first


def test_reset_forgets_every_prefix() -> None:
    """After a reset nothing computed before is hit, not even by a request that still runs."""
    blocks = manager()
    run_once(blocks, "a", tokens(1, 2, 3))
    blocks.reset_prefix_cache()
    assert run_once(blocks, "b", tokens(1, 2, 3)) == 0
    assert run_once(blocks, "c", tokens(1, 2, 3)) == 1
    blocks.check_integrity()


def test_integrity_check_finds_planted_damage() -> None:
    """The check is one that can fail: a lost reference, a leaked block, a wrong key."""
    for damage in ("ref", "leak", "key"):
        blocks = manager()
        ids = tokens(1, 2, 3, 4)
        blocks.open("a", ids, "")
        assert blocks.admit("a", 0, 4)
        blocks.commit("a", 4)
        blocks.check_integrity()
        if damage == "ref":
            blocks._ref_counts[blocks.block_ids("a")[0]] += 1
        elif damage == "leak":
            blocks._free.popitem()
        else:
            blocks._keys[blocks.block_ids("a")[0]] = b"x"
        with pytest.raises(AssertionError):
            blocks.check_integrity()


def test_two_hundred_thousand_random_operations() -> None:
    """Any order of operations, resets included, keeps the invariants."""
    rng = random.Random(0)
    blocks = manager(num_blocks=200, block_size=4)
    held: dict[str, array[int]] = {}
    idle: dict[str, array[int]] = {}
    stems = [[rng.randrange(50) for _ in range(60)] for _ in range(4)]
    counts = {"hit": 0, "refused": 0, "grown": 0}
    for number in range(200_000):
        action = rng.random()
        if action < 0.3 and len(held) + len(idle) < 60:
            ids = array("i", rng.choice(stems)[: rng.randrange(1, 60)])
            ids.extend(rng.randrange(50) for _ in range(rng.randrange(1, 9)))
            idle[f"r{number}"] = ids
            blocks.open(f"r{number}", ids, "")
        elif action < 0.5 and idle:
            name = rng.choice(list(idle))
            hit = blocks.match(name, len(idle[name]))
            counts["hit"] += hit
            if blocks.admit(name, hit, len(idle[name])):
                held[name] = idle.pop(name)
            else:
                counts["refused"] += 1
        elif action < 0.75 and held:
            name = rng.choice(list(held))
            blocks.commit(name, len(held[name]))
            new = blocks.grow(name, len(held[name]) + 1)
            if new is not None:
                held[name].append(rng.randrange(50))
                counts["grown"] += len(new)
        elif action < 0.85 and held:
            name = rng.choice(list(held))
            blocks.release(name)
            idle[name] = held.pop(name)
        elif action < 0.95 and held:
            name = rng.choice(list(held))
            blocks.release(name)
            blocks.close(name)
            del held[name]
        elif action < 0.951:
            blocks.reset_prefix_cache()
        if number % 2000 == 0:
            blocks.check_integrity()
    blocks.check_integrity()
    assert all(count > 1000 for count in counts.values()), counts
