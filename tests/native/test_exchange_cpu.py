"""The exchange between the real torch, TensorFlow, JAX and NumPy, on arrays in host memory."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Run, environment, serve

NAMES = ("torch", "tensorflow", "jax", "numpy")
PAIRS = list(itertools.permutations(NAMES, 2))


@pytest.fixture(scope="module")
def beside_all() -> Iterator[Run]:
    """All four in one process."""
    for run in serve("torch, tensorflow, jax, numpy, ml_dtypes"):

        def beside(code: str, run: Run = run) -> dict[str, Any]:
            return run(f"from host_arrays import *\n{code}")

        yield beside


def test_every_pair_shares_the_memory(beside_all: Run) -> None:
    found = beside_all("""
result["ways"], result["seen"], result["shared"] = {}, {}, {}
for producer, consumer in PAIRS:
    expected = np.arange(24, dtype="float32").reshape(2, 3, 4)
    x = make(producer, expected)
    way = outcome(x, consumer, expected)
    result["ways"][f"{producer} {consumer}"] = way
    y = to(x, consumer)
    entries = [(e.producer, e.consumer) for e in lifetimes._open.values()]
    if producer in ("torch", "numpy"):  # the others' arrays are constants
        x[1, 2, 3] = 77
        result["seen"][f"{producer} {consumer}"] = float(values(y)[1, 2, 3])
    assert lifetimes.lent() == {}, "host memory is on no GPU"
    del x, y
    gc.collect()
    result["shared"][f"{producer} {consumer}"] = [entries, len(lifetimes._open)]
""")
    assert found["ways"] == {f"{a} {b}": "shared" for a, b in PAIRS}
    assert set(found["seen"].values()) == {77.0} and len(found["seen"]) == 6
    assert found["shared"] == {f"{a} {b}": [[[a, b]], 0] for a, b in PAIRS}


def test_an_array_of_the_framework_itself_is_returned(beside_all: Run) -> None:
    found = beside_all("""
for name in NAMES:
    x = make(name, np.arange(6.0, dtype="float32"))
    result[name] = [to(x, name) is x, to(x, name, copy=False) is x, to(x, name, copy=True) is x, str(last_route())]
""")
    assert found == {name: [True, True, False, f"{name} to {name}: 24 B copied"] for name in NAMES}


def test_the_route_is_the_threads_own(beside_all: Run) -> None:
    found = beside_all("""
import threading
result["none"] = last_route() is None
to(make("torch", np.zeros(8, "float32")), "jax", copy=True)
other = []
thread = threading.Thread(target=lambda: other.append(last_route()))
thread.start()
thread.join()
result["mine"], result["theirs"] = list(last_route()), other
""")
    assert found == {"none": True, "mine": ["torch", "jax", "copied", 32, ""], "theirs": [None]}


NOT_TENSORFLOWS = {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"}
NOT_NUMPYS = NOT_TENSORFLOWS | {"bfloat16"}


def test_every_dtype_is_shared_or_refused_by_name(beside_all: Run) -> None:
    found = beside_all("""
jax.config.update("jax_enable_x64", True)
for dtype in DTYPES:
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    expected = np.array([1, 0, 1, 1, 0, 0, 1, 0]).astype(kind)
    for producer, consumer in PAIRS:
        key = f"{dtype} {producer} {consumer}"
        try:
            x = make(producer, expected)
        except (TypeError, ValueError, AttributeError, RuntimeError, NotImplementedError, tf.errors.OpError) as error:
            result[key] = "lacks"
            continue
        result[key] = outcome(x, consumer, expected)
        if result[key] == "shared":
            assert outcome(x, consumer, expected, copy=True) == "copied"
""")
    from memguard._frameworks.arrays.view import DTYPES

    wrong = {}
    for dtype, (producer, consumer) in itertools.product(DTYPES, PAIRS):
        way = found[f"{dtype} {producer} {consumer}"]
        lacking = {"tensorflow": NOT_TENSORFLOWS, "numpy": NOT_NUMPYS}
        if dtype in lacking.get(producer, set()):
            fine = way in ("lacks", "shared") or f"has no arrays of dtype {dtype}" in way or "dlpack" in way
        elif dtype in lacking.get(consumer, set()):
            fine = f"has no arrays of dtype {dtype} that can be handed over" in way
        else:
            fine = way == "shared"
        if not fine:
            wrong[dtype, producer, consumer] = way
    assert wrong == {}


def test_jax_without_its_64_bit_types_never_narrows_an_array(beside_all: Run) -> None:
    found = beside_all("""
