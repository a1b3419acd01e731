"""An inference server that captures one CUDA graph for each batch size, over one array of images."""

import torch
from torch import nn

model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.GELU()))).cuda()
images = torch.randn(12 * 8192, 1024, device="cuda")
stream = torch.cuda.Stream()
graphs = []
with torch.no_grad():
    with torch.cuda.stream(stream):
        model(images[:64])
    torch.cuda.synchronize()
    for number in range(1, 13):
        print("capturing", number, flush=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            answer = model(images[: number * 8192])
        graphs.append((graph, answer))
        print("step", number, flush=True)
print("done")
