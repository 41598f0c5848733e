"""The keeper of a mount: has its descriptor, so that the mount outlives the daemon, and the next
daemon goes on when one has died. A process of its own that runs this file with the standard library
alone; it does no I/O of the mount's.

While a daemon serves, the next one stands by: it has started, and waits for its turn at a pipe. So
programs do not wait for the start of an interpreter.

Its arguments, as JSON in the first one: ``device``, ``table`` (kept.py) and ``abort`` (fusectl; -1)
are descriptors, ``pid`` the first daemon, ``number`` the mount's device, ``tries`` how many daemons
in a row may die before they serve, ``command`` starts the next one, with the descriptors of the
mount, the table and the pipe behind it, ``log`` is the log file ("": standard error).
"""

import json
import os
import select
import signal
import sys
import time

LOOK_S, SOON_S = 1.0, 0.1
"""How often it looks at the daemon that runs: also whether that is about to end, though a thread
keeps it in the kernel; while something else is expected, too."""

TRIAL_S = 30.0
"""How long a daemon of another version may take until it stands by, and then until it serves."""

FIRST_PAUSE_S, PAUSE_MAX_S = 0.02, 5.0

HEAD_AT = 4096 + 16384 * 48  # kept.py
SERVED, ENDED, RESTARTS, DEATH, ORDER, READY, FINISHED = 1, 2, 3, 4, 7, 8, 9
ORDER_AT, ORDER_MAX, REFUSED = HEAD_AT + 512, 1024, 1 << 32


def head(table: int, word: int, value: int | None = None) -> int:
    at = HEAD_AT + 8 * word
    if value is None:
        return int.from_bytes(os.pread(table, 8, at), sys.byteorder)
    return os.pwrite(table, value.to_bytes(8, sys.byteorder), at)


def is_dying(pid: int) -> bool:
    """Whether its main thread has ended, or a SIGKILL waits for it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in b"ZX"
    except OSError:
        return True


def is_over(device: int, number: bytes) -> bool:
    """Whether the connection has ended, or nothing is mounted any more."""
    poll = select.poll()
    poll.register(device, select.POLLIN)
    if any(events & select.POLLERR for _, events in poll.poll(0)):
        return True
    with open("/proc/self/mountinfo", "rb") as mounts:
        return not any(line.split()[2] == number for line in mounts)


class Keeper:
    """Of one mount, whose daemons it starts until the mount ends."""

    def __init__(
        self,
        device: int,
        table: int,
        abort: int,
        pid: int,
        number: str,
        tries: int,
        command: list[str],
        log: str,
    ) -> None:
        """Its arguments: see above."""
        self.device = device
        self.table = table
        self.abort = abort
        self.tries = tries
        self.command = command
        self.log = log
        self.number = number.encode()
        """As mountinfo says it."""
        self.pid = pid
        """The daemon that runs."""
        self.is_child = False
        """Whether that was started here."""
        self.dying: list[int] = []
        """Daemons that have not left the kernel yet."""
        self.served = 0
        """The daemons that had served when the one that runs was started."""
        self.waiting, self.turn = 0, -1
        """The daemon that stands by (0: none), and its pipe."""
        self.order = 0
        """The newest order to go on with another version."""
        self.trial: list[str] = []
        """The command of that version, until a daemon of it serves."""
        self.tried = 0
        """The daemon of it that runs."""
        self.since_s = 0.0
        """When its last step began."""

    def run(self) -> None:
        failed = 0
        while True:
            status = self.wait()
            if head(self.table, ENDED) or is_over(self.device, self.number):
                return
            serves = self.serves()
            failed = 0 if serves or self.tried or not self.is_child else failed + 1
            self.judge(serves, is_late=True)
            self.served = head(self.table, SERVED)
            if self.served == 0 or failed >= self.tries:
                self.say(f"the mount ends: {failed} daemons in a row died before they served")
                return
            head(self.table, DEATH, status)
            if failed:
                time.sleep(min(FIRST_PAUSE_S * 2**failed, PAUSE_MAX_S))
            head(self.table, RESTARTS, head(self.table, RESTARTS) + 1)
            self.follow()

    def serves(self) -> bool:
        """Whether the daemon that runs has served."""
        return head(self.table, SERVED) > self.served

    def wait(self) -> int:
        """Until the daemon has ended, or will have as soon as it leaves the kernel; its status."""
        try:
            daemon = os.pidfd_open(self.pid)
        except OSError:
            return self.status()
        poll = select.poll()
        poll.register(daemon, select.POLLIN)
        look_s = SOON_S
        while not poll.poll(look_s * 1000) and not is_dying(self.pid):
            look_s = self.look(daemon)
        os.close(daemon)
        return self.status()

    def status(self) -> int:
        """As waitpid(2) says it, of the daemon that has ended, or will have."""
        if self.is_child:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                return status
            self.dying.append(self.pid)
        return signal.SIGKILL

    def look(self, daemon: int) -> float:
        """What is due while a daemon runs; seconds until the next look."""
        self.dying = [pid for pid in self.dying if not os.waitpid(pid, os.WNOHANG)[0]]
        serves, is_late = self.serves(), time.monotonic() - self.since_s > TRIAL_S
        if self.tried:
            if is_late and not serves:
                signal.pidfd_send_signal(daemon, signal.SIGKILL)
            else:
                self.judge(serves)
        elif self.trial:
            if head(self.table, READY) == self.waiting:
                signal.pidfd_send_signal(daemon, signal.SIGKILL)
            elif self.has_died() or is_late:
                self.refuse("does not stand by")
        elif serves and (order := head(self.table, ORDER)) != self.order:
            self.order, self.since_s = order, time.monotonic()
            program = os.pread(self.table, ORDER_MAX, ORDER_AT).partition(b"\0")[0]
            self.dismiss()
            self.trial = [os.fsdecode(program), *self.command[1:]]
            self.stand_by()
        elif serves and not self.waiting:
            self.stand_by()
        return SOON_S if self.trial or not self.waiting else LOOK_S

    # --- another version ---

    def judge(self, serves: bool, is_late: bool = False) -> None:
        """Of a daemon on trial, if one runs."""
        if self.tried and serves:
            self.command, self.trial, self.tried = self.trial, [], 0
            head(self.table, FINISHED, self.order)
        elif self.tried and is_late:
            self.refuse("does not serve")

    def refuse(self, why: str) -> None:
        """The mount goes on as before."""
        self.say(f"{self.trial[0]} {why}: the mount goes on with {self.command[0]}")
        self.dismiss()
        self.trial, self.tried = [], 0
        head(self.table, FINISHED, self.order | REFUSED)

    # --- the daemon that stands by ---

    def stand_by(self) -> None:
        """Start a daemon that waits for its turn."""
        command = self.trial or self.command
        waits, self.turn = os.pipe()
        descriptors = (self.device, self.table, waits)
        self.waiting = os.fork()
        if self.waiting:
            os.close(waits)
            return
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            for fd in descriptors:
                os.set_inheritable(fd, True)
            os.execv(command[0], [*command, ":".join(map(str, descriptors))])
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
        if self.trial:
            self.tried, self.since_s = self.pid, time.monotonic()

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
    keeper.run()
    keeper.dismiss()
    if keeper.abort >= 0:
        try:
            os.write(keeper.abort, b"1")
        except OSError:
            pass


if __name__ == "__main__":
    main()
