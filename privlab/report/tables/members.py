"""Images that the victim saw in training, and those that it did not: what was measured on each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from privlab.grids import KNOWN
from privlab.report.tables.cells import figure_text, some
from privlab.report.tables.per_image import WORST
from privlab.report.tables.results import Results, case_names

_WORDS = {"seen": "seen in training", "not seen": "not seen", "unknown": "unknown"}


@dataclass(frozen=True)
class Apart:
    """The mean and the standard deviation (n − 1) of one attack over the images of one case and one membership."""

    case: str
    member: str
    attack: str
    metric: str
    images: int
    mean: float
    std: float

    def __str__(self) -> str:
        mean, std = (figure_text(value, KNOWN[self.metric].decimals) for value in (self.mean, self.std))
        spread = f" ± {std}" if math.isfinite(self.std) else ""
        return f"{self.attack} {mean}{spread} ({some(self.images, 'image')})"


def apart(results: Results) -> list[Apart]:
    """Return mean and spread of the paper's attack and of the worst case, on members, on others, and on unknown images.

    Nothing is returned where no membership is known. Means are those of the lead metric.
    """
    records, names, layout = results.records, case_names(results), results.layout
    if "member" not in records or records.member.isna().all():
        return []
    paper, metric = layout.paper_attack, results.lead
    known = records.loc[records.image_sha256.fillna("").ne("") & records.member.notna()]
    member = known.drop_duplicates(["case", "image_sha256"]).set_index(["case", "image_sha256"]).member.to_dict()
    images = results.laid_out(columns=(metric,)).scored.images
    images = images[images.scored & images.attack.isin([paper, WORST]) & images.external.eq("") & images.image.ne("")]
    told = [member.get(pair, "unknown") for pair in zip(images.case, images.image, strict=True)]
    groups = dict(list(images.assign(member=told).groupby(["case", "member", "attack"])[metric]))
    return [
        Apart(names[case], word, attack, metric, int(of.count()), float(of.mean()), float(of.std()))
        for case in range(len(names))
        for word in _WORDS
        for attack in dict.fromkeys([paper or WORST, WORST])
        if (of := groups.get((case, word, attack))) is not None
    ]


def apart_lines(rows: Sequence[Apart]) -> list[str]:
    """Return a line for each case; it counts images."""
    cases = dict.fromkeys(row.case for row in rows)
    lines = []
    for case in cases:
        of_case = [row for row in rows if row.case == case]
        parts = [
            f"{_WORDS[word]}: {', '.join(str(row) for row in of_case if row.member == word)}"
            for word in dict.fromkeys(row.member for row in of_case)
        ]
        metric = of_case[0].metric.replace("_", " ").upper()
        about = f"members and others, as the manifest states them ({metric}, mean ± standard deviation): "
        lines.append(about + (f"{case}: " if len(cases) > 1 else "") + "; ".join(parts))
    return lines
