"""`{not-run}`: a block of code that no test runs, with the reason, which the page "Code that is not run" lists."""

import re
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def not_run(text: str) -> list[tuple[str, str]]:
    """Return the reason and the first line of each block of a page that no test runs."""
    return re.findall(r"^```\{not-run\} (.+)\n(?::.*\n)*(.+)", text, re.MULTILINE)


class NotRun(SphinxDirective):
    """A block of code with the reason why the tests leave it out: ```{not-run} why."""

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar = {"language": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Return the code alone."""
        code = "\n".join(self.content)
        return [nodes.literal_block(code, code, language=self.options.get("language", "text"))]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_directive("not-run", NotRun)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
