"""Rewrite old options of CUDA graphs in command lines, shell scripts and YAML files."""

from __future__ import annotations

from graphstep.config.migration.rewrite import Rewrite
from graphstep.config.migration.shell import migrate_argv, migrate_shell
from graphstep.config.migration.yaml_text import migrate_yaml

__all__ = ["Rewrite", "migrate_argv", "migrate_shell", "migrate_yaml"]
