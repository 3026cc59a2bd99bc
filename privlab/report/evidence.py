"""What an audit is evidence of: what was attacked and found, what was not tried, and which sentences that supports."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from privlab.attacks import attacks
from privlab.base import PrivlabError, first, options_of
from privlab.evaluation import Adversary, Case, unread
from privlab.evaluation.names import EFFORTS
from privlab.grids import KNOWN, case_of
from privlab.metrics import Metric
from privlab.report.run import LEAKS
from privlab.report.tables import Results, Table, scope, to_markdown
from privlab.report.tables.writers import Cell, Column, Line
from privlab.threat import AttackDeclarations, Capability, Client, attack_declarations

_NOT_QUOTED = {
    True: "“All updates of this client leak”, or “the image is that of this patient”: one release was attacked.",
    False: "“What this client sends does not leak”: this release was empty.",
    None: "“This does not leak”, “no image can be reconstructed” or “the model is anonymous”: attacks that fail prove "
    "nothing, and others were not tried.",
}
"""What must not be concluded from an audit's `leaks`."""

_THREAT_MODELS = {
    "B": "informed eavesdropper: it sees what is sent, and knows what images look like in general",
    "C": "parameter-aware eavesdropper: it also knows the settings of the client's training",
    "D": "data-enhanced eavesdropper: it also has public images like the private ones",
}
"""Letters of Carletti et al. (2025), for the threat models that an audit can have."""

_CLAUSES = (
    (
        "EDPB Opinion 28/2024, “AI model testing and resistance to attacks”",
        "It supports an assessment of reconstruction attacks. The opinion is about a trained model: here one release "
        "during its training was attacked.",
    ),
    (
        "AI Act (Regulation (EU) 2024/1689), Article 15(5)",
        "It supports an assessment of confidentiality attacks. The system in its deployment was not attacked.",
    ),
    (
        "OWASP AISVS 1.0, C11, Model-Inversion Resistance",
        "It supports an assessment of the objective of C11, resistance to privacy attacks. The requirements there are "
        "about the outputs of a model, which were not attacked.",
    ),
)
"""Clauses that an audit speaks to, and how."""

_FOLDERS = re.compile(r"(?<![\w.:/…-])(?:/|~/|[A-Za-z]:\\)(?:[^\s/\\'\":,]+[/\\])+(?=[^\s/\\])")
"""The folders of an absolute path, up to its last part."""

_KEPT = re.compile(r"(?:pictures|strips)/[^/\\]+\.png")
"""Names of the pictures of an audit: who wrote its run.json may have named any file."""


@dataclass(frozen=True)
class Section:
    """A part of the evidence: a title, paragraphs, and a table with a heading for each column."""

    title: str
    lines: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def evidence_of(results: Results) -> list[Section]:
    """Return the evidence of an audit; no section for another run."""
    facts = results.facts
    if not {"attacks", "batches"} & facts.keys():
        return []
    case = case_of(facts["specification"], facts["cases"][0]["jobs"][0]["released"])
    leaks, kind = facts.get("leaks"), "gradient" if case.released == "gradients" else case.released
    rows = [row for row in facts.get("attacks", facts.get("batches")) if _made(row)]
    tried = list(dict.fromkeys(row["attack"] for row in rows))
    proven = list(dict.fromkeys(row["attack"] for row in rows if row.get("explained") or row.get("levels_wrong") == 0))
    verdict = f"leaks: {LEAKS[leaks]}"
    by = f" ({', '.join(proven)})" if proven else ""
    sha256 = [f"{digest[:16]}…" for digest in facts.get("released", {}).get("sha256", {}).values()]
    which = f" (SHA-256 {' and '.join(sha256)})" if sha256 else ""
    quotable = (
        f"“privlab {facts['privlab']} attacked the {kind} of {facts['images']['source']}{which} by "
        f"{', '.join(tried) or 'no attack'}. Leaks: {LEAKS[leaks]}{by}.”"
    )
    weak = [*facts.get("flags", ()), *filter(None, [facts.get("reference")]), *facts["warnings"]]
    return [
        Section("Verdict", [f"{verdict}{by}."]),
        Section("Keep it as you keep the private image", [_warning(results)]),
        Section("What was attacked", rows=_attacked(facts, case)),
        attacks_section(results, rows, [KNOWN[results.lead]]),
        Section("What was not tried", [_NOT_TRIED], ("reason", "attacks"), _not_tried(case, tried, facts)),
        Section("Threat model", [_threat_model(kind, tried), scope(results.records)]),
        Section("Flags and warnings", weak or ["None."]),
        Section("What may be quoted", [quotable]),
        Section("What may not be quoted", [_NOT_QUOTED[leaks]]),
        Section("Clauses that it speaks to", [_NO_ASSESSMENT], ("clause", "what this page supports"), _CLAUSES),
        Section("Hashes and versions", rows=_provenance(facts)),
    ]


