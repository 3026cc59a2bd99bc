"""Check what the README's main command left behind: the table, the records, run.json, the strips."""

import json
import sys
from pathlib import Path

import pandas as pd
from PIL import Image

run, table = Path(sys.argv[1]), Path(sys.argv[2]).read_text(encoding="utf-8")
records = pd.read_parquet(run / "records")
facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
images = records.image_sha256.nunique()

assert images >= 8, f"8 distinct images are wanted, found {images}"
assert facts["status"] == "finished", facts["status"]
assert set(records.status) == {"ok"}, records.reason.dropna().unique()
assert {"april", "patch-gradient"} <= set(records.attack)
assert set(records.geometry) == {"in_place", "oracle", "reassembled"}
assert records.weights_sha256.str.len().eq(64).all()
(lpips,) = (name for name in facts["specification"]["metrics"] if name.startswith("lpips_"))
for name in ("mse", "psnr", "ssim", "fft2d_mjp", lpips):
    assert records[name].notna().all(), name
mean = records[records.geometry == "in_place"].groupby("attack").psnr.mean()
assert 3 < mean["april"] < 20, mean
assert 3 < mean["patch-gradient"] < 20, mean
assert len(list((run / "strips").glob("*.png"))) == images
for strip in (run / "strips").glob("*.png"):
    with Image.open(strip) as picture:
        assert picture.width > 4 * 224, picture.size
for word in (
    "MSE ↓",
    "FFT2D (MJP) ↓",
    "PSNR ↑",
    "SSIM ↑",
    f"LPIPS {lpips.removeprefix('lpips_')} ↓",
    "april",
    "patch-gradient",
    "Verdict\n",
    "Weakened by: ",
    "(privlab explain ",
    "paper's attack: april",
    "worst case",
    "best single attack",
    "flag: One draw: mjp",
    "flag: Random weights",
    "no evidence of privacy",
    "weights random",
    "gamma=0.27",
    "seed 0",
    "The same on trained weights, which came with privlab:  privlab attack --model cifar_vit_mjp",
):
    assert word in table, f"'{word}' is missing in the table"
print(f"{images} images, {len(records)} records, table and strips are there")
