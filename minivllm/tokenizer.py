"""Text to tokens and back: a model's vocabulary, and every token's bytes.

    tokenizer.json ──────────────────────────────────┐
    tokenizer.model, vocab.json ... ─> transformers ─┴─> Tokenizer: text ─> ids ─> bytes ─> text

The one idea: every token is a fixed string of bytes, and the text of some tokens is their bytes,
joined and read as UTF-8 (what is not UTF-8 becomes U+FFFD). Tokens can therefore be decoded one at
a time, in constant time, and the result never depends on how they were grouped.

Invariants: a `Tokenizer` does not change once built, so it may be used from several threads;
transformers is asked only for a model without `tokenizer.json`, in a process of its own, of which
nothing stays here.

There is no first-word exception: where a sentencepiece vocabulary marks the start of a text with a
space, `decode` keeps that space, as a completion that follows a prompt needs it. Nor is there one
for bytes by number: the library makes U+FFFD of all in a row that is not UTF-8 throughout, so it
cannot show a character before the row has ended; here a whole character is one wherever it stands.

Text that arrives bit by bit, and stops: `detokenizer`. Chats: `chat`. Which token ids end a
request: `core`. A GGUF file's vocabulary as a `tokenizer.json`: `gguf_vocab`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from minivllm.chat import ChatTemplates
from minivllm.errors import ModelError, RequestError, TokenIdError

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")
# The files of tokenizers that transformers can convert.
_SLOW_FILES = ("*.model", "vocab.json", "vocab.txt", "*.tiktoken")


class Tokenizer:
    """A model's vocabulary, chat templates and special tokens."""

    __slots__ = (
        "_backend",
        "_bytes",
        "_chat",
        "_dropped_len",
        "_index",
        "_prefix_ids",
        "bos_id",
        "eos_id",
        "special_ids",
    )

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str],
        extra_special_tokens: Iterable[str] = (),
        templates: Mapping[str, str],
        add_bos_token: bool | None = None,
        model_vocab_size: int = 0,
    ) -> None:
        """Take over `backend`, which must not be used elsewhere.

        `named_tokens`: "bos_token" and the like, which templates see as variables;
        `templates`: "default", and "tool_use" for chats with tools; `add_bos_token`: whether a
        prompt begins with BOS (None: as `backend` has it); `model_vocab_size`: how many ids the
        model can produce, often more than there are tokens.

        Raises: `ModelError` for a decoder or a template that cannot be used.
        """
        # A file may carry the truncation or padding of its training run.
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        known_special = {token.content for token in added.values() if token.special}
        unknown_special = {*named_tokens.values(), *extra_special_tokens} - known_special
        backend.add_special_tokens(
            [name for name in sorted(unknown_special) if backend.token_to_id(name) is not None]
        )
        self._backend = backend
        self._bytes = _vocabulary_bytes(backend, model_vocab_size)
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.bos_id = _id_of(backend, named_tokens.get("bos_token"))
        self.eos_id = _id_of(backend, named_tokens.get("eos_token"))

        adds_bos = self.bos_id is not None and backend.encode("").ids[:1] == [self.bos_id]
        self._dropped_len = 1 if adds_bos and add_bos_token is False else 0
        self._prefix_ids: list[int] = []
        if self.bos_id is not None and add_bos_token and not adds_bos:
            self._prefix_ids.append(self.bos_id)

        self._chat = ChatTemplates(templates, named_tokens)
        self._index: tuple[dict[bytes, list[int]], list[int]] | None = None

    @classmethod
    def from_dir(cls, path: Path) -> Tokenizer:
        """The tokenizer of the model in directory `path`.

        Raises: `ModelError` when there is none that can be used
        """
        config = _read_json(path / "tokenizer_config.json")
        legacy = _read_json(path / "special_tokens_map.json")
        model = _read_json(path / "config.json")
        specials = legacy | {name: value for name, value in config.items() if value is not None}
        file = path / "tokenizer.json"
        if file.is_file():
            backend = _read_backend(file)
        else:
            backend, known = _convert(path)
            specials = known | specials
        try:
            extras = [token for name in _TOKEN_LISTS for token in _as_list(specials.get(name))]
            return cls(
                backend,
                named_tokens={
                    name: _content(specials[name]) for name in _NAMED_TOKENS if specials.get(name)
                },
                extra_special_tokens=[_content(token) for token in extras],
                templates=_read_templates(path, config.get("chat_template")),
                add_bos_token=config.get("add_bos_token"),
                model_vocab_size=model.get("vocab_size")
                or model.get("text_config", {}).get("vocab_size", 0),
            )
        except ModelError as error:
            raise ModelError(f"tokenizer in {path}: {error}") from error
        except (AttributeError, KeyError, TypeError) as error:
            rule = "has settings of an unknown form"
            raise ModelError(f"tokenizer in {path} {rule}: {error!r}") from error

    def __len__(self) -> int:
        """Ids run from 0 to `len - 1`; some of them may stand for nothing."""
        return len(self._bytes)

    @property
    def vocab_size(self) -> int:
        """The same as `len`: every id of the tokenizer and of the model is below it."""
        return len(self._bytes)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of `text`; safe in threads. Names of special tokens in it become those tokens.

        `add_special_tokens` puts BOS (and what else the model wants) around the text. A rendered
        chat has them already: encode it with False.

        Raises: `RequestError` for what is not Unicode text.
        """
        try:
            # A batch of one: half the time of `encode`, which also maps tokens to their characters.
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:  # a lone surrogate, which JSON can carry, is not text either
            raise RequestError("prompt", text, "must be valid Unicode text") from error
        ids: list[int] = batch[0].ids
        return self._prefix_ids + ids[self._dropped_len :] if add_special_tokens else ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The bytes of all tokens, read as UTF-8; what is not UTF-8 becomes U+FFFD.

        Raises: `TokenIdError` for an id outside the vocabulary.
        """
        hidden = self.special_ids if skip_special_tokens else frozenset()
        shown = (self.token_bytes(token_id) for token_id in token_ids if token_id not in hidden)
        return b"".join(shown).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text; b"" for an id that stands for nothing.

        Raises: `TokenIdError` for an id outside the vocabulary.
        """
        if not 0 <= token_id < len(self._bytes):
            raise TokenIdError("token_ids", token_id, f"must be in 0..{len(self._bytes) - 1}")
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """A token on its own, as lists of log-probabilities show it; half a character is U+FFFD.

        Raises: `TokenIdError` for an id outside the vocabulary.
        """
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def spellings(self, text: str) -> list[tuple[int, int, int]]:
        """Every way to write the bytes of `text` in ordinary tokens, as the edges of a graph.

        An edge is (its first byte, token id, the byte behind its last); a path from 0 to the end of
        the text is one way to write it, and there are no edges that lie on none.

        Raises: `RequestError` for what is not Unicode text
        """
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise RequestError("text", text, "must be valid Unicode text") from error
        ids_of, lengths = self._index_bytes()
        leads_to_end = [False] * len(data) + [True]
        edges = []
        for start in reversed(range(len(data))):
            for end in (start + length for length in lengths):
                if end <= len(data) and leads_to_end[end]:
                    for token_id in ids_of.get(data[start:end], ()):
                        leads_to_end[start] = True
                        edges.append((start, token_id, end))
        reached = {0}
        found = []
        for edge in sorted(edges):
            if edge[0] in reached:
                reached.add(edge[2])
                found.append(edge)
        return found

    def _index_bytes(self) -> tuple[dict[bytes, list[int]], list[int]]:
        """Ordinary tokens by their bytes, and how many bytes they may have; made when first needed.
        Two threads may both make it: they make the same."""
        if self._index is None:
            ids_of: dict[bytes, list[int]] = {}
            for token_id, data in enumerate(self._bytes):
                if data and token_id not in self.special_ids:
                    ids_of.setdefault(data, []).append(token_id)
            self._index = ids_of, sorted({len(data) for data in ids_of})
        return self._index

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a chat, to be encoded without special tokens.

        `add_generation_prompt` opens the model's answer; `continue_final_message` instead ends the
        prompt inside the last message, for the model to go on with it. `tools`: the functions that
        the model may call, as JSON schemas. `chat_template`: the name of one of the model's
        templates, or a template, in place of the model's own. `variables` are the template's, such
        as `enable_thinking`.

        Raises: `RequestError` when the model has no template, or the template refuses the messages
        """
        return self._chat.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            variables=variables,
        )


