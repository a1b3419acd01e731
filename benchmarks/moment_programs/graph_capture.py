"""An inference server that captures one CUDA graph for each size of batch."""

import torch
from torch import nn

model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.GELU()))).cuda()
graphs = []
with torch.no_grad():
    for number in range(1, 13):
        images = torch.randn(number * 8192, 1024, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            model(images[:64])
        stream.synchronize()
        print("capturing", flush=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = model(images)
        graphs.append((graph, images, answer))
        print("step", number, flush=True)
print("done")
