"""Text to tokens and back: encoding, chat templates, incremental text, stop strings.

    prompt or messages -> Tokenizer -> ids ... sampled ids -> Detokenizer -> text so far, stop hit

The one idea: every token is a fixed string of bytes, and the text of some tokens is their bytes,
joined and read as UTF-8 (what is not UTF-8 becomes U+FFFD). Tokens can therefore be decoded one at
a time, in constant time, and the result never depends on how they were grouped.

    bytes of the output   [ decoded ................................. | start of a code point ]
    its text              [ shown .............. | held: could start a stop ]

Invariants: shown text only grows, and is always a prefix of the final text; no text after a stop
string, or of one that is to be removed, is ever shown; a `Tokenizer` does not change once built,
so it may be used from several threads.

There is no first-word exception: where a sentencepiece vocabulary marks the start of a text with a
space, `decode` keeps that space, as a completion that follows a prompt needs it.

Which token ids end a request is the engine's business. Turning the vocabulary of a GGUF file into a
`tokenizer.json` belongs to the reading of checkpoints.
"""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

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

# Put behind the final message to find it again in the rendered chat. Its own last space tells
# whether the template strips what a message ends with.
_END_MARK = "<<end of the final message>> "


class Tokenizer:
    """A model's vocabulary, chat templates and special tokens."""

    __slots__ = (
        "_backend",
        "_bytes",
        "_dropped_len",
        "_prefix_ids",
        "_template_variables",
        "_templates",
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

        self._template_variables = dict(named_tokens)
        self._templates = _compile_templates(templates)

    @classmethod
    def from_dir(cls, path: Path) -> Tokenizer:
        """The tokenizer of the model in directory `path`.

        Raises: `ModelError` when `tokenizer.json` is missing, or a file cannot be used.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{file} is missing; tokenizers kept in other files are not supported")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception, for a damaged file too
            raise ModelError(f"{file} cannot be read: {error}") from error

        config = _read_json(path / "tokenizer_config.json")
        legacy = _read_json(path / "special_tokens_map.json")
        model = _read_json(path / "config.json")
        specials = legacy | {name: value for name, value in config.items() if value is not None}
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

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt of a chat, to be encoded without special tokens.

        `add_generation_prompt` opens the model's answer; `continue_final_message` instead ends the
        prompt inside the last message, for the model to go on with it. `kwargs` are variables of
        the template, such as `enable_thinking`.

        Raises: `RequestError` when the model has no template, or the template refuses the messages.
        """
        template = self._templates.get("default")
        if tools is not None:
            template = self._templates.get("tool_use", template)
        if template is None:
            raise RequestError("chat_template", None, "must come with the model to render a chat")
        if continue_final_message and add_generation_prompt:
            rule = "cannot be combined with add_generation_prompt"
            raise RequestError("continue_final_message", True, rule)
        variables = {"documents": None, **self._template_variables, **kwargs}
        variables["messages"] = _marked(messages) if continue_final_message else messages
        variables["tools"] = tools
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            prompt = template.render(variables)
        except Exception as error:  # a template may fail in any way that an expression can
            rule = f"do not fit the model's chat template ({error})"
            raise RequestError("messages", messages, rule) from error
        return _cut_at_mark(prompt, messages) if continue_final_message else prompt


class Pushed(NamedTuple):
    """What `Detokenizer.push` did."""

    num_tokens: int
    """How many tokens became part of the output; those behind the one that completed a stop
    string did not."""
    stop: str | None
    """The stop string that ended the text."""


class Detokenizer:
    """The text of one request's output while its tokens arrive."""

    __slots__ = (
        "_held",
        "_hidden_ids",
        "_hold_len",
        "_include_stop_str",
        "_pending",
        "_pieces",
        "_stop",
        "_stops",
        "_token_bytes",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str],
        skip_special_tokens: bool = True,
        include_stop_str: bool = False,
    ) -> None:
        """`stop`: strings that end the text; they stay in it with `include_stop_str`.

        Special tokens that are skipped do not exist for the text, nor for the stop strings.
        """
        assert all(stop), "an empty stop string would end every text before it begins"
        self._token_bytes = tokenizer.token_bytes
        self._hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stops = tuple(stop)
        self._include_stop_str = include_stop_str
        self._hold_len = max((len(text) for text in stop), default=1) - 1
        self._pieces: list[str] = []  # shown; joined when somebody looks
        self._held = ""  # decoded, not shown yet; at most _hold_len characters
        self._pending = b""  # the start of a code point
        self._stop: str | None = None

    @property
    def text(self) -> str:
        """All text that may be shown by now; later values begin with this one."""
        if len(self._pieces) != 1:
            self._pieces[:] = ["".join(self._pieces)]
        return self._pieces[0]

    def push(self, token_ids: Sequence[int]) -> Pushed:
        """Append tokens, up to the first that completes a stop string.

        Of several stop strings the one that is complete first wins, then the one listed first.
        Once one was found nothing more is taken.

        Raises: `TokenIdError` for an id outside the vocabulary.
        """
        if self._stop is not None:
            return Pushed(0, self._stop)
        for num_tokens, token_id in enumerate(token_ids, 1):
            if token_id in self._hidden_ids:
                continue
            data = self._pending + self._token_bytes(token_id)
            piece, num_bytes = utf_8_decode(data, "replace", False)
            self._pending = data[num_bytes:]
            if not self._stops:
                self._pieces.append(piece)
            elif self._ends_in(piece):
                return Pushed(num_tokens, self._stop)
        return Pushed(len(token_ids), None)

    def finish(self) -> str:
        """Show what was held back, and return the whole text; no tokens may follow.

        A code point that never became whole is U+FFFD now, and completes no stop string.
        """
        tail, _ = utf_8_decode(self._pending, "replace", True)
        self._pieces.append(self._held + tail)
        self._held = ""
        self._pending = b""
        return self.text

    def _ends_in(self, piece: str) -> bool:
        """Append `piece`; whether a stop string was completed by it.

        With stop strings "abcd" and "x", three characters are held. The text "..abc" + "de":

            shown | held "abc" | piece "de"     window "abcde": "abcd" ends at 4, inside the piece

        A match ends in the piece, else it would have been found before, so it begins in the window.
        """
        window = self._held + piece
        first_end = len(window) + 1
        for stop in self._stops:
            start = window.find(stop)
            if start >= 0 and start + len(stop) < first_end:
                first_end = start + len(stop)
                self._stop = stop
        if self._stop is not None:
            cut = first_end if self._include_stop_str else first_end - len(self._stop)
            self._pieces.append(window[:cut])
            self._held = ""
            self._pending = b""
            return True
        cut = max(0, len(window) - self._hold_len)
        self._pieces.append(window[:cut])
        self._held = window[cut:]
        return False


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


