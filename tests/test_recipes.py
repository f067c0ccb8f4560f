"""Every number of every recipe is its paper's: the tables here were written from the papers, with the place of each."""

import pytest
from scripts import ROOT
from test_readme import RECIPES, settings_of

from lamina.modeling.backbones.presets import preset_config

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
# Of all recipes: how often is evaluated, and how a step's sequences are split over processes. No paper's.
OURS = {"eval_steps", "eval_blocks", "batch_size", "gradient_accumulation", "min_learning_rate"}

MIX = {
    "sequence_length": (256, "repository: max_length"),
    "sequences": (512, "repository: total_batch_size"),
    "warmup": (0.1, "App A.1: the first 10 % of the steps"),
    "least_rate": (0.1, "repository: cosine to 10 %"),
    "weight_decay": (0.0, "repository"),
    "beta1": (0.9, "torch's Adam"),
    "beta2": (0.999, "torch's Adam"),
    "max_grad_norm": (0.0, "repository: grad_clipping 0.0"),
}
FUSE = {
    "sequence_length": (2048, "App B"),
    "warmup": (200, "App B"),
    "least_rate": (0.1, "not printed; 10 % here, and the recipe says so"),
    "weight_decay": (0.1, "App B"),
    "beta1": (0.9, "App B"),
    "beta2": (0.95, "App B"),
    "max_grad_norm": (1.0, "App B"),
}
KEEL = {
    "weight_decay": (0.01, "Table 8"),
    "beta1": (0.9, "Table 8"),
    "beta2": (0.95, "Table 8"),
    "max_grad_norm": (1.0, "Table 8"),
    "last_rate": (1e-7, "Sec 5.3: cosine to 1e-7"),
}
PERI = {
    "sequence_length": (8192, "Table 2"),
    "sequences": (256, "Table 2"),
    "steps": (14400, "Table 2"),
    "warmup": (0.1, "Table 2: 10 %"),
    "learning_rate": (2e-3, "Sec 4.2: the best of Pre-LN at every size"),
    "weight_decay": (0.033, "Table 2"),
    "least_rate": (0.1, "not printed; a usual one, and the recipe says so"),
    "beta1": (0.9, "not printed; a usual one, and the recipe says so"),
    "beta2": (0.95, "not printed; a usual one, and the recipe says so"),
    "max_grad_norm": (1.0, "not printed; a usual one, and the recipe says so"),
}
IMAGES = {
    "image_size": (224, "both recipes"),
    "patch_size": (16, "ViT-Tiny/16"),
    "center_crop": (0.875, "both repositories: crop of 256 to 224"),
    "crop_scale": (0.08, "both repositories"),
    "flip": (0.5, "both repositories"),
    "rand_augment": (0.9, "magnitude 9 of 10"),
    "random_erasing": (0.25, "DeiT Table 9, ConvNeXt App A.1"),
    "mixup": (0.8, "DeiT Table 9, ConvNeXt App A.1"),
    "cutmix": (1.0, "DeiT Table 9, ConvNeXt App A.1"),
    "label_smoothing": (0.1, "DeiT Table 9, ConvNeXt App A.1"),
    "drop_path": (0.1, "DeiT Table 9, ConvNeXt App A.1"),
    "weight_decay": (0.05, "DeiT Table 9, ConvNeXt App A.1"),
    "beta1": (0.9, "AdamW"),
    "beta2": (0.999, "AdamW"),
    "max_grad_norm": (0.0, "neither clips"),
}
PAPERS = {
    "mix-71m": MIX | {"steps": (10_000, "Table 7"), "learning_rate": (1e-3, "Table 7")},
    "mix-130m": MIX | {"steps": (20_000, "Table 7"), "learning_rate": (1e-3, "Table 7")},
    "mix-250m": MIX | {"steps": (40_000, "Table 7"), "learning_rate": (1e-3, "Table 7")},
    "mix-1b": MIX | {"steps": (100_000, "Table 7"), "learning_rate": (5e-4, "Table 7")},
    "mix-7b": MIX | {"steps": (13_000, "Table 7"), "learning_rate": (5e-4, "repository's script")},
    "fuse-740m": FUSE | {"learning_rate": (2e-4, "App B"), "tokens": (30e9, "App B"), "step_tokens": (0.5e6, "App B")},
    "fuse-1.3b": FUSE | {"learning_rate": (2e-4, "App B"), "tokens": (100e9, "App B"), "step_tokens": (1e6, "App B")},
    "fuse-5b": FUSE
    | {"learning_rate": (2e-4, "App B, without WS"), "tokens": (200e9, "App B"), "step_tokens": (4e6, "App B")},
    "fuse-6.5b": FUSE
    | {"learning_rate": (1.2e-4, "App B"), "tokens": (400e9, "App B"), "step_tokens": (4e6, "not printed; 5B's")},
    "fuse-moe": FUSE
    | {"learning_rate": (2e-4, "App B"), "tokens": (200e9, "App B"), "step_tokens": (4e6, "not printed; 5B's")},
    "keel-64": KEEL
    | {"learning_rate": (9e-3, "Sec 5.3: 64 and 128 layers"), "tokens": (190e9, "Sec 5.3")}
    | {"sequences": (1024, "Sec 5.3"), "sequence_length": (4096, "Sec 5.3"), "warmup": (2500, "Sec 5.3")}
    | {"num_layers": (32, "Sec 5.3: 64 sub-layers")},
    "keel-deep": KEEL
    | {"learning_rate": (6e-3, "Sec 5.3: 512 layers"), "tokens": (190e9, "Sec 5.3")}
    | {"sequences": (1024, "Sec 5.3"), "sequence_length": (4096, "Sec 5.3"), "warmup": (2500, "Sec 5.3")},
    "keel-small-data": KEEL
    | {"learning_rate": ((1e-3, 1.5e-3, 3e-3, 4.5e-3), "Sec 5.4: one of them"), "tokens": (10e9, "Sec 5.4")}
    | {"sequences": (256, "Sec 5.4"), "sequence_length": (2048, "Sec 5.4: at 10B"), "warmup": (2000, "Sec 5.4")},
    "peri-400m": PERI,
    "peri-1.5b": PERI,
    "peri-3.2b": PERI,
    "deit-tiny": IMAGES
    | {"sequences": (1024, "DeiT Table 9"), "learning_rate": (1e-3, "DeiT Table 9: 5e-4 x batch / 512")}
    | {"steps": (300 * 1251, "DeiT Table 9: 300 epochs"), "warmup": (5 * 1251, "DeiT Table 9: 5 epochs")}
    | {"last_rate": (1e-5, "repository: min-lr"), "ema_decay": (0.99996, "repository: model-ema-decay")}
    | {"repeated_augmentation": (3, "DeiT Sec 6.1: three draws of an image")},
    "mix-vit-tiny": IMAGES
    | {"sequences": (4096, "ConvNeXt App A.1"), "learning_rate": (4e-3, "ConvNeXt App A.1")}
    | {"steps": (120 * 313, "Mix-LN Table 4: 120 epochs"), "warmup": (20 * 313, "ConvNeXt App A.1: 20 epochs")}
    | {"last_rate": (1e-6, "repository: min_lr"), "ema_decay": (0.9999, "ConvNeXt App A.1")},
}
BACKBONES = {  # hidden size, feed-forward, heads, blocks
    "mix-71m": ((512, 1368, 8, 12), "Mix-LN Table 7"),
    "mix-130m": ((768, 2048, 12, 12), "Mix-LN Table 7"),
    "mix-250m": ((768, 2560, 16, 24), "repository; Table 7 prints width 1024"),
    "mix-1b": ((2048, 5461, 32, 24), "Mix-LN Table 7"),
    "mix-7b": ((4096, 11008, 32, 32), "Mix-LN Table 7"),
    "fuse-740m": ((1536, 4224, 24, 24), "FuseNorm App B"),
    "fuse-1.3b": ((1536, 4224, 24, 48), "FuseNorm App B"),
    "fuse-5b": ((2560, 6912, 40, 64), "FuseNorm App B"),
    "keel-64": ((1024, 3072, 16, 256), "Keel Table 8; num_layers makes 32 of the blocks"),
    "keel-deep": ((1024, 3072, 16, 256), "Keel Table 8; 512 sub-layers"),
    "keel-small-data": ((1024, 3072, 16, 256), "Keel Table 8"),
    "peri-400m": ((1024, 4096, 8, 24), "Peri-LN Table 3; the feed-forward's 4 d fits the sizes"),
    "peri-1.5b": ((2048, 8192, 16, 24), "Peri-LN Table 3; the feed-forward's 4 d fits the sizes"),
    "peri-3.2b": ((2560, 10240, 16, 32), "Peri-LN Table 3; the feed-forward's 4 d fits the sizes"),
}
PLACEMENTS = {"mix": "mix_ln", "fuse": "fusenorm", "keel": "keel", "peri": "peri_ln", "deit": "pre_ln"}
INITIALIZERS = {"mix": "normal", "fuse": "scaled", "keel": "normal", "peri": "normal", "deit": "normal"}
OF_PAPERS = [path for path in RECIPES if path.stem != "vit-mnist"]  # for two cores, of no paper


