"""JAX's `FrameworkSpec`: names, measured sizes and error patterns that the budget, plan and reports read."""

from memguard._base.framework_spec import Allocators, ErrorPattern, Examined, Exchanged, FrameworkSpec
from memguard._base.units import MIB

SPEC = FrameworkSpec(
    name="jax",
    title="JAX",
    place=40,
    module="jax",
    adapter="JAX",
    weight=8,
    colour="#009e73",
    terminal_colour="bright_magenta",
    regions=True,
    examined=Examined(brings_cuda=True, length=3),
    exchanged=Exchanged("JAXArrays", short=("jnp",), packages=("jaxlib",)),
    pooled="PooledJAX",
    default_pool=True,
    # JAX's CUDA modules take 34 MiB after the first operation, and 204 MiB with cuSOLVER and cuFFT.
    modules=206 * MIB,
    workspace=320 * MIB,
    first_uses=(("cublas", 66 * MIB), ("cufft", 24 * MIB), ("cusolver", 80 * MIB)),
    cap_is="memory_fraction, set before its backend starts",
    allocator="xla",
    simulates=("bfc", "default"),
    aliases=("flax",),
    families=("jax", "jaxlib"),
    stems=("space hbm",),
    errors=(
        ErrorPattern(
            "host", True, "only XLA's CPU client says that", r"RESOURCE_EXHAUSTED: Out of memory allocating \d"
        ),
        ErrorPattern(
            "gpu",
            True,
            "only XLA's clients of devices say that",
            "Out of memory while trying to allocate|space hbm",
            shared=True,
            refused=True,
        ),
        ErrorPattern(
            "gpu",
            False,
            "older words, the CPU's too",
            "RESOURCE.EXHAUSTED: Failed to allocate",
            shared=True,
            refused=True,
        ),
    ),
    never_gives_back=True,
    refuses_silently=True,
    # From XLA's source: `vmm` (DeviceAddressVmmAllocator) refuses requests above the fraction of the GPU's total, but
    # GetAllocatorStats in se_gpu_pjrt_client.cc does not support `vmm`, so JAX's memory_stats() returns None.
    allocators=Allocators(
        "XLA_PYTHON_CLIENT_ALLOCATOR",
        {
            "platform": "passes every request on to the driver and has no limit",
            "cuda_async": "has no limit",
            "vmm": "keeps to JAX's fraction, but tells neither its limit nor what it holds: memguard could not "
            "check the cap, nor say what JAX takes",
        },
        unlimited=frozenset({"platform", "cuda_async"}),
        capped=frozenset({"default", "bfc"}),
        unknown="is no allocator of which memguard knows that it keeps to a limit",
    ),
    install="jax[cuda13]",
)
