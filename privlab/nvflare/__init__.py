"""Records updates inside NVFlare: a filter of the client's tasks. The package needs the extra `nvflare` (2.9)."""

import importlib.util

import lazy_loader

from privlab.base import PrivlabError

if importlib.util.find_spec("nvflare") is None:
    raise PrivlabError("privlab.nvflare needs NVFlare: pip install 'privlab[nvflare]'.")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