for dtype in ("int64", "uint64", "float64", "complex128"):
    x = aligned(np.arange(8).astype(dtype))
    result[dtype] = [refused(lambda: to(x, "jax")), refused(lambda: to(x, "jax", copy=True))]
result["int32"] = outcome(aligned(np.arange(8).astype("int32")), "jax", np.arange(8).astype("int32"))
""")
    assert found.pop("int32") == "shared"
    for dtype, refusals in found.items():
        for producer, consumer, reason, remedy, still_shared in refusals:
            assert (producer, consumer, still_shared) == ("numpy", "jax", 0)
            assert f"a narrower copy of {dtype}" in reason and "jax_enable_x64" in remedy


SHAPES = {
    # what is done to an array of (4, 6) float32: which frameworks can share the result
    "x[:0]": "torch tensorflow jax numpy",
    "x[:, :0]": "torch tensorflow jax numpy",
    "x.reshape(-1)[:1].reshape(())": "torch tensorflow jax numpy",
    "x[:1]": "torch tensorflow jax numpy",
    "x.T": "torch jax numpy",
    "x[:, 1:]": "torch numpy",
    "x[::2]": "torch numpy",
    "x.reshape(-1)[1:]": "torch numpy",
    "x.reshape(-1)[4:]": "torch numpy",
    "x.reshape(-1)[16:]": "torch tensorflow jax numpy",
    "x.reshape(2, 2, 6)": "torch tensorflow jax numpy",
    "x[None, :, None]": "torch tensorflow jax numpy",
    "np.broadcast_to(x[:1], (5, 6))": "torch numpy",
    "x[::-1]": "",
    "x[:, ::-2]": "",
}


def test_shapes_strides_and_addresses(beside_all: Run) -> None:
    found = beside_all(f"""
for producer in ("torch", "numpy"):
    for how in {list(SHAPES)!r}:
        x = make(producer, np.arange(24, dtype="float32").reshape(4, 6))
        if producer == "torch" and ("::-" in how or "np." in how):
            how_torch = how.replace("np.broadcast_to(x[:1], (5, 6))", "x[:1].expand(5, 6)")
            if "::-" in how:
                continue
            y = eval(how_torch)
        else:
            y = eval(how)
            if "np." in how:
                y.flags.writeable = True
        expected = np.array(values(y))
        for consumer in NAMES:
            if consumer != producer:
                plain, copied = outcome(y, consumer, expected), outcome(y, consumer, expected, copy=True)
                result[f"{{producer}} {{consumer}} {{how}}"] = [plain, copied, str(last_route().reason)]
        assert not lifetimes._open or gc.collect() >= 0
        del y
    gc.collect()
    result["open"] = len(lifetimes._open)
""")
    assert found.pop("open") == 0 and len(found) == 3 * len(SHAPES) + 3 * (len(SHAPES) - 2)
    for key, (plain, copied, reason) in found.items():
        consumer, how = key.split(" ", 2)[1:]
        allowed = consumer in SHAPES[how].split()
        assert (plain == "shared") == allowed, (key, plain)
        assert copied == "copied", key
        assert reason == ("" if allowed else plain), key
        if not allowed:
            assert "strides" in plain or "multiples of 64 bytes" in plain, (key, plain)


def test_an_array_that_was_imported_transposed_is_shared_transposed(beside_all: Run) -> None:
    found = beside_all("""
x = make("torch", np.arange(24, dtype="float32").reshape(4, 6))
expected = np.array(values(x.T))
y = to(x.T, "jax")
result["values"] = bool((values(y) == expected).all())
for consumer in ("torch", "numpy", "tensorflow"):
    result[consumer] = [outcome(y, consumer, expected), outcome(y, consumer, expected, copy=True)]
result["strides"] = list(to(y, "torch").stride())
""")
    assert found.pop("values") and found.pop("strides") == [1, 6]
    assert found["torch"] == found["numpy"] == ["shared", "copied"]
    assert "strides" in found["tensorflow"][0] and found["tensorflow"][1] == "copied"


def test_read_only_memory(beside_all: Run) -> None:
    found = beside_all("""
