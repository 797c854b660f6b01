"""From prompts to token ids, off the actor's path.

A tokenizer belongs to an artifact. Kind `bytes`: an id below 256 is a byte, the manifest names the specials above. Kind
`tokenizers`: a tokenizer.json of the library of that name. Chat messages go through the artifact's template in a sandbox.

Control tokens. In a chat they come from the template alone: where a message's own text spells one, it is cut in two, so that it
is read as text and nobody can forge another role's turn. A prompt that is given as text is its writer's whole input, so there
control tokens mean what they say.

Short prompts are encoded where they arrive; longer ones on a small pool: the library lets go of the interpreter meanwhile (a prompt
of 134,000 tokens delays the loop by 4 ms at most; its plain `encode` by 26 ms).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from calculet_core.artifact import Package, TokenizerInfo
from calculet_core.errors import ArtifactError, CalculetError, InternalError, InvalidValue, Unsupported
from calculet_core.requests import Prompt
from calculet_core.shell.files import read_bounded
from calculet_worker.shell.chat_template import CUT, ChatTemplate, any_of, shield_for

TokenIds = NDArray[np.int32]

POOL_THREADS = 2
QUICK_BYTES = 512
"""A prompt of so much text is encoded in about 0.2 ms: less than handing it to a thread and back costs the actor."""
QUICK_IDS = 4096
QUICK_MESSAGES = 4
_PLAIN_KEYS = {"role", "content"}
MAX_TOKENIZER_BYTES = 64 << 20


class PromptTokenizer:
    """An artifact's tokenizer with its chat template; may be used by several threads.

    Raises:
        ArtifactError: a file of the package is missing or is no tokenizer or template that this worker can use.
    """

    def __init__(self, package: Package) -> None:
        info = package.manifest.tokenizer
        self._info = info
        self._codec: _Codec = _ByteCodec(info) if info.kind == "bytes" else _LibraryCodec(package.root, info)
        self.vocabulary: Sequence[bytes] = self._codec.vocabulary
        """Token id -> its bytes, `vocab_size` entries; specials are b""."""
        self._shield = shield_for(self._codec.specials)
        self.control_names = names = {token_id: name for name, token_id in self._codec.specials.items()}
        """How control tokens are spelled, by id."""
        self.eos_token_ids = info.eos_token_ids
        spelled = {
            "bos_token": names.get(info.bos_token_id if info.bos_token_id is not None else -1, ""),
            "eos_token": names.get(info.eos_token_ids[0] if info.eos_token_ids else -1, ""),
        }
        path = package.root / info.chat_template if info.chat_template else None
        self._template = ChatTemplate(path, self._shield, spelled) if path is not None else None

    def encode(self, prompt: Prompt) -> TokenIds:
        """The prompt's ids, int32 [n], n at least 1.

        Raises:
            InvalidValue: the template refuses the messages, an id is not in the vocabulary, or nothing is left to start from.
            Unsupported: content that is not text, or a chat with an artifact that has no template.
        """
        if prompt.token_ids is not None:
            ids = self._checked(prompt.token_ids)
        elif prompt.messages is not None:
            if self._template is None:
                raise Unsupported("messages: this model has no chat template; use /v1/completions", param="messages")
            ids = self._with_bos(self._codec.encode(self._template.render(prompt.messages, prompt.tools, prompt.options)))
        else:
            ids = self._with_bos(self._codec.encode([prompt.text or ""]))
        if not len(ids):
            raise InvalidValue("prompt: it is empty, so there is no token to start from", param="prompt")
        return ids

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The ids' bytes as text; what is no UTF-8 on its own becomes U+FFFD, and control tokens are spelled out."""
        return b"".join([self.piece(token_id) for token_id in token_ids]).decode(errors="replace")

    def piece(self, token_id: int) -> bytes:
        """A token's bytes; of a control token its name."""
        return self.vocabulary[token_id] or self.control_names.get(token_id, "").encode()

    def encode_plain(self, text: str) -> TokenIds:
        """Ids of a text in which nothing is a control token, int32 [n]."""
        return self._codec.encode(self._shield(text).split(CUT))

    @staticmethod
    def is_quick(prompt: Prompt, size: int) -> bool:
        """Whether encoding takes less of the actor's time than a hop to a thread; `size` is the bytes of its texts."""
        if prompt.token_ids is not None:
            return len(prompt.token_ids) <= QUICK_IDS
        messages = prompt.messages or ()
        few = prompt.tools is None and prompt.options is None and len(messages) <= QUICK_MESSAGES and size <= QUICK_BYTES
        return few and all(message.keys() <= _PLAIN_KEYS for message in messages)

    def encode_or_error(self, prompt: Prompt) -> TokenIds | CalculetError:
        """`encode`, with the error as a value; whatever goes wrong is this prompt's error alone."""
        try:
            return self.encode(prompt)
        except CalculetError as error:
            return error
        except Exception as error:
            return InternalError(f"the prompt could not be tokenized: {type(error).__name__}")

    def _checked(self, token_ids: tuple[int, ...]) -> TokenIds:
        for place, token_id in enumerate(token_ids):
            if not 0 <= token_id < self._info.vocab_size:
                message = f"prompt[{place}]: token id {token_id} is not in the vocabulary (0 to {self._info.vocab_size - 1})"
                raise InvalidValue(message, param="prompt")
        return np.array(token_ids, np.int32)

    def _with_bos(self, ids: TokenIds) -> TokenIds:
        bos = self._info.bos_token_id
        if not self._info.add_bos or bos is None or (len(ids) and ids[0] == bos):
            return ids
        return np.concatenate((np.array([bos], np.int32), ids))


