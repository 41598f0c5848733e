"""The keeper of a mount: has its descriptor, so that the mount outlives the daemon, and the next
daemon goes on when one has died. A process of its own that runs this file with the standard library
alone; it does no I/O of the mount's.

While a daemon serves, the next one stands by: it has started, and waits for its turn at a pipe. So
programs do not wait for the start of an interpreter.

Its arguments, as JSON in the first one: ``descriptors`` are those of the mount, the table
(kept.py), and of fusectl to end the connection, and to ask how many requests wait; ``pid`` the
first daemon, ``number`` the mount's device, ``tries`` how many daemons in a row may die before they
have served for some seconds, ``stuck_s`` after how long a daemon is replaced that does nothing
while requests wait (0: never), ``command`` starts the next one, with ``--descriptors`` and those of
the mount, the table and the pipe behind it, ``log`` is the log file ("": standard error).
"""

import errno
import json
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # the module typing would be a fifth of its memory
    from collections.abc import Callable
    from typing import Any

LOOK_S, SOON_S = 1.0, 0.1
"""How often it looks at the daemon that runs: also whether that is about to end, though a thread
keeps it in the kernel; while something else is expected, too."""

TRIAL_S = 30.0
"""How long a daemon of another version may take until it stands by, and then until it serves."""

FIRST_S, PATIENCE_S = 5.0, 60.0
"""A short mount does not pay for a daemon that stands by: the first one is started so long after
the mount, and not while the mount's own is busy, but then at the latest. One that has died while it
stood by is followed by another after the same time."""

SILENT_S = 60.0
"""After how long a daemon that does not show that it is alive is said, if requests wait."""

FIRST_PAUSE_S = 0.02

FAST_S, PAUSE_MAX_S = 5.0, 5.0
"""A daemon that dies before it has served for so long is one of the tries, whose pauses grow up to
this one."""

SCARCE = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
"""The machine, or its user, has no more processes, memory or descriptors now."""

HEAD_AT = 4096 + 16384 * 48  # kept.py
SERVED, ENDED, RESTARTS, DEATH, ORDER, READY, FINISHED, ALIVE = 1, 2, 3, 4, 7, 8, 9, 11
STUCK = 1 << 16  # of DEATH
ORDER_AT, ORDER_MAX, REFUSED = HEAD_AT + 512, 1024, 1 << 32


def head(table: int, word: int, value: int | None = None) -> int:
    at = HEAD_AT + 8 * word
    if value is None:
        return int.from_bytes(os.pread(table, 8, at), sys.byteorder)
    return os.pwrite(table, value.to_bytes(8, sys.byteorder), at)


