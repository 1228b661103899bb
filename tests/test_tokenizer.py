from __future__ import annotations

import codecs
import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from minivllm.errors import ModelError, RequestError, TokenIdError
from minivllm.tokenizer import Detokenizer, Pushed, Tokenizer

TEXTS = [
    "The capital of France is Paris.\n\n\tdef f(x):  return x ** 2",
    "👩‍👩‍👧‍👦 family, 👍🏽 skin, 🇫🇷 flag, 1️⃣ keycap",
    "e\u0301 a\u0308\u0323 n\u0303 combining, Z\u0351\u036b\u0343 more",
    "日本語のテキスト、한국어 텍스트 和中文",
    "שלום עולם \u202bمرحبا بالعالم\u202c",
    "\x00 control \x7f, \u00a0no-break, \ufeffmark, \ufffd itself, \U0010ffff last",
]

CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": " Ça va ? \n"}],
    [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "one, two"},
        {"role": "user", "content": "日本"},
        {"role": "assistant", "content": "three, "},
    ],
]


# --- vocabularies ---


def byte_level(
    merges: Sequence[tuple[str, str]] = (), specials: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """Every byte is a token, and so is each merge; the special tokens come last."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges))
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """A few letters and pieces; every other character is written in byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefgin", "▁a", "in", "▁▁"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("▁", "a"), ("i", "n"), ("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def make(backend: tokenizers.Tokenizer, template: str | None = None, **options: Any) -> Tokenizer:
    templates = {} if template is None else {"default": template}
    return Tokenizer(backend, **{"named_tokens": {}, "templates": templates} | options)


def save(path: Path, backend: tokenizers.Tokenizer, **files: Any) -> Path:
    """A model's directory; `files` are JSON by name."""
    backend.save(str(path / "tokenizer.json"))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


@pytest.fixture(scope="module")
def real(embedded_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(embedded_dir)


@pytest.fixture(scope="module")
def real_backend(embedded_dir: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(embedded_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def oracle(embedded_dir: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(embedded_dir)


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    return make(byte_level())


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    return make(sentencepiece())


# --- encode and decode ---


@given(st.text())
def test_decode_undoes_encode(letters: Tokenizer, text: str) -> None:
    """Any text comes back unchanged from the tokens of a vocabulary that has every byte."""
    assert letters.decode(letters.encode(text)) == text


@given(st.text() | st.sampled_from(TEXTS))
def test_real_text_as_library(
    real: Tokenizer, real_backend: tokenizers.Tokenizer, text: str
) -> None:
    """Ids and text are the library's, also where the model's vocabulary lacks a byte."""
    ids = real.encode(text)
    assert ids == real_backend.encode(text).ids
    assert real.decode(ids) == real_backend.decode(ids)


@given(st.text(min_size=1).filter(lambda text: "▁" not in text))
def test_sentencepiece_keeps_first_space(pieces: Tokenizer, text: str) -> None:
    """Sentencepiece tokens give the text back behind the space that marks its start."""
    assert pieces.decode(pieces.encode(text), skip_special_tokens=False) == " " + text


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_text_as_library(pieces: Tokenizer, text: str) -> None:
    """Ids and text are the library's, but for the first space, which it removes."""
    backend = sentencepiece()
    ids = pieces.encode(text)
    assert ids == backend.encode(text).ids
    assert pieces.decode(ids) == " " + backend.decode(ids)


def test_every_byte_has_a_token(letters: Tokenizer) -> None:
    """The 256 letters of a byte-level vocabulary are the 256 bytes."""
    assert sorted(map(letters.token_bytes, range(256))) == [bytes([i]) for i in range(256)]


def test_added_tokens_are_text() -> None:
    """An added token is its own text, though its letters may stand for bytes elsewhere."""
    backend = byte_level(specials=["<｜fin▁é｜>"])
    backend.add_tokens(["Ġé"])
    tokenizer = make(backend)
    ids = tokenizer.encode("Ġé<｜fin▁é｜>")
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["Ġé", "<｜fin▁é｜>"]
    assert tokenizer.decode(ids) == "Ġé"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "Ġé<｜fin▁é｜>"


def test_sentencepiece_bytes(pieces: Tokenizer) -> None:
    """Pieces write a space as ▁ and a byte by its number."""
    assert pieces.token_bytes(3 + 0xE2) == b"\xe2"
    assert [pieces.token_text(token_id) for token_id in pieces.encode("in a")] == [" ", "in", " a"]


def test_bytes_by_number_need_byte_fallback() -> None:
    """A token that looks like a byte is text where the decoder has no byte fallback."""
    backend = sentencepiece()
    backend.decoder = decoders.Metaspace()
    assert make(backend).token_bytes(3 + 0xE2) == b"<0xE2>"


def test_half_a_character(real: Tokenizer) -> None:
    """A token that holds part of a character shows as U+FFFD on its own, and whole in a text."""
    ids = real.encode("𓂀")
    assert len(ids) > 1
    assert all("\ufffd" in real.token_text(token_id) for token_id in ids)
    assert real.decode(ids) == "𓂀"


def test_id_outside_the_vocabulary(pieces: Tokenizer) -> None:
    """An id that is negative or too large is refused by name, wherever it is used."""
    for token_id in (-1, len(pieces)):
        for use in (pieces.token_bytes, pieces.token_text, lambda i: pieces.decode([0, i])):
            with pytest.raises(TokenIdError, match=f"token_ids must be in .* got {token_id}"):
                use(token_id)


@pytest.mark.parametrize("config", [{"vocab_size": 300}, {"text_config": {"vocab_size": 300}}])
def test_ids_without_a_token(tmp_path: Path, config: dict[str, Any]) -> None:
    """An id that the model has and the tokenizer has not is no text."""
    tokenizer = Tokenizer.from_dir(save(tmp_path, byte_level(), config=config))
    assert len(tokenizer) == tokenizer.vocab_size == 300
    assert tokenizer.token_bytes(299) == b""
    assert tokenizer.decode([299, *tokenizer.encode("a"), 256]) == "a"


def test_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    """Tokens beyond the model's vocabulary keep their text."""
    tokenizer = Tokenizer.from_dir(save(tmp_path, byte_level(), config={"vocab_size": 10}))
    assert len(tokenizer) == 256


@pytest.mark.parametrize("text", ["a\ud800", None])
def test_what_is_not_text(real: Tokenizer, text: Any) -> None:
    """A lone surrogate, which JSON can carry, is refused as the sender's mistake."""
    with pytest.raises(RequestError, match="prompt must be valid Unicode"):
        real.encode(text)


def test_encode_in_threads(real: Tokenizer) -> None:
    """Texts encoded at the same time get the tokens that they get one by one."""
    texts = [text * 20 for text in TEXTS] * 10
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(real.encode, texts)) == [real.encode(text) for text in texts]


def test_long_text_is_whole() -> None:
    """Truncation and padding that a file carries are turned off."""
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    assert make(backend).decode(make(backend).encode("abcdefgh")) == "abcdefgh"


# --- special tokens ---


def test_real_special_tokens(real: Tokenizer, oracle: Any) -> None:
    """The model's special tokens are those that transformers sees."""
    assert real.special_ids >= set(oracle.all_special_ids)
    assert (real.bos_id, real.eos_id) == (oracle.bos_token_id, oracle.eos_token_id)


def test_special_tokens_named_only_in_settings(tmp_path: Path) -> None:
    """A token of the vocabulary, the first one too, is special because a settings file says so."""
    first = sorted(pre_tokenizers.ByteLevel.alphabet())[0]
    path = save(
        tmp_path,
        byte_level([("<", "s"), ("<s", ">"), ("<", "/")]),
        tokenizer_config={
            "bos_token": {"content": "<s>", "lstrip": False},
            "eos_token": None,
            "pad_token": "<none>",
            "extra_special_tokens": {"image_token": "</"},
        },
        special_tokens_map={"eos_token": first, "bos_token": "a"},
    )
    tokenizer = Tokenizer.from_dir(path)
    vocab = byte_level([("<", "s"), ("<s", ">"), ("<", "/")]).get_vocab()
    assert (tokenizer.bos_id, tokenizer.eos_id) == (vocab["<s>"], 0)
    assert tokenizer.special_ids == {vocab["<s>"], 0, vocab["</"]}
    assert tokenizer.encode("b<s>") == [vocab["b"], vocab["<s>"]]
    assert len(tokenizer) == len(vocab)


def test_no_special_tokens(letters: Tokenizer) -> None:
    """A vocabulary without special tokens has no ids for them."""
    assert (letters.bos_id, letters.eos_id, letters.special_ids) == (None, None, frozenset())


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("setting", [True, False, None])
def test_add_bos_token(in_file: bool, setting: bool | None) -> None:
    """`add_bos_token` decides whether a prompt begins with BOS, else `tokenizer.json` does."""
    backend = byte_level(specials=["<s>", "</s>"])
    bos, eos = backend.token_to_id("<s>"), backend.token_to_id("</s>")
    if in_file:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", eos)]
        )
    tokenizer = make(backend, named_tokens={"bos_token": "<s>"}, add_bos_token=setting)
    a = backend.token_to_id("a")
    expected = [bos] if setting or (setting is None and in_file) else []
    expected += [a, eos] if in_file else [a]
    assert tokenizer.encode("a") == expected
    assert tokenizer.encode("a", add_special_tokens=False) == [a]
    assert tokenizer.encode("<s>a", add_special_tokens=False) == [bos, a]


# --- files that cannot be used ---


def test_missing_tokenizer_json(tmp_path: Path) -> None:
    """A directory without tokenizer.json is refused with the name of the file."""
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", '{"version": ', r"tokenizer\.json cannot be read"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not JSON"),
        ("special_tokens_map.json", "[]", r"special_tokens_map\.json must hold an object"),
        ("tokenizer_config.json", '{"bos_token": {"text": "a"}}', "unknown form.*content"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', "unknown form.*template"),
        ("chat_template.jinja", "a\n{% if %}", "chat template 'default', line 2"),
    ],
)
def test_damaged_file(tmp_path: Path, name: str, text: str, message: str) -> None:
    """A file that is damaged, or of an unknown form, is refused with its name or its fault."""
    save(tmp_path, byte_level())
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (None, "no decoder"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]), "Replace"),
        (decoders.Fuse(), "Fuse"),
    ],
)
def test_unknown_decoder(tmp_path: Path, decoder: Any, message: str) -> None:
    """A vocabulary that writes bytes in an unknown way is refused with the decoder's name."""
    backend = byte_level()
    settings = json.loads(backend.to_str())
    settings["decoder"] = None if decoder is None else json.loads(decoder.__getstate__())
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_dir(tmp_path)


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
    detokenizer = Detokenizer(tokenizer, stop=[], skip_special_tokens=skip)
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
    detokenizer = Detokenizer(real, stop=[])
    ids = real.encode("𓂀")
    for token_id in ids[:-1]:
        detokenizer.push([token_id])
        assert detokenizer.text == ""
    detokenizer.push(ids[-1:])
    assert detokenizer.text == "𓂀"


