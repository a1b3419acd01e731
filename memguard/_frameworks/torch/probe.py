"""The doctor's probe for PyTorch."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from memguard._frameworks.optional_modules import ProbeReport


def probe(report: ProbeReport) -> None:
    """Import PyTorch, list its devices and compute. A CPU build of PyTorch ends the probe after the import."""
    with report.stage("import"):
        import torch

        report.put(path=torch.__file__)
        built = torch.version.cuda
        report.put(version=torch.__version__, cuda=built, gpu=built is not None)
    if built is None:
        report.put(gpus=0)
        return
    with report.stage("devices"):
        report.put(gpus=torch.cuda.device_count(), architectures=torch.cuda.get_arch_list(), **_cudnn(torch))
        torch.cuda.init()  # raises an error with the reason if there is no GPU
        count = torch.cuda.device_count()
        each = [torch.cuda.get_device_properties(i).multi_processor_count for i in range(count)]
        report.put(gpus=count, multiprocessors=each)
    with report.stage("compute"):
        x = torch.ones(512, 512, device="cuda:0")
        float((x @ x).sum())
        image, kernel = torch.ones(1, 1, 8, 8, device="cuda:0"), torch.ones(1, 1, 3, 3, device="cuda:0")
        float(torch.nn.functional.conv2d(image, kernel).sum())


def _cudnn(torch: object) -> dict[str, str]:
    """The cuDNN versions that torch was built with and has loaded, without `torch.backends.cudnn.version()`, which may
    raise."""
    found = {}
    module = getattr(getattr(torch, "_C", None), "_cudnn", None)
    for name, call in (("cudnn", "getCompileVersion"), ("cudnn_loaded", "getRuntimeVersion")):
        if hasattr(module, call):
            found[name] = ".".join(str(part) for part in getattr(module, call)())
    return found
