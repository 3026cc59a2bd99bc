"""Filters of one's own without arguments, as NVFlare makes them from JSON. They write below the folder AUDITS."""

import os

from net import Net  # beside this file
from photographs import photographs  # beside this file

from privlab.nvflare import AuditFilter
from privlab.threat import Client


class AuditOne(AuditFilter):
    """The audit of a step of SGD on one photograph."""

    def __init__(self) -> None:
        super().__init__(Net(), Client(lr=0.01), os.environ["AUDITS"], lambda: photographs(1))


class AuditEight(AuditFilter):
    """The audit of a step of SGD on eight photographs at once."""

    def __init__(self) -> None:
        client = Client(lr=0.01, images=8, batch_size=8)
        super().__init__(Net(), client, os.environ["AUDITS"], lambda: photographs(8))


class AuditAdam(AuditFilter):
    """The audit of a step of AdamW on one photograph."""

    def __init__(self) -> None:
        client = Client(optimiser="adamw", lr=1e-4)
        super().__init__(Net(), client, os.environ["AUDITS"], lambda: photographs(1))
