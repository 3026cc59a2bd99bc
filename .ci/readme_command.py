"""Print the one command of the README that holds the given word."""

import re
import sys
from pathlib import Path

lines = re.findall(r"^\s{0,4}(python3 -m venv .*)$", Path("README.md").read_text(encoding="utf-8"), re.MULTILINE)
found = [line for line in lines if sys.argv[1] in line]
if len(found) != 1:
    sys.exit(f"README.md must have one set-up command with '{sys.argv[1]}'. Found {len(found)}.")
print(found[0])
