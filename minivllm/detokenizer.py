"""The text of one request's output while its tokens arrive, and the stop that ends it.

    sampled ids -> bytes -> characters -> stop strings, stop patterns -> text so far, stop hit

    bytes of the output   [ decoded ................................. | start of a character ]
    its text              [ shown .............. | held: could start a stop ]

The one idea: a stop is looked for as if the text grew by one character at a time. The first
character that completes one ends the text, which is then cut where the stop starts; so neither
depends on how characters are split into tokens, or tokens into pushes. A stop pattern is complete
when a search of the text so far finds it: `$`, `\\b` and `\\B` hold at the end of what has come,
lookahead sees nothing beyond it, and `\\d+` ends "12" at its first digit.

A prompt may end inside a character, which is nobody's text until the output completes it: then it
is the output's. If the output goes on with something else, the prompt's part is not shown at all.

Invariants: shown text only grows, and is always a prefix of the final text; no text after a stop,
or of one that is to be removed, is ever shown; a pattern that takes too long to search fails its
own request, and holds nobody up for longer than 0.05 s at a time or 0.5 ms per token.

Special tokens that are skipped do not exist for the text, nor for its stops. No spaces are put
between those that are kept, so `spaces_between_special_tokens` changes nothing: it is for decoders
that join words; in the vocabularies of `tokenizer` a space is a byte of some token.
End-of-sequence: `core`.
"""

from __future__ import annotations

import re
import time
from codecs import utf_8_decode
from collections.abc import Collection, Sequence
from typing import NamedTuple

import regex

from minivllm.errors import RequestError
from minivllm.tokenizer import Tokenizer

_MAX_PATTERNS_LEN = 500
_MAX_WRITTEN_OUT_LEN = 10_000
# What one request may spend on searching: this much at once, refilled with every token.
_SEARCH_S = 0.05
_SEARCH_S_PER_TOKEN = 0.0005


class Pushed(NamedTuple):
    """What `Detokenizer.push` did."""

    num_tokens: int
    """How many tokens became part of the output; those behind the one that completed a stop did
    not."""
    stop: str | None
    """The stop string, or the stop pattern, that ended the text."""


