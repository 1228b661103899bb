from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from minivllm import sampling
from minivllm.sampling import (
    Purpose,
    SamplingBatch,
    add_gumbel,
    add_gumbel_torch,
    add_noise,
    philox,
    philox_torch,
    philox_uniform_torch,
    reshape,
    sample,
)

# The known answers published with the authors' Random123: counter, key, output.
CPU = torch.device("cpu")
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]

FLOATS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
INTS = {"top_k": 0, "seeds": 0, "children": 0, "positions": 0, "num_logprobs": -1}

# Every way to sample, and several ways at once.
VARIED = [
    {},
    {"temperature": 0},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "num_logprobs": 3},
    {"temperature": 0, "num_logprobs": 5},
]


def make_batch(num_rows, **values):
    """`num_rows` rows; a value is one number for all of them, or one for each."""
    dtypes = dict.fromkeys(FLOATS, np.float32) | dict.fromkeys(INTS, np.int64)
    return SamplingBatch(
        **{
            name: np.broadcast_to(np.asarray(value, dtypes[name]), num_rows).copy()
            for name, value in (FLOATS | INTS | values).items()
        }
    )


def varied_batch(num_rows):
    """Rows that differ in how they sample, in seed, child and position."""
    rows = [FLOATS | INTS | VARIED[r % len(VARIED)] for r in range(num_rows)]
    batch = {name: [row[name] for row in rows] for name in rows[0]}
    r = np.arange(num_rows)
    return make_batch(num_rows, **batch | {"seeds": r * 7919, "children": r % 3, "positions": r})


def scores(logits, batch):
    """What the argmax is taken of."""
    return add_noise(reshape(logits, batch), batch)


def random_logits(num_rows, vocab_size, seed=0):
    """Logits of standard deviation 3."""
    torch.manual_seed(seed)
    return torch.randn(num_rows, vocab_size) * 3


# ----------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, answer):
    """Both forms give the words that the generator's authors publish."""
    assert philox_torch(torch.tensor(counter), torch.tensor(key)).tolist() == answer
    assert list(philox(*map(np.uint64, counter + key))) == answer


def test_both_forms_of_philox_give_the_same_words():
    """The two forms agree bit for bit on arbitrary counters and keys."""
    torch.manual_seed(0)
    words = torch.randint(0, 2**32, (100, 6))
    expected = philox_torch(words[:, :4], words[:, 4:]).tolist()
    got = [list(philox(*map(np.uint64, row))) for row in words.tolist()]
    assert got == expected


@pytest.mark.parametrize("vocab_size", [1, 3, 64, 1024, 1027, 2500])
def test_both_forms_of_the_noise_agree(vocab_size):
    """The noise is that of the torch twin for any vocabulary, all bits of the seed included."""
    seeds = np.array([0, 1, -1, -(2**63), 2**63 - 1])
    batch = make_batch(5, seeds=seeds, children=range(5), positions=[0, 1, 2, 2**20, 2**31])
    logits = torch.zeros(5, vocab_size)
    noise = add_gumbel(logits, batch, Purpose.TARGET)
    twin = add_gumbel_torch(logits, batch, Purpose.TARGET)
    torch.testing.assert_close(noise, twin, rtol=2e-7, atol=1e-9)


def test_lane_of_a_block_belongs_to_the_token():
    """Token v uses lane v % 4 of the counter (v // 4, position, child, purpose) under the seed."""
    batch = make_batch(1, seeds=0x299F31D0A4093822, children=3, positions=17)
    u = philox_uniform_torch(batch, 10, Purpose.TARGET, CPU)
    words = philox(*map(np.uint64, (2, 17, 3, 0, 0xA4093822, 0x299F31D0)))
    assert u[0, 9].item() == (int(words[1]) + 0.5) / 2**32


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_noise_is_finite_at_both_ends(word, monkeypatch):
    """The least and the greatest word give a number inside (0, 1) and finite noise."""
    ends = torch.full((1, 1, 4), word)
    monkeypatch.setattr(sampling, "philox_torch", lambda counter, key: ends)
    u = philox_uniform_torch(make_batch(1), 4, Purpose.TARGET, CPU)
    assert ((u > 0) & (u < 1)).all()
    noise = add_gumbel_torch(torch.zeros(1, 4), make_batch(1), Purpose.TARGET)
    assert noise.isfinite().all()
    assert noise[0, 0].item() == pytest.approx(-3.1 if word == 0 else 22.9, abs=0.1)


def test_noise_has_the_gumbel_distribution():
    """A Kolmogorov-Smirnov test cannot tell the noise from Gumbel noise."""
    noise = add_gumbel(torch.zeros(10, 5000), make_batch(10, seeds=range(10)), Purpose.TARGET)
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 1e-3


