"""The table of model types: its two halves agree, and every list of model types is made from it."""

import subprocess
import sys

import transformers
from test_backbone_parity import BACKBONES

from lamina.core.architectures import ARCHITECTURES, ROLES, conversions, convertible, verified
from lamina.modeling import LaminaConfig
from lamina.modeling.modeling_lamina import ADAPTERS, HEADS


def test_what_travels_and_what_stays_are_rows_of_the_same_model_types():
    assert list(ADAPTERS) == list(ARCHITECTURES)
    assert set(ARCHITECTURES) == {*BACKBONES, "vit", "modernbert"}  # those two in test_encoders.py


def test_the_heads_of_every_row_exist():
    for adapter in ADAPTERS.values():
        assert adapter.is_decoder == ("causal_lm" in adapter.heads)
        assert set(adapter.heads) <= set(HEADS)


def test_no_two_rows_disagree_on_a_role():
    for row in ARCHITECTURES.values():
        assert row.roles == {name: ROLES[name] for name in row.roles}


def test_every_head_is_loaded_by_its_auto_class():
    config = LaminaConfig()
    for head in HEADS.values():
        auto = getattr(transformers, head.auto_class)
        assert auto._model_mapping[LaminaConfig] is head.model
        assert config.auto_map[head.auto_class] == f"modeling_lamina.{head.model.__name__}"


def test_the_lists_name_every_row():
    for name, row in ARCHITECTURES.items():
        assert row.title in verified()
        assert (row.title in convertible()) == (name in conversions())


def test_the_help_of_convert_is_made_from_the_table_without_torch():
    code = "import sys; from lamina.cli import main\ntry: main(['convert', '--help'])\nexcept SystemExit: pass\n"
    done = subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert convertible() in " ".join(done.stdout.decode().split())