class TokenizingPool:
    """Encodes on threads of its own; `done` gets the ids or the error, on one of them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(POOL_THREADS, "tokenizing")

    def encode(self, tokenizer: PromptTokenizer, prompt: Prompt, done: Callable[[TokenIds | CalculetError], None]) -> None:
        """Queue a prompt."""

        def finish(future: Future[TokenIds | CalculetError]) -> None:
            if not future.cancelled():
                done(future.result())

        self._pool.submit(tokenizer.encode_or_error, prompt).add_done_callback(finish)

    def close(self) -> None:
        """Drop what is queued; what is being encoded ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


# ------------------------------------------------------------------------------------------------ codecs
class _Codec(Protocol):
    specials: Mapping[str, int]
    vocabulary: list[bytes]

    def encode(self, pieces: Sequence[str]) -> TokenIds: ...


class _ByteCodec:
    """An id below 256 is a byte."""

    def __init__(self, info: TokenizerInfo) -> None:
        self.specials: Mapping[str, int] = info.special_tokens
        self.vocabulary = [bytes([token_id]) if token_id < 256 else b"" for token_id in range(info.vocab_size)]
        for token_id in self.specials.values():
            self.vocabulary[token_id] = b""
        self._split = any_of(self.specials)

    def encode(self, pieces: Sequence[str]) -> TokenIds:
        parts = []
        for piece in pieces:
            for text in self._split.split(piece) if self._split else [piece]:
                special = self.specials.get(text)
                ids = np.frombuffer(text.encode(), np.uint8) if special is None else np.array([special])
                parts.append(ids.astype(np.int32))
        return np.concatenate(parts)


class _LibraryCodec:
    """A tokenizer.json of the `tokenizers` library."""

    def __init__(self, root: Path, info: TokenizerInfo) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # read at the first use; the cores belong to the device
        from tokenizers import Tokenizer  # only artifacts of this kind pay for it

        path = root / (info.file or "")
        try:
            data = read_bounded(path, MAX_TOKENIZER_BYTES)
            description: dict[str, Any] = msgspec.json.decode(data)
            self._tokenizer = Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises plain Exception
            raise ArtifactError(f"{path}: not a tokenizer.json: {error}") from None
        added = {int(token["id"]): token for token in description.get("added_tokens") or ()}
        self.specials: Mapping[str, int] = {token["content"]: id_ for id_, token in added.items() if token.get("special")}
        try:
            to_bytes = _byte_rule(description.get("decoder"))
            self.vocabulary = _vocabulary(self._tokenizer.get_vocab(with_added_tokens=True), added, info.vocab_size, to_bytes)
        except ValueError as error:
            raise ArtifactError(f"{path}: {error}") from None

    def encode(self, pieces: Sequence[str]) -> TokenIds:
        encodings = self._tokenizer.encode_batch_fast(list(pieces), add_special_tokens=False)
        return np.concatenate([np.array(encoding.ids, np.int32) for encoding in encodings])


def _vocabulary(
    ids: Mapping[str, int], added: Mapping[int, Mapping[str, Any]], size: int, to_bytes: Callable[[str], bytes]
) -> list[bytes]:
    if (greatest := max(ids.values(), default=0)) >= size:
        raise ValueError(f"token id {greatest}, but the manifest's vocab_size is {size}")
    found = [b""] * size
    for token, token_id in ids.items():
        if token_id not in added:
            found[token_id] = to_bytes(token)
        elif not added[token_id].get("special"):
            found[token_id] = token.encode()
    return found


def _byte_rule(decoder: Any) -> Callable[[str], bytes]:
    kinds = set(_types_in(decoder))
    if "ByteLevel" in kinds:
        table = _byte_level_table()
        return lambda token: bytes(table[character] for character in token)
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentence_piece_bytes
    raise ValueError(f"$.decoder: only ByteLevel, ByteFallback and Metaspace are known, not {sorted(kinds)}")


def _types_in(decoder: Any) -> list[str]:
    if not isinstance(decoder, dict):
        return []
    return [str(decoder.get("type")), *(kind for part in decoder.get("decoders") or () for kind in _types_in(part))]


def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte. Printable bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _sentence_piece_bytes(token: str) -> bytes:
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
        return bytes.fromhex(match[1])
    return token.replace("▁", " ").encode()
