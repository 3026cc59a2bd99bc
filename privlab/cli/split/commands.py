"""`privlab split`: the server that holds the backbone, and the client that keeps everything else."""

import importlib.util
import os
import time
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from privlab.base import PrivlabError
from privlab.cli import common as shared
from privlab.cli import options as option
from privlab.cli.names import PATH, POSITIVE, STACK
from privlab.cli.split.output import print_event, print_inference, print_training, say, show_event, step_text
from privlab.split.defaults import BATCH, DISK_MIB, IDLE_SECONDS, MESSAGE_MIB, RETRY_SECONDS, SESSIONS

if TYPE_CHECKING:
    from privlab.split import Client
    from privlab.split.client.data import Batches, Dataset
    from privlab.split.client.job import SplitJob, Started

_VICTIM = shared.all_of(
    option.one_model(required=False, default="vit_ti"),
    *(option.weights(), option.img_size()),
    option.seed(help="Seed of random weights and of the order of images."),
)
_TOKEN_FILE = click.option(
    "--token-file",
    type=PATH,
    default=lambda: Path(click.get_app_dir("privlab")) / "split-token",
    show_default="split-token in privlab's folder of settings",
    help="The bearer token, in a file of mode 0600.",
)
_IMAGES = shared.all_of(option.images(), option.limit(), option.split(), option.labels())
_DEFENSE = shared.all_of(
    option.defense(type=STACK, default="none"),
    option.set_(help="Set an option of a defense; repeat it for more."),
    option.cut_layer(help="Number of blocks that the client keeps, besides the embedding."),
    click.option(
        "--upload", is_flag=True, help="Send the server its initial weights; a column permutation always does."
    ),
    click.option("--batch-size", type=POSITIVE, default=32, help="Number of images that are sent together."),
    click.option("--dtype", default="float32", help="Number format on both sides: float32 or float64."),
)
_SERVER = shared.all_of(
    click.option("--server", required=True, metavar="HOST:PORT", help="Where `privlab split serve` listens."),
    _TOKEN_FILE,
    click.option("--tls", is_flag=True, help="Use TLS, and trust the authorities that this system trusts."),
    click.option("--tls-ca", type=PATH, help="Use TLS, and trust this authority's certificate (PEM)."),
    click.option("--tls-cert", type=PATH, help="This client's certificate (PEM), if the server asks for one."),
    click.option("--tls-key", type=PATH, help="Key of the certificate (PEM)."),
    click.option(
        "--retry-for", type=click.FloatRange(min=0), default=RETRY_SECONDS,
        help="Number of seconds to retry when the server does not answer.",
    ),
    click.option(
        "--timeout", type=click.FloatRange(min=0, min_open=True), default=600,
        help="Number of seconds to wait for a reply.",
    ),
)  # fmt: skip


