"""TensorFlow's `FrameworkSpec`: names, measured sizes and error patterns that the budget, plan and reports read."""

from memguard._base.framework_spec import Allocators, ErrorPattern, Examined, Exchanged, FrameworkSpec, Option
from memguard._base.units import MIB

SPEC = FrameworkSpec(
    name="tensorflow",
    title="TensorFlow",
    place=20,
    module="tensorflow",
    adapter="TensorFlow",
    weight=8,
    colour="#0072b2",
    terminal_colour="bright_yellow",
    examined=Examined("tensorflow|tf-nightly", brings_cuda=True, length=4),
    exchanged=Exchanged("TensorFlowArrays", packages=("keras",)),
    pooled="PooledTensorFlow",
    default_pool=True,
    modules=92 * MIB,
    workspace=256 * MIB,
    first_uses=(("cublas", 66 * MIB), ("cudnn", 16 * MIB)),
    cap_is="memory_limit, set before its first operation",
    allocator="bfc",
    aliases=("tf", "keras"),
    options=(
        Option(
            name="growth",
            kind="flag",
            default=True,
            description="true: TensorFlow's pool grows up to its cap as it needs memory. false: it takes its whole "
            "cap at its first operation.",
            elsewhere="{name} always grows as it needs memory",
        ),
    ),
    families=("tensorflow",),
    stems=("dst tensor",),
    errors=(
        ErrorPattern(
            "pinned", True, "the pool of page-locked memory, by its name", r"allocator \w*host_bfc", shared=True
        ),
        ErrorPattern("host", True, "its allocators for the CPU", r"allocating tensor.*allocator (mkl)?cpu\b"),
        # If the text names several nodes, the first node failed, and the other nodes need its result.
        ErrorPattern(
            "host",
            True,
            "the node ran on the CPU",
            r"allocating tensor(?:(?!\]\]).)*_device=\S*\bcpu:\d",
        ),
        ErrorPattern(
            "gpu", True, "a tensor on a GPU", r"OOM when allocating tensor.*(allocator GPU_|\bgpu:\d)", refused=True
        ),
        ErrorPattern("gpu", False, "a tensor, and no word of the device", "OOM when allocating tensor", refused=True),
        # Errors of eager operations begin with the node's name; Keras prepends the layer's name.
        ErrorPattern(
            "gpu",
            True,
            "a kernel on a GPU",
            r"\bgpu:\d+\}\}\s+failed to allocate memory",
            r"ResourceExhaustedError$",
            refused=True,
        ),
        ErrorPattern(
            "gpu",
            False,
            "no word of the device",
            r"(^|\n|\}\}\s+)failed to allocate memory",
            r"ResourceExhaustedError$",
            refused=True,
        ),
        ErrorPattern(
            "gpu", True, "no room for a copy to a GPU", r"\bgpu:\d.*Dst tensor|Dst tensor.*\bgpu:\d", refused=True
        ),
        ErrorPattern("gpu", False, "no room for a copy to a device", "Dst tensor is not initialized", refused=True),
        ErrorPattern("gpu", True, "a context, a module or XLA's buffers", "out.of.memory", r"^tensorflow\."),
    ),
    never_gives_back=True,
    refuses_silently=True,
    allocators=Allocators(
        "TF_GPU_ALLOCATOR",
        {
            "cuda_malloc_async": "ignores memory_limit",
            "cuda_malloc": "passes every request on to the driver and has no limit",
        },
        unlimited=frozenset({"cuda_malloc_async", "cuda_malloc"}),
    ),
)
