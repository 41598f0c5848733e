"""Which job a process belongs to, by what its launcher has put into the environment."""

import hashlib
import os
import re

NAME = re.compile(r"[!-+\--~]{0,63}")  # printable, no comma

_EVERYWHERE = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE")
_ON_A_HOST = ("SLURM_STEP_ID", "TORCHELASTIC_RESTART_COUNT")
"""Launchers of several hosts may count each for itself."""


def job_of_environment(on_a_host: bool) -> str:
    """The same in all ranks of a job, and where it differs it is another job, or another run of it;
    '' if nothing is known. Runs that a launcher does not tell apart have the same. ``on_a_host``:
    all ranks are on this one."""
    names = _EVERYWHERE + (_ON_A_HOST if on_a_host else ())
    job = "/".join(value for value in map(os.environ.get, names) if value)
    return (
        job
        if NAME.fullmatch(job)
        else hashlib.blake2b(os.fsencode(job), digest_size=16).hexdigest()
    )
