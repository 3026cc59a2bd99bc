"""`privlab keys`: it makes keys, encrypts models with them, and recovers the keys of encrypted models."""

import time
from collections import ChainMap
from pathlib import Path

import click

from privlab.base import PrivlabError
from privlab.cli.common import Commands, common, print_either, print_warnings
from privlab.cli.elsewhere import FINETUNE
from privlab.cli.names import PATH, POSITIVE

key_option = click.option("--key", type=PATH, required=True, help="Key file that `privlab keys new` wrote.")
out_option = click.option("--out", type=PATH, required=True, help="File to write.")
overwrite_option = click.option("--overwrite", is_flag=True, help="Overwrite an existing file.")
heads_option = click.option("--heads", type=POSITIVE, help="Number of heads per layer, if the file does not state it.")


@click.group("keys", cls=Commands, commands=ChainMap({}, FINETUNE))
def keys() -> None:
    """Permute a model's weights by a key, and recover the key.

    This is obfuscation. Without the key, an encrypted model is useless as it stands; but whoever has the public model
    that it was made from finds the key in seconds: `privlab keys recover` does it.
    """


def _say(as_json: bool, **facts: object) -> None:
    """Print one line for each fact, or JSON."""
    print_either(as_json, facts, *(f"{name.replace('_', ' '):<18}  {value}" for name, value in facts.items()))


@keys.command()
@click.option("--model", required=True, help="A victim's name, timm:NAME, or a file with --heads.")
@heads_option
@click.option("--space", default="full", help="What the key permutes: full, paper or residual.")
@out_option
@overwrite_option
@common
def new(model: str, heads: int | None, space: str, out: Path, overwrite: bool, as_json: bool) -> None:
    """Draw a key from the operating system's random numbers and write it to a file of mode 0600."""
    from privlab.keys import KeyFile, new_key, save_key, shape_of_model

    shape = shape_of_model(model, heads)
    stored = KeyFile(new_key(shape, space), shape)
    save_key(stored.key, shape, out, overwrite=overwrite)
    _say(as_json, key=str(out), **stored.facts())


@keys.command()
@click.argument("key", type=PATH)
@common
def show(key: Path, as_json: bool) -> None:
    """Show which model a key fits and how large its space is, but not the key."""
    from privlab.keys import load_key

    _say(as_json, key=str(key), **load_key(key).facts())


@keys.command()
@click.argument("key", type=PATH)
@click.option("--model", required=True, help="A victim's name, timm:NAME, or a file, encrypted or not.")
@common
def check(key: Path, model: str, as_json: bool) -> None:
    """Check a key file, and that it fits a model; of an encrypted model, that it was encrypted with this key."""
    from privlab.keys import check_fingerprint, check_model, is_file, load_key, read_model, shape_of_model

    stored = load_key(key)
    sealed = False
    if is_file(model):
        check_model(stored, file := read_model(Path(model)))
        sealed = file.seal is not None
    else:
        check_fingerprint(stored, shape_of_model(model), model)
    _say(
        as_json, key=str(key), model=model, checksum="ok", fingerprint="ok", key_id="ok" if sealed else "not encrypted"
    )


@keys.command()
@click.argument("model", type=PATH)
@key_option
@out_option
@click.option("--owner", type=PATH, help="File for the parts that you keep: embedding, final norm and head.")
@click.option("--keep-embedding", is_flag=True, help="Leave these parts in the encrypted model, as the paper does.")
@overwrite_option
@common
def encrypt(
    model: Path, key: Path, out: Path, owner: Path | None, keep_embedding: bool, overwrite: bool, as_json: bool
) -> None:
    """Permute the weights of MODEL (safetensors or torch) by a key, for timm to load as they are."""
    from privlab.keys import encrypt_file, load_key, read_model

    if keep_embedding == (owner is not None):
        raise PrivlabError("Give either --owner FILE for the parts that you keep, or --keep-embedding.")
    stored = load_key(key)
    start = time.perf_counter()
    seal = encrypt_file(read_model(model), stored, out, owner, overwrite=overwrite)
    seconds = round(time.perf_counter() - start, 3)
    _say(as_json, encrypted=str(out), owner=str(owner) if owner else "clear", key_id=seal.key_id, seconds=seconds)


@keys.command()
@click.argument("encrypted", type=PATH)
@key_option
@click.option("--owner", type=PATH, help="The file that `encrypt --owner` wrote.")
@out_option
@overwrite_option
@common
def decrypt(encrypted: Path, key: Path, owner: Path | None, out: Path, overwrite: bool, as_json: bool) -> None:
    """Decrypt ENCRYPTED into exactly the model that it was made from."""
    from privlab.keys import decrypt_file, load_key, read_model

    stored, model = load_key(key), read_model(encrypted)
    if model.seal is None:
        print_warnings([f"'{encrypted}' names no key: whether this one is right cannot be checked."])
    decrypt_file(model, stored, out, owner, overwrite=overwrite)
    _say(as_json, decrypted=str(out), key_id=stored.key_id)


@keys.command()
@click.argument("encrypted", type=PATH)
@click.option("--key", type=PATH, required=True, help="The key that it was encrypted with.")
@click.option("--new-key", type=PATH, required=True, help="The key to use from now on.")
@out_option
@overwrite_option
@common
def rekey(encrypted: Path, key: Path, new_key: Path, out: Path, overwrite: bool, as_json: bool) -> None:
    """Write ENCRYPTED under another key; its owner's file stays valid."""
    from privlab.keys import load_key, read_model, rekey_file

    seal = rekey_file(read_model(encrypted), load_key(key), load_key(new_key), out, overwrite=overwrite)
    _say(as_json, encrypted=str(out), key_id=seal.key_id)


@keys.command()
@click.argument("encrypted", type=PATH)
@click.option("--base", required=True, help="The public model: a file, or a victim's name for its pretrained weights.")
@click.option("--key", type=PATH, help="The true key, to score the recovered one.")
@heads_option
@click.option("--out", type=PATH, help="File for the recovered key, which includes heads and units.")
@overwrite_option
@common
def recover(
    encrypted: Path, base: str, key: Path | None, heads: int | None, out: Path | None, overwrite: bool, as_json: bool
) -> None:
    """Recover the key of ENCRYPTED against the public model that it was made from (weight matching)."""
    from privlab.attacks.weights.weight_matching import WeightMatching, WeightObservation, recovered_fraction
    from privlab.keys import check_model, load_key, public_state, read_model, save_key

    truth, model = None if key is None else load_key(key), read_model(encrypted)
    if truth is not None:
        check_model(truth, model)
        heads = truth.shape.heads
    seen = WeightObservation(model.state, public_state(base), shape := model.shape(heads))
    start = time.perf_counter()
    found = (attack := WeightMatching())(seen)
    facts: dict[str, object] = {"seconds": round(time.perf_counter() - start, 3)}
    if truth is not None:
        facts["residual_recovered"] = recovered_fraction(found.residual, truth.key.residual)
    facts |= {
        "confidence_mean": round(found.confidence.mean().item(), 4),
        "confidence_min": round(found.confidence.min().item(), 4),
        "agreement": round(found.agreement, 4),
        "rounds": found.rounds,
    }
    if out is not None:
        save_key(attack.whole_key(seen, found.residual), shape, out, overwrite=overwrite)
        facts["recovered_key"] = str(out)
    _say(as_json, encrypted=str(encrypted), base=base, **facts)
