"""The exceptions that a user of dcp_inductor can meet.

Each message says what was asked, what is there, why that can't work, and what to do.
"""

from __future__ import annotations


class DcpError(Exception):
    """Base of every exception that this package raises on purpose."""


class BadInput(DcpError, ValueError):
    """A tensor, group or option that the exchange can't take."""


class UnknownGroup(BadInput):
    """A group name that no process group of this process has."""


class BackendUnavailable(DcpError, RuntimeError):
    """The backend that was asked for by name can't run here."""


class NotReserved(DcpError, RuntimeError):
    """A call inside a CUDA graph capture on a group without a workspace."""


class WorkspaceTooSmall(DcpError, RuntimeError):
    """A workspace can't be made, or can't serve the call it was bound to."""


class StreamConflict(DcpError, RuntimeError):
    """A capture on a workspace slot that belongs to another capture stream."""


class RanksDisagree(DcpError, RuntimeError):
    """The ranks of a group differ in something that they must share."""


class PeerTimeout(DcpError, RuntimeError):
    """A peer didn't come to the exchange, or came with another call."""


class FusionMissed(DcpError, RuntimeError):
    """An exchange stayed unfused under ``Config(on_miss="raise")``."""
