"""Every kernel, as it is planned for each architecture, compiled for it: no spills, shared memory within its limit."""

import pytest

pytest.importorskip("triton", reason="no triton here: pip install -e '.[triton]'")

from cross_compile import SHARED_BYTES, TARGETS, compile_for
from triton_configurations import EVERY, representative

from llmq.runtime.kernels import interpreted

pytestmark = pytest.mark.skipif(interpreted(), reason="the interpreter compiles nothing")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Compiled anew in every run, once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def _check(configuration, name):
    target = TARGETS[name]
    made = compile_for(configuration.launch, target)
    what = f"{configuration.name} on {name}: {made.registers} registers"
    assert made.spill_bytes == 0, f"{what}, {made.spill_bytes} bytes of local memory"
    assert made.shared_bytes <= SHARED_BYTES[target.arch], f"{what}, {made.shared_bytes} bytes of shared memory"
    if configuration.many_rows and name == "sm_90":
        assert made.instructions.get("HGMMA", 0) > 0, f"{what}: no warpgroup product: {made.instructions}"
    return made


@pytest.mark.parametrize("name", TARGETS)
def test_what_runs_most_compiles(name):
    for configuration in representative(TARGETS[name]):
        _check(configuration, name)


@pytest.mark.parametrize("name", TARGETS)
def test_what_runs_most_is_of_every_kernel(name):
    def kernels(configurations):
        return {configuration.launch.kernel.__name__ for configuration in configurations}

    target = TARGETS[name]
    assert kernels(representative(target)) == kernels(one for part in EVERY.values() for one in part(target))


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", EVERY)
@pytest.mark.parametrize("name", TARGETS)
def test_every_configuration_compiles(name, part):
    failed = []
    for configuration in EVERY[part](TARGETS[name]):
        try:
            _check(configuration, name)
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, "\n".join(failed)


def test_a_spill_and_a_large_tile_are_seen():
    """The gate can fail: a tile that no program's registers hold."""
    from dataclasses import replace

    launch = next(c.launch for c in representative(TARGETS["sm_80"]) if c.many_rows)
    huge = replace(launch, constants={**launch.constants, "ROWS": 256, "KEYS": 128}, num_warps=4)
    made = compile_for(huge, TARGETS["sm_80"])
    assert made.spill_bytes > 0
    assert made.shared_bytes > SHARED_BYTES[89]
