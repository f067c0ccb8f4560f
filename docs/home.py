"""Give the project its public home: one command writes it wherever it must stand.

    python docs/home.py https://github.com/OWNER/NAME

pyproject.toml gets ``[project.urls]``, and setup.py then makes the links of the package's README absolute. CITATION.cff
gets ``repository-code`` and mkdocs.yml ``repo_url``. Each notebook gets a badge that opens it in Colab, and a cell that
installs Lamina there. Run it again to change the home.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLAB = "https://colab.research.google.com"


def give(home: str, root: Path = ROOT) -> None:
    """Write ``home``, the address of a repository on GitHub, into the files of the checkout ``root``.

    Raises:
        SystemExit: if the address is another.
    """
    address = re.fullmatch(r"https://github\.com/([\w.-]+)/([\w.-]+?)(?:\.git)?/?", home)
    if address is None:
        raise SystemExit(f"home: {home!r} (allowed: https://github.com/OWNER/NAME)")
    owner, name = address.groups()
    home = f"https://github.com/{owner}/{name}"
    urls = "".join(
        f'{title} = "{home}{path}"\n'
        for title, path in {"Repository": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}.items()
    )
    table = r"\[project\.urls\]\n(?:\w.*\n)+\n"
    _put(root / "pyproject.toml", table, f"[project.urls]\n{urls}\n", r"^\[project\.scripts\]")
    _put(root / "CITATION.cff", r"repository-code: .*\n", f"repository-code: {home}\n", "^version:")
    _put(root / "mkdocs.yml", r"repo_url: .*\n", f"repo_url: {home}\n", "^docs_dir:")
    for path in sorted((root / "docs" / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        cells = [cell for cell in notebook["cells"] if "colab" not in cell["metadata"].get("tags", ())]
        there = f"{COLAB}/github/{owner}/{name}/blob/main/docs/notebooks/{path.name}"
        badge = f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({there})"
        opening = {"cell_type": "markdown", "id": "colab-badge", "metadata": {"tags": ["colab"]}, "source": [badge]}
        install = {
            "cell_type": "code",
            "execution_count": None,
            "id": "colab-install",
            "metadata": {"tags": ["colab"]},
            "outputs": [],
            "source": [f'%pip install -q "lamina[train] @ git+{home}"'],
        }
        notebook["cells"] = [cells[0], opening, install, *cells[1:]]
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _put(path: Path, old: str, new: str, before: str) -> None:
    """Replace what matches ``old`` by ``new``; where nothing does, put ``new`` in front of the line ``before``."""
    content = path.read_text(encoding="utf-8")
    changed, count = re.subn(old, lambda _: new, content, count=1)
    if not count:
        changed = re.sub(before, lambda found: new + found[0], content, count=1, flags=re.MULTILINE)
    path.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", help="the repository's address, https://github.com/OWNER/NAME")
    give(parser.parse_args().home)
