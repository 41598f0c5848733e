"""The processes of a job, which save and load a model together."""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

_PROGRAM = Path(__file__).with_name("rank.py")


def command(
    action: str, rank: int, size: int, directories: Iterable[object], inside: Sequence[str] = ()
) -> list[str]:
    """Of one process (rank.py). ``inside``: how it gets where it is to run."""
    words = (sys.executable, _PROGRAM, action, rank, size, *directories)
    return [*inside, *map(str, words)]


class Ranks:
    """The processes that run these commands; ``step`` lets all of them do their next step and waits
    for the last.
    """

    def __init__(self, commands: Iterable[Sequence[str]]) -> None:
        self.processes = [
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for words in commands
        ]
        for process in self.processes:
            self._answer(process)

    def step(self) -> list[tuple[float, int]]:
        for process in self.processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [self._answer(process).split() for process in self.processes]
        return [(float(first), int(second)) for first, second in answers]

    def _answer(self, process: subprocess.Popen) -> str:
        line = process.stdout.readline()
        if not line:
            sys.exit(f"a process of the job has failed with exit status {process.wait()}")
        return line

    def finish(self) -> None:
        for process in self.processes:
            process.stdin.close()
            if process.wait():
                sys.exit("the loaded tensors differ")
