"""Conclude from the result files of all entries again, and write `experiments/benchmark/concluded/standing.json`.

    python .ci/conclude_entries.py

`privlab benchmark list` reads that file while the result files are those that it was made from. Run this after a result
file or the rule has changed; `tests/benchmark/test_standing.py` says when.
"""

from privlab.benchmark import entries, standings
from privlab.benchmark.standing import write_concluded

write_concluded(standings(entries(), again=True))
