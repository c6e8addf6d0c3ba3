"""The option that names a file with options. It stands beside the table: a file cannot name another one."""

from __future__ import annotations

from graphstep.config.options.option import Option, text

CONFIG_FILE = Option(
    dest="config",
    flags=("--config",),
    type=text,
    metavar="FILE",
    group="configuration file",
    default_text="none",
    help="YAML or TOML file with options; what stands on the command line wins over it",
)
