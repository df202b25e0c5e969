"""What is left of a recording on a GPU that fails."""

import pytest
import torch

from toolkit.runtime.cuda_graphs import CudaRecorder


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_failed_capture_leaves_the_stream_and_later_captures():
    device = torch.device("cuda", torch.cuda.current_device())
    recorder = CudaRecorder(device)
    x = torch.ones(4, device=device)
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        recorder.record(lambda: x.sum().item())
    assert torch.cuda.current_stream() == before
    doubled, replay = recorder.record(lambda: x * 2)
    replay()
    assert doubled.tolist() == [2.0] * 4
