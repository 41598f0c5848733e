"""Jobs that start sooner: environments that are installed once and used in place by all ranks and
hosts (docs/startup.md; BootSeer, sec. 4.3).

Works on a mount of AIFS and in any other directory.
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
from aifs.client.startup.keys import name_of, platform_key

__all__ = [
    "Environment",
    "EnvironmentFailed",
    "EnvironmentRecord",
    "environment",
    "environment_at",
    "expire",
    "list_environments",
    "name_of",
    "platform_key",
]
