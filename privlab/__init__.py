"""privlab measures how much of a private image the other side of a Vision Transformer can reconstruct.

    images ─> victim + defense ─> observation ─> attack ─> reconstruction ─> metrics ─> record

`attack` runs all of it; `victim`, `observe`, the attacks, the defenses and `metrics` can be used alone.
"""

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from privlab.api.audits import audit_features, audit_gradients, audit_update, audit_weights
    from privlab.api.steps import observe, score
    from privlab.api.whole_run import attack, grid
    from privlab.base import PrivlabError
    from privlab.images import open_images
    from privlab.release.capture import capture, capture_update
    from privlab.report.run import Run, load
    from privlab.threat import Client, Features, Gradient, Update
    from privlab.victims import Victim, victim

__all__ = ["Client", "Features", "Gradient", "PrivlabError", "Run", "Update", "Victim", "__version__", "attack"]
__all__ += ["audit_features", "audit_gradients", "audit_update", "audit_weights"]
__all__ += ["capture", "capture_update", "grid", "load", "observe", "open_images", "score", "victim"]

__version__ = version("privlab")

if not Path(__file__).with_name("attacks").is_dir():
    raise ImportError(
        "privlab/attacks must be a link to the folder attacks, but git wrote a text file. Clone again with "
        "'git clone -c core.symlinks=true', on Windows in developer mode, and install from that clone."
    )

_HOME: dict[str, str] = dict.fromkeys(("observe", "score"), "privlab.api.steps")
_HOME |= dict.fromkeys(("Features", "Gradient", "Update"), "privlab.threat.releases")
_HOME |= dict.fromkeys(("Run", "load"), "privlab.report.run")
_HOME |= dict.fromkeys(("audit_features", "audit_gradients", "audit_update", "audit_weights"), "privlab.api.audits")
_HOME |= {
    "attack": "privlab.api.whole_run",
    "grid": "privlab.api.whole_run",
    "Client": "privlab.threat.client",
    "PrivlabError": "privlab.base.errors",
    "capture": "privlab.release.capture",
    "capture_update": "privlab.release.capture",
    "open_images": "privlab.images.open",
    "Victim": "privlab.victims.named",
    "victim": "privlab.victims.named",
}


def __getattr__(name: str) -> object:
    """Import torch and timm on first use only: `privlab --help` needs neither."""
    if name not in _HOME:
        raise AttributeError(f"module 'privlab' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)
