"""What every test stands on: fresh memory is NaN, the seed is 0, no network, and the user's cache is never touched."""

import gc
import os
import signal
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # numbers are those of a CPU; make test-gpu shows a GPU

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")  # the same cases on every machine, however slow
torch.set_num_threads(1)  # the models are so small that threads cost more than they bring
with torch.device("meta"):  # torch lists the functions that obey a device once: before they are replaced below
    torch.empty(0)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; the processes of tests inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory):
    before = os.environ.get("LAMINA_CACHE")
    os.environ["LAMINA_CACHE"] = str(tmp_path_factory.mktemp("lamina-cache"))
    yield
    if before is None:
        del os.environ["LAMINA_CACHE"]
    else:
        os.environ["LAMINA_CACHE"] = before


@pytest.fixture(scope="module", autouse=True)
def old_objects_are_not_collected_again():
    """Trainer collects garbage after each run, a second or two with all that earlier modules have loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed_zero():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def norms_of_ones_own_are_forgotten():
    """Several tests, and files of theirs, register a kind of the same name."""
    yield
    plan, wiring = map(sys.modules.get, ("lamina.placements.plan", "lamina.modeling.wiring_lamina"))
    for kind in list(plan.OWN_KINDS) if plan and wiring else ():
        plan.OWN_KINDS.discard(kind)
        wiring.NORMS.pop(kind, None)


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan(monkeypatch):
    """A parameter or buffer that nobody fills is NaN, not whatever lay there (often a plausible 0)."""

    def poisoned(make):
        def make_and_poison(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point() and not tensor.is_meta:
                with torch.no_grad():
                    tensor.fill_(float("nan"))
            return tensor

        return make_and_poison

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture
def refused(capsys, tmp_path):
    """Run a command in this process that is refused and touches no file; give the one line that it says."""
    from lamina.cli import main

    def files():
        return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file()}

    def run(*argv):
        capsys.readouterr()
        before = {path: file for path, file in files().items() if path.name != ".lock"}
        code = main([str(word) for word in argv])
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if line.strip() and "%|" not in line]
        assert code == 2, out + err
        assert len(lines) == 1, err
        assert lines[0].startswith("lamina: ")
        assert {path: file for path, file in files().items() if path.name != ".lock"} == before
        return lines[0]

    return run


@pytest.fixture
def tiny_llama():
    """Four heads that share two key-value heads, so that grouped attention is run as well."""
    from modeling.tiny import llama

    return llama()
