"""Weights: where they come from, whether they fit, and their hash. Nothing is ever unpickled."""

import argparse
import hashlib
import os
import pathlib
import pickle
import re
import sys
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core.multiarray import scalar as _scalar  # how pickles name a NumPy number, such as a best accuracy
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from privlab.base import (
    PrivlabError,
    check_archive,
    check_file,
    damaged,
    first,
    most_unpacked,
    one_line,
    read_json,
    read_text,
    try_reading,
    warn,
)
from privlab.victims.anatomy import Vit
from privlab.victims.layouts import KINDS, State, by_order, choose, kind_of, with_adapters
from privlab.victims.names import check_weights_file, file_and_entry

_ALLOWED: list[Any] = [
    *(argparse.Namespace, _scalar, np.dtype, *(type(np.dtype(each)) for each in ("float32", "float64", "int64"))),
    *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
]
"""Classes that checkpoints hold besides tensors, such as the arguments of timm's training script: they run no code."""

_FILES = (
    *("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model_fsdp.bin", "mp_rank_00_model_states.pt"),
)
"""The files of weights in the folders of peft, transformers, accelerate and DeepSpeed; the first one is read."""

_MOST_ENTRIES = 2**20
"""The most entries of a checkpoint's tables and lists, each counted as often as it is held."""


class WeightsUnavailable(PrivlabError):
    """Pretrained weights are unavailable here; the message says what was looked for."""


def cache_folder(kind: str) -> Path:
    """Return the folder for one kind of files that privlab keeps: below `PRIVLAB_CACHE`, else in the user's cache."""
    if root := os.environ.get("PRIVLAB_CACHE"):
        return Path(root) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "privlab" / kind


