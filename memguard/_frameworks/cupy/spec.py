"""CuPy's `FrameworkSpec`: static properties that the budget, plan, reports and simulation read."""

from memguard._base.framework_spec import ErrorPattern, Exchanged, FrameworkSpec
from memguard._base.units import MIB

SPEC = FrameworkSpec(
    name="cupy",
    title="CuPy",
    place=30,
    module="cupy",
    adapter="CuPy",
    colour="#cc79a7",
    terminal_colour="bright_green",
    tells_peak=False,
    exchanged=Exchanged("CuPyArrays", short=("cp",), packages=("cupyx",), compacts=True),
    pooled="PooledCuPy",
    # In a process with other frameworks, CuPy's CUDA modules take 94 MiB, cuBLAS 60 MiB, cuFFT 24 and cuSOLVER 100 MiB.
    modules=262 * MIB,
    workspace=320 * MIB,
    first_uses=(("cublas", 60 * MIB), ("cufft", 24 * MIB), ("cusolver", 100 * MIB)),
    cap_is="the limit of its memory pool",
    allocator="cupy",
    simulates=("MemoryPool",),
    aliases=("cupy-cuda12x", "cupy-cuda13x"),
    families=("cupy", "cupy_backends"),
    errors=(
        ErrorPattern("pinned", True, "CuPy falls back to a copy without it", "pinned memory .*could not be allocated"),
        ErrorPattern("gpu", True, "CuPy's own type", type=r"^cupy\..*OutOfMemoryError$", refused=True),
    ),
    size_attribute="_size",
    figures=(("held", r"allocated so far: ([\d,]+ bytes)"),),
    install="cupy-cuda13x",
    own_trim="cupy.get_default_memory_pool().free_all_blocks()",
    requests_room=True,
)