def attacks_table(results: Results) -> Table:
    """Return the table of the attacks of an audit without a reference: what each proves."""
    section = attacks_section(results, results.facts.get("attacks", results.facts.get("batches")))
    lines = [Line([Cell(text) for text in row]) for row in section.rows]
    return Table([Column(head) for head in section.head or ("attack",)], lines, [("", line) for line in section.lines])


def to_markdown_text(results: Results) -> str:
    """Return the evidence of an audit as Markdown, without pictures.

    Raises:
        PrivlabError: if the run is not an audit.
    """
    if not (sections := evidence_of(results)):
        raise PrivlabError(f"'{results.path}' is not an audit. The evidence page shows what `privlab audit` wrote.")
    environment = Environment(
        loader=PackageLoader("privlab.report", "page"), trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters["md"] = lambda text: to_markdown(without_folders(text))
    return environment.get_template("evidence.md").render(title=results.title, sections=sections)


def without_folders(text: str) -> str:
    """Return a text without the folders of this machine, which a reader need not know."""
    return _FOLDERS.sub("…/", text)


def pictures_of(results: Results) -> list[tuple[str, Path]]:
    """Return the reconstructions that an audit kept, with the names of their attacks; no file outside its folder."""
    facts, folder = results.facts, results.path
    kept = [(row["attack"], name) for row in facts.get("attacks", ()) for name in row.get("files", ())]
    kept += [(row["attack"], f"strips/{row['sheet']}") for row in facts.get("batches", ()) if "sheet" in row]
    own = [(attack, folder / name) for attack, name in kept if _KEPT.fullmatch(str(name))]
    return [(attack, path) for attack, path in own if path.is_file()]


def _made(row: Mapping[str, Any]) -> bool:
    """Return whether an attack made a row of an audit; the others belong to controls."""
    return not row["attack"].startswith("control:")


_OF_REFUSALS = " That it does not apply is no evidence of privacy."
_NOT_TRIED = "That an attack was not tried is no evidence of privacy."
_NO_ASSESSMENT = (
    "This page supports an assessment of these clauses. It is not an assessment itself, and states no finding under a "
    "law or a standard."
)


def _warning(results: Results) -> str:
    reference = "" if "unscored" in results.facts else "the private image and "
    return (
        f"The folder {results.path} holds {reference}reconstructions, which may be the private image, and so does this "
        "page as HTML. In Markdown it has no pictures; labels, names of files and their hashes are in both."
    )


def _attacked(facts: Mapping[str, Any], case: Case) -> list[tuple[str, str]]:
    """Return the model, what it released, and how the client trained as far as that was stated or fitted."""
    victim, released = facts["victim"], facts.get("released", {})
    channels, height, width = victim["input"]
    fitted = {name: value for row in facts.get("attacks", ()) for name, value in row.get("fitted", {}).items()}
    usual = {*options_of(Client())} - {f"client.lr={Client.lr}", f"client.steps={Client.steps}"}
    stated = [option for option in case.adversary.options if option not in usual]
    rows = [
        ("model", f"{victim['name']}, {channels} × {height} × {width}, patches of {victim['patch']}"),
        ("released", f"{facts['images']['source']}, images: {facts['images']['count']}"),
        ("parameters released", str(released.get("gradients", ""))),
        ("parameters that did not move", first(released.get("without_gradient") or (), 3)),
        ("client, as stated", "; ".join([case.words.client, *stated]) if case.words.client is not None else ""),
        ("client, as fitted", "; ".join(_fitted(name, value) for name, value in fitted.items())),
        ("defense", facts["cases"][0]["options"]["defense"]),
    ]
    return [row for row in rows if row[1]]


def attacks_section(results: Results, rows: Sequence[Mapping[str, Any]], metrics: Sequence[Metric] = ()) -> Section:
    """Return the table of an audit's attacks: of features how many batches each read, else what each proves.

    Args:
        results: the audit's.
        rows: those of `run.json` that it shows.
        metrics: those whose scores it has too, if there is a reference.
    """
    title, facts = "By which attacks, and what came back", results.facts
    if not rows:
        return Section(title, ["No attack ran."])
    if "batches" in facts:
        head = ("attack", "batches", "images", "failed", "ms per image")
        return Section(title, ["Features prove no image: look at the pictures."], head, _by_attack(rows))
    kind = facts["cases"][0]["jobs"][0]["released"].removesuffix("s")  # "gradient" or "update"
    scored, as_stored, lines = [] if "unscored" in facts else metrics, facts["reference"] is None, []
    for row in rows:
        residual = f"{float(row['residual']):.1e}" if "residual" in row else "n/a"
        lines.append((row["attack"], residual, _what_it_says(row, kind, as_stored=as_stored), *scores_of(row, scored)))
    head = ("attack", "residual", "what it says", *(f"{metric.name} {metric.arrow}" for metric in scored))
    about = f"residual: distance between the {kind} of the image and the released one; 0 is the same"
    return Section(title, [about], head, lines)


def scores_of(row: Mapping[str, Any], metrics: Sequence[Metric]) -> list[str]:
    """Return the scores of a row of an audit as texts; what was not measured is "n/a"."""
    return [f"{float(row[m.name]):.{m.decimals}f}" if m.name in row else "n/a" for m in metrics]


def _by_attack(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return for each attack how many batches of features it read, and how long it took."""
    lines: list[tuple[str, ...]] = []
    for attack in dict.fromkeys(row["attack"] for row in rows):
        of_attack = [row for row in rows if row["attack"] == attack]
        images = sum(row.get("images", 0) for row in of_attack)
        ms = f"{1000 * sum(row.get('seconds', 0) for row in of_attack) / images:.1f}" if images else "n/a"
        failed = sum(row["status"] == "failed" for row in of_attack)
        lines.append((attack, str(len(of_attack)), str(images), str(failed), ms))
    return lines


def _what_it_says(row: Mapping[str, Any], what: str, *, as_stored: bool) -> str:
    """Return what a row of an audit proves about the private image, of `what` was released, "gradient" or "update".

    `as_stored` says that no reference shows another preprocessing of the client.
    """
    if row["status"] != "ok":
        return "failed"
    if "block" not in row:
        return "no attack made it"
    if row.get("blank"):
        return "nothing found: one colour"
    if not row["explained"]:
        return f"not {'checked' if row['explained'] is None else 'proven'}: look at the image"
    several = row["images"] > 1
    if row["proof"] == "grey levels":
        return f"{'stored images: they lie' if several else 'a stored image: it lies'} on grey levels"
    image = "the private image: it gives" if as_stored else "what was fed: it gives"
    return f"{'the private images: together they give' if several else image} the released {what}"


def _fitted(name: str, value: Any) -> str:  # noqa: ANN401
    """Return a fitted setting in words; a label is fitted as the share of each class."""
    if not isinstance(value, Mapping):
        return f"{name}={value}"
    return f"{name}: " + (", ".join(f"{share:.2f} of class {c}" for c, share in value.items()) or "none of the classes")


def _not_tried(case: Case, tried: Sequence[str], facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the attacks of the package that did not run, by the reason."""
    refused = facts["cases"][0]["refused"]
    by_reason: dict[str, list[str]] = {}
    for name, kind in attacks().items():
        reads_features = Capability.RELEASED_FEATURES in kind.requires
        if name in tried:
            continue
        reason = refused.get(name) or unread(kind, case.client, filtered=case.defends_gradients)
        if reads_features != case.features_released:
            reason = f"reads {'features' if reads_features else 'gradients and updates'}"
        elif reason is None and attack_declarations(kind).named_only:
            reason = "runs only if --attack names it"
        elif reason is None:
            reason = _left_out(attack_declarations(kind), case.adversary, tried)
        by_reason.setdefault(reason.removeprefix(f"Attack '{name}' ").removesuffix(_OF_REFUSALS), []).append(name)
    rows = [(reason, ", ".join(names)) for reason, names in by_reason.items()]
    return [*rows, ("needs a server that changes the model, or chooses the clients (letters F to H)", "any")]


def _left_out(declared: AttackDeclarations, adversary: Adversary, tried: Sequence[str]) -> str:
    """Return why an attack that applies did not run: others were named, or it is left out unless it is named."""
    efforts = [*EFFORTS]
    if adversary.attacks is None and efforts.index(declared.effort) > efforts.index(adversary.effort):
        return f"needs --effort {declared.effort}"
    if adversary.attacks is None and any(name in tried for name in declared.stands_in_for):
        return "stands in for an attack that ran"
    return "was not asked for"


def _threat_model(kind: str, tried: Sequence[str]) -> str:
    """Return the letter of the threat model, by what the attacks that ran were granted."""
    if kind == "features":
        return "The letters of Carletti et al. (2025) name gradients and updates: features have none."
    public = any(Capability.AUXILIARY_IMAGES in attacks()[name].requires for name in tried if name in attacks())
    letter = "D" if public else {"update": "C"}.get(kind, "B")
    return (
        f"{letter}, {_THREAT_MODELS[letter]}. The letters are those of Carletti et al., “SoK: Gradient Inversion "
        "Attacks in Federated Learning” (USENIX Security 2025). Here it knows the weights of the model too. Statistics "
        "of natural images, fitted to privlab's own photographs, count as general knowledge."
    )


def _provenance(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    weights, commit = facts["victim"]["weights"], facts.get("commit") or {}
    rows = [
        *((f"SHA-256 of {name}", sha256) for name, sha256 in facts.get("released", {}).get("sha256", {}).items()),
        ("SHA-256 of the attacked weights", str(weights["sha256"])),
        *((name, str(version)) for name, version in facts["versions"].items()),
        ("commit", ", ".join(f"{name} {value}" for name, value in commit.items())),
        ("seed", str(facts["specification"]["seed"])),
        ("written", facts["written"]),
        ("command", str(facts.get("command") or "")),
    ]
    return [row for row in rows if row[1]]
