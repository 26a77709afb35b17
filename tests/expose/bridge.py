"""A way to the Unix socket for what speaks TCP only, through a process that is whom the test says."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

_BRIDGE = """
import asyncio, os, sys
path, uid, groups = sys.argv[1], int(sys.argv[2]), [int(g) for g in sys.argv[3:]]

async def pump(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()

async def taken(reader, writer):
    inner, outer = await asyncio.open_unix_connection(path)
    await asyncio.gather(pump(reader, outer), pump(inner, writer))

async def main():
    server = await asyncio.start_server(taken, "127.0.0.1", 0)
    if uid != os.getuid():
        os.setgroups(groups); os.setgid(uid); os.setuid(uid)
    print(server.sockets[0].getsockname()[1], flush=True)
    asyncio.get_running_loop().add_reader(0, os._exit, 0)  # whoever started it has gone
    await server.serve_forever()

asyncio.run(main())
"""


@contextlib.contextmanager
def bridge(path: str, *, uid: int, groups: tuple[int, ...] = ()) -> Iterator[str]:
    """The URL at which the socket at `path` answers as it does to this user, who is in these groups.

    Only root can be another user.
    """
    child = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _BRIDGE, path, str(uid), *map(str, groups)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        yield f"http://127.0.0.1:{child.stdout.readline().strip()}"
    finally:
        child.kill()
        child.communicate()
