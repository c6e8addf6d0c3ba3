"""Options that change nothing here: see ``config/elsewhere.py``."""

from __future__ import annotations

from graphstep.config.elsewhere import SWITCHES, VALUES
from graphstep.config.options.option import Option, text

_GROUP = "known, without effect here"


def _option(flag: str, *, takes_value: bool) -> Option:
    return Option(
        dest=flag.removeprefix("--").replace("-", "_"),
        flags=(flag,),
        nargs=1 if takes_value else 0,
        type=text,
        default=None if takes_value else False,
        annotation="str | None" if takes_value else "bool",
        metavar="VALUE" if takes_value else "",
        group=_GROUP,
        help="has no effect",
    )


ELSEWHERE_OPTIONS: tuple[Option, ...] = (
    *(_option(flag, takes_value=False) for flag in SWITCHES),
    *(_option(flag, takes_value=True) for flag in VALUES),
)
