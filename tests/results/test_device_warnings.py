"""Facts of devices that a run records: what its result says of them."""

from dataclasses import asdict, replace

from llmb.events import RunStarted, append, read
from llmb.formats.device_facts import DeviceFacts, device_facts, recorded_facts
from llmb.results.device_warnings import device_cautions

HEALTHY = DeviceFacts(
    driver="570.133.20", power_limit_w=700.0, power_default_w=700.0, sm_clock_max_mhz=1980, ecc=True, pcie_width=16,
    pcie_width_max=16, throttling=("sw_power_cap",), temperature_c=60.0, governor="performance",
)  # fmt: skip


def started(*facts: DeviceFacts | None) -> list[RunStarted]:
    return [
        RunStarted(time=0.0, rank=rank, host=f"n{rank // 2}", device=None if each is None else asdict(each))
        for rank, each in enumerate(facts)
    ]


def test_healthy_devices_and_older_events_say_nothing():
    assert list(device_cautions(started(HEALTHY, HEALTHY))) == []
    assert list(device_cautions(started(None, None))) == []
    assert list(device_cautions([])) == []


def test_lower_power_limit_is_said_once_for_all_ranks():
    lowered = replace(HEALTHY, power_limit_w=400.0)
    ((code, text),) = device_cautions(started(lowered, lowered))
    assert code == "POWER_LIMIT"
    assert text.startswith("power limit 400 W, the part's default is 700 W; ")


def test_odd_rank_is_named():
    texts = dict(device_cautions(started(HEALTHY, HEALTHY, replace(HEALTHY, power_limit_w=400.0))))
    assert texts["POWER_LIMIT"].startswith("power limit 400 W, the part's default is 700 W on rank 2 (n1); ")
    assert texts["UNEQUAL_GPUS"].startswith("ranks differ: power_limit_w 400.0 on rank 2 (n1), 700.0 elsewhere; ")


def test_throttling_and_narrow_link():
    sick = replace(HEALTHY, throttling=("hw_slowdown", "hw_thermal_slowdown"), temperature_c=91.0, pcie_width=8)
    texts = dict(device_cautions(started(sick)))
    assert texts["THROTTLED"].startswith("slowed down when it started, by hw_slowdown, hw_thermal_slowdown at 91 C; ")
    assert texts["PCIE_NARROW"].startswith("PCIe x8 of x16; ")


def test_facts_survive_the_events_file_and_unknown_fields_are_ignored(tmp_path):
    (event,) = started(HEALTHY)
    append(tmp_path / "events", event)
    (stored,) = read(tmp_path / "events")
    assert recorded_facts(stored.device) == HEALTHY
    assert recorded_facts({"power_limit_w": 400.0, "of_a_later_version": 1}) == DeviceFacts(power_limit_w=400.0)
    assert recorded_facts("damaged") == recorded_facts({"power_limit_w": "much"}) == recorded_facts(7) == DeviceFacts()


def test_facts_of_one_gpu_by_nvidia_smi(monkeypatch):
    from recorded_gpus import recorded_gpus

    gpu = recorded_gpus("sick")[0]
    monkeypatch.setattr("llmb.formats.device_facts.query_gpus", lambda uuid, links: ([gpu], None))
    facts = device_facts(gpu.uuid)
    assert (facts.driver, facts.power_limit_w, facts.power_default_w, facts.pcie_width) == ("570.133.20", 400, 700, 8)
    assert facts.throttling == ("hw_slowdown", "hw_thermal_slowdown")
    assert device_facts(None).driver is None
