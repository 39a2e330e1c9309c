"""Measure how hostile request bodies of up to 16 MB delay other clients, compared with ordinary bodies.

Fairlead runs in its own process, with the demonstration model, its context extended to 131,072 tokens, and a
node with canned answers. The bodies are sent one after another while a second user streams tokens and
requests `/health` continuously. It reports for each body: the status and time of the response; the longest
times that the server's event loop was blocked (`MEASURES`); the second user's longest wait for a token and
for `/health`; and the growth of the server's memory. Each figure is the minimum of several rounds, because
noise only increases it. On a busy machine only the figures in CPU time are meaningful. In addition:

- fairness: the time of a second user's chat of 25 KB while the first user's six texts of 4 MB are encoded;
- memory: the server's memory before, during and after 25 bodies of 16 MB.

    python bench/bodies.py [--rounds 3] [--only WORD] [--out bench/results/bodies.json]
"""

import argparse
import json
import platform
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bodies_cases import CASES, CHAT, MILLION, Case, chat_of
from bodies_parts import (
    KEYS,
    MEASURES,
    Canary,
    Server,
    answer_from_memory,
    connect,
    long_context_model,
    post_body,
    request,
    serving,
)
from router_parts import process

SETTLE_S = 0.3
BODIES = 25


def attack(server: Server, canary: Canary, case: Case, rounds: int) -> dict[str, Any]:
    """Send the body `rounds` times; return the minimum of each figure."""
    body = case.make()
    found: list[dict[str, Any]] = []
    for _ in range(rounds):
        time.sleep(SETTLE_S)
        before_mb = server.memory_mb()
        canary.reset_maxima()
        server.reset_maxima()
        answer = post_body(server.port, case.path, body)
        time.sleep(SETTLE_S)
        found.append(
            {
                "status": answer.status,
                "time_ms": 1000 * answer.time_s,
                **server.longest_ms(),
                "token_gap_ms": 1000 * canary.token_gap_s,
                "health_ms": 1000 * canary.health_s,
                "grown_mb": server.memory_mb("VmHWM") - before_mb,
                "why": answer.body[:160].decode(errors="replace") if answer.status >= 400 else "",
            }
        )
    figures = ("time_ms", *MEASURES, "token_gap_ms", "health_ms", "grown_mb")
    return {
        "mb": round(len(body) / MILLION, 2),
        "status": found[0]["status"],
        **{figure: round(min(one[figure] for one in found), 1) for figure in figures},
        "why": found[0]["why"],
    }


def fairness(server: Server) -> dict[str, Any]:
    """Return the time of a chat of 25 KB, alone and during six texts of 4 MB of another user."""
    chat = chat_of(b"Hello " * 4_200)  # refused after it has been encoded; only the encoding matters here
    text = b'{"model":"near","prompt":"%s"}' % (b"hello " * 700_000)
    alone = post_body(server.port, CHAT, chat, KEYS[1])
    threads = [threading.Thread(target=post_body, args=(server.port, "/tokenize", text)) for _ in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(SETTLE_S)
    beside = post_body(server.port, CHAT, chat, KEYS[1])
    for thread in threads:
        thread.join()
    return {
        "alone_ms": round(1000 * alone.time_s, 1),
        "beside_ms": round(1000 * beside.time_s, 1),
        "status": beside.status,
    }


def memory(server: Server) -> dict[str, Any]:
    """Send bodies of 16 MB up to their last byte, then complete half of them and cut off the others."""
    whole = request(
        CHAT, b'{"model":"near","messages":[{"role":"user","content":"%s"}]}' % (b"x" * 16 * MILLION), KEYS[0]
    )
    before_mb = server.memory_mb()
    server.reset_maxima()
    socks = [connect(server.port) for _ in range(BODIES)]

    def send(index: int) -> None:
        with suppress(OSError):  # the server may refuse it before it is sent completely
            socks[index].sendall(whole[:-1])

    threads = [threading.Thread(target=send, args=(index,)) for index in range(BODIES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(1)
    held_mb = server.memory_mb()
    for index, sock in enumerate(socks):
        try:
            if index % 2:
                sock.sendall(whole[-1:])
                while sock.recv(1 << 16):
                    pass
        except OSError:
            pass
        sock.close()
    time.sleep(2)
    return {
        "before_mb": round(before_mb),
        "held_mb": round(held_mb),
        "peak_mb": round(server.memory_mb("VmHWM")),
        "after_mb": round(server.memory_mb()),
    }


def measure(only: str, rounds: int) -> dict[str, Any]:
    """Run the measurements; return their figures."""
    result: dict[str, Any] = {"bodies": {}}
    with (
        tempfile.TemporaryDirectory() as directory,
        process(answer_from_memory) as node,
        serving(long_context_model(Path(directory)), node.url) as server,
    ):
        post_body(server.port, CHAT, CASES["chat of 2 KB"].make())
        with Canary(server.port) as canary:
            time.sleep(1)
            canary.reset_maxima()
            server.reset_maxima()
            time.sleep(2)
            quiet = {
                **server.longest_ms(),
                "token_gap_ms": 1000 * canary.token_gap_s,
                "health_ms": 1000 * canary.health_s,
            }
            result["quiet"] = {name: round(time_ms, 1) for name, time_ms in quiet.items()}
            print("quiet", result["quiet"], flush=True)
            for name, case in CASES.items():
                if only in name:
                    result["bodies"][name] = found = attack(server, canary, case, rounds)
                    print(f"{name:28} {found}", flush=True)
        if not only or only == "fairness":
            result["fairness"] = fairness(server)
            print("fairness", result["fairness"], flush=True)
        if not only or only == "memory":
            result["memory"] = memory(server)
            print("memory", result["memory"], flush=True)
    return result


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of which the minimum counts")
    parser.add_argument(
        "--only", default="", help="measure only bodies with this text in their names, or fairness, or memory"
    )
    parser.add_argument("--out", help="write the result to this file")
    options = parser.parse_args()
    result = {
        "question": "whether a body that one client sends holds up the others",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rounds": options.rounds,
        **measure(options.only, options.rounds),
    }
    text = json.dumps(result, indent=2)
    if options.out:
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
