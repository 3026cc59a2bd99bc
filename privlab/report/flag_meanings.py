"""What each red flag means, by name; this costs no import of pandas."""

import tomllib
from collections.abc import Mapping
from importlib.resources import files

FLAG_MEANINGS: Mapping[str, str] = tomllib.loads((files("privlab.report") / "flag_meanings.toml").read_text("utf-8"))
"""When each red flag is raised; `privlab.report.tables.flags` has the rules."""
