"""Loggers of the package: one a subject, all below ``dcp_inductor``.

``TORCH_LOGS="+dcp_inductor"`` shows them at debug level, since torch takes any
importable name; a program's own logging configuration stays in charge of handlers.
"""

from __future__ import annotations

import logging

passes = logging.getLogger("dcp_inductor.passes")
runtime = logging.getLogger("dcp_inductor.runtime")
integrations = logging.getLogger("dcp_inductor.integrations")
