"""Everything that can be wrong in a budget, named with its line, column and fix."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from budget_texts import GOOD, UUID, WATCHED, fw, problems

from memguard._budget import from_mapping, load, parse
from memguard.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "line", "column", "path", "cause", "fix"),
    [
        # version
        ("frameworks: {torch: {share: 1%}}", 1, 1, "version", "is missing", "add 'version: 1'"),
        ("version: 2\nframeworks: {torch: {share: 1%}}", 1, 10, "version",
         "found 2: the file was written for a newer memguard", "update memguard"),
        ("version: '1'\nframeworks: {torch: {share: 1%}}", 1, 10, "version", "version 1, found '1'",
         "without quotes"),
        ("version: 1.0\nframeworks: {torch: {share: 1%}}", 1, 10, "version", "found '1.0'", "write 'version: 1'"),
        ("version: true\nframeworks: {torch: {share: 1%}}", 1, 10, "version", "version 1, found True", "version: 1"),
        ("version:\nframeworks: {torch: {share: 1%}}", 1, 9, "version", "found nothing", "version: 1"),
        # keys
        (GOOD + "devcie: {}", 4, 1, "devcie", "unknown key 'devcie'; allowed: version, device, devices, frameworks, "
         "strategy, on_busy, ranks, monitor, on_pressure", "'device'"),
        (GOOD + "zzz: 1", 4, 1, "zzz", "unknown key 'zzz'", "remove it"),
        (GOOD + "'a\\nb': 1", 4, 1, "['a\\\\nb']", "unknown key", "remove it"),
        (GOOD + "limit: 90%", 4, 1, "limit", "unknown key 'limit' here", "move it below 'device:'"),
        (GOOD + "pycuda: {limit: 1GiB}", 4, 1, "pycuda", "unknown key 'pycuda' here", "move it below 'frameworks:'"),
        (GOOD + "growth: true", 4, 1, "growth", "unknown key 'growth' here", "move it below 'tensorflow:'"),
        (GOOD + "nccl: 1", 4, 1, "nccl", "unknown key 'nccl' here", "move it below 'torch:'"),
        (GOOD + "device: {nccl: 1}", 4, 10, "device.nccl", "unknown key 'nccl' here; allowed: limit", "'torch:'"),
        (GOOD + "on_bussy: raise", 4, 1, "on_bussy", "unknown key 'on_bussy'", "did you mean 'on_busy'?"),
        (GOOD + "device: {on_busy: raise}", 4, 10, "device.on_busy", "here", "align it with 'version:'"),
        (fw("torch: {share: 5%, on_busy: raise}"), 3, 22, "torch.on_busy", "here", "align it with 'version:'"),
        (GOOD + "device: {limits: 90%}", 4, 10, "device.limits", "allowed: limit, reserve", "did you mean 'limit'?"),
        (GOOD + "device: {share: 9%}", 4, 10, "device.share", "unknown key 'share' here", "below a framework"),
        (GOOD + "device: {frameworks: {}}", 4, 10, "device.frameworks", "here", "align it with 'version:'"),
        (fw("torch: {shrae: 50%}"), 3, 11, "torch.shrae", "allowed: share, limit, min, max, nccl", "'share'"),
        (fw("torch: {min: 5%}"), 3, 3, "torch", "has min without max", "'torch: {min: 5%, max: 100%}'"),
        (fw("torch: {min: 5, nccl: 1}"), 3, 3, "torch", "min without max", "'torch: {min: 5%, max: 100%, nccl: 1}'"),
        (fw("numba: {max: 5%}"), 3, 11, "numba.max", "has max without min", "write 'share: 5%' for a cap that stays"),
        (fw("numba: {max: 5GB}"), 3, 11, "numba.max", "max without min", "write 'limit: 5GiB' for a cap that stays"),
        (fw("cupy: {min: 5%, mx: 9%}"), 3, 19, "cupy.mx", "unknown key 'mx'; allowed: share, limit, min, max",
         "did you mean 'max'?"),
        (fw("cupy: {mix: 5%, max: 9%}"), 3, 10, "cupy.mix", "unknown key 'mix'", "did you mean 'min'?"),
        (fw("cupy: {at_least: 5%, max: 9%}"), 3, 10, "cupy.at_least", "unknown key", "did you mean 'min'?"),
        (fw("cupy: {min: 5%, share: 9%}"), 3, 19, "cupy.share", "has min beside share", "did you mean 'max'?"),
        (fw("cupy: {max: 4GiB, limit: 1GiB}"), 3, 21, "cupy.limit", "has max beside limit", "did you mean 'min'?"),
        (fw("cupy: {max: 4GiB, limit: 6GiB}"), 3, 10, "cupy.max", "has max beside limit", "remove it"),
        (fw("cupy: {min: 1%, max: 4%, share: 2%}"), 3, 28, "cupy.share", "has share beside min and max",
         "remove it, or remove min and max"),
        (fw("cupy: {min: 20%, max: 10%}"), 3, 25, "cupy.max", "the max of 10% is less than the min of 20%",
         "write '20%' or more"),
        (fw("cupy: {min: 2GiB, max: 1GiB}"), 3, 26, "cupy.max", "the max of 1GiB is less than the min of 2GiB",
         "write '2GiB' or more"),
        (fw("cupy: {min: 0, max: 9%}"), 3, 15, "cupy.min", "a min of 0 guarantees nothing", "write '2MiB'"),
        (fw("cupy: {min: 0%, max: 9%}"), 3, 15, "cupy.min", "a min of '0%' guarantees nothing", "write '2MiB'"),
        (fw("cupy: {min: 5, max: 9%}"), 3, 15, "cupy.min", "5 has no unit", "write '5%', or a size"),
        (fw("cupy: {min: 5%, max: all}"), 3, 24, "cupy.max", "'all' is no max", "write '100%'"),
        (fw("cupy: {min: 5%, max: 101%}"), 3, 24, "cupy.max", "above 0% and at most 100%", "write for example '15%'"),
        (fw("cupy: {min: 5%, max: 4GB}"), 3, 24, "cupy.max", "the unit 'GB' is ambiguous", "write '4GiB'"),
        (fw("cupy: {min: , max: 9%}"), 3, 14, "cupy.min", "has no value", "write '5%' or '1GiB'"),
        (fw("torch: {share: 5%, ncll: 1}"), 3, 22, "torch.ncll", "allowed: share, limit, min, max, nccl", "'nccl'"),
        (fw("torch: {share: 5%, NCCL: 1}"), 3, 22, "torch.NCCL", "unknown key 'NCCL'", "did you mean 'nccl'?"),
        (fw("torch: {share: 5%, communicators: 1}"), 3, 22, "torch.communicators", "unknown key", "'nccl'"),
        (fw("torch: {share: 5%, 1: 1}"), 3, 22, "torch['1']", "unknown key '1'", "decimals with a point"),
        (fw("tensorflow: {share: 5%, growht: true}"), 3, 27, "tensorflow.growht",
         "allowed: share, limit, min, max, growth", "'growth'"),
        (fw("torch: {share:50%}"), 3, 11, "torch['share:50%']", "unknown key 'share:50%'", "a space after ':'"),
        (fw("torch: {limit: 40GiB, 5: }"), 3, 25, "torch['5']", "unknown key '5'", "decimals with a point"),
        # frameworks
        ("version: 1", 1, 1, "frameworks", "is missing", "torch: {share: 50%}"),
        ("version: 1\nframeworks: {}", 2, 13, "frameworks", "names no framework", "torch: {share: 50%}"),
        ("version: 1\nframeworks:", 2, 12, "frameworks", "one line for each framework, found nothing", "torch:"),
        ("version: 1\nframeworks: [torch]", 2, 13, "frameworks", "one line for each framework, found a list", "torch:"),
        (fw("pytorch: {share: 5%}"), 3, 3, "pytorch", "unknown framework 'pytorch'; allowed: torch,", "'torch'"),
        (fw("tf: {share: 5%}"), 3, 3, "tf", "unknown framework 'tf'", "did you mean 'tensorflow'?"),
        (fw("TORCH: {share: 5%}"), 3, 3, "TORCH", "unknown framework", "did you mean 'torch'?"),
        (fw("numba-cuda: {share: 5%}"), 3, 3, "frameworks['numba-cuda']", "unknown framework", "did you mean 'numba'?"),
        (fw("numba_cuda: {share: 5%}"), 3, 3, "numba_cuda", "unknown framework", "did you mean 'numba'?"),
        (fw("jaxlib: {share: 5%}"), 3, 3, "jaxlib", "unknown framework 'jaxlib'", "did you mean 'jax'?"),
        (fw("flax: {share: 5%}"), 3, 3, "flax", "unknown framework 'flax'", "did you mean 'jax'?"),
        (fw("cupy-cuda13x: {share: 5%}"), 3, 3, "frameworks['cupy-cuda13x']", "unknown framework", "'cupy'?"),
        (fw("cudf: {share: 5%}"), 3, 3, "cudf",
         "unknown framework 'cudf'; allowed: torch, tensorflow, cupy, jax, pycuda, numba", "remove it"),
        (fw("numpy: {share: 5%}"), 3, 3, "numpy", "unknown framework 'numpy'", "remove it"),
        (fw("mxnet: {share: 5%}"), 3, 3, "mxnet", "unknown framework 'mxnet'", "remove it"),
        (fw("torch: 50%"), 3, 10, "torch", "share, limit, or min and max, found '50%'", "'torch: {share: 50%}'"),
        (fw("torch: 4GiB"), 3, 10, "torch", "share, limit, or min and max, found '4GiB'", "'torch: {limit: 4GiB}'"),
        (fw("torch:"), 3, 9, "torch", "share, limit, or min and max, found nothing", "'torch: {share: 50%}'"),
        (fw("torch: {}"), 3, 3, "torch", "neither share nor limit", "'torch: {share: 50%}' or"),
        (fw("tensorflow: {growth: true}"), 3, 3, "tensorflow", "neither share nor limit",
         "write 'tensorflow: {share: 50%, growth: true}' or 'tensorflow: {limit: 4GiB, growth: true}'"),
        (fw("torch: {limit: 1GiB, share: 5%}"), 3, 24, "torch.share", "has both share and limit", "one of them"),
        (fw("torch: {share: 5%, growth: true}"), 3, 22, "torch.growth", "a setting of tensorflow", "remove it"),
        (fw("torch: {share: 5%, growth: yes}"), 3, 22, "torch.growth", "a setting of tensorflow", "remove it"),
        (fw("jax: {share: 5%, growth: true}"), 3, 20, "jax.growth", "tensorflow; jax always grows", "remove it"),
        (fw("torch: {nccl: 1}"), 3, 3, "torch", "neither share nor limit", "'torch: {share: 50%, nccl: 1}' or"),
        (fw("tensorflow: {share: 5%, nccl: 1}"), 3, 27, "tensorflow.nccl", "nccl is a setting of torch; it counts the "
         "communicators of torch.distributed", "move it below torch, or remove it"),
        (fw("jax: {share: 5%, nccl: many}"), 3, 20, "jax.nccl", "nccl is a setting of torch", "move it below torch"),
        (fw("torch: {share: 5%, nccl: }"), 3, 27, "torch.nccl", "has no value", "write '0', or remove the key"),
        (fw("torch: {share: 5%, nccl: true}"), 3, 28, "torch.nccl", "from 0 to 64, found True", "'0' for none"),
        (fw("torch: {share: 5%, nccl: -1}"), 3, 28, "torch.nccl", "from 0 to 64, found -1", "write how many process"),
        (fw("torch: {share: 5%, nccl: 65}"), 3, 28, "torch.nccl", "from 0 to 64, found 65", "write how many process"),
        (fw("torch: {share: 5%, nccl: '1'}"), 3, 28, "torch.nccl", "found '1'", "write '1' without quotes"),
        (fw("torch: {share: 5%, nccl: 1.0}"), 3, 28, "torch.nccl", "whole number from 0 to 64, found '1.0'", "'1'"),
        (fw("torch: {share: 5%, nccl: auto}"), 3, 28, "torch.nccl", "found 'auto'", "how many process groups"),
        (fw("torch: {share: 5%, nccl: 838MiB}"), 3, 28, "torch.nccl", "found '838MiB'", "how many process groups"),
        (fw("torch: {share: 5%, nccl: [1]}"), 3, 28, "torch.nccl", "found a list", "how many process groups"),
        (GOOD + "context: own", 4, 1, "context", "unknown key 'context' here", "move it below 'pycuda:'"),
        (fw("torch: {share: 5%, context: own}"), 3, 22, "torch.context",
         "context is a setting of pycuda; torch works in the primary context as it is", "remove it"),
        (fw("pycuda: {context: own}"), 3, 3, "pycuda", "neither share nor limit",
         "'pycuda: {share: 50%, context: own}' or"),
        (fw("pycuda: {share: 5%, contxt: own}"), 3, 23, "pycuda.contxt",
         "allowed: share, limit, min, max, context", "'context'"),
        (fw("pycuda: {share: 5%, ctx: own}"), 3, 23, "pycuda.ctx", "unknown key 'ctx'", "did you mean 'context'?"),
        (fw("pycuda: {share: 5%, max: 1}"), 3, 23, "pycuda.max", "has max beside share", "remove it"),
        (fw("pycuda: {share: 5%, context: }"), 3, 31, "pycuda.context", "has no value", "'primary' or 'own', or"),
        (fw("pycuda: {share: 5%, context: OWN}"), 3, 32, "pycuda.context", "or own, found 'OWN'", "write 'own'"),
        (fw("pycuda: {share: 5%, context: shared}"), 3, 32, "pycuda.context", "found 'shared'", "write 'primary'"),
        (fw("pycuda: {share: 5%, context: true}"), 3, 32, "pycuda.context", "found True", "the one that all share"),
        (fw("pycuda: {share: 5%, context: [own]}"), 3, 32, "pycuda.context", "found a list", "'own' for a second one"),
        # ranks
        (GOOD + "ranks:", 4, 7, "ranks", "has no value", "write 'auto', or remove the key"),
        (GOOD + "ranks: 2", 4, 8, "ranks", "ranks is no number, found 2", "write '{per_gpu: 2}'"),
        (GOOD + "ranks: true", 4, 8, "ranks", "found True", "write 'auto'"),
        (GOOD + "ranks: none", 4, 8, "ranks", "found 'none'", "remove the key: each process has the budget whole"),
        (GOOD + "ranks: {}", 4, 8, "ranks", "ranks is 'auto' or '{per_gpu: 2}', found a mapping", "write 'auto'"),
        (GOOD + "ranks: {per_gpu: 0}", 4, 8, "ranks", "from 1 to 1024, found 0", "write '{per_gpu: 2}'"),
        (GOOD + "ranks: {per_gpu: '2'}", 4, 8, "ranks", "found '2'", "write '2' without quotes"),
        (GOOD + "ranks: {per_gpu: 2, gpus: 1}", 4, 8, "ranks", "found a mapping with 'gpus'", "write '{per_gpu: 2}'"),
        (GOOD + "ranks: {pergpu: 2}", 4, 8, "ranks", "found a mapping with 'pergpu'", "write '{per_gpu: 2}'"),
        (GOOD + "devices: {0: {lease: true}}", 4, 15, "devices['0'].lease", "holds for all GPUs",
         "move it to 'device:'"),
        (GOOD + "device: {lease: true}\ndevices: {0: {lease: true}}", 5, 15, "devices['0'].lease",
         "allowed here: limit, reserve", "remove it: 'device:' has it"),
        (GOOD + "devices: {0: {leases: true}}", 4, 15, "devices['0'].leases", "unknown key 'leases'; allowed: limit, "
         "reserve", "remove it"),
        (GOOD + "torchrun: auto", 4, 1, "torchrun", "unknown key 'torchrun'", "did you mean 'ranks'?"),
        # on_busy
        (GOOD + "on_busy:", 4, 9, "on_busy", "has no value", "write 'warn' or 'raise', or remove the key"),
        (GOOD + "on_busy: error", 4, 10, "on_busy", "on_busy is warn or raise, found 'error'", "write 'raise'"),
        (GOOD + "on_busy: Warning", 4, 10, "on_busy", "found 'Warning'", "write 'warn'"),
        (GOOD + "on_busy: RAISE", 4, 10, "on_busy", "on_busy is warn or raise, found 'RAISE'", "write 'raise'"),
        (GOOD + f"on_busy: {'raise ' * 9}", 4, 10, "on_busy", "found 'raise raise", "write 'warn' or 'raise'"),
        (GOOD + "on_busy: ''", 4, 10, "on_busy", "found ''", "write 'warn' or 'raise'"),
        (GOOD + "on_busy: ignore", 4, 10, "on_busy", "found 'ignore'", "'warn' or 'raise'"),
        (GOOD + "on_busy: true", 4, 10, "on_busy", "found True", "'warn' or 'raise'"),
        (GOOD + "on_busy: [raise]", 4, 10, "on_busy", "found a list", "'warn' or 'raise'"),
        (GOOD + "on_busy: {limit: 1GiB}", 4, 10, "on_busy", "found a mapping", "'warn' or 'raise'"),
        (fw("tensorflow: {share: 5%, growth: yes}"), 3, 35, "tensorflow.growth",
         "true or false, found 'yes'", "write 'true'"),
        (fw("tensorflow: {share: 5%, growth: Off}"), 3, 35, "tensorflow.growth", "found 'Off'", "write 'false'"),
        (fw("tensorflow: {share: 5%, growth: 'true'}"), 3, 35, "tensorflow.growth",
         "true or false, found 'true'", "write 'true' without quotes"),
        (fw("tensorflow: {share: 5%, growth: }"), 3, 34, "tensorflow.growth", "has no value", "'true' or"),
        # monitor
        (GOOD + "monitor:", 4, 9, "monitor", "expected its settings, found nothing", "'monitor: {}' for the defaults"),
        (GOOD + "monitor: true", 4, 10, "monitor", "expected its settings, found True", "'monitor: {}'"),
        (GOOD + "monitor: on", 4, 10, "monitor", "found 'on'", "'monitor: {interval: 1s}'"),
        (GOOD + "monitor: off", 4, 10, "monitor", "found 'off'", "remove the key: nothing watches then"),
        (GOOD + "monitor: [1s]", 4, 10, "monitor", "found a list", "'monitor: {}'"),
        (GOOD + "m\xf6nitor: {}", 4, 1, "m\xf6nitor", "unknown key 'm\xf6nitor'", "did you mean 'monitor'?"),
        (GOOD + "moniter: {}", 4, 1, "moniter", "unknown key 'moniter'", "did you mean 'monitor'?"),
        (GOOD + "interval: 1s", 4, 1, "interval", "unknown key 'interval' here", "move it below 'monitor:'"),
        (GOOD + "monitor: {intervall: 1s}", 4, 11, "monitor.intervall", "unknown key 'intervall'; allowed: interval, "
         "warn, critical, forecast, timeline, timeline_size, top", "did you mean 'interval'?"),
        (GOOD + "monitor: {file: x}", 4, 11, "monitor.file", "unknown key 'file'", "did you mean 'timeline'?"),
        (GOOD + "monitor: {limit: 5%}", 4, 11, "monitor.limit", "unknown key 'limit' here", "below 'device:'"),
        (GOOD + "monitor: {on_pressure: [trim]}", 4, 11, "monitor.on_pressure", "here", "align it with 'version:'"),
        (GOOD + "monitor: {interval: }", 4, 20, "monitor.interval", "has no value", "write '500ms', or remove the key"),
        (GOOD + "monitor: {interval: fast}", 4, 21, "monitor.interval", "'fast' is not a duration", "'500ms', '2s'"),
        (GOOD + "monitor: {interval: 10ms}", 4, 21, "monitor.interval", "'10ms' is not between 50ms and", "'500ms'"),
        (GOOD + "monitor: {interval: 0}", 4, 21, "monitor.interval", "0 is not between 50ms and", "example '500ms'"),
        (GOOD + "monitor: {interval: 2h}", 4, 21, "monitor.interval", "'2h' is not between 50ms and", "'500ms'"),
        (GOOD + "monitor: {interval: 5000}", 4, 21, "monitor.interval", "5000 is not between", "write '5000ms'"),
        (GOOD + "monitor: {interval: 5m}", 4, 21, "monitor.interval", "unknown unit 'm'", "write '5min'"),
        (GOOD + "monitor: {interval: 5us}", 4, 21, "monitor.interval", "unknown unit 'us'; allowed: ms, s,", "'500ms'"),
        (GOOD + "monitor: {interval: -1s}", 4, 21, "monitor.interval", "'-1s' is not a duration", "'500ms'"),
        (GOOD + "monitor: {interval: 1e-1}", 4, 21, "monitor.interval", "'1e-1' is not a duration", "'500ms'"),
        (GOOD + "monitor: {interval: true}", 4, 21, "monitor.interval", "True is not a duration", "'500ms'"),
        (GOOD + "monitor: {interval: 1:30}", 4, 21, "monitor.interval", "'1:30' is not a duration", "'500ms'"),
        (GOOD + "device: {wait: 10min}", 4, 1, "device", "wait is for a lease, and this budget asks for none",
         "write 'device: {wait: 10min, lease: true}', or remove wait"),
        (GOOD + "device: {on_wait: suspend-idle}", 4, 1, "device", "on_wait is for a lease, and this budget asks for",
         "write 'device: {on_wait: suspend-idle, lease: true}', or remove on_wait"),
        (GOOD + "device: {lease: true, on_wait: suspend-idle}", 4, 1, "device",
         "nobody is suspended for a lease that is not waited for",
         "write 'device: {lease: true, on_wait: suspend-idle, wait: 10min}', or remove on_wait"),
        (GOOD + "device: {lease: true, wait: 1ms}", 4, 29, "device.wait", "'1ms' is not between 1s and", "'10min'"),
        (GOOD + "device: {laese: true, wait: 1min}", 4, 10, "device.laese", "unknown key", "did you mean 'lease'?"),
        (GOOD + "device: {lease: yes}", 4, 17, "device.lease", "true or false, found 'yes'", "write 'true'"),
        (GOOD + "suspend:", 4, 9, "suspend", "expected its settings, found nothing", "{when_idle: 10min}'"),
        (GOOD + "suspend: {when_idle: 500ms}", 4, 22, "suspend.when_idle", "'500ms' is not between 1s and", "'10min'"),
        (GOOD + "suspend: {when_idle: off}", 4, 22, "suspend.when_idle", "'off' is not a duration", "remove the key"),
        (GOOD + "suspend: {when_idel: 1h}", 4, 11, "suspend.when_idel", "unknown key 'when_idel'; allowed: when_idle, "
         "by_others, on_demand, host_memory", "did you mean 'when_idle'?"),
        (GOOD + "suspend: {by_others: on}", 4, 22, "suspend.by_others", "true or false, found 'on'", "write 'true'"),
        (GOOD + "suspend: {host_memory: no}", 4, 24, "suspend.host_memory", "check or ignore", "'check'"),
        (GOOD + "suspend: {host_memory: none}", 4, 24, "suspend.host_memory", "check or ignore",
         "write 'check' or 'ignore'"),
        (GOOD + "suspend: {host_memory: ignroe}", 4, 24, "suspend.host_memory", "check or ignore",
         "write 'check' or 'ignore'"),
        (GOOD + "suspend: {host_memory: chek}", 4, 24, "suspend.host_memory", "check or ignore", "write 'check'"),
        (GOOD + "monitor: {warn: 85}", 4, 17, "monitor.warn", "85 is not a percentage", "'85%'"),
        (GOOD + "monitor: {warn: 0.85}", 4, 17, "monitor.warn", "'0.85' is not a percentage", "'85%'"),
        (GOOD + "monitor: {warn: }", 4, 16, "monitor.warn", "has no value", "write '85%'"),
        (GOOD + "monitor: {warn: 4GiB}", 4, 17, "monitor.warn", "'4GiB' is not a percentage", "'50%'"),
        (GOOD + "monitor: {critical: 0%}", 4, 21, "monitor.critical", "above 0% and at most 100%", "'95%'"),
        (GOOD + "monitor: {critical: }", 4, 20, "monitor.critical", "has no value", "write '95%'"),
        (GOOD + "monitor: {warn: 95%, critical: 90%}", 4, 32, "monitor.critical",
         "warn at 95% must come before critical at 90%", "raise critical, or lower warn"),
        (GOOD + "monitor: {critical: 90%, warn: 90%}", 4, 32, "monitor.warn",
         "warn at 90% must come before critical at 90%", "write a warn below 90%"),
        (GOOD + "monitor: {warn: 96%}", 4, 17, "monitor.warn",
         "warn at 96% must come before critical at 95% by default", "write a warn below 95%"),
        (GOOD + "monitor: {critical: 85%}", 4, 21, "monitor.critical",
         "warn at 85% by default must come before critical at 85%", "raise critical, or lower warn"),
        (GOOD + "monitor: {forecast: }", 4, 20, "monitor.forecast", "has no value", "write '20s', or remove the key"),
        (GOOD + "monitor: {forecast: off}", 4, 21, "monitor.forecast", "'off' is not a duration", "write '0'"),
        (GOOD + "monitor: {forecast: false}", 4, 21, "monitor.forecast", "False is not a duration", "write '0'"),
        (GOOD + "monitor: {forecast: 100ms}", 4, 21, "monitor.forecast",
         "'100ms' is not between 1s and 1h, or 0 for none", "'20s'"),
        (GOOD + "monitor: {forecast: soon}", 4, 21, "monitor.forecast", "'soon' is not a duration", "'2s'"),
        (GOOD + "monitor: {timeline: }", 4, 20, "monitor.timeline", "has no value", "write 'memguard.jsonl'"),
        (GOOD + "monitor: {timeline: ''}", 4, 21, "monitor.timeline", "found '', which names none", "'memguard.jsonl'"),
        (GOOD + "monitor: {timeline: runs/}", 4, 21, "monitor.timeline", "which names none", "'memguard.jsonl'"),
        (GOOD + "monitor: {timeline: ..}", 4, 21, "monitor.timeline", "found '..', which names none", "memguard.jsonl"),
        (GOOD + "monitor: {timeline: true}", 4, 21, "monitor.timeline", "the path of a file, found True", ".jsonl"),
        (GOOD + "monitor: {timeline: [a]}", 4, 21, "monitor.timeline", "found a list", "'memguard.jsonl'"),
        (GOOD + 'monitor: {timeline: "a\\nb"}', 4, 21, "monitor.timeline", "is not printable", "memguard.jsonl"),
        (GOOD + f"monitor: {{timeline: {'x' * 1025}}}", 4, 21, "monitor.timeline", "longer than 1024", ".jsonl"),
        (GOOD + "monitor: {timeline: ~/a.jsonl}", 4, 21, "monitor.timeline", "expands neither '~' nor '$'",
         "write the path as it is"),
        (GOOD + "monitor: {timeline: $HOME/a.jsonl}", 4, 21, "monitor.timeline", "'$HOME/a.jsonl'", "as it is"),
        (GOOD + "monitor: {timeline: 'a-{host}.jsonl'}", 4, 21, "monitor.timeline", "not fill in '{host}' in a path",
         "write '{pid}' or '{rank}'"),
        (GOOD + "monitor: {timeline: 'a-{pid.jsonl'}", 4, 21, "monitor.timeline", "fill in '{pid.jsonl'", "'{pid}'"),
        (GOOD + "monitor: {timeline_size: }", 4, 25, "monitor.timeline_size", "has no value", "write '64MiB'"),
        (GOOD + "monitor: {timeline_size: 64}", 4, 26, "monitor.timeline_size", "64 is less than", "write '64MiB'"),
        (GOOD + "monitor: {timeline_size: 512KiB}", 4, 26, "monitor.timeline_size", "'512KiB' is less than 1MiB",
         "'64MiB'"),
        (GOOD + "monitor: {timeline_size: 64MB}", 4, 26, "monitor.timeline_size", "'MB' is ambiguous", "'64MiB'"),
        (GOOD + "monitor: {top: on}", 4, 16, "monitor.top", "true or false, found 'on'", "write 'true'"),
        (GOOD + "monitor: {live: true}", 4, 11, "monitor.live", "unknown key 'live'", "did you mean 'top'?"),
        (GOOD + "monitor: {timeline_size: 5%}", 4, 26, "monitor.timeline_size", "'5%' is not a size", "'64MiB'"),
        # on_pressure
        (WATCHED + "on_pressure:", 5, 13, "on_pressure", "has no value", "write '[trim]', or remove the key"),
        (WATCHED + "on_pressure: trim", 5, 14, "on_pressure", "a list of trim and raise, found 'trim'", "'[trim]'"),
        (WATCHED + "on_pressure: abort", 5, 14, "on_pressure", "found 'abort'", "write '[raise]'"),
        (WATCHED + "on_pressure: true", 5, 14, "on_pressure", "found True", "write '[trim]'"),
        (WATCHED + "on_pressure: {trim: 1}", 5, 14, "on_pressure", "found a mapping", "write '[trim]'"),
        (WATCHED + "on_pressure: [TRIM]", 5, 15, "on_pressure[0]", "trim or raise, found 'TRIM'", "'trim'"),
        (WATCHED + "on_pressure: [trim, warn]", 5, 21, "on_pressure[1]", "found 'warn'", "'raise', or remove it"),
        (WATCHED + "on_pressure: [error]", 5, 15, "on_pressure[0]", "found 'error'", "write 'raise'"),
        (WATCHED + "on_pressure: [callback]", 5, 15, "on_pressure[0]", "found 'callback'", "or remove it"),
        (WATCHED + "on_pressure: [os.abort]", 5, 15, "on_pressure[0]", "found 'os.abort'", "write 'trim' or 'raise'"),
        (WATCHED + "on_pressure: [[trim]]", 5, 15, "on_pressure[0]", "found a list", "write 'trim' or 'raise'"),
        (WATCHED + "on_pressure: [~]", 5, 15, "on_pressure[0]", "found nothing", "write 'trim' or 'raise'"),
        (WATCHED + "on_pressure: [trim, raise, trim]", 5, 28, "on_pressure[2]", "'trim' is named twice", "one of them"),
        (GOOD + "on_pressure: [trim]", 4, 1, "on_pressure", "nothing watches the pressure: on_pressure needs a monitor",
         "add 'monitor: {}'"),
        # shares and limits
        (fw("torch: {share: 50}"), 3, 18, "torch.share", "50 is not a percentage", "'50%'"),
        (fw("torch: {share: 0.25}"), 3, 18, "torch.share", "'0.25' is not a percentage", "'25%'"),
        (fw("torch: {share: 0%}"), 3, 18, "torch.share", "above 0% and at most 100%", "'50%'"),
        (fw("torch: {share: 101%}"), 3, 18, "torch.share", "above 0% and at most 100%", "'50%'"),
        (fw("torch: {share: .nan}"), 3, 18, "torch.share", "'.nan' is not a percentage", "'50%'"),
        (fw("torch: {share: 4GiB}"), 3, 18, "torch.share", "found the size '4GiB'", "write 'limit: 4GiB'"),
        (fw("torch: {share: }"), 3, 17, "torch.share", "has no value", "write '50%'"),
        (fw("torch: {share: [1]}"), 3, 18, "torch.share", "is not a percentage", "'50%'"),
        (fw("torch: {limit: 50%}"), 3, 18, "torch.limit", "limit is bytes, found '50%'", "'share: 50%'"),
        (fw("torch: {limit: 4GB}"), 3, 18, "torch.limit", "'GB' is ambiguous", "write '4GiB'"),
        (fw("torch: {limit: 4Gi}"), 3, 18, "torch.limit", "unknown unit 'Gi'; allowed: B, KiB", "4GiB"),
        (fw("torch: {limit: 512}"), 3, 18, "torch.limit", "512 is less than 2MiB", "write '512MiB'"),
        (fw("torch: {limit: 1023KiB}"), 3, 18, "torch.limit", "less than 2MiB", "4GiB"),
        (fw("torch: {limit: 1_000_000_000}"), 3, 18, "torch.limit", "is not a size", "write '1000000000'"),
        (fw("torch: {limit: 017777777777}"), 3, 18, "torch.limit", "octal", "without the leading 0"),
        (fw("torch: {limit: 0x40000000}"), 3, 18, "torch.limit", "is not a size", "write '1073741824'"),
        (fw("torch: {limit: 1:30}"), 3, 18, "torch.limit", "'1:30' is not a size", "4GiB"),
        (fw("torch: {limit: .inf}"), 3, 18, "torch.limit", "'.inf' is not a size", "4GiB"),
        (fw("torch: {limit: 1e9}"), 3, 18, "torch.limit", "'1e9' is not a size", "write '1000000000'"),
        (fw("torch: {limit: -4GiB}"), 3, 18, "torch.limit", "'-4GiB' is not a size", "4GiB"),
        (fw("torch: {limit: " + "9" * 30 + "}"), 3, 18, "torch.limit", "larger than any GPU", "4GiB"),
        (fw("torch: {limit: true}"), 3, 18, "torch.limit", "True is not a size", "4GiB"),
        # device
        (GOOD + "device:", 4, 8, "device", "expected the keys limit and reserve, found nothing",
         "device: {limit: 90%}"),
        (GOOD + "device: 90%", 4, 9, "device", "expected the keys limit and reserve, found '90%'",
         "device: {limit: 90%}"),
        (GOOD + "device: {limit: 90}", 4, 17, "device.limit", "90 has no unit", "write '90%'"),
        (GOOD + "device: {limit: 120%}", 4, 17, "device.limit", "at most 100%", "'90%'"),
        (GOOD + "device: {limit: 0}", 4, 17, "device.limit", "above 0", "'40GiB'"),
        (GOOD + "device: {limit: 1MiB}", 4, 17, "device.limit", "less than 2MiB", "90%"),
        (GOOD + "device: {limit: }", 4, 16, "device.limit", "has no value", "'90%' or '40GiB'"),
        (GOOD + "device: {reserve: 5%}", 4, 19, "device.reserve", "'auto' or bytes, found '5%'", "'auto' or '2GiB'"),
        (GOOD + "device: {reserve: none}", 4, 19, "device.reserve", "'none' is not a size", "'auto'"),
        (GOOD + "device: {reserve: 0}", 4, 19, "device.reserve", "every CUDA context takes memory", "write 'auto'"),
        (GOOD + "device: {reserve: 512}", 4, 19, "device.reserve", "512 is less than 2MiB", "'512MiB'"),
        # devices
        (GOOD + "devices: [0]", 4, 10, "devices", "one line for each GPU, found a list", "0: {limit: 50%}"),
        (GOOD + "devices: {0: 50%}", 4, 14, "devices['0']", "limit and reserve, found '50%'", "0: {limit: 50%}"),
        (GOOD + "devices: {0: {limit: 5GB}}", 4, 22, "devices['0'].limit", "'GB' is ambiguous", "5GiB"),
        (GOOD + "devices: {0: {share: 5%}}", 4, 15, "devices['0'].share", "allowed: limit, reserve",
         "below a framework"),
        (GOOD + "devices: {GPU-887439f1: {limit: 5%}}", 4, 11, "devices['GPU-887439f1']", "not a GPU's whole UUID",
         "nvidia-smi -L"),
        (GOOD + "devices: {MIG-1: {limit: 5%}}", 4, 11, "devices['MIG-1']", "a MIG instance", "remove this entry"),
        (GOOD + "devices: {-1: {limit: 5%}}", 4, 11, "devices['-1']", "names no GPU", "a CUDA ordinal such as 0"),
        (GOOD + "devices: {007: {limit: 5%}}", 4, 11, "devices['007']", "names no GPU", "a CUDA ordinal such as 0"),
        (GOOD + "devices: {'cuda:007': {limit: 5%}}", 4, 11, "devices['cuda:007']", "names no GPU", "such as 0"),
        (GOOD + "devices: {'CUDA:': {limit: 5%}}", 4, 11, "devices['CUDA:']", "names no GPU", "a CUDA ordinal"),
        (GOOD + "devices:\n  0: {limit: 5%}\n  cuda:0: {limit: 6%}", 6, 3, "devices['cuda:0']",
         "the same GPU as '0' above", "keep one of them"),
        (GOOD + f"devices:\n  {UUID}: {{limit: 5%}}\n  {UUID.upper()}: {{limit: 6%}}", 6, 3,
         f"devices[{UUID.upper()!r}]",
         "the same GPU as", "keep one"),
        (GOOD + "devices: {0: {limit: 5%}, '0': {limit: 6%}}", 4, 27, "", "'0' is given twice in this line",
         "keep one"),
        # between values
        (fw("torch: {share: 60%}\npycuda: {share: 25%}\ntensorflow: {share: 15.1%}"), 5, 23, "tensorflow.share",
         "add up to 100.1% (torch 60% + pycuda 25% + tensorflow 15.1%)", "lower them by 0.1% together"),
        (fw("torch: {share: 100%}\npycuda: {limit: 1GiB}"), 4, 19, "pycuda.limit",
         "the shares take 100%, so nothing is left for the 1GiB of pycuda", "lower the share of torch"),
        (fw("torch: {limit: 6GiB}\npycuda: {limit: 3GiB}") + "device: {limit: 8GiB}", 5, 17, "device.limit",
         "torch 6GiB + pycuda 3GiB is 1GiB more than this limit of 8GiB",
         "raise the limit to 10GiB, with room for the reserve, or lower the frameworks by 2GiB"),
        (fw("torch: {limit: 7GiB}") + "device: {limit: 8GiB, reserve: 2GiB}", 4, 17, "device.limit",
         "torch 7GiB is 1GiB more than this limit of 8GiB − reserve 2GiB", "raise the limit to 9GiB"),
        (fw("torch: {share: 50%}\npycuda: {limit: 5GiB}") + "device: {limit: 8GiB}", 5, 17, "device.limit",
         "pycuda 5GiB + torch 50% is 1GiB more", "raise the limit to 11GiB, with room for the reserve"),
        (fw("torch: {limit: 7GiB}") + "device: {limit: 8GiB}\ndevices: {0: {limit: 6GiB}}", 5, 22, "devices['0'].limit",
         "torch 7GiB is 1GiB more than this limit of 6GiB", "raise the limit to 8GiB, with room for the reserve"),
        (fw("torch: {limit: 7GiB}") + "device: {limit: 8GiB}\ndevices: {0: {reserve: 2GiB}}", 5, 24,
         "devices['0'].reserve",
         "1GiB more than this limit of 8GiB − reserve 2GiB", "raise the limit to 9GiB"),
        (fw("torch: {limit: 5GiB}") + "device: {limit: 8GiB, reserve: 2GiB}\ndevices: {0: {limit: 6GiB}}", 5, 22,
         "devices['0'].limit", "torch 5GiB is 1GiB more than this limit of 6GiB − reserve 2GiB",
         "raise the limit to 7GiB"),
        (fw("torch: {limit: 7GiB}") + "device: {limit: 6GiB}\ndevices: {0: {}}", 4, 17, "device.limit",
         "torch 7GiB is 1GiB more", "raise the limit to 8GiB, with room for the reserve"),
        (GOOD + "device: {limit: 2GiB, reserve: 2GiB}", 4, 32, "device.reserve", "leaves nothing", "lower the reserve"),
        # metrics
        (GOOD + "metrics: {}", 4, 1, "metrics", "names neither", "write 'metrics: {prometheus: 9477}' or"),
        (GOOD + "metrics: {opentelemetry: false}", 4, 1, "metrics", "names neither",
         "write 'metrics: {prometheus: 9477}' or"),
        (GOOD + "metrics: {opentelemetry: false, job: a}", 4, 1, "metrics", "names neither",
         "'metrics: {prometheus: 9477, job: a}'"),
        (GOOD + "metrics: {job: a}", 4, 1, "metrics", "names neither", "'metrics: {prometheus: 9477, job: a}'"),
        (GOOD + "metrics: on", 4, 10, "metrics", "expected its settings", "'metrics: {prometheus: 9477}'"),
        (GOOD + "metrics: {port: 9477}", 4, 11, "metrics.port", "unknown key 'port'", "did you mean 'prometheus'?"),
        (GOOD + "metrics: {otel: true}", 4, 11, "metrics.otel", "unknown key 'otel'", "did you mean 'opentelemetry'?"),
        (GOOD + "metrics: {prometheus: 80}", 4, 23, "metrics.prometheus", "80 is not a port", "for example '9477'"),
        (GOOD + "metrics: {prometheus: '9477'}", 4, 23, "metrics.prometheus", "not a port", "'9477' without quotes"),
        (GOOD + "metrics: {prometheus: off}", 4, 23, "metrics.prometheus", "not a port", "remove the key"),
        (GOOD + "metrics: {opentelemetry: on}", 4, 26, "metrics.opentelemetry", "true or false", "write 'true'"),
        (GOOD + "metrics: {prometheus: 9477, job: a b}", 4, 34, "metrics.job", "not the name of a job", "'train'"),
        (GOOD + "prometheus: 9477", 4, 1, "prometheus", "unknown key 'prometheus' here", "move it below 'metrics:'"),
        # the doctor
        (GOOD + "docter: {}", 4, 1, "docter", "on_pressure, metrics, suspend, doctor", "did you mean 'doctor'?"),
        (GOOD + "ignore: [mig]", 4, 1, "ignore", "unknown key 'ignore' here", "move it below 'doctor:'"),
        (GOOD + "doctor:", 4, 8, "doctor", "expected its settings, found nothing", "write 'doctor: {ignore: []}'"),
        (GOOD + "doctor: [mig]", 4, 9, "doctor", "expected its settings, found a list", "write 'doctor: {ignore: []}'"),
        (GOOD + "doctor: {skip: [mig]}", 4, 10, "doctor.skip", "unknown key 'skip'; allowed: ignore", "'ignore'?"),
        (GOOD + "doctor: {limit: 5%}", 4, 10, "doctor.limit", "here; allowed: ignore", "move it below 'device:'"),
        (GOOD + "doctor: {ignore: }", 4, 17, "doctor.ignore", "has no value", "write '[]', or remove the key"),
        (GOOD + "doctor: {ignore: mig}", 4, 18, "doctor.ignore", "a list of findings, found 'mig'", "write '[mig]'"),
        (GOOD + "doctor: {ignore: all}", 4, 18, "doctor.ignore", "a list of findings, found 'all'", "write '[]'"),
        (GOOD + "doctor: {ignore: {mig: 1}}", 4, 18, "doctor.ignore", "found a mapping", "write '[]'"),
        (GOOD + "doctor:\n  ignore:\n  - mig\n  - second-contexts", 7, 5, "doctor.ignore[1]",
         "a finding of memguard doctor, found 'second-contexts'", "write 'second-context'"),
        (GOOD + "doctor: {ignore: [Second_Context]}", 4, 19, "doctor.ignore[0]", "Second_Context", "'second-context'"),
        (GOOD + "doctor: {ignore: [qwxz]}", 4, 19, "doctor.ignore[0]", "found 'qwxz'", "--list` prints"),
        (GOOD + "doctor: {ignore: [1]}", 4, 19, "doctor.ignore[0]", "a finding of memguard doctor", "remove it"),
        (GOOD + "doctor: {ignore: [mig, wsl, mig]}", 4, 29, "doctor.ignore[2]", "'mig' is named twice", "keep one"),
        # the whole
        ("", 1, 1, "", "is empty", "memguard check --schema"),
        ("# nothing\n", 1, 1, "", "is empty", "memguard check --schema"),
        ("~", 1, 1, "", "is empty", "memguard check --schema"),
        ("- a", 1, 1, "", "holds a list, not the keys of a budget", "memguard check --schema"),
        ("\n 50%", 2, 2, "", "holds '50%', not the keys of a budget", "memguard check --schema"),
        (GOOD + "device: {limit: !!int '5'}", 4, 17, "", "the YAML tag '!!int'", "remove the tag"),
        (GOOD + "device: [", 4, 10, "", "the file ends inside a bracket", "close the bracket"),
    ],
)  # fmt: skip
def test_one_problem(text: str, line: int, column: int, path: str, cause: str, fix: str) -> None:
    (problem,) = problems(text)
    assert (problem.line, problem.column) == (line, column)
    assert problem.path.removeprefix("frameworks.") == path
    assert cause in problem.message
    assert fix in problem.fix


def test_a_wrong_gpu_without_a_value_is_two_problems() -> None:
    found = problems(GOOD + "devices: {MIG-1: }")
    assert [(p.column, p.message[:10]) for p in found] == [(11, "'MIG-1' is"), (17, "expected t")]


def test_all_problems_at_once_in_file_order() -> None:
    text = (
        "frameworks:\n"
        "  pytorch: {share: 80%}\n"
        "  torch: {share: 80%, foo: 1, nccl: -2}\n"
        "  tensorflow: {share: 30%, limit: 1GB, growth: on}\n"
        "  torch: {}\n"
        "device: {limit: 5 GB, reserve: !x 1}\n"
        "version: 3\n"
        "monitor: 1\n"
        "on_busy: never\n"
    )
    found = problems(text)
    assert [(p.line, p.column, p.path) for p in found] == [
        (2, 3, "frameworks.pytorch"),
        (3, 23, "frameworks.torch.foo"),
        (3, 37, "frameworks.torch.nccl"),
        (4, 23, "frameworks.tensorflow.share"),
        (4, 28, "frameworks.tensorflow.limit"),
        (4, 35, "frameworks.tensorflow.limit"),
        (4, 48, "frameworks.tensorflow.growth"),
        (5, 3, ""),
        (6, 17, "device.limit"),
        (6, 32, ""),
        (7, 10, "version"),
        (8, 10, "monitor"),
        (9, 10, "on_busy"),
    ]
    assert "add up to 110%" in found[3].message


def test_problems_of_the_budget_come_before_a_second_document() -> None:
    assert [(p.line, p.column) for p in problems("version\n---")] == [(1, 1), (2, 1)]


def test_a_problem_in_an_alias_stands_where_the_value_stands() -> None:
    found = problems(fw("torch: &x {share: 0}\npycuda: *x"))
    assert [(p.line, p.column, p.path) for p in found] == [
        (3, 21, "frameworks.torch.share"),
        (3, 21, "frameworks.pycuda.share"),
    ]


def test_messages_are_printable_whatever_the_file_holds() -> None:
    text = GOOD + 'device: {limit: "\\e[31m\\u202e", "\\x07": 1}\n"k\\U0001F600\\n": "' + "x" * 5000 + '"'
    with pytest.raises(ConfigError) as raised:
        parse(text, "a\x1b\n\udc80.yaml")
    for line in str(raised.value).split("\n"):
        assert line.isprintable()
        assert len(line) < 300
    assert str(raised.value).startswith("a\\x1b\\n\\udc80.yaml:4:")


def test_line_endings_and_a_byte_order_mark_change_nothing() -> None:
    assert parse("\ufeff" + GOOD.replace("\n", "\r\n")) == parse(GOOD)
    assert parse(b"\xef\xbb\xbf" + GOOD.encode()) == parse(GOOD)


# Files


def test_load_reads_a_file_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "b.yaml"
    path.write_text(GOOD)
    assert load(path) == load(str(path)) == parse(GOOD)
    path.write_text("version: 2")
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}:1:1: frameworks: is missing")
    newer = "version: this memguard reads version 1, found 2: the file was written for a newer memguard"
    assert f"\n{path}:1:10: {newer}\n    fix: update memguard" in str(raised.value)
    assert raised.value.exit_code == 2


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"a: \xe4")
    (tmp_path / "huge").write_bytes(b"#" * (1 << 20) + b"\n")
    (tmp_path / "fits").write_bytes(b"#" * ((1 << 20) - len(GOOD) - 1) + b"\n" + GOOD.encode())
    assert load(tmp_path / "fits") == parse(GOOD)
    for path, cause in [
        (tmp_path / "absent", "there is no such file"),
        (tmp_path, "is a folder"),
        (tmp_path / "latin" / "x", "cannot be read: Not a directory"),
        (tmp_path / "latin", "not UTF-8"),
        (tmp_path / "huge", "larger than 1 MiB"),
        ("a\0b", "is not a path"),
        (None, "is not a path"),
        (0.5, "is not a path"),
    ]:
        with pytest.raises(ConfigError, match=cause) as raised:
            load(path)  # type: ignore[arg-type]
        assert raised.value.problems[0].fix


def test_what_is_no_file_is_neither_waited_for_nor_left_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    before = os.listdir("/proc/self/fd")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(ConfigError, match=r"is a folder|not a regular file"):
            load(path)
    assert os.listdir("/proc/self/fd") == before


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)  # root may read everything, so chmod shows nothing there
    with pytest.raises(ConfigError, match="may not be read by this user"):
        load(tmp_path / "b.yaml")


def test_load_looks_at_nothing_but_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(GOOD.replace("50%", "$HALF"))
    monkeypatch.setenv("HALF", "50%")
    with pytest.raises(ConfigError, match=r"'\$HALF' is not a percentage"):
        load(tmp_path / "b.yaml")


def test_a_timeline_is_relative_to_the_folder_of_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GOOD + "monitor: {timeline: 'runs/a-{pid}.jsonl'}"
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "b.yaml").write_text(text)
    whole = str(tmp_path / "conf" / "runs" / "a-{pid}.jsonl")
    monkeypatch.chdir(tmp_path)
    for path in ("conf/b.yaml", tmp_path / "conf" / "b.yaml"):
        budget = load(path)
        monitor = budget.monitor
        assert monitor is not None and monitor.timeline == whole
        assert budget.source == str(path)
        assert from_mapping(budget.model_dump(exclude_none=True)) == budget
    for budget in (parse(text), from_mapping({"version": 1, "frameworks": {"torch": {"share": "50%"}},
                                              "monitor": {"timeline": "runs/a-{pid}.jsonl"}})):  # fmt: skip
        assert budget.monitor is not None and budget.monitor.timeline == "runs/a-{pid}.jsonl"  # as it is written
    (tmp_path / "whole.yaml").write_text(GOOD + "monitor: {timeline: /data/a.jsonl}")
    monitor = load("whole.yaml").monitor
    assert monitor is not None and monitor.timeline == "/data/a.jsonl"


# Mappings


class Evil(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise RuntimeError("no")


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("mapping", "cause"),
    [
        ({}, "version: is missing"),
        (None, "is empty"),
        (5, "holds 5, not the keys"),
        ([("version", 1)], "holds a list"),
        ({1.5: 1}, "a key must be text, found 1.5"),
        ({"\ud800": 1}, "a key must be text"),
        ({"version": 10**5000}, "found a int that cannot be shown"),
        ({"version": 1.0}, "found 1.0"),
        ({"version": 1, "device": {"limit": "\ud800"}}, "<str> is not a size"),
        ({"version": 1, "device": {"limit": b"90%"}}, "<bytes> is not a size"),
        ({"version": 1, "device": {"limit": float("inf")}}, "inf is not a size"),
        ({"version": 1, "device": {"limit": Fraction(3, 2)}}, "Fraction(3, 2) is not a percentage"),
        ({"version": 1, "frameworks": {"torch": object()}}, "share, limit, or min and max, found <object>"),
        ({"version": 1, "frameworks": {"torch": {"share": "5%", "nccl": 1.0}}}, "from 0 to 64, found 1.0"),
        ({"version": 1, "frameworks": {"torch": {"share": "5%", "nccl": 10**5000}}}, "a int that cannot be shown"),
        ({"version": 1, "on_busy": b"raise"}, "on_busy is warn or raise, found <bytes>"),
        ({"version": 1, "monitor": {"interval": float("nan")}}, "nan is not a duration"),
        ({"version": 1, "monitor": {"interval": 10**5000}}, "a int that cannot be shown is not a duration"),
        ({"version": 1, "monitor": {"timeline": Path("a")}}, "timeline is the path of a file, found <"),
        ({"version": 1, "monitor": object()}, "expected its settings, found <object>"),
        ({"version": 1, "monitor": {}, "on_pressure": [print]}, "on_pressure is trim or raise, found <builtin"),
        ({"version": 1, "monitor": {}, "on_pressure": {"trim"}}, "a list of trim and raise, found <set>"),
        ({"devices": {0: {}, "0": {}}}, "'0' is given twice"),
        (Evil(), "the mapping cannot be read (RuntimeError)"),
        (nested(40), "the mapping cannot be read"),
        ({"device": list(range(20_000))}, "the mapping cannot be read"),
    ],
    ids=range(26),
)
def test_mappings_that_are_no_budget(mapping: Any, cause: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_mapping(mapping)
    assert cause in str(raised.value)
    assert {p.line for p in raised.value.problems} == {None}


def test_a_mapping_that_contains_itself() -> None:
    mapping: dict[str, Any] = {"version": 1}
    mapping["device"] = mapping
    with pytest.raises(ConfigError, match="cannot be read"):
        from_mapping(mapping)
