import pytest
from training.tiny_runs import corpus, session_cache, shared_cache  # noqa: F401

from lamina.cli import main


@pytest.fixture
def refused(capsys, tmp_path):
    """Run a command in this process; give the one line that it says."""

    def run(*argv):
        before = snapshot(tmp_path)
        code = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if line.strip() and "%|" not in line]
        assert code == 2, out + err
        assert len(lines) == 1, err
        assert lines[0].startswith("lamina: ")
        assert snapshot(tmp_path) == before
        return lines[0]

    return run


def snapshot(folder) -> dict:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
