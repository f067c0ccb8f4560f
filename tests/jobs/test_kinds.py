"""Which kind of job a folder is of, where environment.json does not say it."""

import pytest

from lamina.jobs.files import write_yaml
from lamina.jobs.kinds import Kind, kind_of
from lamina.posttraining.settings import DpoSettings, RewardSettings, RlhfSettings, SftSettings
from lamina.training.settings import PretrainSettings

RECORDS = {
    Kind.RUN: PretrainSettings,
    Kind.SFT: SftSettings,
    Kind.REWARD: RewardSettings,
    Kind.RLHF: RlhfSettings,
    Kind.DPO: DpoSettings,
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_run_is_known_by_the_settings_in_its_folder(tmp_path, kind):
    write_yaml(tmp_path / "config.yaml", RECORDS[kind]().to_dict())
    assert kind_of(tmp_path) is kind
