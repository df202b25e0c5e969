#!/bin/sh
# Builds Horovod 0.28.1 for the PyTorch of this environment; it has no wheel. Needs cmake and g++,
# and takes some minutes. CPU messages by gloo; for NCCL: HOROVOD_GPU_OPERATIONS=NCCL sh ...
#
#     source .venv/bin/activate; sh experiments/install_horovod.sh
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python -m pip download --no-binary :all: --no-deps --no-build-isolation horovod==0.28.1
tar xf horovod-0.28.1.tar.gz
cd horovod-0.28.1
# Headers of PyTorch 2.11 and later are in C++20.
sed -i.old 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 20/' CMakeLists.txt horovod/torch/CMakeLists.txt
# Unless asked for, no CUDA: a CUDA build of PyTorch would need the whole toolkit here.
if [ -z "$HOROVOD_GPU_OPERATIONS" ]; then
    sed -i.old 's/print(True if ((torch.version.cuda .* else False)/print(False)/' \
        cmake/Modules/FindPytorch.cmake
fi
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
python -m pip install --no-build-isolation --no-deps .
python -m pip install cloudpickle psutil pyyaml packaging cffi
python -c "import horovod.torch"