x = aligned(np.arange(16, dtype="float32"))
x.flags.writeable = False
for consumer in ("torch", "tensorflow", "jax"):
    result[consumer] = [outcome(x, consumer, x, copy=copy) for copy in (None, False, True)]
result["sliced"] = outcome(x[1::2], "torch", x[1::2], copy=False)
late = outcome(x[1:], "tensorflow", x[1:], copy=False)
result["misaligned"] = late
""")
    assert found["tensorflow"] == found["jax"] == ["shared", "shared", "copied"]
    assert "it is read-only" in found["torch"][0] and found["torch"][1:] == ["shared", "copied"]
    assert found["sliced"] == "shared" and "multiples of 64 bytes, this one is 4 past" in found["misaligned"]


REFUSALS = {
    # what is handed over: the consumer, words of the reason, the remedy as code that works
    "torch.zeros(16, requires_grad=True)": ("tensorflow", "requires a gradient", "x.detach()"),
    "torch.zeros(16, requires_grad=True) * 2": ("jax", "requires a gradient", "x.detach()"),
    "torch.nn.Parameter(torch.zeros(16))": ("numpy", "requires a gradient", "x.detach()"),
    "torch.eye(4).to_sparse()": ("tensorflow", "layout is torch.sparse_coo", "x.to_dense()"),
    "torch.eye(4).to_sparse_csr()": ("jax", "layout is torch.sparse_csr", "x.to_dense()"),
    "torch.quantize_per_tensor(torch.rand(16), 0.1, 0, torch.qint8)": ("jax", "quantised", "x.dequantize()"),
    "torch.zeros(16, dtype=torch.complex64).conj()": ("jax", "conjugated", "x.resolve_conj()"),
    "torch.zeros(16, dtype=torch.complex64).conj().imag": ("jax", "negated", "x.resolve_neg()"),
    "torch.zeros(16, device='meta')": ("jax", "device meta", ""),
    "tf.sparse.from_dense(tf.eye(4))": ("torch", "sparse", "tf.sparse.to_dense(x)"),
    "tf.ragged.constant([[1.0], [2.0, 3.0]])": ("torch", "ragged", "x.to_tensor()"),
    "tf.constant(['a', 'b'])": ("torch", "dtype string", ""),
    "tf.constant([1, 2], tf.qint8) if 0 else tf.cast(tf.zeros(4), tf.qint8)": ("torch", "dtype qint8", ""),
    "np.array([None])": ("torch", "dtype object", ""),
    "np.zeros(4, '>f4')": ("torch", "dtype >f4", "x.astype('float32')"),
    "np.zeros(4, [('a', 'f4')])": ("torch", "dtype [('a'", ""),
    "np.zeros(4, 'M8[s]')": ("jax", "dtype datetime64", "x.astype('int64').astype('int32')"),
    "np.array(['text'])": ("tensorflow", "dtype <U4", ""),
    "np.ma.masked_array(np.zeros(16, 'f4'), mask=[True] * 16)": ("torch", "masked", "x.filled()"),
    "np.zeros(4, np.longdouble)": ("torch", "dtype float128", "x.astype('float32')"),
    "np.zeros(4, [('a', 'u1'), ('b', '<f4')])['b']": (
        "torch",
        "not multiples of its item size",
        "np.ascontiguousarray(x)",
    ),
    "[1.0, 2.0]": ("torch", "has neither", ""),
    "3.0": ("jax", "has neither", ""),
    "np.float32(3)": ("torch", "has neither", "np.asarray(x)"),
}


def test_each_refusal_says_why_and_what_helps_and_leaves_nothing_shared(beside_all: Run) -> None:
    found = beside_all(f"""
for code, (consumer, reason, remedy) in {REFUSALS!r}.items():
    x = eval(code)
    refusals = [refused(lambda: to(x, consumer)), refused(lambda: to(x, consumer, copy=False))]
    helped = None
    if remedy:
        y = eval(remedy)
        helped = bool((values(to(aligned(y) if isinstance(y, np.ndarray) else y, consumer)) == values(y)).all())
    result[code] = [refusals, helped]
