"""`lamina generate`: what it says, and what it never does."""

import pytest

from lamina.cli import main


def test_code_beside_a_model_runs_only_where_it_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (tmp_path / "config.json").write_text('{"model_type": "mystery", "auto_map": {"AutoConfig": "evil.Config"}}')
    assert main(["generate", str(tmp_path)]) == 2
    assert "--trust-remote-code" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert main(["generate", str(tmp_path), "--trust-remote-code"]) == 2  # the code has no class Config
    assert (tmp_path / "ran").exists()
