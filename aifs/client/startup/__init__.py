"""Jobs that start sooner: environments and images that are made once and used in place by all ranks
and hosts, and records of what a start touches (docs/startup.md; BootSeer, sec. 4.1 and 4.3).

Environments and images work on a mount of AIFS and in any other directory.
"""

from aifs.client.startup.environment import environment
from aifs.client.startup.jobs import (
    JobStart,
    StartUnknown,
    default_directory,
    directory_of,
    forget,
    list_jobs,
    plan,
    prefetch,
    read_records,
    run_name,
)
from aifs.client.startup.keys import name_of, platform_key
from aifs.client.startup.once import (
    MadeDirectory,
    MadeRecord,
    MakingFailed,
    expire,
    list_made,
    made_at,
    remove,
)
from aifs.client.startup.stages import StageReport, report, stage

__all__ = [
    "JobStart",
    "MadeDirectory",
    "MadeRecord",
    "MakingFailed",
    "StageReport",
    "StartUnknown",
    "default_directory",
    "directory_of",
    "environment",
    "expire",
    "forget",
    "list_jobs",
    "list_made",
    "made_at",
    "name_of",
    "plan",
    "platform_key",
    "prefetch",
    "read_records",
    "remove",
    "report",
    "run_name",
    "stage",
]