""")
    for code, (consumer, words, remedy) in REFUSALS.items():
        refusals, helped = found[code]
        assert refusals[0] == refusals[1]
        producer, other, reason, fix, still_shared = refusals[0]
        assert words in reason and fix and still_shared == 0, (code, refusals[0])
        assert other in (None, consumer) and producer
        assert helped == (True if remedy else None), code


def test_an_array_that_requires_a_gradient_can_be_copied(beside_all: Run) -> None:
    found = beside_all("""
x = torch.arange(16.0, requires_grad=True)
for consumer in ("tensorflow", "jax", "numpy"):
    result[consumer] = [outcome(x, consumer, values(x), copy=True), last_route().reason]
""")
    for way, reason in found.values():
        assert way == "copied" and "requires a gradient" in reason


def test_arrays_of_jax_without_memory_are_refused(beside_all: Run) -> None:
    found = beside_all("""
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
traced = []
@jax.jit
def f(x):
    traced.append(refused(lambda: to(x, "torch")))
    return x
f(jnp.zeros(4))
result["tracer"] = traced[0]
gone = jnp.zeros(4)
gone.delete()
result["deleted"] = refused(lambda: to(gone, "torch"))
mesh = jax.sharding.Mesh(jax.devices(), "i")
x = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))
result["sharded"] = refused(lambda: to(x, "torch"))
result["shards"] = [values(to(s.data, "torch")).tolist() for s in x.addressable_shards]
""")
    assert "tracer, which has no memory" in found["tracer"][2] and "outside jax.jit" in found["tracer"][3]
    assert "deleted or donated" in found["deleted"][2] and "it lies on 2 devices" in found["sharded"][2]
    assert "addressable_shards" in found["sharded"][3] and found["shards"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(found[name][:2] == ["jax", None] and found[name][4] == 0 for name in ("tracer", "deleted", "sharded"))


def test_jax_does_not_donate_an_array_that_is_shared(beside_all: Run) -> None:
    found = beside_all("""
for consumer in ("torch", "tensorflow", "numpy"):
    for shape in (16, (4, 4)):
        x = jnp.arange(16, dtype="float32").reshape(shape)
        y = to(x, consumer)
        try:
            jax.jit(lambda a: a * 2, donate_argnums=0)(x).block_until_ready()
        except Exception as error:
            assert "external reference" in str(error), error
        result[f"{consumer} {shape}"] = values(y).reshape(-1).tolist() == list(range(16))
""")
    assert set(found.values()) == {True} and len(found) == 6, "nothing is written over"


def test_jaxs_work_is_waited_for(beside_all: Run) -> None:
    """On the CPU, too, JAX returns an array before it is computed."""
    found = beside_all("""
@jax.jit
def slow(a):
    return jax.lax.fori_loop(0, 60, lambda _, b: jnp.tanh(b @ b) * 0.5 + 0.25, a)
a = jnp.full((300, 300), 0.01, "float32")
slow(a).block_until_ready()
expected = np.asarray(slow(a))
for consumer in ("torch", "tensorflow", "numpy"):
    result[consumer] = [bool((values(to(slow(a), consumer)) == expected).all()) for _ in range(3)]
    result[consumer] += [bool((values(to(slow(a).reshape(-1), consumer)) == expected.reshape(-1)).all())]
""")
    assert set(map(tuple, found.values())) == {(True,) * 4} and len(found) == 3


def test_in_tensorflows_graphs(beside_all: Run) -> None:
    found = beside_all("""
x = torch.arange(64, dtype=torch.float32)
inside = {}

@tf.function
def symbolic(a):
    inside["from"] = refused(lambda: to(a, "torch"))
    inside["into"] = refused(lambda: to(x, "tensorflow"))
    inside["variable"] = refused(lambda: to(variable, "torch"))
    return a * 2

variable = tf.Variable(tf.range(4.0))
fed = to(x, "tensorflow")
result["function"] = symbolic(fed).numpy()[:3].tolist()
result.update(inside)

seen = []

def eager(a):
    seen.append([pointer(to(a, "torch")) == x.data_ptr(), pointer(a) == x.data_ptr()])
    return to(to(a, "torch") + 1, "tensorflow")

@tf.function
def through(a):
    return tf.py_function(eager, [a], tf.float32)

result["py_function"] = [through(fed).numpy()[:3].tolist(), seen]

def graph(a):
    w = tf.compat.v1.get_variable("w", shape=[], initializer=tf.compat.v1.ones_initializer(), use_resource=True)
    return a * (w + 2.0)

