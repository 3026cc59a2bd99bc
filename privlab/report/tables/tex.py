"""Text as LaTeX: plain ASCII that any engine sets, in any encoding."""

import re
import unicodedata

__all__ = ["to_tex"]

_TEX = {c: f"\\{c}" for c in "{}$&#_%"} | {"[": "{[}", "*": "{*}"}  # the two would be read as options of a line's end
_TEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", '"': "{''}"}
_TEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "—": r"\textemdash{}", "–": r"\textendash{}"}
_LETTERS = r"\o \O \l \L \ss \ae \AE \oe \OE ' `` '' \dots \S"
_TEX |= dict(zip("øØłŁßæÆœŒ’“”…§", _LETTERS.split(), strict=True))
_SIGNS = r"\pm \times \cdot - \le \ge \approx \ne \infty \uparrow \downarrow \to \nabla ^\circ \gamma \sigma \lambda"
_SIGNS += r" \alpha \beta \delta \epsilon \eta \theta \mu \pi \rho \tau \phi \varphi \omega \Delta \Sigma \Phi \Omega"
_TEX |= {c: f"${tex}$" for c, tex in zip("±×·−≤≥≈≠∞↑↓→∇°γσλαβδεηθμπρτϕφωΔΣΦΩ", _SIGNS.split(), strict=True)}
_ACCENTS = dict(
    zip("\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327", "`'^~=u.\"rHvc", strict=True)
)


def to_tex(text: str) -> str:
    """Return text as LaTeX in plain ASCII; a character without a LaTeX name here is shown as [U+…]."""
    whole = unicodedata.normalize("NFC", " ".join(text.split()))
    letters = "".join(c if c in _TEX else unicodedata.normalize("NFD", c) for c in whole)
    return re.sub("-(?=-)", "-{}", re.sub(f"(.)([{''.join(_ACCENTS)}]*)", _letter, letters))


def _letter(found: re.Match[str]) -> str:
    letter, kind = found[1], unicodedata.decomposition(found[1])
    if letter in _TEX or " " <= letter <= "~":
        out = _TEX.get(letter, letter)
        out += "{}" if re.fullmatch(r"\\[A-Za-z]+", out) else ""
    elif kind.startswith("<"):  # a variant of other letters, such as a subscript
        plain = to_tex(unicodedata.normalize("NFKD", letter))
        out = {"<super>": rf"\textsuperscript{{{plain}}}", "<sub>": f"$_{{{plain}}}$"}.get(kind.split()[0], plain)
    else:
        out = f"{{[}}U+{ord(letter):04X}]"
    for accent in found[2]:
        out = f"\\{_ACCENTS[accent]}{{{out}}}"
    return out