# --- the bytes of a token ---


def _vocabulary_bytes(backend: tokenizers.Tokenizer, min_size: int) -> list[bytes]:
    """The bytes of each id; b"" for the ids, up to `min_size`, that have no token."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    to_bytes = _converter(backend)
    table = [b""] * max(min_size, 1 + max(vocabulary.values(), default=-1))
    for token, token_id in vocabulary.items():
        table[token_id] = to_bytes(token)
    if to_bytes is _byte_level:
        # Added tokens are matched against the text itself, so they are written as text.
        for token_id, added in backend.get_added_tokens_decoder().items():
            table[token_id] = added.content.encode()
    return table


def _converter(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """How this family of vocabularies writes bytes: told by the steps of its decoder.

    Raises: `ModelError` for any other decoder.
    """
    if backend.decoder is None:
        raise ModelError("it has no decoder, so the bytes of its tokens are unknown")
    # The decoder's JSON, without reading all of tokenizer.json (often 10 MB) a second time.
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    replaced = [step for step in steps if step["type"] == "Replace"]
    if kinds == {"Metaspace"} or (
        kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}
        and [(step["pattern"], step["content"]) for step in replaced] == [({"String": "▁"}, " ")]
    ):
        return _piece_or_byte if "ByteFallback" in kinds else _piece
    raise ModelError(f"decoder {decoder} is neither byte-level nor of the sentencepiece kind")


def _gpt2_bytes() -> dict[str, int]:
    """GPT-2's alphabet: a printable byte is the character of its number, the others are 256, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _gpt2_bytes()