one = tf.compat.v1.wrap_function(graph, [tf.TensorSpec([64], tf.float32)])
y = one(fed)
back = to(y, "torch")
result["wrap_function"] = [back[:3].tolist(), pointer(back) == pointer(y)]
with tf.Graph().as_default():
    placeholder = tf.compat.v1.placeholder(tf.float32, [4])
    result["placeholder"] = refused(lambda: to(placeholder, "torch"))
    result["constant"] = refused(lambda: to(x, "tensorflow"))
del fed, back, y, one, symbolic, through
""")
    assert found["function"] == [0, 2, 4] and found["py_function"] == [[1, 2, 3], [[True, True]]]
    assert found["wrap_function"] == [[0, 3, 6], True]
    for name in ("from", "into", "variable", "placeholder", "constant"):
        _, _, reason, remedy, still_shared = found[name]
        assert "graph" in reason and "outside tf.function" in remedy and still_shared == 0, (name, found[name])


def test_a_variable_is_shared_with_its_present_value(beside_all: Run) -> None:
    found = beside_all("""
x = tf.Variable(tf.range(16.0))
y = to(x, "torch")
result["same"] = pointer(y) == pointer(x.value())
result["values"] = y.tolist() == list(range(16))
x.assign_add(tf.ones(16))
gc.collect()
result["afterwards"] = [y.tolist() == list(range(16)), y.tolist() == list(range(1, 17))]
""")
    assert found["same"] and found["values"]
    assert found["afterwards"] == [True, False], "assigning gives the variable other memory while it is shared"


def test_the_memory_lives_as_long_as_any_view(beside_all: Run) -> None:
    found = beside_all("""
import resource, time
expected = np.arange(1 << 20, dtype="float32")
for producer, consumer in PAIRS:
    x = make(producer, expected)
    y = to(x, consumer)
    z = to(y, producer)
    del x, y
    gc.collect()
    trash = [make(producer, np.full(1 << 20, -1, "float32")) for _ in range(4)]
    del trash
    assert (values(z) == expected).all(), (producer, consumer)
    result[f"{producer} {consumer}"] = len(lifetimes._open)
    del z
    gc.collect()
    assert not lifetimes._open
import weakref
for producer in ("numpy",):  # of PyTorch's a tensor of its own is kept
    for consumer in NAMES:
        if consumer != producer:
            x = make(producer, np.arange(16, dtype="float32"))
            gone = weakref.ref(x)
            y = to(x, consumer)
            del x
            gc.collect()
            assert gone() is not None
            del y
            gc.collect()
            assert gone() is None, (producer, consumer)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
big = np.zeros(4 << 20, "float32")
growth = {}
for producer, consumer in PAIRS:
    for round in range(26):
        if round == 10:
            before = resident()
        y = to(make(producer, big), consumer)
        assert values(y)[-1] == 0
        del y
    gc.collect()
    end = time.monotonic() + 10  # threads of the frameworks give memory back a moment later
    while (grown := (resident() - before) >> 20) > 120 and time.monotonic() < end:
        time.sleep(0.05)
    growth[f"{producer} {consumer}"] = grown
result["growth"] = growth
""")
    growth = found.pop("growth")
    assert set(found.values()) == {2} and len(found) == len(PAIRS)
    assert {pair: mib for pair, mib in growth.items() if mib > 120} == {}, "15 times 16 MiB were handed over"


def test_many_hand_overs_leave_nothing(beside_all: Run) -> None:
    found = beside_all("""
arrays = {name: make(name, np.arange(64, dtype="float32")) for name in NAMES}
import resource, tracemalloc
def once():
    for producer, consumer in PAIRS:
        to(arrays[producer], consumer)
for _ in range(50):
    once()
gc.collect()
tracemalloc.start()
before = tracemalloc.get_traced_memory()[0]
for _ in range(300):
    once()
gc.collect()
result["bytes"] = tracemalloc.get_traced_memory()[0] - before
result["open"] = len(lifetimes._open)
""")
    assert found["open"] == 0 and found["bytes"] < 100_000, "of 3,600 hand-overs"


def test_threads_hand_over_at_once(beside_all: Run) -> None:
    found = beside_all("""
