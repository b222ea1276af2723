"""Abbreviated Slurm options are completed as sbatch does, before those that a run sets itself are refused."""

import pytest

from llmb.errors import ConfigError
from llmb.launch.run_folder import RunFolder
from llmb.launch.slurm.job_script import _parse_slurm_args
from llmb.launch.slurm.sbatch_options import RESERVED_OPTIONS, parse_additional_params


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("ar=0-3", "array: is set by each run"),
        ("wr=rm -r x", "wrap: is set by each run"),
        ("outp=x", "output: is set by each run"),
        ("tasks=3", "tasks-per-node: is set by each run"),
        ("ui=0", "uid: is set by each run"),
        ("resv=x", None),
        ("nodeli=n1", "nodelist: has an option of its own"),
        ("ex=x", "ex is ambiguous: exclude, exclusive, export"),
    ],
)
def test_abbreviation(argument, message):
    if message is None:  # no option begins so: a site's plugin may
        assert _parse_slurm_args([argument]) == {"resv": "x"}
        return
    with pytest.raises(ConfigError, match=message):
        _parse_slurm_args([argument])


@pytest.mark.parametrize("option", sorted(RESERVED_OPTIONS))
def test_no_abbreviation_of_a_reserved_option_passes(option):
    """Each is refused, as it is this option, or ambiguous, or the beginning of another that is refused."""
    for length in range(1, len(option) + 1):
        with pytest.raises(ConfigError):
            _parse_slurm_args([f"{option[:length]}=1"])


def test_abbreviation_in_additional_params():
    assert parse_additional_params("qo=high") == {"qos": "high"}
    with pytest.raises(ConfigError, match="array is set by each run"):
        parse_additional_params("arr=0-3")


@pytest.mark.parametrize(("private", "mode"), [(False, 0o755), (True, 0o700)])
def test_job_script_with_variables_of_the_user_is_private(tmp_path, private, mode):
    run = RunFolder(tmp_path)
    run.write_job_script("#!/bin/bash\n", private=private)
    assert run.job_script.stat().st_mode & 0o777 == mode
