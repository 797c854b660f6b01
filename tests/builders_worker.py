"""Packages for tokenizing tests, and a worker process with a supervisor and routers played by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from calculet_core import wire
from calculet_core.artifact import CapacityInfo, Manifest, Package, TokenizerInfo
from calculet_core.batches import BatchProfile, KvLayout
from calculet_core.clock import S
from calculet_core.ids import make_request_id
from calculet_core.requests import Prompt, SamplingParams, StopRules
from calculet_core.shell.fleet import Fleet, load_fleet

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIALS = {"<|start|>": 256, "<|end|>": 257}


def a_package(root: Path, tokenizer: TokenizerInfo) -> Package:
    """What a tokenizer needs of a package; nothing of it is signed."""
    profile = BatchProfile("m", 1, 64, "int32", "float32", KvLayout("per_lane_contiguous", "bf16", 2))
    manifest = Manifest(
        schema="calculet-artifact/v1", name="test", version="1", backend="sim", image="image", image_sha256="0" * 64, files={},
        profiles=(profile,), context=64, lanes=1, tokenizer=tokenizer, capacity=CapacityInfo(1, 1, 2), golden="golden.jsonl",
    )  # fmt: skip
    return Package(root, manifest, "0" * 64, ())


def a_chat_package(
    root: Path, template: str | None = TEMPLATE, bos_token_id: int | None = None, add_bos: bool = False
) -> Package:
    """A byte tokenizer with two control tokens and a template that uses them."""
    if template is not None:
        (root / "chat_template.jinja").write_text(template)
    return a_package(root, TokenizerInfo(
        kind="bytes", vocab_size=260, chat_template="chat_template.jinja" if template is not None else None,
        bos_token_id=bos_token_id, eos_token_ids=(257,), add_bos=add_bos, special_tokens=SPECIALS,
    ))  # fmt: skip


def a_library_package(root: Path, kind: str, vocab_size: int = 1_000) -> Package:
    """A small tokenizer.json of kind `byte_level` or `byte_fallback`."""
    texts = ["Hello wörld, it is 123 o'clock. ", "the quick brown fox\n\n"] * 20
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=list(SPECIALS), show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
    else:
        letters = sorted({*"".join(texts).replace(" ", "▁")})
        tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
        ids = {token: token_id for token_id, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
        tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "chat_template.jinja").write_text(TEMPLATE)
    return a_package(root, TokenizerInfo(
        kind="tokenizers", vocab_size=vocab_size, file="tokenizer.json", chat_template="chat_template.jinja",
        eos_token_ids=(tokenizer.token_to_id("<|end|>") or 0,),
    ))  # fmt: skip


# ------------------------------------------------------------------------------------------------ a process and its peers
DEADLINE_S = 60.0
ROUTER = 0xA0A0A0A0


class Peer:
    """A supervisor (bound) or a router (connected), played by hand over one ZeroMQ socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.seen: list[Any] = []
        """All messages, oldest first."""
        self.identity = b""

    def send(self, message: wire.Message) -> None:
        self.send_raw(*wire.encode(message))

    def send_raw(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.identity, *frames] if self.socket.type == zmq.ROUTER else frames)

    def receive(self, timeout_s: float) -> Any | None:
        """The next message, or None when none comes in time."""
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        *identity, kind, body = self.socket.recv_multipart()
        self.identity = identity[0] if identity else b""
        self.seen.append(wire.decode(kind, body))
        return self.seen[-1]

    def until(self, condition: Callable[[Any], object], timeout_s: float = DEADLINE_S) -> Any:
        """The first message from now on that meets the condition."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            message = self.receive(left)
            if message is not None and condition(message):
                return message
        raise AssertionError(f"it did not come within {timeout_s:g} s; the last messages: {self.seen[-5:]}")


class WorkerProcess:
    """`python -m calculet_worker run`, with a supervisor at its fleet's socket."""

    def __init__(self, fleet: Fleet, board: str = "board0", death_fd: int | None = None) -> None:
        self.fleet, self.board = fleet, board
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        fleet.run_dir.mkdir(parents=True, exist_ok=True)
        socket = self.context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        fleet.supervisor_socket.unlink(missing_ok=True)
        socket.bind(f"ipc://{fleet.supervisor_socket}")
        self.supervisor = Peer(socket)
        with (fleet.path.parent / "worker.log").open("a") as log:
            self.process = spawn_worker(fleet, board, death_fd, stderr=log)

    def report(self, condition: Callable[[wire.WorkerReport], object] = lambda _: True) -> wire.WorkerReport:
        """The next report that meets the condition."""
        message = self.supervisor.until(lambda message: isinstance(message, wire.WorkerReport) and condition(message))
        assert isinstance(message, wire.WorkerReport)
        return message

    def load(self, generation: int = 1) -> wire.WorkerReport:
        """Have the configured model loaded, and wait until it serves."""
        model = self.fleet.model_of(self.board)
        self.report()
        self.supervisor.send(wire.LoadModel(1, generation, model.alias, str(self.fleet.resolve(model.package)), ""))
        return self.report(lambda report: report.state == "READY" and report.generation == generation)

    def router(self, endpoint: str, incarnation: int = ROUTER) -> Peer:
        """A connected router that has said hello and got the answer."""
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        peer = Peer(socket)
        peer.send(wire.RouterHello(incarnation, os.getpid()))
        peer.until(lambda message: isinstance(message, wire.WorkerHello))
        return peer

    def exit(self, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait for the end; the content of the exit file, with the process's own code as `returncode`."""
        returncode = self.process.wait(timeout_s)
        return {**json.loads(self.fleet.board_exit(self.board).read_bytes()), "returncode": returncode}

    def close(self) -> None:
        """Kill what is left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.context.destroy(linger=0)


def a_fleet(folder: Path, package: Path, trusted_key: Path, **sections: Any) -> Fleet:
    """One simulated board that the package is placed on as `toy`."""
    config = {
        "schema": "calculet-fleet/v1", "run_dir": "run", "state_dir": "state", "log_dir": "log", "trusted_keys": [str(trusted_key)],
        "boards": [{"name": "board0", "device": "sim"}], "models": [{"alias": "toy", "package": str(package)}], **sections,
    }  # fmt: skip
    path = folder / "fleet.yaml"
    path.write_text(json.dumps(config))
    return load_fleet(path)


def spawn_worker(fleet: Fleet, board: str, death_fd: int | None = None, stderr: Any = subprocess.PIPE) -> subprocess.Popen[str]:
    """A worker process of the fleet."""
    environment = {**os.environ, **({"CALCULET_DEATH_FD": str(death_fd)} if death_fd is not None else {})}
    command = [sys.executable, "-m", "calculet_worker", "run", "--config", str(fleet.path), "--board", board]
    passed = (death_fd,) if death_fd is not None else ()
    return subprocess.Popen(command, env=environment, pass_fds=passed, stderr=stderr, text=True, start_new_session=True)


def a_submit(report: wire.WorkerReport, counter: int, prompt: Prompt, **overrides: Any) -> wire.Submit:
    """A greedy request of 16 tokens for what the report says is served."""
    fields: dict[str, Any] = {
        "request_id": make_request_id(ROUTER, counter), "attempt": 0, "epoch": report.epoch, "generation": report.generation,
        "digest": report.digest, "alias": report.alias, "tenant": "default", "weight": 1.0, "prompt": prompt, "max_new_tokens": 16,
        "sampling": SamplingParams(temperature=0.0), "stop": StopRules(ignore_eos=True),
        "deadline_ns": time.monotonic_ns() + 60 * S, "deadline_asked": False, "accepted_ns": time.monotonic_ns(),
    }  # fmt: skip
    return wire.Submit(**{**fields, **overrides})
