"""Available models: the zoo that comes with privlab, timm's hub and its cache, and files that a user imported."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from privlab.base import PrivlabError, parse_json, read_text, sha256_of, unknown_name, write_whole
from privlab.victims import weights as stored
from privlab.victims.layouts import bare_name
from privlab.victims.named import find_pretrained, resolve, victim
from privlab.victims.names import ARCHITECTURES
from privlab.victims.zoo import COMPACT, PLACERS, ZOO, shipped_file


@dataclass(frozen=True)
class Model:
    """A model by name: `origin` is "zoo", "timm", "imported" or "file"; `file` holds its weights, if they are here."""

    name: str
    origin: str
    architecture: str
    file: str | None
    bytes: int | None
    about: str


def models() -> list[Model]:
    """Return the zoo, timm's models of our architectures, and what was imported; nothing is downloaded."""
    zoo = [_model(name, "zoo", entry.architecture, shipped_file(name), entry.about) for name, entry in ZOO.items()]
    hub = [
        _model(name, "timm", architecture, _cached_file(architecture), "pretrained on ImageNet")
        for name, architecture in ARCHITECTURES.items()
        if architecture not in COMPACT
    ]
    placers = [
        _model(name, "zoo", each.architecture, shipped_file(name), f"position predictor: {each.kind}")
        for name, each in PLACERS.items()
    ]
    imported = sorted(stored.cache_folder("models").glob("*.safetensors"))
    return [*zoo, *placers, *hub, *(_imported_model(path) for path in imported)]


def show(name: str) -> dict[str, Any]:
    """Return what is known of a model, its card and whether its weights are those of the card.

    `sha256` is over names, shapes and values of all tensors in single precision, as on the card and in records;
    `matches` is None without card.
    The name is one of `models()`, or a file of weights, with its card next to it (`NAME.json` or `card.json`).

    Raises:
        PrivlabError: if there is no such model, or its file cannot be read.
    """
    found = next((model for model in models() if model.name == name), None)
    if found is None and not Path(name).is_file():
        raise unknown_name("model", name, [*(model.name for model in models()), "FILE"])
    found = found or _model(name, "file", "", Path(name), "")
    if found.file is None:
        return asdict(found) | {"sha256": None, "card": None, "matches": None}
    path = Path(found.file)
    digest, card = _digest(path), _card(path)
    stated = () if card is None else (card.get("sha256"), card.get("predictor_sha256"))
    matches = None if card is None else digest in stated
    return asdict(found) | {"sha256": digest, "card": card, "matches": matches}


def _digest(path: Path) -> str:
    """Return SHA-256 of the weights as a victim holds them: in single precision."""
    state = stored.read_state(path)
    return stored.hash_of({name: each.float() if each.is_floating_point() else each for name, each in state.items()})


def fetch(name: str) -> Path:
    """Return the pretrained weights of a victim, from the package, timm's cache or the hub.

    Raises:
        PrivlabError: for an unknown name.
        WeightsUnavailable: if they cannot be had, with the reason.
    """
    return find_pretrained(name, resolve(name)[0])


def import_weights(file: Path, name: str, *, img_size: int | None = None) -> tuple[Path, dict[str, Any]]:
    """Check weights against a victim, write them in privlab's layout to the store, and return their file and card.

    Args:
        file: the weights, in timm's, the MJP authors' or privlab's layout.
        name: name of the victim.
        img_size: side of the input, in pixels, to which the position embeddings are resized; None leaves them.

    Raises:
        PrivlabError: if the file cannot be read, does not fit, or the store cannot be written.
    """
    if str(file) in ("auto", "pretrained", "random"):
        raise PrivlabError(f"import takes a file. Found '{file}': for timm's weights there is `privlab models fetch`.")
    file = stored.file_of(file)
    read = stored.read_state(file)
    made = victim(name, weights=file, img_size=img_size)
    state = dict(made.model.vit.state_dict())
    if made.weights.unknown == "trained" and made.model.unk_embed is not None:
        state["unk_embed"] = made.model.unk_embed.detach()
    digest = stored.hash_of(state)
    card: dict[str, Any] = {
        "model": name,
        "architecture": made.architecture,
        "source": file.name,
        "source_sha256": sha256_of(file),
        "sha256": digest,
        "fits": made.params() | {"classes": made.model.vit.num_classes, "tensors": len(state)},
        "left_out": sorted({bare_name(key) for key in read} - state.keys() - {"pos_embed.weight"}),
    }
    path = stored.cache_folder("models") / f"{made.name.replace(':', '-')}-{digest[:8]}.safetensors"
    text = json.dumps(card, indent=1, ensure_ascii=False)
    try:
        write_whole(path, lambda part: stored.save(state, part))
        write_whole(path.with_suffix(".json"), lambda part: part.write_text(text, encoding="utf-8"))
    except PrivlabError as error:
        raise PrivlabError(f"The model cannot be kept in {path.parent}: {error}") from error
    return path, card


def _model(name: str, origin: str, architecture: str, path: Path | None, about: str) -> Model:
    size = None if path is None else path.stat().st_size
    return Model(name, origin, architecture, None if path is None else str(path), size, about)


def _cached_file(architecture: str) -> Path | None:
    try:
        return stored.pretrained_file(architecture, download=False)
    except stored.WeightsUnavailable:
        return None


def _imported_model(path: Path) -> Model:
    try:
        card: Mapping[str, Any] = _card(path) or {}
    except PrivlabError as error:
        return _model(path.stem, "imported", "", path, str(error))
    about = f"from {card.get('source', 'a file unknown')}"
    return _model(path.stem, "imported", str(card.get("architecture", "")), path, about)


def _card(path: Path) -> dict[str, Any] | None:
    """Return the card next to a file of weights, a training's included; None where there is none."""
    for card in (path.with_suffix(".json"), path.with_name("card.json")):
        if card.is_file() and (card.stem == path.stem or path.name in ("model.safetensors", "predictor.safetensors")):
            try:
                read = parse_json(read_text(card, "card"), f"'{card}'")
            except PrivlabError as error:
                raise PrivlabError(f"The card '{card}' cannot be read: {error}.") from error
            if not isinstance(read, dict):
                raise PrivlabError(f"The card '{card}' must hold an object. Found {type(read).__name__}.")
            return read
    return None