def offline() -> bool:
    """Return whether the user forbids downloads (`HF_HUB_OFFLINE`)."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def reachable(url: str, seconds: float = 5) -> bool:
    """Return whether the host of `url` answers within `seconds`, name resolution included."""
    answers: list[bool] = []

    def probe() -> None:
        request = urllib.request.Request(url, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=seconds).close()
        except urllib.error.HTTPError as answer:  # the host answers, even if it refuses HEAD
            answer.close()
        except OSError:
            return
        answers.append(True)

    # A resolver that hangs heeds no timeout: leave it behind in a daemon thread.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers)


def read_state(path: Path, base: State | None = None) -> State:
    """Read a state dict from a safetensors, torch or NumPy file or a folder, without running any code in it.

    A checkpoint may hold several, such as the weights and their average: FILE#ENTRY takes the one of that name. Of a
    folder, the file is read that transformers, accelerate, DeepSpeed or peft calls so.

    Args:
        path: the file or the folder.
        base: the weights into which adapters of peft are merged, where they are not found with them.

    Raises:
        PrivlabError: if the file is missing, truncated, holds code, or holds no tensors by name.

    Warns:
        PrivlabWarning: with what was read: an entry or a prefix that is not a usual one, the names of another library,
            adapters.
    """
    check_weights_file(path)
    path, wanted = file_and_entry(path)
    path = file_of(path)
    state, entry = choose(_content(path), str(path), wanted)
    found = [entry] if entry else []
    if any(".lora_" in name for name in state):
        state = _with_base(path, state, base)
        found.append("LoRA's adapters, which are merged into their base")
    if kind := kind_of(state):
        found.append(f"tensors by the names of {KINDS[kind].library} as timm's ViT")
    if found:
        warn(f"{path.name}: read {' and '.join(found)}.")
    return state


def file_of(path: Path) -> Path:
    """Return the file of weights of FILE#ENTRY, or in a folder; a file as it is.

    Raises:
        PrivlabError: if the folder holds none.
    """
    path, _ = file_and_entry(path)
    if not path.is_dir():
        return path
    latest = path / "latest"  # in which DeepSpeed names the folder of its last checkpoint
    folders = [path, *([path / read_text(latest, "name of a checkpoint").strip()] if latest.is_file() else [])]
    if file := next((file for folder in folders for name in _FILES if (file := folder / name).is_file()), None):
        return file
    if any(path.glob("**/*.distcp")):
        raise PrivlabError(
            f"'{path}' holds shards of FSDP, whose list is a pickle, which may hold code. Merge them into one file "
            "first: accelerate merge-weights SHARDS OUT."
        )
    names = sorted(each.name for each in path.iterdir())
    raise PrivlabError(f"The folder '{path}' must hold {', '.join(_FILES)}. Found {first(names, 3) or 'nothing'}.")


def _with_base(path: Path, adapters: State, base: State | None) -> State:
    """Return the weights that adapters of peft give with their base, which may be in the file, with it, or given.

    Raises:
        PrivlabError: if their configuration or their base is not found.
    """
    file = path.with_name("adapter_config.json")
    if not file.is_file():
        raise PrivlabError(
            f"'{path}' holds LoRA's adapters, and peft's adapter_config.json is not in its folder: save them with "
            "save_pretrained, or the weights of merge_and_unload()."
        )
    config = read_json(file, "settings of adapters")
    own = {name: tensor for name, tensor in adapters.items() if ".base_layer." in name}
    places = [path.with_name(name) for name in _FILES[1:]]
    places.append(Path(config.get("base_model_name_or_path") or ""))
    found = next((place for place in places if place.is_file() or (place.is_dir() and place != Path())), None)
    if own:
        base = adapters
    elif found is not None:
        base = read_state(found)
    if base is None:
        raise PrivlabError(
            f"'{path}' holds LoRA's adapters of {config.get('base_model_name_or_path') or 'a base'}, which is not "
            "here: put the base's model.safetensors into the same folder."
        )
    return with_adapters(base, adapters, config, f"'{path}'")


def _content(path: Path) -> object:
    """Return what a file of tensors holds.

    Raises:
        PrivlabError: if it cannot be read, or holds code.
    """
    size = check_file(path, "weights")
    check_archive(path, "weights")
    try:
        if path.name.endswith(".index.json"):
            shards = read_json(path, "list of shards")["weight_map"].values()
            parts: list[Any] = [_content(path.with_name(Path(shard).name)) for shard in sorted({*shards})]
            return {name: tensor for part in parts for name, tensor in part.items()}
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        with warnings.catch_warnings(), torch.serialization.safe_globals(_ALLOWED):
            warnings.simplefilter("ignore")  # torch either reads or refuses a file that it warns of
            try_reading(lambda: _check_size(_loaded(path), size), path, "weights")
            return _loaded(path)
    except PrivlabError:  # of a shard
        raise
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+\.\w+)", str(error))
        holds = f"it holds {named[1]}" if named else "it holds code or is not a torch file"
        raise PrivlabError(
            f"'{path}' is refused: {holds}, and privlab reads tensors only. Save its state_dict as safetensors."
        ) from error
    except Exception as error:  # on a damaged file, torch and NumPy raise nearly anything
        raise damaged(f"'{path}' cannot be read as weights", error) from error


def _loaded(path: Path) -> object:
    """Return what a file of torch holds; functions that a pickle may name, such as bytearray, take any memory."""
    return torch.load(path, map_location="cpu", weights_only=True)


def _check_size(content: object, size: int) -> None:
    """Check that what a pickle holds is not far larger than its file of `size` bytes.

    A view repeats one number, and a table that is in itself many times, or without end, takes a few bytes.

    Raises:
        ValueError: if it is.
    """
    pending, entries, held = [content], 0, 0
    while pending:
        entries += 1
        value = pending.pop()
        if isinstance(value, Tensor):
            held += value.numel() * value.element_size()
        elif isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, list | tuple | set):
            pending += value
        if entries + len(pending) > _MOST_ENTRIES or held > most_unpacked(size):
            most = f"{_MOST_ENTRIES} entries or {most_unpacked(size)} bytes"
            raise ValueError(f"its {size} bytes stand for more than {most}")


def fit(vit: Vit, state: State, source: str, *, resize: bool = False) -> None:
    """Load a state in timm's layout into a ViT.

    Args:
        vit: the model; its weights are overwritten.
        state: the tensors by timm's names; names of older checkpoints are translated as timm does.
        source: name of the file, for the error.
        resize: whether position embeddings of another size are resized as timm does, or refused.

    Raises:
        PrivlabError: with the names of the missing, unexpected and mis-shaped tensors.
    """
    want = vit.state_dict()
    state = by_order(state, [*want])
    proj = "patch_embed.proj.weight"
    foreign = proj not in state or state[proj].shape != want[proj].shape
    resized = "pos_embed" in state and "pos_embed" in want and state["pos_embed"].shape != want["pos_embed"].shape
    if not foreign and (resize or not resized):
        # A grid that is impossible is refused below, by its shapes.
        with suppress(RuntimeError, ValueError, IndexError, AssertionError):
            state = _translated(vit, state)
    fill(vit, state, source, " (--img-size resizes position embeddings)" if resized and not resize else "")


def _translated(vit: Vit, state: State) -> State:
    """Return a state by the names of a ViT, as the module of timm of its class translates it."""
    if type(vit) is VisionTransformer:
        return checkpoint_filter_fn(state, vit, adapt_layer_scale=True)
    translate = getattr(sys.modules[type(vit).__module__], "checkpoint_filter_fn", None)
    return state if translate is None else translate(state, vit)


def fill(net: nn.Module, state: State, source: str, hint: str = "") -> None:
    """Load a state under the network's own names; the shapes must be the network's.

    Args:
        net: the network; its weights are overwritten.
        state: the tensors by name; `num_batches_tracked` of BatchNorm may be missing.
        source: name of the file, for the error.
        hint: text after the list of tensors that do not fit, such as " (--img-size resizes position embeddings)".

    Raises:
        PrivlabError: with the names of the missing, unexpected and mis-shaped tensors, and of integers instead of
            weights.

    Warns:
        PrivlabWarning: for integer tensors that the network does not have, which are left aside.
    """
    want = net.state_dict()
    check_floats({key: state[key] for key in state if key in want and want[key].is_floating_point()}, source)
    if not want.keys() & state.keys():
        raise PrivlabError(
            f"{source} holds the weights of another kind of network: {first([*state], 3)}, and none of this model's, "
            f"{first([*want], 3)}."
        )
    theirs, ours = (_shape_of_vit(of) for of in (state, want))
    if theirs and ours and theirs[0] != ours[0]:
        raise PrivlabError(f"{source} holds the weights of {_vit(*theirs)}, and this model is {_vit(*ours)}.")
    aside = {key for key in state if key not in want and not state[key].is_floating_point()}
    state = {key: tensor for key, tensor in state.items() if key not in aside}
    counters = {key for key in want if key.endswith("num_batches_tracked")}
    if found := misfits(state, want, counters):
        raise PrivlabError(f"The weights of {source} do not fit this model. {found}{hint}.")
    warn_of_integers(aside, source)
    try:
        net.load_state_dict(state)
    except RuntimeError as error:  # tensors that are sparse or quantised
        raise PrivlabError(f"The weights of {source} cannot be copied into this model: {error}.") from error


def misfits(found: Mapping[str, Tensor], want: Mapping[str, Tensor], optional: Collection[str] = ()) -> str:
    """Return which tensors are missing, unexpected and mis-shaped, by their first names; "" if all fit.

    Args:
        found: the tensors that there are, by name.
        want: those that there should be.
        optional: names of those that may be missing.
    """
    problems = {
        "missing": [name for name in want if name not in found and name not in optional],
        "unexpected": [name for name in found if name not in want],
        "mis-shaped": [
            f"{name} {tuple(found[name].shape)} instead of {tuple(want[name].shape)}"
            for name in want
            if name in found and found[name].shape != want[name].shape
        ],
    }
    return "; ".join(f"{kind}: {first(names)}" for kind, names in problems.items() if names)


def check_floats(weights: State, source: str) -> None:
    """Check that weights are not integers.

    Raises:
        PrivlabError: if some are.
    """
    if whole := [f"{key} of {tensor.dtype}" for key, tensor in weights.items() if not tensor.is_floating_point()]:
        raise PrivlabError(
            f"The weights of {source} must be floating-point numbers. Found {first(whole, 3)}: save them as the "
            "model trains them, in float32."
        )


def warn_of_integers(names: Collection[str], source: str) -> None:
    """Warn that integer tensors of these names, if there are any, are left aside."""
    if names:
        verb = "is" if len(names) == 1 else "are"
        warn(
            f"{source}: {first(sorted(names), 3)} {verb} left aside: integers that are none of this model's tensors, "
            "such as the counters of BatchNorm, are no weights."
        )


def _shape_of_vit(state: State) -> tuple[int, int] | None:
    """Return the width and the depth of a ViT's weights; None where they are not a ViT's."""
    proj = state.get("patch_embed.proj.weight")
    blocks = {name.split(".")[1] for name in state if name.startswith("blocks.")}
    return (proj.shape[0], len(blocks)) if proj is not None and proj.dim() == 4 and blocks else None


def _vit(width: int, depth: int) -> str:
    size = {(192, 12): "-Ti", (384, 12): "-S", (768, 12): "-B", (1024, 24): "-L"}.get((width, depth), "")
    return f"a ViT{size} (D = {width}, {depth} blocks)"


def hash_of(state: Mapping[str, Tensor]) -> str:
    """Return SHA-256 over names, dtypes, shapes and bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save(state: Mapping[str, Tensor], path: Path) -> None:
    """Write weights in privlab's own layout: safetensors, timm's names, `unk_embed` for E_unk."""
    save_file({k: v.detach().cpu().contiguous() for k, v in state.items()}, path, {"format": "pt"})