def test_noise_of_neighbouring_positions_and_children_is_uncorrelated():
    """One token's uniforms over successive positions, or children, show no serial correlation."""
    n = 40_000
    for name in ("positions", "children"):
        batch = make_batch(n, seeds=5, **{name: np.arange(n)})
        u = philox_uniform_torch(batch, 4, Purpose.TARGET, CPU)
        for token in range(4):
            x = u[:, token].numpy()
            assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 4 / np.sqrt(n)


def test_seeds_that_differ_in_one_bit_share_nothing():
    """Each of a seed's 64 bits changes the noise into one uncorrelated with it."""
    V = 10_000
    base = 0x0123456789ABCDEF
    seeds = np.array([base, *(base ^ 1 << bit for bit in range(64))], np.uint64).view(np.int64)
    u = philox_uniform_torch(make_batch(65, seeds=seeds), V, Purpose.TARGET, CPU).numpy()
    correlations = np.corrcoef(u)
    np.fill_diagonal(correlations, 0)
    assert abs(correlations).max() < 5 / np.sqrt(V)


def test_successive_draws_are_independent():
    """A token says nothing about the one drawn at the next position."""
    n, V = 20_000, 8
    batch = make_batch(n, seeds=11, positions=np.arange(n))
    token_ids = sample(torch.zeros(n, V), batch).token_ids.numpy()
    pairs = np.zeros((V, V))
    np.add.at(pairs, (token_ids[:-1], token_ids[1:]), 1)
    assert stats.chi2_contingency(pairs).pvalue > 1e-3


# ---------------------------------------------------------------------------------- distribution


def reference_probs(logits, *, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0):
    """The distribution to sample from, in float64, for logits without ties."""
    x = np.asarray(logits, np.float64) / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    p[p < min_p * p.max()] = 0
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    kept = 1 + int(np.argmax(np.cumsum(p[order]) >= top_p - 1e-12))
    p[order[kept:]] = 0
    return p / p.sum()


def fit(token_ids, probs):
    """p-value of a chi-square test; 0 where a token of probability 0 was drawn."""
    counts = np.bincount(token_ids, minlength=len(probs))
    if counts[probs == 0].any():
        return 0.0
    expected = probs * len(token_ids)
    rare = expected < 5
    # The rare tokens count as one, joined by the likeliest should they be too rare even together.
    if rare.any() and expected[rare].sum() < 5:
        rare[expected.argmax()] = True
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    held = expected > 0
    if held.sum() == 1:
        return 1.0
    return stats.chisquare(counts[held], expected[held]).pvalue


NUM_DRAWS = 24_000


def draw(logits, **values):
    """Draws over 6,000 positions of four seeds."""
    r = np.arange(NUM_DRAWS)
    batch = make_batch(NUM_DRAWS, seeds=r % 4, positions=r // 4, **values)
    return sample(logits.repeat(NUM_DRAWS, 1), batch).token_ids.numpy()


@pytest.mark.parametrize("vocab_size", [5, 61, 64])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.01},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 4},
        {"top_k": 1000},
        {"top_p": 1e-6},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"temperature": 0.7, "top_k": 4, "top_p": 0.8},
        {"temperature": 2.0, "min_p": 0.1, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.02, "top_k": 20, "top_p": 0.95},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(vocab_size, values):
    """A chi-square test cannot tell the draws from the float64 reference."""
    logits = random_logits(1, vocab_size, seed=vocab_size)[0] / 2
    assert fit(draw(logits, **values), reference_probs(logits, **values)) > 1e-3


def test_children_follow_the_distribution():
    """The children of one seed at one position draw as independent rows do."""
    logits = random_logits(1, 30)[0] / 2
    batch = make_batch(NUM_DRAWS, seeds=3, positions=9, children=np.arange(NUM_DRAWS))
    token_ids = sample(logits.repeat(NUM_DRAWS, 1), batch).token_ids.numpy()
    assert fit(token_ids, reference_probs(logits)) > 1e-3


def test_a_wrong_temperature_fails_the_fit():
    """The check rejects draws at temperature 1.05 where 1 was meant."""
    logits = random_logits(1, 64)[0] / 2
    assert fit(draw(logits, temperature=1.05), reference_probs(logits)) < 1e-6


