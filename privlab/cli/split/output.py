"""The output of `privlab split`: events of a server, progress and results of a client."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape
from rich.table import Table

from privlab.cli.common import echo, err, print_json, print_table

if TYPE_CHECKING:
    from privlab.split.client.loops import StepDone


def print_event(event: Mapping[str, object]) -> None:
    """Print an event of a server as a line of JSON."""
    click.echo(json.dumps({"time": _now(), **event}))


def show_event(event: Mapping[str, object]) -> None:
    """Show an event of a server as a line of text."""
    facts = " ".join(f"{key}={value}" for key, value in event.items() if key not in ("event", "session"))
    session = f" {event['session']}" if "session" in event else ""
    err.print(f"{_now()} {event['event']}{session} {facts}".rstrip(), markup=False)


def say(message: str) -> None:
    """Print a message on standard error while the program continues."""
    err.print(message, style="yellow", markup=False)


def step_text(done: "StepDone") -> str:
    """Return what the progress of a training says of its last step."""
    accuracy = done.hits / done.images
    return f"training, loss {done.loss:.4f}, accuracy {accuracy:.1%}, {1000 * done.seconds:.0f} ms a step"


def print_training(summary: Mapping[str, Any], as_json: bool) -> None:
    """Print the results of a training."""
    if as_json:
        print_json(dict(summary))
        return
    table = Table("epoch", "loss", "accuracy", header_style="bold")
    for row in summary["epochs"]:
        table.add_row(str(row["epoch"]), f"{row['loss']:.4f}", f"{row['accuracy']:.2%}")
    print_table(table)
    echo("loss and accuracy as learnt: each image before the step that it is in")
    echo(f"{summary['steps']} steps, session {summary['session']}, key {summary['key_bits']:.0f} bits a batch")
    _print_traffic(summary)
    echo(f"run: {summary['run']}")


def print_inference(summary: Mapping[str, Any], as_json: bool) -> None:
    """Print the predictions and the accuracy of an inference."""
    if as_json:
        print_json(dict(summary))
        return
    table = Table("image", "label", "predicted", "probability", header_style="bold")
    for row in summary["predictions"]:
        label = "" if row["label"] is None else str(row["label"])
        name = f"{row['predicted']} {row['class'] or ''}".rstrip()
        table.add_row(escape(row["image"]), label, escape(name), f"{row['probability']:.3f}")
    print_table(table)
    if summary["accuracy"] is not None:
        echo(f"accuracy {summary['accuracy']:.2%}")
    _print_traffic(summary)


def _print_traffic(summary: Mapping[str, Any]) -> None:
    rate, latency = summary["images_per_second"], summary["latency_ms_median"]
    speed = "" if rate is None else f", {rate:.1f} images per second"
    waited = "" if latency is None else f"; a reply takes {latency:.1f} ms (median)"
    mib = [summary[name] / 2**20 for name in ("bytes_sent", "bytes_received")]
    echo(f"{summary['seconds']:.1f} s{speed}; sent {mib[0]:.1f} MiB, received {mib[1]:.1f} MiB{waited}")


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="milliseconds")
