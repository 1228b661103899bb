from __future__ import annotations

import codecs
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import regex
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import TEXTS, byte_level, make, sentencepiece

from minivllm.detokenizer import Detokenizer, Pushed
from minivllm.errors import RequestError, TokenIdError
from minivllm.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def real(embedded_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(embedded_dir)


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    return make(byte_level())


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    return make(sentencepiece())


# --- text, bit by bit ---


@st.composite
def chunked_ids(draw: st.DrawFn, ids: Iterable[int]) -> list[list[int]]:
    rest = list(ids)
    chunks = []
    while rest:
        size = draw(st.integers(0, 5))
        chunks.append(rest[:size])
        rest = rest[size:]
    return chunks


def check_incremental(tokenizer: Tokenizer, chunks: list[list[int]], skip: bool) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    ids = [token_id for chunk in chunks for token_id in chunk]
    final = tokenizer.decode(ids, skip_special_tokens=skip)
    shown = ""
    for chunk in chunks:
        assert detokenizer.push(chunk) == Pushed(len(chunk), None)
        text = detokenizer.text
        assert text.startswith(shown)
        assert final.startswith(text)
        shown = text
    assert detokenizer.finish() == detokenizer.text == final


@given(data=st.data(), skip=st.booleans())
def test_text_only_grows(
    real: Tokenizer, pieces: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    """Whatever the tokens and their grouping, each text is a prefix of the next and of `decode`."""
    text = data.draw(st.text() | st.sampled_from(TEXTS))
    noise = data.draw(st.lists(st.integers(0, 258), max_size=8))
    for tokenizer in (real, pieces):
        ids = tokenizer.encode(text)
        at = data.draw(st.integers(0, len(ids)))
        chunks = data.draw(chunked_ids(ids[:at] + noise + ids[at:]))
        check_incremental(tokenizer, chunks, skip)


@given(data=st.data())
def test_invalid_bytes(letters: Tokenizer, data: st.DataObject) -> None:
    """Bytes that are not UTF-8 become what decoding all of them at once makes of them."""
    ids = {letters.token_bytes(token_id)[0]: token_id for token_id in range(256)}
    # Starts, continuations, and bytes at the borders of what may follow a start.
    borders = [0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC3, 0xE0, 0xED, 0xF0, 0xF4, 0xFF]
    drawn = data.draw(st.lists(st.sampled_from(borders) | st.integers(0, 255)))
    check_incremental(letters, data.draw(chunked_ids(ids[byte] for byte in drawn)), skip=True)


def test_whole_characters_at_once(real: Tokenizer) -> None:
    """Without stop strings a character is shown with the token that completes it, not before."""
    detokenizer = Detokenizer(real)
    ids = real.encode("𓂀")
    for token_id in ids[:-1]:
        detokenizer.push([token_id])
        assert detokenizer.text == ""
    detokenizer.push(ids[-1:])
    assert detokenizer.text == "𓂀"


def test_incomplete_end(letters: Tokenizer) -> None:
    """A character cut off by the end of the output is one U+FFFD, shown only by `finish`."""
    detokenizer = Detokenizer(letters)
    detokenizer.push(letters.encode("a👍")[:-1])
    assert detokenizer.text == "a"
    assert detokenizer.finish() == "a\ufffd"
    assert detokenizer.finish() == "a\ufffd"


@pytest.mark.parametrize("stop", [[], ["zz", "###"]])
def test_cost_does_not_grow(stop: list[str]) -> None:
    """A hundred thousand long tokens take a second or so: no push copies the text before it."""
    merges = [("a" * 2**i, "a" * 2**i) for i in range(7)]
    tokenizer = make(byte_level(merges))
    [longest] = tokenizer.encode("a" * 128)
    detokenizer = Detokenizer(tokenizer, stop=stop)
    started = time.perf_counter()
    for _ in range(100_000):
        detokenizer.push((longest,))
    assert len(detokenizer.finish()) == 12_800_000
    # Copying all text at each push would move 640 GB: a minute on any machine.
    assert time.perf_counter() - started < 10


# --- two thousand texts ---

SNIPPETS = [
    *("👩‍👩‍👧‍👦", "👍🏽", "🇫🇷", "1️⃣", "👩🏿‍🚀", "❤️‍🔥"),
    *("e\u0301", "a\u0308\u0323", "Z\u0351\u036b\u0343", "क्षि", "ก็", "각"),
    *("日本語", "漢字かな交じり文", "한국어", "中文。", "𠮷"),
    *("שלום", "\u202bمرحبا\u202c", "\u200fאב"),
    *("hello", " world", "  ", "\n", "\t", "def f(x):", "</s>", "<|im_end|>", "in a", "0x"),
    *("\x00", "\u00a0", "\ufeff", "\ufffd", "\U0010ffff", "\u2581", "é", "ß"),
]
NOT_UTF_8 = [b"\x80", b"\xbf", b"\xc0", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80"]


def random_text(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(0, 12)):
        if rng.random() < 0.8:
            parts.append(rng.choice(SNIPPETS))
        else:
            code = rng.choice([rng.randrange(0x80), rng.randrange(0xD800), rng.randrange(0x110000)])
            parts.append("?" if 0xD800 <= code < 0xE000 else chr(code))
    return "".join(parts)


def byte_ids(tokenizer: Tokenizer) -> dict[bytes, int]:
    """The tokens that are single bytes."""
    ids = range(len(tokenizer))
    return {tokenizer.token_bytes(i): i for i in ids if len(tokenizer.token_bytes(i)) == 1}


def random_ids(rng: random.Random, tokenizer: Tokenizer, one_byte: dict[bytes, int]) -> list[int]:
    """Tokens of random texts, with tokens of single bytes between them: halves of characters, bytes
    that are never UTF-8."""
    ids: list[int] = []
    for _ in range(rng.randint(1, 3)):
        ids += tokenizer.encode(random_text(rng))
        if rng.random() < 0.5:
            bytes_between = [bytes([byte]) for byte in rng.choice(NOT_UTF_8)]
            ids += [one_byte[byte] for byte in bytes_between if byte in one_byte]
    return ids


def random_stops(rng: random.Random, text: str) -> list[str]:
    """Pieces of the text itself, which will be found, and others, which mostly will not."""
    stops = []
    for _ in range(rng.randint(0, 3)):
        start = rng.randint(0, len(text))
        found = text[start : start + rng.randint(1, 6)]
        stops.append(rng.choice([found, found + "x", rng.choice(SNIPPETS)]) or "x")
    return stops


def search(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """The stop string that ends first in `text`: its end, its place in the list, itself."""
    hits = [(text.find(stop) + len(stop), i, stop) for i, stop in enumerate(stops) if stop in text]
    return min(hits, default=None)


@pytest.mark.parametrize("family", ["real", "letters", "pieces"])
def test_two_thousand_texts(family: str, request: pytest.FixtureRequest) -> None:
    """However tokens and pushes are split: what is shown, joined, is the bytes of all tokens read
    at once, or that text up to the stop string that a search of it finds to end first."""
    tokenizer: Tokenizer = request.getfixturevalue(family)
    one_byte = byte_ids(tokenizer)
    rng = random.Random(0)
    num_stopped = 0
    for _ in range(2000):
        ids = random_ids(rng, tokenizer, one_byte)
        skip, include = rng.random() < 0.5, rng.random() < 0.5
        kept = [i for i in ids if not (skip and i in tokenizer.special_ids)]
        data = b"".join(map(tokenizer.token_bytes, kept))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        whole = decoder.decode(data)  # without a half character at the end, which ends nothing
        final = data.decode("utf-8", "replace")
        stops = random_stops(rng, whole)
        hit = search(whole, stops)
        if hit is not None:
            end, _, stop = hit
            final = whole[: end if include else end - len(stop)]
            num_stopped += 1

        detokenizer = Detokenizer(
            tokenizer, stop=stops, skip_special_tokens=skip, include_stop_str=include
        )
        deltas, num_taken, at = [], 0, 0
        while at < len(ids):
            size = rng.choice([1, 1, 2, 5, 50])
            pushed = detokenizer.push(ids[at : at + size])
            at += size
            num_taken += pushed.num_tokens
            deltas.append(detokenizer.text[sum(map(len, deltas)) :])
            assert "".join(deltas) == detokenizer.text
            assert final.startswith(detokenizer.text)
            if pushed.stop is not None:
                break
        assert detokenizer.finish() == final
        assert detokenizer.push([]).stop == (None if hit is None else hit[2])
        if hit is None:
            assert num_taken == len(ids)
        else:  # the last token taken is the one that completes the stop
            texts = texts_after(tokenizer, ids, skip)
            assert len(texts[num_taken - 1]) < hit[0] <= len(texts[num_taken])
    assert 300 < num_stopped < 1700


@pytest.mark.parametrize("text", [*TEXTS, *SNIPPETS])
def test_text_as_library(real: Tokenizer, embedded_dir: Path, text: str) -> None:
    """The text is what the library makes of the same tokens; for sentencepiece behind the space
    that marks the start of a text, which a continuation keeps."""
    backend = tokenizers.Tokenizer.from_file(str(embedded_dir / "tokenizer.json"))
    for tokenizer, library in ((real, backend), (make(sentencepiece()), sentencepiece())):
        ids = library.encode(text).ids
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        for token_id in ids:
            detokenizer.push([token_id])
        shown, expected = detokenizer.finish(), library.decode(ids, skip_special_tokens=False)
        assert shown == expected or (library is not backend and shown == " " + expected)


# --- what the output continues ---


@pytest.mark.parametrize("text", ["€", "👍", "é", "\ufffd", "👩‍👩‍👧‍👦"])
def test_prompt_that_ends_in_half_a_character(letters: Tokenizer, text: str) -> None:
    """The character that an output completes is its own, wherever the prompt was cut; nothing else
    of the prompt is shown."""
    ids = letters.encode("prompt " + text + " more")
    for cut in range(1, len(ids)):
        prompt, output = ids[:cut], ids[cut:]
        detokenizer = Detokenizer(letters, prompt_token_ids=prompt)
        for token_id in output:
            detokenizer.push([token_id])
        data = letters.decode(prompt, skip_special_tokens=False)
        whole = ("prompt " + text + " more").encode()
        num_whole = len(whole[:cut].decode("utf-8", "ignore"))
        assert detokenizer.finish() == ("prompt " + text + " more")[num_whole:]
        assert data.startswith(("prompt " + text)[:num_whole])


@pytest.mark.parametrize(
    ("prompt", "output", "shown"),
    [
        (b"a\xe2", b"b", "b"),  # something else comes: the prompt's byte is not shown
        (b"a\xe2", b"\x82b", "\ufffdb"),  # one byte more, then something else: that one is shown
        (b"a\xe2\x82", b"\xac", "€"),
        (b"a\xe2\x82", b"", ""),
        (b"a\xe2\x82", b"\xff", "\ufffd"),
        (b"a\xe2\x82", b"\xe2\x82\xac", "€"),
        (b"a\xed", b"\xa0", "\ufffd"),  # the start of a surrogate: no character goes on like this
        (b"\x82\xac", b"\xac", "\ufffd"),
        (b"a", b"\x82\xac", "\ufffd\ufffd"),
    ],
)
def test_half_characters_meet(letters: Tokenizer, prompt: bytes, output: bytes, shown: str) -> None:
    """Bytes of the prompt are shown only in a character that the output completes."""
    ids = byte_ids(letters)
    prompt_ids, output_ids = ([ids[bytes([b])] for b in data] for data in (prompt, output))
    detokenizer = Detokenizer(letters, prompt_token_ids=prompt_ids, stop=["zz"])
    assert detokenizer.push(output_ids) == Pushed(len(output), None)
    assert detokenizer.finish() == shown
    assert detokenizer.finish() == shown


def test_special_token_behind_half_a_character() -> None:
    """A special token is looked through where it is skipped, and parts halves where it shows."""
    tokenizer = make(byte_level(specials=["<|end|>"]))
    first, second = tokenizer.encode("é")
    [special] = tokenizer.encode("<|end|>")
    for skip, shown in ((True, "é"), (False, "\ufffd")):
        detokenizer = Detokenizer(
            tokenizer, prompt_token_ids=[first, special], skip_special_tokens=skip
        )
        detokenizer.push([second])
        assert detokenizer.finish() == shown


def test_no_text_without_detokenize(letters: Tokenizer) -> None:
    """Tokens are taken, and there is no text."""
    detokenizer = Detokenizer(letters, detokenize=False)
    assert detokenizer.push(letters.encode("abc")) == Pushed(3, None)
    assert detokenizer.finish() == detokenizer.text == ""


def test_id_outside_the_vocabulary(letters: Tokenizer) -> None:
    """An id that stands for nothing is refused by name."""
    with pytest.raises(TokenIdError, match="token_ids must be in"):
        Detokenizer(letters).push([10**6])


# --- stop strings ---

MERGES = [("a", "b"), ("b", "a"), ("a", "ab"), ("b", "ab"), ("b", "©"), ("a", "Ã"), ("ba", "ab")]
VOCABULARY = byte_level(MERGES, ["<stop>"]).get_vocab()
# "Ã" and "©" are the two bytes of é.
TOKENS = ["Ġ", "a", "b", "ab", "ba", "aab", "bab", "baab", "Ã", "©", "b©", "aÃ", "<stop>"]


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return make(byte_level(MERGES, ["<stop>"]))


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The rule, read aloud: grow the text until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


def texts_after(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    """All text without half characters: of no token, of one, ..."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [""]
    for token_id in ids:
        hidden = skip and token_id in tokenizer.special_ids
        data = b"" if hidden else tokenizer.token_bytes(token_id)
        texts.append(texts[-1] + decoder.decode(data))
    return texts


@given(data=st.data(), include=st.booleans(), skip=st.booleans())
def test_stops_as_searched_in_the_whole(
    small: Tokenizer, data: st.DataObject, include: bool, skip: bool
) -> None:
    """A stop ends the text, at the token, where a search of every prefix of the text finds it."""
    ids = [VOCABULARY[token] for token in data.draw(st.lists(st.sampled_from(TOKENS), max_size=30))]
    stops = data.draw(st.lists(st.text("abé\ufffd<", min_size=1, max_size=5), max_size=4))
    texts = texts_after(small, ids, skip)
    hit = first_stop(texts[-1], stops)
    if hit is None:
        final, stop, num_tokens = small.decode(ids, skip_special_tokens=skip), None, len(ids)
    else:
        end, stop = hit
        final = texts[-1][: end if include else end - len(stop)]
        num_tokens = next(i for i, text in enumerate(texts) if len(text) >= end)

    detokenizer = Detokenizer(small, stop=stops, skip_special_tokens=skip, include_stop_str=include)
    hold_len = max(map(len, stops), default=1) - 1
    num_pushed = 0
    for chunk in data.draw(chunked_ids(ids)):
        left = max(0, num_tokens - num_pushed)
        num_pushed += len(chunk)
        if stop is not None and num_pushed >= num_tokens:
            assert detokenizer.push(chunk) == Pushed(left, stop)
            assert detokenizer.text == final
        else:
            assert detokenizer.push(chunk) == Pushed(len(chunk), None)
            shown_len = max(0, len(texts[num_pushed]) - hold_len)
            assert detokenizer.text == texts[-1][:shown_len]
    assert detokenizer.finish() == final


@pytest.mark.parametrize(
    ("stops", "tokens", "expected", "shown"),
    [
        (["ab"], ["a", "ba"], Pushed(2, "ab"), ""),  # from the first token into the second
        (["a"], ["baab", "a"], Pushed(1, "a"), "b"),  # in the middle of a token
        (["abab", "ba"], ["ab", "ab", "b"], Pushed(2, "ba"), "a"),  # complete first, began later
        (["ba", "aba"], ["a", "ba"], Pushed(2, "ba"), "a"),  # complete together: list order
        (["aba", "ba"], ["a", "ba"], Pushed(2, "aba"), ""),
        (["abb"], ["ab", "ab", "b"], Pushed(3, "abb"), "ab"),  # behind a false start
        (["é"], ["aÃ", "b©"], Pushed(2, None), "a\ufffdb\ufffd"),  # the halves do not meet
        (["éb"], ["aÃ", "©", "b"], Pushed(3, "éb"), "a"),
    ],
)
def test_stop_examples(
    small: Tokenizer, stops: list[str], tokens: list[str], expected: Pushed, shown: str
) -> None:
    """The stop string that is complete first ends the text where it starts."""
    detokenizer = Detokenizer(small, stop=stops)
    assert detokenizer.push([VOCABULARY[token] for token in tokens]) == expected
    assert detokenizer.finish() == shown


def test_hold_back(small: Tokenizer) -> None:
    """The longest stop string less one character is held back, and shown at the end."""
    detokenizer = Detokenizer(small, stop=["####", "b"])
    detokenizer.push(small.encode("aaaaa#"))
    assert detokenizer.text == "aaa"
    assert detokenizer.finish() == "aaaaa#"


def test_nothing_after_a_stop(small: Tokenizer) -> None:
    """Once a stop string was found, no token is taken and no text is added."""
    detokenizer = Detokenizer(small, stop=["b"], include_stop_str=True)
    a, b = VOCABULARY["a"], VOCABULARY["b"]
    assert detokenizer.push([a, b, a, b]) == Pushed(2, "b")
    assert detokenizer.push([a]) == Pushed(0, "b")
    assert detokenizer.finish() == detokenizer.text == "ab"


def test_hidden_tokens_are_no_text(small: Tokenizer) -> None:
    """A stop string cannot match the name of a skipped special token, only one that is shown."""
    a, special, b = VOCABULARY["a"], VOCABULARY["<stop>"], VOCABULARY["b"]
    skipped = Detokenizer(small, stop=["<stop>", "top>b"])
    assert skipped.push([a, special, b]) == Pushed(3, None)
    assert skipped.finish() == "ab"
    kept = Detokenizer(small, stop=["<stop>"], skip_special_tokens=False)
    assert kept.push([a, special, b]) == Pushed(2, "<stop>")
    assert kept.finish() == "a"


@given(data=st.data(), min_tokens=st.integers(0, 8))
def test_min_tokens(small: Tokenizer, data: st.DataObject, min_tokens: int) -> None:
    """A stop string that ends within the first tokens does not count; one that ends later does,
    wherever it begins."""
    ids = [VOCABULARY[token] for token in data.draw(st.lists(st.sampled_from(TOKENS), max_size=30))]
    stops = data.draw(st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3))
    texts = texts_after(small, ids, skip=True)
    num_early = len(texts[min(min_tokens, len(ids))])
    ends = range(num_early + 1, len(texts[-1]) + 1)
    hits = [(end, stop) for end in ends for stop in stops if texts[-1][:end].endswith(stop)]
    final, expected = small.decode(ids), None
    if hits:
        end, expected = hits[0]
        final = texts[-1][: end - len(expected)]
    detokenizer = Detokenizer(small, stop=stops, min_tokens=min_tokens)
    for chunk in data.draw(chunked_ids(ids)):
        stop = detokenizer.push(chunk).stop
        assert final.startswith(detokenizer.text)
        if stop is not None:
            break
    assert detokenizer.finish() == final
    assert detokenizer.push([]).stop == expected


# --- stop patterns ---

ATOMS = ["a", "b", "é", ".", "[ab]", "[^a]", r"\w", r"\W", " ", "ab", "aba", "^", "$", r"\Z"]
ATOMS += [r"\b", r"\B", r" \b", r"\ba", "(?<=a)", "(?<!b)", "(?<=a.)", "(?=b)", "(?!a)", r"(?=a\b)"]
ATOMS += ["(?:a|ab)", "(?>a|ab)", "(?i:A)", r"(a)\1", "(?m:^a)", r"(?:a|\b )"]


def combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    quantifiers = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "*?", "+?", "??", "*+"])
    return (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map("|".join)
        | st.tuples(inner, quantifiers).map(lambda pair: f"(?:{pair[0]}){pair[1]}")
    )


PATTERNS = st.recursive(st.sampled_from(ATOMS), combine, max_leaves=4)


def usable(pattern: str) -> bool:
    ends = any(end in pattern for end in ("$", r"\b", r"\B", r"\Z"))
    if ends and any(negative in pattern for negative in ("(?!", "(?<!")):
        return False
    try:
        return regex.search(at_the_end(pattern), "") is None
    except regex.error:
        return False


def at_the_end(pattern: str) -> str:
    r"""The pattern with \b and \B holding at the end of the text."""
    return pattern.replace(r"\b", r"(?:\b|\Z)").replace(r"\B", r"(?:\B|\Z)")


def grow_and_search(
    texts: list[str], patterns: list[str], stops: list[str], min_tokens: int
) -> tuple[int, int, int, str] | None:
    """The rule, read aloud: grow the text by one character, and search all of it, plainly."""
    text, passed = texts[-1], [0] * len(patterns)
    for end in range(1, len(text) + 1):
        num_tokens = next(i for i, before in enumerate(texts) if len(before) >= end)
        counts = num_tokens > min_tokens
        for stop in stops if counts else ():
            if text[:end].endswith(stop):
                return end, end - len(stop), end, stop
        for i, pattern in enumerate(patterns):
            found = regex.search(at_the_end(pattern), text[:end], pos=passed[i])
            if found is not None and counts:
                return end, found.start(), found.end(), pattern
            if found is not None:
                passed[i] = max(end, found.start() + 1)
    return None


@given(data=st.data(), include=st.booleans(), min_tokens=st.sampled_from([0, 0, 1, 3]))
def test_patterns_as_searched_in_the_growing_text(
    small: Tokenizer, data: st.DataObject, include: bool, min_tokens: int
) -> None:
    """A pattern ends the text where a search of each longer text first finds it, at the same token
    however they are pushed; and nothing is shown that is cut away later."""
    ids = [VOCABULARY[token] for token in data.draw(st.lists(st.sampled_from(TOKENS), max_size=30))]
    patterns = list(filter(usable, data.draw(st.lists(PATTERNS, min_size=1, max_size=2))))
    stops = data.draw(st.lists(st.text("abé", min_size=2, max_size=4), max_size=1))
    texts = texts_after(small, ids, skip=True)
    hit = grow_and_search(texts, patterns, stops, min_tokens)
    final, expected, num_tokens = small.decode(ids), None, len(ids)
    if hit is not None:
        end, start, match_end, expected = hit
        final = texts[-1][: match_end if include else start]
        num_tokens = next(i for i, before in enumerate(texts) if len(before) >= end)
    detokenizer = Detokenizer(
        small, stop=stops, stop_regex=patterns, min_tokens=min_tokens, include_stop_str=include
    )
    num_taken = 0
    for chunk in data.draw(chunked_ids(ids)):
        pushed = detokenizer.push(chunk)
        num_taken += pushed.num_tokens
        assert final.startswith(detokenizer.text)
        if pushed.stop is not None:
            break
    assert detokenizer.finish() == final
    assert detokenizer.push([]).stop == expected
    assert num_taken == num_tokens


@pytest.mark.parametrize(
    ("pattern", "text", "final", "num_tokens"),
    [
        (r"\d+", "ab12", "ab", 3),  # does not wait for more
        (r"\d{2,}", "a12", "a", 3),
        (r"\n\n", "a\n\nb", "a", 3),
        (r"(?i)the end", "x The End.", "x ", 9),
        (r"END$", "END", "", 3),  # the end of what has come
        (r"(?<=a)b", "aab", "aa", 3),
        (r"\s\bEND\b", "an END.", "an", 6),
        (r"\bEND\b", "BEND END", "BEND ", 8),
        (r"[.]\bx", ".x", "", 2),
        (r"a\Bb", "a ab", "a ", 4),
        (r"[\b]|\\b", "a\\b", "a", 3),
        (r"(?P<x>a|b)(?P=x)", "abb", "a", 3),
        (r"a(?=bc)", "abcd", "", 3),
        (r"<x>.*?</x>", "a<x>b</x>c", "a", 9),
        (r"\p{Lu}\p{Ll}", "aBc", "a", 3),
    ],
)
def test_pattern_examples(
    letters: Tokenizer, pattern: str, text: str, final: str, num_tokens: int
) -> None:
    """The text ends at the first character with which a search finds the pattern."""
    detokenizer = Detokenizer(letters, stop_regex=[pattern])
    assert detokenizer.push(letters.encode(text)) == Pushed(num_tokens, pattern)
    assert detokenizer.finish() == final


def test_patterns_hold_back_what_could_start_a_match(letters: Tokenizer) -> None:
    """Text is shown as soon as no match can begin in it, and what was held comes at the end."""
    detokenizer = Detokenizer(letters, stop_regex=["<[a-z]+>"])
    shown = []
    for token_id in letters.encode("1 < 2 <ab 3 <a"):
        detokenizer.push([token_id])
        shown.append(detokenizer.text)
    assert shown[:4] == ["1", "1 ", "1 ", "1 < "]
    assert shown[8:10] == ["1 < 2 ", "1 < 2 <ab "]
    assert shown[-1] == "1 < 2 <ab 3 "
    assert detokenizer.finish() == "1 < 2 <ab 3 <a"


def test_patterns_passed_over(letters: Tokenizer) -> None:
    """A match within the first tokens is part of the text, and of no later match."""
    detokenizer = Detokenizer(letters, stop_regex=["aa"], min_tokens=3)
    assert detokenizer.push(letters.encode("aaaaaa")) == Pushed(4, "aa")
    assert detokenizer.finish() == "aa"


@pytest.mark.parametrize(
    ("patterns", "rule"),
    [
        (["("], "must be a regular expression"),
        ([r"\p{Klingon}"], "must be a regular expression"),
        (["a{2}{3}"], "must be a regular expression"),
        ([r"a\Kb"], "must not use"),
        ([r"\\\\\Gb"], "must not use"),
        (["a*"], "must not match the empty text"),
        (["x", "$"], "must not match the empty text"),
        ([r"\b"], "must not match the empty text"),
        (["(?r)ab"], "must have no flags but"),
        (["(?x)a {10 00}"], "must have no flags but"),
        (["(?ix:a)"], "must have no flags but"),
        (["a(?w:b)"], "must have no flags but"),
        (["(?:ab){e<=1}"], "must not match approximately"),
        (["(?:abc){1<=e<=2}"], "must not match approximately"),
        ([r"a(?!b$)b"], "must not use"),
        ([r"a(?<!\b)"], "must not use"),
        ([r"a\X"], "must not use"),
        (["a" * 501], "must be at most 500 characters in all"),
        (["a" * 251, "b" * 250], "must be at most 500 characters in all"),
        (["a{1000000000}"], "must not be longer than 10000"),
        (["((a{100}){100}){100}"], "must not be longer than 10000"),
        (["(?:" + "a" * 100 + "){1000,}"], "must not be longer than 10000"),
    ],
)
def test_patterns_that_are_refused(letters: Tokenizer, patterns: list[str], rule: str) -> None:
    """A pattern that is none, or could not be used safely, is refused by name at once."""
    started = time.perf_counter()
    with pytest.raises(RequestError, match=f"^stop_regex {rule}"):
        Detokenizer(letters, stop_regex=patterns)
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:a|aa)+$b",
        r"(?:a*)*b\Z",
        r"(?:a+a+)+b",
        r"(a?){30}a{30}b",
        r"(?=(a+))\1*\1b",
        r"(?:.*.*.*)=b",
        r"(?:(?R)|a)*b",
        "(?i)" + "ß" * 450,
    ],
)
def test_catastrophic_patterns_end(letters: Tokenizer, pattern: str) -> None:
    """A pattern that takes too long raises, or keeps to its time: the whole output costs little
    more than the budget at once and per token."""
    detokenizer = Detokenizer(letters, stop_regex=[pattern])
    [a] = letters.encode("a")
    num_tokens, longest_s = 3000, 0.0
    started = time.thread_time()
    with contextlib.suppress(RequestError):
        for _ in range(num_tokens):
            before = time.thread_time()
            detokenizer.push([a])
            longest_s = max(longest_s, time.thread_time() - before)
    assert longest_s < 0.5  # 0.05 s, and what one step inside the library takes
    assert time.thread_time() - started < 3


def test_pattern_that_takes_too_long(letters: Tokenizer) -> None:
    """The error names the field and the pattern, and other patterns go on."""
    [a] = letters.encode("a")
    pattern = "(?:a|aa)+$b"
    with pytest.raises(RequestError, match=r"^stop_regex must not take so long") as caught:
        Detokenizer(letters, stop_regex=["x", pattern]).push([a] * 100)
    assert (caught.value.field, caught.value.value) == ("stop_regex", pattern)
    assert Detokenizer(letters, stop_regex=["a$"]).push([a]) == Pushed(1, "a$")


MEMORY = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from minivllm.detokenizer import Detokenizer
from minivllm.errors import RequestError
class Letters:
    special_ids = frozenset()
    def token_bytes(self, token_id):
        return b"a"
for pattern in [
    "a{999999999}b", "((a{99}){99}){99}b", "(?:a{9}){1000}", "(?:[a-z]|\\d{5}){150}",
    "(?:(?R)|a)*b",
    "((((a*)*)*)*)*b", "(?:" + "a|" * 225 + "a){20}b", "(a|b|(?1))*c",
]:
    try:
        Detokenizer(Letters(), stop_regex=[pattern]).push([0] * 2000)
    except RequestError:
        pass
# not ru_maxrss, which begins with the size of the process that started this one
print(int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) >> 10)
"""


def test_patterns_keep_to_their_memory() -> None:
    """No pattern that is taken makes the library write out or remember gigabytes."""
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 500
