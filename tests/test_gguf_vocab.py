from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import (
    BYTE_LEVEL,
    SPECIALS,
    convert,
    embedded_gguf,
    read_json,
    sentencepiece,
    write_gguf,
)

from minivllm.errors import CorruptFileError, ModelError
from minivllm.gguf_file import read_gguf
from minivllm.gguf_vocab import read_vocabulary
from minivllm.tokenizer import Tokenizer


def backend_of(tmp_path: Path, **kwargs: Any) -> tokenizers.Tokenizer:
    """Write a model and read its vocabulary."""
    write_gguf(tmp_path / "tiny.gguf", **kwargs)
    return read_vocabulary(read_gguf(tmp_path / "tiny.gguf")).tokenizer


def test_ends_of_turns_end_generations(tmp_path: Path) -> None:
    """An end-of-turn token is an end of generation beside the end-of-text token."""
    write_gguf(tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.eot_token_id": 7})
    generation = read_vocabulary(read_gguf(tmp_path / "tiny.gguf")).generation_config
    assert generation["eos_token_id"] == [2, 7]
    assert generation["bos_token_id"] == 1


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'ve", "Ġ12345", "Ġcaf", "Ġ", "ĠX", "!?", "Ċ", "Ċ", "y"]),
        ("smollm", ["I", "'ve", "Ġ", *"12345", "Ġcaf", "Ġ", "ĠX", "!?", "Ċ", "Ċ", "y"]),
        ("default", ["I", "'", "ve", "Ġ", "123", "45", "Ġcaf", "Ġ", "ĠX", "!?", "Ċ", "Ċ", "y"]),
        ("llama-bpe", ["I", "'ve", "Ġ", "123", "45", "Ġcaf", "Ġ", "ĠX", "!?ĊĊ", "y"]),
        ("llama3", ["I", "'ve", "Ġ", "123", "45", "Ġcaf", "Ġ", "ĠX", "!?ĊĊ", "y"]),
        ("qwen2", ["I", "'ve", "Ġ", *"12345", "Ġcaf", "Ġ", "ĠX", "!?ĊĊ", "y"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    """Text is split as the file's pre-tokenizer splits it."""
    backend = backend_of(tmp_path, metadata={"tokenizer.ggml.pre": pre})
    split = backend.pre_tokenizer.pre_tokenize_str("I've 12345 caf  X!?\n\ny")
    assert [piece for piece, _ in split] == pieces


def test_byte_level_vocabulary(tmp_path: Path) -> None:
    """Merges apply, control tokens are special, user-defined ones are found but stay visible."""
    tokenizer = Tokenizer.from_dir(convert(tmp_path))
    tokens = BYTE_LEVEL["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("hello<eos><user>é")
    assert [tokens[token_id] for token_id in ids] == ["hell", "o", "<eos>", "<user>", "Ã", "©"]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(ids) == "hello<user>é"
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_tokens_around_a_prompt(tmp_path: Path, add_bos: bool, add_eos: bool) -> None:
    """BOS and EOS are put around a prompt if the file says so, here as in transformers."""
    from transformers import AutoTokenizer

    flags = {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.ggml.add_eos_token": add_eos}
    path = convert(tmp_path, metadata=flags)
    expected = [1] * add_bos + [Tokenizer.from_dir(path).encode("he", add_special_tokens=False)[0]]
    expected += [2] * add_eos
    assert Tokenizer.from_dir(path).encode("he") == expected
    assert AutoTokenizer.from_pretrained(path)("he").input_ids == expected


def test_llama3_wants_bos_and_whole_words(tmp_path: Path) -> None:
    """Llama 3's vocabularies put BOS in front unless told otherwise, and prefer a whole token."""
    path = convert(
        tmp_path,
        metadata={"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.merges": ["l l"]},
    )
    tokens = BYTE_LEVEL["tokenizer.ggml.tokens"]
    ids = Tokenizer.from_dir(path).encode("hell")
    assert [tokens[token_id] for token_id in ids] == ["<bos>", "hell"]


def test_composed_characters(tmp_path: Path) -> None:
    """Qwen's vocabularies see a letter and its accent as one character, GPT-2's as they are."""
    paths = {
        pre: convert(tmp_path, metadata={"tokenizer.ggml.pre": pre}) for pre in ("qwen2", "gpt-2")
    }
    composed, parts = "\u00e9", "e\u0301"
    qwen, gpt2 = (Tokenizer.from_dir(path) for path in paths.values())
    assert qwen.encode(parts) == qwen.encode(composed)
    assert gpt2.encode(parts) != gpt2.encode(composed)


def test_chat_template(tmp_path: Path) -> None:
    """The file's chat template becomes the model's."""
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    path = convert(tmp_path, metadata={"tokenizer.chat_template": template})
    tokenizer = Tokenizer.from_dir(path)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hé"}]) == "[hé]"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.pre", "falcon", r"pre 'falcon' is not supported"),
        ("tokenizer.ggml.model", "t5", r"vocabulary 't5' is not supported"),
    ],
)
def test_unknown_vocabulary_is_refused(tmp_path: Path, key: str, value: str, message: str) -> None:
    """A vocabulary that would be split in another way is an error that names its kind."""
    with pytest.raises(ModelError, match=message):
        backend_of(tmp_path, metadata={key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.merges", ["h e", "h q q"]),
        ("tokenizer.ggml.merges", ["he ☃"]),
        ("tokenizer.ggml.tokens", ["a", "a", "b"]),
        ("tokenizer.ggml.token_type", [1, 1]),
        ("tokenizer.ggml.bos_token_id", 4000),
    ],
)
def test_vocabulary_that_contradicts_itself_is_damage(tmp_path: Path, key: str, value: Any) -> None:
    """Merges of unknown tokens, repeated tokens, missing types, ids without a token: all errors."""
    with pytest.raises(CorruptFileError):
        backend_of(tmp_path, metadata={key: value})


def best_pairs_first(text: str, scores: dict[str, float]) -> list[str]:
    """Sentencepiece's rule: join the neighbours that form the best piece, the leftmost first."""
    parts = list(text)
    while True:
        pairs = [a + b for a, b in pairwise(parts)]
        known = [i for i, pair in enumerate(pairs) if pair in scores]
        if not known:
            return parts
        best = max(known, key=lambda i: (scores[pairs[i]], -i))
        parts[best : best + 2] = [pairs[best]]


@settings(max_examples=50)
@given(
    pieces=st.lists(st.text("ab▁", min_size=2, max_size=5), unique=True, max_size=25),
    texts=st.lists(st.text("ab c", min_size=1, max_size=14), min_size=5, max_size=20),
    data=st.data(),
)
def test_sentencepiece_vocabulary(pieces: list[str], texts: list[str], data: st.DataObject) -> None:
    """Text becomes the pieces that sentencepiece's rule gives, whatever the scores."""
    order = data.draw(st.permutations(range(len(pieces))))
    scores = dict.fromkeys("ab▁", -100.0)
    scores |= {piece: -float(rank) for piece, rank in zip(pieces, order, strict=True)}
    with tempfile.TemporaryDirectory() as scratch:
        backend = backend_of(Path(scratch), vocabulary=sentencepiece(scores))
    for text in texts:
        expected = ["<bos>", *best_pairs_first("▁" + text.replace(" ", "▁"), scores)]
        expected = ["<0x63>" if part == "c" else part for part in expected]
        assert backend.encode(text).tokens == expected


def test_sentencepiece_without_a_leading_space(tmp_path: Path) -> None:
    """A file may say that texts begin without a space."""
    vocabulary = sentencepiece({"▁": -3.0, "a": -4.0, "▁a": -1.0})
    backend = backend_of(
        tmp_path,
        vocabulary=vocabulary,
        metadata={"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False},
    )
    encoded = backend.encode("a a")
    assert encoded.tokens == ["a", "▁a"]
    assert backend.decode(encoded.ids) == "a a"


def test_sentencepiece_without_bytes(tmp_path: Path) -> None:
    """Where there are no byte tokens, neighbours that no piece covers become one unknown token."""
    vocabulary = sentencepiece({"▁": -3.0, "a": -4.0})
    for key in ("tokens", "token_type", "scores"):
        values = vocabulary[f"tokenizer.ggml.{key}"]
        vocabulary[f"tokenizer.ggml.{key}"] = values[: len(SPECIALS)] + values[-2:]
    backend = backend_of(tmp_path, vocabulary=vocabulary)
    assert backend.encode("aéüa").tokens == ["<bos>", "▁", "a", "<unk>", "a"]


def test_sentencepiece_text_comes_back(tmp_path: Path) -> None:
    """What no piece covers goes through bytes, and decoding gives the text."""
    scores = {"▁": -3.0, "a": -4.0, "▁a": -1.0}
    backend = backend_of(tmp_path, vocabulary=sentencepiece(scores))
    encoded = backend.encode("a é a")
    assert encoded.tokens == ["<bos>", "▁a", "▁", "<0xC3>", "<0xA9>", "▁a"]
    assert backend.decode(encoded.ids) == "a é a"


# --------------------------------------------------------------------------- the embedded model


@pytest.fixture(scope="module")
def embedded_vocab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the embedded model's vocabulary and no weights."""
    path = tmp_path_factory.mktemp("embedded")
    vocabulary = read_vocabulary(read_gguf(embedded_gguf()))
    vocabulary.tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(vocabulary.tokenizer_config))
    (path / "generation_config.json").write_text(json.dumps(vocabulary.generation_config))
    return path


TEXTS = [
    "",
    " ",
    "Hello, world!",
    "The quick brown fox doesn't jump; it's  asleep.\n\n\tReally?  ",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n",
    '{"key": [1, 2.50, -3e10], "nothing": null}',
    "0 00 007 1234567890 ½ ² Ⅷ ٣",
    "naïve café — “quoted” … ångström ÀÉÎÕÜ",
    "日本語のテキスト 中文 한국어 العربية עברית हिन्दी ไทย",
    "🦜🔗 👩‍👩‍👧‍👦 🇫🇷 ✨",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><file_sep>x<|im_end|><|im_start",
    "\u200b\u00a0\u2028 \r\n \r",
    "a" * 300,
]


@pytest.mark.slow
def test_embedded_vocabulary(embedded_vocab: Path) -> None:
    """The embedded model's tokens are transformers' for its GGUF file, with each digit alone.

    transformers reads the vocabulary but not the name of the pre-tokenizer, so the digits of
    SmolLM's are put in front of what it builds.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    file = embedded_gguf()
    oracle = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    oracle.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer = Tokenizer.from_dir(embedded_vocab)
    hugging_face = AutoTokenizer.from_pretrained(embedded_vocab)
    for text in TEXTS:
        expected = oracle(text).input_ids
        assert tokenizer.encode(text) == expected, text
        assert hugging_face(text).input_ids == expected, text


@pytest.mark.parametrize("text", TEXTS)
def test_embedded_round_trip(embedded_vocab: Path, text: str) -> None:
    """Decoding the tokens of a text gives the text, special tokens included."""
    tokenizer = Tokenizer.from_dir(embedded_vocab)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_embedded_settings(embedded_vocab: Path) -> None:
    """The embedded model begins chats with token 1, ends turns with token 2 and adds no BOS."""
    tokenizer = Tokenizer.from_dir(embedded_vocab)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [1, 81, 2]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert read_json(embedded_vocab / "generation_config.json")["eos_token_id"] == 2
