"""The site: `sphinx-build -W -n docs docs/_build/html` builds it, runs its notebooks, and checks its links."""

import os
import sys
from importlib.metadata import version as installed
from pathlib import Path

EXTENSIONS = str(Path(__file__).parent / "_ext")
sys.path.insert(0, EXTENSIONS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (EXTENSIONS, os.environ.get("PYTHONPATH"))))  # of notebooks
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # privlab, in notebooks
os.environ["HF_HUB_OFFLINE"] = "1"  # what the notebooks show needs no network
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm would rather have widgets

project = "privlab"
author = copyright = "The privlab developers"
version = release = installed("privlab")
language = "en-GB"

extensions = [
    "myst_nb",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "generated_pages",
    "marked_blocks",
    "checked_links",
]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
smartquotes = False  # --block is an option, and no dash
default_role = "literal"  # docstrings write `name`
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types in signatures are named as in the code, and link where they can
suppress_warnings = ["config.cache"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "mailto"]

nb_execution_mode = "force"
nb_execution_timeout = 180
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "privlab"
html_static_path = ["_static"]
html_css_files = ["privlab.css"]
copybutton_selector = ":not(.output) > div.highlight > pre"  # code, but not what it printed
html_show_sphinx = False
html_copy_source = False