class Detokenizer:
    """The text of one request's output while its tokens arrive."""

    __slots__ = (
        "_detokenize",
        "_held",
        "_hidden_ids",
        "_hold_len",
        "_include_stop_str",
        "_min_tokens",
        "_num_tokens",
        "_patterns",
        "_pending",
        "_pieces",
        "_prompt_end",
        "_stop",
        "_stops",
        "_token_bytes",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        stop_regex: Sequence[str] = (),
        min_tokens: int = 0,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        include_stop_str: bool = False,
        detokenize: bool = True,
    ) -> None:
        """`stop`, `stop_regex`: strings and patterns that end the text; what matched stays in it
        with `include_stop_str`. One that is complete within the first `min_tokens` tokens does not
        count; for a pattern, the search goes on behind it. `prompt_token_ids`: what the output
        continues. Without `detokenize` there is no text and nothing to stop at.

        Raises: `RequestError` for a pattern that cannot be used
        """
        assert all(stop), "an empty stop string would end every text before it begins"
        self._token_bytes = tokenizer.token_bytes
        self._hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stops = tuple(stop)
        self._patterns = _StopPatterns(stop_regex) if stop_regex else None
        self._min_tokens = min_tokens
        self._include_stop_str = include_stop_str
        self._detokenize = detokenize
        self._hold_len = max((len(text) for text in stop), default=1) - 1
        self._num_tokens = 0
        self._pieces: list[str] = []  # shown; joined when somebody looks
        self._held = ""  # decoded, not shown yet
        self._pending = b""  # the start of a character
        self._prompt_end = _half_character(tokenizer, prompt_token_ids, self._hidden_ids)
        self._stop: str | None = None

    @property
    def text(self) -> str:
        """All text that may be shown by now; later values begin with this one."""
        if len(self._pieces) != 1:
            self._pieces[:] = ["".join(self._pieces)]
        return self._pieces[0]

    def push(self, token_ids: Sequence[int]) -> Pushed:
        """Append tokens, up to the first that completes a stop.

        Of several stops the one that is complete first wins; then strings before patterns, then the
        one listed first. Once one was found nothing more is taken.

        Raises: `TokenIdError` for an id outside the vocabulary; `RequestError` when a pattern takes
                too long to search, and then the request must end
        """
        if self._stop is not None:
            return Pushed(0, self._stop)
        if not self._detokenize:
            return Pushed(len(token_ids), None)
        for num_taken, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            if token_id in self._hidden_ids:
                continue
            piece = self._decode(self._token_bytes(token_id))
            if not self._stops and self._patterns is None:
                self._pieces.append(piece)
            elif self._ends_in(piece):
                return Pushed(num_taken, self._stop)
        return Pushed(len(token_ids), None)

    def finish(self) -> str:
        """Show what was held back, and return the whole text; no tokens may follow.

        A character that never became whole is U+FFFD now, and completes no stop.
        """
        tail, _ = utf_8_decode(self._pending, "replace", True)
        self._pieces.append(self._held + tail)
        self._held = ""
        self._pending = b""
        return self.text

    def _decode(self, data: bytes) -> str:
        """The characters that `data` completes."""
        if self._prompt_end and data:
            if _continues(self._prompt_end, data):
                self._pending = self._prompt_end
            self._prompt_end = b""
        data = self._pending + data
        piece, num_bytes = utf_8_decode(data, "replace", False)
        self._pending = data[num_bytes:]
        return piece

    def _ends_in(self, piece: str) -> bool:
        """Append `piece`; whether a stop was completed by it.

        With stop strings "abcd" and "x", three characters are held. The text "..abc" + "de":

            shown | held "abc" | piece "de"     window "abcde": "abcd" ends at 4, inside the piece
        """
        window = self._held + piece
        num_old = len(self._held)
        counts = self._num_tokens > self._min_tokens
        hit = _first_string(self._stops, window, num_old) if counts else None
        hold_start = max(0, len(window) - self._hold_len)
        if self._patterns is not None:
            shown_len = len(self.text)
            # Not of the window: what stands before a match decides on `^`, `\b` and lookbehind.
            text = self.text + (window if hit is None else window[: hit.end - 1])
            found = self._patterns.search(text, shown_len + num_old, self._num_tokens, counts)
            if found is not None:
                hit = _Hit(found.start - shown_len, found.end - shown_len, found.stop)
            hold_start = min(hold_start, self._patterns.start - shown_len)
        if hit is not None:
            self._pieces.append(window[: hit.end if self._include_stop_str else hit.start])
            self._held = ""
            self._pending = b""
            self._stop = hit.stop
            return True
        self._pieces.append(window[:hold_start])
        self._held = window[hold_start:]
        return False


class _Hit(NamedTuple):
    start: int
    end: int
    stop: str


def _first_string(stops: Sequence[str], window: str, num_old: int) -> _Hit | None:
    """The stop string that is complete first, behind the first `num_old` characters."""
    first: _Hit | None = None
    for stop in stops:
        start = window.find(stop, max(0, num_old - len(stop) + 1))
        if start >= 0 and (first is None or start + len(stop) < first.end):
            first = _Hit(start, start + len(stop), stop)
    return first


class _StopPatterns:
    """The stop patterns of one request, and how far their searches have come."""

    __slots__ = ("_left_s", "_num_tokens", "_patterns", "_starts")

    def __init__(self, patterns: Sequence[str]) -> None:
        if sum(map(len, patterns)) > _MAX_PATTERNS_LEN:
            rule = f"must be at most {_MAX_PATTERNS_LEN} characters in all"
            raise RequestError("stop_regex", patterns, rule)
        self._patterns = [(pattern, _compile(pattern)) for pattern in patterns]
        self._starts = [0] * len(patterns)  # before these no match can start any more
        self._left_s = _SEARCH_S
        self._num_tokens = 0

    @property
    def start(self) -> int:
        """Where the text begins that could still be part of a match."""
        return min(self._starts)

    def search(self, text: str, num_old: int, num_tokens: int, counts: bool) -> _Hit | None:
        """The match that is complete first, with a character behind the first `num_old`; None if
        matches do not count yet, and these never will.

        Raises: `RequestError` for a pattern that takes too long
        """
        refill_s = (num_tokens - self._num_tokens) * _SEARCH_S_PER_TOKEN
        self._left_s = min(_SEARCH_S, self._left_s + refill_s)
        self._num_tokens = num_tokens
        for end in range(num_old + 1, len(text) + 1):
            for i, (pattern, compiled) in enumerate(self._patterns):
                match = self._match(compiled, text, self._starts[i], end)
                if self._left_s <= 0:
                    rule = "must not take so long to search in the text"
                    raise RequestError("stop_regex", pattern, rule)
                if match is None:
                    self._starts[i] = end
                elif match.partial:
                    self._starts[i] = match.start()
                elif counts:
                    return _Hit(match.start(), match.end(), pattern)
                else:
                    self._starts[i] = max(end, match.start() + 1)
        return None

    def _match(
        self, pattern: regex.Pattern[str], text: str, start: int, end: int
    ) -> regex.Match[str] | None:
        """What a search from `start` on finds in the text up to `end`; if it finds nothing, the
        longest rest that more text could make a match. When no time is left, nothing."""
        started_s = time.thread_time()
        try:
            # concurrent: a search gives up the GIL else, and then waits for it, a thousand times
            # longer than it takes.
            match = pattern.search(
                text, start, end, partial=True, concurrent=False, timeout=self._left_s
            )
        except (TimeoutError, MemoryError):
            self._left_s = 0.0
            return None
        self._left_s -= time.thread_time() - started_s
        return match


