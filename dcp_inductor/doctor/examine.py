"""examine(): everything that the doctor looks at, in one value."""

from __future__ import annotations

from dataclasses import replace

from dcp_inductor.config import Config
from dcp_inductor.doctor import backends, machine, software
from dcp_inductor.doctor.advice import advice
from dcp_inductor.doctor.checkup import Checkup, Need


def default_ranks() -> int:
    """As many ranks as there are cards, or the two that an exchange needs."""
    return max(2, machine.num_cards())


def examine(need: Need | None = None, config: Config | None = None) -> Checkup:
    """Look at this process and this machine; changes neither.

    need: the exchange to judge backends and workspaces by. config: by default that of
    the environment.
    """
    need = Need(default_ranks()) if need is None else need
    config = Config.from_env() if config is None else config
    found = Checkup(
        need=need,
        versions=machine.versions(),
        cards=machine.cards(),
        links=machine.links(),
        symmetric_memory=machine.symmetric_memory(),
        backends=backends.states(need, config),
        hooks=software.hooks(),
        caches=software.caches(),
        hosts=software.hosts(),
        reserved=backends.reserved(),
        enabled=config.enabled,
        asked_backend=config.backend,
    )
    return replace(found, next=advice(found))
