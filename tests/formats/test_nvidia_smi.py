"""GPUs from output of nvidia-smi in the forms of drivers that name things differently."""

import pytest
from recorded_gpus import install_fake_smi, recorded_gpus

from llmb.formats.nvidia_smi import NO_PROGRAM, GpuProcess, parse_links, query_gpus


def test_healthy_gpu():
    first, second = recorded_gpus("h200")
    assert (first.index, first.name, first.driver, first.cuda) == (0, "NVIDIA H200", "570.133.20", "12.8")
    assert (first.power_limit_w, first.power_default_w, first.power_max_w) == (700.0, 700.0, 700.0)
    assert (first.sm_clock_max_mhz, first.memory_clock_max_mhz, first.sm_clock_applied_mhz) == (1980, 3201, 1980)
    assert (first.throttling, first.ecc, first.ecc_uncorrected, first.remap_failed) == ((), True, 0, False)
    assert (first.pcie_gen_max, first.pcie_width, first.pcie_width_max, first.pci_bus) == (5, 16, 16, "0000:1b:00.0")
    assert (first.persistence, first.mig, first.fabric, first.links, first.links_total) == (
        True, False, "Completed", 18, 18,
    )  # fmt: skip
    assert first.memory_bytes == 143771 << 20
    assert first.processes == ()
    assert second.uuid != first.uuid


def test_sick_gpus():
    hot, damaged = recorded_gpus("sick")
    assert hot.throttling == ("hw_slowdown", "hw_thermal_slowdown")
    assert (hot.power_limit_w, hot.power_default_w, hot.pcie_width, hot.temperature_c) == (400.0, 700.0, 8, 91.0)
    assert (damaged.ecc_uncorrected, damaged.remap_pending, damaged.links) == (3, True, 16)
    assert damaged.processes == (GpuProcess(pid=4242, name="/usr/bin/python3", memory_bytes=20480 << 20),)


def test_older_driver_with_other_element_names_and_without_values():
    (gpu,) = recorded_gpus("rtx3090")
    assert (gpu.power_limit_w, gpu.power_default_w, gpu.throttling) == (350.0, 350.0, ("sw_power_cap",))
    nothing = (gpu.ecc, gpu.ecc_uncorrected, gpu.mig, gpu.sm_clock_applied_mhz, gpu.pcie_gen_gpu, gpu.fabric, gpu.links)
    assert set(nothing) == {None}


def test_links_that_are_inactive_or_at_0_do_not_count():
    text = "GPU 0: NVIDIA H100 PCIe (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n\t Link 2: 0 GB/s\n"
    assert parse_links(text) == {"GPU-1": (1, 3)}


def test_query_runs_the_program(monkeypatch, tmp_path):
    install_fake_smi(monkeypatch, tmp_path / "bin", "sick")
    gpus, error = query_gpus()
    assert (gpus, error) == (recorded_gpus("sick"), None)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo "NVIDIA-SMI has failed because it couldn\'t communicate"; exit 9', "NVIDIA-SMI has failed because"),
        ("echo plain", "printed no XML"),
    ],
)
def test_failing_program_is_one_line(monkeypatch, tmp_path, script, message):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpus, error = query_gpus()
    assert gpus == []
    assert message in error
    assert "\n" not in error


def test_machine_without_the_program(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_gpus() == ([], NO_PROGRAM)