# What a search that goes on where more text came cannot find for certain, and why.
_REFUSED = (
    # Among the others: verbose, which can hide a repeat; reverse; word, which looks further ahead.
    (r"\(\?(?!P|R|[aimsu]+[):-])[A-Za-z]", "must have no flags but a, i, m, s and u"),
    # They say where a match starts or ends, in terms of the search and of what follows.
    (r"(?<!\\)(\\\\)*\\[GKX]", r"must not use \G, \K or \X"),
    (r"\{[\d<=]*[dies][<=+,:}]", "must not match approximately"),
    # What holds at the end for now would rule out a match that more text makes.
    (r"(?s)(?=.*\(\?<?!)(?=.*(\$|\\[bBmMZz]))", r"must not use $, \Z or \b beside (?! or (?<!"),
)
_WORD_EDGE = re.compile(r"\\([bBmM])|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def _compile(pattern: str) -> regex.Pattern[str]:
    """The pattern, if it can neither bring the process down nor end a text before it begins.

    Raises: `RequestError`
    """
    for refused, rule in _REFUSED:
        if re.search(refused, pattern):
            raise RequestError("stop_regex", pattern, rule)
    # Whether the end of what has come is the edge of a word, only the next character can tell.
    open_ended = _WORD_EDGE.sub(lambda m: rf"(?:{m[0]}|\Z)" if m[1] else m[0], pattern)
    if _written_out_len(open_ended) > _MAX_WRITTEN_OUT_LEN:
        rule = f"must not be longer than {_MAX_WRITTEN_OUT_LEN} with its repeats written out"
        raise RequestError("stop_regex", pattern, rule)
    try:
        regex.compile(pattern)  # for an error that speaks of what was written
        compiled = regex.compile(open_ended)
        matches_nothing = compiled.search("", timeout=_SEARCH_S) is not None
    except Exception as error:  # the library raises errors of many kinds
        rule = f"must be a regular expression ({error})"
        raise RequestError("stop_regex", pattern, rule) from error
    if matches_nothing:
        raise RequestError("stop_regex", pattern, "must not match the empty text")
    return compiled


def _written_out_len(pattern: str) -> int:
    """At least how long the pattern is for `regex`, which writes the passes that a repeat requires
    one after the other: "a{1000000000}" is 2 GB.

    >>> _written_out_len("a{3}b{4}"), _written_out_len("(?:a{3}){4}"), _written_out_len("a{0,9}")
    (15, 56, 6)
    """
    num_single, num_group = 0, 1
    for closed, number in re.findall(r"([)}]?)\{(\d+)", pattern):
        if closed:
            num_group *= max(1, int(number))
        else:
            num_single += int(number)
    return (len(pattern) + num_single) * num_group


def _half_character(
    tokenizer: Tokenizer, token_ids: Sequence[int], hidden_ids: Collection[int]
) -> bytes:
    """The start of a character that the tokens end with; b"" if their last one is whole."""
    tail = b""
    for token_id in reversed(token_ids):
        if token_id not in hidden_ids:
            tail = tokenizer.token_bytes(token_id) + tail
        if len(tail) >= 3:  # a character has at most four bytes
            break
    _, num_bytes = utf_8_decode(tail, "replace", False)
    return tail[num_bytes:]


def _continues(half: bytes, data: bytes) -> bool:
    """Whether the first byte of `data` can follow the half character: both are one U+FFFD then, or
    one character.

    >>> _continues("é".encode()[:1], "é".encode()[1:]), _continues("é".encode()[:1], b"e")
    (True, False)
    """
    return len((half + data[:1]).decode("utf-8", "replace")) == 1
