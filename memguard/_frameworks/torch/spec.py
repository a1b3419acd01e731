"""PyTorch's `FrameworkSpec`: names, measured sizes and error patterns that the budget, plan and reports read."""

from memguard._base.framework_spec import ErrorPattern, Examined, Exchanged, FrameworkSpec, Option
from memguard._base.units import MIB

SPEC = FrameworkSpec(
    name="torch",
    title="PyTorch",
    place=10,
    module="torch",
    adapter="Torch",
    weight=8,
    colour="#e69f00",
    terminal_colour="bright_red",
    cures=(("tensorflow", "cudart:cure_installed"),),
    examined=Examined(brings_cuda=True, length=2),
    exchanged=Exchanged("TorchArrays", short=("pt",), compacts=True),
    pooled="PooledTorch",
    remainder=True,
    # PyTorch's CUDA modules take 92 MiB after the first tensor, 158 with cuBLAS, 240 after training a small network,
    # 344 with cuSOLVER. cuFFT adds 24 MiB, as in CuPy.
    modules=368 * MIB,
    workspace=384 * MIB,
    # cuBLAS has two entries, because a backward pass runs on its own thread, with its own cuBLAS handle and workspace.
    first_uses=(
        ("cublas", 66 * MIB),
        ("cublas", 64 * MIB),
        ("cudnn", 16 * MIB),
        ("cusolver", 98 * MIB),
        ("cufft", 24 * MIB),
    ),
    cap_is="its allocator's fraction, to the byte",
    allocator="torch",
    simulates=("native",),
    aliases=("pytorch",),
    options=(
        Option(
            name="nccl",
            kind="count",
            default=0,
            most=64,  # a larger number is a typing mistake, as 64 communicators take 31 GiB
            description="How many NCCL communicators torch.distributed keeps at once on each GPU: one for each "
            "process group that communicates. They lie outside torch's cap; reserve: auto keeps room for them.",
            elsewhere="it counts the communicators of torch.distributed",
            fix="move it below torch, or remove it",
            advice="write how many process groups communicate on one GPU: '1' for plain data parallel training, "
            "'0' for none",
            aliases=("communicators",),
            applied=False,
        ),
    ),
    families=("torch",),
    stems=("torch_",),
    errors=(
        ErrorPattern("disk", True, "torch shares tensors through /dev/shm", r"file </torch_\w+>: No space left"),
        ErrorPattern("disk", False, "an older torch does not say why", r"unable to \w+( to)? file </torch_"),
        ErrorPattern("disk", False, "a bus error because /dev/shm is full", "DataLoader worker.*out of shared memory"),
        ErrorPattern("host", True, "torch's allocator for the CPU", "DefaultCPUAllocator"),
        ErrorPattern("gpu", True, "torch's own type", type=r"^torch\.(cuda\.)?OutOfMemoryError$", refused=True),
        ErrorPattern(
            "gpu",
            True,
            "torch's text, whatever the type",
            r"(CUDA|HIP|XPU) out of memory\. Tried to allocate|MPS backend out of memory \("
            "|out of memory occurred when warming up",
            refused=True,
        ),
        ErrorPattern(
            "gpu",
            False,
            "its first words: a program that read torch's error, or quotes it",
            "(CUDA|HIP|XPU|MPS backend) out of memory",
        ),
        ErrorPattern(
            "gpu",
            False,
            "torch asks NVML for figures only after a request was refused",
            "NVML_SUCCESS == .*INTERNAL ASSERT FAILED.*CUDACachingAllocator",
        ),
        # Not certain, because a failed allocation of page-locked memory also raises CUDA's error 2.
        ErrorPattern("gpu", False, "error 2 of an early torch", r"cuda runtime error \(2\)"),
    ),
    figures=(
        ("in_use", r"Of the allocated memory ([\d.]+ \w+) is allocated by PyTorch"),
        ("pooled", r"with ([\d.]+ \w+) allocated in private pools"),
        ("cached", r"([\d.]+ \w+) is reserved by PyTorch but unallocated"),
        ("free", r"total capacity of [\d.]+ \w+ of which ([\d.]+ \w+) is free"),
        # Patterns for the error text of the backend cudaMallocAsync.
        ("in_use", r"Currently allocated\s*: ([\d.]+ \w+)"),
        ("free", r"Free \(according to CUDA\)\s*: ([\d.]+ \w+)"),
        # Patterns for the error text of torch up to version 2.0.
        ("in_use", r"([\d.]+ \w+) already allocated"),
        ("held", r"([\d.]+ \w+) reserved in total by PyTorch"),
        ("free", r"already allocated; ([\d.]+ \w+) free"),
    ),
    own_trim="torch.cuda.empty_cache()",
    unfragment="PYTORCH_ALLOC_CONF=expandable_segments:True, set before torch starts, avoids that",
)
