import pytest

from llmq.profiles.devices import all_devices, find_device
from llmq.profiles.errors import InputError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100", "H100 SXM"),
        ("H100-SXM", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("h100 pcie", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB SXM"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_any_spelling_finds_it(name, expected):
    assert find_device(name).name == expected


def test_a_typo_names_the_nearest():
    with pytest.raises(InputError, match=r"no GPU 'h1000' .*did you mean H100 SXM"):
        find_device("h1000")
    with pytest.raises(InputError, match=r"no GPU 'toaster' .*known: T4, L4"):
        find_device("toaster")


def test_a_card_s_memory_is_what_a_program_sees():
    assert round(find_device("h100").memory_bytes / 2**30, 1) == 79.2
    assert find_device("h100").bandwidth_bytes_per_s == 3.35e12


def test_every_row_has_its_numbers_and_their_source():
    for device in all_devices():
        assert device.source, device.name
        assert 2**33 < device.memory_bytes < 2**39, device.name
        assert 1e11 < device.bandwidth_bytes_per_s < 2e13, device.name
        assert device.bf16_tflops or device.fp16_tflops, device.name


def test_rates_are_dense():
    # FP8 and INT8 at twice the rate of bf16, not four times: that would be the figure with sparsity.
    for device in all_devices():
        if device.bf16_tflops and device.fp8_tflops:
            assert device.fp8_tflops < 2.1 * device.bf16_tflops, device.name


def test_rows_agree_with_the_collected_figures(shared):
    import json

    rows = json.loads((shared / "planner" / "hardware.json").read_text())["hardware"]
    collected = {row["id"].removesuffix(" (NVL72)"): row for row in rows}
    checked = 0
    for device in all_devices():
        row = collected.get(device.name)
        if row:
            assert device.memory_bytes == round(row["mem_gib_usable_cuda"] * 2**30)
            assert device.bandwidth_bytes_per_s == row["bw_gbs"] * 1e9
            checked += 1
    assert checked > 20


OWN = """
[[device]]
name = "H100 SXM"
aliases = ["h100"]
memory_gib = 70.5
bandwidth_gb_s = 3350
source = "nvidia-smi of our cluster, another program resident"

[[device]]
name = "Toaster"
memory_gib = 12
source = "measured"
"""


def test_a_file_of_one_s_own_comes_first(tmp_path):
    path = tmp_path / "devices.toml"
    path.write_text(OWN)
    assert find_device("h100", path).memory_bytes == round(70.5 * 2**30)
    assert find_device("toaster", path).bandwidth_bytes_per_s is None
    assert find_device("h200", path) == find_device("h200")
    assert len(all_devices(path)) == len(all_devices()) + 1
    assert find_device("h100").memory_bytes == round(79.2 * 2**30)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[device]", "--devices .*devices.toml: "),
        ("", "has no .*device"),
        ("[[device]]\nname = 'x'\nmemory_gib = 3", "without source"),
        ("[[device]]\nname = 'x'\nmemory_gib = -3\nsource = 's'", "memory_gib = -3 of x"),
        ("[[device]]\nname = 'x'\nmemory_gb = 3\nsource = 's'", "memory_gb is none of .*memory_gib"),
    ],
)
def test_a_file_that_says_nothing_usable_is_refused(tmp_path, content, message):
    path = tmp_path / "devices.toml"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        find_device("x", path)


def test_every_collected_gpu_has_a_row_with_its_dense_rates(shared):
    import json

    rows = json.loads((shared / "planner" / "hardware.json").read_text())["hardware"]
    named = {device.name: device for device in all_devices()}
    for row in rows:
        if row["kind"] == "gpu":
            name = row["id"].removesuffix(" (NVL72)").replace("Blackwell (Server)", "Server")
            device = named[name]
            dense = row["tflops_dense"]
            assert (device.bf16_tflops or device.fp16_tflops) == dense["bf16"], device.name
            assert (device.fp8_tflops, device.int8_tflops, device.fp4_tflops) == (
                *(dense[kind] for kind in ("fp8", "int8", "fp4")),
            ), device.name
