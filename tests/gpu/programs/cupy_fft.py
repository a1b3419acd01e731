"""The plan of a large FFT allocates a work area as large as its data."""

import cupy
from cupyx.scipy import fft, fftpack

signal = cupy.zeros(1 << 27, cupy.complex64)
print("step 0", flush=True)
plan = fftpack.get_fft_plan(signal)
print("step 1", flush=True)
with plan:
    spectrum = fft.fft(signal)
print("done", spectrum.shape)