def test_noise_shared_by_the_tokens_of_a_block_fails_the_fit():
    """The check rejects draws whose noise is the same in the four lanes of a block."""
    logits = random_logits(1, 64)[0] / 2
    batch = make_batch(NUM_DRAWS, seeds=1, positions=np.arange(NUM_DRAWS))
    noise = add_gumbel(torch.zeros(NUM_DRAWS, 64), batch, Purpose.TARGET)
    token_ids = (logits + noise[:, torch.arange(64) // 4 * 4]).argmax(-1).numpy()
    assert fit(token_ids, reference_probs(logits)) < 1e-6


def test_the_stages_run_in_order():
    """top_p is taken over the survivors of top_k, and min_p after the temperature."""
    logits = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1]).log()
    # Of 0.3, 0.25 renormalised the first is 0.545; of all five it is below 0.5.
    assert set(draw(logits, top_k=2, top_p=0.5).tolist()) == {0}
    # At temperature 0.5 the ratio of the first two is 0.694, of the first and third 0.444.
    assert set(draw(logits, temperature=0.5, min_p=0.5).tolist()) == {0, 1}


def processed(logits, **values):
    """Which tokens of one row can be drawn."""
    batch = make_batch(1, **values)
    row = torch.tensor([logits])
    for stage in sampling.STAGES:
        row = stage(row, batch)
    return row.isfinite()[0].tolist()


def test_equal_values_at_the_cut_are_all_kept():
    """Neither top_k nor top_p chooses among tokens that tie with the last one kept."""
    assert processed([1.0, 2.0, 1.0, 0.0], top_k=2) == [True, True, True, False]
    assert processed([1.0, 2.0, 1.0, 0.0], top_p=0.6) == [True, True, True, False]
    assert processed([1.0, 2.0, 1.0, 2.0], min_p=1.0) == [False, True, False, True]


def test_masked_tokens_stay_masked():
    """Tokens at -inf are never drawn, however wide the truncation."""
    logits = [1.0, -torch.inf, 0.0, -torch.inf]
    expected = [True, False, True, False]
    for values in ({"top_k": 3}, {"top_p": 0.9999}, {"min_p": 1e-6}, {"temperature": 2.0}):
        assert processed(logits, **values) == expected
    assert set(draw(torch.tensor(logits), top_k=3, top_p=0.9999).tolist()) == {0, 2}


def test_a_top_p_that_rounding_puts_out_of_reach_keeps_every_token():
    """The largest top_p below 1 keeps a large vocabulary, though some rows' sums stay below it."""
    logits = random_logits(20, 50_000) / 3
    batch = make_batch(20, top_p=np.nextafter(np.float32(1), np.float32(0)))
    num_kept = sampling.top_p(logits, batch).isfinite().sum(-1)
    assert num_kept.min() > 49_000
    assert num_kept.max() == 50_000


def test_a_tiny_temperature_is_greedy():
    """At a temperature that makes the quotients overflow, the likeliest token is drawn."""
    logits = random_logits(50, 100)
    out = sample(logits, make_batch(50, temperature=1e-38, seeds=range(50)))
    assert torch.equal(out.token_ids, logits.argmax(-1))
    assert not out.failed


# ---------------------------------------------------------------------------------- rows of a batch


def test_greedy_rows_take_the_argmax_and_draw_no_noise(monkeypatch):
    """A batch of greedy rows gives the argmax of its logits, whatever else is set."""
    monkeypatch.setattr(sampling, "add_gumbel", None)
    logits = random_logits(9, 1000)
    batch = make_batch(9, temperature=0, top_k=3, top_p=0.5, min_p=0.1, seeds=range(9))
    assert torch.equal(sample(logits, batch).token_ids, logits.argmax(-1))
    assert scores(logits, batch) is logits


@pytest.mark.parametrize("vocab_size", [7, 1027, 5000])
def test_a_row_does_not_depend_on_its_batch(vocab_size):
    """Alone, at any place in a batch, or beside other rows, a row has the same bits."""
    logits = random_logits(32, vocab_size)
    logits[:, ::3] = logits[:, ::3].bfloat16().float()  # ties, as a half-precision model makes
    batch = varied_batch(32)
    whole = scores(logits, batch)
    token_ids = sample(logits, batch).token_ids
    orders = [np.random.default_rng(i).permutation(32)[: 32 - 5 * i] for i in range(4)]
    for rows in [*(np.array([r]) for r in range(32)), *orders]:
        assert torch.equal(scores(logits[rows], batch.take(rows)), whole[rows])
        assert torch.equal(sample(logits[rows], batch.take(rows)).token_ids, token_ids[rows])


def test_a_row_does_not_depend_on_the_number_of_threads():
    """One thread and three give the same bits."""
    logits = random_logits(16, 5000)
    batch = varied_batch(16)
    before = torch.get_num_threads()
    results = []
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        results.append(scores(logits, batch))
    torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("values", VARIED, ids=str)