# --- chat templates ---


def _compile_templates(sources: Mapping[str, str]) -> dict[str, jinja2.Template]:
    """Templates come with the model, from strangers: they run sandboxed and change nothing.

    The surroundings (whitespace rules, filters, functions) are those that model authors test with.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    templates = {}
    for name, source in sources.items():
        try:
            templates[name] = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat template {name!r}, line {error.lineno}: {error}") from error
    return templates


class _Generation(Extension):
    """`{% generation %}` marks the model's own words for training; here it only groups."""

    # jinja2 means a class variable, but declares it as any object's own.
    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja's own filter is for HTML and escapes "<"."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """`messages` with a mark behind the text of the last one; the caller's are not changed."""
    *others, final = messages or [{}]
    content = final.get("content")
    if isinstance(content, str):
        return [*others, {**final, "content": content + _END_MARK}]
    parts = list(content or ())
    for i in reversed(range(len(parts))):
        if "text" in parts[i]:
            parts[i] = {**parts[i], "text": parts[i]["text"] + _END_MARK}
            return [*others, {**final, "content": parts}]
    raise RequestError("messages", messages, "must end with a text that can be continued")


def _cut_at_mark(prompt: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """`prompt` up to the end of its final message."""
    end = prompt.rfind(_END_MARK.rstrip())
    if end < 0:
        rule = "must end with a message that the chat template shows, to be continued"
        raise RequestError("messages", messages, rule)
    # A template that strips messages took the mark's space too; it would have stripped the
    # message's own last spaces, had the mark not stood behind them.
    stripped = not prompt.startswith(_END_MARK, end)
    return prompt[:end].rstrip() if stripped else prompt[:end]
