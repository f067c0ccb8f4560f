"""The papers' recipes: files that `lamina pretrain --config` takes as they are."""

from pathlib import Path

import pytest
import yaml

from lamina.commands.arguments import Parser
from lamina.studies.dry_run import dry_run
from lamina.training.settings import PretrainSettings

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
BASES = yaml.safe_load((ROOT / "studies" / "bases.yaml").read_text(encoding="utf-8"))


def settings_of(path: Path) -> PretrainSettings:
    """What the command line makes of the file."""
    parser = Parser("pretrain", "", "")
    parser.add_settings(PretrainSettings)
    parser.add_output_modes("")
    typed, _ = parser.settings_from(["--config", str(path)])
    return PretrainSettings(**typed)


def test_there_are_recipes():
    assert len(RECIPES) >= 3


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_a_whole_configuration(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# "), "a recipe says first whose it is"
    assert f"--config recipes/{path.name}" in text
    settings = settings_of(path)
    assert settings.placement
    cost = dry_run({path.stem: {path.stem: settings}}).iloc[0]
    if settings.corpus == "mnist":  # for two cores; no paper's
        assert cost["tokens"] < 1e7
        return
    assert settings.corpus.startswith("hf:")
    assert cost["parameters"] > (5e6 if settings.image_size else 5e7)
    assert cost["tokens"] > 1e9


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_what_the_studies_train(path):
    """Where studies/bases.yaml has a base of the same name, the recipe is that base with a placement."""
    if path.stem not in BASES:
        pytest.skip("the studies have no such base")
    base = {name: value for name, value in BASES[path.stem].items() if name != "base"}
    ours = settings_of(path)
    assert {name: getattr(ours, name) for name in base} == {
        name: getattr(PretrainSettings(**base), name) for name in base
    }