def test_a_bad_row_fails_alone(bad, values):
    """A NaN or +inf fails its row, and its neighbours keep their bits."""
    logits = random_logits(3, 100)
    batch = make_batch(3, seeds=range(3), **values)
    clean = sample(logits, batch)
    spoiled = logits.clone()
    spoiled[1, 40] = bad
    out = sample(spoiled, batch)
    assert out.failed.keys() == {1}
    assert out.token_ids[1] == 0
    assert torch.equal(out.token_ids[::2], clean.token_ids[::2])
    if out.logprobs is not None:
        assert torch.equal(out.logprobs.logprobs[::2], clean.logprobs.logprobs[::2])
        assert torch.equal(out.logprobs.token_ids[::2], clean.logprobs.token_ids[::2])


@pytest.mark.parametrize("values", VARIED, ids=str)
def test_a_row_with_nothing_to_sample_fails_alone(values):
    """A row of -inf fails with token 0; one with a single token left draws it."""
    logits = torch.full((2, 10), -torch.inf)
    logits[1, 7] = -3.0
    out = sample(logits, make_batch(2, **values))
    assert out.failed.keys() == {0}
    assert out.token_ids.tolist() == [0, 7]


def test_no_rows_give_no_tokens():
    """A step in which nothing samples gives empty results."""
    out = sample(torch.empty(0, 100), make_batch(0))
    assert out.token_ids.shape == (0,)
    assert out.failed == {}
    assert out.logprobs is None


# ------------------------------------------------------------------------------------- logprobs


def test_logprobs_are_those_of_the_raw_logits():
    """Log-probabilities and ranks match a float64 log-softmax, whatever shapes the draw."""
    logits = random_logits(40, 300)
    num_logprobs = np.arange(40) % 5 - 1
    batch = make_batch(40, temperature=1.7, top_k=50, seeds=range(40), num_logprobs=num_logprobs)
    out = sample(logits, batch)
    expected = logits.double().log_softmax(-1)
    assert out.logprobs.rows.tolist() == np.flatnonzero(num_logprobs >= 0).tolist()
    assert out.logprobs.token_ids.shape == out.logprobs.logprobs.shape == (32, 4)
    for n, row in enumerate(out.logprobs.rows.tolist()):
        k = num_logprobs[row]
        ids = out.logprobs.token_ids[n]
        values = out.logprobs.logprobs[n]
        assert ids[0] == out.token_ids[row]
        assert ids[1 : 1 + k].tolist() == expected[row].argsort(descending=True)[:k].tolist()
        torch.testing.assert_close(
            values[: 1 + k].double(), expected[row, ids[: 1 + k]], rtol=0, atol=1e-4
        )
        assert values[1 + k :].eq(-torch.inf).all()
        assert out.logprobs.ranks[n] == 1 + (expected[row] > expected[row, ids[0]]).sum()


def test_equal_logprobs_share_a_rank():
    """Only strictly likelier tokens count for the rank."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    logprobs = sampling.gather_logprobs(logits, torch.tensor([3, 2]), np.array([0, 0]))
    assert logprobs.ranks.tolist() == [2, 1]
    assert logprobs.token_ids.tolist() == [[3], [2]]


def test_more_logprobs_than_tokens_gives_all_of_them():
    """A request for more than the vocabulary gets the whole of it, likeliest first."""
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    out = sample(logits, make_batch(1, temperature=0, num_logprobs=10))
    assert out.logprobs.token_ids.tolist() == [[1, 1, 2, 0]]


def test_logprobs_of_a_row_do_not_depend_on_what_others_ask():
    """Alone or beside rows that list more, a row lists the same of its equal logits."""
    torch.manual_seed(0)
    logits = torch.randint(2, (20, 2000)).float()  # a thousand tokens share the first place
    batch = make_batch(20, temperature=0, num_logprobs=[3] + [3 + 10 * r for r in range(19)])
    alone = sample(logits[:1], batch.take(np.array([0]))).logprobs
    beside = sample(logits, batch).logprobs
    assert torch.equal(alone.token_ids[0], beside.token_ids[0, :4])
    assert torch.equal(alone.logprobs[0], beside.logprobs[0, :4])


def test_only_rows_that_ask_pay_for_logprobs(monkeypatch):
    """No log-softmax is computed when no row asks, nor for the rows that do not."""
    seen = []
    real = torch.Tensor.log_softmax
    monkeypatch.setattr(
        torch.Tensor, "log_softmax", lambda x, dim: (seen.append(len(x)), real(x, dim))[1]
    )
    logits = random_logits(50, 10)
    sample(logits, make_batch(50))
    assert seen == []
    sample(logits, make_batch(50, num_logprobs=[2] * 20 + [-1] * 30))
    assert sum(seen) == 20
    assert max(seen) <= 16