def _byte_level(token: str) -> bytes:
    """One character, one byte; a token with a foreign character is text.

    >>> _byte_level("ĠParis"), _byte_level("ÃŃ"), _byte_level("<｜end｜>").decode()
    (b' Paris', b'\\xc3\\xad', '<｜end｜>')
    """
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _piece(token: str) -> bytes:
    return token.replace("▁", " ").encode()


def _piece_or_byte(token: str) -> bytes:
    """Text with ▁ for a space, or one byte that no piece covers.

    >>> _piece_or_byte("▁Paris"), _piece_or_byte("<0xE2>")
    (b' Paris', b'\\xe2')
    """
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return _piece(token)


# --- the files ---

# Without torch, which takes most of the time to load and is not needed.
_CONVERT = """
import json, sys
sys.modules["torch"] = None
from transformers import AutoTokenizer
slow = AutoTokenizer.from_pretrained(sys.argv[1])
backend = slow.backend_tokenizer
print(json.dumps({"backend": backend.to_str(), "specials": slow.special_tokens_map}))
"""


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception, for a damaged file too
        raise ModelError(f"{file} cannot be read: {error}") from error


def _convert(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """What transformers makes of a tokenizer kept in other files, and its special tokens by name.

    Raises: `ModelError`
    """
    missing = f"{path / 'tokenizer.json'} is missing"
    if not any(file.is_file() for pattern in _SLOW_FILES for file in path.glob(pattern)):
        raise ModelError(f"{missing}, and so is any other file of a tokenizer")
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CONVERT, str(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        reason = next(reversed(done.stderr.strip().splitlines()), "no reason given")
        raise ModelError(
            f"{missing}, and its other files cannot be converted ({reason}); where it is possible,"
            " make it with transformers, sentencepiece and protobuf installed:"
            f" AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        )
    made = json.loads(done.stdout.splitlines()[-1])
    return tokenizers.Tokenizer.from_str(made["backend"]), made["specials"]


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; empty when there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold an object")
    return value


def _content(token: str | Mapping[str, Any]) -> str:
    """A special token's text; files write it bare, or as an object with its matching rules."""
    return token if isinstance(token, str) else token["content"]


def _as_list(tokens: Any) -> list[Any]:
    return list(tokens.values()) if isinstance(tokens, dict) else list(tokens or ())


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _read_templates(path: Path, configured: Any) -> dict[str, str]:
    """Templates by name. Files of their own replace the ones in `tokenizer_config.json`."""
    files = {file.stem: file for file in path.glob("additional_chat_templates/*.jinja")}
    if (path / "chat_template.jinja").is_file():
        files["default"] = path / "chat_template.jinja"
    if files:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    if isinstance(configured, str):
        return {"default": configured}
    return {entry["name"]: entry["template"] for entry in configured or ()}
