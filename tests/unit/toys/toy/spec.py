"""The toy's row."""

from memguard._base.framework_spec import ErrorPattern, Exchanged, FrameworkSpec, Option
from memguard._base.units import MIB

SPEC = FrameworkSpec(
    name="toy",
    title="Toy",
    module="toy",
    adapter="Toy",
    modules=2 * MIB,
    workspace=16 * MIB,
    cap_is="the limit of its toy pool",
    aliases=("plaything",),
    options=(
        Option(
            name="tidy",
            kind="flag",
            default=False,
            description="true: the toy frees its cache at once.",
            elsewhere="{name} frees its cache by itself",
        ),
    ),
    families=("toy",),
    errors=(ErrorPattern("gpu", True, "the toy's own type", "toy memory is exhausted", r"^toy\.Exhausted$"),),
    exchanged=Exchanged("ToyArrays", short=("ty",)),
    own_trim="toy.free_cache()",
)