def test_incomplete_end(letters: Tokenizer) -> None:
    """A character cut off by the end of the output is one U+FFFD, shown only by `finish`."""
    detokenizer = Detokenizer(letters, stop=[])
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


# --- stop strings ---

MERGES = [("a", "b"), ("b", "a"), ("a", "ab"), ("b", "ab"), ("b", "©"), ("a", "Ã"), ("ba", "ab")]
VOCABULARY = byte_level(MERGES, ["<stop>"]).get_vocab()
# "Ã" and "©" are the two bytes of é.
TOKENS = ["a", "b", "ab", "ba", "aab", "bab", "baab", "Ã", "©", "b©", "aÃ", "<stop>"]


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
    ids = [VOCABULARY[token] for token in data.draw(st.lists(st.sampled_from(TOKENS)))]
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


# --- chat templates ---


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("mode", ["answer", "bare", "continue"])
def test_real_template(real: Tokenizer, oracle: Any, messages: Any, mode: str) -> None:
    """The model's chats are rendered as transformers renders them."""
    options = {
        "add_generation_prompt": mode == "answer",
        "continue_final_message": mode == "continue",
    }
    expected = oracle.apply_chat_template(messages, tokenize=False, **options)
    assert real.apply_chat_template(messages, **options) == expected
    ids = oracle.apply_chat_template(messages, return_dict=False, **options)
    assert real.encode(expected, add_special_tokens=False) == ids


