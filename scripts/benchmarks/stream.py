"""One TCP stream between two network namespaces: the best that a host can do with another one's
file.

    python stream.py send FILE ADDRESS:PORT      waits for one who connects, and sends him the file
    python stream.py receive BYTES ADDRESS:PORT  connects, and prints seconds as JSON
"""

import json
import os
import socket
import sys
import time

MIB = 1 << 20


def send(path: str, where: tuple[str, int]) -> None:
    with socket.create_server(where) as server, open(path, "rb") as file:
        print("listening", flush=True)
        connection, _ = server.accept()
        with connection:
            size, sent = os.fstat(file.fileno()).st_size, 0
            while sent < size:
                sent += os.sendfile(connection.fileno(), file.fileno(), sent, size - sent)


def receive(count: int, where: tuple[str, int]) -> None:
    buffer = memoryview(bytearray(MIB))
    begin = time.perf_counter()
    with socket.create_connection(where) as connection:
        while count > 0:
            got = connection.recv_into(buffer)
            if got == 0:
                sys.exit("the stream ends too soon")
            count -= got
    print(json.dumps(time.perf_counter() - begin))


action, what, endpoint = sys.argv[1:]
address, _, port = endpoint.rpartition(":")
if action == "send":
    send(what, (address, int(port)))
else:
    receive(int(what), (address, int(port)))
