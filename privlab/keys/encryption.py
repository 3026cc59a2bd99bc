"""Encrypted model files: a key permutes the backbone, the owner keeps the rest; decryption is exact, bit by bit.

ENC is a safetensors file in timm's layout that timm loads as it is. It holds the keyed backbone, and zeros for the
embedding, the final norm and the head, which go to the OWNER file (or stay in the clear, which is the paper's setting).
ENC's metadata hold `privlab_format`, `privlab_key_id` (the commitment to the key), `privlab_shape` and `privlab_owner`
(SHA-256 of the owner's tensors, or `clear`), but never the key. OWNER keeps the metadata that the model's file had.

This is obfuscation: whoever has the public model that ENC was made from finds the key by assignment.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import timm
import torch
from safetensors import SafetensorError, safe_open
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from privlab.base import PrivlabError, check_file, parse_json
from privlab.keys.algebra import ModelShape, apply_key, remove_key
from privlab.keys.key_file import KeyFile, to_bytes, write_new
from privlab.keys.layouts import VIT
from privlab.victims import COMPACT, from_any_layout, hash_of, pretrained_file, read_state, shipped_file
from privlab.victims import named as victims
from privlab.victims.zoo import BASE

FORMAT = "privlab-encrypted/1"
_CLEAR = "clear"


@dataclass(frozen=True)
class Seal:
    """What an encrypted file says of itself; `owner` is the hash of the owner's tensors, None if they are in it."""

    key_id: str
    shape: ModelShape
    owner: str | None

    def metadata(self) -> dict[str, str]:
        """Return the metadata of an encrypted file."""
        return {
            "format": "pt",
            "privlab_format": FORMAT,
            "privlab_key_id": self.key_id,
            "privlab_owner": self.owner or _CLEAR,
            "privlab_shape": self.shape.text,
        }


@dataclass(frozen=True, eq=False)
class ModelFile:
    """Weights that were read from a file, in timm's layout; `seal` is None if the file does not say it is encrypted."""

    path: Path
    state: dict[str, Tensor]
    metadata: Mapping[str, str]
    seal: Seal | None

    def shape(self, heads: int | None = None) -> ModelShape:
        """Return the shape of the backbone; only an encrypted file states its number of heads.

        Raises:
            PrivlabError: if the number of heads is missing or wrong, or the weights are not in timm's layout.
        """
        heads = heads if heads is not None or self.seal is None else self.seal.shape.heads
        if heads is None:
            raise PrivlabError(f"Weights do not say how many heads they have: give --heads for '{self.path}'.")
        return ModelShape.of_state(self.state, heads)


def read_model(path: Path) -> ModelFile:
    """Read a model, encrypted or not, in any layout that privlab knows.

    Raises:
        PrivlabError: if it cannot be read.
    """
    state = from_any_layout(read_state(path))
    metadata = _metadata(path) if path.suffix == ".safetensors" else {"format": "pt"}
    return ModelFile(path, state, metadata, _seal(path, metadata))


def is_file(model: str) -> bool:
    """Return whether a model is given as a file, not as a name."""
    return Path(model).is_file() or Path(model).suffix in (".safetensors", ".pth", ".pt", ".bin")


def shape_of_model(model: str, heads: int | None = None) -> ModelShape:
    """Return the shape of a model that is given as a victim's name, as timm:NAME, or as a file (see ModelFile.shape).

    Raises:
        PrivlabError: if the name is unknown, the file cannot be read, `heads` is missing for a file, or is given for a
            name.
    """
    if is_file(model):
        return read_model(Path(model)).shape(heads)
    if heads is not None:
        raise PrivlabError(f"--heads is for files. '{model}' has its own.")
    with torch.device("meta"):  # the weights are not needed, and take no memory
        name, changes = (BASE, COMPACT[base]) if (base := victims.resolve(model)[0]) in COMPACT else (base, {})
        vit = timm.create_model(name, **changes)
    if not isinstance(vit, VisionTransformer):
        raise PrivlabError(f"Keys are for timm's VisionTransformer. Found {model}, a {type(vit).__name__}.")
    return ModelShape.of(vit)


def check_fingerprint(stored: KeyFile, shape: ModelShape, source: object) -> None:
    """Check that a key is for models of a shape, by their fingerprints.

    Args:
        stored: the key, with the shape that it was made for.
        shape: the shape of the model.
        source: the model's name or path, for the error message.

    Raises:
        PrivlabError: if the fingerprints differ; the message says in which sizes.
    """
    if stored.shape.fingerprint != shape.fingerprint:
        wanted = asdict(stored.shape)
        differing = ", ".join(f"{k} {v} instead of {wanted[k]}" for k, v in asdict(shape).items() if v != wanted[k])
        raise PrivlabError(
            f"The key is for another model: its fingerprint {stored.shape.fingerprint[:16]}… is not that of "
            f"'{source}', which has {differing}."
        )


def check_model(stored: KeyFile, model: ModelFile) -> None:
    """Check that a key fits a model and, if the model is encrypted, that it was encrypted with this key.

    Raises:
        PrivlabError: if the key does not fit, or is not the model's; the message says what differs.
    """
    check_fingerprint(stored, model.shape(model.seal.shape.heads if model.seal else stored.shape.heads), model.path)
    if model.seal is not None and model.seal.key_id != stored.key_id:
        raise PrivlabError(
            f"Wrong key: '{model.path}' was encrypted with key {model.seal.key_id[:16]}…, this is {stored.key_id[:16]}…"
        )