RICH_TEMPLATE = """\
{{ bos_token }}
  {% if tools %}
{{ tools | tojson(indent=2) }}
  {% endif %}
{% set word = "outer" %}
{% for message in messages %}
    {%- if message.role == "skip" %}{% continue %}{% endif %}
    {# a comment #}
    {% generation %}
{% set word = "inner" %}
[{{ message.role }}|{{ message['content'] | tojson }}|{{ word }}]
    {% endgeneration %}
    {% if loop.index == 3 %}{% break %}{% endif %}
{% endfor %}
{{ word }} {{ strftime_now("%Y") | length }} {{ extra }} {{ documents is none }} {{ nothing }}
"""


def test_template_surroundings(oracle: Any) -> None:
    """Filters, functions, tags and whitespace are what transformers gives to templates."""
    messages = [{"role": role, "content": "<é> & 'x'"} for role in ("a", "skip", "b", "c")]
    tools = [{"type": "function", "function": {"name": "größe", "parameters": {}}}]
    tokenizer = make(byte_level(), RICH_TEMPLATE, named_tokens={"bos_token": oracle.bos_token})
    for given_tools in (tools, None):
        expected = oracle.apply_chat_template(
            messages,
            tokenize=False,
            chat_template=RICH_TEMPLATE,
            tools=given_tools,
            extra="more",
            add_generation_prompt=True,
        )
        assert "inner" in expected
        prompt = tokenizer.apply_chat_template(messages, tools=given_tools, extra="more")
        assert prompt == expected