import threading, random
errors = []
shared = {name: make(name, np.arange(64, dtype="float32")) for name in NAMES}
def work(seed):
    pick = random.Random(seed)
    kept = []
    try:
        for number in range(300):
            producer, consumer = pick.choice(PAIRS)
            x = shared[producer] if pick.random() < 0.5 else make(producer, np.arange(64, dtype="float32"))
            y = to(x, consumer, copy=pick.choice([None, False, True]))
            assert last_route().consumer == consumer
            kept.append(y)
            if len(kept) > 8:
                gone = kept.pop(pick.randrange(len(kept)))
                assert float(values(gone)[63]) == 63
    except BaseException as error:
        errors.append(repr(error))
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
gc.collect()
result["errors"], result["open"] = errors, len(lifetimes._open)
""")
    assert found == {"errors": [], "open": 0}


def test_views_made_on_one_thread_may_die_on_another(beside_all: Run) -> None:
    found = beside_all("""
import threading
for producer, consumer in PAIRS:
    views = [to(make(producer, np.arange(64, dtype="float32")), consumer) for _ in range(5)]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
gc.collect()
result["open"] = len(lifetimes._open)
""")
    assert found == {"open": 0}


def test_streams_and_devices_of_the_host(beside_all: Run) -> None:
    found = beside_all("""
def error(call):
    try:
        call()
    except ValueError as error:
        return str(error)
x = make("torch", np.zeros(4, "float32"))
result["tensorflow"] = error(lambda: to(x, "tensorflow", stream=0))
result["name"] = error(lambda: to(x, "pytorch"))
result["cupy"] = refused(lambda: to(x, "cupy"))
result["device"] = refused(lambda: to(x, "jax", device=0))
""")
    assert "chooses its streams itself" in found["tensorflow"] and "fix:" in found["tensorflow"]
    assert "did you mean 'torch'" in found["name"]
    assert "host memory" in found["cupy"][2] and "copy=True uploads it" in found["cupy"][3]
    assert "it lies on the host, not on cuda:0" in found["device"][2]


def test_capsules_of_torch_are_read_as_torch_describes_them(beside_all: Run) -> None:
    found = beside_all("""
from memguard._frameworks.arrays import dlpack
from memguard.exchange.adapters import registry
kinds = [torch.zeros(3, 4), torch.zeros(3, 4).T, torch.zeros(8)[2:], torch.zeros(0, 3), torch.tensor(1.0),
         torch.zeros(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.complex64),
         torch.zeros(4, dtype=torch.float8_e5m2)]
for x in kinds:
    offered = registry.by_name("torch").offer(x).view
    for capsule in (torch.utils.dlpack.to_dlpack(x), x.__dlpack__(max_version=(1, 0)), x.__dlpack__()):
        view = dlpack.read(capsule)
        assert view._replace(strides=()) == offered._replace(strides=()), (view, offered)
        assert view.strides == offered.strides or view.compact and offered.compact, (view, offered)
used = torch.utils.dlpack.to_dlpack(kinds[0])
torch.utils.dlpack.from_dlpack(used)
try:
    dlpack.read(used)
except dlpack.BadCapsule as error:
    result["used"] = str(error)
""")
    assert "used before" in found["used"]


def test_subclasses_and_foreign_arrays(beside_all: Run) -> None:
    found = beside_all("""
class Mine(torch.Tensor):
    pass
x = torch.arange(16.0).as_subclass(Mine)
result["subclass"] = outcome(x, "jax", np.arange(16, dtype="float32"))
class Foreign:
    def __init__(self, of):
        self.of = of
    def __dlpack__(self, **how):
        return self.of.__dlpack__(**how)
    def __dlpack_device__(self):
        return self.of.__dlpack_device__()
plain = aligned(np.arange(16, dtype="float32"))
for consumer in NAMES:
    z = to(Foreign(plain), consumer)
    result[consumer] = [pointer(z) == plain.ctypes.data, bool((values(z) == plain).all()), last_route().producer]
    del z
class Broken(Foreign):
    def __dlpack__(self, **how):
        raise BufferError("not today")
result["broken"] = refused(lambda: to(Broken(plain), "torch"))
""")
    assert found["subclass"] == "shared" and "not today" in found["broken"][2]
    for consumer in NAMES:
        assert found[consumer] == [True, True, "test"], "named by the module it is of"


TESTS = Path(__file__).parents[1]


def test_the_fake_arrays_have_only_names_of_the_real_ones(beside_all: Run) -> None:
    """`tests/contract/fake_arrays.py` against the real frameworks."""
    found = beside_all(f"""
