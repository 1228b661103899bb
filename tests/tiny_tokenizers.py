"""Small vocabularies of the two families, and texts that are hard to write in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from minivllm.tokenizer import Tokenizer

TEXTS = [
    "The capital of France is Paris.\n\n\tdef f(x):  return x ** 2",
    "👩‍👩‍👧‍👦 family, 👍🏽 skin, 🇫🇷 flag, 1️⃣ keycap",
    "e\u0301 a\u0308\u0323 n\u0303 combining, Z\u0351\u036b\u0343 more",
    "日本語のテキスト、한국어 텍스트 和中文",
    "שלום עולם \u202bمرحبا بالعالم\u202c",
    "\x00 control \x7f, \u00a0no-break, \ufeffmark, \ufffd itself, \U0010ffff last",
]


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
