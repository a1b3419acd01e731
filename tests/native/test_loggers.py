"""The recipes of docs/loggers.md run with the real TensorBoard, tensorboardX, TensorFlow, Lightning and Keras.

The samples come from a simulated GPU: what is shown is that they arrive, as the page says.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import memguard

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "loggers.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
pytestmark = pytest.mark.time_limit(450)
TENSORBOARD, SUMMARY, LIGHTNING, KERAS = RECIPES
BEGIN = """
import glob, time, memguard
from memguard._runtime import session
frameworks = {"torch": {"share": "60%"}, "cupy": {"share": "30%"}}
guard = memguard.init({"version": 1, "frameworks": frameworks, "monitor": {"interval": "50ms"}}, simulate="h200")
array = guard.frameworks["torch"].allocate(3 << 30)

def until(done):
    end = time.monotonic() + 150  # the monitor takes its share of a core, whatever a sample costs
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)

def given():
    '''Five samples, to the recipe too; then it is given no more.'''
    seen = []
    memguard.on_sample(seen.append)  # after the recipe's
    until(lambda: len(seen) > 4)
    session.sample_callbacks.clear()
    sampled()  # one may be under way

def sampled():
    ring = memguard.api.current_session().monitor._ring
    taken = len(ring)
    until(lambda: len(ring) > taken + 2)
"""
WITHOUT_TENSORFLOW = (
    "import sys\nsys.modules['tensorflow'] = None  # TensorBoard and Lightning import it if it is there"
)
READ = """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

def read(folder):
    events = EventAccumulator(folder)
    events.Reload()
    return {tag: [one.value for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
"""


def run(folder: Path, *parts: str, **more: str) -> str:
    """The program, in a process of its own: each of these frameworks takes seconds, and stays."""
    home = str(Path(memguard.__file__).parents[1])
    environ = {**{k: v for k, v in os.environ.items() if not k.startswith("MEMGUARD_")}, "PYTHONPATH": home, **more}
    environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    program = "\n".join(textwrap.dedent(part) for part in parts)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


WRITTEN = """
given()
writer.close()
found = read("runs/one")
assert set(found["gpu0/torch/in_use_gib"]) == {3.0}, found
assert len(found["gpu0/torch/held_gib"]) > 2 and "gpu0/torch/cap_gib" in found, found
"""
TRAIN = """
import lightning, torch
from lightning.pytorch.loggers import CSVLogger

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, number):
        sampled()
        assert number < LAST
        return self.layer(batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

LAST = 99
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 4)), batch_size=1)
callback = GpuMemory()
def fit():
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=CSVLogger("logs"), log_every_n_steps=1, callbacks=[callback],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )
    trainer.fit(Model(), data)
fit()
assert session.sample_callbacks == []
(path,) = glob.glob("logs/**/metrics.csv", recursive=True)
head, *rows = [line.split(",") for line in open(path).read().split()]
assert "3.0" in [row[head.index("torch_gib")] for row in rows], (head, rows)
LAST = 2
try:
    fit()
except AssertionError:
    assert session.sample_callbacks == [], "a run that fails watches no more"
else:
    raise SystemExit("it did not fail")
"""
FIT = """
import numpy
assert keras.backend.backend() == "torch"
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
class Slow(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None): sampled()
callbacks = [Slow(), GpuMemory(), keras.callbacks.CSVLogger("log.csv")]
history = model.fit(numpy.ones((4, 2)), numpy.ones(4), epochs=2, verbose=0, callbacks=callbacks)
assert history.history["torch_gib"] == [3.0, 3.0], history.history
assert "torch_gib" in open("log.csv").readline()
assert session.sample_callbacks == []
"""


def test_tensorboard_lightning_and_keras(tmp_path: Path) -> None:
    """In one process, as each needs PyTorch, whose import takes longest."""
    parts = [TENSORBOARD, READ, WRITTEN, LIGHTNING, TRAIN, KERAS, FIT]
    run(tmp_path, WITHOUT_TENSORFLOW, BEGIN, *parts, KERAS_BACKEND="torch")


def test_tensorboardx(tmp_path: Path) -> None:
    recipe = TENSORBOARD.replace("torch.utils.tensorboard", "tensorboardX")
    run(tmp_path, WITHOUT_TENSORFLOW, BEGIN, recipe, READ, WRITTEN)


def test_tensorflows_summary(tmp_path: Path) -> None:
    end = """
    given()
    writer.close()
    (path,) = glob.glob("runs/two/*")
    values = [one for event in tf.compat.v1.train.summary_iterator(path) for one in event.summary.value]
    assert {(one.tag, float(tf.make_ndarray(one.tensor))) for one in values} == {("gpu0/torch/in_use_gib", 3.0)}, values
    """
    run(tmp_path, BEGIN, SUMMARY, end)


def test_the_page_has_these_and_no_others() -> None:
    assert len(RECIPES) == 4 and all("memguard.on_sample(" in recipe for recipe in RECIPES)
    assert TENSORBOARD.count("torch.utils.tensorboard") == TENSORBOARD.count("tensorboardX") == 1
