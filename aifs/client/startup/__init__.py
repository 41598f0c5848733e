"""Jobs that start sooner: environments and images, made once and used in place by all ranks and
hosts, and records of the files that a start touches (docs/guide/startup.md; BootSeer, sec. 4.1 and
4.3).

Environments and images work on a mount of AIFS and elsewhere. Modules are imported at first use.
"""

from typing import TYPE_CHECKING

from aifs.core.on_demand import by_name, on_demand

if TYPE_CHECKING:
    from aifs.client.startup.captured import capture
    from aifs.client.startup.environments import environment, name_of, platform_key
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
    from aifs.client.startup.once import (
        MadeDirectory,
        MadeRecord,
        MakingFailed,
        expire,
        list_made,
        made_at,
        remove,
    )
    from aifs.client.startup.stages import (
        StageReport,
        StageSpan,
        describe_spent,
        report,
        spans,
        stage,
        summary,
    )

_MODULES = by_name(
    {
        "captured": "capture",
        "environments": "environment name_of platform_key",
        "jobs": "JobStart StartUnknown default_directory directory_of forget list_jobs plan "
        "prefetch read_records run_name",
        "once": "MadeDirectory MadeRecord MakingFailed expire list_made made_at remove",
        "stages": "StageReport StageSpan describe_spent report spans stage summary",
    }
)
"""The module of this package in which each public name is found."""

__all__ = [*_MODULES]

__getattr__ = on_demand(__name__, _MODULES)
