"""One record of the error catalog. In: nothing. Out: `Entry`. Non-goals: the entries themselves (entries/)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """What a code means, for someone who just met it.

    `title`: a noun phrase, no full stop. `why`: the rule and its reason; paragraphs are separated by blank lines. `wrong`: the smallest
    example that provokes exactly this code. `right`: the same, mended, which compiles ("" where nothing of the kind is legal). `remedy`:
    what to do, one sentence. `kind`: what the examples are: "coda" a whole source file, "python" a script that raises CodaError with the
    code, "shell" commands of which the last prints it (in a folder that has specs/). "reason": `wrong` is no error, but takes several
    kernels, and the plan gives the code as the reason; `right` is one kernel. "warning": `wrong` is accepted, with a warning.
    """

    code: str
    title: str
    why: str
    wrong: str
    right: str
    remedy: str
    kind: str = "coda"

    @property
    def headings(self) -> tuple[str, str]:
        """What stands above the two examples."""
        headings = {"reason": ("Several kernels", "One kernel"), "warning": ("Warned of", "Accepted")}
        return headings.get(self.kind, ("Refused", "Accepted"))
