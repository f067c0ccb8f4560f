"""A study's claims do not change beside an old verdict.

recorded_claims.txt holds a digest of each study's claims, and of the verdicts on these claims. Renew the file after you
have judged a study again. Renew the file also if you changed only a claim's wording, and the verdict still fits:

    python tests/lab/papers/test_recorded_claims.py
"""

import ast
import hashlib
from pathlib import Path

STUDIES = Path(__file__).parents[3] / "studies"
FILE = Path(__file__).with_name("recorded_claims.txt")


def claims_of(code: str) -> str:
    """A digest of the claims' words and code, without docstrings, comments and line breaks."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def digests() -> dict[str, tuple[str, str]]:
    """The digests of each judged study's claims and of its verdicts, by the record's folder."""
    found = {}
    for record in sorted((STUDIES / "records").glob("*/claims.json")):
        claims = STUDIES / f"{record.parent.name.rpartition('-')[0]}.py"
        if claims.is_file():
            verdicts = hashlib.sha256(record.read_bytes()).hexdigest()[:16]
            found[record.parent.name] = claims_of(claims.read_text("utf-8")), verdicts
    return found


def written() -> dict[str, tuple[str, str]]:
    lines = (line.split() for line in FILE.read_text("utf-8").splitlines())
    return {name: (claims, verdicts) for name, claims, verdicts in lines}


def test_no_claim_has_changed_beside_an_old_verdict():
    now, before = digests(), written()
    changed = [name for name in now if name in before and now[name][0] != before[name][0]]
    assert not changed, "these studies' claims have changed: judge the studies again, or see this file's first lines"
    assert now == before, f"there are new verdicts. Run: python {Path(__file__).relative_to(STUDIES.parent)}"


def test_another_word_or_another_limit_is_a_change_and_a_line_break_is_none():
    code = "@claim(says='A is below B')\ndef a_b(trials):\n    return below(trials, 0.1)\n"
    told = code.replace("    return", "    'Compare A with B.'\n    return")
    assert claims_of(code) == claims_of(told.replace("trials, 0.1", "\n        trials, 0.1\n    ") + "# a comment\n")
    others = code.replace("below B", "above B"), code.replace("0.1", "1")
    assert len({claims_of(one) for one in (code, *others)}) == 3


if __name__ == "__main__":
    FILE.write_text("".join(f"{name} {' '.join(pair)}\n" for name, pair in digests().items()), "utf-8")
