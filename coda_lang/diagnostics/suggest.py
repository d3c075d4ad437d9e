"""Which known name a misspelt one may mean. In: the name and the candidates. Out: the likely ones, best first; the same answer every time.

Non-goals: knowing any names.
"""

from __future__ import annotations

from collections.abc import Iterable


def distance(a: str, b: str, limit: int) -> int:
    """Edits (insert, delete, replace, swap of neighbours) from `a` to `b`; anything above `limit` is `limit + 1`."""
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, last, row = row, before, [i] + [0] * len(b)
        for j, y in enumerate(b, 1):
            row[j] = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], last[j - 2] + 1)
        if min(row) > limit:
            return limit + 1
    return min(row[-1], limit + 1)


def suggest(name: str, candidates: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """Up to `count` candidates close to `name`: a third of its letters may differ (one in short names); case and `_` hardly count."""
    limit = max(1, len(name) // 3)
    plain = _plain(name)
    scored: list[tuple[float, bool, str]] = []
    for candidate in set(candidates):
        if candidate == name:
            continue
        if _plain(candidate) == plain:
            score: float = 0
        elif len(name) == 1 and len(candidate) == 1:
            continue  # any letter is one edit from any other
        else:
            score = distance(name.lower(), candidate.lower(), limit)
            short, long = sorted((plain, _plain(candidate)), key=len)
            if score > limit and len(short) >= 3 and long.startswith(short):
                score = limit + 0.5  # cut short, or with something added
        if score <= limit + 0.5:
            scored.append((score, candidate[:1].lower() != name[:1].lower(), candidate))
    scored.sort()
    return tuple(c for score, _, c in scored[:count] if score <= scored[0][0] + 1)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """A remedy, "did you mean `silu`?", or "" where nothing is close."""
    found = [f"`{s}`" for s in suggest(name, candidates)]
    return f"did you mean {', '.join(found[:-1])}{' or ' if len(found) > 1 else ''}{found[-1]}?" if found else ""


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