import sys
sys.path += [{str(TESTS / "unit")!r}, {str(TESTS / "contract")!r}]
import fake_arrays, gpu_clocks, types
fake_arrays.World(gpu_clocks.Driver())
import cupy, numba.cuda
from numba.cuda.cudadrv.devicearray import DeviceNDArray
real = {{"torch": torch.zeros(2), "tensorflow": tf.zeros(2), "jax": jnp.zeros(2), "cupy": cupy.ndarray,
         "numba.cuda": DeviceNDArray}}
lacking, seen = [], 0
def compare(fake, real, path):
    global seen
    for name in vars(fake):
        if not name.startswith("_"):
            seen += 1
            if not hasattr(real, name):
                lacking.append(path + "." + name)
            elif isinstance(vars(fake)[name], types.SimpleNamespace):
                compare(vars(fake)[name], getattr(real, name), path + "." + name)
for name, array in real.items():
    compare(fake_arrays.now.modules[name], sys.modules[name], name)
    for member in vars(fake_arrays.CLASSES[name.partition(".")[0]]):
        if member not in ("of", "named", "from_dlpack", "to_dlpack", "as_cuda_array") and not hasattr(array, member):
            lacking.append(name + " array." + member)
result["lacking"], result["seen"] = lacking, seen
""")
    assert found["lacking"] == ["numba.cuda array.dtype"], "which its instances have"
    assert found["seen"] > 20


EXIT = """
import os, sys
from host_arrays import *
kept = {}
for producer, consumer in PAIRS:
    x = make(producer, np.arange(64, dtype="float32"))
    kept[producer, consumer] = [to(x, consumer), to(to(x, consumer), producer)]
cycle = [to(torch.zeros(4), "numpy")]
cycle.append(cycle)
import builtins
builtins.kept_for_ever = [to(torch.zeros(16), name) for name in ("tensorflow", "jax", "numpy")]
print("views", sum(map(len, kept.values())), len(lifetimes._open) >= 36)
"""


def test_views_of_all_frameworks_may_outlive_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EXIT], capture_output=True, text=True, timeout=120, env=environment()
    )
    noise = ("WARNING: All log", "I0000 ", "W0000 ", "E0000 ")
    said = [line for line in done.stderr.splitlines() if line and not line.startswith(noise)]
    assert (done.returncode, done.stdout, said) == (0, "views 24 True\n", [])


def test_a_view_survives_when_its_tensor_gets_other_memory(beside_all: Run) -> None:
    found = beside_all("""
ways = {}
for consumer in ("numpy", "tensorflow", "jax"):
    x = torch.full((1 << 16,), 7.0)
    y = to(x, consumer)
    x.data = torch.zeros(1)
    trash = [torch.full((1 << 16,), float(n)) for n in range(8)]
    ways[f"data {consumer}"] = bool((values(y) == 7).all())
layer = torch.nn.Linear(256, 256).requires_grad_(False)
layer.weight.fill_(3.0)
y = to(layer.weight, "numpy")
layer.double()
trash += [torch.full((256, 256), float(n)) for n in range(8)]
ways["module"] = bool((y == 3).all())
result["ways"] = ways
result["kept"] = len(lifetimes._open)
""")
    assert all(found["ways"].values()), found["ways"]


def test_arrays_of_too_many_dimensions_are_refused(beside_all: Run) -> None:
    found = beside_all("""
for producer, x in (("torch", torch.ones([1] * 70)), ("tensorflow", tf.ones([1] * 200))):
    for consumer in ("numpy", "jax"):
        try:
            to(x, consumer)
        except CannotShare as error:
            result[f"{producer} {consumer}"] = error.reason, error.remedy
""")
    assert len(found) == 4
    assert all("dimensions, and NumPy allows at most 64" in reason and remedy == "reshape it"
               for reason, remedy in found.values())  # fmt: skip


def test_a_refusal_inside_a_tf_function_stays_cannot_share(beside_all: Run) -> None:
    found = beside_all("""
@tf.function
def inside(x):
    return to(x, "torch")
try:
    inside(tf.ones(4))
except CannotShare as error:
    result["reason"] = error.reason
""")
    assert "graph" in found["reason"]
