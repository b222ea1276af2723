"""Rates that machines sustain: of GPUs in the table, of a probe's record, of a damaged one, which is refused."""

from dataclasses import replace

import pytest
from test_probe_record import write

from llmb.config.serialization import to_json
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import GPUS
from llmb.perfmodel.offload.machine_rates import H200, NOMINAL_CPU, known_rates, nominal_rates, rates_of, rates_path


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_of_the_table_has_rates_below_its_peaks(gpu):
    rates = known_rates(gpu)
    assert rates.gpu == gpu
    assert rates.link_both_gbs <= min(rates.link_in_gbs, rates.link_out_gbs)
    peaks = GPUS[gpu].peak_flops
    if peaks:
        assert 0.5 * peaks["bf16"] < rates.matmul_tflops * 1e12 < peaks["bf16"]
        assert (rates.fp8_tflops is None) == ("fp8" not in peaks)
        assert rates.source


def test_similar_chip_has_the_same_compute_rates():
    h100 = known_rates("h100")
    unlike = {"gpu": "h100", "memory_gbs": h100.memory_gbs, "source": h100.source}
    assert h100 == replace(H200, **unlike)
    assert h100.memory_gbs < H200.memory_gbs


def test_measured_rates_take_precedence(tmp_path):
    assert rates_of("cpu", tmp_path) == NOMINAL_CPU
    write(rates_path(tmp_path, "cpu"), to_json(NOMINAL_CPU).replace("nominal", "measured"))
    assert rates_of("cpu", tmp_path).source == "measured"
    assert rates_of("h200", tmp_path) == H200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "field 'gpu' is missing"),
        ('{"speed": 1}', "unknown field in"),
        (to_json(H200).replace("685.0", '"fast"'), "expected a number, got 'fast'"),
        (to_json(H200).replace('"square_tokens": 8192, ', ""), "field 'square_tokens' is missing"),
    ],
)
def test_damaged_rates_file_is_named_in_one_line(tmp_path, text, message):
    path = write(rates_path(tmp_path, "h200"), text)
    with pytest.raises(ConfigError) as caught:
        rates_of("h200", tmp_path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "run `llmb-run probe` again" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gpu_that_is_not_in_the_table_has_rates_that_predict_nothing(tmp_path):
    nominal = rates_of("rtx-4080", tmp_path)
    assert nominal == nominal_rates("rtx-4080")
    assert (nominal.gpu, "llmb-run probe" in nominal.source) == ("rtx-4080", True)
    assert (nominal_rates("h100"), nominal_rates("cpu")) == (None, NOMINAL_CPU)
    write(rates_path(tmp_path, "rtx-4080"), to_json(replace(nominal, matmul_tflops=160.0, source="measured")))
    assert rates_of("rtx-4080", tmp_path).matmul_tflops == 160.0
