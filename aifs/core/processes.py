"""What the kernel says of processes. Reads /proc."""


def process_of(thread: int) -> int:
    """The process of a thread: FUSE tells who asks by the number of the thread. The same number if
    it has ended, or is not to be seen from here."""
    try:
        with open(f"/proc/{thread}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Tgid:"):
                    return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return thread
