"""What connections cost the router: its memory with 5,000 idle keep-alive connections and 1,000 open streams, and that it still answers."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zmq
from bench_router import rss_mb
from builders_router import FakeWorker, HttpClient, RouterProcess, a_view, until

from calculet_core import wire

STREAM = {"model": "qwen3", "prompt": "hi", "stream": True, "max_tokens": 1000}


async def bench(idle: int, streams: int) -> dict[str, float]:
    """All figures."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        router = RouterProcess(folder)

        def begin(worker: FakeWorker, submit: wire.Submit) -> None:
            worker.accept(submit)
            worker.piece(submit, "first")

        worker = FakeWorker(context, folder / "run" / "w-board0-1.sock", "board0", on_submit=begin)
        router.publish(a_view(worker.view()))
        router.start()
        try:
            await router.listening()
            pid = router.process.pid
            before = rss_mb(pid)
            kept = []
            for _ in range(idle):
                client = await HttpClient.connect(router.port)
                client.get("/livez")
                await client.response()
                kept.append(client)
            after_idle = rss_mb(pid)
            for _ in range(streams):
                client = await HttpClient.connect(router.port)
                client.post("/v1/completions", STREAM)
                await client.head()
                kept.append(client)
            await until(lambda: len(worker.submits) == streams)
            start = time.monotonic()
            kept[0].get("/livez")
            assert (await kept[0].response())[0] == 200
            answer_ms = (time.monotonic() - start) * 1000
            return {"rss_mb": before, "rss_mb_idle": after_idle, "rss_mb_streams": rss_mb(pid), "answer_ms": answer_ms}
        finally:
            router.kill()
            worker.close()
            context.destroy(linger=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--idle", type=int, default=5_000)
    parser.add_argument("--streams", type=int, default=1_000)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps({name: round(value, 1) for name, value in asyncio.run(bench(options.idle, options.streams)).items()}))
