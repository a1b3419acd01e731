"""The row of the sessions."""

from memguard._base.framework_spec import ErrorPattern, FrameworkSpec
from memguard._base.units import MIB

SPEC = FrameworkSpec(
    name="arenas",
    title="Arenas",
    module="arenas",
    adapter="Arenas",
    modules=2 * MIB,
    workspace=16 * MIB,
    cap_is="limits of its sessions that add up to it",
    families=("arenas",),
    stems=("session is full",),
    errors=(ErrorPattern("gpu", True, "a session's own type", "session is full", r"^arenas\.Full$"),),
)