def computed(settings):
    """What the papers state of a step and of the schedule, of a recipe's settings."""
    sequences = settings.batch_size * settings.gradient_accumulation
    step_tokens = sequences * (settings.sequence_length or 0)
    return {
        "sequences": sequences,
        "step_tokens": step_tokens,
        "tokens": step_tokens * settings.steps,
        "least_rate": settings.min_learning_rate,
        "last_rate": settings.min_learning_rate * settings.learning_rate,
    }


def test_every_recipe_of_a_paper_has_its_table():
    assert {path.stem for path in OF_PAPERS} == set(PAPERS)
    assert set(BACKBONES) <= set(PAPERS)


@pytest.mark.parametrize("path", OF_PAPERS, ids=lambda path: path.stem)
def test_the_numbers_of_a_recipe_are_the_papers(path):
    settings = settings_of(path)
    has = computed(settings)
    for name, (value, where) in PAPERS[path.stem].items():
        found = has[name] if name in has else getattr(settings, name)
        rough = 0.05 if name == "step_tokens" else 1e-3  # 0.5M is 2^19
        allowed = value if isinstance(value, tuple) else (value,)
        assert any(found == pytest.approx(each, rel=rough) for each in allowed), f"{name}: {found} ({where}: {value})"
    paper = path.stem.partition("-")[0]
    assert settings.placement.startswith(PLACEMENTS[paper])
    assert settings.init == INITIALIZERS[paper]


@pytest.mark.parametrize("path", OF_PAPERS, ids=lambda path: path.stem)
def test_no_number_of_a_recipe_is_without_its_place_in_a_paper(path):
    import yaml

    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    numbers = {name for name, value in written.items() if isinstance(value, int | float) and value is not True}
    known = OURS | PAPERS[path.stem].keys() | ({"steps"} if "tokens" in PAPERS[path.stem] else set())
    assert numbers <= known


@pytest.mark.parametrize("name", BACKBONES)
def test_the_sizes_of_a_recipes_model_are_the_papers(name):
    sizes, where = BACKBONES[name]
    config = preset_config(settings_of(ROOT / "recipes" / f"{name}.yaml").backbone)
    assert tuple(getattr(config, size) for size in SIZES) == sizes, where


def test_mix_ln_of_7b_has_the_papers_share_of_post_ln():
    assert settings_of(ROOT / "recipes" / "mix-7b.yaml").placement == "mix_ln(alpha=1/16)"  # 0.0625, Sec 4.1