def encrypt_file(model: ModelFile, stored: KeyFile, out: Path, owner: Path | None, *, overwrite: bool = False) -> Seal:
    """Write the encrypted model to `out` and the owner's tensors to `owner`; return the seal that `out` carries.

    Args:
        model: the plain model.
        stored: the key to encrypt with.
        out: the encrypted model, to be written.
        owner: a file of mode 0600 for the embedding, the final norm and the head, to be written; None leaves these
            tensors in the clear in `out`.
        overwrite: whether existing files may be replaced.

    Raises:
        PrivlabError: if the key does not fit, the model is encrypted already, both paths are one file, or a file cannot
            be written.
    """
    if model.seal is not None:
        raise PrivlabError(
            f"'{model.path}' is encrypted already (key {model.seal.key_id[:16]}…): rekey changes the key."
        )
    check_model(stored, model)
    state = apply_key(model.state, stored.key, stored.shape)
    kept = {name: tensor for name, tensor in state.items() if VIT.owner.fullmatch(name)}
    seal = Seal(stored.key_id, stored.shape, None if owner is None else hash_of(kept))
    if owner is not None:
        if owner.resolve() == out.resolve():
            raise PrivlabError(f"--owner and --out must be two files. Found '{owner}' for both.")
        write_new(owner, to_bytes(kept, model.metadata), private=True, overwrite=overwrite)
        # E_unk is privlab's own, so timm's strict loading would refuse zeros in its place.
        state |= {name: torch.zeros_like(tensor) for name, tensor in kept.items()}
        state.pop("unk_embed", None)
    write_new(out, to_bytes(state, seal.metadata()), overwrite=overwrite)
    return seal


def decrypt_file(model: ModelFile, stored: KeyFile, out: Path, owner: Path | None, *, overwrite: bool = False) -> None:
    """Write the model that was encrypted, bit by bit; after training, write the trained model without the key.

    Args:
        model: the encrypted model, trained further or not.
        stored: the key that it was encrypted with.
        out: the plain model, to be written.
        owner: the owner's file, to be read; None if the encrypted file holds these tensors in the clear.
        overwrite: whether existing files may be replaced.

    Raises:
        PrivlabError: if the key is wrong, the owner's file is missing or wrong, or `out` cannot be written.
    """
    check_model(stored, model)
    state, metadata = remove_key(model.state, stored.key, stored.shape), {"format": "pt"}
    if owner is None and model.seal is not None and model.seal.owner is not None:
        raise PrivlabError(f"The embedding and the head of '{model.path}' are with its owner: give --owner.")
    if owner is not None:
        kept = read_state(owner)
        if model.seal is not None and model.seal.owner != hash_of(kept):
            raise PrivlabError(f"'{owner}' is not the owner's file of '{model.path}': its tensors are others.")
        state, metadata = state | kept, _metadata(owner)
    write_new(out, to_bytes(state, metadata), overwrite=overwrite)


def rekey_file(model: ModelFile, old: KeyFile, new: KeyFile, out: Path, *, overwrite: bool = False) -> Seal:
    """Write an encrypted model under another key and return its seal; the owner's file stays valid.

    Args:
        model: the encrypted model.
        old: the key that it was encrypted with.
        new: the key to encrypt it with, of the same shape.
        out: the model under the new key, to be written.
        overwrite: whether an existing `out` may be replaced.

    Raises:
        PrivlabError: if a key is wrong, the model is not encrypted, or `out` cannot be written.
    """
    if model.seal is None:
        raise PrivlabError(f"'{model.path}' does not say that it is encrypted: encrypt it.")
    check_model(old, model)
    check_fingerprint(new, old.shape, model.path)
    seal = Seal(new.key_id, new.shape, model.seal.owner)
    state = apply_key(remove_key(model.state, old.key, old.shape), new.key, new.shape)
    write_new(out, to_bytes(state, seal.metadata()), overwrite=overwrite)
    return seal


def public_state(model: str) -> dict[str, Tensor]:
    """Return the weights of a file, or the pretrained weights of a victim's name or of timm:NAME.

    Raises:
        PrivlabError: if they cannot be read or found.
    """
    if is_file(model):
        return read_model(Path(model)).state
    return read_model(shipped_file(model) or pretrained_file(victims.resolve(model)[0])).state


def _metadata(path: Path) -> dict[str, str]:
    check_file(path, "model")
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise PrivlabError(f"'{path}' cannot be read as a safetensors file: {error}.") from error


def _seal(path: Path, metadata: Mapping[str, str]) -> Seal | None:
    if "privlab_format" not in metadata:
        return None
    if metadata["privlab_format"] != FORMAT:
        raise PrivlabError(f"'{path}' has the format {metadata['privlab_format']}; this privlab reads {FORMAT}.")
    try:
        shape = ModelShape(**parse_json(metadata["privlab_shape"], "privlab_shape"))
        owner = metadata["privlab_owner"]
        return Seal(metadata["privlab_key_id"], shape, None if owner == _CLEAR else owner)
    except (KeyError, ValueError, TypeError) as error:
        raise PrivlabError(f"The metadata of the encrypted model '{path}' are damaged: {error}.") from error
