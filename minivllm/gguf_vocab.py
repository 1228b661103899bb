"""The vocabulary of a GGUF file as a tokenizer in Hugging Face format.

    gpt2     "I've 12" ── patterns ──> I │ 've │ ␣12 ── ranked merges, over bytes ──> tokens
    llama    "I've 12" ── ▁ for a space ──> ▁I've▁12 ── best-scored piece first ────> tokens

A file has its tokens as a list, with a type and perhaps a score each, names the way in which text
is split, and says which tokens are special. `tokenizers` does the same with other words: patterns
in place of a name, ranked merges in place of scores.

Invariants: a vocabulary that would be split in another way than its file says is refused by name,
never approximated; what contradicts itself is damage.

Reading the file: `gguf_file`. Encoding and decoding with the result: `tokenizer`. The names of the
ways to split: llama-vocab.cpp of llama.cpp. The merge rule: sentencepiece's BPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.errors import ModelError
from minivllm.gguf_file import GgufFile

if TYPE_CHECKING:
    import tokenizers


class Vocabulary(NamedTuple):
    """What a Hugging Face directory says about tokens, by file."""

    tokenizer: tokenizers.Tokenizer
    tokenizer_config: dict[str, Any]
    generation_config: dict[str, Any]


def read_vocabulary(source: GgufFile) -> Vocabulary:
    """The vocabulary of `source`.

    Raises: `CorruptFileError` for one that contradicts itself; `ModelError` for one of another kind
    """
    special_ids = _special_ids(source)
    return Vocabulary(*_tokenizer(source, special_ids), _generation(source, special_ids))


_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4

_SPECIAL_IDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


class _PreTokenizer(NamedTuple):
    """How text is split before merges apply: by each pattern in turn, matches and gaps alike."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    """Whether a piece that is a token as a whole stays one, whatever the merges say."""
    add_bos: bool = False
    """Whether a file that does not say wants BOS in front."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_PRE_TOKENIZERS = {
    "default": _PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenizer((_GPT2,)),
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "qwen2": _PreTokenizer((_LLAMA3.replace("{1,3}", ""),), nfc=True),
}


def _special_ids(source: GgufFile) -> dict[str, int]:
    """Ids of the named tokens that the file names, by Hugging Face's names."""
    num_tokens = len(source.items("tokenizer.ggml.tokens", str))
    ids = {name: source.value(key) for name, key in _SPECIAL_IDS.items() if key in source.metadata}
    for name, token_id in ids.items():
        if not isinstance(token_id, int) or not 0 <= token_id < num_tokens:
            raise source.damage(f"{_SPECIAL_IDS[name]} is {token_id!r:.50}, not a token")
    return ids


def _generation(source: GgufFile, special_ids: Mapping[str, int]) -> dict[str, Any]:
    """generation_config.json; the end of a turn ends a generation like the end of a text."""
    ends = [special_ids.get("eos_token")]
    ends += [source.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    eos_ids = list(dict.fromkeys(token_id for token_id in ends if isinstance(token_id, int)))
    return {
        "bos_token_id": special_ids.get("bos_token"),
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
        "pad_token_id": special_ids.get("pad_token"),
    }


def _tokenizer(
    source: GgufFile, special_ids: Mapping[str, int]
) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """What goes into tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken, processors

    kind = source.value("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{source.path}: vocabulary {kind!r:.50} is not supported: gpt2, llama")
    tokens = source.items("tokenizer.ggml.tokens", str)
    types = [_NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in source.metadata:
        types = source.items("tokenizer.ggml.token_type", int)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) != len(tokens):
        raise source.damage("a token is listed twice or has no type")
    try:
        if kind == "gpt2":
            tokenizer, add_bos = _byte_level(source, vocab)
        else:
            tokenizer, add_bos = _sentencepiece(source, vocab, types, special_ids), True
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise source.damage(f"its vocabulary cannot be used: {error}") from error

    added = [
        AddedToken(token, normalized=False, special=token_type != _USER_DEFINED)
        for token, token_type in zip(tokens, types, strict=True)
        if token and token_type in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    add_bos = bool(source.metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    add_eos = bool(source.metadata.get("tokenizer.ggml.add_eos_token", False))
    named = {name: tokens[token_id] for name, token_id in special_ids.items()}
    before = [named["bos_token"]] if add_bos and "bos_token" in named else []
    after = [named["eos_token"]] if add_eos and "eos_token" in named else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=[(token, vocab[token]) for token in {*before, *after}],
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(before),
        "add_eos_token": bool(after),
        **named,
    }
    if isinstance(template := source.metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return tokenizer, config


def _byte_level(source: GgufFile, vocab: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    """GPT-2's kind: merges over bytes written as letters. Also whether it wants BOS by default."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = source.metadata.get("tokenizer.ggml.pre", "default")
    rules = _PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rules is None:
        raise ModelError(
            f"{source.path}: tokenizer.ggml.pre {name!r:.50} is not supported; supported:"
            f" {', '.join(_PRE_TOKENIZERS)}"
        )
    merges = [tuple(merge.split(" ")) for merge in source.items("tokenizer.ggml.merges", str)]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=rules.ignore_merges))
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rules.add_bos


def _sentencepiece(
    source: GgufFile, vocab: dict[str, int], types: list[int], special_ids: Mapping[str, int]
) -> tokenizers.Tokenizer:
    """Llama 2's kind: pieces of text with ▁ for a space, and bytes for what no piece covers."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = source.items("tokenizer.ggml.scores", float)
    if len(scores) != len(vocab):
        raise source.damage("a token has no score")
    pieces = {
        token: score
        for (token, token_id), score in zip(vocab.items(), scores, strict=True)
        if types[token_id] == _NORMAL
    }
    unk_id = special_ids.get("unk_token")
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            _merges(pieces),
            unk_token=None if unk_id is None else list(vocab)[unk_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(source.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Merges that do what sentencepiece does: always form the piece with the highest score.

    A merge ranks as the piece that it forms; a trained vocabulary has no two equal scores.

    >>> _merges({"a": -3.0, "b": -4.0, "ab": -2.0, "aba": -1.0})
    [('ab', 'a'), ('a', 'b')]
    """
    ranked = sorted(pieces, key=lambda piece: -pieces[piece])
    return [
        (piece[:cut], piece[cut:])
        for piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
