"""Somebody who knows no secret, at work against the meeting of the ranks: `stranger.py ATTACK HOST PORTS`.

PORTS are comma-separated. A client calls them, a watcher those that greet like a rank 0, a server listens there.
Runs until it is killed; prints a line when it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Coroutine

NUM_SILENT = 2000


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends a byte now and then."""
    del reader
    while True:
        writer.write(b"s")
        await writer.drain()
        await asyncio.sleep(0.3)


async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says nothing until the other side hangs up."""
    del writer
    while await reader.read(4096):
        pass


async def talk_rubbish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends bytes of all sorts, lines without end among them."""
    del reader
    for _ in range(50):
        kind = random.randrange(4)
        line = b"1 c " + b"0" * 64 + b" node1\n"
        writer.write((random.randbytes(300), b"x" * 100_000, line, b"GET / HTTP/1.1\r\n\r\n")[kind])
        await writer.drain()
        await asyncio.sleep(0.01)


BEHAVIOURS = {"dripping": drip, "silent": be_silent, "garbage": talk_rubbish}


async def call_for_ever(host: str, port: int, kind: str) -> None:
    """Keeps one connection of a kind open, and makes it again when it is closed."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            with contextlib.suppress(OSError):
                await BEHAVIOURS[kind](reader, writer)
            writer.close()
        await asyncio.sleep(random.uniform(0.05, 0.3))


async def listen(ports: list[int], kind: str) -> None:
    """Listens at ports and treats whoever calls as the attack says; "taken": takes the port and answers nobody."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await BEHAVIOURS.get(kind, be_silent)(reader, writer)

    for port in ports:
        await asyncio.start_server(serve, "0.0.0.0", port)
    print("ready", flush=True)
    await asyncio.Event().wait()


async def call(host: str, ports: list[int], kind: str) -> None:
    """Calls, many times at once."""
    count = {"silent": NUM_SILENT, "dripping": 20, "garbage": 20}[kind]
    calls: list[Coroutine[None, None, None]] = [
        call_for_ever(host, ports[number % len(ports)], kind) for number in range(count)
    ]
    print("ready", flush=True)
    await asyncio.gather(*calls)


async def watch_and_call(host: str, ports: list[int], kind: str) -> None:
    """Tries the ports again and again, and attacks whoever greets there like a rank 0."""
    print("ready", flush=True)
    tasks: dict[int, asyncio.Task[None]] = {}
    while True:
        others = [port for port in ports if port not in tasks]
        found = await asyncio.gather(*(_greets(host, port) for port in others))
        for port in (port for port, greets in zip(others, found, strict=True) if greets):
            print(f"attacks port {port}", flush=True)
            tasks[port] = asyncio.create_task(call(host, [port], kind))
        await asyncio.sleep(0.05)


async def _greets(host: str, port: int) -> bool:
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 0.3)
        try:
            return (await asyncio.wait_for(reader.read(11), 0.3)).startswith(b"slurm_train")
        finally:
            writer.close()
    except (OSError, asyncio.TimeoutError):
        return False


def main() -> None:
    """Does what the command line says."""
    attack, host, ports = sys.argv[1:]
    kind, _, side = attack.partition("-")
    numbers = [int(port) for port in ports.split(",")]
    if side == "watcher":
        asyncio.run(watch_and_call(host, numbers, kind))
    if side == "client":
        asyncio.run(call(host, numbers, kind))
    asyncio.run(listen(numbers, kind))


if __name__ == "__main__":
    main()
