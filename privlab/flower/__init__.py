"""Records and audits updates inside Flower: mods of the client, and a strategy of the server.

The package needs the extra `flower` (flwr 1.26 or later), whose message API it uses.
"""

import importlib.util

import lazy_loader

from privlab.base import PrivlabError

if importlib.util.find_spec("flwr") is None:
    raise PrivlabError("privlab.flower needs Flower: pip install 'privlab[flower]'.")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