@click.group(cls=shared.Commands)
def split() -> None:
    """Train and run a model whose backbone is on another machine."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's core would print pages of messages
    if importlib.util.find_spec("grpc") is None:
        raise PrivlabError("Split learning needs the extra: pip install 'privlab[split]'.")


@split.command()
@_VICTIM
@click.option("--host", default="127.0.0.1", help="Address to listen on; beyond loopback only with TLS.")
@click.option("--port", type=click.IntRange(0, 65535), default=50551, help="Port to listen on; 0 takes a free one.")
@click.option("--state", type=PATH, default="runs/split-server", help="Folder of the checkpoints.")
@_TOKEN_FILE
@click.option("--tls-cert", type=PATH, help="Certificate chain (PEM): listen for TLS.")
@click.option("--tls-key", type=PATH, help="Key of the certificate (PEM).")
@click.option("--tls-client-ca", type=PATH, help="Require clients to have a certificate of this authority (PEM).")
@click.option(
    "--record", type=PATH, help="Record every feature and gradient in this folder, for `privlab audit features`."
)
@click.option("--checkpoint-every", type=POSITIVE, default=100, help="Number of steps between checkpoints.")
@click.option("--max-sessions", type=POSITIVE, default=SESSIONS, help="Largest number of clients at once.")
@click.option("--max-batch", type=POSITIVE, default=BATCH, help="Largest number of images in a batch.")
@click.option(
    "--max-message", type=click.IntRange(1, 2047), default=MESSAGE_MIB, help="Largest size of a message in MiB."
)
@click.option("--max-memory", type=POSITIVE, help="Memory of all sessions in MiB.  [default: 80 % of the memory]")
@click.option("--max-disk", type=POSITIVE, default=DISK_MIB, help="Largest size of a session on disk in MiB.")
@click.option("--idle", type=click.FloatRange(min=0, min_open=True), default=IDLE_SECONDS,
              help="Seconds of silence after which a session is saved and closed.")  # fmt: skip
@option.device()
@shared.common
def serve(
    as_json: bool,
    token_file: Path,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    device: str,
    **options: Any,  # noqa: ANN401
) -> None:
    """Hold the backbone for clients, until SIGTERM or Ctrl-C."""
    from privlab.base import pick_device
    from privlab.split import Limits, Server, ServerTls, make_token
    from privlab.split import serve as run
    from privlab.victims import victim

    if (tls_cert is None) != (tls_key is None) or (tls_client_ca and not tls_cert):
        raise PrivlabError("TLS needs both --tls-cert and --tls-key.")
    mebibytes = {
        name: options[f"max_{name}"] * 2**20 for name in ("message", "memory", "disk") if options[f"max_{name}"]
    }
    token = make_token(token_file)
    with shared.warned():
        made = victim(options["model"], **{name: options[name] for name in ("weights", "img_size", "seed")})
    tell = print_event if as_json else show_event
    server = Server(
        made,
        token=token,
        tls=ServerTls(tls_cert, tls_key, tls_client_ca) if tls_cert and tls_key else None,
        limits=Limits(options["max_sessions"], options["max_batch"], idle=options["idle"], **mebibytes),
        device=pick_device(device),
        on_event=tell,
        **{name: options[name] for name in ("host", "port", "state", "record", "checkpoint_every")},
    )
    facts = {"tls": tls_cert is not None, "model": made.architecture, "weights": made.weights.origin}
    facts["token_file"] = str(token_file)
    run(server, started=lambda listening: tell({"event": "listening", "address": listening.address} | facts))
    tell({"event": "stopped"})


@split.command()
@_VICTIM
@_IMAGES
@_DEFENSE
@click.option(
    "--classes", type=click.IntRange(min=2), help="Number of classes of a new head, in place of the model's own."
)
@click.option("--epochs", type=POSITIVE, default=1, help="Number of epochs.")
@click.option("--optimizer", default="adamw", help="Optimiser on both sides: adamw or sgd.")
@click.option("--lr", type=float, default=1e-4, help="Learning rate.")
@click.option("--momentum", type=float, default=0.9, help="Momentum of sgd.")
@click.option("--weight-decay", type=float, default=0.0, help="Weight decay.")
@click.option("--out", type=PATH, help="Folder of the client's checkpoint.  [default: runs/TIME-split-MODEL]")
@click.option("--resume", type=PATH, metavar="DIR", help="Continue the training in an earlier --out, with its options.")
@_SERVER
@option.device()
@shared.common
@click.pass_context
def train(context: click.Context, as_json: bool, out: Path | None, resume: Path | None, **options: Any) -> None:  # noqa: ANN401
    """Train the embedding and the head here, and the backbone on the server."""
    from privlab.split import Trainer
    from privlab.split.client.loops import training_summary

    client = _client(options)
    started = _started(context, resume)
    job, folder = started.job, resume or out or Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}-split-{options['model']}")
    if context.get_parameter_source("epochs") is ParameterSource.COMMANDLINE:
        job = replace(job, epochs=options["epochs"])
    batches = _batches(started, folder, resuming=resume is not None)
    facts = started.facts | {"job": asdict(job), "data": batches.data.sha256}
    trainer = Trainer(started.learner, client, folder, facts=facts, session=started.session)
    began, first, total = time.perf_counter(), started.learner.step, job.epochs * batches.per_epoch
    with shared.progress_bar("training") as show:
        trainer.train(batches, total, lambda done: show(done.step, total, step_text(done)))
    seconds = time.perf_counter() - began
    done = started.learner.step - first
    summary = training_summary(started.learner, batches, client.traffic, seconds, done)
    print_training({"run": str(folder), "session": trainer.session[:12]} | summary, as_json)


@split.command()
@_VICTIM
@_IMAGES
@_DEFENSE
@click.option("--run", type=PATH, metavar="DIR", help="Use what `train --out DIR` learnt, with its options.")
@_SERVER
@option.device()
@shared.common
@click.pass_context
def infer(context: click.Context, as_json: bool, run: Path | None, **options: Any) -> int:  # noqa: ANN401
    """Classify images: the embedding and the head are here, the backbone is on the server."""
    from privlab.split import infer
    from privlab.split.client.loops import inference_summary

    client = _client(options)
    started = _started(context, run)
    job = replace(started.job, **{name: options[name] for name in ("images", "limit", "split", "labels")})
    data = _read(job, started)
    began = time.perf_counter()
    with shared.progress_bar("asking") as progress:
        answers = infer(started.learner, client, data, session=started.session, progress=progress)
    names = dict(enumerate(job.source().class_names or ()))
    summary = inference_summary(data, answers, names, client.traffic, time.perf_counter() - began)
    print_inference(summary | {"failed": data.failed}, as_json)
    shared.print_failed(data.failed.items())
    return 2 if data.failed else 0


@split.command()
@click.argument("folder", type=PATH)
@click.option("--host", multiple=True, default=("localhost", "127.0.0.1", "::1"),
              help="Name or address of the server; repeat it for more.")  # fmt: skip
@click.option("--days", type=POSITIVE, default=30, help="Number of days for which the certificates are valid.")
@shared.common
def certificate(folder: Path, host: tuple[str, ...], days: int, as_json: bool) -> None:
    """Make an authority with certificates for a server and a client in FOLDER, to try TLS out."""
    if importlib.util.find_spec("trustme") is None:
        raise PrivlabError("Making certificates needs trustme: pip install 'privlab[split]'.")
    from privlab.split.protocol.security import make_certificates

    paths = make_certificates(folder, host, float(days))
    ca, cert, key, *mine = paths
    server = f"server: --tls-cert {cert} --tls-key {key} --tls-client-ca {ca}"
    client = f"client: --tls-ca {ca} --tls-cert {mine[0]} --tls-key {mine[1]}"
    shared.print_either(as_json, {path.name: str(path) for path in paths}, server, client)


def _client(options: dict[str, Any]) -> "Client":
    """Return the client that the options of `_SERVER` state."""
    from privlab.split import Client, ClientTls, read_token

    server, timeout, token_file = (options[name] for name in ("server", "timeout", "token_file"))
    system, *files = (options[name] for name in ("tls", "tls_ca", "tls_cert", "tls_key"))
    if not (system or files[0]) and any(files):
        raise PrivlabError("--tls-cert and --tls-key are for TLS: give --tls-ca, or --tls, too.")
    tls = ClientTls(*files) if system or files[0] else None
    client = Client(server, read_token(token_file), tls, timeout, options["retry_for"], say)
    if client.tls is not None:
        client.tls.credentials()  # reports mistakes in the files before images are read
    return client


_CONNECTION = {"server", "token_file", "tls", "tls_ca", "tls_cert", "tls_key", "retry_for", "timeout"}
_FREE = {
    "train": _CONNECTION | {"resume", "device", "as_json", "epochs"},
    "infer": _CONNECTION | {"run", "device", "as_json", "images", "limit", "split", "labels"},
}
"""The options that a resumed run does not keep, by command."""


def _started(context: click.Context, folder: Path | None) -> "Started":
    """Begin a job, or resume that of a folder; the options that determined it cannot be given again."""
    from privlab.base import pick_device
    from privlab.split.client.job import SplitJob, resume_job, start_job

    device = context.params["device"]
    if folder is None:
        with shared.warned():
            return start_job(SplitJob.of(context.params), pick_device(device))
    free = _FREE[str(context.command.name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        if name not in free and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise PrivlabError(f"The run in '{folder}' keeps its options. Found {parameter.opts[0]}: leave it out.")
    return resume_job(folder, pick_device(device))


def _batches(started: "Started", folder: Path, *, resuming: bool) -> "Batches":
    """Return the batches of a run's images, and make the folder of the client's checkpoint."""
    from privlab.split.client.data import Batches
    from privlab.split.client.loops import CHECKPOINT
    from privlab.split.protocol.checkpoint import private_folder

    if not resuming and (folder / CHECKPOINT).exists():
        raise PrivlabError(f"'{folder}' holds another run: --resume it, or give another --out.")
    data = _read(started.job, started).check(started.learner.classes)
    shared.print_failed(data.failed.items())
    if resuming and started.facts["data"] != data.sha256:
        raise PrivlabError(f"The images are not those that the run in '{folder}' was begun with.")
    private_folder(folder)
    return Batches(data, started.job.batch_size, started.job.seed)


def _read(job: "SplitJob", started: "Started") -> "Dataset":
    """Return a job's images, labelled by the victim's predictions if the job asks for these."""
    from privlab.split.client.data import load

    with shared.progress_bar("reading") as progress:
        data = load(job.source(), started.victim.preprocessing, progress)
    return data.with_labels_of(started.victim.model) if job.labels == "predicted" else data
