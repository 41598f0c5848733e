"""The job that a process belongs to, by the variables of its launcher."""

import hashlib
import os
import re

NAME = re.compile(r"[!-+\--~]{0,63}")  # printable, no comma

VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "PMIX_NAMESPACE",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RESTART_COUNT",
)
"""Launchers of several hosts may count the last two each for itself; the ranks of a mount are on
one host.
"""


def job_of_environment() -> str:
    """The same in all ranks of a job on this host, and where it differs it is another job, or
    another run of it; '' if nothing is known. Runs that a launcher does not tell apart have the
    same.
    """
    job = "/".join(value for value in map(os.environ.get, VARIABLES) if value)
    return (
        job
        if NAME.fullmatch(job)
        else hashlib.blake2b(os.fsencode(job), digest_size=16).hexdigest()
    )