def pretrained_file(architecture: str, *, download: bool = True) -> Path:
    """Return timm's pretrained weights of an architecture, from its caches or, with `download`, from the hub.

    Raises:
        WeightsUnavailable: if they are neither cached nor can be downloaded, with the reason.
    """
    from huggingface_hub import constants, hf_hub_download
    from timm.models import get_pretrained_cfg

    config = get_pretrained_cfg(architecture)
    if config is None or not config.has_weights:
        raise WeightsUnavailable(f"timm has no pretrained weights for {architecture}.")
    legacy = Path(torch.hub.get_dir()) / "checkpoints" / str(config.url).rpartition("/")[2]
    if legacy.suffix in (".pth", ".pt", ".safetensors") and legacy.is_file():
        return legacy
    if not config.hf_hub_id:
        raise WeightsUnavailable(f"the pretrained weights of {architecture} are not in timm's cache ({legacy}).")
    name = config.hf_hub_filename or "model.safetensors"
    with suppress(OSError, ValueError):  # not cached
        return Path(hf_hub_download(config.hf_hub_id, name, local_files_only=True))
    if not download:
        raise WeightsUnavailable(f"{config.hf_hub_id} is not in the cache.")
    if offline():
        raise WeightsUnavailable(f"{config.hf_hub_id} is not in the cache, and HF_HUB_OFFLINE forbids a download.")
    if not reachable(constants.ENDPOINT):
        raise WeightsUnavailable(f"{config.hf_hub_id} is not in the cache, and {constants.ENDPOINT} cannot be reached.")
    try:
        return Path(hf_hub_download(config.hf_hub_id, name))
    except Exception as error:  # whatever the hub's transport raises, the weights are unavailable
        raise WeightsUnavailable(f"{config.hf_hub_id} cannot be downloaded ({one_line(error)}).") from error
