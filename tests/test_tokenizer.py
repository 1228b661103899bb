from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import TEXTS, byte_level, make, save, sentencepiece
from tokenizers import decoders, pre_tokenizers, processors

from minivllm.errors import ModelError, RequestError, TokenIdError
from minivllm.tokenizer import Tokenizer


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


@pytest.mark.parametrize("spaces", [True, False])
def test_no_spaces_between_special_tokens(real: Tokenizer, oracle: Any, spaces: bool) -> None:
    """Special tokens that are kept stand side by side in both families, as transformers writes them
    whatever it is told about spaces; skipped ones leave nothing."""
    from transformers import PreTrainedTokenizerFast

    library = PreTrainedTokenizerFast(tokenizer_object=sentencepiece())
    for tokenizer, theirs, text in (
        (real, oracle, "<|im_start|><|im_end|>a<|im_end|> b"),
        (make(sentencepiece()), library, "<s></s>a</s> b"),
    ):
        ids = tokenizer.encode(text)
        for skip in (True, False):
            options = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
            ours = tokenizer.decode(ids, skip_special_tokens=skip)
            assert ours.removeprefix(" ") == theirs.decode(ids, **options)


# --- spellings ---


def all_spellings(tokenizer: Tokenizer, data: bytes) -> set[tuple[int, ...]]:
    """Every sequence of ordinary tokens whose bytes are `data`, tried one by one."""
    if not data:
        return {()}
    found = set()
    for token_id in range(len(tokenizer)):
        token = tokenizer.token_bytes(token_id)
        if token_id not in tokenizer.special_ids and token and data.startswith(token):
            rests = all_spellings(tokenizer, data[len(token) :])
            found |= {(token_id, *rest) for rest in rests}
    return found


def paths(edges: list[tuple[int, int, int]], end: int) -> tuple[set[tuple[int, ...]], set[Any]]:
    """Every path through the graph as its tokens, and the edges that they use."""
    found, used = set(), set()
    todo: list[tuple[int, tuple[Any, ...]]] = [(0, ())]
    while todo:
        at, walked = todo.pop()
        if at == end:
            found.add(tuple(token_id for _, token_id, _ in walked))
            used.update(walked)
        todo += [(edge[2], (*walked, edge)) for edge in edges if edge[0] == at]
    return found, used


@pytest.mark.parametrize("family", ["byte-level", "sentencepiece"])
def test_spellings_are_all_and_no_others(family: str) -> None:
    """The paths of the graph are the sequences that trying every token finds; no edge is idle."""
    if family == "byte-level":
        merges = [("a", "b"), ("ab", "a"), ("b", "a"), ("Ġ", "a"), ("Ã", "©"), ("a", "Ã")]
        tokenizer, texts = make(byte_level(merges, ["aba"])), "ab é"
    else:
        tokenizer, texts = make(sentencepiece()), "ain é"
    for length in range(5):
        for letters in itertools.product(texts, repeat=length):
            text = "".join(letters)
            edges = tokenizer.spellings(text)
            assert edges == sorted(set(edges))
            found, used = paths(edges, len(text.encode()))
            assert found == all_spellings(tokenizer, text.encode())
            assert used == set(edges)


def test_spellings_of_what_cannot_be_written(real: Tokenizer) -> None:
    """A text with a byte that no token holds has no spelling; what is not text is refused."""
    assert real.spellings("") == []
    missing = next(byte for byte in range(128) if not real.spellings(chr(byte)))
    assert real.spellings(f"a{chr(missing)}b") == []
    with pytest.raises(RequestError, match="text must be valid Unicode"):
        real.spellings("a\ud800")


def test_real_spellings(real: Tokenizer) -> None:
    """What the model's own encoding of a word does is among the spellings of the word."""
    for text in (" Paris", "Paris", "日本語", " antidisestablishmentarianism" * 20):
        edges, at = set(real.spellings(text)), 0
        for token_id in real.encode(text):
            end = at + len(real.token_bytes(token_id))
            assert (at, token_id, end) in edges
            at = end


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


# --- other files ---


def test_vocabulary_and_merges(tmp_path: Path, embedded_dir: Path, real: Tokenizer) -> None:
    """A model that keeps its vocabulary and its merges apart is read through transformers, in a
    process of its own."""
    model = json.loads((embedded_dir / "tokenizer.json").read_text())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50000}))

    code = f"""
import sys, json
from pathlib import Path
from minivllm.tokenizer import Tokenizer
tokenizer = Tokenizer.from_dir(Path({str(tmp_path)!r}))
ids = [tokenizer.encode(text) for text in {TEXTS!r}]
print(json.dumps([ids, tokenizer.eos_id, len(tokenizer), "transformers" in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    ids, eos_id, size, loaded = json.loads(done.stdout)
    assert (eos_id, size, loaded) == (real.eos_id, 50000, False)
    assert [real.decode(row) for row in ids] == [real.decode(real.encode(text)) for text in TEXTS]


def test_sentencepiece_model(tmp_path: Path) -> None:
    """A sentencepiece model gives the pieces that its own library gives, behind BOS."""
    import sentencepiece

    lines = ["The capital of France is Paris.", "Once upon a time there was a king", "Água fria"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 10),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=330,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    slow = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in ("The king of France", "Água, 日本 👍"):
        ids = tokenizer.encode(text)
        assert ids == [tokenizer.bos_id, *slow.encode(text)]
        assert tokenizer.decode(ids) == " " + text


def test_files_that_cannot_be_converted(tmp_path: Path, embedded_dir: Path) -> None:
    """Files that transformers cannot convert are refused with what to do about it."""
    shutil.copy(embedded_dir / "config.json", tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"cannot be converted .*save_pretrained"):
        Tokenizer.from_dir(tmp_path)


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
