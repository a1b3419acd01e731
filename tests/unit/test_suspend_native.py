"""Which parts of a library lie in memory, by the kernel's list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memguard._devices.c_functions import Region, regions

MAPS = """\
7f03ab3f8000-7f03b16b3000 r--p 00000000 fe:00 19051    /site/jax_plugins/xla_cuda13/xla_cuda_plugin.so
7f03b16b3000-7f03bd73c000 r-xp 062ba000 fe:00 19051    /site/jax_plugins/xla_cuda13/xla_cuda_plugin.so
7f03bd73c000-7f03bda30000 r--p 12342000 fe:00 19051    /site/jax_plugins/xla_cuda13/xla_cuda_plugin.so (deleted)
7f03bda30000-7f03bdaa6000 rw-p 12635000 fe:00 19051    /site/jax_plugins/xla_cuda13/xla_cuda_plugin.so
7f03bdaa6000-7f03bdb47000 rw-p 00000000 00:00 0
7f03bdb4c000-7f03bed6d000 ---p 00000000 00:00 0
7f03bed6d000-7f03bf000000 rw-p 00000000 00:00 0
7f03bf000000-7f03bf001000 rw-p 00000000 fe:00 19052    /site/not_xla_cuda_plugin.so
7f03bf001000-7f03bf002000 rw-p 00000000 00:00 0
"""
PATH = "/site/jax_plugins/xla_cuda13/xla_cuda_plugin.so"


def test_the_parts_of_one_library() -> None:
    assert regions(MAPS, "xla_cuda_plugin.so") == [
        Region(0x7F03AB3F8000, 0x7F03B16B3000, False, 0, PATH),
        Region(0x7F03BD73C000, 0x7F03BDA30000, False, 0x12342000, PATH + " (deleted)"),
        Region(0x7F03BDA30000, 0x7F03BDAA6000, True, 0x12635000, PATH),
    ]
    assert regions(MAPS, "libcuda.so") == [] and regions("", "xla") == []


@given(st.text(), st.text(min_size=1))
def test_whatever_the_list_holds(maps: str, name: str) -> None:
    assert all(one.start <= one.end for one in regions(maps, name))
