"""The examples under the help of each command: whole command lines, whose options a test checks."""

from collections.abc import Mapping

__all__ = ["EXAMPLES"]

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "attack": (
        "privlab attack --model cifar_vit_mjp27 --setting c",
        "privlab attack --model cifar_vit --defense row-permutation --limit 8 --out runs/rows",
        "privlab attack --gradients update.safetensors --model vit_ti --weights client.safetensors",
    ),
    "admit": ("privlab admit mjp --gamma 0.5", "privlab admit gaussian-noise --set std=0.1 --json"),
    "list": ("privlab list attacks", "privlab list experiments --json"),
    "explain": ("privlab explain mjp-full", "privlab explain psnr", "privlab explain few-images"),
    "doctor": ("privlab doctor",),
    "bench attack": ("privlab bench attack --model vit_ti --repeats 3",),
    "bench clients": ("privlab bench clients --model vit_ti --img-size 160",),
    "bench permutation": ("privlab bench permutation --json",),
    "bench split": ("privlab bench split --no-memory",),
    "bench startup": ("privlab bench startup --repeats 3",),
    "bench table": ("privlab bench table --no-large",),
    "bench train": ("privlab bench train --model vit_ti --batch 8",),
    "keys new": ("privlab keys new --model vit_ti --out my.key",),
    "keys show": ("privlab keys show my.key",),
    "keys encrypt": (
        "privlab keys encrypt model.safetensors --key my.key --out encrypted.safetensors --owner owner.safetensors",
    ),
    "keys decrypt": (
        "privlab keys decrypt encrypted.safetensors --key my.key --owner owner.safetensors --out model.safetensors",
    ),
    "keys check": ("privlab keys check my.key --model vit_ti",),
    "keys rekey": ("privlab keys rekey encrypted.safetensors --key my.key --new-key new.key --out again.safetensors",),
    "keys recover": ("privlab keys recover encrypted.safetensors --base public.safetensors --out found.key",),
    "keys finetune-study": ("privlab keys finetune-study --images CIFAR10 --model vit_ti --img-size 64 --out study",),
    "split certificate": ("privlab split certificate tls --host server.example",),
    "split serve": ("privlab split serve --model vit_ti --weights random --img-size 64 --record seen",),
    "split train": (
        "privlab split train --server 127.0.0.1:50551 --model vit_ti --weights random --img-size 64 --out client",
    ),
    "split infer": ("privlab split infer --server 127.0.0.1:50551 --run client",),
    "study split-privacy": ("privlab study split-privacy --images FACES --model vit_ti --img-size 80 --out study",),
    "study pe": ("privlab study pe --model cifar_vit --figures png --out pe",),
    "study positions": ("privlab study positions --predictor cifar_mp3 --images cifar10.parquet --out positions",),
    "study placement": ("privlab study placement --images cifar10.parquet --limit 200 --out placement",),
    "study architectures": ("privlab study architectures --models vit_small_patch16_dinov3 --limit 1",),
    "study adam": ("privlab study adam --model cifar_vit --limit 2",),
    "study adam-pairs": ("privlab study adam-pairs --model cifar_vit --limit 2",),
    "study federation": ("privlab study federation --model vit_ti --img-size 160 --max-psnr 200 --out federation",),
    "study jigsaw": ("privlab study jigsaw --images FOLDER --offset 200 --public FOLDER --missing 0,3 --out jigsaw",),
    "study noise-bound": (
        "privlab study noise-bound runs/gradient_noise --images FOLDER --model vit_ti --img-size 160 --out bound",
    ),
    "train": (
        "privlab train classify --model cifar_vit --data cifar10.parquet --preset small --out mine",
        "privlab train mjp --model cifar_vit_mjp --data FOLDER --set gamma=0.27 --out mine",
    ),
    "evaluate": ("privlab evaluate --model cifar_vit,cifar_vit_mjp --data cifar10.parquet --gamma 0,0.27",),
    "models list": ("privlab models list",),
    "models show": ("privlab models show cifar_vit",),
    "models fetch": ("privlab models fetch deit_s",),
    "models import": ("privlab models import checkpoint.pth --as deit_s_mjp",),
    "table": ("privlab table quick", "privlab table mjp_table5 --limit 4 --format latex --standalone"),
    "store check": ("privlab store check runs/quick",),
    "store show": ("privlab store show runs/quick",),
    "store export": ("privlab store export runs/quick records.parquet",),
    "store merge": ("privlab store merge runs/all runs/part-0 runs/part-1",),
    "store add-external": ("privlab store add-external runs/quick theirs.toml",),
    "report": ("privlab report runs/quick",),
    "benchmark list": ("privlab benchmark list --track gradients",),
    "benchmark template": ("privlab benchmark template defense mine",),
    "benchmark submit": ("privlab benchmark submit mine/my_defense.toml --out mine/my_defense.json",),
    "benchmark verify": ("privlab benchmark verify mine/my_defense.json",),
    "benchmark page": ("privlab benchmark page --out site",),
    "identify": (
        "privlab identify runs/faces --candidates FACES --by class",
        "privlab identify runs/cifar_vit --candidates cifar10.parquet --classifier cifar_vit_mjp --json",
    ),
    "figures": ("privlab figures runs/quick",),
}
"""Command lines by the words of the command."""
