"""Print the one set-up command of the README that holds the given word, or of `python` its one block of Python."""

import re
import sys
from pathlib import Path

text, word = Path("README.md").read_text(encoding="utf-8"), sys.argv[1]
if word == "python":
    found = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
else:
    lines = re.findall(r"^\s{0,4}(python3 -m venv .*)$", text, re.MULTILINE)
    found = [line for line in lines if word in line]
if len(found) != 1:
    sys.exit(f"README.md must have one block of Python, and one set-up command with '{word}'. Found {len(found)}.")
print(found[0])
