"""The options that `privlab attack`, `audit` and `table` share, each defined once.

Each is a function that returns a decorator; its arguments replace attributes of the option, such as `default`.
"""

from functools import partial
from typing import Any

import click
import cloup

from privlab.cli import names
from privlab.cli.names import FROM_ZERO, PATH, POSITIVE


def _option(name: str, kind: Any, meaning: str, **more: Any) -> partial[Any]:  # noqa: ANN401
    return partial(cloup.option, *name.split(), type=kind, help=meaning, **more)


def _flag(name: str, meaning: str, **more: Any) -> partial[Any]:  # noqa: ANN401
    return partial(cloup.option, *name.split(), is_flag=True, help=meaning, **more)


# Victim
_MODEL = "a victim, timm:NAME, or a folder of transformers"
model = _option("--model", names.VICTIMS, f"Model: {_MODEL}; several with commas between.", required=True)
one_model = _option("--model", names.ONE_VICTIM, f"Model of the client: {_MODEL}.", required=True)
weights = _option("--weights", names.WEIGHTS, "Weights: auto, pretrained, random, or a file.", default="auto")
block = _option("--block", names.BLOCK, "First block of the model: auto, stock or april.", default="auto")
img_size = _option("--img-size", click.IntRange(min=16), "Side of the input; position embeddings are resized to fit.")
classes = _option("--classes", POSITIVE, "Number of classes of the randomly initialised head, for models without one.")
normalisation = _option(
    "--normalisation",
    names.NORMALISATION,
    "How the client normalises images: imagenet, inception, clip, none, or numbers.  [default: the model's own]",
    metavar="NAME|MEAN/STD",
)
VICTIM = (img_size(), classes(), normalisation())

# Data
images = _option(
    "--images",
    names.IMAGES,
    "Private images: samples, a folder, files (repeat the option), torchvision:NAME or hf:NAME.",
    multiple=True,
    default=("samples",),
)
limit = _option(
    "--limit", POSITIVE, "Use the first N images; from folders of classes, one of each class in turn.", metavar="N"
)
every = _option("--every", POSITIVE, "Use every K-th image, before --limit.", metavar="K")
offset = _option("--offset", FROM_ZERO, "Skip the first J images, before --every and --limit.", metavar="J")
manifest = _option(
    "--manifest",
    names.MANIFEST_FILE,
    "Use the images that a file lists, checked by SHA-256: columns name, sha256; label and member are optional.",
    metavar="FILE.csv",
)
CHOICE = (limit(), every(), offset(), manifest())
"""The options that choose images of a source."""
split = _option("--split", str, "Split of a data set, or sub-folder of a folder.")
labels = _option(
    "--labels", names.LABELS, "predicted, or a CSV file with columns file, label.  [default: those of the images]"
)
bit_depth = _option(
    "--bit-depth",
    click.IntRange(1, 16),
    "Number of bits that 16-bit files use, such as 12 for most medical images.  [default: 16]",
    metavar="BITS",
)

# Release and client
release = _option("--release", names.RELEASE, "What is released: auto, gradients, features, update.", default="auto")
client = _option("--client", names.CLIENT, "How the client trains for its update: sgd, adam, adamw, or a preset.")
gradient_batch = _option("--gradient-batch", POSITIVE, "Number of images in each gradient.", default=1)
client_batch = _option("--client-batch", POSITIVE, "Number of images whose features are sent together.", default=16)
cut_layer = _option("--cut-layer", FROM_ZERO, "Number of blocks that run before features are sent.", default=0)

# Defense
setting = _option(
    "--setting",
    names.SETTINGS,
    "Settings of MJP, Section 5.4: a, b or c, separated by commas.  [default: c if defended, else a]",
)
defense = _option("--defense", names.DEFENSES, "Defenses, stacked with +; see `privlab list defenses`.", default="auto")
gamma = _option("--gamma", float, "γ: share of shuffled patches.  [default: the defense's, 0.27]")
masked_pe = _option(
    "--masked-pe",
    names.MASKED_PE,
    "Position embedding at shuffled slots under MJP: unknown, none or slot.  [default: unknown]",
)
DEFENSE = (defense(), gamma(), masked_pe())
draws = _option("--draws", POSITIVE, "Number of draws of a random defense for each image.", default=1)

# Adversary
attack = _option("--attack", names.ATTACKS, "Attacks, separated by commas.  [default: worst-case, all that apply]")
effort = _option("--effort", names.EFFORT, "How much attacks try: quick, standard or full.", default="standard")
set_ = _option(
    "--set options",
    str,
    "Set an option of an attack, of a defense or of the client; repeat it for more.",
    metavar="[NAME.]KEY=VALUE",
    multiple=True,
)
public = _option(
    "--public",
    names.IMAGES,
    "Images that the adversary has, given in the same way as --images.",
    multiple=True,
    default=("samples",),
)
public_limit = _option("--public-limit", POSITIVE, "Largest number of public images that are used.", default=200)
reassembly = _option(
    "--reassembly", names.REASSEMBLY, "What puts patches in order: border, mp3 or droppos.", default="border"
)
force = _flag("--force", "With --block stock or april: also run attacks that do not apply to that block.")

# Scores
metrics = _option("--metrics", names.METRICS, "Metrics, separated by commas; see `privlab list metrics`.")
lpips_weights = _option("--lpips-weights", names.LPIPS_WEIGHTS, "File or folder with LPIPS backbones.")
embedding = _option(
    "--embedding", names.EMBEDDING, "Network of the metric f_sim, with its weights.", metavar="timm:NAME@FILE"
)
SCORES = (metrics(), lpips_weights(), embedding())
eight_bit = _flag("--eight-bit", "Round reconstructions to 8 bits before they are scored.")
geometry = _option(
    "--geometry", names.GEOMETRY, "Layout that is shown: in_place, oracle or reassembled.", default="in_place"
)
reference = _option("--reference", PATH, "The private image or volume, to score reconstructions by.", metavar="IMAGE")

# Output
out = _option("--out", PATH, "Directory of the run.  [default: a new one in runs]")
overwrite = _flag("--overwrite", "Overwrite an existing run in --out.")
strips = _flag("--strips/--no-strips", "Write a PNG of the reconstructions of each image.", default=True)
details = _flag("--details", "Print every attack by every metric, and all that is known of the run.")
fail_on_leak = _flag("--fail-on-leak", "Exit with status 3 if a reconstruction is proven to be a private image.")
json_ = _flag("--json as_json", "Print JSON on standard output.")
quiet = _flag("--quiet", "Show no progress.")
debug = _flag("--debug", "Show a traceback when something fails.", expose_value=False)

# Execution
device = _option("--device", names.DEVICE, "auto, cpu, cuda or cuda:N.", default="auto")
batch_size = _option("--batch-size", str, "Number of images attacked at a time: auto or a number.", default="auto")
seed = _option("--seed", FROM_ZERO, "Seed of all random draws.", default=0)
workers = _option(
    "--workers", str, "Processes: auto (one for each core, if attacks search) or a number.", default="auto"
)
engine = _option("--engine", str, "Where tasks run: local or ray.", default="local")
ray_address = _option(
    "--ray-address", str, "Running Ray cluster: auto, HOST:PORT or ray://….  [default: one is started here]"
)
task_cpus = _option("--task-cpus", float, "Number of cores of each task, on Ray.", default=1.0)
task_gpus = _option("--task-gpus", float, "Number of GPUs of each task, on Ray.", default=0.0)
ENGINE = (workers(), engine(), ray_address(), task_cpus(), task_gpus())
"""The options that say where tasks run."""
