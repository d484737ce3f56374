"""Hydra finds this by its package's name: it makes the config group `nereus` known to any job."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class NereusSearchPath(SearchPathPlugin):
    """Appends, never prepends: a job's own `nereus/*.yaml` wins."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="nereus", path="pkg://nereus_verl.conf")
