"""Runs a program of a box that reaches one server: a port of the box's network leads to a UNIX socket.

A box of bubblewrap has a network of its own, in which nothing else listens. The socket, a relay's on this machine, is
mounted into it. Standard library only.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import IO

PORT = 8005
"""The port at 127.0.0.1 of the box."""
SHOWN_BYTES = 4000
"""The end of the program's output that is printed."""
_CHUNK = 2**16


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
    except OSError:  # the other side has left
        pass
    finally:
        writer.close()


async def _run(socket: str, words: list[str], file: IO[bytes]) -> int:
    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_unix_connection(socket)
        await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))

    async with await asyncio.start_server(forward, "127.0.0.1", PORT):
        program = await asyncio.create_subprocess_exec(*words, stdout=file, stderr=file)
        return await program.wait()


def main() -> int:
    """Run a program, behind the socket's path and that of a file for its output; return its exit code."""
    # A file, because a process that the program leaves could hold a pipe open.
    with open(sys.argv[2], "w+b", buffering=0) as file:
        status = asyncio.run(_run(sys.argv[1], sys.argv[3:], file))
        file.seek(max(0, os.fstat(file.fileno()).st_size - SHOWN_BYTES))
        sys.stdout.buffer.write(file.read(SHOWN_BYTES))
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