STRIPPING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (STRIPPING, "So: "),
        (STRIPPING, "So:"),
        (PARTS, [{"type": "text", "text": "one "}, {"type": "text", "text": "two "}]),
    ],
)
def test_continue_final_message(oracle: Any, template: str, content: Any) -> None:
    """The prompt ends where the last message does, stripped only if the template strips."""
    before = json.dumps(
        [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    )
    messages = json.loads(before)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    prompt = make(byte_level(), template).apply_chat_template(messages, **options)
    assert json.dumps(messages) == before
    expected = oracle.apply_chat_template(
        messages, tokenize=False, chat_template=template, **options
    )
    assert prompt == expected
    assert prompt.endswith(("So:", "two "))


@pytest.mark.parametrize(
    ("messages", "template"),
    [
        ([], STRIPPING),
        ([{"role": "assistant"}], STRIPPING),
        ([{"role": "assistant", "content": None}], STRIPPING),
        ([{"role": "assistant", "content": [{"type": "image"}]}], PARTS),
        ([{"role": "assistant", "content": "hidden"}], "nothing"),
    ],
)
def test_nothing_to_continue(messages: Any, template: str) -> None:
    """A final message that has no text, or does not show, cannot be continued."""
    with pytest.raises(RequestError, match=r"^messages must end with"):
        make(byte_level(), template).apply_chat_template(
            messages, add_generation_prompt=False, continue_final_message=True
        )


def test_continue_or_answer(real: Tokenizer) -> None:
    """A chat either continues its last message or opens a new one."""
    with pytest.raises(RequestError, match=r"^continue_final_message cannot be combined"):
        real.apply_chat_template(CHATS[0], continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[0].content + none }}", "NoneType"),
        ("{{ messages[9].content }}", "has no element 9"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_template_refuses(template: str, message: str) -> None:
    """What a template objects to, or stumbles over, is the sender's error in its words."""
    with pytest.raises(RequestError, match=f"^messages do not fit .*{message}"):
        make(byte_level(), template).apply_chat_template(CHATS[0])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% for i in range(1000000000) %}{% endfor %}",
    ],
)
def test_sandbox(template: str) -> None:
    """A template that reaches for Python's insides, changes the messages or never ends fails."""
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(RequestError, match=r"^messages do not fit"):
        make(byte_level(), template).apply_chat_template(messages)
    assert messages == [{"role": "user", "content": "Hi"}]


def test_no_template() -> None:
    """A model without a chat template refuses chats, naming `chat_template`."""
    with pytest.raises(RequestError) as caught:
        make(byte_level()).apply_chat_template(CHATS[0])
    assert caught.value.field == "chat_template"


def test_templates_from_files(tmp_path: Path) -> None:
    """Templates in files of their own replace those in the settings; tools choose `tool_use`."""
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    save(tmp_path, byte_level(), tokenizer_config={"chat_template": "single"})
    assert Tokenizer.from_dir(tmp_path).apply_chat_template([], tools=[]) == "single"

    save(tmp_path, byte_level(), tokenizer_config={"chat_template": named})
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[]) == "tools"

    (tmp_path / "chat_template.jinja").write_text("file é", encoding="utf-8")
    assert Tokenizer.from_dir(tmp_path).apply_chat_template([], tools=[]) == "file é"

    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file for tools")
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.apply_chat_template([]) == "file é"
    assert tokenizer.apply_chat_template([], tools=[]) == "file for tools"
