"""Jobs that start sooner: environments that are installed once and used in place by all ranks and
hosts, and records of what a start touches (docs/startup.md; BootSeer, sec. 4.1 and 4.3).

Environments work on a mount of AIFS and in any other directory.
"""

from aifs.client.startup.environment import (
    Environment,
    EnvironmentFailed,
    EnvironmentRecord,
    environment,
    environment_at,
    expire,
    list_environments,
)
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
from aifs.client.startup.stages import StageReport, report, stage

__all__ = [
    "Environment",
    "EnvironmentFailed",
    "EnvironmentRecord",
    "JobStart",
    "StageReport",
    "StartUnknown",
    "default_directory",
    "directory_of",
    "environment",
    "environment_at",
    "expire",
    "forget",
    "list_environments",
    "list_jobs",
    "name_of",
    "plan",
    "platform_key",
    "prefetch",
    "read_records",
    "report",
    "run_name",
    "stage",
]