def patiently(function: "Callable[..., Any]", *args: object) -> "Any":
    """What the function returns, when the machine has room for it. Raises other OSErrors."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return function(*args)
        except OSError as error:
            if error.errno not in SCARCE:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LOOK_S)


def describe_death(status: int) -> str:
    """A status of waitpid(2), and whether the keeper has killed the daemon."""
    if status & STUCK:
        return "it did nothing"
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return f"exit {os.WEXITSTATUS(status)}"


def look_at(pid: int) -> tuple[bool, float]:
    """Whether the main thread of a process has ended, and how many seconds of a processor the
    process has used."""
    try:
        with patiently(open, f"/proc/{pid}/stat", "rb") as file:
            state, *numbers = file.read().rpartition(b") ")[2].split()
    except OSError:
        return True, 0.0
    return state in b"ZX", sum(map(int, numbers[10:12])) / os.sysconf("SC_CLK_TCK")


def is_over(device: int, number: bytes) -> bool:
    """Whether the connection has ended, or nothing is mounted any more."""
    poll = select.poll()
    poll.register(device, select.POLLIN)
    if any(events & select.POLLERR for _, events in poll.poll(0)):
        return True
    with patiently(open, "/proc/self/mountinfo", "rb") as mounts:
        return not any(line.split()[2] == number for line in mounts)


class Keeper:
    """Of one mount, whose daemons it starts until the mount ends."""

    def __init__(
        self,
        descriptors: "tuple[int, int, int, int]",
        pid: int,
        number: str,
        tries: int,
        stuck_s: float,
        command: list[str],
        log: str,
    ) -> None:
        """Its arguments: see above."""
        self.device, self.table, self.abort, self.asked = descriptors
        self.tries = tries
        self.stuck_s = stuck_s
        self.command = command
        self.log = log
        self.number = number.encode()
        """As mountinfo says it."""
        self.pid = pid
        """The daemon that runs."""
        self.daemon = -1
        """Its descriptor; -1: it has ended."""
        self.is_child = False
        """Whether that was started here."""
        self.dying: list[int] = []
        """Daemons that have not left the kernel yet."""
        self.served = 0
        """The daemons that had served when the one that runs was started."""
        self.serves_since_s = 0.0
        """When that was first seen to serve; 0: it was not."""
        self.waiting, self.turn = 0, -1
        """The daemon that stands by (0: none), and its pipe."""
        self.due_s = time.monotonic() + FIRST_S
        """From when on the next one is to be started."""
        self.seen = time.monotonic(), 0.0
        """When it looked last, and what time of a processor the daemon had used."""
        self.is_silent = False
        """Whether it has been said that the daemon does nothing."""
        self.death = 0
        """What is known of the death of the daemon besides."""
        self.order = 0
        """The newest order to go on with another version."""
        self.trial: list[str] = []
        """The command of that version, until a daemon of it serves."""
        self.is_tried = False
        """Whether the daemon that runs is one of it."""
        self.since_s = 0.0
        """When its last step began."""

    def run(self) -> None:
        failed = 0
        while True:
            status = self.wait()
            if head(self.table, ENDED) or is_over(self.device, self.number):
                return
            served_s = time.monotonic() - self.serves_since_s if self.serves_since_s else 0
            # Another version is judged by itself, and has had the one before killed.
            failed = 0 if served_s > FAST_S or self.trial else failed + 1
            self.judge(self.serves(), has_ended=True)
            self.served = head(self.table, SERVED)
            if not self.served:
                self.say("the mount ends with its daemon")
                return
            if failed >= self.tries:
                self.say(
                    f"the mount ends: {failed} daemons in a row died before they had served for "
                    f"{FAST_S:g} s, the last one by {describe_death(status | self.death)}"
                )
                return
            head(self.table, DEATH, status | self.death)
            self.is_silent, self.death = False, 0
            time.sleep(PAUSE_MAX_S * (failed / self.tries) ** 3)
            head(self.table, RESTARTS, head(self.table, RESTARTS) + 1)
            self.follow()

    def serves(self) -> bool:
        """Whether the daemon that runs has served."""
        return head(self.table, SERVED) > self.served

    def wait(self) -> int:
        """Until the daemon has ended, or will have as soon as it leaves the kernel; its status."""
        try:
            self.daemon = patiently(os.pidfd_open, self.pid)
        except ProcessLookupError:
            return self.status()
        poll = select.poll()
        poll.register(self.daemon, select.POLLIN)
        look_s = SOON_S
        while not poll.poll(look_s * 1000):
            has_ended, used_s = look_at(self.pid)
            if has_ended:
                break
            look_s = self.look(used_s)
        os.close(self.daemon)
        return self.status()

    def status(self) -> int:
        """As waitpid(2) says it, of the daemon that has ended, or will have."""
        if self.is_child:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                return status
            self.dying.append(self.pid)
        return signal.SIGKILL

    def look(self, used_s: float) -> float:
        """What is due while a daemon runs, which has used so much time of a processor; seconds
        until the next look."""
        self.dying = [pid for pid in self.dying if not os.waitpid(pid, os.WNOHANG)[0]]
        is_busy = self.is_busy(used_s) and not self.is_child
        serves = self.serves()
        self.judge(serves, has_ended=False)
        if serves:
            self.serves_since_s = self.serves_since_s or time.monotonic()
            self.watch()
        if self.is_tried or not serves:
            pass
        elif self.trial:
            self.have_ready()
        elif (order := head(self.table, ORDER)) != self.order:
            self.order = order
            program = os.pread(self.table, ORDER_MAX, ORDER_AT).partition(b"\0")[0]
            self.dismiss()
            self.trial = [os.fsdecode(program), *self.command[1:]]
            self.stand_by()
        elif self.has_died() and self.is_time(is_busy):
            self.stand_by()
        return SOON_S if self.trial or (self.is_child and not self.waiting) else LOOK_S

    def is_busy(self, used_s: float) -> bool:
        """Whether the daemon has used more than half a processor since the last look."""
        (then_s, before_s), now_s = self.seen, time.monotonic()
        self.seen = now_s, used_s
        return used_s - before_s > (now_s - then_s) / 2

    # --- a daemon that does nothing ---

    def watch(self) -> None:
        """Say so once, and replace it if that is wanted."""
        silent_s = time.monotonic() - head(self.table, ALIVE)
        if silent_s < min(SILENT_S, self.stuck_s or SILENT_S) or not (waiting := self.requests()):
            self.is_silent = False
            return
        told = f"the daemon (pid {self.pid}) has done nothing for {silent_s:.0f} s"
        if not self.is_silent:
            self.is_silent = True
            self.say(f"{told}, and requests wait: {waiting}; the stacks of its threads follow")
            self.kill(signal.SIGUSR2)
        elif 0 < self.stuck_s < silent_s:
            self.say(f"{told}, and is killed; another one goes on (kernel.replace_stuck)")
            self.death = STUCK
            self.kill()

    def requests(self) -> int:
        """How many wait for an answer; 0: the system does not tell."""
        try:  # it can be read once
            with patiently(open, f"/proc/self/fd/{self.asked}", "rb") as file:
                return int(file.read())
        except OSError:
            return 0

    # --- another version ---

    def have_ready(self) -> None:
        """A daemon of it has been started: when it stands by it is its turn."""
        if head(self.table, READY) == self.waiting:
            self.kill()
        elif self.has_died() or self.is_late():
            self.refuse("does not stand by")

    def judge(self, serves: bool, has_ended: bool) -> None:
        """Of a daemon on trial, if one runs, or has until now."""
        if not self.is_tried:
            return
        if serves:
            self.command, self.trial, self.is_tried = self.trial, [], False
            head(self.table, FINISHED, self.order)
        elif has_ended:
            self.refuse("does not serve")
        elif self.is_late():
            self.kill()

    def is_late(self) -> bool:
        return time.monotonic() - self.since_s > TRIAL_S

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send the daemon that runs a signal."""
        try:
            signal.pidfd_send_signal(self.daemon, number)
        except ProcessLookupError:
            pass  # it has just ended

    def refuse(self, why: str) -> None:
        """The mount goes on as before."""
        self.say(f"{self.trial[0]} {why}: the mount goes on with {self.command[0]}")
        self.dismiss()
        self.due_s = time.monotonic()
        self.trial, self.is_tried = [], False
        head(self.table, FINISHED, self.order | REFUSED)

    # --- the daemon that stands by ---

    def is_time(self, is_busy: bool) -> bool:
        """Whether the next one is to be started now."""
        past_s = time.monotonic() - self.due_s
        return past_s > PATIENCE_S or (past_s > 0 and not is_busy)

    def stand_by(self) -> None:
        """Start a daemon that waits for its turn. Waits until the machine has room for it; nobody
        could follow one that dies meanwhile."""
        command = self.trial or self.command
        waits, self.turn = patiently(os.pipe)
        descriptors = (self.device, self.table, waits)
        self.waiting = patiently(os.fork)
        if self.waiting:
            os.close(waits)
            self.since_s = time.monotonic()
            self.due_s = self.since_s + PATIENCE_S
            return
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            for fd in descriptors:
                os.set_inheritable(fd, True)
            os.execv(command[0], [*command, "--descriptors", *map(str, descriptors)])
        finally:
            os._exit(127)

    def has_died(self) -> bool:
        """Whether none stands by any more."""
        if self.waiting and os.waitpid(self.waiting, os.WNOHANG)[0]:
            os.close(self.turn)
            self.waiting = 0
        return not self.waiting

    def dismiss(self) -> None:
        """It ends, if there is one."""
        if not self.has_died():
            os.kill(self.waiting, signal.SIGKILL)
            os.waitpid(self.waiting, 0)
            os.close(self.turn)
            self.waiting = 0

    def follow(self) -> None:
        """It is its turn."""
        if self.has_died():
            self.stand_by()
        try:
            os.write(self.turn, b"1")
        except BrokenPipeError:
            pass  # it has just died
        os.close(self.turn)
        self.pid, self.is_child, self.waiting = self.waiting, True, 0
        self.is_tried = bool(self.trial)
        self.since_s = self.due_s = time.monotonic()
        self.serves_since_s = 0.0

    def say(self, text: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} WARNING keeper: {text}\n".encode()
        try:
            if not self.log:
                os.write(2, line)
                return
            fd = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(fd, line)
            os.close(fd)
        except OSError:
            pass


def main() -> None:
    # A batch system may send all processes of a job any signal.
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    keeper = Keeper(**json.loads(sys.argv[1]))
    try:
        keeper.run()
        keeper.dismiss()
    except Exception as error:
        keeper.say(f"the mount ends with its daemon: {error!r}")
        raise
    try:
        os.write(keeper.abort, b"1")
    except OSError:
        pass


if __name__ == "__main__":
    main()
